from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from cascadeseg.cascade.crop import LungBox
from cascadeseg.cascade.pipeline import Segmenter
from cascadeseg.cascade.plan import LARGEST_LAYER, LARGEST_LUNG, PROGRAM_MB, SETTLING_MB, Plan
from cascadeseg.errors import ScanError
from cascadeseg.formats import read_scan, write_scan
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG
from cascadeseg.network import Model, UNet, UNetConfig, View, stage_of
from cascadeseg.network.bounded import BoundedEngine
from tests.cascade.chest import Thresholder, chest, chest_grid, dice, tiny_model


def long_scan(slices: int) -> Scan:
    """A scan of which only the header matters: one voxel in memory."""
    voxels = np.broadcast_to(np.int16(0), (512, 512, slices))
    return Scan(voxels, Grid.axis_aligned(voxels.shape, (0.75, 0.75, 1.0)), source="long.nii.gz")


@pytest.fixture
def two_threads(torch_threads):
    torch_threads(2)


def test_without_limits_most_lungs_are_refined_whole():
    plan = Segmenter(tiny_model(), device="cpu").plan(long_scan(2000))
    assert plan.largest_tile > 150 * 220 * 330
    assert "each lung as a whole" in str(plan)


def test_a_windowed_scan_needs_room_for_a_copy():
    plain, segmenter = long_scan(2000), Segmenter(tiny_model(), device="cpu", max_memory_gb=2.5)
    assert segmenter.plan(plain).host_mb <= 2500
    with pytest.raises(ScanError, match=r"needs up to \d\.\d GB of memory"):
        segmenter.plan(replace(plain, floor_hu=-160.0))


def on_a_gpu(max_vram_gb: float | None, model: Model | None = None) -> Segmenter:
    """As a plan sees it, which never touches the device."""
    segmenter = Segmenter(model, device="cpu", precision="bf16")
    segmenter.max_vram_gb = max_vram_gb
    for engine in (segmenter.locator, segmenter.refiner):
        engine.device = torch.device("cuda")
    return segmenter


@pytest.mark.parametrize(("slices", "pixel_mm"), [(320, 0.75), (2000, 0.98)])
def test_a_gpu_streams_where_its_memory_is_short(slices, pixel_mm):
    voxels = np.broadcast_to(np.int16(0), (512, 512, slices))
    scan = Scan(voxels, Grid.axis_aligned(voxels.shape, (pixel_mm, pixel_mm, 1.0)), source="wide.nii.gz")
    free, tight = (on_a_gpu(limit).plan(scan) for limit in (None, 1.0))
    assert not free.streamed
    assert 1000 < free.device_mb < 2000
    assert tight.streamed
    assert tight.tiles == 1
    assert tight.device_mb <= 1000
    with pytest.raises(ScanError, match=r"than --max-vram leaves it \(0\.5 GB\)"):
        on_a_gpu(0.5).plan(scan)


def test_how_long_a_scan_is_matters_to_the_host_alone():
    """Which keeps its voxels, its mask and stage 1's opinion, these near the lungs; a GPU holds a slab at a time."""
    short, long, longer = (on_a_gpu(1.0).plan(long_scan(slices)) for slices in (300, 600, 2000))
    slice_mb = 512 * 512 / 1e6
    opinion_mb = 4 * (512 * 0.75 / 2) ** 2 * 150 / 1e6
    assert long.host_mb - short.host_mb == pytest.approx(300 * 2 * slice_mb + 100 * slice_mb + opinion_mb, abs=1)
    assert longer.host_mb - long.host_mb == pytest.approx(1400 * 2 * slice_mb, abs=opinion_mb)
    assert short.device_mb == long.device_mb == longer.device_mb


def test_a_gpu_with_less_memory_still_sees_lungs_in_tiles():
    whole, tight = (on_a_gpu(limit).plan(long_scan(320)) for limit in (0.75, 0.66))
    assert whole.streamed
    assert whole.tiles == 1
    assert tight.streamed
    assert tight.tiles > 1
    assert tight.device_mb <= 660


def test_both_lungs_are_refined_at_once_where_that_takes_little_or_is_allowed(two_threads):
    def shipped(slices: int, max_memory_gb: float | None = None) -> Plan:
        limited = Segmenter(device="cpu", precision="bf16", max_memory_gb=max_memory_gb)
        return limited.plan(long_scan(slices))

    short = shipped(320)
    assert short.both_mb == np.inf
    assert short.largest_tile > 150 * 220 * 330
    assert short.host_mb < 1200
    assert "both lungs at once" in str(short)
    assert not shipped(2000).both_mb
    assert shipped(2000, max_memory_gb=4).both_mb == np.inf
    tight = shipped(320, max_memory_gb=short.host_mb / 1000 - 0.01)
    assert not tight.both_mb
    assert tight.host_mb < short.host_mb
    torch.set_num_threads(1)
    assert not shipped(320).both_mb


def test_lungs_that_turn_out_to_be_small_are_refined_at_once_in_scans_of_medium_length(two_threads):
    segmenter = Segmenter(device="cpu", precision="bf16")
    medium = segmenter.plan(long_scan(700))
    assert 0 < medium.both_mb < np.inf
    assert medium.host_mb <= 1200
    assert "if they are small" in str(medium)
    grid = Grid.axis_aligned((200, 200, 200), (2.0, 2.0, 2.0))
    small, large = (
        LungBox(label, Box((0, 0, 0), (x, 100, 150)), grid) for label, x in ((RIGHT_LUNG, 60), (LEFT_LUNG, 200))
    )
    assert medium.takes_both(segmenter.refiner, [small, small])
    assert not medium.takes_both(segmenter.refiner, [large, large])


def test_both_lungs_at_once_are_the_same_lungs(two_threads):
    scan = chest(chest_grid((3.0, 3.0, 3.0)))
    segmenter = Segmenter(tiny_model(), device="cpu", precision="fp32")
    segmenter.locator = Thresholder(segmenter.locator.stage, sides=True)  # type: ignore[assignment]
    assert segmenter.plan(scan).both_mb
    at_once = segmenter.segment(scan).labels
    segmenter.plan = lambda scan: replace(Segmenter.plan(segmenter, scan), both_mb=0.0)  # type: ignore[method-assign]
    assert set(np.unique(at_once)) == {0, 1, 2}
    assert np.array_equal(at_once, segmenter.segment(scan).labels)


def test_memory_that_runs_out_with_both_lungs_at_work_changes_neither(two_threads):
    scan = chest(chest_grid((3.0, 3.0, 3.0)))
    refiner = stage_of(View(2.0, prior=True), UNet(UNetConfig(2, 1, widths=(4, 8), block="bottleneck")))
    segmenter = Segmenter(replace(tiny_model(), refiner=refiner), device="cpu", precision="fp32")
    segmenter.locator = Thresholder(segmenter.locator.stage, sides=True)  # type: ignore[assignment]
    enough, engine, refused = segmenter.segment(scan), segmenter.refiner._engine, []
    both = threading.Barrier(2)  # neither lung is refused before the other is at work: it would begin with tiles

    class Starved:
        def __getattr__(self, name):
            return getattr(engine, name)

        def __call__(self, image, finish):
            if image.shape[3] > 80:
                refused.append(threading.current_thread().name)
                if len(refused) <= 2:
                    both.wait(timeout=60)
                raise MemoryError
            return engine(image, finish)

    segmenter.refiner._engine = Starved()
    result = segmenter.segment(scan)
    assert len(set(refused)) == 2
    assert "MainThread" not in refused
    assert sum("ran out of memory" in warning for warning in result.warnings) == len(refused)
    assert enough.labels.any()
    assert np.mean(enough.labels != result.labels) < 1e-4


@pytest.mark.parametrize(
    ("levels", "blocks", "planned"),
    [(3, 2, "a large lung in 3 tiles"), (4, 3, "each lung as a whole"), (5, 2, "each lung as a whole")],
)
def test_a_deep_refiner_gets_no_tiles_that_are_mostly_context(levels, blocks, planned):
    deep = UNetConfig(2, 1, widths=(4,) * levels, block="bottleneck", blocks=blocks)
    model = replace(tiny_model(), refiner=stage_of(View(1.0, prior=True), UNet(deep)))
    plan = on_a_gpu(None, model).plan(long_scan(320))
    assert plan.largest_tile >= min(LARGEST_LAYER * 4 * deep.context, LARGEST_LUNG)
    assert planned in str(plan)


@pytest.mark.parametrize("levels", [3, 4, 5])
def test_what_fits_a_gpu_fits_a_larger_one(levels):
    deep = UNetConfig(2, 1, widths=(4,) * levels, block="bottleneck", blocks=2)
    model = replace(tiny_model(), refiner=stage_of(View(1.0, prior=True), UNet(deep)))
    refused = []
    for limit_gb in np.arange(0.5, 1.6, 0.05):
        try:
            on_a_gpu(float(limit_gb), model).plan(long_scan(320))
            refused.append(False)
        except ScanError:
            refused.append(True)
    assert refused == sorted(refused, reverse=True)
    assert len(set(refused)) == 2


def test_a_limit_is_kept_by_tiles(two_threads):
    torch.set_num_threads(1)  # one lung after the other
    wide = UNetConfig(2, 1, widths=(48, 64, 64), block="bottleneck")
    model = replace(tiny_model(), refiner=stage_of(View(1.0, prior=True), UNet(wide)))
    free = Segmenter(model, device="cpu").plan(long_scan(320))
    limit_mb = free.host_mb - 5
    limited = Segmenter(model, device="cpu", max_memory_gb=limit_mb / 1000).plan(long_scan(320))
    assert limited.largest_tile < free.largest_tile
    assert limited.host_mb <= limit_mb
    assert "tiles" in str(limited)


def test_cleaning_a_fine_scan_is_reckoned_with(two_threads):
    """One of 0.4 mm with two lungs of 3.9 litres took 2,363 MB while it was cleaned, and 1,789 were planned."""
    voxels = np.broadcast_to(np.int16(0), (800, 640, 740))
    fine = Scan(voxels, Grid.axis_aligned(voxels.shape, (0.4, 0.4, 0.4)), source="fine.nii.gz")
    alone, both = (Segmenter(device="cpu", precision="fp32", max_memory_gb=limit) for limit in (None, 5))
    for segmenter in (alone, both, on_a_gpu(None)):
        assert segmenter.plan(fine).host_mb > 2363
    assert both.plan(fine).both_mb == np.inf
    with pytest.raises(ScanError, match=r"fine\.nii\.gz: needs up to \d\.\d GB of memory"):
        Segmenter(device="cpu", max_memory_gb=2).plan(fine)


def test_cleaning_a_small_scan_takes_no_more_than_its_voxels():
    voxels = np.broadcast_to(np.int16(0), (100, 100, 100))
    planned = on_a_gpu(None).plan(Scan(voxels, Grid.axis_aligned(voxels.shape, (0.1, 0.1, 0.1))))
    assert PROGRAM_MB + SETTLING_MB < planned.host_mb < 600


def test_what_cannot_fit_is_refused_before_work():
    segmenter = Segmenter(tiny_model(), device="cpu", max_memory_gb=0.5)
    said = r"long\.nii\.gz: needs up to \d\.\d GB of memory; expected no more than --max-memory leaves it \(0\.5 GB\)"
    with pytest.raises(ScanError, match=said):
        segmenter.plan(long_scan(2000))


@pytest.mark.parametrize("suffix", [".nii.gz", ".nii", ".mha", ".nrrd"])
def test_what_cannot_fit_is_refused_from_the_header_alone(tmp_path, monkeypatch, suffix):
    scan = chest(chest_grid())
    path = tmp_path / f"scan{suffix}"
    write_scan(scan.voxels, scan.grid, path)
    monkeypatch.setattr("cascadeseg.formats.nifti._read_voxels", None)
    monkeypatch.setattr("cascadeseg.formats.itk.scan_of_image", None)
    with pytest.raises(ScanError, match=r"no more than --max-memory leaves it \(0\.1 GB\)"):
        Segmenter(tiny_model(), device="cpu", max_memory_gb=0.1).segment(path)


def test_the_plan_from_a_header_is_that_of_the_scan(tmp_path):
    scan = chest(chest_grid())
    plans = []
    segmenter = Segmenter(tiny_model(), device="cpu")
    for suffix in (".nii.gz", ".mha"):
        write_scan(scan.voxels, scan.grid, tmp_path / f"scan{suffix}")
        read = read_scan(tmp_path / f"scan{suffix}", before=lambda outline: plans.append(segmenter.plan(outline)))
        assert segmenter.plan(read) == plans[-1]
    assert len(plans) == 2


def test_memory_grows_with_the_voxels_alone():
    plan = Segmenter(tiny_model(), device="cpu").plan
    short, long = plan(long_scan(1000)), plan(long_scan(2000))
    assert long.host_mb - short.host_mb < 1.01 * 1000 * 512 * 512 * 2 / 1e6


def test_the_mask_is_the_same_at_any_limit(monkeypatch):
    scan = chest(chest_grid((3.0, 3.0, 3.0)))
    segmenter = Segmenter(tiny_model(), device="cpu", precision="fp32")
    segmenter.locator = Thresholder(segmenter.locator.stage, sides=True)  # type: ignore[assignment]
    whole = segmenter.segment(scan).labels
    context, stride = segmenter.refiner.stage.unet.context, segmenter.refiner.stage.unet.stride
    segmenter.plan = lambda scan: replace(  # type: ignore[method-assign]
        Segmenter.plan(segmenter, scan), largest_tile=40 * 60 * (2 * context + stride)
    )
    tile_length, lengths = BoundedEngine.tile_length, []
    monkeypatch.setattr(BoundedEngine, "tile_length", lambda *of: lengths.append(tile_length(*of)) or lengths[-1])
    tiled = segmenter.segment(scan).labels
    assert stride in lengths
    for value in (1, 2):
        assert (whole == value).any()
        assert dice(tiled, whole, value) > 0.999
