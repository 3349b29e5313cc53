"""Small and unseen components out, holes in: what no lung has, inside each lung's own box."""

from __future__ import annotations

from collections.abc import Sequence

import cc3d
import fastremap
import fill_voids
import numpy as np
import numpy.typing as npt

from cascadeseg.cascade.locate import Coarse, found_in
from cascadeseg.cascade.merge import Labels
from cascadeseg.geometry import Box, Grid, Mask, canonical_view
from cascadeseg.labels import BACKGROUND, Label

SMALLEST_PART_ML = 2.0
SMALLEST_PART_SHARE = 0.02
SMALLEST_SEEN_SHARE = 0.1
"""Of the share of the best seen part that stage 1 takes for lung."""


def clean(labels: Labels, regions: Sequence[tuple[Label, Box]], grid: Grid, coarse: Coarse) -> Labels:
    """Cleans a label map in place and returns it.

    Of each lung the parts stay that are large enough (a lung cut by the field of view, or by a band of consolidation
    in thick slices, may be in several parts) and in which stage 1 saw lung too: from within one box the foam of a couch
    looks like a lung, over the whole scan it does not. Holes that lung surrounds entirely (vessels, dense disease) are
    lung.

    Args:
        labels: (X, Y, Z) on ``grid``.
        regions: the box of each lung on the canonical grid.
        grid: the scan's own.
        coarse: stage 1's opinion.
    """
    view = canonical_view(labels, grid)
    for label, box in regions:
        region = view[box.slices]
        lung = np.asfortranarray(region == label.value)
        if lung.any():
            region[lung & ~_parts(lung, grid.canonical().cropped(box), coarse)] = BACKGROUND
    for label, box in regions:  # in whose holes no small part of the other lung is left now
        region = view[box.slices]
        filled = fill_voids.fill(np.asfortranarray(region == label.value), in_place=True)
        region[filled & (region == BACKGROUND)] = label.value
    return labels


def _parts(lung: Mask, grid: Grid, coarse: Coarse) -> Mask:
    """What is large enough, and seen by both stages, of a lung on a canonical grid."""
    components, count = cc3d.connected_components(lung, connectivity=6, return_N=True)
    if count == 1:
        return lung
    # A fifth of the time of cc3d's statistics, which find boxes and centroids too.
    sizes = fastremap.unique(components, return_counts=True)[1] * grid.voxel_volume_ml
    sizes[0] = 0
    kept = sizes >= min(sizes.max(), max(SMALLEST_PART_ML, SMALLEST_PART_SHARE * sizes.max()))
    if kept.sum() > 1:
        shares = _seen_ml(components, len(sizes), grid, coarse) / np.maximum(sizes, SMALLEST_PART_ML)
        kept &= shares >= SMALLEST_SEEN_SHARE * shares[kept].max()
    mask: Mask = components == kept.argmax() if kept.sum() == 1 else kept[components]
    return mask


def _seen_ml(
    components: npt.NDArray[np.unsignedinteger], count: int, grid: Grid, coarse: Coarse
) -> npt.NDArray[np.float64]:
    """How much of each of ``count`` components stage 1 takes for either lung, ml."""
    box = grid.covering(Box.whole(grid.shape), coarse.grid).clipped(coarse.grid.shape)
    near = coarse.grid.cropped(box)
    rows = (row.clip(0, n - 1) for row, n in zip(grid.nearest(near), grid.shape, strict=True))
    sampled = components[np.ix_(*rows)]
    voxels = np.bincount(sampled[found_in(coarse.lungs[:, *box.slices]).numpy(force=True)], minlength=count)
    return voxels.astype(np.float64) * near.voxel_volume_ml
