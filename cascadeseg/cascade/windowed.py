"""Scans that were saved as a window of soft tissue shows them: lungs and the air around the body are one flat grey.

What a window cut off is not in the scan any more, but where it lay is. Between the front and the back of a chest it was
lung for the most part, beside the body it was air. Put back as such, to the networks the scan is one like any other,
without vessels thinner than a voxel or two.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import numpy.typing as npt

from cascadeseg.cascade.crop import TISSUE_HU, between_walls
from cascadeseg.cascade.locate import LAYERS, sampled_hu
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box

INSIDE_HU = -850.0
"""A lung, breathed in."""
OUTSIDE_HU = -1000.0
HALFWAY_HU = -400.0
"""Between lung and tissue."""
NEIGHBOURS = 19
"""Of the 27 voxels around one, itself among them, so many must be cut off where the floor is nearer to tissue than to
lung: more than at a flat surface, half of which is tissue, and more than noise cuts off in fat."""

Mask = npt.NDArray[np.bool_]


def restored(scan: Scan) -> Scan:
    """A scan with likely values where a window cut off what there was: a copy, in whole HU.

    Args:
        scan: in canonical orientation.

    Returns:
        The scan itself where nothing was cut off (`Scan.floor_hu`).
    """
    floor = scan.floor_hu
    if floor is None:
        return scan
    sampled, grid = sampled_hu(scan)
    behind, before = between_walls(sampled > max(TISSUE_HU, floor + 1))
    inside = behind & before
    x, y, z = (row.clip(0, n - 1) for row, n in zip(grid.nearest(scan.grid), inside.shape, strict=True))
    nx, ny, nz = scan.grid.shape
    voxels = np.empty_like(scan.voxels, dtype=np.int16)
    for start in range(0, nz, LAYERS):
        stop = min(start + LAYERS, nz)
        first = max(start - 1, 0)  # a layer more on both sides, for the neighbours
        hu = scan.hu(Box((0, 0, first), (nx, ny, min(stop + 1, nz))))
        kept = (..., slice(start - first, stop - first))
        flat = hu < floor + 1
        flat, hu = (_amid(flat) if floor > HALFWAY_HU else flat)[kept], hu[kept]
        hu[flat] = np.where(inside[np.ix_(x, y, z[start:stop])], min(INSIDE_HU, floor), OUTSIDE_HU)[flat]
        voxels[..., start:stop] = hu.round().clip(-32768, 32767)
    return replace(scan, voxels=voxels, slope=1.0, intercept=0.0, floor_hu=None)


def restored_mb(scan: Scan) -> float:
    """Memory of what `restored` makes."""
    return 0.0 if scan.floor_hu is None else prod(scan.grid.shape) * np.dtype(np.int16).itemsize / 1e6


def _amid(flat: Mask) -> Mask:
    """Of voxels those with enough neighbours of their kind; at the edge of the array its last layer goes on."""
    count = np.pad(flat.astype(np.uint8), 1, mode="edge")
    count = count[:-2] + count[1:-1] + count[2:]
    count = count[:, :-2] + count[:, 1:-1] + count[:, 2:]
    count = count[..., :-2] + count[..., 1:-1] + count[..., 2:]
    return flat & (count >= NEIGHBOURS)
