from __future__ import annotations

import threading
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
import torch

from cascadeseg import parallel
from cascadeseg.cascade.crop import crop_lungs
from cascadeseg.cascade.locate import coarse_grid
from cascadeseg.cascade.pipeline import Segmenter
from cascadeseg.errors import ConfigError, DeviceError, ModelError, ScanError
from cascadeseg.geometry import Box, Grid, canonical_view
from cascadeseg.labels import LUNGS
from cascadeseg.network.model import Stage, View
from tests.cascade.chest import (
    CENTRES,
    RADII,
    chest,
    chest_grid,
    dice,
    thresholding_segmenter,
    tiny_model,
    truth,
)


def reoriented(grid: Grid, order: tuple[int, int, int], flips: tuple[bool, bool, bool]) -> Grid:
    """The same field of view with its array axes in another order and direction."""
    affine = grid.affine.copy()
    for axis, flip in enumerate(flips):
        if flip:
            affine[:3, 3] += affine[:3, axis] * (grid.shape[axis] - 1)
            affine[:3, axis] *= -1
    affine[:3, :3] = affine[:3, list(order)]
    return Grid([grid.shape[a] for a in order], affine)


def turned(degrees: float) -> Grid:
    """The toy chest's field of view, turned about the long axis."""
    base = chest_grid((3.0, 3.0, 4.0))
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3] = turn @ base.affine[:3]
    return Grid(base.shape, affine)


def test_a_network_that_thresholds_gives_back_both_lungs():
    scan = chest(chest_grid((1.5, 1.5, 2.5)))
    result = thresholding_segmenter().segment(scan)
    expected = truth(scan.grid)
    for lung, measured in zip(LUNGS, result.lungs, strict=True):
        assert dice(result.labels, expected, lung.value) > 0.985
        assert measured.volume_ml == pytest.approx(4 / 3 * np.pi * np.prod(RADII) / 1000, rel=0.03)
        assert measured.mean_hu == pytest.approx(-850, abs=40)
        assert measured.complete
        assert measured.regrown == 0
    assert set(result.seconds) == {"read", "locate", "crop", "refine", "merge", "clean", "measure"}
    assert result.warnings == ()


ORIENTATIONS = [(o, f) for o in permutations(range(3)) for f in product((False, True), repeat=3)]


@pytest.mark.parametrize(("order", "flips"), ORIENTATIONS)
def test_every_orientation_gives_the_same_mask_in_patient_space(order, flips):
    base = chest_grid()
    grid = reoriented(base, order, flips)
    labels = thresholding_segmenter().segment(chest(grid)).labels
    assert labels.shape == grid.shape
    upright = thresholding_segmenter().segment(chest(base)).labels
    back = canonical_view(labels, grid)
    for lung in LUNGS:
        assert dice(back, upright, lung.value) > 0.99


def test_an_oblique_scan_keeps_its_sides():
    grid = turned(20)
    labels = thresholding_segmenter().segment(chest(grid)).labels
    for lung in LUNGS:
        assert dice(labels, truth(grid), lung.value) > 0.95


def test_a_box_in_millimetres_holds_the_lung_of_an_oblique_scan():
    grid = turned(40)
    result = thresholding_segmenter().segment(chest(grid))
    for lung in result.lungs:
        low, high = lung.box_mm
        voxels = grid.world(np.argwhere(result.labels == lung.label.value))
        assert (voxels >= np.asarray(low)).all()
        assert (voxels <= np.asarray(high)).all()


def test_a_box_in_millimetres_holds_a_lung_that_ends_where_the_crop_was_rounded_up(monkeypatch):
    def too_low(*args):  # 41 layers of 4 mm, which stage 2's stride of 16 mm makes 44
        right, *_ = crop_lungs(*args)
        x, y, z = right.box.stop
        return [replace(right, box=Box(right.box.start, (x, y, z - 3)))]

    monkeypatch.setattr("cascadeseg.cascade.pipeline.crop_lungs", too_low)
    result = thresholding_segmenter().segment(chest(chest_grid((2.0, 3.0, 3.0))))
    lung = result.lungs[0]
    top = result.scan.grid.world(np.argwhere(result.labels == lung.label.value)).max(axis=0)
    assert top[2] == pytest.approx(RADII[2], abs=3)
    assert lung.regrown == 0
    assert (top <= np.asarray(lung.box_mm[1])).all()


@pytest.mark.parametrize("slices", [66, 82])  # a whole number of 2 mm voxels would leave the outermost centres out
def test_boxes_reach_the_outermost_slices_of_fine_voxels(slices):
    grid = Grid.axis_aligned((8, 8, slices), (2.0, 2.0, 0.5))
    coarse = coarse_grid(chest(grid), View(2.0))
    first, last = coarse.index(grid.world([(0, 0, 0), (0, 0, slices - 1)]))[:, 2]
    assert first >= -0.5
    assert last <= coarse.shape[2] - 0.5


def test_a_lung_that_is_still_cut_is_not_complete_and_for_review(monkeypatch):
    monkeypatch.setattr("cascadeseg.cascade.refine.cut_faces", lambda *_: [(2, True)])
    for lung in thresholding_segmenter().segment(chest(chest_grid())).lungs:
        assert not lung.complete
        assert "it goes on beyond the box that was segmented" in lung.reasons


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_air_to_what_is_measured(odd):
    scan = chest(chest_grid(), "float32")
    voxels = scan.voxels.copy()
    inside = np.argwhere(truth(scan.grid) == 1)
    voxels[tuple(inside[len(inside) // 2])] = odd
    lung = thresholding_segmenter().segment(replace(scan, voxels=voxels)).lungs[0]
    assert lung.mean_hu == pytest.approx(-850, abs=60)
    assert lung.signs.odd_hu == 0


@pytest.mark.parametrize("lung", LUNGS)
def test_a_missing_lung_leaves_the_other_one(lung):
    scan = chest(chest_grid())
    voxels = scan.voxels.copy()
    voxels[truth(scan.grid) == lung.value] = 40
    result = thresholding_segmenter().segment(replace(scan, voxels=voxels))
    other = next(label for label in LUNGS if label != lung)
    assert not (result.labels == lung.value).any()
    assert dice(result.labels, truth(scan.grid), other.value) > 0.93
    assert f"no {lung.title} was found" in result.warnings


def test_a_scan_without_lungs_gives_an_empty_mask_and_says_so():
    scan = chest(chest_grid())
    result = thresholding_segmenter().segment(replace(scan, voxels=np.full_like(scan.voxels, 40)))
    assert not result.labels.any()
    assert result.warnings == ("no lung was found in this scan; the mask is empty",)
    assert [lung.volume_ml for lung in result.lungs] == [0, 0]


def test_a_lung_at_the_scans_border_is_reported_as_partial():
    grid = chest_grid()
    lower = grid.cropped(Box((0, 0, 0), (grid.shape[0], grid.shape[1], grid.shape[2] // 2)))
    result = thresholding_segmenter().segment(chest(lower))
    assert [lung.touches for lung in result.lungs] == [("superior",), ("superior",)]
    assert "the right lung touches the superior border of the scan: its volume may be partial" in result.warnings
    assert dice(result.labels, truth(lower), 1) > 0.93


@pytest.mark.parametrize("shape", [(1, 40, 30), (7, 5, 3), (83, 60, 2)])
def test_scans_smaller_than_the_networks_stride_work(shape):
    grid = Grid.axis_aligned(shape, (4, 4, 5), (-160, -110, -5))
    assert thresholding_segmenter().segment(chest(grid)).labels.shape == shape


def test_an_untrained_model_runs_end_to_end():
    scan = chest(chest_grid())
    result = Segmenter(tiny_model(), device="cpu").segment(scan)
    assert result.labels.shape == scan.grid.shape
    assert result.labels.dtype == np.uint8


def test_a_lung_larger_than_any_is_refused_before_anything_is_done_about_it(monkeypatch):
    monkeypatch.setattr("cascadeseg.cascade.pipeline.settle_sides", lambda coarse, scan: pytest.fail("sides settled"))
    scan = chest(chest_grid((5.0, 5.0, 5.0)))
    giant = replace(scan, grid=Grid.axis_aligned(scan.grid.shape, (20.0, 20.0, 20.0)), source="giant.nii.gz")
    segmenter = thresholding_segmenter()
    with pytest.raises(
        ScanError, match=r"giant.nii.gz: a right lung of \d+ litres; expected 10 litres at most; correct"
    ):
        segmenter.segment(giant)
    assert segmenter.refiner.shapes == []


@pytest.mark.parametrize("around", ["float64 by default", "autocast"])
def test_what_torch_is_set_to_around_a_call_changes_nothing(around):
    scan = chest(chest_grid((3.0, 3.0, 4.0)))
    expected = thresholding_segmenter().segment(scan).labels
    segmenter = thresholding_segmenter()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if around == "float64 by default" else before)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around == "autocast"):
            labels = segmenter.segment(scan).labels
    finally:
        torch.set_default_dtype(before)
    assert np.array_equal(labels, expected)


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="torch counts its threads without OpenMP")
def test_a_request_that_begins_while_another_refines_has_all_of_torchs_threads(torch_threads):
    torch_threads(4)
    segmenter, scan, counts = thresholding_segmenter(), chest(chest_grid((3.0, 3.0, 4.0))), []
    request = threading.Thread(
        target=segmenter.segment, args=(scan,), kwargs={"progress": lambda *_: counts.append(torch.get_num_threads())}
    )
    with parallel._COUNTING:
        torch.set_num_threads(2)  # as one of the other's threads does for itself
        request.start()
        request.join(0.3)
        torch.set_num_threads(4)
    request.join()
    assert set(counts) == {4}


def test_a_field_of_records_is_a_scan():
    scan = chest(chest_grid((3.0, 3.0, 4.0)))
    records = np.zeros(scan.voxels.shape, [("flag", "u1"), ("hu", scan.voxels.dtype)])
    records["hu"] = scan.voxels
    labels = thresholding_segmenter().segment(records["hu"], scan.grid.affine).labels
    assert np.array_equal(labels, thresholding_segmenter().segment(scan).labels)


def test_an_affine_beside_a_scan_that_has_its_own_is_refused():
    scan = chest(chest_grid())
    with pytest.raises(ScanError, match="an affine beside a scan that has its own"):
        thresholding_segmenter().segment(scan, np.eye(4))


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "2"])
def test_a_limit_that_is_none_is_refused_at_once(limit):
    with pytest.raises(ConfigError, match=r"max_memory_gb: .*; expected a number of GB above 0, or None"):
        Segmenter(tiny_model(), device="cpu", max_memory_gb=limit)


def test_results_can_be_compared():
    scan = chest(chest_grid())
    result = thresholding_segmenter().segment(scan)
    assert result in [result]
    assert result != replace(result)
    assert len({result, scan}) == 2


def test_an_array_with_its_affine_is_a_scan():
    scan = chest(chest_grid())
    result = thresholding_segmenter().segment(scan.voxels, scan.grid.affine)
    assert dice(result.labels, truth(scan.grid), 1) > 0.93


def test_a_model_without_second_stage_is_refused():
    with pytest.raises(ModelError, match="a locator without a refiner; expected both stages; train the second"):
        Segmenter(replace(tiny_model(), refiner=None))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("precision", "float16", "precision: float16; expected one of auto, fp32, bf16, fp16"),
        ("max_vram_gb", 1.0, "--max-vram: a limit for a GPU, on cpu; expected a cuda device; leave it out; --max-"),
    ],
)
def test_options_that_mean_nothing_are_refused(option, value, words):
    with pytest.raises(DeviceError, match=words):
        Segmenter(tiny_model(), device="cpu", **{option: value})


def test_the_toy_lungs_lie_on_their_sides():
    # World x grows to the patient's right.
    assert CENTRES[LUNGS[0]][0] > 0 > CENTRES[LUNGS[1]][0]


def test_a_window_of_soft_tissue_that_nothing_looks_at_changes_nothing():
    def with_tissue(stage: Stage) -> Stage:
        cells = 8  # of a space-to-depth stem
        weights = dict(stage.weights)
        stem = weights["stem.convolution.weight"]
        blind = torch.cat([stem[:, :cells], torch.zeros_like(stem[:, :cells]), stem[:, cells:]], dim=1)
        view = replace(stage.view, tissue_low_hu=-150.0, tissue_high_hu=150.0)
        unet = replace(stage.unet, in_channels=stage.unet.in_channels + 1)
        return Stage(view, unet, weights | {"stem.convolution.weight": blind})

    model, scan = tiny_model(), chest(chest_grid((3.0, 3.0, 3.0)))
    two = replace(model, locator=with_tissue(model.locator), refiner=with_tissue(model.refiner))
    one_window, two_windows = (Segmenter(each, device="cpu", precision="fp32").segment(scan) for each in (model, two))
    assert one_window.labels.any()
    assert np.array_equal(one_window.labels, two_windows.labels)
