"""From loose CT slices to a volume's plan: groups that fit together, in order, evenly spaced, upright."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cascadeseg.formats.dicom_files import Series, Slice
from cascadeseg.formats.placement import LPS_TO_RAS
from cascadeseg.geometry import Affine

SAME_DIRECTION = 1e-3
"""Largest difference of direction cosines within a stack."""
SAME_PLACE_MM = 0.01
SAME_PLACE_SHARE = 0.05
"""Slices closer than this share of the usual gap share a place: reconstructions of one series that differ in rounding
or by a hair. Gaps in truth so unlike (0.5 and 10 mm) do not fill a quarter of a series."""
WHOLE_SHARE = 0.9
"""One of several acquisitions that share places is read alone if it reaches this share of them all; otherwise the
others fill in."""
SAME_RANGE_SHARE = 0.75
"""Acquisitions that share so much of the heights that they reach are scans of one place, whose slices may lie between
each other's; those of a table that moves on in the middle of a scan share far less."""
LEAST_PLACES = 3
"""Of an acquisition that may be a scan of its own."""
EVEN_SHARE = 0.1
"""Slices may lie this share of the spacing beside their even places."""
SPLIT_GAP_MM = 60.0
"""A gap this wide is not a few lost slices: the parts are stacks of their own."""
HU_TYPES = ("", "HU", "HU_MOD", "US", "UNSPECIFIED")
"""RescaleType of values in HU or, as it is with older scanners, in units that are not told; a spectral scan's maps of
iodine, of electrons or of atomic numbers have others."""
TILT_PIXELS = 0.5
"""Slices that shift sideways by less than this over the whole stack are as upright as it matters."""


@dataclass(frozen=True)
class Layer:
    """One slice of the volume: ``(1 - weight) * slices[lower] + weight * slices[upper]``."""

    lower: int
    upper: int
    weight: float


@dataclass(frozen=True)
class Stack:
    """Slices of one series that make a volume.

    Attributes:
        slices: of one size, orientation and pixel spacing, in order along their normal, each place once.
        layers: the volume's slices, evenly spaced.
        spacing_mm: between layers.
        shifts: (slices, 2) pixels by which each slice lies off the first one's normal, along (rows' index, columns'
            index); zeros for an upright stack.
        tilt_degrees: between the normal and the line through the slices' corners.
        warnings: what was repaired.
    """

    slices: tuple[Slice, ...]
    layers: tuple[Layer, ...]
    spacing_mm: float
    shifts: npt.NDArray[np.float64]
    tilt_degrees: float
    warnings: tuple[str, ...]

    @property
    def series(self) -> Series:
        return self.slices[0].series

    @property
    def is_hu(self) -> bool:
        return self.slices[0].rescale_type in HU_TYPES

    @property
    def is_tilted(self) -> bool:
        return bool(np.abs(self.shifts).max() >= TILT_PIXELS)

    @property
    def canvas(self) -> tuple[int, int]:
        """(rows, columns) of the volume: a tilted stack needs room for its shifted slices."""
        rows, columns = self.slices[0].shape
        if not self.is_tilted:
            return rows, columns
        room = np.ceil(np.ptp(self.shifts, axis=0)).astype(int) + 1
        return rows + int(room[0]), columns + int(room[1])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(X, Y, Z) voxels of the volume."""
        rows, columns = self.canvas
        return columns, rows, len(self.layers)

    @property
    def affine(self) -> Affine:
        """(4, 4) voxel index (column, row, layer) to RAS+ mm."""
        first = self.slices[0]
        along_row, along_column = np.reshape(first.orientation, (2, 3))
        rows_mm, columns_mm = first.pixel_spacing_mm
        affine = np.eye(4)
        affine[:3, 0] = along_row * columns_mm
        affine[:3, 1] = along_column * rows_mm
        affine[:3, 2] = normal_of(first) * self.spacing_mm
        affine[:3, 3] = first.position_mm
        if self.is_tilted:
            row, column = self.shifts.min(axis=0)
            affine[:3, 3] += column * affine[:3, 0] + row * affine[:3, 1]
        return np.asarray(LPS_TO_RAS @ affine)


def normal_of(slice_: Slice) -> npt.NDArray[np.float64]:
    """(3,) LPS+: the unit vector from which rows and columns are seen as they are stored, right-handed."""
    along_row, along_column = np.reshape(slice_.orientation, (2, 3))
    normal = np.cross(along_row, along_column)
    return np.asarray(normal / np.linalg.norm(normal))


def stacks_of(slices: Sequence[Slice]) -> list[Stack]:
    """Every stack of two slices or more among loose slices: those in HU first, of these the one with most voxels."""
    groups = _groups(slices)
    stacks = [
        _stack(part, [*odd, *cut, *_unlike(group, groups)])
        for group in groups
        for one, odd in [_each_place_once(group)]
        for part, cut in _parts(one)
        if len(part) > 1
    ]
    return sorted(stacks, key=lambda s: (not s.is_hu, -np.prod(s.shape), s.series.number, s.series.uid))


def _groups(slices: Sequence[Slice]) -> list[list[Slice]]:
    """Slices of one patient's series, size, pixel spacing and orientation, each group in order along its normal."""
    groups: list[list[Slice]] = []
    for slice_ in slices:
        fitting = (group for group in groups if _fits(slice_, group[0]))
        group = next(fitting, None)
        if group is None:
            groups.append([slice_])
        else:
            group.append(slice_)
    return [sorted(group, key=lambda s: (_height(s, group[0]), s.instance)) for group in groups]


def _unlike(group: list[Slice], groups: Sequence[list[Slice]]) -> list[str]:
    """Warnings of the slices of the group's series that are in other groups."""
    series = group[0].series
    left = [slice_ for other in groups if other is not group for slice_ in other if slice_.series.uid == series.uid]
    others = [slice_ for slice_ in left if slice_.series.key != series.key]
    odd = [slice_ for slice_ in left if slice_.series.key == series.key]
    return [
        *_left_out(others, ("is", "are"), "of another patient (PatientID)"),
        *_left_out(odd, ("does", "do"), "not fit the others in size, pixel spacing or direction"),
    ]


def _left_out(slices: list[Slice], verbs: tuple[str, str], why: str) -> list[str]:
    """A warning of slices that were left out, if there are any."""
    if not slices:
        return []
    first = min(slice_.source.name for slice_ in slices)
    if len(slices) == 1:
        return [f"1 slice of the series {verbs[0]} {why}: left out ({first})"]
    return [f"{len(slices)} slices of the series {verbs[1]} {why}: left out (the first: {first})"]


def _fits(one: Slice, other: Slice) -> bool:
    return (
        one.series.key == other.series.key
        and one.shape == other.shape
        and np.allclose(one.pixel_spacing_mm, other.pixel_spacing_mm, rtol=1e-3)
        and np.allclose(one.orientation, other.orientation, rtol=0, atol=SAME_DIRECTION)
    )


def _height(slice_: Slice, first: Slice) -> float:
    """mm along the normal of ``first``, from the scanner's origin."""
    return float(np.dot(normal_of(first), slice_.position_mm))


def _each_place_once(group: list[Slice]) -> tuple[list[Slice], list[str]]:
    """The group with one slice at each place: of one acquisition where that reaches, by instance number otherwise."""
    single = _without_copies(group)
    warnings = []
    if copies := len(group) - len(single):
        noun = "copy of a slice was" if copies == 1 else "copies of slices were"
        warnings.append(f"{copies} {noun} left out (the same SOPInstanceUID)")
    several, single = single, _without_rivals(single)
    warnings += _acquisitions_read(several, single)
    places = _places(single)
    if len(places) == len(single):
        return single, warnings
    acquisitions = sorted({slice_.acquisition for slice_ in single})
    reached = {number: sum(any(s.acquisition == number for s in place) for place in places) for number in acquisitions}
    best = max(acquisitions, key=lambda number: reached[number])
    if len(acquisitions) > 1 and reached[best] >= WHOLE_SHARE * len(places):
        taken = [slice_ for slice_ in single if slice_.acquisition == best]
        warnings += _acquisitions_read(single, taken)
        single, places = taken, _places(taken)
    kept = [min(place, key=lambda s: (s.acquisition != best, s.instance)) for place in places]
    if twice := len(single) - len(kept):
        stays = f"acquisition {best}, then " if len({s.acquisition for s in single}) > 1 else ""
        noun = (
            "slice lies where another one does and was" if twice == 1 else "slices lie where another one does and were"
        )
        warnings.append(f"{twice} {noun} left out ({stays}the lower instance number stays)")
    return kept, warnings


def _without_copies(group: list[Slice]) -> list[Slice]:
    """Each slice once, though its file be there twice. The UID alone would not do: some anonymisers give one to all."""
    first: dict[tuple[object, ...], Slice] = {}
    for slice_ in group:
        first.setdefault((slice_.uid or id(slice_), slice_.instance, slice_.acquisition, slice_.position_mm), slice_)
    return list(first.values())


def _without_rivals(group: list[Slice]) -> list[Slice]:
    """Of acquisitions over nearly the same heights the one with most places, or the lower number; and all others."""
    slices_of: dict[int, list[Slice]] = {}
    for slice_ in group:
        slices_of.setdefault(slice_.acquisition, []).append(slice_)
    places = {number: len(_places(slices)) for number, slices in slices_of.items()}
    ends = {number: [_height(slices[i], group[0]) for i in (0, -1)] for number, slices in slices_of.items()}
    whole = [number for number in slices_of if places[number] >= LEAST_PLACES]
    kept: list[int] = []
    rivals: list[int] = []
    for number in sorted(whole, key=lambda number: (-places[number], number)):
        is_rival = any(_share_a_range(ends[number], ends[other]) for other in kept)
        (rivals if is_rival else kept).append(number)
    return [slice_ for slice_ in group if slice_.acquisition not in rivals]


def _share_a_range(one: list[float], other: list[float]) -> bool:
    """Whether two ranges of heights, from the lowest to the highest, are nearly the same."""
    shared = min(one[1], other[1]) - max(one[0], other[0])
    return shared >= SAME_RANGE_SHARE * max(one[1] - one[0], other[1] - other[0])


def _acquisitions_read(slices: list[Slice], taken: list[Slice]) -> list[str]:
    """A warning of the acquisitions that were left out, if any was."""
    if len(taken) == len(slices):
        return []
    numbers, read = ({slice_.acquisition for slice_ in some} for some in (slices, taken))
    which = f"number {min(read)} was" if len(read) == 1 else f"{len(read)} of them were"
    return [f"the series holds {len(numbers)} acquisitions; {which} read ({len(taken)} of {len(slices)} slices)"]


def _places(group: list[Slice]) -> list[list[Slice]]:
    """The slices at each place, for a group in order."""
    heights = np.array([_height(slice_, group[0]) for slice_ in group])
    gaps = np.diff(heights)
    gaps = gaps[gaps > SAME_PLACE_MM]
    usual = float(np.percentile(gaps, 75, method="lower")) if len(gaps) else 0.0  # where doubles abound, few are whole
    within = max(SAME_PLACE_MM, SAME_PLACE_SHARE * usual)
    starts = [0]
    for i, height in enumerate(heights):
        if height - heights[starts[-1]] > within:
            starts.append(i)
    return [group[a:b] for a, b in pairwise([*starts, len(group)])]


def _parts(group: list[Slice]) -> list[tuple[list[Slice], list[str]]]:
    """The group cut at gaps that are too wide to bridge; each part knows what was cut off."""
    heights = np.array([_height(slice_, group[0]) for slice_ in group])
    gaps = np.diff(heights)
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    cuts = np.flatnonzero(gaps > max(SPLIT_GAP_MM, 3 * usual)) + 1
    bounds = [0, *map(int, cuts), len(group)]
    parts = [group[a:b] for a, b in pairwise(bounds)]
    if len(parts) == 1:
        return [(group, [])]
    widest = float(gaps[cuts - 1].max())
    return [
        (part, [f"the series has a gap of {widest:.4g} mm; {len(group) - len(part)} slices beyond it were left out"])
        for part in parts
    ]


def _stack(slices: list[Slice], warnings: list[str]) -> Stack:
    heights = np.array([_height(slice_, slices[0]) for slice_ in slices])
    layers, spacing, uneven = _layers(heights)
    normal = normal_of(slices[0])
    along_row, along_column = np.reshape(slices[0].orientation, (2, 3))
    rows_mm, columns_mm = slices[0].pixel_spacing_mm
    moved = np.array([slice_.position_mm for slice_ in slices]) - np.array(slices[0].position_mm)
    sideways = moved - np.outer(moved @ normal, normal)
    with np.errstate(all="ignore"):  # a spacing of zero is refused when the stack is read
        shifts = np.stack([sideways @ along_column / rows_mm, sideways @ along_row / columns_mm], axis=1)
    tilt = float(np.degrees(np.arctan2(np.linalg.norm(sideways[-1]), heights[-1] - heights[0])))
    stack = Stack(tuple(slices), tuple(layers), spacing, shifts, tilt, (*warnings, *uneven))
    if not stack.is_hu:
        said = f"the values are of the type {slices[0].rescale_type} (RescaleType), not HU: the mask may be wrong"
        stack = replace(stack, warnings=(*stack.warnings, said))
    if not stack.is_tilted:
        return stack
    reach = float(np.linalg.norm(sideways, axis=1).max())
    said = (
        f"slices tilted by {tilt:.1f} degrees (gantry tilt) were shifted by up to {reach:.3g} mm onto an upright "
        "grid; the mask lies on that grid"
    )
    return replace(stack, warnings=(*stack.warnings, said))


def _layers(heights: npt.NDArray[np.float64]) -> tuple[list[Layer], float, list[str]]:
    """Evenly spaced layers from the slices' heights (mm, ascending): (layers, spacing_mm, warnings)."""
    span = float(heights[-1] - heights[0])
    count = round(span / float(np.median(np.diff(heights)))) + 1
    spacing = span / (count - 1)
    places = np.rint((heights - heights[0]) / spacing).astype(int)
    off = np.abs(heights - heights[0] - places * spacing).max() / spacing
    wanted = heights[0] + np.arange(count) * spacing
    if off > EVEN_SHARE or len(set(places)) < len(places):
        gaps = np.diff(heights)
        said = f"uneven slice spacing ({gaps.min():.3g} to {gaps.max():.3g} mm) was made even at {spacing:.3g} mm"
        return [_between(heights, height) for height in wanted], spacing, [said]
    at = dict(zip(places.tolist(), range(len(places)), strict=True))
    missing = [i for i in range(count) if i not in at]
    layers = [Layer(at[i], at[i], 0.0) if i in at else _between(heights, wanted[i]) for i in range(count)]
    if not missing:
        return layers, spacing, []
    named = ", ".join(f"{wanted[i]:.4g}" for i in missing[:8]) + (", ..." if len(missing) > 8 else "")
    noun = "missing slice was" if len(missing) == 1 else "missing slices were"
    return layers, spacing, [f"{len(missing)} {noun} interpolated from the neighbours (at {named} mm)"]


def _between(heights: npt.NDArray[np.float64], wanted: float) -> Layer:
    """The slices above and below a height, and the weight of the upper one; a slice that is all but there alone."""
    upper = int(np.clip(np.searchsorted(heights, wanted), 1, len(heights) - 1))
    weight = float(np.clip((wanted - heights[upper - 1]) / (heights[upper] - heights[upper - 1]), 0, 1))
    if weight < EVEN_SHARE:
        return Layer(upper - 1, upper - 1, 0.0)
    return Layer(upper, upper, 0.0) if weight > 1 - EVEN_SHARE else Layer(upper - 1, upper, weight)
