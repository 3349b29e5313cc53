"""The report of a segmentation as JSON, everything a program or a later reader needs to know, and a table of many."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascadeseg._version import __version__
from cascadeseg.cascade.density import Density, Histogram
from cascadeseg.errors import OutputError
from cascadeseg.formats.scan import DicomSeries, Scan
from cascadeseg.labels import LUNGS

if TYPE_CHECKING:
    from cascadeseg.cascade.orientation import Orientation
    from cascadeseg.cascade.pipeline import LungResult, Segmentation

SCHEMA = 1
"""Raised when a key changes its meaning or goes away; new keys may come at any time."""
CONTENT = ("volume_ml", "mean_hu", *(field.name for field in fields(Density)))
"""What the table tells of the inside of a lung, and of both."""
Row = dict[str, str | float | None]
"""A scan's values by column; what is unknown is missing or None."""
COLUMNS = (
    "scan", "mask", "verdict", "quality",
    *(f"both_{value}" for value in CONTENT),
    *(f"{lung.side}_{value}" for lung in LUNGS for value in (*CONTENT, "quality", "touches")),
    "reasons", "warnings", "seconds", "peak_memory_mb", "error",
)  # fmt: skip
"""Of the table of several scans."""
LIBRARIES = ("torch", "numpy", "nibabel", "SimpleITK", "pydicom")


def report_json(result: Segmentation, outputs: Mapping[str, Path], seconds: Mapping[str, float]) -> str:
    """The report's text.

    Args:
        result: what was found.
        outputs: the files that were written, by kind (``labels``, ``preview``, ``report``).
        seconds: by step, in order, with what came before and after the segmentation.
    """
    content = {
        "schema": SCHEMA,
        "versions": _versions(),
        "scan": _scan(result.scan),
        "model": dict(result.model),
        "device": result.device,
        "precision": result.precision,
        "verdict": result.verdict,
        "quality": _rounded(result.quality),
        "orientation": _orientation(result.orientation),
        "both_lungs": _content(result.histogram),
        "lungs": [_lung(lung) for lung in result.lungs],
        "seconds": {step: round(value, 3) for step, value in seconds.items()},
        "total_seconds": round(sum(seconds.values()), 3),
        "peak_memory_mb": _memory(result),
        "warnings": list(result.warnings),
        "outputs": {kind: str(path) for kind, path in outputs.items()},
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def result_row(scan: Path, mask: Path, result: Segmentation, seconds: Mapping[str, float]) -> Row:
    """A segmented scan in the table: the report in short, several reasons or warnings in one cell."""
    row: Row = {
        "scan": str(scan),
        "mask": str(mask),
        "verdict": result.verdict,
        "quality": _rounded(result.quality),
        "reasons": "; ".join(f"{lung.label.title}: {reason}" for lung in result.lungs for reason in lung.reasons),
        "warnings": "; ".join(result.warnings),
        "seconds": round(sum(seconds.values()), 3),
        "peak_memory_mb": _memory(result),
    }
    inside = {"both": result.histogram} | {lung.label.side: lung.histogram for lung in result.lungs}
    for side, histogram in inside.items():
        values = _content(histogram)
        values |= values.pop("density") or {}
        row |= {f"{side}_{name}": value for name, value in values.items()}
    for lung in result.lungs:
        row |= {
            f"{lung.label.side}_quality": _rounded(lung.quality),
            f"{lung.label.side}_touches": " ".join(lung.touches),
        }
    return row


def failed_row(scan: Path, error: str) -> Row:
    """A scan in the table that could not be segmented."""
    return {"scan": str(scan), "error": error}


def table_csv(rows: Iterable[Row]) -> str:
    """A row a scan."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_table(path: Path) -> list[Row]:
    """The rows of a table that `table_csv` made.

    Raises:
        OutputError: the file is something else.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            rows: list[Row] = [dict(row) for row in table]
            known = {"scan", "mask", "error"} <= set(table.fieldnames or ()) <= set(COLUMNS)  # an older one has fewer
            ours = known and not any(None in (*row, *row.values()) for row in rows)
    except (OSError, ValueError, csv.Error):
        ours = False
    if not ours:
        raise OutputError(path, "not a table that infer wrote", remedy="choose another name")
    return rows


def _versions() -> dict[str, str]:
    versions = {
        "cascadeseg": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:  # one that came by another way than pip; the report goes on without it
            continue
    return versions


def _scan(scan: Scan) -> dict[str, Any]:
    return {
        "path": scan.source,
        "shape": list(scan.grid.shape),
        "spacing_mm": [round(spacing, 6) for spacing in scan.grid.spacing_mm],
        "orientation": scan.grid.orientation,
        "affine_ras_mm": scan.grid.affine.round(6).tolist(),
        "dicom": _dicom(scan.native),
    }


def _dicom(native: object) -> dict[str, Any] | None:
    if not isinstance(native, DicomSeries):
        return None
    return {"study_uid": native.study_uid, "series_uid": native.series_uid, "slices": len(native.files)}


def _lung(lung: LungResult) -> dict[str, Any]:
    return {
        "name": lung.label.name,
        "value": lung.label.value,
        "side": lung.label.side,
        "snomed_ct": lung.label.snomed,
        "height_mm": round(lung.height_mm, 1),
        **_content(lung.histogram),
        "complete": lung.complete,
        "touches": list(lung.touches),
        "regrown": lung.regrown,
        "box_ras_mm": None if lung.box_mm is None else [list(map(float, corner)) for corner in lung.box_mm],
        "verdict": lung.verdict,
        "quality": _rounded(lung.quality),
        "reasons": list(lung.reasons),
        "signs": {name: _rounded(value) for name, value in asdict(lung.signs).items()} if lung.signs else None,
    }


def _orientation(found: Orientation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "header": found.header,
        "body": found.body,
        "likelihood": _rounded(found.likelihood),
        "header_likelihood": _rounded(found.header_likelihood),
        "doubtful": found.doubtful,
    }


def _content(histogram: Histogram | None) -> dict[str, Any]:
    """What is inside a lung, or both."""
    if histogram is None:
        return {"volume_ml": 0.0, "mean_hu": None, "density": None}
    density = histogram.density
    return {
        "volume_ml": round(histogram.volume_ml, 2),
        "mean_hu": round(histogram.mean_hu, 1),
        "density": density and {name: round(value, 2) for name, value in asdict(density).items()},
    }


def _memory(result: Segmentation) -> float | None:
    """MB; None where the system (Windows) does not tell."""
    return round(result.peak_memory_mb, 1) if math.isfinite(result.peak_memory_mb) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
