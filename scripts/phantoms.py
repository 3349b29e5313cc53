"""Synthetic scans with their labels, and what scripts that measure on many of them share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cascadeseg import Segmenter
from cascadeseg.atomic import replace_text
from cascadeseg.formats import Scan
from cascadeseg.synthesis import Patient, Phantom, render

Volume = tuple[float, float, float]
ASKEW = 45.0
"""Degrees about the long axis, from which on a patient lies otherwise than the header says."""


def rendered(patient: Patient, spacing_mm: Volume) -> tuple[Scan, Phantom]:
    """A patient's scan as a file would hold it, and what it shows."""
    phantom = render(patient, patient.field_of_view(spacing_mm))
    return Scan(phantom.voxels(), phantom.grid, source=f"synthetic {patient.seed}"), phantom


def lies_otherwise(patient: Patient) -> bool:
    """Whether the header of a patient's scan is wrong about how the body lies, or the patient is a mirror image."""
    return patient.mirror or abs(patient.torso.rotation[2]) > ASKEW


def dice(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], value: int) -> float:
    """Dice of one label; 1 where neither has it, as in `LungScores`."""
    x, y = a == value, b == value
    total = int(np.count_nonzero(x)) + int(np.count_nonzero(y))
    return 2 * int(np.count_nonzero(x & y)) / total if total else 1.0


def made(jobs: dict[Path, tuple[Any, ...]], make: Callable[..., Any], model: str | None, workers: int) -> list[Any]:
    """The content of a JSON file for each job, all in order: those missing are made by ``make(segmenter, *job)``.

    Interrupt it whenever you like: what is there is not made again.
    """
    missing = {path: job for path, job in jobs.items() if not path.exists()}
    for path in missing:
        path.parent.mkdir(parents=True, exist_ok=True)
    for done, path in enumerate(_run(missing, make, model, workers), 1):
        print(f"{done} of {len(missing)}: {path.name}", flush=True)
    return [json.loads(path.read_text(encoding="utf-8")) for path in jobs]


def _run(
    jobs: dict[Path, tuple[Any, ...]], make: Callable[..., Any], model: str | None, workers: int
) -> Iterable[Path]:
    if workers == 1:
        _begin(make, model)
        yield from map(_one, jobs.items())
        return
    with ProcessPoolExecutor(workers, initializer=_begin, initargs=(make, model)) as pool:
        yield from pool.map(_one, jobs.items())


_STATE: dict[str, Any] = {}


def _begin(make: Callable[..., Any], model: str | None) -> None:
    torch.set_num_threads(1)
    _STATE["segmenter"], _STATE["make"] = Segmenter(model, device="cpu"), make


def _one(job: tuple[Path, tuple[Any, ...]]) -> Path:
    path, arguments = job
    replace_text(path, json.dumps(_STATE["make"](_STATE["segmenter"], *arguments), indent=1) + "\n")
    return path
