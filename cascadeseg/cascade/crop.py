"""The crop module: one box a lung, split around their centroids, and never through a lung.

Sides are decided by geometry as far as geometry can: world x grows to the patient's right, so of two lungs the right
one is the one with the larger x, whatever the network said of single voxels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cc3d
import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from cascadeseg.cascade.locate import LAYERS, Coarse, copy_of, found_in
from cascadeseg.formats.scan import Scan, sampled_hu
from cascadeseg.geometry import Box, Grid, Mask, bounding_box, centroid
from cascadeseg.labels import LEFT_LUNG, LUNGS, RIGHT_LUNG, Label

MARGIN_MM = 8.0
GROWTH_MM = 24.0
SMALLEST_LUNG_ML = 2.0
"""What stage 1 must find, at least, to be looked at: slivers of lung base on an abdominal scan are lung too."""
STRAY_SHARE = 0.03
"""A blob with less than this share of its side's probability, and apart from it, is not worth a larger box."""
COLUMN_MM = 15.0
"""How far outside the column of the largest blobs the centre of a smaller one may lie, in front, behind or beside."""
TISSUE_HU = -200.0
"""Fat and all that is denser; three samples of it in each direction across the body are a wall of the body."""
BODY_MM = 40.0
"""What lies behind or before as much tissue, with no wall on its other side, lies outside the body."""
OUTSIDE_SHARE = 0.8
"""A blob with more than this share of its voxels outside the body is a couch's foam, or air under a blanket."""
ENCLOSED_SHARE = 0.25
"""A blob in the body has at least this times the share of its voxels between two walls that the largest one has."""
OUTSIDE_WEIGHT = 0.02
"""Of a blob that no walls enclose: a lung in a field of view too narrow for them still outweighs gas in the bowel."""
SEPARATION_MM = 25.0
"""Centroids of two true lungs lie further apart across the body than this, even a newborn's."""
TWIN_SHARE = 0.2
"""Of the heavier lung's probability, what the lighter one has at least where both have one name."""
VALLEY = 0.5
"""Between two lungs the area of sagittal slices falls below this share of the smaller lung's largest."""

Field = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LungBox:
    """Where one lung is to be refined.

    Attributes:
        label: which lung.
        box: on ``grid``; may reach beyond the scan by less than a voxel.
        grid: the coarse grid.
        regrown: how many times it grew because the lung reached a cut face.
    """

    label: Label
    box: Box
    grid: Grid
    regrown: int = 0

    def extent(self, spacing_mm: float, stride: int) -> Grid:
        """The grid of stage 2's image: the box at another spacing, its shape a multiple of ``stride``.

        What the multiple adds lies evenly on both sides, so that the lung stays in the middle.
        """
        inner = self.grid.cropped(self.box).resampled(spacing_mm)
        missing = [-n % stride for n in inner.shape]
        start = [-(m // 2) for m in missing]
        stop = [n + m - m // 2 for n, m in zip(inner.shape, missing, strict=True)]
        return inner.cropped(Box.of(start, stop))


def crop_lungs(coarse: Coarse, margin_mm: float = MARGIN_MM) -> list[LungBox]:
    """One box for each lung, none where there is none.

    Args:
        coarse: probabilities whose sides are settled (`settle_sides`).
        margin_mm: added on every side, clipped to the scan.
    """
    margin = np.ceil(margin_mm / np.asarray(coarse.grid.spacing_mm)).astype(int)
    found, lungs = _found(coarse)
    boxes = []
    for label, mask in _sides(lungs).items():
        inner = bounding_box(mask)
        if inner is not None:
            box = inner.shifted(found.start).grown(margin).clipped(coarse.grid.shape)
            boxes.append(LungBox(label, box, coarse.grid))
    return boxes


def settle_sides(coarse: Coarse, scan: Scan | None = None) -> Coarse:
    """Stage 1's opinion made to agree with geometry: stray blobs gone, and each voxel on the side it lies on.

    Works on one blob that holds both lungs, on two blobs called by one name, on a single lung called by both names, and
    on nothing.

    Args:
        coarse: probabilities.
        scan: in canonical orientation; its HU tell which blobs are inside the body: the foam of a couch is not. None:
            all are taken to be.
    """
    box, found = _found(coarse)
    grid = coarse.grid.cropped(box)
    said = _sides(found)
    settled = _settled(said, found.sum(axis=0), grid, scan)
    right, left = (settled.get(label, np.False_) for label in LUNGS)
    stray = (said[RIGHT_LUNG] | said[LEFT_LUNG]) & ~(right | left)
    more, less = found.max(axis=0), found.min(axis=0)
    np.minimum(less, np.nextafter(more.astype(np.float16), np.float16(0)), out=less)  # ties would be read as right
    found[0] = np.where(right, more, np.where(left, less, found[0]))
    found[1] = np.where(left, more, np.where(right, less, found[1]))
    found *= ~stray
    # What lies outside the box was not found to be lung, and stays as it is.
    lungs = copy_of(coarse.lungs)
    lungs[:, *box.slices] = torch.from_numpy(found).to(lungs)
    renamed = frozenset(label for label, mask in settled.items() if (mask & ~said[label]).sum() > mask.sum() / 2)
    return Coarse(lungs, coarse.grid, renamed)


def _found(coarse: Coarse) -> tuple[Box, Field]:
    """The box of all that was found, and a copy of the probabilities in it: (2, X, Y, Z) float32."""
    parts = [
        inner.shifted((0, 0, start))
        for start in range(0, coarse.grid.shape[2], LAYERS)
        if (inner := bounding_box(found_in(coarse.lungs[..., start : start + LAYERS]).numpy(force=True)))
    ]
    box = Box.around(parts) if parts else Box((0, 0, 0), (0, 0, 0))
    lungs: Field = coarse.lungs[:, *box.slices].detach().to("cpu", torch.float32, copy=True).numpy()
    return box, lungs


def _sides(lungs: Field) -> dict[Label, Mask]:
    found = found_in(torch.from_numpy(lungs)).numpy()
    right = found & (lungs[0] >= lungs[1])
    return {RIGHT_LUNG: right, LEFT_LUNG: found & ~right}


def _settled(said: dict[Label, Mask], weight: Field, grid: Grid, scan: Scan | None) -> dict[Label, Mask]:
    """The mask of each lung that is there, strays removed and sides right."""
    masks, named_both = _without_strays(said, weight, grid, scan)
    masks = {label: mask for label, mask in masks.items() if mask.sum() * grid.voxel_volume_ml >= SMALLEST_LUNG_ML}
    if len(masks) == 1:
        return _split_if_both(*masks.popitem(), grid)
    if len(masks) == 2:
        if named_both is not None:
            return _split_if_both(named_both, masks[RIGHT_LUNG] | masks[LEFT_LUNG], grid)
        return _agree_with_geometry(masks, grid)
    return {}


@dataclass(frozen=True)
class _Parts:
    """The components of what was called one lung: (X, Y, Z) their numbers, then by number.

    Attributes:
        mass: the sum of probabilities; 0 for what is no component.
        boxes: around each.
        centroids: in voxels.
        enclosed: the share that lies between two walls of the body.
    """

    numbers: npt.NDArray[np.unsignedinteger]
    mass: npt.NDArray[np.float64]
    boxes: list[tuple[slice, slice, slice]]
    centroids: npt.NDArray[np.float64]
    enclosed: npt.NDArray[np.float64]

    @property
    def weight(self) -> npt.NDArray[np.float64]:
        """Their masses, those in the body before all others."""
        return self.mass * (OUTSIDE_WEIGHT + self.enclosed)

    @property
    def largest(self) -> int:
        """The one that weighs most."""
        return int(self.weight.argmax())


def _without_strays(
    said: dict[Label, Mask], weight: Field, grid: Grid, scan: Scan | None
) -> tuple[dict[Label, Mask], Label | None]:
    """The components that matter, by probability mass rather than size, and where a part of a lung can be at all.

    With them the name that both lungs have, apart from each other; None where each has its own, as nearly always.

    That is in the body, and in the column that the largest components of both sides stand in: neither behind nor beside
    it, as the foam of a couch is, which has the HU of a lung. How far above or below does not matter, but air between
    head and arms, of a scanner that is out of calibration, lies outside the body.
    """
    parts = {label: _parts(mask, weight) for label, mask in said.items() if mask.any()}
    if scan is not None and parts:
        enclosed, outside = _of_body(scan, grid)
        parts = {label: _not_outside(part, outside, grid, scan.grid) for label, part in parts.items()}
        parts = {label: part for label, part in parts.items() if part.mass.any()}
    smallest = 0.5 * SMALLEST_LUNG_ML / grid.voxel_volume_ml
    blobs = [part.boxes[n] for part in parts.values() for n in np.flatnonzero(part.mass >= smallest)]
    if scan is not None and _is_odd(blobs):
        parts = {label: replace(part, enclosed=_share(part, enclosed)) for label, part in parts.items()}
    main = _lungs_of(parts, grid)
    largest = [(parts[label].boxes[n], parts[label].enclosed[n]) for label, lungs in main.items() for n in lungs]
    enough = ENCLOSED_SHARE * max((share for _, share in largest), default=0.0)
    in_body = [box for box, share in largest if share >= enough]
    keep = {}
    for label, part in parts.items():
        heavy = part.mass >= max(STRAY_SHARE * part.mass[part.largest], smallest)
        keep[label] = heavy & ((part.enclosed >= enough) | np.isin(np.arange(len(heavy)), main[label]))
    for axis, column in enumerate(([box for box, _ in largest], in_body)):
        beside = COLUMN_MM / grid.spacing_mm[axis]
        for label, part in parts.items():
            keep[label] &= part.centroids[:, axis] >= min(box[axis].start for box in column) - beside
            keep[label] &= part.centroids[:, axis] < max(box[axis].stop for box in column) + beside
    named_both = next((label for label, lungs in main.items() if len(lungs) == 2), None)
    return {label: keep[label][part.numbers] for label, part in parts.items()}, named_both


def _lungs_of(parts: dict[Label, _Parts], grid: Grid) -> dict[Label, list[int]]:
    """By name, the component that is the lung; two where both lungs have one name, apart from each other.

    That is so where a second component lies abreast of the first, has weight enough, and what has the other name is no
    lung: lighter than the second, and not where it should be, abreast of both and further out.
    """
    main = {label: [part.largest] for label, part in parts.items()}
    for label, part in parts.items():
        first, second = (int(n) for n in np.argsort(-part.weight, kind="stable")[:2])
        if part.weight[second] < TWIN_SHARE * part.weight[first] or not _abreast(part.boxes[first], part.boxes[second]):
            continue
        other = next((theirs for name, theirs in parts.items() if name != label), None)
        if other is None:
            main[label].append(second)
            continue
        n, outwards = other.largest, -1 if label == RIGHT_LUNG else 1
        further_mm = outwards * (other.centroids[n, 0] - part.centroids[[first, second], 0]) * grid.spacing_mm[0]
        abreast = all(_abreast(other.boxes[n], part.boxes[piece]) for piece in (first, second))
        if other.weight[n] < part.weight[second] and not (abreast and further_mm.min() >= SEPARATION_MM):
            main[label].append(second)
    return main


def _abreast(one: tuple[slice, slice, slice], other: tuple[slice, slice, slice]) -> bool:
    """Whether two boxes share half of the smaller one's depth and height at least."""
    for a, b in zip(one[1:], other[1:], strict=True):
        shared = min(a.stop, b.stop) - max(a.start, b.start)
        if 2 * shared < min(a.stop - a.start, b.stop - b.start):
            return False
    return True


def _is_odd(boxes: list[tuple[slice, slice, slice]]) -> bool:
    """Whether blobs are not one lung, or two that lie beside each other."""
    return len(boxes) > 2 or (len(boxes) == 2 and max(y.start for _, y, _ in boxes) >= min(y.stop for _, y, _ in boxes))


def components(mask: Mask, connectivity: int = 26) -> npt.NDArray[np.unsignedinteger]:
    """(X, Y, Z) the number of each voxel's component, 0 outside the mask."""
    numbers: npt.NDArray[np.unsignedinteger]
    if min(mask.shape) > 1:
        numbers = cc3d.connected_components(mask, connectivity=connectivity)
    else:  # of a single layer cc3d expects fewer components than there may be, and fails
        numbers = cc3d.connected_components(np.pad(mask, 1), connectivity=connectivity)[1:-1, 1:-1, 1:-1]
    return numbers


def _parts(mask: Mask, weight: Field) -> _Parts:
    numbers = components(mask)
    where = cc3d.statistics(numbers)
    # As they lie in memory: in any other order each would be copied.
    mass = np.bincount(numbers.ravel(order="F"), weights=weight.ravel(order="F")).astype(np.float64)
    mass[0] = 0
    return _Parts(numbers, mass, where["bounding_boxes"], where["centroids"], np.ones_like(mass))


def _share(part: _Parts, where: Mask) -> npt.NDArray[np.float64]:
    """By number, the share of a component's voxels that lie somewhere."""
    there, all_of_it = (np.bincount(n, minlength=len(part.mass)) for n in (part.numbers[where], part.numbers.ravel()))
    share: npt.NDArray[np.float64] = there / np.maximum(all_of_it, 1)
    return share


def _not_outside(part: _Parts, outside: Mask, grid: Grid, scan_grid: Grid) -> _Parts:
    """Components but those outside the body; one at the back or front of the field of view may be a lung, cut."""
    ny = grid.shape[1]
    low, high = (float(scan_grid.index(grid.world((0, y, 0)))[1]) for y in (-1, ny))
    back, front = low < 0, high > scan_grid.shape[1] - 1
    depths = [box[1] if box else slice(0, 0) for box in part.boxes]
    cut = np.array([(back and y.start == 0) or (front and y.stop == ny) for y in depths])
    return replace(part, mass=np.where((_share(part, outside) > OUTSIDE_SHARE) & ~cut, 0, part.mass))


def _of_body(scan: Scan, grid: Grid) -> tuple[Mask, Mask]:
    """(X, Y, Z) on a grid: what has a wall of the body before and behind it, and what lies outside the body.

    Of the rest nobody can tell, in a narrow field of view or a thin child. A wall is a centimetre of tissue in all
    directions across the body, however far away; a couch's shell is thinner.
    """
    hu, sampled = sampled_hu(scan)
    nx, ny, nz = sampled.shape
    layers = grid.covering(Box.whole(grid.shape), sampled).clipped((nx, ny, nz))
    seen = Box((0, 0, layers.start[2]), (nx, ny, layers.stop[2]))
    tissue, seen_grid = hu[seen.slices] > TISSUE_HU, sampled.cropped(seen)
    from_behind, from_before = between_walls(tissue)
    behind_mm = tissue.cumsum(axis=1) * seen_grid.spacing_mm[1]
    before_mm = behind_mm[:, -1:] - behind_mm
    under, over = (before_mm >= BODY_MM) & ~from_behind, (behind_mm >= BODY_MM) & ~from_before
    rows = np.ix_(*(row.clip(0, n - 1) for row, n in zip(seen_grid.nearest(grid), seen.shape, strict=True)))
    return (from_behind & from_before)[rows], (under | over)[rows]


def between_walls(tissue: Mask) -> tuple[Mask, Mask]:
    """(X, Y, Z) of a sampled canonical scan: what has a wall of the body behind it, and what has one before it."""
    air = torch.from_numpy(~tissue).float()
    wall = functional.max_pool3d(air[None], (3, 3, 1), stride=1, padding=(1, 1, 0))[0].numpy() == 0
    behind, before = np.logical_or.accumulate(wall, axis=1), np.logical_or.accumulate(wall[:, ::-1], axis=1)
    return behind, before[:, ::-1]


def _agree_with_geometry(masks: dict[Label, Mask], grid: Grid) -> dict[Label, Mask]:
    """Two sides must lie beside each other, the right one on the right; pieces of one lung are put together.

    Lungs that lie one in front of the other, in a patient on the side whose header does not say so, keep the names
    that the network gave them.
    """
    across, forward, _ = centroid(masks[RIGHT_LUNG], grid) - centroid(masks[LEFT_LUNG], grid)
    if across >= SEPARATION_MM or abs(forward) > max(2 * SEPARATION_MM, abs(across)):
        return masks
    larger = max(masks, key=lambda label: int(masks[label].sum()))
    return _split_if_both(larger, masks[RIGHT_LUNG] | masks[LEFT_LUNG], grid)


def _split_if_both(label: Label, mask: Mask, grid: Grid) -> dict[Label, Mask]:
    """One blob: a single lung, or both under one name if a valley lies between its two centroids."""
    area = mask.sum(axis=(1, 2))
    left, right = (round(c) for c in _two_centroids(area))
    valley = left + int(np.argmin(area[left : right + 1]))
    peaks = area[: valley + 1].max(), area[valley:].max()
    if area[valley] > VALLEY * min(peaks) or (right - left) * grid.spacing_mm[0] < SEPARATION_MM:
        return {label: mask}
    on_right = np.arange(len(area))[:, None, None] > valley
    return {RIGHT_LUNG: mask & on_right, LEFT_LUNG: mask & ~on_right}


def _two_centroids(area: npt.NDArray[np.int64]) -> tuple[float, float]:
    """The two centroids that split a profile best (Lloyd's algorithm in one dimension)."""
    index = np.arange(len(area))
    cumulative = np.cumsum(area) / area.sum()
    low, high = (float(np.searchsorted(cumulative, share)) for share in (0.1, 0.9))
    for _ in range(20):
        lower = index <= (low + high) / 2
        if not (area[lower].any() and area[~lower].any()):
            break
        low, high = (float(np.average(index[part], weights=area[part])) for part in (lower, ~lower))
    return low, high


def regrow(lung: LungBox, cut: list[tuple[int, bool]], growth_mm: float = GROWTH_MM) -> LungBox:
    """The box grown at the faces where the lung was cut.

    Args:
        lung: the box.
        cut: faces as (axis, at the far end).
        growth_mm: how far each goes out, clipped to the scan.
    """
    start, stop = list(lung.box.start), list(lung.box.stop)
    for axis, far in cut:
        step = int(np.ceil(growth_mm / lung.grid.spacing_mm[axis]))
        if far:
            stop[axis] += step
        else:
            start[axis] -= step
    return replace(lung, box=Box.of(start, stop).clipped(lung.grid.shape), regrown=lung.regrown + 1)
