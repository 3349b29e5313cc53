from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cascadeseg.cascade.pipeline import Segmenter
from cascadeseg.errors import ScanError
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid
from tests.cascade.chest import chest, chest_grid, dice, tiny_model


def long_scan(slices: int) -> Scan:
    """A scan of which only the header matters: one voxel in memory."""
    voxels = np.broadcast_to(np.int16(0), (512, 512, slices))
    return Scan(voxels, Grid.axis_aligned(voxels.shape, (0.75, 0.75, 1.0)), source="long.nii.gz")


def test_without_limits_most_lungs_are_refined_whole():
    plan = Segmenter(tiny_model(), device="cpu").plan(long_scan(320))
    assert plan.largest_tile > 150 * 220 * 330
    assert "tiles" in str(plan)


def test_a_limit_is_kept_by_tiles():
    free = Segmenter(tiny_model(), device="cpu").plan(long_scan(320))
    limited = Segmenter(tiny_model(), device="cpu", max_memory_gb=(free.host_mb - 20) / 1000).plan(long_scan(320))
    assert limited.tiles > free.tiles
    assert limited.largest_tile < free.largest_tile
    assert limited.host_mb == pytest.approx(free.host_mb - 20)


def test_what_cannot_fit_is_refused_before_work():
    segmenter = Segmenter(tiny_model(), device="cpu", max_memory_gb=0.5)
    with pytest.raises(ScanError, match=r"long.nii.gz: needs 2.\d GB of memory at least; expected --max-memory 0.5"):
        segmenter.plan(long_scan(2000))


def test_memory_grows_with_the_scan_alone():
    plan = Segmenter(tiny_model(), device="cpu").plan
    short, long = plan(long_scan(600)), plan(long_scan(2000))
    voxels_mb = 1400 * 512 * 512 * 3 / 1e6
    assert long.host_mb - short.host_mb < 1.1 * voxels_mb


def test_the_mask_is_the_same_at_any_limit():
    scan = chest(chest_grid((3.0, 3.0, 3.0)))
    segmenter = Segmenter(tiny_model(), device="cpu", precision="fp32", engine="torch")
    whole = segmenter.segment(scan).labels
    context, stride = segmenter.refiner.stage.unet.context, segmenter.refiner.stage.unet.stride
    segmenter.plan = lambda scan: replace(  # type: ignore[method-assign]
        Segmenter.plan(segmenter, scan), largest_tile=40 * 60 * (2 * context + stride)
    )
    tiled = segmenter.segment(scan).labels
    assert segmenter.refiner.tile_length((2, 80, 80, 200)) == stride
    for value in (1, 2):
        if (whole == value).any():
            assert dice(tiled, whole, value) > 0.999
