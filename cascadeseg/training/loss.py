"""The loss of both stages: cross-entropy plus soft Dice.

MONAI's DiceCELoss was weighed: it has no ignored voxels, and the recipe's training path should run where MONAI is not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cascadeseg.labels import BACKGROUND, IGNORE

SMOOTH_VOXELS = 50.0
"""Keeps the Dice of a patch without lung near 1 for a few false voxels, instead of 0 for a single one."""


def segmentation_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy plus one minus the mean soft Dice (Milletari 2016, doi 10.1109/3DV.2016.79) of the lungs.

    Args:
        logits: (B, K, X, Y, Z): K = 1, one lung by its logit; K = 3, background, right, left.
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
        probabilities = torch.softmax(logits, dim=1)[:, 1:]
    truth = torch.stack([classes == value for value in range(1, probabilities.shape[1] + 1)], dim=1)
    weights = counts[:, None].float()
    overlap = (probabilities * truth * weights).sum(dim=(2, 3, 4))
    total = ((probabilities + truth) * weights).sum(dim=(2, 3, 4))
    dice = ((2 * overlap + SMOOTH_VOXELS) / (total + SMOOTH_VOXELS)).mean()
    loss = (entropy * counts).sum() / counts.sum().clamp(min=1) + 1 - dice
    return loss, dice.detach()
