"""Images that are made slab by slab along z, and networks that see them so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

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


def slabs_of(depth: int, length: int, context: int) -> list[Slab]:
    """Slabs that cover ``depth`` slices, one where ``context`` would be most of what they see.

    Args:
        depth: slices of the image.
        length: slices kept of each slab, a multiple of the network's stride.
        context: slices added on both sides, a multiple of the network's stride.
    """
    if depth <= length + 2 * context:
        return [Slab(slice(0, depth), slice(0, depth))]
    kept = [slice(start, min(start + length, depth)) for start in range(0, depth, length)]
    return [Slab(part, slice(max(0, part.start - context), min(depth, part.stop + context))) for part in kept]


def in_slabs(run: Callable[[Image], Tensor], image: Image, *, length: int, context: int) -> Tensor:
    """Runs a network over a long image slab by slab along z, each with ``context`` voxels of its neighbours.

    Equal to one run over the whole where the context covers the network's field of view (`UNetConfig.reach`).

    Args:
        run: (C, X, Y, z) to (K, X, Y, z).
        image: (C, X, Y, Z).
        length: see `slabs_of`.
        context: see `slabs_of`.

    Returns:
        (K, X, Y, Z).
    """
    slabs = slabs_of(image.shape[3], length, context)
    if len(slabs) == 1:
        return run(image)
    whole = torch.empty(0)
    for slab in slabs:
        part = run(image[..., slab.seen] if isinstance(image, Tensor) else image.cut(slab.seen))
        if slab is slabs[0]:
            whole = part.new_empty((*part.shape[:3], image.shape[3]))
        whole[..., slab.kept] = part[..., slab.kept_of_seen]
    return whole
