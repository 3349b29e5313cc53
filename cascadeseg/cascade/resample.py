"""From one grid to another: separable linear interpolation, antialiased where it shrinks, slab by slab.

All grids of one scan share its (canonical) directions, so resampling is three small matrices, one an axis. Where the
target is coarser than the source, the linear interpolant is averaged over a window that makes up for the difference in
voxel size, which averages noise instead of sampling it; a linear image still resamples exactly. Outside the source
everything is zero, which in an image means air. A whole scan is never held as float: slabs of its stored integers are
converted as they are needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid
from cascadeseg.network.model import View

SLAB_VOXELS = 8_000_000
"""Source voxels that are float at any one time (32 MB)."""


def axis_weights(source: int, target: int, offset: float, step: float) -> Tensor:
    """The matrix that interpolates along one axis.

    Args:
        source: samples along the axis, centred at 0, 1, ...
        target: samples wanted.
        offset: where target sample 0 lies, in source samples.
        step: distance of target samples, in source samples.

    Returns:
        (target, source) float32. Rows sum to 1 where the sample lies inside the source (half a sample beyond the outer
        centres included), and to 0 elsewhere.
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
    inside = (positions > -0.5 - 1e-6) & (positions < source - 0.5 + 1e-6)
    return torch.from_numpy((weights * inside[:, None]).astype(np.float32))


def _hat_integral(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The integral of linear interpolation's hat function (1 at 0, 0 beyond +-1) up to x."""
    x = np.clip(x, -1.0, 1.0)
    return 0.5 + x - 0.5 * x * np.abs(x)


def resampling_matrices(source: Grid, target: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices of the three axes (x, y, z) between two grids with the same directions."""
    offset = source.index(target.world((0, 0, 0)))
    x, y, z = (
        axis_weights(source.shape[a], target.shape[a], float(offset[a]), target.spacing_mm[a] / source.spacing_mm[a])
        for a in range(3)
    )
    return x, y, z


def resample_volume(volume: Tensor, source: Grid, target: Grid) -> Tensor:
    """(X, Y, Z) float32 on one grid to another with the same directions; zero outside.

    Smallest axis first is not worth its code: z, then y, then x, as matrix products.
    """
    wx, wy, wz = (w.to(volume.device) for w in resampling_matrices(source, target))
    x, y, z = (_used(w) for w in (wx, wy, wz))
    part = volume[x, y, z].to(torch.float32)
    part = part @ wz[:, z].T
    part = torch.einsum("ij,xjz->xiz", wy[:, y], part)
    return torch.einsum("ij,jyz->iyz", wx[:, x], part)


def resample_scan(scan: Scan, target: Grid, view: View, device: torch.device) -> Tensor:
    """The image a stage sees: a scan's HU, windowed, on a target grid.

    Args:
        scan: a scan in canonical orientation (`canonical_scan`).
        target: a grid with the scan's directions.
        view: the window.
        device: where the work is done and the result lies.

    Returns:
        (X, Y, Z) float32: 0 is air and everything outside the scan, 1 is ``view.scale_hu`` above it.
    """
    wx, wy, wz = (w.to(device) for w in resampling_matrices(scan.grid, target))
    x, y, z = (_used(w) for w in (wx, wy, wz))
    image = torch.zeros((target.shape[2], target.shape[1], target.shape[0]), device=device)
    per_slice = max(1, (x.stop - x.start) * (y.stop - y.start))
    thickness = max(1, SLAB_VOXELS // per_slice)
    for start in range(z.start, z.stop, thickness):
        slab = slice(start, min(start + thickness, z.stop))
        rows = _used(wz[:, slab].T)
        # (z, y, x) order: a NIfTI's x runs fastest in memory, so this is the order that copies least.
        box = Box((x.start, y.start, slab.start), (x.stop, y.stop, slab.stop))
        hu = torch.from_numpy(np.ascontiguousarray(scan.hu(box).T)).to(device)
        values = hu.clamp_(view.low_hu, view.high_hu).sub_(view.low_hu)
        values = values @ wx[:, x].T
        values = wy[:, y] @ values
        image[rows] += torch.einsum("ij,jyx->iyx", wz[rows, slab], values)
    return image.div_(view.scale_hu).permute(2, 1, 0)


def _used(weights: Tensor) -> slice:
    """The range of source samples that any target sample uses."""
    used = torch.nonzero(weights.any(dim=0)).flatten()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
