"""Writes CT series as scanners do, tag by tag, for tests (nothing here reads the package's own DICOM code)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import (
    CTImageStorage,
    EnhancedCTImageStorage,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    generate_uid,
)

from cascadeseg.geometry import Grid

RAS_TO_LPS = np.diag([-1.0, -1.0, 1.0])
INTERCEPT = -1024


def write_series(
    folder: Path,
    hu: npt.NDArray[Any],
    grid: Grid,
    *,
    series_uid: str | None = None,
    study_uid: str = "1.2.3",
    encoding: str = ExplicitVRLittleEndian,
    signed: bool = False,
    leave_out: Sequence[int] = (),
    shift_mm: Sequence[float] = (0, 0, 0),
    name: str = "slice{:03d}.dcm",
    **tags: Any,
) -> str:
    """Writes (X, Y, Z) HU as a series, one file for every index of the last axis, and gives its UID.

    Args:
        folder: made if it is not there.
        hu: whole HU.
        grid: where they lie; its axes are a row's, a column's and the slices' direction, whatever these are.
        series_uid: a new one if None.
        study_uid: of the study.
        encoding: transfer syntax of the files, uncompressed or one that pydicom can encode.
        signed: stored as int16 HU (intercept 0) instead of uint16 HU + 1024.
        leave_out: slices that are not written.
        shift_mm: added to every slice's position for each slice after the first (LPS+): a gantry tilt.
        name: of a file, from its instance number.
        tags: more tags, or others than the usual ones; a function gives a tag's value from the slice's index, and
            None takes the tag out.

    Returns:
        The SeriesInstanceUID.
    """
    folder.mkdir(parents=True, exist_ok=True)
    uid = series_uid or generate_uid()
    for k in range(hu.shape[2]):
        if k in leave_out:
            continue
        data = _slice(hu[:, :, k].T, signed)
        data.StudyInstanceUID, data.SeriesInstanceUID = study_uid, uid
        data.InstanceNumber = k + 1
        position = RAS_TO_LPS @ grid.world([0, 0, k]) + k * np.asarray(shift_mm, dtype=float)
        data.ImagePositionPatient = [f"{v:.6f}" for v in position]
        data.ImageOrientationPatient = [f"{v:.6f}" for v in _orientation(grid)]
        data.PixelSpacing = [f"{grid.spacing_mm[a]:.6f}" for a in (1, 0)]
        data.SliceThickness = f"{grid.spacing_mm[2]:.3f}"
        for keyword, value in tags.items():
            setattr(data, keyword, value(k) if callable(value) else value)
            if value is None:
                delattr(data, keyword)
        _save(data, folder / name.format(k + 1), encoding)
    return uid


def write_enhanced(
    path: Path,
    hu: npt.NDArray[Any],
    grid: Grid,
    *,
    encoding: str = ExplicitVRLittleEndian,
    intercepts: Sequence[int] | None = None,
    series_uid: str | None = None,
) -> None:
    """Writes (X, Y, Z) HU as one enhanced CT file of many frames, which may have a rescale intercept each."""
    data = _slice(hu[:, :, 0].T, signed=False)
    data.SOPClassUID = EnhancedCTImageStorage
    data.StudyInstanceUID, data.SeriesInstanceUID = "1.2.3", series_uid or generate_uid()
    data.NumberOfFrames = hu.shape[2]
    each = np.full(hu.shape[2], INTERCEPT) if intercepts is None else np.asarray(intercepts)
    data.PixelData = (hu.T - each[:, None, None]).astype("<u2").tobytes()
    del data.RescaleSlope, data.RescaleIntercept
    shared, measures, orientation = Dataset(), Dataset(), Dataset()
    measures.PixelSpacing = [grid.spacing_mm[1], grid.spacing_mm[0]]
    orientation.ImageOrientationPatient = [f"{v:.6f}" for v in _orientation(grid)]
    shared.PixelMeasuresSequence = Items([measures])
    shared.PlaneOrientationSequence = Items([orientation])
    if intercepts is None:
        shared.PixelValueTransformationSequence = Items([_rescale(INTERCEPT)])
    data.SharedFunctionalGroupsSequence = Items([shared])
    frames = []
    for k in range(hu.shape[2]):
        frame, place = Dataset(), Dataset()
        place.ImagePositionPatient = [f"{v:.6f}" for v in RAS_TO_LPS @ grid.world([0, 0, k])]
        frame.PlanePositionSequence = Items([place])
        if intercepts is not None:
            frame.PixelValueTransformationSequence = Items([_rescale(intercepts[k])])
        frames.append(frame)
    data.PerFrameFunctionalGroupsSequence = Items(frames)
    path.parent.mkdir(parents=True, exist_ok=True)
    _save(data, path, encoding)


def _rescale(intercept: int) -> Dataset:
    values = Dataset()
    values.RescaleSlope, values.RescaleIntercept = 1, intercept
    return values


def _orientation(grid: Grid) -> npt.NDArray[np.float64]:
    """(6,) LPS+: along a row, along a column."""
    return np.asarray((RAS_TO_LPS @ grid.directions[:, :2]).T.ravel())


def _slice(rows: npt.NDArray[Any], signed: bool) -> FileDataset:
    """A CT picture of (rows, columns) HU, without its place."""
    meta = FileMetaDataset()
    data = FileDataset(None, {}, file_meta=meta, preamble=bytes(128))
    data.SOPClassUID, data.SOPInstanceUID = CTImageStorage, generate_uid()
    data.Modality, data.PatientName, data.PatientID = "CT", "Phantom", "0"
    data.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    data.SeriesNumber = 1
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.Rows, data.Columns = rows.shape
    data.BitsAllocated, data.BitsStored, data.HighBit = (16, 16, 15) if signed else (16, 12, 11)
    data.PixelRepresentation = int(signed)
    data.RescaleSlope, data.RescaleIntercept = 1, 0 if signed else INTERCEPT
    data.PixelData = rows.astype("<i2").tobytes() if signed else (rows - INTERCEPT).astype("<u2").tobytes()
    return data


def _save(data: Any, path: Path, encoding: str) -> None:
    meta = data.file_meta
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = data.SOPClassUID, data.SOPInstanceUID
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    if encoding.startswith("1.2.840.10008.1.2.4") or encoding.endswith(".2.5"):  # JPEG family and RLE
        data.compress(encoding, generate_instance_uid=False)
    elif encoding == ExplicitVRBigEndian:  # pydicom swaps no bytes of pixels, and no FileDataset at all
        swapped = np.frombuffer(data.PixelData, "<u2").astype(">u2").tobytes()
        data = Dataset(data)
        data.PixelData, data.file_meta = swapped, meta
        meta.TransferSyntaxUID = encoding
    else:
        meta.TransferSyntaxUID = encoding
    data.save_as(path, enforce_file_format=True)
