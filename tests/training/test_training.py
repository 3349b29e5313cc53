from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from cascadeseg.cascade.pipeline import Segmenter
from cascadeseg.cascade.refine import lung_image
from cascadeseg.errors import ConfigError
from cascadeseg.formats import read_scan, write_labels, write_scan
from cascadeseg.labels import IGNORE, LUNGS
from cascadeseg.network import UNetConfig, View, load_model
from cascadeseg.training.augmentation import random_patch
from cascadeseg.training.cases import FolderPatients, labels_on
from cascadeseg.training.config import AugmentationConfig, DataConfig, OptimisationConfig, TrainingConfig
from cascadeseg.training.loop import learning_rate, train
from cascadeseg.training.loss import segmentation_loss
from tests.cascade.chest import chest, chest_grid, dice, truth

NOTHING_RANDOM = AugmentationConfig(scale=0, mirror=0, gain=0, offset_hu=0, noise_hu=0, blur=0, prior=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three toy chests in nnU-Net's raw layout."""
    root = tmp_path_factory.mktemp("data") / "Dataset001_Toy"
    (root / "imagesTr").mkdir(parents=True)
    (root / "labelsTr").mkdir()
    for number, spacing in enumerate([(6.0, 6.0, 6.0), (5.0, 5.0, 8.0), (6.0, 6.0, 5.0)]):
        scan = chest(chest_grid(spacing))
        write_scan(scan.voxels, scan.grid, root / "imagesTr" / f"toy_{number}_0000.nii.gz")
        path = root / "imagesTr" / f"toy_{number}_0000.nii.gz"
        write_labels(truth(scan.grid), root / "labelsTr" / f"toy_{number}.nii.gz", read_scan(path))
    return root


def stage1(folder: Path, **optimisation) -> TrainingConfig:
    numbers = {
        "steps": 6,
        "patch": (32, 32, 32),
        "precision": "fp32",
        "validate_every": 3,
        "save_every": 2,
        "warm_up": 2,
    }
    return TrainingConfig(
        stage=1,
        view=View(6.0),
        unet=UNetConfig(1, 3, widths=(8, 16)),
        name="toy",
        data=DataConfig(source=str(folder), validation=1, workers=1),
        optimisation=OptimisationConfig(**(numbers | optimisation)),
    )


def stage2(folder: Path, locator: Path, **optimisation) -> TrainingConfig:
    base = stage1(folder, **optimisation)
    unet = UNetConfig(2, 1, widths=(8, 16), block="bottleneck")
    return replace(base, stage=2, view=View(4.0, prior=True), unet=unet, locator=str(locator))


def test_both_stages_train_on_a_folder_and_infer_takes_the_model(folder, tmp_path):
    learning = {
        "steps": 130,
        "patch": (64, 64, 64),
        "learning_rate": 1e-2,
        "ema": 0.8,
        "validate_every": 130,
        "save_every": 130,
    }
    first = train(stage1(folder, **learning), tmp_path / "one", device="cpu", quiet=True)
    second = train(stage2(folder, first, **learning), tmp_path / "two", device="cpu", quiet=True)
    scan = chest(chest_grid((4.0, 4.0, 5.0)))
    labels = Segmenter(second, device="cpu").segment(scan).labels
    assert min(dice(labels, truth(scan.grid), lung.value) for lung in LUNGS) > 0.9
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 130
    assert lines[-1]["dice_lung"] > 0.9
    assert (tmp_path / "two" / "config.toml").exists()


def test_a_resumed_run_equals_an_uninterrupted_one(folder, tmp_path):
    whole = train(stage1(folder), tmp_path / "whole", device="cpu", quiet=True)
    parts = tmp_path / "parts"
    train(stage1(folder), parts, device="cpu", quiet=True, stop_after=3)
    with pytest.raises(ConfigError, match="a run that has begun; expected a new folder; add --resume"):
        train(stage1(folder), parts, device="cpu", quiet=True)
    resumed = train(stage1(folder), parts, resume=True, device="cpu", quiet=True)
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()


def test_resuming_with_another_recipe_is_refused(folder, tmp_path):
    train(stage1(folder), tmp_path, device="cpu", quiet=True, stop_after=2)
    with pytest.raises(ConfigError, match=r"another recipe.*optimisation"):
        train(stage1(folder, learning_rate=1.0), tmp_path, resume=True, device="cpu", quiet=True)


def test_a_folder_without_cases_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a folder with imagesTr/CASE_0000.nii.gz"):
        train(stage1(tmp_path), tmp_path / "run", device="cpu", quiet=True)


def test_a_cached_case_is_what_inference_sees(folder):
    config = stage1(folder)
    patients = FolderPatients(config, None)
    (case,) = patients.prepare(1)
    scan = read_scan(patients.images[1]).canonical()
    grid = scan.grid.resampled(6.0)
    seen = lung_image(scan, None, LUNGS[0], grid, View(6.0), torch.device("cpu"))
    assert torch.equal(case.image, seen)
    assert dice(case.labels.numpy(), truth(grid), 1) > 0.95


def test_without_augmentation_a_whole_patch_is_the_case():
    config = replace(stage1(Path("none"), patch=(64, 64, 64), on_lung=0.0), augmentation=NOTHING_RANDOM)
    image = np.random.default_rng(0).random((1, 24, 16, 32)).astype(np.float16)
    labels = (image[0] > 0.5).astype(np.uint8)
    patch, target = random_patch(image, labels, config, torch.Generator().manual_seed(3))
    np.testing.assert_array_equal(patch.numpy(), image.astype(np.float32))
    np.testing.assert_array_equal(target.numpy(), labels)


def test_patches_have_the_networks_stride_and_the_asked_size_at_most():
    config = stage1(Path("none"), patch=(32, 32, 32))
    image = np.zeros((1, 50, 21, 37), np.float16)
    for seed in range(8):
        patch, target = random_patch(image, image[0].astype(np.uint8), config, torch.Generator().manual_seed(seed))
        assert patch.shape[1:] == target.shape
        assert all(n % config.unet.stride == 0 and n <= 32 for n in target.shape)


def test_mirroring_swaps_the_sides():
    amounts = replace(NOTHING_RANDOM, mirror=1.0)
    config = replace(stage1(Path("none"), patch=(64, 64, 64), on_lung=0.0), augmentation=amounts)
    labels = truth(chest_grid((6.0, 6.0, 6.0)))[:52, :40, :40]
    image = labels[None].astype(np.float16) / 4
    patch, target = random_patch(image, labels, config, torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(patch.numpy()[0, ::-1], image[0].astype(np.float32))
    swapped = np.array([0, 2, 1], np.uint8)[labels]
    np.testing.assert_array_equal(target.numpy()[::-1], swapped)


def test_labels_on_another_grid_keep_their_volume():
    fine = chest_grid((2.0, 2.0, 2.0))
    coarse = fine.resampled(5.0)
    assert dice(labels_on(truth(fine), fine, coarse).numpy(), truth(coarse), 2) > 0.97


@pytest.mark.parametrize("channels", [1, 3])
def test_the_loss_falls_with_agreement_and_ignores_what_is_ignored(channels):
    labels = torch.zeros(1, 8, 8, 8, dtype=torch.uint8)
    labels[:, 2:6, 2:6, 2:6] = 1
    right = torch.full((1, channels, 8, 8, 8), -8.0)
    right[:, channels - 1 if channels == 1 else 1] = torch.where(labels == 1, 8.0, -8.0)
    if channels == 3:
        right[:, 0] = torch.where(labels == 0, 8.0, -8.0)
        labels[:, 0, 0, 0] = 2
        right[:, :, 0, 0, 0] = torch.tensor([-8.0, -8.0, 8.0])
    good, dice_good = segmentation_loss(right, labels)
    bad, _ = segmentation_loss(-right, labels)
    assert float(good) < 0.3 < 2 < float(bad)
    assert float(dice_good) > 0.7
    ignored = torch.full_like(labels, IGNORE)
    assert float(segmentation_loss(-right, ignored)[0]) == pytest.approx(float(segmentation_loss(right, ignored)[0]))


def test_the_learning_rate_warms_up_and_falls_to_zero():
    numbers = OptimisationConfig(steps=100, warm_up=10, learning_rate=1.0)
    rates = [learning_rate(numbers, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[99] < 0.001
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_an_interrupted_run_keeps_its_checkpoint(folder, tmp_path, monkeypatch):
    from cascadeseg.training import loop

    real = loop._step

    def interrupted(config, state, patches, place):
        if state.step == 4:
            raise KeyboardInterrupt
        return real(config, state, patches, place)

    monkeypatch.setattr(loop, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(stage1(folder, save_every=100), tmp_path, device="cpu", quiet=True)
    monkeypatch.undo()
    train(stage1(folder, save_every=100), tmp_path, resume=True, device="cpu", quiet=True)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 6
    assert load_model(tmp_path / "model").notes["stage1_steps"] == 6
