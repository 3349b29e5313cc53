"""Running a stage's network: device, precision and memory format."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from cascadeseg.errors import DeviceError
from cascadeseg.memory import give_back_freed_memory
from cascadeseg.network.blocks import has_one_pass
from cascadeseg.network.model import Stage
from cascadeseg.network.slabs import Finish, Image, Layers, unchanged
from cascadeseg.network.streams import finished, in_streams, streamed_levels
from cascadeseg.parallel import threads_to_share

Precision = Literal["auto", "fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def find_device(name: str) -> torch.device:
    """The torch device of ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises:
        DeviceError: it is not a device, or this machine has none of it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device.type not in count:
        raise DeviceError("--device", name, "auto, cpu, cuda, cuda:N or mps")
    if count[device.type] <= (device.index or 0):
        there = f"{count[device.type]} {device.type} devices" if count[device.type] else f"no {device.type} device"
        raise DeviceError("--device", f"{name}, but this machine has {there}", "", "use --device auto or cpu")
    return device


def give_back(device: torch.device) -> None:
    """Returns what was freed of a device's memory and of the process's to the system.

    torch's allocators keep freed blocks and cut them up for smaller tensors: what one reserved of a GPU grew from step
    to step to twice what its tensors ever took.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    give_back_freed_memory()


def fast_precision(device: torch.device, *, training: bool = False) -> Literal["fp32", "bf16", "fp16"]:
    """The precision that a device is really fast at.

    On a CPU bfloat16 pays only where the processor multiplies it natively: with Intel's AMX (3 times faster than
    float32, measured), and on AMD's AVX-512 BF16 (2 times, measured on Zen 5). On Intel's AVX-512 BF16 without AMX it
    is *slower* than float32 at inference (0.85 times as fast, measured on Emerald Rapids), but at training as fast
    (stage 1) to 1.6 times faster (stage 2), in 0.4 of the memory. Where it is emulated it is 4-5 times slower.

    Args:
        device: where the network runs.
        training: whether it runs backwards, too.
    """
    if device.type == "cuda":
        return "bf16" if _gpu_multiplies_bfloat16(device) else "fp16"
    if device.type == "mps":
        return "fp32" if training else "fp16"
    return "bf16" if _cpu_multiplies_bfloat16(training) else "fp32"


def _gpu_multiplies_bfloat16(device: torch.device) -> bool:
    """Asked of the device itself: `torch.cuda.is_bf16_supported` speaks of the current one, the first of several."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _cpu_multiplies_bfloat16(training: bool) -> bool:
    flags = _cpu_flags()
    return "amx_bf16" in flags or ("avx512_bf16" in flags and (training or "AuthenticAMD" in flags))


def _cpu_flags() -> str:
    """Maker and instructions, as Linux tells them; elsewhere nothing."""
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            return file.read(16384)
    except OSError:
        return ""


class Engine:
    """A stage's network, ready to run on a device.

    Attributes:
        streamed: whether its finest levels go through memory a few slices at a time (`streams`): always on a processor;
            elsewhere for the sake of memory, at the price of many small pieces of work.
    """

    def __init__(self, stage: Stage, device: torch.device, precision: Precision = "auto") -> None:
        """Loads a network onto a device.

        Args:
            stage: the network, and what it sees.
            device: where it runs.
            precision: ``auto`` takes what the device is fast at.

        Raises:
            DeviceError: there is no precision of that name.
        """
        if precision not in (known := get_args(Precision)):
            raise DeviceError("precision", str(precision), f"one of {', '.join(known)}")
        self.stage = stage
        self.device = device
        self.precision = fast_precision(device) if precision == "auto" else precision
        network = stage.network()
        self._dtype = DTYPES[self.precision]
        network.fold(one_pass=device.type == "cpu" and has_one_pass(self._dtype))
        network.transpose()
        self.shareable = device.type == "cpu" and threads_to_share()
        self.streamed = device.type == "cpu"
        self._network = network.to(device, self._dtype).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    @torch.inference_mode()
    def __call__(self, image: Image, finish: Finish = unchanged) -> Tensor:
        """Logits of an image of any size.

        Args:
            image: (C, X, Y, Z) float32, zero where there is air.
            finish: done to the logits, a slab of any thickness at a time; see `levels.Finish`.

        Returns:
            (out_channels, X, Y, Z) float32 logits on the engine's device, or what ``finish`` makes of them.
        """
        padded, (nx, ny, nz) = padded_to(image, self.stage.unet.stride)
        if self.streamed and streamed_levels(self.stage.unet):
            logits = in_streams(self._network, padded, finish)
        else:
            batch = padded[..., :].transpose(1, 3)[None].to(self.device, self._dtype)
            features = self._network.features(batch.contiguous(memory_format=torch.channels_last_3d))
            logits = finished(self._network, features, finish)[0].transpose(1, 3)
        return logits[:, :nx, :ny, :nz]


def padded_to(image: Image, stride: int) -> tuple[Image, tuple[int, int, int]]:
    """Pads (C, X, Y, Z) with zeros at the far ends to multiples of ``stride``; the result and the shape before."""
    channels, nx, ny, nz = image.shape
    px, py, pz = (-(-n // stride) * stride for n in (nx, ny, nz))

    def padded(z: slice) -> Tensor:
        inside = image[..., z.start : min(z.stop, nz)]
        return F.pad(inside, (0, z.stop - z.start - inside.shape[3], 0, py - ny, 0, px - nx))

    if (px, py, pz) == (nx, ny, nz):
        return image, (nx, ny, nz)
    if isinstance(image, Tensor):
        return padded(slice(0, pz)), (nx, ny, nz)
    return Layers((channels, px, py, pz), padded), (nx, ny, nz)
