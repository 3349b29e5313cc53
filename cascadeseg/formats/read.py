"""Opening any scan: what a path or an object is decides who reads it; then the doctor looks at its values."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.errors import ScanError
from cascadeseg.formats.doctor import audit
from cascadeseg.formats.find import looks_like_dicom
from cascadeseg.formats.names import ITK_SUFFIXES, MASK_SUFFIXES, NIFTI_SUFFIXES, SERIES_SUFFIXES, suffix_of
from cascadeseg.formats.placement import WHOLE_SERIES, checked_grid
from cascadeseg.formats.scan import Before, Scan, nothing
from cascadeseg.geometry import Affine, Grid

MIN_VOXELS = 2
"""On each axis: with a single voxel a volume is a picture or a line, not a scan."""


def read_scan(
    path: str | Path, *, series: str | None = None, volume: int | None = None, before: Before = nothing
) -> Scan:
    """Reads a CT scan as it is stored, and looks for what is odd about it.

    Args:
        path: a NIfTI, MHA/MHD or NRRD file; a DICOM file, a folder of them (also nested), or a zip of one.
        series: which DICOM series, by its SeriesInstanceUID; the largest CT series if None.
        volume: which volume of a 4D file, from 0.
        before: told what the header says before any voxel is read; what it raises is raised here.

    Returns:
        The scan, with a warning for everything odd but usable.

    Raises:
        ScanError: the path is not one readable 3D volume.
    """

    def checked(outline: Scan) -> None:
        _check_size(outline)
        before(outline)

    return audit(_read(_named(path), series, volume, checked))


class _HeaderRead(BaseException):
    """Ends the reading of a file before its voxels; no `except Exception` takes it for a fault of the file."""


def read_outline(path: str | Path, *, series: str | None = None, volume: int | None = None) -> Scan:
    """What the header says of a scan, or of a mask: its voxels are hollow. Arguments and errors as of `read_scan`."""
    outlines: list[Scan] = []

    def seen(outline: Scan) -> None:
        outlines.append(outline)
        raise _HeaderRead

    with suppress(_HeaderRead):
        read_scan(path, series=series, volume=volume, before=seen)
    return outlines[0]


def read_labels(path: str | Path) -> tuple[npt.NDArray[Any], Grid]:
    """Reads a label map: an (X, Y, Z) integer array, and where it lies.

    A 3D Slicer segmentation may be cut to what its segments fill, a DICOM segmentation is cut to its frames.

    Raises:
        ScanError: the path is not one readable 3D volume of whole numbers.
    """
    scan = _read(_named(path), None, None, nothing, is_labels=True)
    labels = scan.voxels
    if (scan.slope, scan.intercept) != (1.0, 0.0) or labels.dtype.kind == "f":
        values = labels.astype(np.float32) * np.float32(scan.slope) + np.float32(scan.intercept)
        labels = np.rint(values).astype(np.int32) if np.isfinite(values).all() else labels
        if labels.dtype.kind == "f" or not np.array_equal(labels, values):
            raise ScanError(path, "values that are not whole numbers", "a label map")
    return labels, scan.grid


def scan_of(image: Any, affine: npt.ArrayLike | None = None, *, source: str = "") -> Scan:
    """A `Scan` of what is already in memory, without a copy where the memory allows.

    Args:
        image: a nibabel image, a SimpleITK image, or an (X, Y, Z) array of HU.
        affine: (4, 4) voxel index to RAS+ mm; needed for an array, and only there.
        source: what messages and reports call it; what kind of image it is if empty.

    Raises:
        ScanError: it is not one 3D volume, or its affine cannot be a voxel grid's.
    """
    kind = "array"
    if type(image).__module__.partition(".")[0] == "SimpleITK":
        kind = "SimpleITK image"
    elif hasattr(image, "dataobj"):
        kind = "nibabel image"
    source = source or kind
    if affine is not None and kind != "array":
        raise has_its_own_affine(source)
    if kind == "SimpleITK image":
        from cascadeseg.formats.itk import scan_of_image

        scan = scan_of_image(image, source)
    elif kind == "nibabel image":
        from cascadeseg.formats.nifti import scan_of_image as scan_of_nibabel

        scan = scan_of_nibabel(image, source)
    else:
        scan = _scan_of_array(np.asarray(image), affine, source)
    _check_size(scan)
    return audit(scan)


def has_its_own_affine(source: object) -> ScanError:
    """What is wrong with an affine that is given beside a scan."""
    return ScanError(source, "an affine beside a scan that has its own", "an affine with an array only", "leave it out")


def _scan_of_array(array: npt.NDArray[Any], affine: npt.ArrayLike | None, source: str) -> Scan:
    if affine is None:
        raise ScanError(source, "an array without an affine", "a 4 x 4 affine, voxel index to RAS+ mm")
    matrix: Affine = np.asarray(affine, dtype=np.float64)
    if matrix.shape != (4, 4):
        raise ScanError(source, f"an affine of shape {matrix.shape}", "4 x 4, voxel index to RAS+ mm")
    if not np.allclose(matrix[3], (0, 0, 0, 1)):
        found = f"an affine whose last row is {' '.join(f'{value:g}' for value in matrix[3])}"
        raise ScanError(source, found, "0 0 0 1", "turn it round if it is transposed")
    if array.ndim != 3 or array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        found = f"an array of {array.ndim} dimensions {array.shape} of {array.dtype.name}"
        expected = "3 dimensions (X, Y, Z) of whole or floating-point numbers"
        raise ScanError(source, found, expected, WHOLE_SERIES if array.ndim < 3 else "")
    grid, warnings = checked_grid(array.shape, matrix, source)
    native_order = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return Scan(native_order, grid, source=source, warnings=warnings)


def _named(path: str | Path) -> Path:
    """An empty name would be the current folder, and whatever lies there."""
    if not str(path):
        raise ScanError("''", "an empty name", "a file or a folder")
    return Path(path)


def _read(path: Path, series: str | None, volume: int | None, before: Before, *, is_labels: bool = False) -> Scan:
    """Opens a path, whatever it is; failures of disks and permissions become one line."""
    try:
        return _opened(path, suffix_of(path), series, volume, before, is_labels)
    except OSError as problem:
        raise ScanError(path, f"cannot be read ({problem.strerror or problem})") from problem


def _opened(path: Path, suffix: str, series: str | None, volume: int | None, before: Before, is_labels: bool) -> Scan:
    """Chooses the reader by what the path is. Imports stay inside: each reader loads a large library."""
    if not path.exists():
        if path.is_symlink():
            raise ScanError(path, f"a link to nothing ({path.readlink()})", "a file", "fetch what it leads to")
        raise ScanError(path, "no such file or folder")
    if not path.is_file() and not path.is_dir():  # to open one without a writer would wait for ever
        raise ScanError(path, "a pipe or a device", "a file or a folder", "save what comes through it as a file")
    if path.is_dir() or suffix in SERIES_SUFFIXES or is_dicom_file(path):
        if is_labels:
            return _segmentation(path)
        from cascadeseg.formats.dicom import read_dicom

        if volume is not None:
            raise ScanError(path, "a DICOM series, and --volume", "--series UID to choose among DICOM series")
        return read_dicom(path, series, before)
    if series is not None:
        raise ScanError(path, "not DICOM, so without series to choose from", "", "leave out --series")
    if suffix in ITK_SUFFIXES:
        from cascadeseg.formats.itk import read_itk

        return read_itk(path, suffix, volume, before)
    if suffix in (*NIFTI_SUFFIXES, ".hdr", ".img"):
        from cascadeseg.formats.nifti import read_nifti

        return read_nifti(path, volume, before)
    expected = "NIfTI, MHA/MHD, NRRD or DICOM"
    raise ScanError(path, f"unknown kind of file ({suffix or 'no suffix'})", expected)


def _segmentation(path: Path) -> Scan:
    """The label map of a DICOM segmentation."""
    if path.is_file() and is_dicom_file(path):
        from cascadeseg.formats import dicom_seg

        if dicom_seg.is_segmentation(path):
            return dicom_seg.read_segmentation(path)
    expected = f"a label map in one of {' '.join(MASK_SUFFIXES)}, or a DICOM segmentation"
    raise ScanError(path, "DICOM", expected, "`infer --format nii.gz` makes one of a series")


def is_dicom_file(path: Path) -> bool:
    """Whether a file is DICOM by its first bytes, whatever its name."""
    with path.open("rb") as file:
        return looks_like_dicom(file.read(132))


def _check_size(scan: Scan) -> None:
    if min(scan.grid.shape) < MIN_VOXELS:
        found = f"a volume of {' x '.join(map(str, scan.grid.shape))} voxels"
        raise ScanError(scan.source, found, f"a 3D scan of at least {MIN_VOXELS} voxels on each axis", WHOLE_SERIES)
