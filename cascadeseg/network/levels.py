"""A UNet's finest levels in slabs, for engines that run fixed graphs: only their skips stay in memory.

The finest levels hold most of a forward pass's memory, and see least far: each needs but a few cells of its neighbours.
So they go through memory slab by slab along z, down and up again, and only what lies below them is computed as a
whole. What a slab sees of its neighbours is computed twice, a third to a half of these levels; tiles, which need the
context of the whole network, would compute far more. In torch `streams` computes nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor

from cascadeseg.memory import give_back_freed_memory
from cascadeseg.network.unet import UNetConfig

SLAB_VOXELS = 1_000_000
"""Voxels of the image that are in work at any one time, about."""
NARROWER = 16
"""Samples of a coarser level hold more: 8 of the finer level's, and twice their channels."""
THINNEST_SLAB = 16
"""Samples along z; of thinner slabs most would be neighbours'."""
STREAMED_LEVELS = 2

Finish = Callable[[Tensor], Tensor]
"""What is done to each slab of logits, voxel by voxel: (K, ...) to (any, ...), whatever the order of the axes."""


@dataclass(frozen=True)
class Layers:
    """An image that is made where it is looked at, ``image[..., start:stop]``, and never in memory as a whole.

    Attributes:
        shape: (C, X, Y, Z).
        make: a range of slices to (C, X, Y, z) float32.
    """

    shape: tuple[int, int, int, int]
    make: Callable[[slice], Tensor]

    def __getitem__(self, where: tuple[EllipsisType, slice]) -> Tensor:
        return self.make(slice(*where[1].indices(self.shape[3])[:2]))

    def cut(self, z: slice) -> Layers:
        """The image of a range of slices, not made yet."""

        def make(inner: slice) -> Tensor:
            return self.make(slice(z.start + inner.start, z.start + inner.stop))

        return Layers((*self.shape[:3], z.stop - z.start), make)


Image = Tensor | Layers
"""(C, X, Y, Z) float32, in memory or made slab by slab."""


def unchanged(logits: Tensor) -> Tensor:
    """The logits themselves."""
    return logits


@dataclass(frozen=True)
class Slab:
    """Part of a long image along z.

    Attributes:
        kept: the slices that this slab gives.
        seen: these and their context on both sides.
    """

    kept: slice
    seen: slice

    @property
    def kept_of_seen(self) -> slice:
        """Where ``kept`` lies in an image of ``seen``."""
        return slice(self.kept.start - self.seen.start, self.kept.stop - self.seen.start)


class Parts(Protocol):
    """A network cut below its finest levels; every tensor is (C, X, Y, Z)."""

    @property
    def config(self) -> UNetConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of what is kept between the parts: what the network computes in, so that nothing is lost."""
        ...

    def descend(self, level: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """A level on the way down, level 0 from the image: its skip, and the input of the next level."""
        ...

    def beneath(self, x: Tensor) -> Tensor:
        """All levels below the streamed ones, down and up again: (C, X, Y, Z) to (K, X, Y, Z)."""
        ...

    def ascend(self, level: int, lower: Tensor, skip: Tensor) -> Tensor:
        """A level on the way up; of level 0 the logits, float32."""
        ...


def streamed_levels(config: UNetConfig) -> int:
    """How many levels go in slabs; none where InstanceNorm has to see all voxels at once."""
    return min(STREAMED_LEVELS, len(config.widths) - 1) if config.norm == "batch" else 0


def in_levels(parts: Parts, image: Image, finish: Finish, level: int = 0) -> Tensor:
    """Runs a network over an image, its finest levels in slabs.

    Args:
        parts: the network.
        image: (C, X, Y, Z), every axis a multiple of the network's stride; of other levels their input.
        finish: done to each slab of logits.
        level: where to start.

    Returns:
        (any, X, Y, Z): what ``finish`` makes of the logits; of other levels their features.
    """
    if level == streamed_levels(parts.config):
        return parts.beneath(image[..., :])
    skip, lower = _descend(parts, level, image)
    del image
    give_back_freed_memory()
    lower = in_levels(parts, lower, finish, level + 1)
    give_back_freed_memory()
    return _ascend(parts, level, lower, skip, finish)


def _descend(parts: Parts, level: int, x: Image) -> tuple[Tensor, Tensor]:
    cell, convolutions = cell_of(parts.config, level), parts.config.convolutions + (level == 0)
    skips: Tensor | None = None
    lowers: Tensor | None = None
    for slab, part in _seen(x, _slabs(x, 2 * cell, cell * convolutions, SLAB_VOXELS // NARROWER**level)):
        skip, lower = parts.descend(level, part)
        depth = x.shape[3]
        skips = put(skips, skip, slab, depth, cell, parts.dtype)
        lowers = put(lowers, lower, slab, depth, 2 * cell, parts.dtype)
    if skips is None or lowers is None:
        raise ValueError("an image without voxels")
    return skips, lowers


def _seen(x: Image, slabs: Iterator[Slab]) -> Iterator[tuple[Slab, Tensor]]:
    """Slabs with what they see; of an image that is made, what the slab before saw is not made again."""
    if isinstance(x, Tensor):
        yield from ((slab, x[..., slab.seen]) for slab in slabs)
        return
    before: tuple[int, Tensor] | None = None
    for slab in slabs:
        if before is None:
            part = x[..., slab.seen]
        else:
            made, part = before
            shared = part[..., part.shape[3] - (made - slab.seen.start) :]
            part = torch.cat([shared, x[..., made : slab.seen.stop]], dim=3)
        before = slab.seen.stop, part
        yield slab, part


def _ascend(parts: Parts, level: int, lower: Tensor, skip: Tensor, finish: Finish) -> Tensor:
    cell = cell_of(parts.config, level)
    features: Tensor | None = None
    for slab in _slabs(skip, 2, parts.config.convolutions, SLAB_VOXELS // NARROWER**level // cell**3):
        half = slice(slab.seen.start // 2, slab.seen.stop // 2)
        part = parts.ascend(level, lower[..., half], skip[..., slab.seen])
        kept = slice(slab.kept_of_seen.start * cell, slab.kept_of_seen.stop * cell)
        done = finish(part[..., kept]) if level == 0 else part[..., kept].to(parts.dtype)
        place = slice(slab.kept.start * cell, slab.kept.stop * cell)
        features = put(features, done, Slab(place, place), skip.shape[3] * cell, 1, done.dtype)
    if features is None:
        raise ValueError("an image without voxels")
    return features


def put(whole: Tensor | None, part: Tensor, slab: Slab, depth: int, shrunk: int, dtype: torch.dtype) -> Tensor:
    """What a slab gives, put in its place in the whole, whose samples are ``shrunk`` times larger than the input's."""
    if whole is None:
        whole = torch.empty((*part.shape[:3], depth // shrunk), dtype=dtype, device=part.device)
    here, there = slab.kept_of_seen, slab.kept
    whole[..., there.start // shrunk : there.stop // shrunk] = part[..., here.start // shrunk : here.stop // shrunk]
    return whole


def _slabs(x: Image, unit: int, reach: int, voxels: int) -> Iterator[Slab]:
    """Slabs of (C, X, Y, Z) along z whose bounds are multiples of ``unit``, each seeing ``reach`` more or better."""
    _, nx, ny, depth = x.shape
    context = -(-reach // unit) * unit
    length = max(THINNEST_SLAB, voxels // (nx * ny)) // unit * unit
    for start in range(0, depth, length):
        stop = min(start + length, depth)
        yield Slab(slice(start, stop), slice(max(0, start - context), min(depth, stop + context)))


def slab_samples(config: UNetConfig, layer: float) -> float:
    """Voxels in work at a time, of an image with so many in a slice."""
    return max(SLAB_VOXELS, THINNEST_SLAB * cell_of(config, 0) * layer)


def cell_of(config: UNetConfig, level: int) -> int:
    """Input samples of a level's own samples, along each axis."""
    return config.cell if level == 0 else 1
