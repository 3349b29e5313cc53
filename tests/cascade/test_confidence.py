from __future__ import annotations

from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch

from cascadeseg.cascade.confidence import (
    NOTABLE,
    NOTE,
    Calibration,
    Signs,
    compared,
    judged,
    lattice_of,
    missing_reason,
    signs_of,
)
from cascadeseg.cascade.crop import LungBox
from cascadeseg.cascade.locate import Coarse
from cascadeseg.cascade.refine import Refined
from cascadeseg.geometry import Box, Grid
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG
from tests.cascade.chest import chest, chest_grid, dice, thresholding_segmenter, tiny_model, truth

CLEAN = Signs(*[0.0] * len(fields(Signs)))
CALIBRATION = Calibration(4.0, {"disagreement": 4.5, "doubt": 4.0}, 0.9)


def parts(shift_mm: float = 0.0, sure: float = 8.0, exchanged: bool = False) -> tuple[Refined, Coarse]:
    """The toy chest's right lung as both stages might have it: stage 1's shifted or called left, stage 2's as sure."""
    grid = chest_grid((4.0, 4.0, 4.0))
    affine = grid.affine.copy()
    affine[0, 3] -= shift_mm
    said = truth(Grid(grid.shape, affine))
    sides = [said == 2, said == 1] if exchanged else [said == 1, said == 2]
    coarse = Coarse(torch.from_numpy(np.stack(sides).astype(np.float16)), grid)
    logits = torch.from_numpy(np.where(truth(grid) == 1, sure, -sure).astype(np.float32))
    half = Box((grid.shape[0] // 2, 0, 0), grid.shape)
    return Refined(LungBox(RIGHT_LUNG, half, grid), logits[half.slices], grid.cropped(half)), coarse


def found(refined: Refined, coarse: Coarse, labels: np.ndarray | None = None) -> Signs:
    scan = chest(chest_grid((3.0, 3.0, 5.0)))
    signs = signs_of(scan, truth(scan.grid) if labels is None else labels, refined, coarse)
    assert signs is not None
    return signs


def test_a_mask_on_which_all_agree_has_no_sign_of_trouble():
    signs = found(*parts())
    assert signs.abrupt < NOTABLE["abrupt"][0] / 2, "no lung is without a change of its cross-section"
    assert all(value < 0.05 for value in asdict(replace(signs, abrupt=0.0)).values()), signs
    assert judged(signs, None) == (None, ())


@pytest.mark.parametrize(
    ("sign", "refined_and_coarse"),
    [("disagreement", parts(shift_mm=40.0)), ("doubt", parts(sure=1.0)), ("others", parts(exchanged=True))],
)
def test_each_sign_sees_its_trouble(sign, refined_and_coarse):
    signs = found(*refined_and_coarse)
    limit, words = NOTABLE[sign]
    assert getattr(signs, sign) > limit
    assert words in judged(signs, None)[1]


def test_stage_2_may_be_unsure_at_the_surface_and_not_inside():
    refined, coarse = parts()
    right = refined.logits.numpy() > 0
    inner = np.logical_and.reduce([np.roll(right, by, axis) for axis in range(3) for by in (-1, 1)])
    unsure = [
        found(replace(refined, logits=refined.logits * torch.from_numpy(kept)), coarse)
        for kept in (~right | inner, ~inner)
    ]
    assert unsure[0].doubt < 0.02
    assert unsure[1].doubt > 0.3


def test_a_mask_that_misses_half_the_lung_is_seen_by_what_it_leaves_out():
    scan = chest(chest_grid((3.0, 3.0, 5.0)))
    labels = truth(scan.grid)
    labels[:, :, : labels.shape[2] // 2] = 0
    signs = found(*parts(), labels=labels)
    assert signs.missed > 0.5
    assert signs.disagreement > 0.2
    assert signs.abrupt > 2 * found(*parts()).abrupt


def test_a_surface_that_runs_through_lung_is_seen_by_its_having_no_edge():
    scan = chest(chest_grid((3.0, 3.0, 5.0)))
    labels = truth(scan.grid)
    right = labels == RIGHT_LUNG.value
    inner = np.logical_and.reduce([np.roll(right, by, axis) for axis in range(3) for by in (-4, 4)])
    assert found(*parts(), labels=np.where(right & ~inner, 0, labels)).faint > NOTABLE["faint"][0]
    assert found(*parts(), labels=labels).faint < 0.05


def test_a_mask_at_the_scans_border_and_one_of_tissue_are_seen():
    scan = chest(chest_grid((3.0, 3.0, 5.0)))
    labels = np.zeros(scan.grid.shape, np.uint8)
    labels[-8:] = 1
    signs = found(*parts(), labels=labels)
    assert signs.border > 0.4
    assert found(*parts()).border == 0


def test_wrong_hu_are_seen_around_the_lung_and_in_it():
    scan = chest(chest_grid((3.0, 3.0, 5.0)))
    for offset, sign in ((-500, "odd_tissue"), (500, "odd_tissue"), (900, "odd_hu")):
        signs = signs_of(replace(scan, intercept=float(offset)), truth(scan.grid), *parts())
        assert signs is not None
        assert getattr(signs, sign) > NOTABLE[sign][0]


def test_a_mask_far_too_large_has_an_odd_volume_even_where_it_is_cut():
    scan = chest(chest_grid((3.0, 3.0, 5.0)))
    signs = found(*parts(), labels=np.ones(scan.grid.shape, np.uint8))
    assert signs.border == 1
    assert signs.odd_volume > NOTABLE["odd_volume"][0]


def test_an_empty_mask_has_no_signs():
    scan = chest(chest_grid())
    assert signs_of(scan, np.zeros(scan.grid.shape, np.uint8), *parts()) is None


def test_quality_never_grows_with_trouble():
    clean = CALIBRATION.quality(CLEAN)
    assert clean == pytest.approx(1 / (1 + np.exp(-CALIBRATION.log_odds)))
    for name in CALIBRATION.weights:
        worse = [CALIBRATION.quality(replace(CLEAN, **{name: value})) for value in (0.0, 0.01, 0.1, 0.5, 1.0)]
        assert worse == sorted(worse, reverse=True)
        assert worse[-1] < 0.6
    assert CALIBRATION.quality(replace(CLEAN, disagreement=1e9)) == 0


def test_the_verdict_follows_the_quality_and_says_why():
    assert judged(CLEAN, CALIBRATION)[1] == ()
    quality, reasons = judged(replace(CLEAN, doubt=0.4), CALIBRATION)
    assert quality is not None
    assert quality < CALIBRATION.review_below
    assert reasons == (NOTABLE["doubt"][1],)
    # Trouble that is nowhere large: the largest share of it is named.
    assert judged(replace(CLEAN, disagreement=0.12, doubt=0.015), CALIBRATION)[1] == (NOTABLE["disagreement"][1],)


def test_a_model_keeps_its_calibration_in_its_notes():
    model = replace(tiny_model(), sha256="1" * 64)
    noted = replace(model, notes={NOTE: CALIBRATION.note(model.sha256)})
    assert Calibration.of(noted) == CALIBRATION
    assert Calibration.of(replace(noted, sha256="2" * 64)) is None, "other weights make other errors"
    assert Calibration.of(model) is None
    assert Calibration.of(replace(model, notes={NOTE: {"sha256": model.sha256, "best": 1.1}})) is None, "as once fitted"


def test_the_shorter_lung_is_noted_and_not_the_taller():
    assert compared(CLEAN, 150, 250).shorter > NOTABLE["shorter"][0]
    assert compared(CLEAN, 240, 250).shorter == 0
    assert compared(CLEAN, 250, 150) == CLEAN
    assert compared(CLEAN, 250, 0) == CLEAN


def test_a_lung_with_a_bay_in_it_fills_little_of_its_box():
    scan = chest(chest_grid((3.0, 3.0, 5.0)))
    labels = truth(scan.grid)
    z, y = (np.flatnonzero((labels == 1).any(axis=axes)) for axes in ((0, 1), (0, 2)))
    labels[:, y[0] + len(y) // 5 :, z[0] : z[0] + 3 * len(z) // 4] = 0
    assert found(*parts(), labels=labels).sparse > NOTABLE["sparse"][0]
    assert found(*parts()).sparse < 0.05


def test_a_lung_is_missed_only_where_it_could_be_seen():
    refined, _ = parts()
    wide = chest_grid((4.0, 4.0, 4.0))
    middle = wide.shape[0] // 2
    assert missing_reason(LEFT_LUNG, refined, wide) == ("no left lung was found although its place is in the scan",)
    tight = wide.cropped(Box((middle - 5, 0, 0), wide.shape))
    assert missing_reason(LEFT_LUNG, refined, tight) == ()
    assert missing_reason(LEFT_LUNG, None, wide) == ("no lung was found in this scan",)


def test_a_single_lung_on_the_other_ones_side_of_the_scan_is_doubted():
    refined, _ = parts()
    grid = chest_grid((4.0, 4.0, 4.0))
    nx, ny, nz = grid.shape
    further_right = grid.cropped(Box((nx // 2 - 3, 0, 0), (nx + 60, ny, nz)))
    reason = ("no left lung was found, and the right lung lies where it should be",)
    assert missing_reason(LEFT_LUNG, refined, further_right) == reason


def test_lungs_that_stage_1_calls_by_one_name_have_their_own_and_one_is_for_review():
    scan = chest(chest_grid())
    segmenter = thresholding_segmenter()
    segmenter.locator.all_right = True  # type: ignore[attr-defined]
    result = segmenter.segment(scan)
    assert dice(result.labels, truth(scan.grid), RIGHT_LUNG.value) > 0.97
    assert dice(result.labels, truth(scan.grid), LEFT_LUNG.value) > 0.97
    right, left = result.lungs
    assert right.reasons == ()
    assert left.reasons == ("stage 1 took it for the other lung: its side was told from where the two lie",)


def test_the_lattice_is_small_whatever_the_box():
    grid = Grid.axis_aligned((500, 400, 900), (2, 2, 2))
    lattice = lattice_of(LungBox(RIGHT_LUNG, Box.whole(grid.shape), grid))
    assert np.prod(lattice.shape) < 500_000
    assert np.allclose(lattice.world([n - 1 for n in lattice.shape]), grid.world([n - 1 for n in grid.shape]), atol=20)


def test_the_cascade_says_ok_of_a_clear_chest_and_review_of_half_a_one():
    scan = chest(chest_grid())
    result = thresholding_segmenter().segment(scan)
    assert result.verdict == "ok"
    assert result.quality is None, "the toy model has no calibration"
    voxels = scan.voxels.copy()
    voxels[truth(scan.grid) == LEFT_LUNG.value] = 40
    alone = thresholding_segmenter().segment(replace(scan, voxels=voxels))
    assert [lung.verdict for lung in alone.lungs] == ["ok", "review"]
    assert alone.verdict == "review"
