"""DICOM files one by one: which of them are CT slices, and where each slice lies.

Headers are read without their pixels. Of uncompressed files the place of the pixels is kept, so that the second
pass (`dicom_pixels`) reads nothing else.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
import pydicom
from pydicom.filereader import read_partial
from pydicom.tag import Tag
from pydicom.uid import (
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    MediaStorageDirectoryStorage,
)

from cascadeseg.errors import ScanError
from cascadeseg.formats.find import looks_like_dicom
from cascadeseg.formats.names import suffix_of

NOT_DICOM = "not DICOM"
EMPTY = "of 0 bytes"
DAMAGED = "damaged DICOM"
NO_PIXELS = "DICOM without a picture"
LOCALISER = "localiser"
NO_PLACE = "CT without a place"
NO_FILE = "links to nothing"
LOST = (DAMAGED, NO_PLACE, NO_FILE)
"""What may have been a slice of the scan."""
NO_DICOM = (NOT_DICOM, EMPTY)
"""What may have been one if its name is like theirs."""
NATIVE_ENCODINGS = (ImplicitVRLittleEndian, ExplicitVRLittleEndian)
PIXELS_TAG = b"\xe0\x7f\x10\x00"
PIXELS_VRS = (b"OW", b"OB", b"UN")
"""No length begins so where there is no VR, as lengths are even."""

_TAGS = [
    "SOPInstanceUID", "Modality", "ImageType", "PatientID", "StudyInstanceUID", "SeriesInstanceUID", "SeriesNumber",
    "SeriesDescription", "InstanceNumber", "AcquisitionNumber", "ImagePositionPatient", "ImageOrientationPatient",
    "PixelSpacing", "Rows", "Columns", "SamplesPerPixel", "BitsAllocated", "BitsStored", "HighBit",
    "PixelPaddingValue", "PixelRepresentation", "RescaleSlope", "RescaleIntercept", "RescaleType", "NumberOfFrames",
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence",
]  # fmt: skip

_KEY_TAGS = [Tag("PatientID"), Tag("SeriesInstanceUID")]
"""In the order of a header."""

_LENIENCE = Lock()
_lenient: list[ExitStack] = []
"""For each block at work what puts the settings back: one for them all."""


@contextmanager
def lenient_dicom() -> Iterator[None]:
    """Values that break the standard's fine print (most archives hold some) raise and warn nothing meanwhile.

    The settings are the whole process's: of several threads the first one changes them and the last one puts them back.
    """
    with _LENIENCE:
        _lenient.append(_lenient[0] if _lenient else _made_lenient())
    try:
        yield
    finally:
        with _LENIENCE:
            before = _lenient.pop()
            if not _lenient:
                before.close()


def _made_lenient() -> ExitStack:
    """What puts the settings back."""
    before, settings = ExitStack(), pydicom.config.settings
    before.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", module="pydicom|highdicom|cascadeseg")
    before.callback(setattr, settings, "reading_validation_mode", settings.reading_validation_mode)
    settings.reading_validation_mode = pydicom.config.IGNORE
    return before


@dataclass(frozen=True)
class Source:
    """A file on disk or in a zip: its name, how to open it, and the zip that it lies in (empty if in none)."""

    name: str
    open: Callable[[], IO[bytes]]
    archive: str = ""


@dataclass(frozen=True)
class Series:
    """What names a series.

    Attributes:
        uid: SeriesInstanceUID.
        study_uid: StudyInstanceUID.
        patient_id: PatientID, empty if it has none.
        number: SeriesNumber, 0 if it has none.
        description: SeriesDescription, often empty.
    """

    uid: str
    study_uid: str
    patient_id: str
    number: int
    description: str

    @property
    def key(self) -> tuple[str, str]:
        """What one series' slices share: some anonymisers give everybody the same UIDs."""
        return self.uid, self.patient_id

    @property
    def study_key(self) -> tuple[str, str]:
        """What one study's slices share."""
        return self.study_uid, self.patient_id


@dataclass(frozen=True)
class Slice:
    """One CT picture: a file, or a frame of one.

    Attributes:
        source: its file.
        frame: which frame of the file, from 0.
        frames: how many the file has.
        pixels_at: where its values start in the file, or None where they have to be decoded.
        series: the series that it belongs to.
        uid: SOPInstanceUID, of all of its file's frames.
        instance: InstanceNumber.
        acquisition: AcquisitionNumber.
        shape: (rows, columns).
        stored: type of the values.
        shifts: bits by which a word of the file is shifted up and then down to give the value: the bits beside it may
            hold anything, as an overlay, and no sign.
        padding: PixelPaddingValue, the word for "not measured", or None.
        position_mm: (3,) centre of the first voxel, LPS+.
        orientation: (6,) unit vectors along a row and along a column, LPS+.
        pixel_spacing_mm: (between rows, between columns).
        slope: HU = ``slope * value + intercept``.
        intercept: see ``slope``.
        rescale_type: RescaleType in capitals, what that gives if not HU; empty if it is not told.
    """

    source: Source
    frame: int
    frames: int
    pixels_at: int | None
    series: Series
    uid: str
    instance: int
    acquisition: int
    shape: tuple[int, int]
    stored: np.dtype[Any]
    shifts: tuple[int, int]
    padding: int | None
    position_mm: tuple[float, ...]
    orientation: tuple[float, ...]
    pixel_spacing_mm: tuple[float, float]
    slope: float
    intercept: float
    rescale_type: str

    @property
    def rescale(self) -> tuple[np.dtype[Any], float, float]:
        """What has to agree for values of several slices to lie in one array."""
        return self.stored, self.slope, self.intercept


@contextmanager
def sources_of(path: Path) -> Iterator[list[Source]]:
    """The files of a folder (nested ones too, hidden ones not) or of a zip, or the file itself; sorted by name.

    Raises:
        ScanError: a folder that cannot be searched, or a damaged zip.
    """
    if path.is_dir():
        yield [source_of(file) for file in sorted(_files_below(path))]
    elif suffix_of(path) == ".zip":
        with _zip(path) as archive:
            files = [info.filename for info in archive.infolist() if not info.is_dir()]
            names = sorted(name for name in files if not any(part.startswith(".") for part in name.split("/")))
            yield [Source(name, lambda name=name: archive.open(name), str(path)) for name in names]  # type: ignore[misc]
    else:
        yield [source_of(path)]


def _zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError) as problem:  # or its list of files asks for what Python has not
        raise ScanError(path, "a damaged zip file, or none", "a zip of DICOM files", "copy it again") from problem


def _files_below(folder: Path) -> Iterator[Path]:
    """Files in a folder and, through links too, in its subfolders, each of which is entered once."""
    entered = {folder.resolve(), *folder.resolve().parents}  # a link upwards would lead to other patients
    for at, folders, names in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        yield from files_in(Path(at), names)
        for name in sorted(folders):
            real = (Path(at) / name).resolve()
            if name.startswith(".") or real in entered:
                folders.remove(name)
            entered.add(real)


def _refuse_folder(problem: OSError) -> None:
    raise ScanError(problem.filename, f"a folder that cannot be read ({problem.strerror})") from problem


def files_in(folder: Path, names: Iterable[str]) -> list[Path]:
    """Those names that are files, or links to files that are not there, and not hidden."""
    files = [folder / name for name in names if not name.startswith(".")]
    return [file for file in files if file.is_file() or (file.is_symlink() and not file.exists())]


def source_of(file: Path) -> Source:
    return Source(str(file), lambda: file.open("rb"))


@dataclass(frozen=True)
class Found:
    """What a file is.

    Attributes:
        kind: "CT", or in a word or two why it is no part of a scan.
        slices: its CT slices.
        series_uid: SeriesInstanceUID, empty if it is not known.
        problem: the file, and what is wrong with it.
    """

    kind: str
    slices: tuple[Slice, ...] = ()
    series_uid: str = ""
    problem: str = ""


class _NoPlaceError(Exception):
    """A picture whose header does not say where it lies."""


def looked_into(source: Source) -> Found:
    """What a file is.

    Raises:
        ScanError: it cannot be read.
    """
    series_uid = ""
    try:
        stream = source.open()
    except FileNotFoundError:
        return Found(NO_FILE, problem=source.name)
    except PermissionError as problem:
        raise ScanError(source.name, "no permission to read it", "", "ask its owner for it") from problem
    except (OSError, RuntimeError, zipfile.BadZipFile) as problem:  # RuntimeError: a zip with a password
        raise ScanError(source.name, f"cannot be read ({getattr(problem, 'strerror', None) or problem})") from problem
    with stream:
        try:
            start = stream.read(132)
            if not looks_like_dicom(start):
                return Found(NOT_DICOM if start else EMPTY, problem=source.name)
            stream.seek(0)
            header = pydicom.dcmread(stream, force=True, stop_before_pixels=True, specific_tags=_TAGS)
            series_uid = str(header.get("SeriesInstanceUID", ""))
            kind, slices = _classified(source, header, stream)
        except _NoPlaceError as problem:
            return Found(NO_PLACE, (), series_uid, f"{source.name}: {problem}")
        except Exception as problem:  # a damaged header makes pydicom raise anything; the file is told and left out
            return Found(DAMAGED, (), series_uid, f"{source.name}: {' '.join(str(problem).split())[:120]}")
    return Found(kind, tuple(slices), series_uid)


def series_key_of(source: Source) -> tuple[str, str] | None:
    """`Series.key` of a file, None if it cannot be told; what comes after it, long where frames are many, is left."""
    try:
        with source.open() as stream:
            if not looks_like_dicom(stream.read(132)):
                return None
            stream.seek(0)
            header = read_partial(stream, lambda tag, *_: tag > _KEY_TAGS[-1], specific_tags=_KEY_TAGS, force=True)
        uid = _text(header, "SeriesInstanceUID")
        return (uid, _text(header, "PatientID")) if uid else None
    except Exception:  # any damage in a header that is only asked for its series
        return None


def _is_directory(header: Any) -> bool:
    return bool(header.file_meta.get("MediaStorageSOPClassUID", "") == MediaStorageDirectoryStorage)


def _classified(source: Source, header: Any, stream: IO[bytes]) -> tuple[str, list[Slice]]:
    modality = str(header.get("Modality", "") or "no modality")
    if "Rows" not in header or "Columns" not in header:  # a CT, or a header that ends early, had a picture once
        is_whole = modality != "CT" and ("Modality" in header or _is_directory(header))
        if not is_whole:
            raise ValueError("the header ends early, or has no Rows and Columns")
        return NO_PIXELS, []
    if modality != "CT":
        return modality, []
    if "LOCALIZER" in [str(word).upper() for word in header.get("ImageType", None) or []]:
        return LOCALISER, []
    if int(header.get("SamplesPerPixel", 1)) != 1:
        return "colour picture", []
    places = [_place(header, frame) for frame in range(_frames(header))]
    start = _pixels_start(header, stream)
    return "CT", [_slice(source, header, i, place, start) for i, place in enumerate(places)]


def _frames(header: Any) -> int:
    return int(header.get("NumberOfFrames", None) or 1)


def _slice(source: Source, header: Any, frame: int, place: _Place, start: int | None) -> Slice:
    rows, columns = int(header.Rows), int(header.Columns)
    bits, signed = int(header.get("BitsAllocated", 16)), int(header.get("PixelRepresentation", 0)) == 1
    stored = np.dtype(f"{'i' if signed else 'u'}{max(1, bits // 8)}")
    padding = header.get("PixelPaddingValue", None)
    return Slice(
        source=source,
        frame=frame,
        frames=_frames(header),
        pixels_at=None if start is None else start + frame * rows * columns * stored.itemsize,
        series=Series(
            _text(header, "SeriesInstanceUID"),
            _text(header, "StudyInstanceUID"),
            _text(header, "PatientID"),
            _number(header, "SeriesNumber"),
            _text(header, "SeriesDescription"),
        ),
        uid=str(header.get("SOPInstanceUID", "")),
        instance=_number(header, "InstanceNumber") + frame,
        acquisition=_number(header, "AcquisitionNumber"),
        shape=(rows, columns),
        stored=stored,
        shifts=_shifts(header, bits),
        padding=padding if isinstance(padding, int) else None,
        position_mm=place.position_mm,
        orientation=place.orientation,
        pixel_spacing_mm=place.pixel_spacing_mm,
        slope=place.slope,
        intercept=place.intercept,
        rescale_type=place.rescale_type,
    )


def _shifts(header: Any, bits: int) -> tuple[int, int]:
    stored = int(header.get("BitsStored", None) or bits)
    high = header.get("HighBit", None)
    above = bits - 1 - (stored - 1 if high is None else int(high))
    return (above, bits - stored) if 0 <= above <= bits - stored else (0, 0)


@dataclass(frozen=True)
class _Place:
    position_mm: tuple[float, ...]
    orientation: tuple[float, ...]
    pixel_spacing_mm: tuple[float, float]
    slope: float
    intercept: float
    rescale_type: str


def _place(header: Any, frame: int) -> _Place:
    """Where a frame lies and how it is scaled.

    Raises:
        _NoPlaceError: the header does not say where.
        ValueError: it scales by what is no number.
    """
    position = _lengths(header, frame, "PlanePositionSequence", "ImagePositionPatient", 3)
    orientation = _lengths(header, frame, "PlaneOrientationSequence", "ImageOrientationPatient", 6)
    rows_mm, columns_mm = _lengths(header, frame, "PixelMeasuresSequence", "PixelSpacing", 2)
    if min(rows_mm, columns_mm) <= 0:
        raise _NoPlaceError(f"PixelSpacing {rows_mm:g}, {columns_mm:g}")
    if not 0.9 < float(np.linalg.norm(np.cross(orientation[:3], orientation[3:]))) < 1.1:
        raise _NoPlaceError(f"ImageOrientationPatient {', '.join(f'{value:g}' for value in orientation)}")
    slope = _floats(header, frame, "PixelValueTransformationSequence", "RescaleSlope")
    intercept = _floats(header, frame, "PixelValueTransformationSequence", "RescaleIntercept")
    return _Place(
        position,
        (*_unit(orientation[:3]), *_unit(orientation[3:])),
        (rows_mm, columns_mm),
        slope=(slope[0] if slope else 0.0) or 1.0,
        intercept=intercept[0] if intercept else 0.0,
        rescale_type=str(_tag(header, frame, "PixelValueTransformationSequence", "RescaleType") or "").strip().upper(),
    )


def _unit(vector: tuple[float, ...]) -> tuple[float, ...]:
    """The vector's direction: cosines that a header rounds, or gets a little wrong, are not to scale the voxels."""
    length = float(np.linalg.norm(vector))
    return tuple(value / length for value in vector)


def _lengths(header: Any, frame: int, group: str, keyword: str, count: int) -> tuple[float, ...]:
    try:
        values = _floats(header, frame, group, keyword)
    except ValueError as problem:
        raise _NoPlaceError(problem) from problem
    if len(values) != count:
        raise _NoPlaceError(f"{keyword} of {len(values)} values, not {count}" if values else f"no {keyword}")
    return values


def _floats(header: Any, frame: int, group: str, keyword: str) -> tuple[float, ...]:
    """The values of a tag, none if it is not there; raises ValueError for what is not a finite number."""
    try:
        value = _tag(header, frame, group, keyword)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{keyword}: {problem}") from problem
    if value is None or value == "":
        return ()
    try:
        values = tuple(map(float, [value] if isinstance(value, str) or not hasattr(value, "__len__") else value))
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{keyword} {value!r}, not a number") from problem
    if not np.isfinite(values).all():
        raise ValueError(f"{keyword} {', '.join(map(str, values))}")
    return values


def _text(header: Any, keyword: str) -> str:
    return str(header.get(keyword, None) or "")


def _number(header: Any, keyword: str) -> int:
    """A number that only orders or names, 0 if it is none."""
    try:
        return int(header.get(keyword, None) or 0)
    except (TypeError, ValueError):
        return 0


def _tag(header: Any, frame: int, group: str, keyword: str) -> Any:
    """A value of the header, or of an enhanced CT's functional groups: the frame's own, or the shared one."""
    if keyword in header:
        return header[keyword].value
    each = header.get("PerFrameFunctionalGroupsSequence", None) or []
    for groups in (each[frame : frame + 1], header.get("SharedFunctionalGroupsSequence", None) or []):
        for item in groups:
            if group in item and keyword in item[group].value[0]:
                return item[group].value[0][keyword].value
    return None


def encoding_of(header: Any) -> Any:
    """The transfer syntax of a file, from how pydicom found its tags written where the file does not say."""
    if "TransferSyntaxUID" in header.file_meta:
        return header.file_meta.TransferSyntaxUID
    is_implicit, is_little_endian = header.original_encoding
    if not is_little_endian:
        return ExplicitVRBigEndian
    return ImplicitVRLittleEndian if is_implicit else ExplicitVRLittleEndian


def _pixels_start(header: Any, stream: IO[bytes]) -> int | None:
    """Where an uncompressed file's values start; None if it is compressed.

    The stream stands at the tag of the pixels, where pydicom stopped.

    Raises:
        ValueError: values are missing.
    """
    encoding = encoding_of(header)
    if encoding not in NATIVE_ENCODINGS or int(header.get("BitsAllocated", 16)) not in (8, 16, 32):
        return None
    tag = stream.read(12)
    if tag[:4] != PIXELS_TAG:
        raise ValueError("no pixels")
    explicit = tag[4:6] in PIXELS_VRS  # some files say one encoding and are of the other, which pydicom sees as well
    length = int.from_bytes(tag[8:12] if explicit else tag[4:8], "little")
    wanted = int(header.Rows) * int(header.Columns) * int(header.BitsAllocated) // 8 * _frames(header)
    start = stream.tell() - (0 if explicit else 4)
    end = stream.seek(0, 2)
    if min(length, end - start) < wanted:
        raise ValueError("the file is cut short")
    return start
