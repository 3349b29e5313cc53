"""An engine kept within memory: tiles where the whole does not fit, and a way on when memory runs out."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Protocol, Self

import torch
from torch import Tensor

from cascadeseg.memory import is_out_of_memory
from cascadeseg.network.engine import DTYPES, Engine, Precision, give_back
from cascadeseg.network.model import Stage
from cascadeseg.network.slabs import Finish, Image, in_slabs, unchanged
from cascadeseg.network.streams import cell_of, streamed_levels

WORK_BYTES = 35.0
"""Memory of streamed levels for each voxel in work, in half precision (measured)."""
WORK_VOXELS, WORK_SLICES, WORK_CONTEXT = 1_000_000, 16, 16
"""Voxels that streamed levels have in work, samples along z at least, and slices beside them, for a plan."""
LIVE_TENSORS = 5
"""Full-width tensors that a forward pass holds at once, its workspace included (measured)."""


class Runner(Protocol):
    """What runs a stage's network: (C, X, Y, Z) to logits (K, X, Y, Z)."""

    @property
    def stage(self) -> Stage: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def precision(self) -> str: ...

    @property
    def shareable(self) -> bool:
        """Whether two threads may use it at a time, to their profit."""
        ...

    streamed: bool
    """Whether its finest levels go through memory a few slices at a time."""

    def __call__(self, image: Image, finish: Finish = unchanged) -> Tensor: ...


def bytes_per_voxel(stage: Stage, precision: str) -> float:
    """Memory of a whole forward pass for each voxel of the image: image, widest level and logits.

    Not all logits are there at once; that leaves room for what an allocator keeps beside its tensors.
    """
    unet, width = stage.unet, DTYPES[precision].itemsize
    finest = unet.widths[0] / unet.cell**3
    return unet.in_channels * (4 + 2 * width) + LIVE_TENSORS * finest * width + unet.out_channels * (4 + width)


def pass_mb(engine: Runner, voxels: float, layer: float, streamed: bool | None = None) -> float:
    """Memory of a forward pass.

    Args:
        engine: what runs it.
        voxels: of the image.
        layer: voxels of one of its slices.
        streamed: whether its finest levels go a few slices at a time; None: as the engine is set.
    """
    unet, levels = engine.stage.unet, streamed_levels(engine.stage.unet)
    if not (engine.streamed if streamed is None else streamed) or not levels:
        return voxels * bytes_per_voxel(engine.stage, engine.precision) / 1e6
    width = DTYPES[engine.precision].itemsize
    shrunk = [(unet.cell * 2.0**level) ** 3 for level in range(levels + 1)]
    skips = sum(unet.widths[level] / shrunk[level] for level in range(levels))
    lowers = sum(unet.widths[level] / shrunk[level] for level in range(1, levels + 1))
    lungs = min(2, unet.out_channels)  # what `Finish` leaves of a piece's logits, in half precision
    kept = voxels * (2 * lungs + width * (skips + lowers))
    in_work = min(voxels, max(WORK_VOXELS, WORK_SLICES * cell_of(unet, 0) * layer) + WORK_CONTEXT * layer)
    return (kept + in_work * WORK_BYTES * width / 2) / 1e6


class BoundedEngine:
    """An engine that keeps within a limit by cutting long images into tiles that together equal the whole.

    Where memory runs out all the same it goes on a few slices at a time, then with smaller tiles, then in half
    precision, then on the processor: only the image at hand is computed again. What it had to do stays in ``notes``.
    It goes on so to the end of the scan: what one image had no memory for, the rest of its scan has not, either. So
    each scan has an engine of its own (`for_one_scan`), and two in two threads share the network alone. Device,
    precision and whatever a plan reckons with stay those of the engine that was chosen.
    """

    def __init__(self, stage: Stage, device: torch.device, precision: Precision = "auto") -> None:
        self.stage = stage
        self.device = device
        self._engine: Runner = Engine(stage, device, precision)
        self._instead: Runner | None = None
        self.precision: str = self._engine.precision
        self.largest_tile: float = float("inf")
        """Voxels, context included, that a plan lets go through the network at a time."""
        self._tried_tile: float = float("inf")
        """The same, of the tiles that memory which ran out has led to, on the engine that runs now."""
        self.notes: list[str] = []

    def for_one_scan(self, streamed: bool, largest_tile: float = float("inf")) -> Self:
        """The same network for one scan: as a plan has it, the engine that was chosen, and no notes.

        Args:
            streamed: as in `Runner`.
            largest_tile: as the attribute.
        """
        mine = copy(self)
        mine._engine = copy(self._engine)  # which keeps whether it is streamed
        mine._instead, mine.notes, mine.largest_tile, mine._tried_tile = None, [], largest_tile, float("inf")
        mine.streamed = streamed
        return mine

    def __call__(self, image: Image, finish: Finish = unchanged) -> Tensor:
        """Logits of an image of any size: (C, X, Y, Z) float32 to (K, X, Y, Z) float32, or what ``finish`` makes."""
        length = self.tile_length(image.shape)
        while True:
            try:
                run = partial(self._running, finish=finish)
                return in_slabs(run, image, length=length, context=self.stage.unet.context)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                ran_out = error.with_traceback(None)  # whose frames hold on to the tensors
            length = self._next_rung(length, image.shape, ran_out)

    @property
    def _running(self) -> Runner:
        return self._instead or self._engine

    @property
    def shareable(self) -> bool:
        return self._engine.shareable

    @property
    def streamed(self) -> bool:
        return self._running.streamed

    @streamed.setter
    def streamed(self, streamed: bool) -> None:
        self._running.streamed = streamed or self._running.device.type == "cpu"

    def tile_length(self, shape: tuple[int, ...]) -> int:
        """Slices kept of each tile of a (C, X, Y, Z) image: all, or what the limits leave beside the context."""
        _, nx, ny, nz = shape
        stride, largest = self.stage.unet.stride, min(self.largest_tile, self._tried_tile)
        if nx * ny * nz <= largest:
            return nz
        room = int(largest / (nx * ny)) - 2 * self.stage.unet.context
        return max(stride, room // stride * stride)

    def _next_rung(self, length: int, shape: tuple[int, ...], error: Exception) -> int:
        """A tile length that may fit, on an engine that may be another one now; the scan's next image begins with it.

        Args:
            length: of the tiles that there was no memory for.
            shape: (C, X, Y, Z) of the image.
            error: what said so, raised where there is no way on.
        """
        give_back(self.device)
        if not self.streamed and streamed_levels(self.stage.unet):
            self._note(f"stage of {self.stage.view.spacing_mm:g} mm a few slices at a time")
            self.streamed = True
            return length
        stride = self.stage.unet.stride
        _, nx, ny, depth = shape
        shorter = length // 2 // stride * stride
        seen = shorter + 2 * self.stage.unet.context
        if shorter and depth > seen:
            self._note(f"stage of {self.stage.view.spacing_mm:g} mm in tiles of {shorter} slices")
            self._tried_tile = nx * ny * seen
            return shorter
        here = self._running.device
        if here.type == "cpu":
            raise error
        if self._running.precision == "fp32":
            self._note("half precision")
            self._instead = Engine(self.stage, here, "fp16")
            self.streamed = True
        else:
            self._note("the processor")
            self._instead = Engine(self.stage, torch.device("cpu"))
        self._tried_tile = float("inf")
        return self.tile_length(shape)

    def _note(self, what: str) -> None:
        self.notes.append(f"{self._running.device} ran out of memory; went on with {what}")
