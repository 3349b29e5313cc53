"""Scores against analytic spheres, shifted boxes, and MONAI's own metrics as an oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cascadeseg.evaluation.metrics import evaluate, evaluate_as_one, surface
from cascadeseg.labels import IGNORE, LEFT_LUNG, RIGHT_LUNG

Labels = npt.NDArray[np.uint8]


def ball(shape: tuple[int, int, int], centre_mm: tuple[float, ...], radius_mm: float, spacing: Any) -> Labels:
    axes = np.ogrid[tuple(slice(0, n) for n in shape)]
    squares = [(a * s - c) ** 2 for a, s, c in zip(axes, spacing, centre_mm, strict=True)]
    return (sum(squares) <= radius_mm**2).astype(np.uint8)


def box(shape: tuple[int, int, int], start: tuple[int, ...], stop: tuple[int, ...], value: int = 1) -> Labels:
    labels = np.zeros(shape, np.uint8)
    labels[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = value
    return labels


def test_a_perfect_mask_is_perfect() -> None:
    labels = box((12, 12, 12), (2, 2, 2), (5, 9, 9)) + box((12, 12, 12), (6, 2, 2), (10, 9, 9), 2)
    for scores, label in zip(evaluate(labels, labels, (1, 1, 2)), (RIGHT_LUNG, LEFT_LUNG), strict=True):
        assert scores.label is label
        assert (scores.dice, scores.nsd_1mm, scores.nsd_2mm) == (1, 1, 1)
        assert (scores.hd95_mm, scores.assd_mm, scores.volume_error_ml) == (0, 0, 0)
    assert evaluate(labels, labels, (1, 1, 2))[0].volume_ml == pytest.approx(3 * 7 * 7 * 2 / 1000)


def test_a_block_has_the_area_of_its_faces_whatever_the_spacing() -> None:
    for spacing in [(1.0, 1.0, 1.0), (0.5, 0.8, 2.0)]:
        x, y, z = (n * s for n, s in zip((20, 30, 40), spacing, strict=True))
        mask = np.ones((20, 30, 40), bool)
        # A little less than the faces: the surface cuts the edges off.
        assert 0.93 < surface(mask, spacing).areas_mm2.sum() / (2 * (x * y + y * z + z * x)) < 1


def test_concentric_balls_are_their_radii_apart() -> None:
    spacing = (0.5, 0.5, 0.5)
    small, large = (ball((60, 60, 60), (15, 15, 15), radius, spacing) for radius in (10.0, 11.5))
    scores = evaluate(small, large, spacing)[0]
    assert scores.dice == pytest.approx(2 * 10**3 / (10**3 + 11.5**3), abs=0.005)
    # Never more than the truth: from each step of one staircase the nearest step of the other is meant.
    assert 1.2 < scores.assd_mm < 1.5
    assert scores.hd95_mm == pytest.approx(1.5, abs=0.3)
    assert scores.nsd_1mm < 0.1
    assert scores.nsd_2mm == 1
    assert scores.volume_error_percent == pytest.approx(100 * ((10 / 11.5) ** 3 - 1), abs=0.5)


def test_a_shift_along_each_axis_is_measured_in_mm() -> None:
    spacing = (0.7, 1.0, 3.0)
    reference = box((20, 20, 20), (5, 5, 5), (12, 12, 12))
    for axis in range(3):
        scores = evaluate(np.roll(reference, 1, axis), reference, spacing)[0]
        assert scores.dice == pytest.approx(6 / 7)
        assert scores.hd95_mm == pytest.approx(spacing[axis], abs=1e-3)
        assert (scores.nsd_2mm == 1) == (spacing[axis] <= 2)
        assert scores.volume_error_ml == 0


@pytest.mark.parametrize("spacing_mm", [2 / 3, 1 / 3, 0.7, 0.2])
def test_surfaces_just_at_a_tolerance_are_within_it(spacing_mm: float) -> None:
    """However the spacing is rounded."""
    mask, larger = np.zeros((2, 60, 3, 3), np.uint8)
    mask[:20], larger[: 20 + round(2 / spacing_mm)] = 1, 1
    apart = round(2 / spacing_mm) * spacing_mm
    right = evaluate(larger, mask, (spacing_mm, 40.0, 40.0))[0]
    assert right.hd95_mm == pytest.approx(apart, abs=1e-5)
    assert (right.nsd_2mm == 1.0) == (apart < 2.00001)


def test_ignored_voxels_count_for_neither() -> None:
    reference = box((16, 16, 16), (4, 4, 4), (12, 12, 12))
    reference[8:, :, 8:] = IGNORE
    right = np.where(reference == IGNORE, 0, reference).astype(np.uint8)
    wrong_in_ignored = right.copy()
    wrong_in_ignored[9:14, 2:14, 9:14] = 1
    for prediction in (right, wrong_in_ignored):
        scores = evaluate(prediction, reference, (1, 1, 1))[0]
        assert (scores.dice, scores.nsd_1mm, scores.hd95_mm, scores.volume_error_ml) == (1, 1, 0, 0)


def test_empty_masks_have_documented_scores() -> None:
    empty, full = np.zeros((8, 8, 8), np.uint8), box((8, 8, 8), (2, 2, 2), (6, 6, 6))
    both = evaluate(empty, empty, (1, 1, 1))[0]
    assert (both.dice, both.nsd_1mm, both.nsd_2mm) == (1, 1, 1)
    assert math.isnan(both.hd95_mm)
    assert math.isnan(both.assd_mm)
    assert math.isnan(both.volume_error_percent)
    missed, invented = evaluate(empty, full, (1, 1, 1))[0], evaluate(full, empty, (1, 1, 1))[0]
    for scores in (missed, invented):
        assert (scores.dice, scores.nsd_1mm, scores.nsd_2mm) == (0, 0, 0)
        assert (scores.hd95_mm, scores.assd_mm) == (math.inf, math.inf)
    assert missed.volume_error_percent == -100
    assert invented.volume_error_percent == math.inf


def test_a_swap_of_sides_scores_nothing() -> None:
    labels = box((12, 12, 12), (1, 2, 2), (5, 9, 9)) + box((12, 12, 12), (6, 2, 2), (11, 9, 9), 2)
    swapped = np.choose(labels, [0, 2, 1]).astype(np.uint8)
    assert [scores.dice for scores in evaluate(swapped, labels, (1, 1, 1))] == [0, 0]
    as_one = evaluate_as_one(swapped, labels, (1, 1, 1))
    assert (as_one.dice, as_one.nsd_1mm, as_one.hd95_mm, as_one.volume_error_ml) == (1, 1, 0, 0)


def test_both_lungs_as_one_are_neither_the_mean_nor_split_where_they_meet() -> None:
    reference = box((24, 12, 12), (2, 2, 2), (14, 10, 10)) + box((24, 12, 12), (14, 2, 2), (22, 10, 10), 2)
    prediction = reference.copy()
    prediction[14:22] = 0
    reference[2:4] = IGNORE
    left_out, kept = 8 * 8 * 8, 10 * 8 * 8
    as_one = evaluate_as_one(prediction, reference, (1, 1, 1))
    assert as_one.dice == pytest.approx(2 * kept / (2 * kept + left_out))
    assert (as_one.volume_ml, as_one.reference_ml) == pytest.approx((kept / 1000, (kept + left_out) / 1000))
    assert [lung.dice for lung in evaluate(prediction, reference, (1, 1, 1))] == [1, 0]


def test_masks_at_the_border_of_the_volume_have_a_surface_there() -> None:
    whole = np.ones((4, 5, 6), np.uint8)
    assert evaluate(whole, whole, (1, 1, 1))[0].hd95_mm == 0
    assert surface(whole.astype(bool), (1, 1, 1)).elements.shape == (5, 6, 7)


def test_shapes_must_agree() -> None:
    for scores in (evaluate, evaluate_as_one):
        with pytest.raises(ValueError, match="shape"):
            scores(np.zeros((2, 2, 2)), np.zeros((2, 2, 3)), (1, 1, 1))


def test_agrees_with_monai() -> None:
    pytest.importorskip("scipy", reason="MONAI's metrics need SciPy")
    import torch
    from monai.metrics import compute_hausdorff_distance, compute_surface_dice

    spacing = (0.8, 0.8, 2.5)
    axes = np.ogrid[:28, :30, :18]
    bumps = 1 + 0.15 * np.sin(axes[0] / 2.0) * np.cos(axes[1] / 3.0)
    reference = (ball((28, 30, 18), (11, 12, 22), 9, spacing) > 0).astype(np.uint8)
    prediction = (
        sum(((a * s - c) / 8.5) ** 2 for a, s, c in zip(axes, spacing, (12, 12, 20), strict=True)) < bumps
    ).astype(np.uint8)
    ours = evaluate(prediction, reference, spacing)[0]
    one_hot = [torch.from_numpy(labels.astype(bool))[None, None] for labels in (prediction, reference)]
    theirs = compute_surface_dice(
        *one_hot, class_thresholds=[2.0], include_background=True, spacing=spacing, use_subvoxels=True
    )
    assert ours.nsd_2mm == pytest.approx(float(theirs), abs=1e-5)
    hausdorff = compute_hausdorff_distance(*one_hot, include_background=True, percentile=95, spacing=spacing)
    # MONAI counts voxels, not areas, so the two agree to within a voxel.
    assert ours.hd95_mm == pytest.approx(float(hausdorff), abs=max(spacing))
