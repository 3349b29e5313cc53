"""From one grid to another: separable linear interpolation, antialiased where it shrinks, slab by slab.

All grids of one scan share its (canonical) directions, so resampling is three small matrices, one an axis. Where the
target is coarser than the source, the linear interpolant is averaged over a window that makes up for the difference in
voxel size, which averages noise instead of sampling it; a linear image still resamples exactly. Outside the source
everything is zero, which in an image means air. A whole scan is never held as float: slabs of its stored integers are
converted as they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid
from cascadeseg.network.model import View
from cascadeseg.parallel import Each, one_by_one, side_by_side

SLAB_VOXELS = 2_000_000
"""Source voxels that are float at any one time (8 MB, which stays in a processor's cache)."""
BAND = 32
"""Target samples computed at a time: their windows cover few of the source samples, so most zeros are left out."""
Bands = list[tuple[Tensor, slice]]
"""Rows of a matrix, one band after the other, each without the columns left and right that it does not use."""


@lru_cache(maxsize=8)
def axis_weights(source: int, target: int, offset: float, step: float, *, goes_on: bool = False) -> Tensor:
    """The matrix that interpolates along one axis; remembered, since slabs along z share those of x and y.

    Args:
        source: samples along the axis, centred at 0, 1, ...
        target: samples wanted.
        offset: where target sample 0 lies, in source samples.
        step: distance of target samples, in source samples.
        goes_on: the outermost samples are what lies outside, too.

    Returns:
        (target, source) float32, not to be changed in place. Rows sum to 1 where the sample lies inside the source
        (half a sample beyond the outer centres included) or that goes on, and to 0 elsewhere.
    """
    positions = offset + step * np.arange(target)
    distance = np.clip(positions, 0, source - 1)[:, None] - np.arange(source)[None, :]
    # A source voxel is a box of width 1, a target voxel one of width `step`: variances of boxes add.
    window = np.sqrt(max(0.0, step**2 - 1))
    if window < 1e-3:
        weights = np.clip(1.0 - np.abs(distance), 0.0, None)
    else:
        weights = (_hat_integral(distance + window / 2) - _hat_integral(distance - window / 2)) / window
    weights /= weights.sum(axis=1, keepdims=True)
    inside = goes_on | (positions > -0.5 - 1e-6) & (positions < source - 0.5 + 1e-6)
    return torch.from_numpy((weights * inside[:, None]).astype(np.float32))


def _hat_integral(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The integral of linear interpolation's hat function (1 at 0, 0 beyond +-1) up to x."""
    x = np.clip(x, -1.0, 1.0)
    return 0.5 + x - 0.5 * x * np.abs(x)


def resampling_matrices(source: Grid, target: Grid, *, goes_on: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices of the three axes (x, y, z) between two grids with the same directions; see `axis_weights`."""
    offset = source.index(target.world((0, 0, 0)))
    steps = (there / here for there, here in zip(target.spacing_mm, source.spacing_mm, strict=True))
    x, y, z = (
        axis_weights(n, wanted, float(start), step, goes_on=goes_on)
        for n, wanted, start, step in zip(source.shape, target.shape, offset, steps, strict=True)
    )
    return x, y, z


def resample_volume(volume: Tensor | Callable[[Box], Tensor], source: Grid, target: Grid) -> Tensor:
    """(X, Y, Z) floats on one grid to (X, Y, Z) float32 on another with the same directions; zero outside.

    Args:
        volume: the floats, or what gives those of a box.
        source: their grid.
        target: the other grid.
    """
    wx, wy, wz = resampling_matrices(source, target)
    x, y, z = (_used(w) for w in (wx, wy, wz))
    box = Box((x.start, y.start, z.start), (x.stop, y.stop, z.stop))
    part = volume[box.slices] if isinstance(volume, Tensor) else volume(box)
    part = part.permute(2, 1, 0).float().contiguous()
    bands_x, bands_y = bands(wx[:, x], part.device), bands(wy[:, y], part.device)
    return _resample(part, bands_x, bands_y, wz[:, z].to(part.device)).permute(2, 1, 0)


def resample_scan(scan: Scan, target: Grid, view: View, device: torch.device, *, goes_on: bool = False) -> Tensor:
    """The image a stage sees: a scan's HU, windowed, on a target grid.

    Args:
        scan: a scan in canonical orientation (`Scan.canonical`).
        target: a grid with the scan's directions.
        view: the window.
        device: where the work is done and the result lies.
        goes_on: the scan's outermost voxels are what lies outside, too, instead of air.

    Returns:
        (X, Y, Z) float32: 0 is air and everything outside the scan, 1 is ``view.scale_hu`` above it.
    """
    # torch knows no arrays that run backwards: the matrices are turned instead of the voxels.
    backwards = [axis for axis in range(3) if scan.voxels.strides[axis] < 0]
    stored = replace(scan, voxels=np.flip(scan.voxels, tuple(backwards)))
    matrices = resampling_matrices(scan.grid, target, goes_on=goes_on)
    wx, wy, wz = (w.flip(1) if axis in backwards else w for axis, w in enumerate(matrices))
    wx = wx / view.scale_hu
    x, y = _used(wx), _used(wy)
    bands_x, bands_y, wz_there = bands(wx[:, x], device), bands(wy[:, y], device), wz.to(device)
    image = torch.zeros(target.shape[::-1], dtype=torch.float32, device=device)

    def fill(rows: slice) -> None:
        z = _used(wz[rows])
        box = Box((x.start, y.start, z.start), (x.stop, y.stop, z.stop))
        image[rows] = _resample(_windowed(stored, box, view, device), bands_x, bands_y, wz_there[rows, z])

    each: Each = side_by_side if device.type == "cpu" else one_by_one
    each(fill, list(_slabs(wz, SLAB_VOXELS // max(1, (x.stop - x.start) * (y.stop - y.start)))))
    return image.permute(2, 1, 0)


def windows_of(image: Tensor, view: View) -> Tensor:
    """(1, X, Y, Z) as `resample_scan` makes it to (C, X, Y, Z): with soft tissue once more where the view has it.

    A window of an average is not an average of windows: it is opened on the image's own grid, in training as well.
    """
    if not view.tissue:
        return image
    width = view.tissue_high_hu - view.tissue_low_hu
    tissue = image * (view.scale_hu / width) + (view.low_hu - view.tissue_low_hu) / width
    return torch.cat([image, tissue.clamp_(0, 1)])


def image_of_hu(hu: Tensor, view: View) -> Tensor:
    """(1, X, Y, Z) HU on a stage's own grid to (C, X, Y, Z), as `resample_scan` and `windows_of` make it there."""
    return windows_of((hu.clamp(view.low_hu, view.high_hu) - view.low_hu) / view.scale_hu, view)


def _windowed(scan: Scan, box: Box, view: View, device: torch.device) -> Tensor:
    """(Z, Y, X) float32: how far above ``low_hu`` the voxels of a box are.

    Integers go to a GPU as they are, half the bytes. In (Z, Y, X) order, because in NIfTI x runs fastest in memory.
    """
    voxels = scan.voxels[box.slices].T
    whole_steps = all(step % voxels.itemsize == 0 for step in voxels.strides)  # not of one field of a record
    if not (voxels.dtype.isnative and voxels.flags.writeable and whole_steps):  # torch refuses these, or warns
        voxels = voxels.astype(voxels.dtype.newbyteorder("="))
    stored = torch.from_numpy(voxels)
    if device.type == "mps":  # which lacks some integer types
        stored = stored.float()
    hu = torch.empty(stored.shape, dtype=torch.float32, device=device).copy_(stored.to(device))
    if scan.slope != 1:
        hu *= scan.slope
    hu += scan.intercept - view.low_hu
    if scan.voxels.dtype.kind == "f":
        hu.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return hu.clamp_(0, view.high_hu - view.low_hu)


def _resample(volume: Tensor, bands_x: Bands, bands_y: Bands, wz: Tensor) -> Tensor:
    """(Z, Y, X) contiguous to (z, y, x): an axis after the other, first z, which leaves memory as it lies."""
    depth, height, width = volume.shape
    part = (wz @ volume.view(depth, height * width)).view(len(wz), height, width)
    part = torch.cat([part[..., used] @ w.T for w, used in bands_x], dim=2)
    return torch.cat([w @ part[:, used] for w, used in bands_y], dim=1)


def bands(weights: Tensor, device: torch.device) -> Bands:
    """A matrix cut into bands of rows, on a device; it is not asked for their columns, as a GPU would be waited for.

    Args:
        weights: (target, source), in the processor's memory.
        device: where the bands are to lie.
    """
    there = weights.to(device)
    rows = [slice(start, start + BAND) for start in range(0, len(weights), BAND)]
    return [(there[band, used], used) for band in rows for used in [_used(weights[band])]]


def _slabs(weights: Tensor, thickness: int) -> Iterator[slice]:
    """Ranges of target samples that each use about ``thickness`` source samples."""
    used = _used(weights)
    per_sample = max(1.0, (used.stop - used.start) / max(1, len(weights)))
    step = max(1, int(thickness / per_sample))
    for start in range(0, len(weights), step):
        rows = slice(start, min(start + step, len(weights)))
        if bool(weights[rows].any()):
            yield rows


def _used(weights: Tensor) -> slice:
    """The range of source samples that any target sample uses."""
    used = torch.nonzero(weights.any(dim=0)).flatten()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
