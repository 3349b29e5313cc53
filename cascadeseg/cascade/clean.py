"""Small components out, holes in: what no lung has, inside each lung's own box."""

from __future__ import annotations

from collections.abc import Sequence

import cc3d
import fill_voids
import numpy as np
import numpy.typing as npt

from cascadeseg.cascade.merge import Labels
from cascadeseg.geometry import Box, Grid, canonical_view
from cascadeseg.labels import BACKGROUND, Label

Mask = npt.NDArray[np.bool_]

SMALLEST_PART_ML = 2.0
SMALLEST_PART_SHARE = 0.02


def clean(labels: Labels, regions: Sequence[tuple[Label, Box]], grid: Grid) -> Labels:
    """Cleans a label map in place and returns it.

    Of each lung the parts stay that are large enough (a lung cut by the field of view, or by a band of consolidation
    in thick slices, may be in several parts), and holes that lung surrounds entirely (vessels, dense disease) are lung.

    Args:
        labels: (X, Y, Z) on ``grid``.
        regions: the box of each lung on the canonical grid.
        grid: the scan's own.
    """
    view = canonical_view(labels, grid)
    for label, box in regions:
        region = view[box.slices]
        lung = np.asfortranarray(region == label.value)
        if not lung.any():
            continue
        kept = fill_voids.fill(_large_parts(lung, grid.voxel_volume_ml))
        region[lung & ~kept] = BACKGROUND
        region[kept & (region == BACKGROUND)] = label.value
    return labels


def _large_parts(lung: Mask, voxel_ml: float) -> Mask:
    components = cc3d.connected_components(lung, connectivity=6)
    sizes = cc3d.statistics(components)["voxel_counts"].astype(np.float64)
    sizes[0] = 0
    smallest = min(sizes.max(), max(SMALLEST_PART_ML / voxel_ml, SMALLEST_PART_SHARE * sizes.max()))
    kept: Mask = (sizes >= smallest)[components]
    return kept
