"""The machinery under the anatomy: coarse fields, their exact upsampling, tubes as splats, and random fields.

Everything is anchored to the world, never to the box that is rendered, so that a box of a volume equals the same box
cut from the whole. Smooth shapes are signed distances (mm, negative inside) on a 5 mm lattice at multiples of 5 mm;
upsampling them, like every blur and every random field, is separable and therefore three small matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

COARSE_MM = 5.0
MARGIN = 2
Slices = tuple[slice, slice, slice]


def common(a: Slices, b: Slices) -> Slices | None:
    """The box that two boxes share, or None."""
    x, y, z = (slice(max(p.start, q.start), min(p.stop, q.stop)) for p, q in zip(a, b, strict=True))
    return (x, y, z) if all(s.start < s.stop for s in (x, y, z)) else None


def within(part: Slices, whole: Slices) -> Slices:
    """Where a part of a box lies in an array that holds the box."""
    x, y, z = (slice(p.start - w.start, p.stop - w.start) for p, w in zip(part, whole, strict=True))
    return x, y, z


@dataclass(frozen=True, eq=False)
class Axes:
    """The voxel centres of an axis-aligned lattice: increasing rows of world mm (CPU, float64) and their steps."""

    x: Tensor
    y: Tensor
    z: Tensor
    steps: tuple[float, float, float]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.x), len(self.y), len(self.z)

    def __getitem__(self, part: Slices) -> Axes:
        return Axes(self.x[part[0]], self.y[part[1]], self.z[part[2]], self.steps)

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.y, self.z

    def step(self, a: int) -> float:
        return self.steps[a]

    def numbers(self, a: int) -> Tensor:
        """Of the voxels along an axis, counted from world 0 on: each its own, and one more than the last.

        Centres lie at multiples of the step, or halfway between them, where rounding would make pairs of voxels.
        """
        return torch.floor(self.rows()[a] / self.steps[a] + 1e-3).long()

    def points(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """World coordinates that broadcast to the lattice: (X, 1, 1), (1, Y, 1), (1, 1, Z), float32."""
        x, y, z = (row.to(device, torch.float32) for row in self.rows())
        return x[:, None, None], y[None, :, None], z[None, None, :]


def coarse_axes(fine: Axes) -> Axes:
    """The 5 mm lattice around a fine one, `MARGIN` nodes more on each side than interpolation needs."""
    rows = []
    for row in fine.rows():
        first = int(np.floor(float(row[0]) / COARSE_MM)) - MARGIN
        last = int(np.floor(float(row[-1]) / COARSE_MM)) + 1 + MARGIN
        rows.append(torch.arange(first, last + 1, dtype=torch.float64) * COARSE_MM)
    return Axes(rows[0], rows[1], rows[2], (COARSE_MM, COARSE_MM, COARSE_MM))


def linear_matrix(source: Tensor, target: Tensor) -> Tensor:
    """(targets, sources) float32 weights of linear interpolation from an even row of mm to points within it."""
    step = float(source[1] - source[0])
    place = ((target - source[0]) / step).clamp(0, len(source) - 1)
    low = place.floor().long().clamp(max=len(source) - 2)
    part = (place - low).float()
    matrix = torch.zeros(len(target), len(source))
    rows = torch.arange(len(target))
    matrix[rows, low] = 1 - part
    matrix[rows, low + 1] = part
    return matrix


def slab_matrix(source: Tensor, target: Tensor, thick: float) -> Tensor:
    """(targets, sources) float32 weights of the means over ``thick`` mm around each target, from an even row of mm."""
    step = float(source[1] - source[0])
    gap = (source[None, :] - target[:, None]).abs()
    weight = ((thick + step) / 2 - gap).clamp(0, min(step, thick))
    return (weight / weight.sum(dim=1, keepdim=True).clamp(min=1e-9)).float()


def lattice(row: Tensor, apart: float, reach: float = 0.0, start: float = 0.0) -> tuple[Tensor, Tensor]:
    """Numbers and places (mm) of the multiples of ``apart``, counted from ``start``, in a row's ``reach``."""
    first = math.floor((float(row[0]) - start - reach) / apart)
    last = math.ceil((float(row[-1]) - start + reach) / apart)
    number = torch.arange(first, last + 2)
    return number, number.double() * apart + start


def separable(matrices: Sequence[Tensor], values: Tensor) -> Tensor:
    """Apply one (targets, sources) matrix along each axis of a (X, Y, Z) tensor."""
    mx, my, mz = (m.to(values.device) for m in matrices)
    x, y, z = values.shape
    out = (mx @ values.reshape(x, y * z)).reshape(-1, y, z)
    out = torch.matmul(my, out)
    return torch.matmul(out.reshape(-1, z), mz.T).reshape(mx.shape[0], my.shape[0], mz.shape[0])


def upsample(field: Tensor, coarse: Axes, fine: Axes) -> Tensor:
    """A field on the coarse lattice, linearly interpolated at every voxel of the fine one."""
    matrices = []
    part = []
    for source, target in zip(coarse.rows(), fine.rows(), strict=True):
        # Only the nodes around the target: far fewer products, the same numbers.
        low = max(0, int(torch.searchsorted(source, target[0], right=True)) - 1)
        high = min(len(source), int(torch.searchsorted(source, target[-1])) + 2)
        low = min(low, high - 2)
        part.append(slice(low, high))
        matrices.append(linear_matrix(source[low:high], target))
    return separable(matrices, field[part[0], part[1], part[2]])


def extent_below(field: Tensor, level: float, coarse: Axes, fine: Axes) -> Slices | None:
    """The box of fine voxels that holds everything where a coarse field is below ``level``; None if nothing is."""
    inside = field < level
    parts = []
    for a, (source, target) in enumerate(zip(coarse.rows(), fine.rows(), strict=True)):
        hits = torch.nonzero(inside.any(dim=[d for d in range(3) if d != a]))
        if len(hits) == 0:
            return None
        low = source[int(hits[0])] - COARSE_MM
        high = source[int(hits[-1])] + COARSE_MM
        start, stop = int(torch.searchsorted(target, low)), int(torch.searchsorted(target, high, right=True))
        if stop <= start:
            return None
        parts.append(slice(start, stop))
    return parts[0], parts[1], parts[2]


def normalised(field: Tensor) -> Tensor:
    """A level-set field on the coarse lattice turned into a distance in mm near its surface: f / |grad f|."""
    square = torch.zeros_like(field)
    for a in range(3):
        slope = torch.gradient(field, spacing=COARSE_MM, dim=a)[0]
        square += slope * slope
    return field / square.sqrt_().clamp_(min=0.05)


def smooth_min(a: Tensor, b: Tensor, k: float) -> Tensor:
    """The union of two shapes, rounded over ``k`` mm where they meet (polynomial smooth minimum)."""
    h = (k - (a - b).abs()).clamp_(min=0)
    return torch.minimum(a, b) - h * h * (0.25 / k)


def smooth_max(a: Tensor, b: Tensor, k: float) -> Tensor:
    return -smooth_min(-a, -b, k)


def ellipsoid(p: Sequence[Tensor], centre: Sequence[float], radii: Sequence[float]) -> Tensor:
    """Distance to an ellipsoid (first order, exact on its surface)."""
    q = [(c - m) / r for c, m, r in zip(p, centre, radii, strict=True)]
    k0 = (q[0] * q[0] + q[1] * q[1] + q[2] * q[2]).sqrt_()
    s = [v / r for v, r in zip(q, radii, strict=True)]
    k1 = (s[0] * s[0] + s[1] * s[1] + s[2] * s[2]).sqrt_().clamp_(min=1e-6)
    return k0 * (k0 - 1) / k1


@dataclass(frozen=True, eq=False)
class Beads:
    """Spheres along tubes: centres (N, 3) and radii (N) in mm; the tube is their union."""

    centres: Tensor
    radii: Tensor

    def __len__(self) -> int:
        return len(self.radii)

    @staticmethod
    def joined(parts: Sequence[Beads]) -> Beads:
        if not parts:
            return Beads(torch.zeros(0, 3), torch.zeros(0))
        return Beads(torch.cat([p.centres for p in parts]), torch.cat([p.radii for p in parts]))

    def grown(self, mm: float) -> Beads:
        return Beads(self.centres, self.radii + mm)

    def where(self, kept: Tensor) -> Beads:
        """Those of a (N,) bool."""
        return Beads(self.centres[kept], self.radii[kept])


def strand(points: Sequence[Sequence[float]], radii: float | Sequence[float], step: float = 0.3) -> Beads:
    """Beads along a smooth curve through some points (mm), every ``step`` radii (at least every 0.4 mm)."""
    nodes = np.asarray(points, dtype=np.float64)
    widths = np.broadcast_to(np.asarray(radii, dtype=np.float64), (len(nodes),))
    # Catmull-Rom through the nodes, ends repeated.
    padded = np.concatenate([2 * nodes[:1] - nodes[1:2], nodes, 2 * nodes[-1:] - nodes[-2:-1]])
    u = np.linspace(0, 1, 12, endpoint=False)[:, None]
    pieces, wide = [], []
    for i in range(len(nodes) - 1):
        p0, p1, p2, p3 = padded[i : i + 4]
        pieces.append(
            0.5 * (2 * p1 + (p2 - p0) * u + (2 * p0 - 5 * p1 + 4 * p2 - p3) * u**2 + (3 * p1 - p0 - 3 * p2 + p3) * u**3)
        )
        wide.append(widths[i] + (widths[i + 1] - widths[i]) * u[:, 0])
    curve = np.concatenate([*pieces, nodes[-1:]])
    width = np.concatenate([*wide, widths[-1:]])
    along = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(curve, axis=0), axis=1))])
    count = max(2, int(np.ceil(along[-1] / max(0.4, step * float(width.min())))) + 1)
    at = np.linspace(0, along[-1], count)
    centres = np.stack([np.interp(at, along, curve[:, a]) for a in range(3)], axis=1)
    return Beads(torch.from_numpy(centres).float(), torch.from_numpy(np.interp(at, along, width)).float())


def splat(beads: Beads, axes: Axes, device: torch.device, reach_mm: float) -> Tensor:
    """Signed distance (mm, negative inside) to the union of beads, exact up to ``reach_mm`` outside them.

    Returns:
        (X, Y, Z) float32, ``reach_mm`` where nothing is near.
    """
    shape = axes.shape
    out = torch.full((shape[0] * shape[1] * shape[2],), -reach_mm, device=device)
    _scatter(beads, axes, reach_mm, out, None)
    return out.neg_().reshape(shape)


def splat_weight(
    beads: Beads, axes: Axes, device: torch.device, voxel_mm: float, strength: Tensor | None = None
) -> Tensor:
    """Which part of each voxel thin tubes fill, 0 to 1; tubes thinner than a voxel fill it partly.

    With a ``strength`` (N, 0 to 1) of each bead: the largest product of part and strength.
    """
    shape = axes.shape
    out = torch.zeros(shape[0] * shape[1] * shape[2], device=device)
    _scatter(beads, axes, 0.5 * voxel_mm, out, voxel_mm, strength)
    return out.reshape(shape)


def _scatter(
    beads: Beads, axes: Axes, reach_mm: float, out: Tensor, weight_voxel_mm: float | None,
    strength: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the maximum of (radius - distance), or of the filled part, over all beads into a flat volume."""
    if len(beads) == 0:
        return
    device = out.device
    steps = [axes.step(a) for a in range(3)]
    place = beads.centres.to(device).clone()
    for a, row in enumerate(axes.rows()):
        place[:, a] = (place[:, a] - float(row[0])) / steps[a]
    radii = beads.radii.to(device)
    strength = torch.ones_like(radii) if strength is None else strength.to(device)
    span = torch.stack([(radii + reach_mm) / s for s in steps], dim=1)
    top = torch.tensor(axes.shape, device=device)
    touching = ((place + span > 0) & (place - span < top - 1)).all(dim=1)
    place, radii, span, strength = place[touching], radii[touching], span[touching], strength[touching]
    if len(radii) == 0:
        return
    # Beads with like footprints go together: the loop is over sizes, not over beads.
    size = span.max(dim=1).values
    edges = torch.tensor([1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 13.0, 20.0, 40.0], device=device)
    group = torch.bucketize(size, edges)
    for g in torch.unique(group).tolist():
        chosen = group == g
        _scatter_group(place[chosen], radii[chosen], span[chosen], strength[chosen], axes, steps, out, weight_voxel_mm)


def _scatter_group(
    place: Tensor, radii: Tensor, span: Tensor, strength: Tensor, axes: Axes, steps: list[float], out: Tensor,
    weight_voxel_mm: float | None,
) -> None:  # fmt: skip
    """Beads with one footprint (a box of voxels): distances axis by axis, then one scatter."""
    reach = [int(v) for v in torch.ceil(span.amax(dim=0)).tolist()]
    chunk = max(1, 300_000 // int(np.prod([2 * n + 1 for n in reach])))
    strides = (axes.shape[1] * axes.shape[2], axes.shape[2], 1)
    for start in range(0, len(radii), chunk):
        p, r = place[start : start + chunk], radii[start : start + chunk]
        base = p.round().long()
        squares, indices = [], []
        for a, n in enumerate(reach):
            index = base[:, a, None] + torch.arange(-n, n + 1, device=out.device)
            gap = ((index - p[:, a, None]) * steps[a]).square_()
            # Outside the volume: infinitely far, so that the write changes nothing.
            gap.masked_fill_((index < 0) | (index >= axes.shape[a]), torch.inf)
            squares.append(gap)
            indices.append(index.clamp_(0, axes.shape[a] - 1).mul_(strides[a]))
        distance = squares[0][:, :, None, None] + squares[1][:, None, :, None]
        value = (distance + squares[2][:, None, None, :]).sqrt_().sub_(r[:, None, None, None]).neg_()
        flat = indices[0][:, :, None, None] + indices[1][:, None, :, None]
        flat = flat + indices[2][:, None, None, :]
        if weight_voxel_mm is not None:
            filled = (3.1416 * (r / weight_voxel_mm) ** 2).clamp_(max=1.0).mul_(strength[start : start + chunk])
            value = value.mul_(1 / weight_voxel_mm).add_(0.5).clamp_(0, 1).mul_(filled[:, None, None, None])
        out.scatter_reduce_(0, flat.reshape(-1), value.reshape(-1), "amax")


@lru_cache(maxsize=64)
def _lattice(seed: int, nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((nodes, nodes, nodes), generator=generator)


def random_field(seed: int, spacing_mm: float | Sequence[float], axes: Axes, device: torch.device) -> Tensor:
    """A smooth random field of unit variance whose features are about ``spacing_mm`` wide, fixed in the world.

    A periodic lattice of normal numbers, interpolated by cubic B-splines.
    """
    nodes = 40
    spacing = [spacing_mm] * 3 if isinstance(spacing_mm, int | float) else list(spacing_mm)
    lattice = _lattice(seed, nodes).to(device)
    matrices = [_spline_matrix(row, s, nodes) for row, s in zip(axes.rows(), spacing, strict=True)]
    return separable(matrices, lattice) * 2.95


def _spline_matrix(target: Tensor, spacing_mm: float, nodes: int) -> Tensor:
    place = target / spacing_mm
    low = place.floor()
    u = (place - low).float()
    weights = [(1 - u) ** 3 / 6, (3 * u**3 - 6 * u**2 + 4) / 6, (-3 * u**3 + 3 * u**2 + 3 * u + 1) / 6, u**3 / 6]
    matrix = torch.zeros(len(target), nodes)
    rows = torch.arange(len(target))
    for k, w in enumerate(weights):
        matrix.index_put_((rows, (low.long() + k - 1) % nodes), w, accumulate=True)
    return matrix
