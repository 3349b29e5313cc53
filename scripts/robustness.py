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
from calibrate import GOOD_DICE
from disease import PAINTED, Case, Labels, array_of, changed, image_of, lungs_of, nothing_of
from phantoms import made
from validate import reference_of, scans_of

from cascadeseg import Segmenter, read_scan
from cascadeseg.evaluation.metrics import evaluate
from cascadeseg.formats import Scan, read_labels
from cascadeseg.geometry import Box, canonical_view
from cascadeseg.labels import IGNORE, LUNGS
from cascadeseg.network import load_model

AIR_HU = -1024
SMALLEST_ML = 50.0
"""What of a lung must be left in the scan for it to count."""
BESIDE_MM = 6.0
"""From the lungs to where a scan without lung begins: no reference is right to the slice."""
THINNEST_MM = 30.0
"""Of a scan without lung."""

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


def reversed_along(scan: Scan, labels: Labels, axes: tuple[int, ...]) -> Case:
    """Axes that run the other way without the header saying so; the lungs have the names that it gives them."""
    other = labels.copy()
    if 0 in axes:
        for lung, opposite in zip(LUNGS, reversed(LUNGS), strict=True):
            other[labels == lung.value] = opposite.value
    return changed(scan, np.flip(scan.hu(), axes)), np.flip(other, axes)


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


WRONG_HEADERS: dict[str, Callable[[Scan, Labels], Case]] = {
    "mirrored (or situs inversus)": partial(reversed_along, axes=(0,)),
    "upside down": partial(reversed_along, axes=(2,)),
    "turned by 180 degrees (LPS for RAS)": partial(reversed_along, axes=(0, 1)),
}
"""All of their masks are to be reviewed: the header says otherwise."""
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
    **WRONG_HEADERS,
    "only what lies above the lungs": partial(without_lungs, above=True),
    "only what lies below the lungs": partial(without_lungs, above=False),
    **PAINTED,
}


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
        {"side": lung.side, "dice": scores.dice, "nsd_2mm": scores.nsd_2mm}
        | {"verdict": told.verdict, "quality": told.quality}
        for lung, scores, told in zip(
            LUNGS, evaluate(result.labels, reference, case.grid.spacing_mm), result.lungs, strict=True
        )
        if np.count_nonzero(reference == lung.value) * case.grid.voxel_volume_ml >= SMALLEST_ML
    ]
    return record | {"lungs": lungs, "seconds": sum(result.seconds.values())}


def slug(change: str) -> str:
    """A change's name as part of a file's."""
    return re.sub("[^a-z0-9]+", "-", change.lower()).strip("-")


def reviewed(lungs: list[dict[str, Any]]) -> str:
    """Two cells: of the masks with a Dice below `GOOD_DICE` those for review, and of the others."""
    groups = [[lung for lung in lungs if (lung["dice"] < GOOD_DICE) == bad] for bad in (True, False)]
    counts = [(sum(lung["verdict"] == "review" for lung in group), len(group)) for group in groups]
    return " | ".join(f"{told} of {count}" if count else "" for told, count in counts)


def table(records: list[dict[str, Any]]) -> str:
    """A row a change."""
    lines = [
        f"| | lungs | mean Dice | worst | mean NSD 2 mm | for review: Dice < {GOOD_DICE} | others |",
        "|---" * 7 + "|",
    ]
    for change in CHANGES:
        lungs = [lung for record in records if record["change"] == change for lung in record["lungs"]]
        if lungs:
            values = [lung["dice"] for lung in lungs]
            cells = [f"{mean(values):.3f}", f"{min(values):.3f}", f"{mean(lung['nsd_2mm'] for lung in lungs):.3f}"]
            lines.append(f"| {change} | {len(lungs)} | {' | '.join(cells)} | {reviewed(lungs)} |")
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
