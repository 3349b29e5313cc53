"""The report of a segmentation: everything a program or a later reader needs to know, as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascadeseg._version import __version__
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid

if TYPE_CHECKING:
    from cascadeseg.cascade.pipeline import LungResult, Segmentation

SCHEMA = 1
"""Raised when a key changes its meaning or goes away; new keys may come at any time."""
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
        "lungs": [_lung(lung) for lung in result.lungs],
        "seconds": {step: round(value, 3) for step, value in seconds.items()},
        "total_seconds": round(sum(seconds.values()), 3),
        "peak_memory_mb": round(result.peak_memory_mb, 1),
        "warnings": list(result.warnings),
        "outputs": {kind: str(path) for kind, path in outputs.items()},
    }
    return json.dumps(content, indent=2) + "\n"


def orientation(grid: Grid) -> str:
    """Where each array axis grows to: ``RAS`` is right, anterior, superior; ``LPS`` is left, posterior, superior."""
    order, flips = grid.canonical_axes()
    letters = ["LPI"[world] if flips[world] else "RAS"[world] for world in range(3)]
    return "".join(letters[order.index(axis)] for axis in range(3))


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
        "orientation": orientation(scan.grid),
        "affine_ras_mm": scan.grid.affine.round(6).tolist(),
    }


def _lung(lung: LungResult) -> dict[str, Any]:
    return {
        "name": lung.label.name,
        "value": lung.label.value,
        "side": lung.label.side,
        "snomed_ct": lung.label.snomed,
        "volume_ml": round(lung.volume_ml, 2),
        "height_mm": round(lung.height_mm, 1),
        "mean_hu": None if lung.mean_hu is None else round(lung.mean_hu, 1),
        "complete": lung.complete and lung.volume_ml > 0,
        "touches": list(lung.touches),
        "regrown": lung.regrown,
        "box_ras_mm": None if lung.box_mm is None else [list(map(float, corner)) for corner in lung.box_mm],
        "verdict": lung.verdict,
        "quality": _rounded(lung.quality),
        "reasons": list(lung.reasons),
        "signs": {name: _rounded(value) for name, value in asdict(lung.signs).items()} if lung.signs else None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
