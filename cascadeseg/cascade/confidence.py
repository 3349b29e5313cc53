"""How far each lung's mask can be trusted, from what the cascade has at hand when it is done.

Everything is looked up on a coarse lattice in the lung's own box (at most `LATTICE_POINTS` points), so that it costs
milliseconds and no memory to speak of. Each sign of trouble grows with doubt; a logistic model of the Dice itself (as
of a share, doi 10.1002/(SICI)1099-1255(199611)11:6<619::AID-JAE418>3.0.CO;2-1), none of whose coefficients is negative,
turns them into the Dice to expect. The coefficients belong to the weights whose errors they were fitted on
(``scripts/calibrate.py``), so they lie with them, in the model's notes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cascadeseg.cascade.crop import LungBox
from cascadeseg.cascade.locate import Coarse
from cascadeseg.cascade.merge import box_on
from cascadeseg.cascade.refine import Refined
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid, Mask
from cascadeseg.labels import LUNGS, RIGHT_LUNG, Label
from cascadeseg.network.model import Model

LATTICE_POINTS = 400_000
NOTE = "confidence"
"""The key of the calibration in a model's notes."""
AERATED_HU = (-950.0, -550.0)
MEAN_HU = (-930.0, 0.0)
"""Of a plausible lung: from severe emphysema to one without air."""
TISSUE_HU = (-120.0, 250.0)
"""Of what plausibly surrounds a lung, in the middle: from fat to muscle beside bone and contrast medium."""
VOLUME_ML = (80.0, 4500.0)
"""Of a plausible lung, from a toddler's that lies wholly in the scan to a giant's."""
FILLED = 0.45
"""Of the box around it, what a whole lung fills at least."""
EDGE_HU = 400.0
"""Half of what HU rise by from aerated lung to soft tissue."""
STEP_MM = 4.0
"""Over which a cross-section is compared with the next."""
TALLER = 1.05
"""How many times as tall as a lung the other one may be."""
ROOM_MM = 60.0
"""A lung is missed where the scan goes on for this long beyond the other one."""
OWN_SIDE = 0.1
"""Of its width, what a single lung has at least on its own side of the middle of the scan."""
RENAMED = "stage 1 took it for the other lung: its side was told from where the two lie"

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Signs:
    """What speaks against a lung's mask: 0 for nothing, more for more.

    Attributes:
        disagreement: 1 - Dice of the mask and stage 1's.
        doubt: share of the mask that stage 2 gives to what is around it, points at the surface, where every mask is
            unsure, left out.
        coarse_doubt: 1 - the Dice that stage 1's own probabilities let one expect.
        others: share of the mask that stage 1's probabilities give to the other lung.
        border: share of the mask's surface that lies on faces of the scan or of the crop.
        sparse: how much less of the box around it the mask fills than a whole lung does.
        abrupt: largest change of its cross-section within 4 mm, as a share of the largest cross-section; the mean of
            what is seen along the dorso-ventral and along the cranio-caudal axis.
        faint: share of its surface to what is no lung where the HU rise by less than `EDGE_HU`.
        missed: aerated tissue in the box that is in neither lung, as a share of the mask, at most 1.
        odd_hu: how far the mean lies outside what lungs have, in units of 100 HU.
        odd_tissue: how far the median around the mask lies outside what tissue has, in units of 100 HU.
        odd_volume: logarithm of the factor by which the volume lies outside what lungs have.
        shorter: logarithm of how many times as tall the other lung is, beyond what is usual; 0 for a single lung.
    """

    disagreement: float
    doubt: float
    coarse_doubt: float
    others: float
    border: float
    sparse: float
    abrupt: float
    faint: float
    missed: float
    odd_hu: float
    odd_tissue: float
    odd_volume: float
    shorter: float = 0.0


NOTABLE: Mapping[str, tuple[float, str]] = {
    "disagreement": (0.15, "the two stages disagree about it"),
    "doubt": (0.02, "stage 2 is unsure about it"),
    "coarse_doubt": (0.15, "stage 1 is unsure about it"),
    "others": (0.02, "right and left were not clear"),
    "border": (0.25, "much of its surface is cut by the border of the scan"),
    "sparse": (0.22, "it has not the shape of a whole lung"),
    "abrupt": (0.6, "it ends abruptly"),
    "faint": (0.6, "much of its surface has no edge to see"),
    "missed": (0.25, "there is aerated tissue near it that is in neither lung"),
    "odd_hu": (0.3, "its mean HU is not that of a lung"),
    "odd_tissue": (0.3, "what surrounds it has not the HU of a body"),
    "odd_volume": (0.1, "its volume is not that of a lung"),
    "shorter": (0.2, "it is much shorter than the other lung"),
}
"""By sign: from where on it is worth telling, and the words for it."""


@dataclass(frozen=True)
class Calibration:
    """The logistic model: ``log_odds - sum of weight * feature`` are the quality's log-odds, see `features`.

    Attributes:
        log_odds: of the quality of a mask without any sign of trouble.
        weights: by sign, none negative; a sign that is not named does not count.
        review_below: masks of a lower quality are to be looked at.
    """

    log_odds: float
    weights: Mapping[str, float]
    review_below: float

    @staticmethod
    def of(model: Model) -> Calibration | None:
        """The calibration in a model's notes; None where there is none, or one of other weights or another form."""
        kept = model.notes.get(NOTE)
        if not isinstance(kept, dict) or kept.get("sha256") != model.sha256 or "log_odds" not in kept:
            return None
        return Calibration(float(kept["log_odds"]), dict(kept["weights"]), float(kept["review_below"]))

    def note(self, sha256: str) -> dict[str, Any]:
        """What `of` reads, for the notes of the model with these weights."""
        return {"sha256": sha256, **asdict(self)}

    def quality(self, signs: Signs) -> float:
        """The Dice to expect of the mask."""
        log_odds = self.log_odds - sum(self.contributions(signs).values())
        return (1 + math.tanh(log_odds / 2)) / 2

    def contributions(self, signs: Signs) -> dict[str, float]:
        """What each sign takes away from the log-odds."""
        found = features(signs)
        return {name: weight * found[name] for name, weight in self.weights.items() if name in found}


def features(signs: Signs) -> dict[str, float]:
    """The signs as the model takes them: square roots, so that little trouble counts, and much no more."""
    return {name: math.sqrt(max(value, 0.0)) for name, value in asdict(signs).items()}


def judged(signs: Signs, calibration: Calibration | None) -> tuple[float | None, tuple[str, ...]]:
    """The quality of a lung's mask, and the reasons to look at it: none for a mask that can be trusted.

    Without a calibration there is no quality, and whatever is worth telling is a reason.
    """
    notable = [words for name, (limit, words) in NOTABLE.items() if getattr(signs, name) > limit]
    if calibration is None:
        return None, tuple(notable)
    quality = calibration.quality(signs)
    if quality >= calibration.review_below:
        return quality, ()
    takes_most = max(calibration.contributions(signs).items(), key=lambda item: item[1])[0]
    return quality, tuple(notable) or (NOTABLE[takes_most][1],)


def signs_of(scan: Scan, labels: Values, lung: Refined, coarse: Coarse) -> Signs | None:
    """Looks for trouble in one lung's mask; None where the mask is empty.

    Args:
        scan: canonical.
        labels: (X, Y, Z) the canonical view of the final label map.
        lung: what stage 2 made of it.
        coarse: stage 1's opinion, its sides settled.
    """
    lattice = lattice_of(lung.lung)
    final = _sampled(labels, scan.grid, lattice, 0)
    mask = final == lung.lung.label.value
    if not mask.any():
        return None
    logits = _sampled(lung.logits, lung.grid, lattice, -20.0).astype(np.float32)
    hu = scan.as_hu(_sampled(scan.voxels, scan.grid, lattice, 0))
    this = LUNGS.index(lung.lung.label)
    mine, other = (
        _sampled(coarse.lungs[side], coarse.grid, lattice, 0.0).astype(np.float32) for side in (this, 1 - this)
    )
    located = (mine >= other) & (mine + other > 0.5)
    volume_ml = _count(mask) * lattice.voxel_volume_ml
    border = _border_share(mask)
    around = hu[_around(mask) & (final == 0)]
    return Signs(
        disagreement=1 - _dice(mask, located),
        doubt=_doubt(mask, 1 / (1 + np.exp(logits.clip(-50, 50)))),
        coarse_doubt=1 - _expected_dice(located, mine),
        others=float(other[mask].mean()),
        border=border,
        sparse=_sparse(mask),
        abrupt=_abrupt(mask, lattice.spacing_mm),
        faint=_faint(hu, final == 0, mask),
        missed=_missed(hu, final, mask),
        odd_hu=_outside(float(hu[mask].mean()), *MEAN_HU) / 100,
        odd_tissue=_outside(float(np.median(around)), *TISSUE_HU) / 100 if len(around) else 0.0,
        odd_volume=_odd_volume(volume_ml, cut=border > 0),
    )


def compared(signs: Signs, height_mm: float, other_mm: float) -> Signs:
    """The signs with how much shorter the mask is than that of the other lung; 0 for one that is not there."""
    if min(height_mm, other_mm) <= 0:
        return signs
    return replace(signs, shorter=max(0.0, math.log(other_mm / (TALLER * height_mm))))


def missing_reason(label: Label, other: Refined | None, scan_grid: Grid) -> tuple[str, ...]:
    """Why a lung that was not found is worth a look: its place is in the scan, or the one that was found lies there.

    Args:
        label: the lung that was not found.
        other: the lung that was; None where none was.
        scan_grid: canonical.
    """
    if other is None:
        return ("no lung was found in this scan",)
    box, spacing_mm = box_on(other, scan_grid), scan_grid.spacing_mm[0]
    to_left, width, to_right = box.start[0], box.shape[0], scan_grid.shape[0] - box.stop[0]
    inner, outer = (to_right, to_left) if label == RIGHT_LUNG else (to_left, to_right)
    on_its_side = (inner + width - outer) / 2
    if on_its_side < OWN_SIDE * width:
        return (f"no {label.title} was found, and the {other.lung.label.title} lies where it should be",)
    if inner * spacing_mm < ROOM_MM:
        return ()
    return (f"no {label.title} was found although its place is in the scan",)


def lattice_of(lung: LungBox) -> Grid:
    """Points of the coarse grid in a lung's box, every one or every second, third, ... along each axis."""
    inner = lung.grid.cropped(lung.box)
    step = max(1, math.ceil((math.prod(inner.shape) / LATTICE_POINTS) ** (1 / 3)))
    shape = tuple(-(-n // step) for n in inner.shape)
    affine = inner.affine.copy()
    affine[:3, :3] *= step
    return Grid((shape[0], shape[1], shape[2]), affine)


def _sampled(array: Tensor | Values, grid: Grid, lattice: Grid, outside: float) -> Values:
    """(lattice) the nearest values of an array whose grid has the lattice's directions."""
    rows = grid.nearest(lattice)
    used = [(row >= 0) & (row < n) for row, n in zip(rows, grid.shape, strict=True)]
    values: Values = np.full(lattice.shape, outside, dtype=np.float32)
    taken = _taken(array, [row[keep] for row, keep in zip(rows, used, strict=True)])
    values[np.ix_(*used)] = taken
    return values


def _taken(array: Tensor | Values, rows: Sequence[npt.NDArray[np.int64]]) -> Values:
    if not isinstance(array, Tensor):
        return array[np.ix_(*rows)]
    if array.device.type == "cpu":  # NumPy takes from all axes at once
        return _taken(array.numpy(), rows)
    for axis, row in enumerate(rows):
        array = array.index_select(axis, torch.from_numpy(row).to(array.device))
    return array.float().cpu().numpy()


def _count(what: Values) -> int:
    return int(np.count_nonzero(what))


def _dice(a: Mask, b: Mask) -> float:
    return 2 * _count(a & b) / max(1, _count(a) + _count(b))


def _doubt(mask: Mask, elsewhere: Values) -> float:
    """How much of the mask, its surface left out, lies elsewhere by these probabilities."""
    return float(elsewhere[mask & ~_grown(~mask)].sum()) / _count(mask)


def _expected_dice(mask: Mask, probability: Values) -> float:
    """The Dice of a mask that its voxels' own probabilities, taken for independent, let one expect."""
    return 2 * float(probability[mask].sum()) / max(1.0, _count(mask) + float(probability.sum()))


def _sparse(mask: Mask) -> float:
    spanned = [np.flatnonzero(_section(mask, axis)) for axis in range(3)]
    return max(0.0, FILLED - _count(mask) / math.prod(int(rows[-1] - rows[0]) + 1 for rows in spanned))


def _abrupt(mask: Mask, spacing_mm: Sequence[float]) -> float:
    changes = []
    for axis in (1, 2):
        apart = max(1, round(STEP_MM / spacing_mm[axis]))
        section = np.pad(_section(mask, axis), apart)
        changes.append(float(np.abs(section[apart:] - section[:-apart]).max() / section.max()))
    return sum(changes) / len(changes)


def _section(mask: Mask, axis: int) -> npt.NDArray[np.int64]:
    """Voxels of the mask in each slice across an axis."""
    counts: npt.NDArray[np.int64] = mask.sum(axis=tuple(a for a in range(3) if a != axis), dtype=np.int64)
    return counts


def _faint(hu: Values, outside: Mask, mask: Mask) -> float:
    surface = mask & _grown(outside)
    rise = _means(hu, outside) - _means(hu, mask)
    return _count(surface & (rise < EDGE_HU)) / max(1, _count(surface))


def _means(hu: Values, where: Mask) -> Values:
    """(lattice) of the 3 x 3 x 3 points around each, those that are meant."""
    chosen = torch.from_numpy(np.stack([hu * where, where.astype(np.float32)]))
    total, count = F.avg_pool3d(F.pad(chosen, [1] * 6), 3, stride=1).numpy()
    means: Values = total / np.maximum(count, 1e-6)
    return means


def _missed(hu: Values, final: Values, mask: Mask) -> float:
    low, high = AERATED_HU
    aerated = (hu > low) & (hu < high) & (final == 0)
    return min(1.0, _count(aerated) / _count(mask))


def _around(mask: Mask) -> Mask:
    """The second layer of points around a mask: the first is half lung."""
    once = _grown(mask)
    return _grown(once) & ~once


def _grown(mask: Mask) -> Mask:
    grown = mask.copy()
    for axis in range(3):
        target, source = np.moveaxis(grown, axis, 0), np.moveaxis(mask, axis, 0)
        target[1:] |= source[:-1]
        target[:-1] |= source[1:]
    return grown


def _border_share(mask: Mask) -> float:
    """Of all faces between inside and outside, those on the lattice's own faces: there the lung may go on."""
    inner = sum(_count(np.diff(mask.view(np.int8), axis=axis)) for axis in range(3))
    outer = sum(_count(mask.take([end], axis=axis)) for axis in range(3) for end in (0, -1))
    return outer / max(1, inner + outer)


def _odd_volume(volume_ml: float, *, cut: bool) -> float:
    """A lung that is cut may be as small as it likes."""
    low, high = VOLUME_ML
    return _outside(math.log(volume_ml), -math.inf if cut else math.log(low), math.log(high))


def _outside(value: float, low: float, high: float) -> float:
    return max(low - value, value - high, 0.0)
