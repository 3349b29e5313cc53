from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cascadeseg.cascade.locate import BEYOND_MM
from cascadeseg.cascade.resample import windows_of
from cascadeseg.labels import BESIDE, IGNORE
from cascadeseg.training.augmentation import SHORTEST_MM, _blurred, cut, varied
from cascadeseg.training.cases import prepare
from cascadeseg.training.data import batch_of, patients_of
from tests.cascade.chest import chest_grid, dice, truth
from tests.training.toy import NOTHING_RANDOM, stage1, stage2, with_data


def patch_of(image, labels, config, seed):
    piece = cut(image, labels, config, torch.Generator().manual_seed(seed), config.optimisation.patch)
    return varied(piece, config)


def with_patch(config, voxels):
    return replace(config, optimisation=replace(config.optimisation, patch=(voxels,) * 3))


@pytest.fixture
def whole():
    return replace(stage1("none", patch=(64, 64, 64), on_lung=0.0), augmentation=NOTHING_RANDOM)


def test_without_augmentation_a_whole_patch_is_the_case(whole):
    image = np.random.default_rng(0).random((1, 24, 16, 32)).astype(np.float16)
    labels = (image[0] > 0.5).astype(np.uint8)
    patch, target = patch_of(image, labels, whole, 3)
    np.testing.assert_array_equal(patch.numpy(), image.astype(np.float32))
    np.testing.assert_array_equal(target.numpy(), labels)


def test_a_case_of_stage_1_goes_on_beyond_its_faces_where_they_cut_the_body_and_nothing_is_asked_there(whole):
    config = replace(whole, augmentation=replace(NOTHING_RANDOM, goes_on=1.0))
    beyond = round(BEYOND_MM / config.view.spacing_mm)
    image = np.random.default_rng(0).uniform(0.6, 1.0, (1, 24, 16, 32)).astype(np.float16)
    image[0, :, 0] = 0.0
    labels = (image[0] > 0.8).astype(np.uint8)
    patch, target = patch_of(image, labels, config, 3)
    sides = ((beyond, beyond), (0, beyond), (beyond, beyond))
    wanted = [np.pad(image[0].astype(np.float32), sides, mode="edge"), np.pad(labels, sides, constant_values=IGNORE)]
    inside = tuple(slice(0, n) for n in wanted[0].shape)
    for found, expected in zip((patch[0], target), wanted, strict=True):
        np.testing.assert_array_equal(found[inside].numpy(), expected)


def test_windows_of_a_case_that_goes_on_lie_anywhere_but_never_wholly_outside(whole):
    config = replace(with_patch(whole, 16), augmentation=replace(NOTHING_RANDOM, goes_on=1.0))
    beyond = round(BEYOND_MM / config.view.spacing_mm)
    image = np.ones((1, 40, 16, 1), np.float16)
    labels = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None, None] + 10, image.shape[1:])
    firsts = set()
    for seed in range(300):
        piece = cut(image, labels, config, torch.Generator().manual_seed(seed), (16, 16, 16))
        rows = piece.labels.amin(dim=(1, 2)).tolist()
        outside = next(index for index, row in enumerate(rows) if row != IGNORE)
        firsts.add(rows[outside] - 10 - outside)
    assert firsts == set(range(-beyond, 40 + beyond - 16 + 1))


def test_some_cases_of_stage_1_are_those_of_a_shorter_scan(whole):
    config = replace(whole, augmentation=replace(NOTHING_RANDOM, shorter=0.5))
    least = round(SHORTEST_MM / config.view.spacing_mm)
    labels = np.broadcast_to(np.arange(64, dtype=np.uint8), (8, 8, 64))
    found = []
    for seed in range(400):
        piece = cut(np.ones((1, 8, 8, 64), np.float16), labels, config, torch.Generator().manual_seed(seed), (64,) * 3)
        first, last = int(piece.labels.min()), int(piece.labels.max())
        assert piece.labels.shape == (8, 8, last - first + 1)
        found.append((last - first + 1, first))
    shorter = np.array([(length, first) for length, first in found if length < 64])
    assert 0.4 < len(shorter) / len(found) < 0.6
    assert shorter[:, 0].min() == least
    assert np.median(shorter[:, 0]) == pytest.approx((64 * least) ** 0.5, rel=0.2)
    assert np.corrcoef(shorter[:, 1] / (64 - shorter[:, 0]), shorter[:, 0])[0, 1] < 0.2


@pytest.mark.parametrize("stage", [1, 2])
def test_the_window_of_soft_tissue_is_opened_on_what_has_been_varied(stage):
    patch = (32, 32, 32)
    config = stage1("none", patch=patch) if stage == 1 else stage2("none", Path("none"), patch=patch)
    view = replace(config.view, tissue_low_hu=-150.0, tissue_high_hu=150.0)
    image = np.random.default_rng(0).uniform(0.8, 1.3, (1 + view.prior, 32, 32, 32)).astype(np.float16)
    patch, _ = patch_of(image, np.ones(image.shape[1:], np.uint8), replace(config, view=view), 3)
    assert len(patch) == view.channels
    assert torch.equal(patch[:2], windows_of(patch[:1], view))
    assert not torch.equal(patch[0], torch.from_numpy(image[0]).float())
    one_window, _ = patch_of(image, np.ones(image.shape[1:], np.uint8), config, 3)
    assert torch.equal(one_window, patch[[0, 2] if view.prior else [0]])


@pytest.mark.parametrize("warp", [0.0, 1.0])
def test_patches_have_the_networks_stride_and_the_asked_size_at_most(warp):
    config = stage1("none", patch=(32, 32, 32))
    config = replace(config, augmentation=replace(config.augmentation, warp=warp))
    image = np.zeros((1, 50, 21, 37), np.float16)
    for seed in range(6):
        patch, target = patch_of(image, image[0].astype(np.uint8), config, seed)
        assert patch.shape[1:] == target.shape
        assert all(n % config.unet.stride == 0 and n <= 32 for n in target.shape)


def test_a_seed_gives_the_same_patch_again():
    config = stage1("none", patch=(32, 32, 32))
    config = replace(config, augmentation=replace(config.augmentation, warp=1.0, low_resolution=1.0, blur=1.0))
    image = np.random.default_rng(0).random((1, 40, 40, 40)).astype(np.float16)
    labels = (image[0] > 0.5).astype(np.uint8)
    (a, la), (b, lb), (c, _) = (patch_of(image, labels, config, seed) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert torch.equal(la, lb)
    assert not torch.equal(a, c)


def test_mirroring_swaps_the_sides(whole):
    config = replace(whole, augmentation=replace(NOTHING_RANDOM, mirror=1.0))
    labels = truth(chest_grid((6.0, 6.0, 6.0)))[:52, :40, :40]
    image = labels[None].astype(np.float16) / 4
    patch, target = patch_of(image, labels, config, 0)
    np.testing.assert_array_equal(patch.numpy()[0, ::-1], image[0].astype(np.float32))
    np.testing.assert_array_equal(target.numpy()[::-1], np.array([0, 2, 1], np.uint8)[labels])


@pytest.mark.parametrize("warp", [0.0, 1.0])
def test_what_is_beside_the_lungs_is_varied_with_them(whole, warp):
    config = replace(whole, augmentation=replace(NOTHING_RANDOM, mirror=1.0, warp=warp, scale=0.1, rotation_deg=5.0))
    labels = np.full((40, 40, 40), BESIDE[0], np.uint8)
    labels[:, :, :20] = BESIDE[-1]
    image = labels[None].astype(np.float16) / 16
    patch, target = patch_of(image, labels, config, 0)
    asked = target != IGNORE
    assert asked.float().mean() > 0.5
    expected = torch.where(patch[0] * 16 > (BESIDE[0] + BESIDE[-1]) / 2, BESIDE[-1], BESIDE[0])
    assert float((target == expected)[asked].float().mean()) > 0.99


def test_stage_2_mirrors_by_itself():
    config = stage2("none", Path("none"), patch=(64, 64, 64), on_lung=0.0)
    config = with_data(replace(config, augmentation=replace(NOTHING_RANDOM, mirror=1.0)), box_jitter_mm=0.0)
    image = np.random.default_rng(0).random((2, 24, 16, 32)).astype(np.float16)
    patch, _ = patch_of(image, np.ones((24, 16, 32), np.uint8), config, 3)
    np.testing.assert_array_equal(patch.numpy(), image.astype(np.float32))


def _grey(config, seeds=150, **amounts):
    """(seeds, 3) of each patch, with only these amounts: means where the image is 0 (air), 0.4 and 0.8, and sds."""
    config = replace(config, augmentation=replace(NOTHING_RANDOM, **amounts))
    image = np.repeat(np.float16([0, 0.4, 0.8]), 16 * 8 * 8).reshape(1, 48, 8, 8)
    patches = [patch_of(image, np.ones(image.shape[1:], np.uint8), config, seed)[0][0] for seed in range(seeds)]
    parts = np.stack([np.stack(patch.numpy().reshape(3, -1)) for patch in patches])
    return parts.mean(axis=2), parts.std(axis=2)


@pytest.mark.parametrize("amount", [0.02, 0.05])
def test_gain_multiplies_by_its_standard_deviation(whole, amount):
    means, _ = _grey(whole, gain=amount)
    assert not means[:, 0].any()
    for column, value in ((1, 0.4), (2, 0.8)):
        assert np.std(means[:, column] / value - 1) == pytest.approx(amount, rel=0.2)
        assert np.mean(means[:, column]) == pytest.approx(value, abs=0.01)


@pytest.mark.parametrize("amount", [10.0, 30.0])
def test_an_offset_has_its_standard_deviation_in_hu_and_leaves_air(whole, amount):
    means, _ = _grey(whole, offset_hu=amount)
    assert not means[:, 0].any()
    for column in (1, 2):
        assert 1000 * np.std(means[:, column]) == pytest.approx(amount, rel=0.2)


@pytest.mark.parametrize("amount", [0.05, 0.1])
def test_gamma_is_an_exponent_whose_logarithm_has_its_standard_deviation(whole, amount):
    means, _ = _grey(whole, gamma=amount)
    highest = 1.624
    for column, value in ((1, 0.4), (2, 0.8)):
        exponents = np.log(means[:, column] / highest) / np.log(value / highest)
        assert np.std(np.log(exponents)) == pytest.approx(amount, rel=0.2)


@pytest.mark.parametrize("amount", [20.0, 60.0])
def test_half_of_the_patches_have_noise_of_up_to_its_amount_in_hu(whole, amount):
    _, sds = _grey(whole, seeds=600, noise_hu=amount)
    noisy = 1000 * sds[sds[:, 2] > 1e-6][:, 2]
    assert 0.35 < len(noisy) / len(sds) < 0.65
    assert noisy.max() == pytest.approx(amount, rel=0.15)
    assert noisy.mean() == pytest.approx(amount / 2, rel=0.2)


def test_a_warp_moves_image_and_labels_together(whole):
    amounts = replace(NOTHING_RANDOM, warp=1.0, rotation_deg=8.0, elastic_mm=12.0)
    config = replace(whole, augmentation=amounts)
    labels = truth(chest_grid((6.0, 6.0, 6.0)))[:52, :40, :40]
    image = (labels == 1)[None].astype(np.float16)
    patch, target = patch_of(image, labels, config, 5)
    asked = (target != IGNORE).numpy()
    assert 0.5 < asked.mean() < 1
    assert dice((patch[0].numpy() > 0.5)[asked], (target.numpy() == 1)[asked], True) > 0.97
    assert dice(target.numpy(), labels, 1) < 0.97


def test_without_rotation_and_bending_a_warp_changes_nothing(whole):
    config = replace(whole, augmentation=replace(NOTHING_RANDOM, warp=1.0, rotation_deg=0.0, elastic_mm=0.0))
    image = np.random.default_rng(0).random((1, 24, 16, 32)).astype(np.float16)
    labels = (image[0] > 0.5).astype(np.uint8)
    patch, target = patch_of(image, labels, config, 3)
    assert torch.allclose(patch, torch.from_numpy(image).float(), atol=1e-4)
    np.testing.assert_array_equal(target.numpy(), labels)


def test_thick_slices_average_along_one_axis_only(whole):
    config = replace(whole, augmentation=replace(NOTHING_RANDOM, low_resolution=1.0, thickest_mm=30.0))
    image = np.random.default_rng(0).random((1, 24, 24, 24)).astype(np.float16)
    patch, _ = patch_of(image, np.zeros((24,) * 3, np.uint8), config, 1)
    rough = [float(patch[0].diff(dim=axis).abs().mean()) for axis in range(3)]
    assert min(rough) < 0.5 * max(rough)
    assert float(patch.mean()) == pytest.approx(float(image.astype(np.float32).mean()), abs=0.02)


def test_some_patches_are_clipped_as_to_the_window_of_a_display(whole):
    config = replace(whole, augmentation=replace(NOTHING_RANDOM, window=1.0))
    image = np.linspace(0, 1.6, 24 * 16 * 32, dtype=np.float16).reshape(1, 24, 16, 32)
    for seed in range(20):
        patch, target = patch_of(image, np.ones((24, 16, 32), np.uint8), config, seed)
        low, high = 1000 * float(patch.min()) - 1024, 1000 * float(patch.max()) - 1024
        assert -1000 <= low <= -900
        assert 100 <= high <= 576
        inside = (image > patch.numpy().min()) & (image < patch.numpy().max())
        np.testing.assert_array_equal(patch.numpy()[inside], image[inside].astype(np.float32))
        assert target.all()


@pytest.mark.parametrize("fixed", [True, False])
def test_with_a_fixed_size_every_patch_has_one_shape(fixed):
    config = stage1("none", patch=(48, 32, 32), fixed_size=fixed)
    image = np.random.default_rng(0).random((1, 40, 29, 21)).astype(np.float16)
    labels = np.ones((40, 29, 21), np.uint8)
    shapes = set()
    for seed in range(5):
        piece = cut(image, labels, config, torch.Generator().manual_seed(seed), config.optimisation.patch)
        patches, targets = batch_of([piece], config, torch.device("cpu"))
        shapes.add(tuple(targets.shape[1:]))
        assert patches.shape == (1, 1, *targets.shape[1:])
        asked = targets[0] != IGNORE
        assert 0 < asked.sum() <= 40 * 29 * 21 * 1.5
    assert (shapes == {(48, 32, 32)}) == fixed


def test_each_face_of_a_whole_crop_of_stage_2_lies_within_the_jitter_of_inferences_box(folder, tmp_path):
    jitter, spacing, stride = 16, 4, 4
    config = with_data(stage2(folder, Path("none"), patch=(96, 96, 96), on_lung=0.0), box_jitter_mm=float(jitter))
    config = replace(config, augmentation=NOTHING_RANDOM)
    (patient, *_), _ = patients_of(config, tmp_path / "split.json")
    patient = replace(patient, case=replace(patient.case, digest="1"))  # whose boxes lie inside the scan
    (case, _), (as_inferred, _) = (prepare(patient, with_data(config, box_jitter_mm=mm), None) for mm in (jitter, 0.0))
    added = [n - m for n, m in zip(case.labels.shape, as_inferred.labels.shape, strict=True)]
    assert max(abs(n * spacing - 2 * jitter) for n in added) < stride * spacing  # no face is where the scan ends
    numbered = np.indices(case.labels.shape)[[0, 1]].astype(np.float16)
    moved = []
    for seed in range(120):
        piece = cut(numbered, case.labels.numpy(), config, torch.Generator().manual_seed(seed), (96, 96, 96))
        first, last = piece.image[0].min(), piece.image[0].max()
        moved.append((jitter - spacing * int(first), jitter - spacing * int(case.labels.shape[0] - 1 - last)))
    near, far = np.array(moved).T
    for face in (near, far):
        assert (face.min(), face.max()) == (-jitter, jitter)
        assert abs(face.mean()) < 0.25 * jitter
    assert abs(np.corrcoef(near, far)[0, 1]) < 0.3
    half = cut(numbered[:, :6], case.labels.numpy()[:6], config, torch.Generator().manual_seed(1), (96, 96, 96))
    assert half.labels.shape[0] >= 3


def test_a_blur_does_not_reach_from_one_face_to_the_other():
    image = torch.zeros(1, 16, 16, 16)
    image[:, 0] = 1.0
    for axis in (1, 2, 3):
        blurred = _blurred(image.transpose(1, axis), axis, 4).transpose(1, axis)
        assert blurred[0, 8:].abs().max() == 0
        assert 0.4 < float(blurred[0, 0].min()) < 1
        assert bool((blurred[0].diff(dim=0) <= 0).all())
    flat = torch.full((1, 4, 1, 4), 0.7)
    assert torch.allclose(_blurred(flat, 2, 3), flat)


def test_the_opinion_on_a_thin_crop_can_be_damaged():
    config = stage2("none", Path("none"), patch=(64, 64, 64), on_lung=0.0)
    config = replace(config, augmentation=replace(NOTHING_RANDOM, prior=1.0))
    image, labels = np.ones((2, 40, 32, 8), np.float16), np.ones((40, 32, 8), np.uint8)
    patches = [patch_of(image, labels, config, seed)[0] for seed in range(8)]
    assert min(patch.shape[-1] for patch in patches) < 8
    assert all(opinion[image == 1].min() < 1 for image, opinion in patches)
