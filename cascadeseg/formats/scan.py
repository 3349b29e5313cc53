"""`Scan`: a CT volume as it was stored, with what it takes to read it as HU and to write a mask beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.geometry import Box, Grid, Shape, canonical_view

SAMPLED_MM = 4.0


@dataclass(frozen=True, eq=False)
class Scan:
    """A CT volume in its own integer type: no float copy of a whole scan is ever made.

    Attributes:
        voxels: (X, Y, Z) array of stored values, of whatever type the file has, possibly a view or memory-mapped;
            axis ``a`` is affine column ``a`` of the grid.
        grid: where the voxels lie.
        slope: HU = ``slope * voxels + intercept``.
        intercept: see ``slope``.
        source: the path it came from, or a word for an in-memory volume; used in messages.
        native: what the writer needs to give back the input's exact header (the format's own business).
        warnings: what was odd about it, one line each, for the terminal and the report.
        floor_hu: HU at which a window cut off all that was lower, lungs among it, but not fat; None where none did.
    """

    voxels: npt.NDArray[Any]
    grid: Grid
    slope: float = 1.0
    intercept: float = 0.0
    source: str = "array"
    native: object = None
    warnings: tuple[str, ...] = field(default=())
    floor_hu: float | None = None

    def hu(self, box: Box | None = None) -> npt.NDArray[np.float32]:
        """The HU of a box of the scan (default: all of it) as a new float32 array; NaN and infinity become air."""
        return self.as_hu(self.voxels if box is None else self.voxels[box.slices])

    def as_hu(self, stored: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Stored values of the scan in HU, as a new float32 array; NaN and infinity become air."""
        hu = stored.astype(np.float32)
        hu *= np.float32(self.slope)
        hu += np.float32(self.intercept)
        if self.voxels.dtype.kind == "f":
            np.nan_to_num(hu, copy=False, nan=-1024.0, posinf=-1024.0, neginf=-1024.0)
        return hu

    def canonical(self) -> Scan:
        """The same scan with its axes turned closest to RAS+; a view, nothing is copied."""
        return replace(self, voxels=canonical_view(self.voxels, self.grid), grid=self.grid.canonical())

    def warned(self, *warnings: str) -> Scan:
        """The same scan with more warnings."""
        return replace(self, warnings=(*self.warnings, *warnings))


def sampled_hu(scan: Scan) -> tuple[npt.NDArray[np.floating[Any]], Grid]:
    """(X, Y, Z) the HU of every voxel about `SAMPLED_MM` apart, and their grid: enough to see where a body is."""
    x, y, z = (max(1, int(SAMPLED_MM / mm)) for mm in scan.grid.spacing_mm)
    voxels = scan.voxels[::x, ::y, ::z]
    return scan.as_hu(voxels), Grid(voxels.shape, scan.grid.affine @ np.diag([x, y, z, 1]))


@dataclass(frozen=True)
class DicomSeries:
    """Where a scan came from, for whoever writes DICOM about it.

    Attributes:
        study_uid: StudyInstanceUID.
        series_uid: SeriesInstanceUID.
        files: the slices' files in order along the normal.
        archive: the zip that they lie in; empty if they lie in none.
        uids: SOPInstanceUIDs of the files, each once; of one that has none the empty one.
    """

    study_uid: str
    series_uid: str
    files: tuple[str, ...]
    archive: str = ""
    uids: frozenset[str] = frozenset()

    @property
    def has_named_files(self) -> bool:
        """Whether each file has a SOPInstanceUID of its own; the frames of an enhanced CT share one file."""
        return len(self.uids - {""}) == len(set(self.files))


Before = Callable[[Scan], object]
"""Told what a header says of a scan, its voxels hollow, before they are read; what it raises ends the reading."""


def nothing(outline: Scan) -> None:
    """Lets every scan be read."""


def hollow(shape: Shape, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Zeros of a shape that take the memory of one."""
    return np.broadcast_to(np.zeros((), dtype), shape)
