"""What `benchmark.py` measures inside one process, each part in a fresh one; prints JSON.

python scripts/benchmark_parts.py warm scan.nii.gz --repeat 3
python scripts/benchmark_parts.py one-by-one a.nii.gz b.nii.gz
python scripts/benchmark_parts.py bound scan.nii.gz
python scripts/benchmark_parts.py agreement scan.nii.gz
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal import igzip
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cascadeseg.cascade.pipeline import Segmentation, Segmenter
from cascadeseg.formats import read_scan, write_labels
from cascadeseg.labels import LUNGS
from cascadeseg.memory import peak_memory_mb
from cascadeseg.network import Engine, Stage, UNet, UNetConfig, View, find_device, stage_of
from cascadeseg.network.bounded import Runner
from cascadeseg.network.slabs import Image

PROBE = UNetConfig(widths=(64,), blocks=2, stem="convolution")
"""Hardly anything but 3x3x3 convolutions of 64 channels: what the machine does best."""
PROBE_SHAPE = (1, 64, 64, 64)


def main() -> int:
    """Prints one part's results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("scans", nargs="+", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model")
    parser.add_argument("--max-vram", type=float)
    parser.add_argument(
        "--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms for each new shape"
    )
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    json.dump(PARTS[options.part](options), sys.stdout)
    return 0


def warm(options: argparse.Namespace) -> dict[str, Any]:
    """One scan again and again by one `Segmenter`, the first time not counted."""
    segmenter = _segmenter(options)
    _segmented(segmenter, options.scans[0])
    _reset_gpu()
    walls, steps = [], []
    for _ in range(options.repeat):
        start = time.perf_counter()
        result, seconds = _segmented(segmenter, options.scans[0])
        walls.append(time.perf_counter() - start)
        steps.append(seconds)
    return {
        "wall_s": walls,
        "seconds": {step: statistics.median(s[step] for s in steps) for step in steps[0]},
        "device": result.device,
        "precision": result.precision,
        "peak_mb": peak_memory_mb(),
        "gpu_mb": _gpu_peak_mb(),
    }


def one_by_one(options: argparse.Namespace) -> dict[str, Any]:
    """Several scans, one warm call after another, each read and written."""
    segmenter = _segmenter(options)
    _segmented(segmenter, options.scans[0])
    start, cpu = time.perf_counter(), time.process_time()
    for scan in options.scans:
        _segmented(segmenter, scan)
    return {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
        "scans": len(options.scans),
        "peak_mb": peak_memory_mb(),
    }


def bound(options: argparse.Namespace) -> dict[str, Any]:
    """The least that a scan can take here: decompress it, do its convolutions at the best rate, compress its mask.

    The convolutions are those of the images that really go through the networks, tiles with their context included.
    """
    segmenter = _segmenter(options)
    shapes: list[tuple[Stage, tuple[int, ...]]] = []
    for engine in (segmenter.locator, segmenter.refiner):
        engine._engine = _Recorded(engine._engine, shapes)
    result, _ = _segmented(segmenter, options.scans[0])
    rate = _convolution_rate(segmenter.device, options)
    flops = sum(_flops(stage, shape) for stage, shape in shapes)
    packed = Path(options.scans[0]).read_bytes()
    gzipped = packed[:2] == b"\x1f\x8b"
    mask = np.asarray(result.labels).tobytes(order="A")
    parts = {
        "decompress": _median_s(lambda: igzip.decompress(packed), options.repeat) if gzipped else 0.0,
        "convolutions": flops / rate,
        "compress": _median_s(lambda: igzip.compress(mask, compresslevel=1), options.repeat),
    }
    return {"seconds": parts, "bound_s": sum(parts.values()), "gflop": flops / 1e9, "gflop_per_s": rate / 1e9}


def agreement(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Dice of each lung's whole mask against float32 on the processor, for every precision at hand."""
    from phantoms import dice  # here, as what it brings along would count as memory of the other parts

    scan = read_scan(options.scans[0])
    device = find_device(options.device)
    on_cpu = device.type == "cpu"
    reference = Segmenter(options.model, device="cpu", precision="fp32").segment(scan).labels
    rows = []
    for precision in ("fp32", "bf16") if on_cpu else ("fp32", "bf16", "fp16"):
        labels = Segmenter(options.model, device=str(device), precision=precision).segment(scan).labels
        scores = {lung.name: dice(labels, reference, lung.value) for lung in LUNGS}
        rows.append({"device": str(device), "precision": precision, "dice": scores})
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "warm": warm,
    "one-by-one": one_by_one,
    "bound": bound,
    "agreement": agreement,
}


class _Recorded:
    """An engine that notes what goes through it."""

    def __init__(self, engine: Runner, shapes: list[tuple[Stage, tuple[int, ...]]]) -> None:
        self._engine, self._shapes = engine, shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __copy__(self) -> _Recorded:
        return self  # of every scan

    def __call__(self, image: Image, *rest: Any, **named: Any) -> Tensor:
        self._shapes.append((self._engine.stage, tuple(image.shape)))
        return self._engine(image, *rest, **named)


def _segmenter(options: argparse.Namespace) -> Segmenter:
    return Segmenter(options.model, device=options.device, max_vram_gb=options.max_vram)


def _segmented(segmenter: Segmenter, path: Path) -> tuple[Segmentation, dict[str, float]]:
    """A scan read, segmented and written; and the seconds of each step."""
    result = segmenter.segment(path)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_labels(result.labels, Path(folder) / "mask.nii.gz", result.scan)
    return result, {**result.seconds, "write": time.perf_counter() - start}


def _convolution_rate(device: torch.device, options: argparse.Namespace) -> float:
    """FLOP/s of the probe on the engine in use."""
    stage = stage_of(View(1.0), UNet(PROBE).eval())
    engine = Engine(stage, device)
    image = torch.zeros(PROBE_SHAPE)
    engine(image)

    def run() -> None:
        engine(image)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return _flops(stage, PROBE_SHAPE) / _median_s(run, options.repeat)


def _flops(stage: Stage, shape: tuple[int, ...]) -> float:
    """Of one image (C, X, Y, Z), padded to the stride; nothing is computed."""
    stride = stage.unet.stride
    padded = [-(-n // stride) * stride for n in shape[1:]]
    with torch.device("meta"):
        network = UNet(replace(stage.unet, deep_supervision=False)).eval()
        image = torch.empty(1, shape[0], *padded)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(image)
    return float(counter.get_total_flops())


def _median_s(run: Callable[[], Any], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _reset_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _gpu_peak_mb() -> float | None:
    """What torch took of the GPU at its largest, its unused reserve included; the CUDA context comes on top."""
    return torch.cuda.max_memory_reserved() / 1e6 if torch.cuda.is_available() else None


if __name__ == "__main__":
    raise SystemExit(main())
