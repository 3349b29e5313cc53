"""Random patches of a case: where, how large, how bent, how grey.

What needs the case on disk (`cut`) is done ahead of the loop; the rest (`varied`) where the network is, in torch. All
chance comes from the generator that is handed in. Library transforms were weighed: MONAI's and TorchIO's need 3.8 s
and 2 s to import, draw from global or NumPy state, and resample one axis at a time on the CPU at best; what is needed
here is one `grid_sample` and a few products with small matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from cascadeseg.cascade.locate import AIR_HU, AIR_SHARE, BEYOND_MM
from cascadeseg.cascade.resample import Bands, axis_weights, bands, windows_of
from cascadeseg.formats.doctor import LUNGS_SEEN_HU
from cascadeseg.labels import BACKGROUND, IGNORE, LEFT_LUNG, RIGHT_LUNG
from cascadeseg.training.config import TrainingConfig

T = TypeVar("T", bound=np.generic)
ELASTIC_POINTS = 4
"""Control points of the bending along each axis of a patch."""
SHORTEST_MM = 24.0
"""Along z: the shortest scan that a case is cut to."""
THROUGH_PLANE = 0.7
"""Share of low-resolution patches whose thick axis is z, as in scans; the rest is any axis."""


@dataclass(frozen=True)
class Cut:
    """A window of a case, not varied yet.

    Attributes:
        image: (C, x, y, z), of soft tissue no window of its own yet.
        labels: (x, y, z) uint8.
        shape: what it will be stretched to.
        patch: the largest shape a patch may have.
        random: where the variation comes from.
    """

    image: Tensor
    labels: Tensor
    shape: tuple[int, ...]
    patch: tuple[int, int, int]
    random: Generator

    def to(self, device: torch.device) -> Cut:
        """The same on a device; from pinned memory the copy does not wait."""
        image = self.image.to(device, non_blocking=True)
        return replace(self, image=image.float(), labels=self.labels.to(device, non_blocking=True))

    def pinned(self) -> Cut:
        """The same in page-locked memory."""
        return replace(self, image=self.image.pin_memory(), labels=self.labels.pin_memory())


def cut(
    image: npt.NDArray[np.float16],
    labels: npt.NDArray[np.uint8],
    config: TrainingConfig,
    random: Generator,
    patch: tuple[int, int, int],
) -> Cut:
    """A window of a case; what it shows will be stretched by a random factor to the patch's size.

    Args:
        image: (C, X, Y, Z).
        labels: (X, Y, Z).
        config: of the run.
        random: where chance comes from.
        patch: largest shape.
    """
    scale = torch.exp(config.augmentation.scale * torch.randn(3, generator=random)).tolist()
    if config.stage == 1:
        seen: tuple[slice, ...] = (slice(None), slice(None), _of_shorter_scan(labels.shape[2], config, random))
    else:
        faces = zip(labels.shape, patch, strict=True)
        seen = tuple(slice(0, n) if p < n else _between_moved_faces(n, config, random) for n, p in faces)
    image, labels = image[(slice(None), *seen)], labels[seen]
    beyond = _beyond_faces(image[0], config, random)
    whole = [before + n + behind for n, (before, behind) in zip(labels.shape, beyond, strict=True)]
    source = [max(1, min(n, round(p / s))) for n, p, s in zip(whole, patch, scale, strict=True)]
    window = _window(labels, source, beyond, config.optimisation.on_lung, random)
    shape = [max(1, min(p, round(n * s))) for p, n, s in zip(patch, source, scale, strict=True)]
    x = torch.from_numpy(np.stack([_taken(channel, window, mode="edge") for channel in image]))
    y = torch.from_numpy(_taken(labels, window, mode="constant", constant_values=IGNORE))
    return Cut(x, y, tuple(shape), patch, random)


def varied(piece: Cut, config: TrainingConfig) -> tuple[Tensor, Tensor]:
    """A patch, varied on the device where its cut lies.

    Returns:
        (C, x, y, z) float32 image and (x, y, z) uint8 labels, padded with air to multiples of the network's stride;
        nothing is asked about the padding.
    """
    x, y, random = piece.image.float(), piece.labels, piece.random
    if _chance(config.augmentation.warp, random):
        x, y = _warped(x, y, piece.shape, config, random)
    else:
        x, y = _stretched(x, y, piece.shape)
    if config.stage == 1 and _chance(config.augmentation.mirror, random):
        x, y = _mirrored(x, y)
    image = _recoloured(x, config, random)
    shape = [-(-n // config.unet.stride) * config.unet.stride for n in y.shape]
    if max(shape) == config.unet.stride:  # at the bottom a single voxel, of which BatchNorm knows no spread
        shape[-1] *= 2
    return padded(image, shape, 0.0), padded(y, shape, IGNORE)


def padded(volume: Tensor, shape: Sequence[int], value: float) -> Tensor:
    """(..., X, Y, Z) with more of a value at the far ends, which is how inference pads to the network's stride; what is
    larger than ``shape`` stays so.
    """
    missing = [max(0, wanted - n) for wanted, n in zip(shape, volume.shape[-3:], strict=True)]
    if not any(missing):
        return volume
    return F.pad(volume, [pad for m in reversed(missing) for pad in (0, m)], value=value)


def _between_moved_faces(voxels: int, config: TrainingConfig, random: Generator) -> slice:
    """What of an axis a whole crop of stage 2 shows: each face lies anywhere within the jitter of inference's box.

    A case is that box with the jitter added on every side (`cases.prepare`): a face loses nothing, and lies outside
    inference's by the jitter, up to twice the jitter, and lies as far inside. Where the scan ended there was nothing to
    add, and the face only moves inwards. At least half of the axis stays.
    """
    most = min(int(2 * config.data.box_jitter_mm / config.view.spacing_mm), voxels // 4)
    near, far = torch.randint(0, most + 1, (2,), generator=random).tolist()
    return slice(near, voxels - far)


def _of_shorter_scan(slices: int, config: TrainingConfig, random: Generator) -> slice:
    """The slices of a scan that a shorter one shows: 24 to 48 mm as often as twice or four times that."""
    if not _chance(config.augmentation.shorter, random):
        return slice(0, slices)
    least = max(1, min(slices, round(SHORTEST_MM / config.view.spacing_mm)))
    length = round(least * (slices / least) ** float(torch.rand((), generator=random)))
    start = int(torch.randint(0, slices - length + 1, (), generator=random))
    return slice(start, start + length)


def _beyond_faces(image: npt.NDArray[np.float16], config: TrainingConfig, random: Generator) -> list[tuple[int, int]]:
    """How many voxels a case of stage 1 goes on beyond its faces, as it does in inference (`locate`); stage 2: none."""
    if config.stage != 1 or not _chance(config.augmentation.goes_on, random):
        return [(0, 0)] * 3
    view = config.view
    beyond, air = round(BEYOND_MM / view.spacing_mm), (AIR_HU - view.low_hu) / view.scale_hu
    faces = [[image.take(index, axis) for index in (0, -1)] for axis in (0, 1)]
    ends = [tuple(beyond * bool((face > air).mean() > 1 - AIR_SHARE) for face in pair) for pair in faces]
    return [(near, far) for near, far in [*ends, (beyond, beyond)]]


def _window(
    labels: npt.NDArray[np.uint8],
    size: list[int],
    beyond: list[tuple[int, int]],
    on_lung: float,
    random: Generator,
) -> list[tuple[int, int]]:
    """Where a window of a size begins and ends on each axis: maybe beyond a face, but with some of the case in it."""
    axes = list(zip(labels.shape, size, beyond, strict=True))
    lowest = [max(-before, 1 - s) for _, s, (before, _) in axes]
    highest = [max(low, min(n - 1, n + behind - s)) for low, (n, s, (_, behind)) in zip(lowest, axes, strict=True)]
    limits = list(zip(lowest, highest, strict=True))
    start = [int(torch.randint(low, high + 1, (), generator=random)) for low, high in limits]
    if _chance(on_lung, random):
        inside = np.flatnonzero((labels == RIGHT_LUNG.value) | (labels == LEFT_LUNG.value))
        if len(inside):
            chosen = inside[int(torch.randint(0, len(inside), (), generator=random))]
            centre = np.unravel_index(chosen, labels.shape)
            wanted = [int(c) - s // 2 for c, s in zip(centre, size, strict=True)]
            start = [min(max(a, low), high) for a, (low, high) in zip(wanted, limits, strict=True)]
    return [(a, a + s) for a, s in zip(start, size, strict=True)]


def _taken(volume: npt.NDArray[T], window: list[tuple[int, int]], **beyond: Any) -> npt.NDArray[T]:
    """A copy of a window of a volume; ``beyond`` tells `numpy.pad` what is beyond its faces."""
    inside = tuple(slice(max(0, a), min(n, b)) for (a, b), n in zip(window, volume.shape, strict=True))
    around = [(max(0, -a), max(0, b - n)) for (a, b), n in zip(window, volume.shape, strict=True)]
    taken: npt.NDArray[T] = np.pad(volume[inside], around, **beyond)
    return taken


def _stretched(image: Tensor, labels: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Both at another size: the image interpolated, the labels each by their share."""
    if tuple(labels.shape) == tuple(shape):
        return image, labels
    sizes = zip(labels.shape, shape, strict=True)
    matrices = [bands(axis_weights(n, m, 0.5 * n / m - 0.5, n / m), image.device) for n, m in sizes]
    return _moved(image, labels, lambda volumes: _along_axes(volumes, matrices))


def _along_axes(volume: Tensor, matrices: Sequence[Bands | None]) -> Tensor:
    """A matrix along each of the last three axes."""
    wx, wy, wz = matrices
    if wz is not None:
        volume = torch.cat([volume[..., used] @ w.T for w, used in wz], dim=-1)
    if wy is not None:
        volume = torch.cat([w @ volume[..., used, :] for w, used in wy], dim=-2)
    if wx is not None:
        flat = volume.flatten(-2)
        moved = torch.cat([w @ flat[..., used, :] for w, used in wx], dim=-2)
        volume = moved.view(*moved.shape[:-1], *volume.shape[-2:])
    return volume


def _moved(image: Tensor, labels: Tensor, move: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Both elsewhere: labels as shares of one; a voxel belongs to the label that has more than half of it."""
    values = [value for value in torch.bincount(labels.flatten()).nonzero().flatten().tolist() if value != BACKGROUND]
    moved = move(torch.cat([image, *((labels == value).float()[None] for value in values)]))
    channels = len(image)
    result = torch.full(moved.shape[1:], BACKGROUND, dtype=torch.uint8, device=labels.device)
    for value, share in zip(values, moved[channels:], strict=True):
        result[share > 0.5] = value
    return moved[:channels], result


def _warped(
    image: Tensor, labels: Tensor, shape: Sequence[int], config: TrainingConfig, random: Generator
) -> tuple[Tensor, Tensor]:
    """Rotated about the middle, bent, and stretched to a shape; nothing is asked about what comes from outside."""
    grid = _sampling_grid(labels.shape, shape, config, random, image.device)

    def sampled(volumes: Tensor) -> Tensor:
        return F.grid_sample(volumes[None], grid, align_corners=False, padding_mode="zeros")[0]

    image, labels = _moved(image, labels, sampled)
    labels[(grid[0].abs() > 1).any(dim=-1)] = IGNORE
    return image, labels


def _sampling_grid(
    source: Sequence[int], shape: Sequence[int], config: TrainingConfig, random: Generator, device: torch.device
) -> Tensor:
    """(1, x, y, z, 3): where each voxel of a patch comes from, in `grid_sample`'s coordinates (z, y, x; -1 to 1)."""
    amounts = config.augmentation
    angles = math.radians(1) * amounts.rotation_deg * torch.randn(3, generator=random)
    half = torch.tensor([n / 2 for n in reversed(source)])
    rotation = _rotation(angles) * half[None, :] / half[:, None]
    theta = torch.cat([rotation, torch.zeros(3, 1)], dim=1)[None]
    grid = F.affine_grid(theta.to(device), [1, 1, *shape], align_corners=False)
    sd = amounts.elastic_mm / config.view.spacing_mm / half
    bend = torch.randn((3, *[ELASTIC_POINTS] * 3), generator=random) * sd[:, None, None, None]
    bend = F.interpolate(bend[None].to(device), size=tuple(shape), mode="trilinear", align_corners=True)
    return grid + bend.permute(0, 2, 3, 4, 1)


def _rotation(angles: Tensor) -> Tensor:
    """(3, 3): one rotation about each axis, after one another."""
    result = torch.eye(3)
    for axis, angle in enumerate(angles.tolist()):
        a, b = (i for i in range(3) if i != axis)
        turn = torch.eye(3)
        turn[a, a] = turn[b, b] = math.cos(angle)
        turn[a, b], turn[b, a] = -math.sin(angle), math.sin(angle)
        result = turn @ result
    return result


def _mirrored(image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    flipped = labels.flip(0)
    swapped = flipped.clone()
    swapped[flipped == RIGHT_LUNG.value] = LEFT_LUNG.value
    swapped[flipped == LEFT_LUNG.value] = RIGHT_LUNG.value
    return image.flip(1), swapped


def _recoloured(x: Tensor, config: TrainingConfig, random: Generator) -> Tensor:
    amounts, view = config.augmentation, config.view
    highest = (view.high_hu - view.low_hu) / view.scale_hu
    gain, offset, gamma = torch.randn(3, generator=random).tolist()
    image = x[:1]
    image = image * (1 + amounts.gain * gain) + amounts.offset_hu / view.scale_hu * offset * (image > 0)
    if amounts.gamma:
        image = (image / highest).clamp(0, 1) ** math.exp(amounts.gamma * gamma) * highest
    if _chance(amounts.low_resolution, random):
        image = _in_thick_slices(image, config, random)
    if _chance(amounts.blur, random):
        axis = 1 + int(torch.randint(0, 3, (), generator=random))
        image = _blurred(image, axis, 1 + int(torch.randint(0, 4, (), generator=random)))
    if _chance(0.5, random):
        sd = amounts.noise_hu * float(torch.rand((), generator=random)) / view.scale_hu
        image = image + sd * _noise(image, random)
    lowest = 0.0
    if _chance(amounts.window, random):
        lowest, highest = ((hu - view.low_hu) / view.scale_hu for hu in _display_window(random))
    image = windows_of(image.clamp(lowest, highest), view)
    if not view.prior:
        return image
    return torch.cat([image, _damaged(x[1:], amounts.prior, random)])


def _display_window(random: Generator) -> tuple[float, float]:
    """HU between which a scan may have been clipped with its lungs still to be seen; what hides them is put back."""
    low, high = torch.rand(2, generator=random).tolist()
    return -1000 + (LUNGS_SEEN_HU + 1000) * low, 100 + 500 * high


def _noise(image: Tensor, random: Generator) -> Tensor:
    """White noise, drawn where the image is."""
    seed = int(torch.randint(0, 2**62, (), generator=random))
    where = Generator(image.device).manual_seed(seed)
    return torch.randn(image.shape, generator=where, device=image.device)


def _in_thick_slices(image: Tensor, config: TrainingConfig, random: Generator) -> Tensor:
    """As if the scan had had thick slices: averaged along an axis, and interpolated back."""
    axis = 2 if _chance(THROUGH_PLANE, random) else int(torch.randint(0, 3, (), generator=random))
    most = max(1.0, config.augmentation.thickest_mm / config.view.spacing_mm)
    factor = 1 + (most - 1) * float(torch.rand((), generator=random))
    fine = image.shape[1 + axis]
    thick = max(2, round(fine / factor))
    down = axis_weights(fine, thick, 0.5 * fine / thick - 0.5, fine / thick)
    up = axis_weights(thick, fine, 0.5 * thick / fine - 0.5, thick / fine)
    matrices: list[Bands | None] = [None, None, None]
    matrices[axis] = bands(up @ down, image.device)
    return _along_axes(image, matrices)


def _damaged(prior: Tensor, probability: float, random: Generator) -> Tensor:
    """Stage 1's opinion, sometimes with balls of it erased and vaguer than it was: the edges of a bite tell nothing."""
    if not _chance(probability, random):
        return prior
    shape = torch.tensor(prior.shape[1:])
    for _ in range(1 + int(torch.randint(0, 4, (), generator=random))):
        centre = (torch.rand(3, generator=random) * shape).tolist()
        radius = 8 + 30 * float(torch.rand((), generator=random))
        axes = [(torch.arange(int(n), device=prior.device) - c) ** 2 for n, c in zip(shape, centre, strict=True)]
        prior = prior * (axes[0][:, None, None] + axes[1][:, None] + axes[2] >= radius**2)
    coarse = F.avg_pool3d(prior[None], [min(12, n) for n in prior.shape[1:]], ceil_mode=True)
    return F.interpolate(coarse, size=prior.shape[1:], mode="trilinear", align_corners=False)[0]


def _blurred(image: Tensor, axis: int, times: int) -> Tensor:
    """Averaged with both neighbours along an axis; beyond a face lies what lies at it."""
    n = image.shape[axis]
    for _ in range(times):
        wider = torch.cat([image.narrow(axis, 0, 1), image, image.narrow(axis, n - 1, 1)], dim=axis)
        image = 0.5 * image + 0.25 * (wider.narrow(axis, 0, n) + wider.narrow(axis, 2, n))
    return image


def _chance(probability: float, random: Generator) -> bool:
    return bool(torch.rand((), generator=random) < probability)
