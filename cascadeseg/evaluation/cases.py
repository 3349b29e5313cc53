"""Masks and references on disk: which belong together, and their scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.errors import ScanError
from cascadeseg.evaluation.metrics import evaluate, evaluate_as_one
from cascadeseg.evaluation.tables import Case
from cascadeseg.formats import LABEL_SUFFIXES, MASK_SUFFIXES, SEGMENTATION_SUFFIX, read_labels, stem_of, suffix_of
from cascadeseg.formats.names import MASK_ENDINGS, SLICER_SUFFIX, is_mask_name, may_be_cut
from cascadeseg.formats.nrrd import segment_names
from cascadeseg.formats.read import is_dicom_file
from cascadeseg.geometry import Box, boxes_on_one_grid, canonical_view, counted
from cascadeseg.labels import BACKGROUND, IGNORE, LUNGS

OUR_ENDING = "_lungs"
MEANING = ", ".join(("0 background", *(f"{lung.value} {lung.title}" for lung in LUNGS)))
"""Of the labels of a mask, for messages."""


def pair(prediction: Path, reference: Path) -> tuple[list[tuple[Path, Path]], list[Path], list[Path]]:
    """Predictions with their references, references without a prediction, and predictions without a reference.

    Args:
        prediction: a mask, or a folder of masks.
        reference: its reference, or a folder of references. Names match without suffix and without what marks a
            mask or a channel (``_lungs``, ``_ref``, ``_0000``, ...). In a folder where some names end as masks do,
            the others are scans; of two masks of one scan, ``_lungs`` is the prediction.

    Raises:
        ScanError: there is nothing there, one is a file and the other a folder, two files of a folder have one
            name, or no names match.
    """
    for path in (prediction, reference):
        if not path.exists():
            raise ScanError(path, "no such file or folder")
    if prediction.is_dir() != reference.is_dir():
        file, folder = (reference, prediction) if prediction.is_dir() else (prediction, reference)
        raise ScanError(file, f"a file, and {folder} a folder", "two files or two folders")
    if not prediction.is_dir():
        return [(prediction, reference)], [], []
    predictions, references = _named(prediction, predicted=True), _named(reference, predicted=False)
    paired = _paired(predictions, references)
    if not paired:
        found = f"none of its names is among those of {prediction}"
        raise ScanError(reference, found, "masks of the same names")
    missing = [path for name, path in references.items() if name not in paired]
    others = [path for name, path in predictions.items() if name not in paired.values()]
    return [(predictions[paired[name]], references[name]) for name in references if name in paired], missing, others


def _paired(predictions: Collection[str], references: Collection[str]) -> dict[str, str]:
    """By reference the prediction of its name; a channel's number is left out only where it is in the way."""
    found: dict[str, str] = {}
    for of_prediction, of_reference in ((str, str), (_scan_name, str), (str, _scan_name), (_scan_name, _scan_name)):
        left = {of_prediction(name): name for name in predictions if name not in found.values()}
        for name in references:
            if name not in found and of_reference(name) in left:
                found[name] = left.pop(of_reference(name))
    return found


def _scan_name(name: str) -> str:
    """A case's name without the number of nnU-Net's first channel."""
    return name.removesuffix("_0000")


def score(prediction: Path, reference: Path) -> Case:
    """The scores of one mask on disk.

    3D Slicer saves a segmentation cut to what its segments fill, and a DICOM segmentation ends with its frames; what
    was cut off is background.

    Raises:
        ScanError: one of them cannot be read, has values that are no lung labels, or they lie on different grids.
    """
    (predicted, expected), spacing_mm = _on_one_grid(prediction, reference)
    values = [BACKGROUND, *(lung.value for lung in LUNGS)]
    for path, labels, known in ((prediction, predicted, values), (reference, expected, [*values, IGNORE])):
        others = sorted(set(counted(labels)) - set(known))
        if others:
            raise ScanError(path, f"label {others[0]}", MEANING)
        _refuse_other_sides(path)
    masks = predicted, expected, spacing_mm
    return Case(case_name(reference), evaluate(*masks), evaluate_as_one(*masks))


def _on_one_grid(prediction: Path, reference: Path) -> tuple[list[npt.NDArray[Any]], tuple[float, float, float]]:
    """Both masks in canonical order, so that the same mask stored with other axes is the same mask; and their spacing.

    Raises:
        ScanError: one of them cannot be read, or they lie on different grids.
    """
    read = [read_labels(path) for path in (prediction, reference)]
    masks = [canonical_view(labels, grid) for labels, grid in read]
    (_, grid), (_, of_reference) = read
    if boxes := boxes_on_one_grid(grid, of_reference, may_be_cut=(_may_be_cut(prediction), _may_be_cut(reference))):
        *own, around = boxes
        return [_grown(mask, box, around) for mask, box in zip(masks, own, strict=True)], grid.canonical().spacing_mm
    same_shape = masks[0].shape == masks[1].shape
    found = "another place" if same_shape else f"{' x '.join(map(str, masks[0].shape))} voxels"
    raise ScanError(prediction, f"{found}, not on the grid of {reference}", "masks of one scan")


def _may_be_cut(path: Path) -> bool:
    """Whether a mask may lie on a part of its scan's grid."""
    return may_be_cut(path) or is_dicom_file(path)


def _grown(mask: npt.NDArray[Any], box: Box, around: Box) -> npt.NDArray[Any]:
    """A mask of a box, with background up to the faces of the one around it."""
    if box == around:
        return mask
    grown = np.full(around.shape, BACKGROUND, mask.dtype)
    grown[box.shifted([-start for start in around.start]).slices] = mask
    return grown


def _refuse_other_sides(path: Path) -> None:
    """Raises ScanError for a Slicer segmentation that calls a lung's label by the other side: others number freely."""
    names = segment_names(path) if suffix_of(path) == SLICER_SUFFIX else {}
    for lung, other in zip(LUNGS, reversed(LUNGS), strict=True):
        name = names.get(lung.value, "")
        if other.side in name.lower():  # "left_lung", "LeftLung"
            raise ScanError(path, f"label {lung.value} is its segment '{name}'", MEANING)


def case_name(path: Path) -> str:
    """What a mask is a mask of: its name without suffix and mask endings."""
    name = stem_of(path)
    for ending in MASK_ENDINGS:
        name = name[: -len(ending)] if name.lower().endswith(ending) else name
    return name


def without_reference(predictions: Sequence[Path], references: Path) -> list[str]:
    """A line for each mask that is not scored: there is no reference, or it is taken for a scan."""
    files = _may_be_masks(references) if predictions else []
    masks = [path for path in files if is_mask_name(path)]
    scans = {_scan_name(case_name(path)): path.name for path in files if masks and path not in masks}
    lines = []
    for path in predictions:
        scan = scans.get(_scan_name(case_name(path)))
        why = f", where {scan} counts as a scan, as {masks[0].name} is called a mask" if scan else ""
        lines.append(f"{path}: not scored: no reference of this name in {references}{why}")
    return lines


def _named(folder: Path, *, predicted: bool) -> dict[str, Path]:
    """The masks of a folder by the name of their case; of two that differ in format alone no DICOM segmentation."""
    files = _may_be_masks(folder)
    masks = [path for path in files if is_mask_name(path)] or files
    if not masks:
        raise ScanError(folder, "no mask in this folder", f"files that end in {' '.join(LABEL_SUFFIXES)}")
    by_role: dict[tuple[str, bool], Path] = {}
    stems = {stem_of(path) for path in masks if suffix_of(path) != SEGMENTATION_SUFFIX}
    for path in masks:
        if suffix_of(path) == SEGMENTATION_SUFFIX and stem_of(path) in stems:
            continue
        key = case_name(path), stem_of(path).lower().endswith(OUR_ENDING)
        other = by_role.setdefault(key, path)
        if other != path:
            raise ScanError(path, f"the same case as {other.name} by its name", "one mask for each case")
    cases = dict.fromkeys(name for name, _ in by_role)
    return {name: by_role.get((name, predicted)) or by_role[name, not predicted] for name in cases}


def _may_be_masks(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and _may_be_mask(path)]


def _may_be_mask(path: Path) -> bool:
    """By its name; a DICOM file may also be a slice of a scan."""
    if suffix_of(path) != SEGMENTATION_SUFFIX:
        return suffix_of(path) in MASK_SUFFIXES
    from cascadeseg.formats.dicom_seg import is_segmentation

    return path.is_file() and is_segmentation(path)
