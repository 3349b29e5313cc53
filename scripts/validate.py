"""Scores a model on scans with reference masks: the figures of the model card and the README come from here.

    python scripts/validate.py SCANS OUT [--model DIR] [--device cpu]

SCANS holds NAME.nii.gz and NAME_ref.nii.gz (1 right lung, 2 left lung, 255 ignored); a scan without a reference is
segmented and its volumes are listed. OUT gets masks, previews, scores.json and scores.md, and errors.md: what kind of
tissue the masks hold, or leave out, further than 2 mm from the reference's surface, where the surfaces lie that are
further than that from the other's, and each lung's density in the mask and in the reference. The scans are for
validation only: nothing is ever trained on them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import SimpleITK

from cascadeseg import Segmenter, write_labels
from cascadeseg.cascade.density import histogram
from cascadeseg.errors import ScanError
from cascadeseg.evaluation.metrics import LungScores, evaluate
from cascadeseg.evaluation.preview import preview_png
from cascadeseg.formats import read_labels
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import SAME_GRID_MM, Box, bounding_box, canonical_view
from cascadeseg.labels import IGNORE, LUNGS

TISSUES = {"gas": -500.0, "gas and tissue": -130.0, "fat": -50.0, "soft tissue": 130.0, "denser": np.inf}
"""The highest HU of each, as the median of 3 x 3 x 3 voxels."""
FAR_MM = 2.0
BOTH = "mask", "reference"
COLUMNS = {"dice": "Dice", "nsd_1mm": "NSD 1 mm", "nsd_2mm": "NSD 2 mm", "hd95_mm": "HD95 mm"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scans", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if not scans_of(options.scans):
        parser.error(f"{options.scans}: no NAME.nii.gz in it")
    print(validated(options.model, options.scans, options.output, options.device))


def validated(model: str | Path | None, scans: Path, output: Path, device: str = "auto") -> str:
    """Scores a model on a folder of scans; returns the table."""
    output.mkdir(parents=True, exist_ok=True)
    segmenter = Segmenter(model, device=device)
    cases = [score(segmenter, path, output) for path in scans_of(scans)]
    (output / "scores.json").write_text(json.dumps(defined(cases), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (output / "errors.md").write_text(errors_as_markdown(cases), encoding="utf-8")
    table = as_markdown(cases)
    (output / "scores.md").write_text(table, encoding="utf-8")
    return table


def scans_of(folder: Path) -> list[Path]:
    """The scans of a folder, without their references."""
    return sorted(path for path in folder.glob("*.nii.gz") if not path.name.endswith("_ref.nii.gz"))


def reference_of(path: Path) -> Path:
    """Where a scan's reference lies, if it has one."""
    return path.with_name(path.name.replace(".nii.gz", "_ref.nii.gz"))


def score(segmenter: Segmenter, path: Path, output: Path) -> dict[str, Any]:
    """Segments one scan, writes its mask and picture, and scores it where there is a reference."""
    name = path.name.removesuffix(".nii.gz")
    result = segmenter.segment(path)
    write_labels(result.labels, output / f"{name}_lungs.nii.gz", result.scan)
    (output / f"{name}.png").write_bytes(preview_png(result.scan, result.labels, name))
    case: dict[str, Any] = {"name": name, "warnings": result.warnings, "seconds": sum(result.seconds.values())}
    case["volumes_ml"] = [lung.volume_ml for lung in result.lungs]
    case["verdicts"] = [lung.verdict for lung in result.lungs]
    case["qualities"] = [lung.quality for lung in result.lungs]
    reference = reference_of(path)
    if reference.exists():
        labels, grid = read_labels(reference)
        if not grid.matches(result.scan.grid, SAME_GRID_MM):
            raise ScanError(reference, "another grid than its scan's", "that of the scan, voxel for voxel")
        case["lungs"] = [plain(lung) for lung in evaluate(result.labels, labels, grid.spacing_mm)]
        case["errors_ml"] = errors_ml(result.scan, result.labels, labels)
        case["far_surface_percent"] = far_surfaces(result.scan, result.labels, labels)
        case["density"] = densities(result.scan, result.labels, labels)
    return case


def errors_ml(scan: Scan, labels: np.ndarray, reference: np.ndarray) -> dict[str, dict[str, float]]:
    """By tissue: what a mask, of either lung, holds and what it leaves out further than `FAR_MM` from the reference."""
    median = SimpleITK.GetArrayFromImage(SimpleITK.Median(SimpleITK.GetImageFromArray(scan.hu()), [1, 1, 1]))
    kind = np.searchsorted(list(TISSUES.values()), median)
    given, wanted = of_lungs(labels), of_lungs(reference)
    far = (np.abs(distance_mm(wanted, scan.grid.spacing_mm)) > FAR_MM) & (reference != IGNORE)
    errors = {}
    for name, wrong in (("held", given & ~wanted & far), ("left out", wanted & ~given & far)):
        counts = np.bincount(kind[wrong], minlength=len(TISSUES))
        errors[name] = {tissue: float(n * scan.grid.voxel_volume_ml) for tissue, n in zip(TISSUES, counts, strict=True)}
    return errors


def far_surfaces(scan: Scan, labels: np.ndarray, reference: np.ndarray) -> dict[str, dict[str, float]]:
    """What part of both surfaces' voxels, in per cent, is further than `FAR_MM` from the other surface, by place.

    Voxels are counted and not areas, so that the sum is near what the NSD at 2 mm lacks, and not equal to it.
    """
    surfaces = {"mask": surface_of(of_lungs(labels)), "reference": surface_of(of_lungs(reference))}
    counted = reference != IGNORE
    count = max(1, sum(np.count_nonzero(surface & counted) for surface in surfaces.values()))
    where = places(canonical_view(of_lungs(reference), scan.grid))
    shares = {}
    for name, other in (("mask", "reference"), ("reference", "mask")):
        away = np.abs(distance_mm(surfaces[other], scan.grid.spacing_mm)) > FAR_MM
        far = surfaces[name] & counted & away
        far = canonical_view(far, scan.grid)
        shares[name] = {place: float(100 * np.count_nonzero(far & here) / count) for place, here in where.items()}
    return shares


def densities(scan: Scan, labels: np.ndarray, reference: np.ndarray) -> dict[str, dict[str, float]]:
    """Of each lung that both have, in the mask and in the reference, without what counts for neither side."""
    found: dict[str, dict[str, float]] = {}
    canonical = scan.canonical()
    for lung in LUNGS:
        masks = [(of == lung.value) & (reference != IGNORE) for of in (labels, reference)]
        if not all(mask.any() for mask in masks):
            continue
        for name, mask in zip(BOTH, masks, strict=True):
            whole = Box.whole(canonical.grid.shape)
            density = histogram(canonical, canonical_view(mask, scan.grid).astype(bool), whole).density
            found |= {f"{lung.title}, {name}": asdict(density)} if density else {}
    return found


def places(lungs: np.ndarray) -> dict[str, np.ndarray]:
    """Parts of a canonical volume, by where the lungs lie in it: lowest third, around the hila, and what is left.

    Where there is no lung, all is elsewhere.
    """
    box = bounding_box(lungs)
    if box is None:
        nowhere = np.zeros(lungs.shape, bool)
        return {"base": nowhere, "hila": nowhere, "elsewhere": ~nowhere}
    x, y, z = np.ogrid[tuple(slice(0, n) for n in lungs.shape)]
    across, front, up = (
        (at - low) / max(1, high - 1 - low) for at, low, high in zip((x, y, z), box.start, box.stop, strict=True)
    )
    base = np.broadcast_to(up < 0.3, lungs.shape)
    hila = ~base & (up < 0.7) & (np.abs(across - 0.5) < 0.2) & (front > 0.2) & (front < 0.75)
    return {"base": base, "hila": hila, "elsewhere": ~base & ~hila}


def of_lungs(labels: np.ndarray) -> np.ndarray:
    return np.isin(labels, [label.value for label in LUNGS])


def surface_of(mask: np.ndarray) -> np.ndarray:
    """The voxels of a mask that touch what is outside it."""
    contour = SimpleITK.BinaryContour(SimpleITK.GetImageFromArray(mask.astype(np.uint8)))
    return np.asarray(SimpleITK.GetArrayFromImage(contour)) > 0


def distance_mm(mask: np.ndarray, spacing_mm: Sequence[float]) -> np.ndarray:
    """How far each voxel is from the surface of a mask, below 0 inside it."""
    image = SimpleITK.GetImageFromArray(mask.astype(np.uint8))
    image.SetSpacing([float(mm) for mm in reversed(spacing_mm)])  # ITK counts an array's axes from the last
    distance: np.ndarray = SimpleITK.GetArrayFromImage(SimpleITK.SignedMaurerDistanceMap(image, False, False, True))
    return distance


def errors_as_markdown(cases: list[dict[str, Any]]) -> str:
    """A row a scan and direction: ml by tissue, shares of the surfaces by place, and densities."""
    lines = table_of("errors_ml", f"ml beyond {FAR_MM:g} mm", cases)
    lines += ["", *table_of("far_surface_percent", f"% of both surfaces, further than {FAR_MM:g} mm apart", cases)]
    lines += ["", *table_of("density", "density", cases), *differences(cases)]
    return "\n".join(lines) + "\n"


def differences(cases: list[dict[str, Any]]) -> list[str]:
    """Two rows: how far densities in masks are from those in references."""
    rows = [case["density"] for case in cases if "density" in case]
    pairs = [
        [of[f"{lung.title}, {name}"] for name in BOTH] for of in rows for lung in LUNGS if f"{lung.title}, mask" in of
    ]
    if not pairs:
        return []
    apart = {key: [abs(mask[key] - reference[key]) for mask, reference in pairs] for key in pairs[0][0]}
    summaries: dict[str, Callable[[list[float]], float]] = {"mean": mean, "largest": max}
    return [
        f"| **all** | {name} difference | {' | '.join(f'{summary(values):.1f}' for values in apart.values())} |"
        for name, summary in summaries.items()
    ]


def table_of(key: str, title: str, cases: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for case in cases:
        for name, values in case.get(key, {}).items():
            if not lines:
                lines = [f"| scan | {title} | {' | '.join(values)} |", "|---" * (len(values) + 2) + "|"]
            lines.append(f"| {case['name']} | {name} | {' | '.join(f'{value:.1f}' for value in values.values())} |")
    return lines


def plain(scores: LungScores) -> dict[str, float]:
    """One lung's scores as numbers, the volume error in per cent of the reference among them."""
    values = {key: value for key, value in asdict(scores).items() if isinstance(value, int | float)}
    return values | {"volume_error_percent": scores.volume_error_percent}


def defined(value: Any) -> Any:
    """What JSON can hold: what is undefined or infinite, as distances to a lung that is not there, is null."""
    if isinstance(value, dict):
        return {key: defined(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [defined(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_markdown(cases: list[dict[str, Any]]) -> str:
    """A row a scan, right / left, and mean and worst of all lungs, of what is defined (see `LungScores`)."""
    lines = [f"| scan | {' | '.join(COLUMNS.values())} | volume error % | verdict |", "|---" * (len(COLUMNS) + 3) + "|"]
    every = [lung for case in cases for lung in case.get("lungs", [])]
    for case in cases:
        if "lungs" in case:
            cells = [" / ".join(shown(key, lung[key]) for lung in case["lungs"]) for key in COLUMNS]
            error = " / ".join(f"{lung['volume_error_percent']:+.1f}" for lung in case["lungs"])
            lines.append(f"| {case['name']} | {' | '.join(cells)} | {error} | {' / '.join(case['verdicts'])} |")
        else:
            volumes = ", ".join(
                f"{label.title} {ml:.0f} ml" for label, ml in zip(LUNGS, case["volumes_ml"], strict=True)
            )
            blank = " |" * len(COLUMNS)
            lines.append(f"| {case['name']} | no reference: {volumes} |{blank} {' / '.join(case['verdicts'])} |")
    for title, summary in (("**mean**", np.mean), ("**worst**", None)) if every else ():
        cells = []
        for key in COLUMNS:
            worst = max if key == "hd95_mm" else min
            cells.append(shown(key, float((summary or worst)(known(key, every)))))
        errors = [abs(error) for error in known("volume_error_percent", every)]
        lines.append(f"| {title} | {' | '.join(cells)} | {(summary or max)(errors):.1f} (absolute) | |")
    return "\n".join(lines) + "\n"


def known(key: str, lungs: list[dict[str, float]]) -> list[float]:
    """One score of the lungs that have it; of none a NaN."""
    return [lung[key] for lung in lungs if not math.isnan(lung[key])] or [math.nan]


def shown(key: str, value: float) -> str:
    """Millimetres with one decimal, shares with three."""
    return f"{value:.1f}" if key.endswith("_mm") else f"{value:.3f}"


if __name__ == "__main__":
    main()
