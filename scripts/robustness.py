"""How masks of real scans fare when one thing at a time is changed about the scan, from resolution to a mirrored body.

    python scripts/robustness.py SCANS OUT [--model DIR] [--workers 2] [--changes NAME ...]

SCANS holds NAME.nii.gz and NAME_ref.nii.gz (1 right lung, 2 left lung, 255 ignored), as for validate.py; the reference
undergoes what the scan does. What lies above and below the lungs is segmented by itself, too: there is no lung in it.
The severity curves (severity.py) know the truth to the voxel, but their patients are synthetic; here the patients are
real, and what is changed about them is simple. Disease (dense lung, emphysema, fluid, free air) is painted into their
lungs, so that its truth is known, too. OUT gets one JSON file a scan and change in a folder named by the model's hash
(one that is there is not made again, so it can be interrupted), and table.md. The scans are for validation only.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import SimpleITK
from phantoms import made
from validate import reference_of, scans_of

from cascadeseg import Segmenter, read_scan
from cascadeseg.evaluation.metrics import evaluate
from cascadeseg.formats import Scan, read_labels
from cascadeseg.formats.doctor import audit
from cascadeseg.geometry import Box, Grid, canonical_view
from cascadeseg.labels import IGNORE, LUNGS
from cascadeseg.network import load_model

AIR_HU = -1024
SMALLEST_ML = 50.0
"""What of a lung must be left in the scan for it to count."""
DENSE_HU, FLUID_HU, DESTROYED_HU, FREE_AIR_HU, GRAIN_HU = 40.0, 10.0, -985.0, -1000.0, 15.0
"""Of disease painted into real lungs; the grain is the standard deviation of its noise."""
BRIGHTER, BLOOD_HU, VESSELS = 0.25, 50.0, 0.998
"""How much of what contrast medium adds to the HU of blood, as the lungs' widest vessels hold it, dense lung gets."""
BRONCHUS_HU = 60.0
"""Darker than lung by this: the air of bronchi."""
HALF_AIR_HU, SOME_AIR_HU = -600.0, -200.0
"""Below which a voxel is lung, and no vessel; and holds some of the lung's air, at its border."""
EDGE = 0.15
"""How soft the edges of disease are, in standard deviations of the noise that it follows."""
BESIDE_MM = 6.0
"""From the lungs to where a scan without lung begins: no reference is right to the slice."""
THINNEST_MM = 30.0
"""Of a scan without lung."""

Labels = np.ndarray[Any, Any]
Case = tuple[Scan, Labels]


# ------------------------------------------------------------------------------------ what is changed


def averaged(scan: Scan, labels: Labels, mm: tuple[float, float, float]) -> Case:
    """Voxels of about this size, each the mean of those in it, as a coarser reconstruction gives."""
    count = [max(1, round(wanted / own)) for wanted, own in zip(mm, scan.grid.spacing_mm, strict=True)]
    kept = Box.whole([n // k * k for n, k in zip(scan.grid.shape, count, strict=True)])
    blocks = [m for n, k in zip(kept.shape, count, strict=True) for m in (n // k, k)]

    def means(array: Labels) -> Labels:
        mean_of: Labels = array[kept.slices].reshape(blocks).mean(axis=(1, 3, 5), dtype=np.float32)
        return mean_of

    spacing = [own * k for own, k in zip(scan.grid.spacing_mm, count, strict=True)]
    coarse = np.zeros([n // k for n, k in zip(kept.shape, count, strict=True)], np.uint8)
    for value in (*(lung.value for lung in LUNGS), IGNORE):
        coarse[means(labels == value) > 0.5] = value
    return changed(scan, means(scan.hu()), spacing), coarse


def noisy(scan: Scan, labels: Labels, sd_hu: float) -> Case:
    """White noise in every voxel."""
    noise = np.random.default_rng(0).normal(0, sd_hu, scan.grid.shape)
    return changed(scan, scan.hu() + noise), labels


def blurred(scan: Scan, labels: Labels, sd_mm: float) -> Case:
    """As by a soft kernel."""
    smooth = SimpleITK.SmoothingRecursiveGaussian(image_of(scan, scan.hu()), sd_mm)
    return changed(scan, array_of(smooth)), labels


def rescaled(scan: Scan, labels: Labels, slope: float = 1, offset_hu: float = 0) -> Case:
    """A scanner that is out of calibration, or a header that lost its rescale."""
    return changed(scan, slope * scan.hu() + offset_hu), labels


def clipped(scan: Scan, labels: Labels, low_hu: float, high_hu: float) -> Case:
    """Saved as a window shows it."""
    return changed(scan, scan.hu().clip(low_hu, high_hu)), labels


def pictured(scan: Scan, labels: Labels, low_hu: float, high_hu: float) -> Case:
    """Saved as the 8-bit greys that a window shows."""
    return changed(scan, (scan.hu().clip(low_hu, high_hu) - low_hu) / (high_hu - low_hu) * 255), labels


def cut(scan: Scan, labels: Labels, axis: int, low: float, high: float) -> Case:
    """A field of view that lacks a share of the lungs' extent at the low or the high end of an axis; none without."""
    place = np.flatnonzero(lungs_of(labels).any(tuple({0, 1, 2} - {axis})))
    if not place.size:
        return nothing_of(scan, labels)
    first, extent = int(place[0]), int(place[-1] - place[0]) + 1
    start, stop = [0, 0, 0], list(scan.grid.shape)
    if low:
        start[axis] = first + round(low * extent)
    if high:
        stop[axis] = first + round((1 - high) * extent)
    box = Box.of(start, stop)
    return changed(scan, scan.hu(box)), labels[box.slices]


def scaled(scan: Scan, labels: Labels, factor: float) -> Case:
    """A body of another size."""
    return changed(scan, scan.hu(), [factor * mm for mm in scan.grid.spacing_mm]), labels


def turned(scan: Scan, labels: Labels, axis: int, degrees: float) -> Case:
    """A patient who lies askew, rotated about the middle of the scan."""
    image = image_of(scan, scan.hu())
    turn = SimpleITK.Euler3DTransform()
    turn.SetCenter(image.TransformContinuousIndexToPhysicalPoint([(n - 1) / 2 for n in scan.grid.shape]))
    turn.SetRotation(*(float(np.deg2rad(degrees)) if a == axis else 0.0 for a in range(3)))
    hu = SimpleITK.Resample(image, image, turn, SimpleITK.sitkLinear, AIR_HU)
    names = SimpleITK.Resample(image_of(scan, labels), image, turn, SimpleITK.sitkNearestNeighbor, 0)
    return changed(scan, array_of(hu)), array_of(names)


def mirrored(scan: Scan, labels: Labels) -> Case:
    """Situs inversus: the heart and all else on the other side."""
    other = labels.copy()
    for lung, opposite in zip(LUNGS, reversed(LUNGS), strict=True):
        other[labels == lung.value] = opposite.value
    return changed(scan, scan.hu()[::-1]), other[::-1]


def nothing_of(scan: Scan, labels: Labels) -> Case:
    """No voxels: of this scan there is no such case."""
    none = Box.whole((0, 0, 0))
    return changed(scan, scan.hu(none)), labels[none.slices]


def every_other_slice(scan: Scan, labels: Labels) -> Case:
    """Slices left out, the header telling so."""
    x, y, z = scan.grid.spacing_mm
    return changed(scan, scan.hu()[:, :, ::2], [x, y, 2 * z]), labels[:, :, ::2]


def without_lungs(scan: Scan, labels: Labels, above: bool) -> Case:
    """The slices above or below the lungs; none at all where they are thinner than `THINNEST_MM`, or without lungs."""
    place = np.flatnonzero(labels.any((0, 1)))
    if not place.size:
        return nothing_of(scan, labels)
    beside = round(BESIDE_MM / scan.grid.spacing_mm[2])
    x, y, z = scan.grid.shape
    low, high = (int(place[-1]) + 1 + beside, z) if above else (0, int(place[0]) - beside)
    if (high - low) * scan.grid.spacing_mm[2] < THINNEST_MM:
        return nothing_of(scan, labels)
    box = Box((0, 0, low), (x, y, high))
    return changed(scan, scan.hu(box)), labels[box.slices]


CHANGES: dict[str, Callable[[Scan, Labels], Case]] = {
    "as it is": lambda scan, labels: (scan, labels),
    "every other slice": every_other_slice,
    "slices averaged to 5 mm": partial(averaged, mm=(0, 0, 5)),
    "slices averaged to 10 mm": partial(averaged, mm=(0, 0, 10)),
    "voxels averaged to 3 mm": partial(averaged, mm=(3, 3, 3)),
    "noise of 50 HU": partial(noisy, sd_hu=50),
    "noise of 150 HU": partial(noisy, sd_hu=150),
    "blurred, sd 1.5 mm": partial(blurred, sd_mm=1.5),
    "blurred, sd 3 mm": partial(blurred, sd_mm=3),
    "60 HU less": partial(rescaled, offset_hu=-60),
    "60 HU more": partial(rescaled, offset_hu=60),
    "300 HU less": partial(rescaled, offset_hu=-300),
    "400 HU more": partial(rescaled, offset_hu=400),
    "half of the HU": partial(rescaled, slope=0.5),
    "twice the HU": partial(rescaled, slope=2),
    "clipped to -1350..150 HU (lung window)": partial(clipped, low_hu=-1350, high_hu=150),
    "clipped to -600..200 HU (air like lung)": partial(clipped, low_hu=-600, high_hu=200),
    "clipped to -160..240 HU (soft tissue window)": partial(clipped, low_hu=-160, high_hu=240),
    "256 greys of -1250..250 HU (lung window)": partial(pictured, low_hu=-1250, high_hu=250),
    "without the lungs' upper third": partial(cut, axis=2, low=0, high=1 / 3),
    "without their lower third": partial(cut, axis=2, low=1 / 3, high=0),
    "without their upper two thirds": partial(cut, axis=2, low=0, high=2 / 3),
    "without their front third": partial(cut, axis=1, low=0, high=1 / 3),
    "without their left half": partial(cut, axis=0, low=1 / 2, high=0),
    "without their right half": partial(cut, axis=0, low=0, high=1 / 2),
    "0.7 times the size": partial(scaled, factor=0.7),
    "1.3 times the size": partial(scaled, factor=1.3),
    "turned by 20 degrees about the long axis": partial(turned, axis=2, degrees=20),
    "turned by 20 degrees sideways": partial(turned, axis=1, degrees=20),
    "mirrored (situs inversus)": mirrored,
    "only what lies above the lungs": partial(without_lungs, above=True),
    "only what lies below the lungs": partial(without_lungs, above=False),
}


# ------------------------------------------------------------------------------------ disease, painted


def painted(scan: Scan, labels: Labels, disease: Callable[..., Case], share: float) -> Case:
    """Disease in a share of the lungs; of a scan without them there is no such case."""
    return disease(scan, labels, share) if lungs_of(labels).any() else nothing_of(scan, labels)


def consolidated(scan: Scan, labels: Labels, share: float) -> Case:
    """Lung without air, in patches, most of it low and at the back.

    Vessels stand out of it, bronchi keep their air, and contrast medium brightens it.
    """
    hu, lung = scan.hu(), lungs_of(labels)
    y, z = (along(lung, axis) for axis in (1, 2))
    weight = where_most(patches(scan, 14) - 1.5 * (y[:, None] + z), lung, share) * open_to(lung, hu)
    smooth = array_of(SimpleITK.SmoothingRecursiveGaussian(image_of(scan, hu), 1.0))
    weight *= smooth > np.median(hu[lung]) - BRONCHUS_HU
    dense_hu = DENSE_HU + BRIGHTER * max(0.0, float(np.quantile(hu[lung], VESSELS)) - BLOOD_HU)
    return changed(scan, hu + weight * (np.maximum(grained(scan, dense_hu), hu) - hu)), labels


def emphysematous(scan: Scan, labels: Labels, share: float) -> Case:
    """Lung destroyed, in spots, most of it at the top; what is not air there, as vessels, stays."""
    hu, lung = scan.hu(), lungs_of(labels)
    weight = where_most(patches(scan, 4) + along(lung, 2), lung, share) * (lung & (hu < HALF_AIR_HU))
    return changed(scan, hu + weight * (grained(scan, DESTROYED_HU) - hu)), labels


def effused(scan: Scan, labels: Labels, share: float) -> Case:
    """Fluid in place of the lowest part of each lung of a patient who lies on the back: no lung any more."""
    fluid = beyond_a_level(scan, labels, share, up=-1.0)
    filled = np.where(fluid, grained(scan, FLUID_HU), scan.hu())
    return changed(scan, filled), np.where(fluid & lungs_of(labels), 0, labels)


def free_air(scan: Scan, labels: Labels, share: float) -> Case:
    """Air in place of the highest part of each lung, as in a pneumothorax: no lung any more."""
    air = beyond_a_level(scan, labels, share, up=1.0) & lungs_of(labels)
    return changed(scan, np.where(air, grained(scan, FREE_AIR_HU), scan.hu())), np.where(air, 0, labels)


def along(lung: Labels, axis: int) -> Labels:
    """By index: how far it lies along the lungs' extent, from 0 to 1."""
    place = np.flatnonzero(lung.any(tuple({0, 1, 2} - {axis})))
    part: Labels = (np.arange(lung.shape[axis]) - place[0]) / max(1, place[-1] - place[0])
    return part.clip(0, 1)


def where_most(field: Labels, lung: Labels, share: float) -> Labels:
    """From 0 to 1, with a soft edge: where a field is so high that a share of the lungs is."""
    above = (field - np.quantile(field[lung], 1 - share)) / EDGE
    risen: Labels = 1 / (1 + np.exp(-above.clip(-50, 50)))
    return risen


def beyond_a_level(scan: Scan, labels: Labels, share: float, up: float) -> Labels:
    """What lies above (``up`` = -1: below) an uneven level that cuts a share off each lung, border voxels with it."""
    height = up * along(lungs_of(labels), 1)[:, None] + 0.03 * patches(scan, 20)
    beyond = np.zeros(labels.shape, bool)
    for lung in LUNGS:
        if (mine := labels == lung.value).any():
            beyond |= open_to(mine, scan.hu()) & (height > np.quantile(height[mine], 1 - share))
    return beyond


def patches(scan: Scan, sd_mm: float) -> Labels:
    """Smooth noise of standard deviation 1."""
    noise = np.random.default_rng(1).normal(size=scan.grid.shape).astype(np.float32)
    smooth = array_of(SimpleITK.SmoothingRecursiveGaussian(image_of(scan, noise), sd_mm))
    centred: Labels = (smooth - smooth.mean()) / smooth.std()
    return centred


def grained(scan: Scan, hu: float) -> Labels:
    """A tissue, with noise."""
    grain: Labels = np.random.default_rng(2).normal(hu, GRAIN_HU, scan.grid.shape).astype(np.float32)
    return grain


def open_to(lung: Labels, hu: Labels) -> Labels:
    """Lung, and the voxels at its border that hold some of its air."""
    image = SimpleITK.GetImageFromArray(lung.astype(np.uint8))
    wider: Labels = SimpleITK.GetArrayFromImage(SimpleITK.BinaryDilate(image, [1, 1, 1])) > 0
    return lung | (wider & (hu < SOME_AIR_HU))


PAINTED: dict[str, Callable[[Scan, Labels], Case]] = {
    "20 % of the lungs consolidated": partial(painted, disease=consolidated, share=0.2),
    "40 % of the lungs consolidated": partial(painted, disease=consolidated, share=0.4),
    "60 % of the lungs consolidated": partial(painted, disease=consolidated, share=0.6),
    "fluid in 15 % of each lung": partial(painted, disease=effused, share=0.15),
    "fluid in 30 % of each lung": partial(painted, disease=effused, share=0.3),
    "free air in 15 % of each lung": partial(painted, disease=free_air, share=0.15),
    "emphysema in a third of the lungs": partial(painted, disease=emphysematous, share=1 / 3),
}
CHANGES |= PAINTED


# ------------------------------------------------------------------------------------ scans and arrays


def changed(scan: Scan, hu: Labels, spacing_mm: Any = None) -> Scan:
    """The scan with other voxels, whole numbers as scanners store them, and what the doctor says of those."""
    voxels = np.ascontiguousarray(hu.round().clip(-32768, 32767).astype(np.int16))
    grid = Grid.axis_aligned(voxels.shape, scan.grid.spacing_mm if spacing_mm is None else spacing_mm)
    return audit(Scan(voxels, grid, source=scan.source))


def lungs_of(labels: Labels) -> Labels:
    return np.isin(labels, [lung.value for lung in LUNGS])


def image_of(scan: Scan, array: Labels) -> Any:
    """(X, Y, Z) as ITK's image."""
    image = SimpleITK.GetImageFromArray(array.transpose(2, 1, 0))
    image.SetSpacing([float(mm) for mm in scan.grid.spacing_mm])
    return image


def array_of(image: Any) -> Labels:
    """ITK's image as (X, Y, Z)."""
    array: Labels = SimpleITK.GetArrayFromImage(image).transpose(2, 1, 0)
    return array


# ------------------------------------------------------------------------------------ measuring and showing


def scored(segmenter: Segmenter, path: str, change: str) -> dict[str, Any]:
    """One scan with one change."""
    scan = read_scan(path).canonical()
    labels, grid = read_labels(reference_of(Path(path)))
    case, reference = CHANGES[change](changed(scan, scan.hu()), np.asarray(canonical_view(labels, grid)))
    record = {"scan": Path(path).name, "change": change}
    if 0 in case.grid.shape:
        return record | {"lungs": []}
    result = segmenter.segment(case)
    if not lungs_of(reference).any():
        return record | {
            "lungs": [],
            "taken_ml": sum(lung.volume_ml for lung in result.lungs),
            "verdict": result.verdict,
        }
    lungs = [
        {"side": lung.side, "dice": scores.dice, "nsd_2mm": scores.nsd_2mm, "verdict": told.verdict}
        for lung, scores, told in zip(
            LUNGS, evaluate(result.labels, reference, case.grid.spacing_mm), result.lungs, strict=True
        )
        if np.count_nonzero(reference == lung.value) * case.grid.voxel_volume_ml >= SMALLEST_ML
    ]
    return record | {"lungs": lungs, "seconds": sum(result.seconds.values())}


def slug(change: str) -> str:
    """A change's name as part of a file's."""
    return re.sub("[^a-z0-9]+", "-", change.lower()).strip("-")


def table(records: list[dict[str, Any]]) -> str:
    """A row a change."""
    lines = ["| | lungs | mean Dice | worst | mean NSD 2 mm | for review |", "|---" * 6 + "|"]
    for change in CHANGES:
        lungs = [lung for record in records if record["change"] == change for lung in record["lungs"]]
        if lungs:
            values = [lung["dice"] for lung in lungs]
            review = sum(lung["verdict"] == "review" for lung in lungs)
            cells = [f"{mean(values):.3f}", f"{min(values):.3f}", f"{mean(lung['nsd_2mm'] for lung in lungs):.3f}"]
            lines.append(f"| {change} | {len(lungs)} | {' | '.join(cells)} | {review} |")
    lines += ["", "| without lung | scans | taken for lung, ml, mean | most | for review |", "|---" * 5 + "|"]
    for change in CHANGES:
        empty = [record for record in records if record["change"] == change and "taken_ml" in record]
        if empty:
            taken = [record["taken_ml"] for record in empty]
            review = sum(record["verdict"] == "review" for record in empty)
            lines.append(f"| {change} | {len(empty)} | {mean(taken):.0f} | {max(taken):.0f} | {review} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scans", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="a model folder; default: the shipped one")
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--workers", type=int, default=1, help="processes; default 1")
    options = parser.parse_args()
    if not any(reference_of(path).exists() for path in scans_of(options.scans)):
        parser.error(f"{options.scans}: no NAME.nii.gz with a NAME_ref.nii.gz in it")
    record = options.output / load_model(options.model).sha256[:12]
    jobs = {
        record / f"{path.name.removesuffix('.nii.gz')}-{slug(change)}.json": (str(path), change)
        for path in scans_of(options.scans)
        if reference_of(path).exists()
        for change in options.changes
    }
    records = made(jobs, scored, options.model, options.workers)
    (options.output / "table.md").write_text(table(records), encoding="utf-8")
    print(table(records))


if __name__ == "__main__":
    main()
