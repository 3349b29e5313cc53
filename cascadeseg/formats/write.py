"""Writing masks and scans: whole, read back and compared with what was meant, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.atomic import staged
from cascadeseg.errors import OutputError, ScanError
from cascadeseg.formats.names import LABEL_SUFFIXES, NIFTI_SUFFIXES, SEGMENTATION_SUFFIX, VOLUME_SUFFIXES, suffix_of
from cascadeseg.formats.placement import ItkGeometry
from cascadeseg.formats.read import read_labels
from cascadeseg.formats.scan import DicomSeries, Scan
from cascadeseg.geometry import Grid, boxes_on_one_grid, canonical_view


def check_writable(path: str | Path) -> None:
    """Raises OutputError if a mask could not be written here; call it before any work is done."""
    path = Path(path)
    _refuse_name(path)
    with staged(path) as part:
        part.touch()
        part.unlink()


def check_source(path: str | Path, scan: Scan) -> None:
    """Raises OutputError if a scan's mask cannot be of the kind that its name says, or would replace the scan; call it
    before any work is done.
    """
    with suppress(OSError):  # one of them is not there, or the scan was never a file
        if Path(path).samefile(scan.source):
            raise OutputError(path, "the scan itself", "another name")
    if suffix_of(path) != SEGMENTATION_SUFFIX:
        return
    if not isinstance(scan.native, DicomSeries):
        raise not_of_dicom(Path(path))
    if not scan.native.has_named_files:
        found = f"a DICOM segmentation of {scan.source}: its slices lack SOPInstanceUIDs of their own, to name them by"
        raise OutputError(path, found, "", "choose another format")


def write_labels(
    labels: npt.NDArray[np.uint8], path: str | Path, scan: Scan, model: Mapping[str, str] | None = None
) -> None:
    """Writes a label map beside its scan, compressed, on the scan's exact grid.

    NIfTI from NIfTI has the forms, codes and units of the scan bit for bit; MHA and NRRD from MHA or NRRD the
    exact origin, spacing and direction; from one kind to the other they are made from the grid. A DICOM segmentation
    (SEG) is of a DICOM series only and belongs to its study; the slices' headers are read again for it. A NRRD named
    ``.seg.nrrd`` is a segmentation of 3D Slicer, with names, colours and SNOMED CT codes of the lungs.

    Args:
        labels: (X, Y, Z) uint8, on ``scan.grid``.
        path: its suffix decides the format, one of `LABEL_SUFFIXES`.
        scan: what the labels are of.
        model: what made them, as in `Segmentation.model`; only a DICOM segmentation has a place for it.

    Raises:
        OutputError: it could not be written; nothing is left behind.
    """
    check_source(path, scan)
    _write(labels.astype(np.uint8, copy=False), scan.grid, Path(path), scan.native, is_labels=True, model=model or {})


def holds_labels(path: str | Path, labels: npt.NDArray[np.uint8], scan: Scan) -> bool:
    """Whether a mask on disk is this one, also where another program stored it: turned, or cut to what it fills.

    One that is as `write_labels` leaves it is looked at some slices at a time, any other is read whole.

    Args:
        path: the mask, in any of the formats of `write_labels`.
        labels: (X, Y, Z) uint8, on ``scan.grid``.
        scan: what the labels are of.

    Raises:
        ScanError: it cannot be read.
    """
    if suffix_of(path) == SEGMENTATION_SUFFIX:
        from cascadeseg.formats import dicom_seg

        try:
            return dicom_seg.holds(Path(path), labels, scan.grid)
        except (AttributeError, IndexError, KeyError, ValueError):  # made by a program that encodes it otherwise
            return False
    if _is_as_written(Path(path), labels, scan):
        return True
    found, grid = read_labels(path)
    boxes = boxes_on_one_grid(grid, scan.grid, may_be_cut=(True, False))
    if boxes is None:
        return False
    whole = canonical_view(labels, scan.grid)
    part = whole[boxes[0].slices]
    return np.array_equal(part, canonical_view(found, grid)) and np.count_nonzero(part) == np.count_nonzero(whole)


def _is_as_written(path: Path, labels: npt.NDArray[np.uint8], scan: Scan) -> bool:
    """Whether a mask is just what `write_labels` would write; False also where it cannot be read."""
    with suppress(OSError, RuntimeError, ScanError):  # who reads it whole says what is wrong
        return _holds(path, labels, scan.grid, scan.native, is_labels=True)
    return False


def write_scan(voxels: npt.NDArray[Any], grid: Grid, path: str | Path) -> None:
    """Writes a volume of HU, (X, Y, Z) int16, on its grid; the suffix decides the format as in `write_labels`.

    Raises:
        OutputError: it could not be written; nothing is left behind.
    """
    suffix = suffix_of(path)
    if suffix in set(LABEL_SUFFIXES) - set(VOLUME_SUFFIXES):
        raise OutputError(path, f"a scan as {suffix}", f"one of {' '.join(VOLUME_SUFFIXES)}")
    _write(voxels, grid, Path(path), None, is_labels=False, model={})


def _write(
    voxels: npt.NDArray[Any], grid: Grid, path: Path, native: object, *, is_labels: bool, model: Mapping[str, str]
) -> None:
    if voxels.shape != grid.shape:
        raise ValueError(f"voxels of shape {voxels.shape} on a grid of {grid.shape}")
    _refuse_name(path)
    with staged(path) as part:
        try:
            _encode(voxels, grid, part, native, is_labels, model)
            verified = _holds(part, voxels, grid, native, is_labels)
        except RuntimeError as problem:  # SimpleITK knows no other kind
            found = f"cannot be written ({' '.join(str(problem).split())[-200:]})"
            raise OutputError(path, found) from problem
        except ScanError as problem:
            raise OutputError(path, f"cannot be read back ({problem.found})", "", "check the disk") from problem
        if not verified:
            raise OutputError(path, "what was read back is not what was written", "", "check the disk")


def _encode(
    voxels: npt.NDArray[Any], grid: Grid, part: Path, native: object, is_labels: bool, model: Mapping[str, str]
) -> None:
    if suffix_of(part) in NIFTI_SUFFIXES:
        from cascadeseg.formats import nifti

        header = nifti.header_for(grid, voxels.dtype, native, is_labels=is_labels)
        nifti.write_nifti(voxels, header, part)
    elif isinstance(native, DicomSeries) and suffix_of(part) == SEGMENTATION_SUFFIX:
        from cascadeseg.formats import dicom_seg

        dicom_seg.write_segmentation(voxels, grid, native, part, model)
    else:
        from cascadeseg.formats import itk

        itk.write_itk(voxels, _itk_geometry(grid, native), part)


def _holds(path: Path, voxels: npt.NDArray[Any], grid: Grid, native: object, is_labels: bool) -> bool:
    """Whether a file reads back as what `_encode` was given; all but DICOM some slices at a time."""
    if suffix_of(path) in NIFTI_SUFFIXES:
        from cascadeseg.formats import nifti

        return nifti.holds(path, voxels, nifti.header_for(grid, voxels.dtype, native, is_labels=is_labels))
    if suffix_of(path) == SEGMENTATION_SUFFIX:
        from cascadeseg.formats import dicom_seg

        return dicom_seg.holds(path, voxels, grid)
    from cascadeseg.formats import itk

    return itk.holds(path, voxels, _itk_geometry(grid, native))


def _itk_geometry(grid: Grid, native: object) -> ItkGeometry:
    return native if isinstance(native, ItkGeometry) else ItkGeometry.of_grid(grid)


def not_of_dicom(path: Path) -> OutputError:
    """The refusal of a DICOM segmentation whose scan is none."""
    found = "a DICOM segmentation, and its scan is not DICOM"
    return OutputError(path, found, "the DICOM series itself, whose study it belongs to", "or choose another format")


def _refuse_name(path: Path) -> None:
    suffix = suffix_of(path)
    if suffix not in LABEL_SUFFIXES:
        found = f"unknown suffix '{suffix}'" if suffix else "a name without a suffix"
        raise OutputError(path, found, f"one of {' '.join(LABEL_SUFFIXES)}")
    if suffix == ".mhd" and (path.name.startswith("LIST") or "%" in path.name):  # in a header these mean other things
        found = "a name by which an .mhd does not lead to its .zraw"
        raise OutputError(path, found, "one without % that does not begin with LIST", "or choose .mha")
    if suffix == SEGMENTATION_SUFFIX and path.is_file():
        from cascadeseg.formats import dicom_seg

        if not dicom_seg.is_segmentation(path):  # a slice of the scan, perhaps
            raise OutputError(path, "a file that is no DICOM segmentation", "", "choose another name")
