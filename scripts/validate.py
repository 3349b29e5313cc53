"""Scores a model on scans with reference masks: the figures of the model card and the README come from here.

    python scripts/validate.py SCANS OUT [--model DIR] [--device cpu]

SCANS holds NAME.nii.gz and NAME_ref.nii.gz (1 right lung, 2 left lung, 255 ignored); a scan without a reference is
segmented and its volumes are listed. OUT gets masks, previews, scores.json and scores.md, and errors.md: what kind of
tissue the masks hold, or leave out, further than 2 mm from the reference's surface. The scans are for validation only:
nothing is ever trained on them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK

from cascadeseg import Segmenter, write_labels
from cascadeseg.evaluation.metrics import LungScores, evaluate
from cascadeseg.evaluation.preview import preview_png
from cascadeseg.formats import read_labels
from cascadeseg.formats.scan import Scan
from cascadeseg.labels import IGNORE, LUNGS

TISSUES = {"gas": -500.0, "gas and tissue": -130.0, "fat": -50.0, "soft tissue": 130.0, "denser": np.inf}
"""The highest HU of each, as the median of 3 x 3 x 3 voxels."""
FAR_MM = 2.0
COLUMNS = {"dice": "Dice", "nsd_1mm": "NSD 1 mm", "nsd_2mm": "NSD 2 mm", "hd95_mm": "HD95 mm"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scans", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    print(validated(options.model, options.scans, options.output, options.device))


def validated(model: str | Path | None, scans: Path, output: Path, device: str = "auto") -> str:
    """Scores a model on a folder of scans; returns the table."""
    output.mkdir(parents=True, exist_ok=True)
    segmenter = Segmenter(model, device=device)
    cases = [score(segmenter, path, output) for path in scans_of(scans)]
    (output / "scores.json").write_text(json.dumps(cases, indent=2) + "\n")
    (output / "errors.md").write_text(errors_as_markdown(cases))
    table = as_markdown(cases)
    (output / "scores.md").write_text(table)
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
        case["lungs"] = [plain(lung) for lung in evaluate(result.labels, labels, grid.spacing_mm)]
        case["errors_ml"] = errors_ml(result.scan, result.labels, labels)
    return case


def errors_ml(scan: Scan, labels: np.ndarray, reference: np.ndarray) -> dict[str, dict[str, float]]:
    """By tissue: what a mask, of either lung, holds and what it leaves out further than `FAR_MM` from the reference."""
    median = SimpleITK.GetArrayFromImage(SimpleITK.Median(SimpleITK.GetImageFromArray(scan.hu()), [1, 1, 1]))
    kind = np.searchsorted(list(TISSUES.values()), median)
    lungs = [label.value for label in LUNGS]
    given, wanted = np.isin(labels, lungs), np.isin(reference, lungs)
    surface = SimpleITK.GetImageFromArray(wanted.astype(np.uint8))
    surface.SetSpacing([float(mm) for mm in reversed(scan.grid.spacing_mm)])  # ITK counts an array's axes from the last
    distance = SimpleITK.GetArrayFromImage(SimpleITK.SignedMaurerDistanceMap(surface, False, False, True))
    far = (np.abs(distance) > FAR_MM) & (reference != IGNORE)
    errors = {}
    for name, wrong in (("held", given & ~wanted & far), ("left out", wanted & ~given & far)):
        counts = np.bincount(kind[wrong], minlength=len(TISSUES))
        errors[name] = {tissue: float(n * scan.grid.voxel_volume_ml) for tissue, n in zip(TISSUES, counts, strict=True)}
    return errors


def errors_as_markdown(cases: list[dict[str, Any]]) -> str:
    """A row a scan and direction, ml by tissue."""
    lines = [f"| scan | beyond {FAR_MM:g} mm | {' | '.join(TISSUES)} |", "|---" * (len(TISSUES) + 2) + "|"]
    for case in cases:
        for name, by_tissue in case.get("errors_ml", {}).items():
            lines.append(f"| {case['name']} | {name} | {' | '.join(f'{by_tissue[t]:.1f}' for t in TISSUES)} |")
    return "\n".join(lines) + "\n"


def plain(scores: LungScores) -> dict[str, float]:
    """One lung's scores as numbers, the volume error in per cent of the reference among them."""
    values = {key: value for key, value in asdict(scores).items() if isinstance(value, int | float)}
    return values | {"volume_error_percent": 100 * (scores.volume_ml / scores.reference_ml - 1)}


def as_markdown(cases: list[dict[str, Any]]) -> str:
    """A row a scan, right / left, and mean and worst of all lungs."""
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
            values = [lung[key] for lung in every]
            worst = max if key == "hd95_mm" else min
            cells.append(shown(key, float((summary or worst)(values))))
        errors = [abs(lung["volume_error_percent"]) for lung in every]
        lines.append(f"| {title} | {' | '.join(cells)} | {(summary or max)(errors):.1f} (absolute) | |")
    return "\n".join(lines) + "\n"


def shown(key: str, value: float) -> str:
    """Millimetres with one decimal, shares with three."""
    return f"{value:.1f}" if key.endswith("_mm") else f"{value:.3f}"


if __name__ == "__main__":
    main()
