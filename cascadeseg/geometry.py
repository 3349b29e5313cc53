"""Where voxels lie in the patient: `Grid` and `Box`, two pure values.

The one axis rule of the package: array axis ``a`` is affine column ``a`` is ``spacing_mm[a]``. World coordinates are
RAS+ millimetres (x grows to the patient's right, y to the front, z to the head). Voxel index ``i`` is the *centre* of
a voxel, which spans ``i - 0.5`` to ``i + 0.5``. Only `formats` knows LPS or reversed axes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import fastremap
import numpy as np
import numpy.typing as npt

Shape = tuple[int, int, int]
Affine = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
TOWARDS, AWAY = "RAS", "LPI"
"""The letters of the world's axes, to where they grow and to where they come from."""
SAME_GRID_MM = 0.1
"""Headers that differ by less say the same: formats round differently, and so do programs that correct a mask."""


@dataclass(frozen=True)
class Box:
    """A half-open box of voxels, ``start <= index < stop`` on every axis."""

    start: Shape
    stop: Shape

    @staticmethod
    def of(start: Sequence[int] | npt.NDArray[np.int64], stop: Sequence[int] | npt.NDArray[np.int64]) -> Box:
        """The box between two corners that are worked out axis by axis."""
        return Box(_shape(start), _shape(stop))

    @staticmethod
    def around(boxes: Sequence[Box]) -> Box:
        """The smallest box that holds one or more others."""
        return Box.of(np.min([box.start for box in boxes], axis=0), np.max([box.stop for box in boxes], axis=0))

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of every voxel of an array of this shape."""
        return Box((0, 0, 0), _shape(shape))

    @property
    def shape(self) -> Shape:
        return _shape([b - a for a, b in zip(self.start, self.stop, strict=True)])

    @property
    def middle(self) -> tuple[float, ...]:
        """In voxels, whose centres are whole numbers."""
        return tuple((a + b - 1) / 2 for a, b in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """For indexing: ``array[box.slices]``."""
        x, y, z = (slice(a, b) for a, b in zip(self.start, self.stop, strict=True))
        return x, y, z

    def grown(self, voxels: Sequence[int] | npt.NDArray[np.int64]) -> Box:
        """The box with ``voxels[a]`` more on both sides of axis ``a``."""
        return Box.of(np.subtract(self.start, voxels), np.add(self.stop, voxels))

    def shifted(self, voxels: Sequence[int]) -> Box:
        """The box moved by ``voxels[a]`` along axis ``a``."""
        return Box.of(np.add(self.start, voxels), np.add(self.stop, voxels))

    def overlaps(self, other: Box) -> bool:
        """Whether the boxes share a voxel."""
        starts, stops = (np.array(corners) for corners in ((self.start, other.start), (self.stop, other.stop)))
        return bool((starts.max(axis=0) < stops.min(axis=0)).all())

    def clipped(self, shape: Sequence[int]) -> Box:
        """The part of the box inside an array of this shape."""
        start = [min(max(a, 0), n) for a, n in zip(self.start, shape, strict=True)]
        stop = [min(max(b, a), n) for a, b, n in zip(start, self.stop, shape, strict=True)]
        return Box.of(start, stop)


@dataclass(frozen=True, eq=False)
class Grid:
    """The voxel centres of a volume in the patient.

    Attributes:
        shape: voxels along each array axis.
        affine: (4, 4) float64, voxel index to RAS+ mm. Its 3x3 part is direction times spacing; the directions are
            orthonormal (`formats` repairs or refuses anything else).
    """

    shape: Shape
    affine: Affine

    def __post_init__(self) -> None:
        affine = np.array(self.affine, dtype=np.float64)
        affine.setflags(write=False)
        object.__setattr__(self, "affine", affine)
        object.__setattr__(self, "shape", _shape(self.shape))

    @staticmethod
    def axis_aligned(shape: Sequence[int], spacing_mm: Sequence[float], origin_mm: Sequence[float] = (0, 0, 0)) -> Grid:
        """A grid whose axes are the world's: x right, y front, z head; ``origin_mm`` is the centre of voxel 0."""
        affine = np.diag([*map(float, spacing_mm), 1.0])
        affine[:3, 3] = origin_mm
        return Grid(_shape(shape), affine)

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        x, y, z = (float(v) for v in np.linalg.norm(self.affine[:3, :3], axis=0))
        return x, y, z

    @property
    def directions(self) -> Affine:
        """(3, 3): column ``a`` is the unit vector of array axis ``a`` in the world."""
        matrix: Affine = self.affine[:3, :3] / np.asarray(self.spacing_mm)
        return matrix

    @property
    def voxel_volume_ml(self) -> float:
        return float(np.prod(self.spacing_mm)) / 1000.0

    def world(self, index: npt.ArrayLike) -> Affine:
        """RAS+ mm of voxel indices, (..., 3) to (..., 3)."""
        return np.asarray(index, dtype=np.float64) @ self.affine[:3, :3].T + self.affine[:3, 3]

    def index(self, world_mm: npt.ArrayLike) -> Affine:
        """Fractional voxel indices of points in RAS+ mm, (..., 3) to (..., 3)."""
        offset = np.asarray(world_mm, dtype=np.float64) - self.affine[:3, 3]
        return np.asarray(offset @ np.linalg.inv(self.affine[:3, :3]).T)

    def canonical_axes(self) -> tuple[Shape, tuple[bool, bool, bool]]:
        """How to turn the array closest to RAS+: ``(order, flips)``.

        Array axis ``order[w]`` becomes axis ``w``, reversed where ``flips[w]``. Of the six orders the one with the
        largest summed direction cosines is taken.
        """
        cosines = self.directions
        order = max(permutations(range(3)), key=lambda p: sum(abs(cosines[w, p[w]]) for w in range(3)))
        fx, fy, fz = (bool(cosines[w, order[w]] < 0) for w in range(3))
        return _shape(order), (fx, fy, fz)

    @property
    def orientation(self) -> str:
        """Where each array axis grows to: ``RAS`` is right, anterior, superior, ``LPS`` left, posterior, superior."""
        order, flips = self.canonical_axes()
        letters = [(TOWARDS, AWAY)[flips[world]][world] for world in range(3)]
        return "".join(letters[order.index(axis)] for axis in range(3))

    def canonical(self) -> Grid:
        """The grid of `canonical_view` of this grid's arrays: the same voxels, axes closest to RAS+."""
        order, flips = self.canonical_axes()
        affine = self.affine.copy()
        affine[:3, :3] = self.affine[:3, list(order)]
        shape = [self.shape[a] for a in order]
        for w, flip in enumerate(flips):
            if flip:
                affine[:3, 3] += affine[:3, w] * (shape[w] - 1)
                affine[:3, w] *= -1
        return Grid(_shape(shape), affine)

    def cropped(self, box: Box) -> Grid:
        """The grid of ``array[box.slices]`` (boxes reaching outside are fine: the grid simply goes on)."""
        affine = self.affine.copy()
        affine[:3, 3] = self.world(box.start)
        return Grid(box.shape, affine)

    def resampled(self, spacing_mm: float | Sequence[float], *, all_centres: bool = False) -> Grid:
        """The grid over the same field of view, about its centre, with another spacing and the same directions.

        Args:
            spacing_mm: of the new grid.
            all_centres: the field of view is rounded to whole voxels; never to one without the centre of a voxel of
                this grid.
        """
        spacing = np.broadcast_to(np.asarray(spacing_mm, dtype=np.float64), (3,))
        extent = np.asarray(self.shape) * np.asarray(self.spacing_mm)
        shape = np.maximum(1, np.round(extent / spacing - 1e-6)).astype(int)
        if all_centres:
            shape = np.maximum(shape, np.ceil((extent - self.spacing_mm) / spacing - 1e-6).astype(int))
        affine = np.eye(4)
        affine[:3, :3] = self.directions * spacing
        centre = self.world((np.asarray(self.shape) - 1) / 2)
        affine[:3, 3] = centre - affine[:3, :3] @ ((shape - 1) / 2)
        return Grid(_shape(shape), affine)

    def covering(self, box: Box, target: Grid) -> Box:
        """The smallest box of ``target`` (same directions) that covers ``box`` of this grid; may reach outside."""
        edges = np.stack([np.asarray(box.start) - 0.5, np.asarray(box.stop) - 0.5])
        there = target.index(self.world(edges))
        # A hair of tolerance, so that rounding does not add a row of voxels on a grid that fits exactly.
        start = np.floor(there.min(axis=0) + 0.5 + 1e-6).astype(int)
        stop = np.ceil(there.max(axis=0) + 0.5 - 1e-6).astype(int)
        return Box.of(start, stop)

    def nearest(self, other: Grid) -> tuple[npt.NDArray[np.int64], ...]:
        """Along each axis the voxels nearest to those of ``other`` (same directions); may lie outside."""
        low, high = self.index(other.world([(0, 0, 0), [n - 1 for n in other.shape]]))
        return tuple(np.rint(np.linspace(low[a], high[a], other.shape[a])).astype(np.int64) for a in range(3))

    def box_in(self, other: Grid, tolerance_mm: float = 1e-3) -> Box | None:
        """The box of ``other`` that has this grid's voxels (it may reach outside); None if they are no voxels of it."""
        box = Box.whole(self.shape).shifted(np.rint(other.index(self.affine[:3, 3])).astype(int).tolist())
        return box if other.cropped(box).matches(self, tolerance_mm) else None

    def matches(self, other: Grid, tolerance_mm: float = 1e-3) -> bool:
        """Whether both grids have one shape and put every corner within ``tolerance_mm`` of each other."""
        if self.shape != other.shape:
            return False
        corners = np.array(np.meshgrid(*[(0, n - 1) for n in self.shape])).reshape(3, -1).T
        return bool(np.abs(self.world(corners) - other.world(corners)).max() <= tolerance_mm)


def canonical_view(array: npt.NDArray[np.generic], grid: Grid) -> npt.NDArray[np.generic]:
    """A view (never a copy) of an array on ``grid``, its axes turned closest to RAS+; its grid is ``grid.canonical()``.

    Writing into the view writes into the array, which is how results return to the scan's own axis order.
    """
    order, flips = grid.canonical_axes()
    return array.transpose(order)[tuple(slice(None, None, -1) if flip else slice(None) for flip in flips)]


def boxes_on_one_grid(one: Grid, other: Grid, *, may_be_cut: tuple[bool, bool]) -> tuple[Box, Box, Box] | None:
    """Where two masks of one scan lie, of which programs may have cut off what is empty.

    Args:
        one: where the first lies.
        other: where the second lies.
        may_be_cut: of each, whether it may be smaller than the scan.

    Returns:
        In voxels of the second, its axes turned closest to RAS+, the boxes of the first, of the second and of both
        together; None where they share no voxel, or one lacks what it may not.
    """
    one, other = one.canonical(), other.canonical()
    box, whole = one.box_in(other, SAME_GRID_MM), Box.whole(other.shape)
    if box is None or not box.overlaps(whole):
        return None
    around = Box.around([box, whole])
    if all(own == around or cut for own, cut in zip((box, whole), may_be_cut, strict=True)):
        return box, whole, around
    return None


def bounding_box(mask: Mask | npt.NDArray[np.uint8]) -> Box | None:
    """The smallest box around what is true of (X, Y, Z), or not 0; None where nothing is.

    Of a NumPy array, whose `any` is 15 times as fast on a processor as torch's.
    """
    ranges = []
    for axis in range(3):
        used = np.flatnonzero(mask.any(axis=tuple(other for other in range(3) if other != axis)))
        if len(used) == 0:
            return None
        ranges.append((used[0], used[-1] + 1))
    return Box.of(*np.transpose(ranges))


def counted(labels: npt.NDArray[Any]) -> Counter[int]:
    """How many voxels have each value of an (X, Y, Z) array of whole numbers; layer by layer, so without a copy."""
    counts: Counter[int] = Counter()
    for layer in _layers(labels)[1]:
        values, voxels = fastremap.unique(layer.astype(layer.dtype.newbyteorder("=")), return_counts=True)
        counts.update(dict(zip(values.tolist(), voxels.tolist(), strict=True)))
    return counts


def centroid(labels: npt.NDArray[Any], grid: Grid, values: Sequence[int] = (True,)) -> Affine:
    """RAS+ mm of the centre of all voxels that have one of some values (at least one has); layer by layer.

    Args:
        labels: (X, Y, Z) a mask, or whole numbers.
        grid: where they lie.
        values: those that count.
    """
    across, layers = _layers(labels)
    down, along = (axis for axis in range(3) if axis != across)
    sections = [np.zeros(n, np.int64) for n in labels.shape]
    for place, layer in enumerate(layers):
        there = np.isin(layer, values)
        sections[across][place] = there.sum()
        sections[down] += there.sum(axis=1)
        sections[along] += there.sum(axis=0)
    return grid.world([np.average(np.arange(len(section)), weights=section) for section in sections])


def _layers(array: npt.NDArray[Any]) -> tuple[int, Iterable[npt.NDArray[Any]]]:
    """The axis along which a volume's layers lie one after the other in memory, and these."""
    axis = int(np.argmax(np.abs(array.strides)))
    return axis, np.moveaxis(array, axis, 0)


def _shape(values: Sequence[int] | npt.NDArray[np.int64]) -> Shape:
    x, y, z = (int(v) for v in values)
    return x, y, z
