"""Both lungs' logits back onto the scan's own grid, slab by slab, and only inside their boxes."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from cascadeseg.cascade.refine import Refined
from cascadeseg.cascade.resample import SLAB_VOXELS, resample_volume
from cascadeseg.geometry import Box, Grid, canonical_view
from cascadeseg.parallel import side_by_side

Labels = npt.NDArray[np.uint8]


def merge(lungs: Sequence[Refined], grid: Grid) -> Labels:
    """The label map of both lungs on a scan's grid (any orientation).

    Logits are interpolated, never labels; where both lungs claim a voxel, the larger logit has it. Nothing of the size
    of classes times voxels is ever made: memory is the label map and one slab.

    Args:
        lungs: none, one or both.
        grid: the scan's own.

    Returns:
        (X, Y, Z) uint8 label values, in the scan's axis order.
    """
    labels = _no_labels(grid)
    view, canonical = canonical_view(labels, grid), grid.canonical()
    boxes = [box_on(refined, canonical) for refined in lungs]

    def put(slab: Box) -> None:
        target = view[slab.slices]
        best = np.zeros(slab.shape, dtype=np.float32, order="F")
        for refined, box in zip(lungs, boxes, strict=True):
            here = _overlap(box, slab).shifted([-a for a in slab.start])
            if min(here.shape) == 0:
                continue
            logits = resample_volume(refined.logits, refined.grid, canonical.cropped(slab).cropped(here)).cpu().numpy()
            np.copyto(target[here.slices], refined.lung.label.value, where=logits > best[here.slices])
            np.maximum(best[here.slices], logits, out=best[here.slices])

    side_by_side(put, list(_slabs(boxes)))
    return labels


def _no_labels(grid: Grid) -> Labels:
    """Zeros, of which only pages that are written take memory: NumPy's own come in pages that hold whole slices."""
    if sys.platform == "win32":
        return np.zeros(grid.shape, dtype=np.uint8, order="F")
    buffer = mmap.mmap(-1, prod(grid.shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(buffer, dtype=np.uint8).reshape(grid.shape, order="F")


def box_on(refined: Refined, canonical: Grid) -> Box:
    """The voxels of a canonical scan that a lung's crop covers."""
    crop = Box.whole(refined.grid.shape)
    return refined.grid.covering(crop, canonical).clipped(canonical.shape)


def _slabs(boxes: Sequence[Box]) -> Iterator[Box]:
    """The union of the boxes, cut along z into boxes of at most `SLAB_VOXELS` voxels."""
    if not boxes:
        return
    union = Box.around(boxes)
    (x0, y0, z0), (x1, y1, z1) = union.start, union.stop
    thickness = max(1, SLAB_VOXELS // max(1, (x1 - x0) * (y1 - y0)))
    for low in range(z0, z1, thickness):
        yield Box((x0, y0, low), (x1, y1, min(low + thickness, z1)))


def _overlap(a: Box, b: Box) -> Box:
    start = np.maximum(a.start, b.start)
    return Box.of(start, np.maximum(start, np.minimum(a.stop, b.stop)))
