"""Everything that is wrong with a data set, told at once and before anything starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.errors import CascadesegError, ConfigError, ScanError
from cascadeseg.formats import read_labels, read_scan
from cascadeseg.geometry import SAME_GRID_MM, Grid, centroid, counted
from cascadeseg.labels import IGNORE, LEFT_LUNG, RIGHT_LUNG
from cascadeseg.training.listing import Entry, Listing
from cascadeseg.training.prefetch import WAIT_S

SMALLEST_LUNG_ML = 1.0
READERS = 4
"""Threads that read, at most, unless the recipe says how many: each holds a scan or a label map, and a disk is one."""


@dataclass(frozen=True)
class Inspected:
    """A case that can be trained on.

    Attributes:
        entry: which.
        sides: the data set's label numbers to ours, as pairs.
        digest: of its voxels, its labels, where both lie, and what the labels mean.
        warnings: what was odd about its scan.
    """

    entry: Entry
    sides: tuple[tuple[int, int], ...]
    digest: str
    warnings: tuple[str, ...] = ()


def inspect(
    listed: Listing,
    sides: dict[int, int],
    problems: Sequence[str] = (),
    workers: int = 2,
    stopped: Callable[[], None] = lambda: None,
) -> list[Inspected]:
    """Reads every scan and every label map.

    Args:
        listed: the data set.
        sides: its label numbers to ours.
        problems: what is known to be wrong already.
        workers: threads that read.
        stopped: called while waiting for them; raises to end the wait.

    Raises:
        ExceptionGroup: of a `ConfigError` or `ScanError` for every problem there is.
    """
    errors: list[Exception] = [ConfigError("data.labels", problem) for problem in problems]
    errors += _repeated(listed)
    pool = ThreadPoolExecutor(max(1, workers))
    try:
        jobs = [pool.submit(_examined, entry, None if problems else sides) for entry in listed.entries]
        while wait(jobs, WAIT_S).not_done:
            stopped()
        found = [job.result() for job in jobs]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    errors += [error for each, _, _ in found for error in each]
    if errors:
        count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
        raise ExceptionGroup(f"{count} in the training data", errors)
    pairs = tuple(sorted(sides.items()))
    return [Inspected(entry, pairs, digest, odd) for entry, (_, digest, odd) in zip(listed.entries, found, strict=True)]


def _repeated(listed: Listing) -> list[Exception]:
    names = [entry.name for entry in listed.entries]
    again = sorted({name for name in names if names.count(name) > 1})
    return [ConfigError("data.source", f"several cases are named {name}", "one name for each case") for name in again]


def _examined(entry: Entry, sides: dict[int, int] | None) -> tuple[list[Exception], str, tuple[str, ...]]:
    """What is wrong with one case, its digest, and what is odd; labels are looked at only where they have a meaning."""
    errors: list[Exception] = []
    state = hashlib.sha256(repr(sorted((sides or {}).items())).encode())
    grid, warnings = _attempt(lambda: _scan_grid(entry.image, state), errors) or (None, ())
    read = _attempt(lambda: read_labels(entry.label), errors)
    if read is None:
        return errors, "", warnings
    labels, label_grid = read
    if grid is not None and not grid.matches(label_grid, SAME_GRID_MM):
        found = f"a grid of {_told(label_grid)}"
        errors.append(ScanError(entry.label, found, f"that of its scan, {_told(grid)}"))
    if sides is not None:
        errors += _label_problems(entry.label, labels, label_grid, sides)
    _add(state, labels, label_grid)
    return errors, state.hexdigest(), warnings


def _scan_grid(path: Path, state: Any) -> tuple[Grid, tuple[str, ...]]:
    """A scan's grid and warnings; all that is read of it goes into the digest, and the scan itself is let go."""
    scan = read_scan(path)
    _add(state, scan.voxels, scan.grid, scan.slope, scan.intercept, scan.floor_hu)
    return scan.grid, scan.warnings


def _add(state: Any, voxels: npt.NDArray[Any], grid: Grid, *more: object) -> None:
    """Adds a volume and where it lies to a digest: the ends of files would not do, as not all of them are packed."""
    state.update(repr((voxels.dtype.str, voxels.shape, grid.affine.tolist(), *more)).encode())
    for layer in np.moveaxis(voxels, int(np.argmax(voxels.strides)), 0):
        state.update(layer.tobytes(order="A"))


def _attempt(read: Any, errors: list[Exception]) -> Any:
    try:
        return read()
    except CascadesegError as error:
        errors.append(error)
    return None


def _told(grid: Grid) -> str:
    shape, spacing = (" x ".join(f"{v:g}" for v in values) for values in (grid.shape, np.round(grid.spacing_mm, 3)))
    return f"{shape} voxels of {spacing} mm at {np.round(grid.affine[:3, 3], 1).tolist()}"


def _label_problems(path: Path, labels: npt.NDArray[Any], grid: Grid, sides: dict[int, int]) -> list[Exception]:
    there = counted(labels)
    unknown = sorted(set(there) - set(sides))
    errors: list[Exception] = []
    if unknown:
        found = f"labels {', '.join(map(str, unknown))} without a name"
        errors.append(ScanError(path, found, "labels that dataset.json or data.labels names"))
    centres = {}
    for lung in (RIGHT_LUNG, LEFT_LUNG):
        mine = [value for value in there if sides.get(value) == lung.value]
        if mine and sum(there[value] for value in mine) * grid.voxel_volume_ml >= SMALLEST_LUNG_ML:
            centres[lung] = float(centroid(labels, grid, mine)[0])
    if not centres and not any(sides.get(value) == IGNORE for value in there):
        errors.append(ScanError(path, f"no lung of {SMALLEST_LUNG_ML:g} ml or more", "at least one lung"))
    if len(centres) == 2 and centres[RIGHT_LUNG] <= centres[LEFT_LUNG]:
        found = "the right lung lies to the patient's left of the left one"
        errors.append(ScanError(path, found, "", "labels or the scan's orientation are swapped: mend data.labels"))
    return errors


def scan_and_labels(case: Inspected) -> tuple[Any, npt.NDArray[np.uint8], Grid]:
    """The scan, its labels with our numbers, and their grid, as stored."""
    scan = read_scan(case.entry.image)
    labels, grid = read_labels(case.entry.label)
    ours = np.zeros(labels.shape, np.uint8)
    for number, value in case.sides:
        if value:
            ours[labels == number] = value
    return scan, ours, grid
