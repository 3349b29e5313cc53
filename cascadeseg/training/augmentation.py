"""Random patches of a case: where, how large, how grey. All of it is drawn from the generator that is handed in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from cascadeseg.cascade.resample import axis_weights
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG
from cascadeseg.training.config import TrainingConfig


def random_patch(
    image: npt.NDArray[np.float16], labels: npt.NDArray[np.uint8], config: TrainingConfig, random: Generator
) -> tuple[Tensor, Tensor]:
    """A varied patch of a case.

    Args:
        image: (C, X, Y, Z).
        labels: (X, Y, Z).
        config: of the run.
        random: where chance comes from.

    Returns:
        (C, x, y, z) float32 image and (x, y, z) uint8 labels, every axis a multiple of the network's stride.
    """
    stride = config.unet.stride
    scale = torch.exp(config.augmentation.scale * torch.randn(3, generator=random)).tolist()
    wanted = [min(p, -(-n // stride) * stride) for p, n in zip(config.optimisation.patch, labels.shape, strict=True)]
    source = [min(n, round(w / s)) for n, w, s in zip(labels.shape, wanted, scale, strict=True)]
    window = _window(labels, source, config.optimisation.on_lung, random)
    x = torch.from_numpy(np.ascontiguousarray(image[(slice(None), *window)], dtype=np.float32))
    y = torch.from_numpy(np.array(labels[window]))
    shape = [min(w, -(-round(n * s) // stride) * stride) for w, n, s in zip(wanted, source, scale, strict=True)]
    x, y = _stretched(x, y, shape)
    if config.stage == 1 and _chance(config.augmentation.mirror, random):
        x, y = _mirrored(x, y)
    return _recoloured(x, config, random), y


def _window(labels: npt.NDArray[np.uint8], size: list[int], on_lung: float, random: Generator) -> tuple[slice, ...]:
    free = [n - s for n, s in zip(labels.shape, size, strict=True)]
    start = [int(torch.randint(0, f + 1, (), generator=random)) for f in free]
    if _chance(on_lung, random):
        inside = np.flatnonzero((labels == RIGHT_LUNG.value) | (labels == LEFT_LUNG.value))
        if len(inside):
            chosen = inside[int(torch.randint(0, len(inside), (), generator=random))]
            centre = np.unravel_index(chosen, labels.shape)
            start = [min(max(int(c) - s // 2, 0), f) for c, s, f in zip(centre, size, free, strict=True)]
    return tuple(slice(a, a + s) for a, s in zip(start, size, strict=True))


def _stretched(image: Tensor, labels: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    """Both at another size: the image interpolated, the labels each by their share."""
    if list(labels.shape) == shape:
        return image, labels
    matrices = [axis_weights(n, m, 0.5 * n / m - 0.5, n / m) for n, m in zip(labels.shape, shape, strict=True)]

    def resized(volume: Tensor) -> Tensor:
        volume = volume @ matrices[2].T
        volume = matrices[1] @ volume
        return torch.einsum("ij,...jyz->...iyz", matrices[0], volume)

    result = torch.zeros(shape, dtype=torch.uint8)
    for value in torch.unique(labels).tolist():
        if value:
            result[resized((labels == value).float()) > 0.5] = value
    return resized(image), result


def _mirrored(image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    flipped = labels.flip(0)
    swapped = flipped.clone()
    swapped[flipped == RIGHT_LUNG.value] = LEFT_LUNG.value
    swapped[flipped == LEFT_LUNG.value] = RIGHT_LUNG.value
    return image.flip(1), swapped


def _recoloured(x: Tensor, config: TrainingConfig, random: Generator) -> Tensor:
    amounts, view = config.augmentation, config.view
    image = x[:1]
    gain = 1 + amounts.gain * torch.randn((), generator=random)
    offset = amounts.offset_hu * torch.randn((), generator=random) / view.scale_hu
    image = image * gain + offset * (image > 0)
    if _chance(amounts.blur, random):
        axis = 1 + int(torch.randint(0, 3, (), generator=random))
        image = _blurred(image, axis, 1 + int(torch.randint(0, 4, (), generator=random)))
    if _chance(0.5, random):
        sd = amounts.noise_hu * torch.rand((), generator=random) / view.scale_hu
        image = image + sd * torch.randn(image.shape, generator=random)
    image = image.clamp(0, (view.high_hu - view.low_hu) / view.scale_hu)
    if not view.prior:
        return image
    return torch.cat([image, _damaged(x[1:], amounts.prior, random)])


def _damaged(prior: Tensor, probability: float, random: Generator) -> Tensor:
    """Stage 1's opinion, sometimes vaguer than it was and with a ball of it erased."""
    if not _chance(probability, random):
        return prior
    shape = torch.tensor(prior.shape[1:])
    coarse = F.avg_pool3d(prior[None], 8, ceil_mode=True)
    prior = F.interpolate(coarse, size=prior.shape[1:], mode="trilinear", align_corners=False)[0]
    centre = torch.rand(3, generator=random) * shape
    radius = 10 + 30 * torch.rand((), generator=random)
    axes = [(torch.arange(int(n)) - c) ** 2 for n, c in zip(shape, centre, strict=True)]
    ball = axes[0][:, None, None] + axes[1][:, None] + axes[2] < radius**2
    erased: Tensor = prior * ~ball
    return erased


def _blurred(image: Tensor, axis: int, times: int) -> Tensor:
    for _ in range(times):
        ahead, behind = image.roll(-1, axis), image.roll(1, axis)
        image = 0.5 * image + 0.25 * (ahead + behind)
    return image


def _chance(probability: float, random: Generator) -> bool:
    return bool(torch.rand((), generator=random) < probability)
