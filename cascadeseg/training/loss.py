"""The loss of both stages: cross-entropy plus soft Dice.

MONAI's DiceCELoss was weighed: it has no ignored voxels, and the recipe's training path should run where MONAI is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cascadeseg.labels import BACKGROUND, IGNORE, LUNG_CHANNELS

SMOOTH_VOXELS = 50.0
"""Keeps the Dice of a patch without lung near 1 for a few false voxels, instead of 0 for a single one."""
SLAB_VOXELS = 2**20
"""Of a patch at a time; the smaller, the less memory, and the more of the time goes into starting what is done."""


def supervised_loss(logits: Tensor | Sequence[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a network's output; of deep supervision's levels, each counts half as much as the finer one.

    Args:
        logits: (B, K, X, Y, Z), or a list of them, finest first.
        labels: (B, X, Y, Z) uint8 at the finest level.

    Returns:
        The loss, and the finest level's mean soft Dice (detached), for the log.
    """
    if isinstance(logits, Tensor):
        return segmentation_loss(logits, labels)
    losses, scores = zip(*(segmentation_loss(each, _coarser(labels, each)) for each in logits), strict=True)
    shares = [0.5**level for level in range(len(losses))]
    total = torch.stack([share * loss for share, loss in zip(shares, losses, strict=True)]).sum()
    return total / sum(shares), scores[0]


def _coarser(labels: Tensor, logits: Tensor) -> Tensor:
    """The label with most of each cell, nothing asked where some of a cell is not."""
    factor = labels.shape[-1] // logits.shape[-1]
    if factor == 1:
        return labels
    values = range(max(2, logits.shape[1]))
    shares = torch.stack([(labels == value).float() for value in values], dim=1)
    coarse = F.avg_pool3d(shares, factor).argmax(dim=1).to(torch.uint8)
    ignored = F.max_pool3d((labels == IGNORE).float()[:, None], factor)[:, 0] > 0
    return coarse.masked_fill(ignored, IGNORE)


def segmentation_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy plus one minus the mean soft Dice (Milletari 2016, doi 10.1109/3DV.2016.79) of the lungs.

    Both are means over patches of a patch's own value, so a batch's loss is the mean of its patches' losses, however
    the batch is divided. Neither pass keeps more than the logits: both go through a patch slab by slab.

    Args:
        logits: (B, K, X, Y, Z): K = 1, one lung by its logit; K >= 3, background, right, left, and what is beside them,
            which only the cross-entropy knows.
        labels: (B, X, Y, Z) uint8; `IGNORE` voxels count for nothing.

    Returns:
        The loss, and the mean soft Dice alone (detached), for the log.
    """
    loss, dice = _CrossEntropyAndDice.apply(logits, labels)  # type: ignore[no-untyped-call]
    return loss, dice


class _CrossEntropyAndDice(torch.autograd.Function):
    """The loss with its gradient written out.

    By itself autograd keeps several float32 copies of the logits, at full resolution and of every class, which take a
    processor as long to make as slim convolutions, and a small GPU's memory.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        lungs = _lungs(logits)
        entropy, asked = logits.new_zeros(2, len(logits), dtype=_exact(logits))
        overlap, total = logits.new_zeros(2, len(logits), lungs.stop - lungs.start, dtype=_exact(logits))
        for slab in _slabs(logits):
            scores, here = _scores(logits, slab), labels[:, slab].flatten(1)
            counts = here != IGNORE
            log_probability = torch.log_softmax(scores, dim=1)
            right_one = log_probability.gather(1, torch.where(counts, here, BACKGROUND).long()[:, None])[:, 0]
            entropy -= (right_one * counts).sum(dim=1)
            asked += counts.sum(dim=1)
            probability = log_probability[:, lungs].exp() * counts[:, None]
            truth = _truth(here, lungs)
            overlap += (probability * truth).sum(dim=2)
            total += probability.sum(dim=2) + truth.sum(dim=2)
        asked.clamp_(min=1)
        dice = ((2 * overlap + SMOOTH_VOXELS) / (total + SMOOTH_VOXELS)).mean()
        ctx.save_for_backward(logits, labels, asked, overlap, total)
        ctx.mark_non_differentiable(dice)
        return (entropy / asked).mean() + 1 - dice, dice

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None]:
        logits, labels, asked, overlap, total = ctx.saved_tensors
        lungs, smooth_total = _lungs(logits), total + SMOOTH_VOXELS
        per_voxel = (upstream / len(logits) / asked)[:, None]
        per_dice = upstream / overlap.numel()
        of_truth = (-2 * per_dice / smooth_total)[:, :, None]  # what the loss gains by a lung's probability where it is
        of_any = (per_dice * (2 * overlap + SMOOTH_VOXELS) / smooth_total**2)[:, :, None]  # and loses by it anywhere
        gradient = torch.empty_like(logits)
        for slab in _slabs(logits):
            scores, here = _scores(logits, slab), labels[:, slab].flatten(1)
            counts = here != IGNORE
            result = torch.softmax(scores, dim=1)
            by_dice = (of_truth * _truth(here, lungs) + of_any) * counts[:, None] * result[:, lungs]
            by_entropy = per_voxel * counts
            result *= (by_entropy - by_dice.sum(dim=1))[:, None]
            result[:, lungs] += by_dice
            for value in range(result.shape[1]):
                result[:, value] -= by_entropy * (here == value)
            part = gradient[:, :, slab]
            part.copy_(result[:, -part.shape[1] :].view(part.shape))
        return gradient, None


def _lungs(logits: Tensor) -> slice:
    """Where the lungs are among the classes of `_scores`."""
    return LUNG_CHANNELS if logits.shape[1] > 1 else slice(1, 2)


def _exact(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _slabs(logits: Tensor) -> list[slice]:
    """Parts of the first axis."""
    thickness = max(1, SLAB_VOXELS // (logits.shape[3] * logits.shape[4]))
    return [slice(start, start + thickness) for start in range(0, logits.shape[2], thickness)]


def _scores(logits: Tensor, slab: slice) -> Tensor:
    """(B, classes, voxels) of a slab, of one lung those of background, zero, and lung."""
    scores = logits[:, :, slab].flatten(2).to(_exact(logits))
    return scores if scores.shape[1] > 1 else torch.cat([torch.zeros_like(scores), scores], dim=1)


def _truth(labels: Tensor, lungs: slice) -> Tensor:
    return torch.stack([labels == value for value in range(lungs.start, lungs.stop)], dim=1)
