"""Scores of a lung mask against a reference, per lung and of both as one mask.

Surface distances follow Nikolov et al. (surface Dice; doi 10.2196/26151): a mask's surface is cut into
elements, one at every corner between voxels, each with the area that the corner's eight voxels and their
spacing give it; the distances go from element to nearest element, and every mean, share and percentile is
weighted by area. So anisotropic voxels count as large as they are.

Both surfaces lie on one grid of corners, so one distance map each gives every distance: ITK's exact one
(Maurer's), in a time and memory that do not depend on how far apart the surfaces are. The areas are MONAI's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.geometry import Mask, bounding_box
from cascadeseg.labels import IGNORE, LUNGS, Label

ROUNDING_MM = 1e-4
"""Of ITK's distances, which are float32: what lies just at a tolerance is within it."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """A mask of a prediction against that of the reference.

    Where both are empty, the overlaps are 1 and the distances NaN (there is nothing to measure, and the answer
    is right); where one alone is, the overlaps are 0 and the distances infinite.

    Attributes:
        dice: overlap of the volumes, 0-1.
        nsd_1mm: normalised surface Dice, 0-1: the share of both surfaces within 1 mm of the other.
        nsd_2mm: the same within 2 mm.
        hd95_mm: 95th percentile of the surface distances, the larger of both directions.
        assd_mm: average symmetric surface distance: the mean over both surfaces together.
        volume_ml: of the prediction.
        reference_ml: of the reference.
    """

    dice: float
    nsd_1mm: float
    nsd_2mm: float
    hd95_mm: float
    assd_mm: float
    volume_ml: float
    reference_ml: float

    @property
    def volume_error_ml(self) -> float:
        """Prediction minus reference."""
        return self.volume_ml - self.reference_ml

    @property
    def volume_error_percent(self) -> float:
        """Of the reference's volume; NaN where both are empty, infinite where the reference alone is."""
        if self.reference_ml > 0:
            return 100.0 * self.volume_error_ml / self.reference_ml
        return math.inf if self.volume_ml > 0 else math.nan

    @property
    def volume_absolute_error_ml(self) -> float:
        """How far off, in either direction."""
        return abs(self.volume_error_ml)

    @property
    def volume_absolute_error_percent(self) -> float:
        """The same of the reference's volume; NaN and infinite as `volume_error_percent` is."""
        return abs(self.volume_error_percent)


@dataclass(frozen=True)
class LungScores(Scores):
    """One lung of a prediction against the reference.

    Attributes:
        label: which lung.
    """

    label: Label


@dataclass(frozen=True)
class Surface:
    """A mask's surface elements.

    Attributes:
        elements: (X + 1, Y + 1, Z + 1), true at the corners between voxels that the surface runs through.
        areas_mm2: (N,) how large each of them is, in the order of ``np.nonzero(elements)``.
    """

    elements: Mask
    areas_mm2: Floats


def evaluate(
    prediction: npt.NDArray[Any], reference: npt.NDArray[Any], spacing_mm: Sequence[float]
) -> tuple[LungScores, ...]:
    """The scores of each lung, in the order of `cascadeseg.labels.LUNGS`.

    Args:
        prediction: (X, Y, Z) label map.
        reference: (X, Y, Z) label map on the same grid. Its `IGNORE` voxels are background in both.
        spacing_mm: voxel size along the array's axes.

    Raises:
        ValueError: the shapes differ.
    """
    masks = ((label, _masks(prediction, reference, [label])) for label in LUNGS)
    return tuple(LungScores(**vars(_scores(*pair, spacing_mm)), label=label) for label, pair in masks)


def evaluate_as_one(prediction: npt.NDArray[Any], reference: npt.NDArray[Any], spacing_mm: Sequence[float]) -> Scores:
    """The scores of both lungs as one mask, to which sides mean nothing; arguments and errors as of `evaluate`."""
    return _scores(*_masks(prediction, reference, LUNGS), spacing_mm)


def _masks(prediction: npt.NDArray[Any], reference: npt.NDArray[Any], labels: Sequence[Label]) -> tuple[Mask, Mask]:
    """Where a prediction and its reference have one of some labels; nowhere where the reference is `IGNORE`."""
    if prediction.shape != reference.shape:
        raise ValueError(f"prediction has shape {prediction.shape}, the reference {reference.shape}")
    predicted, expected = (
        reduce(np.logical_or, (mask == label.value for label in labels)) for mask in (prediction, reference)
    )
    return predicted & (reference != IGNORE), expected


def _scores(prediction: Mask, reference: Mask, spacing_mm: Sequence[float]) -> Scores:
    box = bounding_box(prediction | reference)
    voxel_ml = math.prod(float(s) for s in spacing_mm) / 1000.0
    if box is None:
        return Scores(1.0, 1.0, 1.0, math.nan, math.nan, 0.0, 0.0)
    predicted, expected = prediction[box.slices], reference[box.slices]
    volumes = voxel_ml * int(predicted.sum()), voxel_ml * int(expected.sum())
    if not all(volumes):
        return Scores(0.0, 0.0, 0.0, math.inf, math.inf, *volumes)
    common = voxel_ml * int((predicted & expected).sum())
    nsd_1mm, nsd_2mm, hd95_mm, assd_mm = _surface_scores(predicted, expected, spacing_mm)
    return Scores(2 * common / sum(volumes), nsd_1mm, nsd_2mm, hd95_mm, assd_mm, *volumes)


def surface(mask: Mask, spacing_mm: Sequence[float]) -> Surface:
    """The surface elements of a mask; outside of the array is background."""
    areas, weights = _element_areas(tuple(float(s) for s in spacing_mm))
    padded = np.pad(mask, 1).view(np.uint8)
    # The corner between eight voxels is known by a byte, one bit for each of them.
    code = np.zeros([n - 1 for n in padded.shape], np.uint8)
    for corner in np.ndindex(2, 2, 2):
        part = tuple(slice(c, c + n) for c, n in zip(corner, code.shape, strict=True))
        code |= padded[part] * weights[corner]
    elements = (code != 0) & (code != 255)
    return Surface(elements, areas[code[elements]])


def _element_areas(spacing_mm: tuple[float, ...]) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """(256,) area in mm2 by code, and (2, 2, 2) the bit of each of the eight voxels in that code."""
    from monai.metrics.utils import get_code_to_measure_table

    areas, weights = get_code_to_measure_table(spacing_mm)
    return areas.numpy().astype(np.float64), weights[0, 0].numpy().astype(np.uint8)


def _surface_scores(
    prediction: Mask, reference: Mask, spacing_mm: Sequence[float]
) -> tuple[float, float, float, float]:
    """NSD at 1 mm, NSD at 2 mm, HD95 and ASSD of two masks, neither empty."""
    a, b = surface(prediction, spacing_mm), surface(reference, spacing_mm)
    a_to_b = _distance_to(b, spacing_mm)[a.elements]
    b_to_a = _distance_to(a, spacing_mm)[b.elements]
    distances = np.concatenate([a_to_b, b_to_a])
    areas = np.concatenate([a.areas_mm2, b.areas_mm2])
    total = float(areas.sum())

    def share_within(tolerance_mm: float) -> float:
        return float(areas[distances <= tolerance_mm + ROUNDING_MM].sum()) / total

    hd95_mm = max(_percentile(a_to_b, a.areas_mm2, 95), _percentile(b_to_a, b.areas_mm2, 95))
    return share_within(1.0), share_within(2.0), hd95_mm, float(distances @ areas) / total


def _distance_to(surface: Surface, spacing_mm: Sequence[float]) -> npt.NDArray[np.float32]:
    """(X + 1, Y + 1, Z + 1): mm from every corner to the nearest element of the surface."""
    import SimpleITK

    elements = SimpleITK.GetImageFromArray(surface.elements.view(np.uint8))
    elements.SetSpacing([float(s) for s in reversed(spacing_mm)])  # ITK counts an array's axes from the last
    distance = SimpleITK.SignedMaurerDistanceMap(elements, squaredDistance=False, useImageSpacing=True)
    # Inside a thick part of the set of elements the signed distance is negative; an element is at distance 0.
    unsigned: npt.NDArray[np.float32] = np.maximum(SimpleITK.GetArrayFromImage(distance), np.float32(0))
    return unsigned


def _percentile(distances: npt.NDArray[Any], areas: Floats, percent: float) -> float:
    """The smallest distance that this share of the area does not exceed."""
    order = np.argsort(distances)
    covered = np.cumsum(areas[order])
    at = int(np.searchsorted(covered, covered[-1] * percent / 100))
    return float(distances[order[min(at, len(order) - 1)]])
