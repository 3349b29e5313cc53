"""The loss of both stages: cross-entropy plus soft Dice.

MONAI's DiceCELoss was weighed: it has no ignored voxels, and the recipe's training path should run where MONAI is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cascadeseg.labels import BACKGROUND, IGNORE, LUNG_CHANNELS

SMOOTH_VOXELS = 50.0
"""Keeps the Dice of a patch without lung near 1 for a few false voxels, instead of 0 for a single one."""


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
    the batch is divided.

    Args:
        logits: (B, K, X, Y, Z): K = 1, one lung by its logit; K >= 3, background, right, left, and what is beside them,
            which only the cross-entropy knows.
        labels: (B, X, Y, Z) uint8; `IGNORE` voxels count for nothing.

    Returns:
        The loss, and the mean soft Dice alone (detached), for the log.
    """
    logits = logits.float()
    counts = labels != IGNORE
    classes = torch.where(counts, labels, BACKGROUND).long()
    if logits.shape[1] == 1:
        entropy = F.binary_cross_entropy_with_logits(logits[:, 0], (classes == 1).float(), reduction="none")
        probabilities = torch.sigmoid(logits)
    else:
        entropy = F.cross_entropy(logits, classes, reduction="none")
        probabilities = torch.softmax(logits, dim=1)[:, LUNG_CHANNELS]
    truth = torch.stack([classes == value for value in range(1, probabilities.shape[1] + 1)], dim=1)
    weights = counts[:, None].float()
    overlap = (probabilities * truth * weights).sum(dim=(2, 3, 4))
    total = ((probabilities + truth) * weights).sum(dim=(2, 3, 4))
    dice = ((2 * overlap + SMOOTH_VOXELS) / (total + SMOOTH_VOXELS)).mean()
    asked = counts.sum(dim=(1, 2, 3)).clamp(min=1)
    mean_entropy = ((entropy * counts).sum(dim=(1, 2, 3)) / asked).mean()
    return mean_entropy + 1 - dice, dice.detach()
