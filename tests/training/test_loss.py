from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from cascadeseg.labels import BESIDE, IGNORE
from cascadeseg.training import loss
from cascadeseg.training.config import OptimisationConfig
from cascadeseg.training.loss import SMOOTH_VOXELS, segmentation_loss, supervised_loss
from cascadeseg.training.optimiser import learning_rate


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


def test_a_batchs_loss_is_the_mean_of_its_patches_losses():
    logits = torch.randn(3, 3, 8, 8, 8)
    labels = torch.randint(0, 3, (3, 8, 8, 8), dtype=torch.uint8)
    labels[0, :4] = IGNORE
    together = segmentation_loss(logits, labels)[0]
    single = [segmentation_loss(logits[i : i + 1], labels[i : i + 1])[0] for i in range(3)]
    assert torch.allclose(together, torch.stack(single).mean())


def test_what_is_beside_the_lungs_is_told_from_them_and_has_no_dice():
    labels = torch.zeros(1, 8, 8, 8, dtype=torch.uint8)
    labels[:, :2], labels[:, 2:4], labels[:, 4:6] = BESIDE[0], 1, 2
    said = 8.0 * torch.nn.functional.one_hot(labels.long(), 4).movedim(-1, 1)
    good, dice_good = segmentation_loss(said, labels)
    unnamed, dice_unnamed = segmentation_loss(said[:, [3, 1, 2, 0]], labels)
    _, dice_taken = segmentation_loss(said[:, [0, 3, 2, 1]], labels)
    assert float(good) < 0.05
    assert float(dice_unnamed) == pytest.approx(float(dice_good), abs=1e-3)
    assert float(unnamed) > 1
    assert float(dice_taken) < 0.7


def as_written_in_textbooks(logits, labels):
    """Cross-entropy plus one minus soft Dice, by autograd alone."""
    counts = labels != IGNORE
    scores = logits if logits.shape[1] > 1 else torch.cat([torch.zeros_like(logits), logits], dim=1)
    entropy = F.cross_entropy(scores, torch.where(counts, labels, 0).long(), reduction="none")
    lungs = range(1, min(3, scores.shape[1]))
    probabilities, dices = torch.softmax(scores, dim=1), []
    for lung in lungs:
        p, truth = probabilities[:, lung] * counts, (labels == lung).double()
        overlap, total = (p * truth).sum((1, 2, 3)), (p + truth).sum((1, 2, 3))
        dices.append((2 * overlap + SMOOTH_VOXELS) / (total + SMOOTH_VOXELS))
    dice = torch.stack(dices).mean()
    return ((entropy * counts).sum((1, 2, 3)) / counts.sum((1, 2, 3)).clamp(min=1)).mean() + 1 - dice, dice


@pytest.mark.parametrize("voxels", [1, 3 * 36, 10**6])
@pytest.mark.parametrize("channels", [1, 3, 6])
def test_loss_and_gradient_are_those_of_the_textbook_however_a_patch_is_parted(monkeypatch, channels, voxels):
    monkeypatch.setattr(loss, "SLAB_VOXELS", voxels)
    random = torch.Generator().manual_seed(channels)
    logits = 3 * torch.randn(2, channels, 7, 6, 6, generator=random, dtype=torch.float64)
    labels = torch.randint(0, max(2, channels), (2, 7, 6, 6), generator=random).to(torch.uint8)
    labels[0, :2], labels[1, :, 3] = IGNORE, IGNORE
    results = []
    for function in (segmentation_loss, as_written_in_textbooks):
        x = logits.clone().requires_grad_()
        value, dice = function(x, labels)
        (3 * value).backward()
        results.append((value.detach(), dice.detach(), x.grad))
    for mine, textbook in zip(*results, strict=True):
        torch.testing.assert_close(mine, textbook, rtol=1e-9, atol=1e-12)


def test_between_the_passes_the_loss_keeps_the_logits_as_they_are_and_little_else():
    logits = torch.randn(1, 6, 16, 16, 16).bfloat16().requires_grad_()
    labels = torch.randint(0, 6, (1, 16, 16, 16), dtype=torch.uint8)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        segmentation_loss(logits, labels)
    assert sum(x.nbytes for x in kept) < logits.nbytes + labels.nbytes + 1000


@pytest.mark.parametrize("channels", [1, 3])
def test_deep_supervision_asks_every_level_for_the_same_thing(channels):
    labels = torch.zeros(1, 16, 16, 16, dtype=torch.uint8)
    labels[:, 4:12, 4:12, 4:12] = 1
    levels = []
    for factor in (1, 4):
        mask = labels[:, ::factor, ::factor, ::factor] == 1
        logits = torch.full((1, channels, *mask.shape[1:]), -9.0)
        logits[:, 0 if channels == 1 else 1][mask] = 9.0
        if channels == 3:
            logits[:, 0][~mask] = 9.0
        levels.append(logits)
    one, both, wrong = (supervised_loss(x, labels)[0] for x in (levels[0], levels, [levels[0], -levels[1]]))
    assert float(both) < 0.6
    assert float(wrong) > float(both) + 1 > float(one)


@pytest.mark.parametrize("schedule", ["cosine", "poly"])
def test_the_learning_rate_warms_up_and_falls_to_zero(schedule):
    numbers = OptimisationConfig(steps=100, warm_up=10, learning_rate=1.0, schedule=schedule)
    rates = [learning_rate(numbers, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[99] < 0.02
    assert all(a >= b for a, b in pairwise(rates[10:]))
