"""Scans that were saved as a window of soft tissue shows them: lungs and the air around the body are one flat grey.

What a window cut off is not in the scan any more, but where it lay is. Between the front and the back of a chest it was
lung for the most part; beside the body, and in the stomach and the bowel, it was air. Put back as such, to the networks
the scan is one like any other, without vessels thinner than a voxel or two.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import cc3d
import numpy as np
import numpy.typing as npt

from cascadeseg.cascade.crop import TISSUE_HU, between_walls, components
from cascadeseg.cascade.locate import LAYERS
from cascadeseg.formats.scan import Scan, sampled_hu
from cascadeseg.geometry import Box, Mask

INSIDE_HU = -850.0
"""A lung, breathed in."""
OUTSIDE_HU = -1000.0
APART_SHARE = 0.2
"""Of the volume of the largest part; smaller ones that lie lower are not lung."""
HALFWAY_HU = -400.0
"""Between lung and tissue; floors above it say less of a voxel than its neighbours do."""
AMID = 19
"""Of the 27 voxels around one, itself among them, so many are cut off where it lies amid others."""
AT_SURFACE = 14
"""As many are at a surface, where voxels are partly tissue. Noise cuts off fewer in fat."""


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
    inside = _lung_like(sampled, floor)
    x, y, z = (row.clip(0, n - 1) for row, n in zip(grid.nearest(scan.grid), inside.shape, strict=True))
    nx, ny, nz = scan.grid.shape
    voxels = np.empty_like(scan.voxels, dtype=np.int16)
    for start in range(0, nz, LAYERS):
        stop = min(start + LAYERS, nz)
        first = max(start - 1, 0)  # a layer more on both sides, for the neighbours
        hu = scan.hu(Box((0, 0, first), (nx, ny, min(stop + 1, nz))))
        kept = (..., slice(start - first, stop - first))
        flat = hu < floor + 1
        around, flat, hu = _neighbours(flat)[kept], flat[kept], hu[kept]
        likely = np.where(inside[np.ix_(x, y, z[start:stop])], min(INSIDE_HU, floor), OUTSIDE_HU)
        if floor > HALFWAY_HU:
            flat &= around >= AT_SURFACE
            likely[around < AMID] = (likely[around < AMID] + floor) / 2
        hu[flat] = likely[flat]
        voxels[..., start:stop] = hu.round().clip(-32768, 32767)
    return replace(scan, voxels=voxels, slope=1.0, intercept=0.0, floor_hu=None)


def _lung_like(hu: npt.NDArray[np.floating[Any]], floor: float) -> Mask:
    """(X, Y, Z) of a sampled canonical scan: what lies in the body, but for gas in the stomach and the bowel.

    Both lungs hang together by the airways, as a rule, and gas in the abdomen lies below them, and apart.
    """
    behind, before = between_walls(hu > max(TISSUE_HU, floor + 1))
    inside: Mask = behind & before
    parts = components(inside & (hu < floor + 1), connectivity=6)
    found = cc3d.statistics(parts)
    volume, height = found["voxel_counts"][1:], found["centroids"][1:, 2]
    if len(volume) == 0:
        return inside
    gas = (volume < APART_SHARE * volume.max()) & (height < height[volume.argmax()])
    inside &= ~np.concatenate([[False], gas])[parts]
    return inside


def restored_mb(scan: Scan) -> float:
    """Memory of what `restored` makes."""
    return 0.0 if scan.floor_hu is None else prod(scan.grid.shape) * np.dtype(np.int16).itemsize / 1e6


def _neighbours(flat: Mask) -> npt.NDArray[np.uint8]:
    """How many of the 27 voxels around each are true; at the edge of the array its last layer goes on."""
    count = np.pad(flat.astype(np.uint8), 1, mode="edge")
    count = count[:-2] + count[1:-1] + count[2:]
    count = count[:, :-2] + count[:, 1:-1] + count[:, 2:]
    return count[..., :-2] + count[..., 1:-1] + count[..., 2:]
