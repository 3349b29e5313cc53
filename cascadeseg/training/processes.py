"""Devices, precision and processes, from Lightning Fabric.

Plain torch was weighed. Fabric brings what would be ours to keep otherwise: finding its place under torchrun, SLURM or
LSF, starting processes for several GPUs, autocast with loss scaling, and collectives that also work in one process.
Its DistributedDataParallel wrapper is *not* used: gradients are averaged once a step by the loop (`summed_gradients`),
after all processes have agreed that the step is to be taken. So no process can wait in a backward pass for one that ran
out of memory or of data, accumulation needs no ``no_sync``, and checkpointed blocks need no special case; for slim
networks (a few MB of gradients) the overlap that the wrapper would give is worth nothing. FSDP likewise: what fills the
memory here is activations, which it does not shard.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cascadeseg.errors import ConfigError
from cascadeseg.network.engine import fast_precision, find_device
from cascadeseg.training.config import OptimisationConfig
from cascadeseg.training.prefetch import Stopped

T = TypeVar("T")
FABRIC_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass(frozen=True)
class Processes:
    """How many processes work on a run.

    Attributes:
        devices: of each machine.
        nodes: machines.
    """

    devices: int = 1
    nodes: int = 1

    @property
    def count(self) -> int:
        return self.devices * self.nodes


def launched(numbers: OptimisationConfig, device: str, processes: Processes) -> Any:
    """A Fabric whose processes have found each other.

    Raises:
        ConfigError, DeviceError: what is asked for cannot be had.
    """
    place = find_device(device)
    precision = training_precision(numbers, place)
    fabric_class = _fabric_class()
    for name in ("lightning_fabric", "lightning.fabric"):  # its notices say what the run's environment.json says
        logging.getLogger(name).setLevel(logging.WARNING)
    chosen: int | list[int] = processes.devices
    if place.type == "cuda" and place.index is not None and processes.count == 1:
        chosen = [place.index]
    several = processes.count > 1
    fabric = fabric_class(
        accelerator=place.type,
        devices=chosen,
        num_nodes=processes.nodes,
        strategy="ddp" if several else "auto",
        precision=FABRIC_PRECISION[precision],
    )
    if numbers.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it by name
    fabric.launch()
    torch.backends.cudnn.benchmark = numbers.cudnn_benchmark and not numbers.deterministic
    torch.use_deterministic_algorithms(numbers.deterministic)
    return fabric


def training_precision(numbers: OptimisationConfig, place: torch.device) -> str:
    """``fp32``, ``bf16`` or ``fp16``.

    Raises:
        ConfigError: fp16 is asked for where there is no loss scaling.
    """
    if numbers.precision == "fp16" and place.type != "cuda":
        raise ConfigError("optimisation.precision", f"fp16 on {place.type}", "a CUDA device", "use bf16 or fp32")
    if numbers.precision != "auto":
        return numbers.precision
    return fast_precision(place, training=True)


def _fabric_class() -> Any:
    """Fabric, from its own small package or from Lightning's large one."""
    for name in ("lightning_fabric", "lightning.fabric"):
        with suppress(ImportError):
            return importlib.import_module(name).Fabric
    raise ConfigError("train", "lightning-fabric is not installed", remedy="pip install lightning-fabric")


def is_first() -> bool:
    """Whether this process of a run is the one that speaks and writes, also when the run has ended."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


@torch.no_grad()
def summed_gradients(fabric: Any, network: nn.Module) -> None:
    """Every process gets the sum of all processes' gradients, in one message; one without any adds zeros."""
    if fabric.world_size == 1:
        return
    for parameter in network.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    _assign(gradients, fabric.all_reduce(_flat(gradients), reduce_op="sum"))


@torch.no_grad()
def averaged_statistics(fabric: Any, network: nn.Module) -> None:
    """Every process gets the mean of all processes' BatchNorm statistics."""
    buffers = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    if fabric.world_size > 1 and buffers:
        _assign(buffers, fabric.all_reduce(_flat(buffers), reduce_op="mean"))


def worst(fabric: Any, values: Iterable[float]) -> list[float]:
    """The largest of each value over all processes."""
    numbers = list(values)
    if fabric.world_size == 1:
        return numbers
    together: list[float] = fabric.all_reduce(torch.tensor(numbers, device=fabric.device), reduce_op="max").tolist()
    return together


def agreed(fabric: Any, work: Callable[[], T]) -> T:
    """What each process makes of some work; where it fails in one of them, perhaps the only one that has anything to
    do, it fails in all, so that none waits for one that is gone.

    Raises:
        Stopped: in one of them the run is to end.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    stopped = isinstance(error, Stopped)
    failed, stopped = map(bool, worst(fabric, [float(error is not None and not stopped), float(stopped)]))
    if failed:
        raise failure(None if isinstance(error, Stopped) else error)
    if stopped:
        raise Stopped
    return result


def failure(error: Exception | None) -> Exception:
    """What a process raises when one of them, perhaps another, has failed."""
    return error or ConfigError("train", "another process of this run failed", "", "its message says why")


def summed(fabric: Any, values: Tensor) -> Tensor:
    """The sum of values over all processes."""
    total: Tensor = fabric.all_reduce(values, reduce_op="sum") if fabric.world_size > 1 else values
    return total


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).float() for tensor in tensors])


def _assign(tensors: list[Tensor], flat: Tensor) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].reshape(tensor.shape))
        start += tensor.numel()
