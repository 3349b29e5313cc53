"""Writing a DICOM segmentation (SEG) of the series that a scan came from, for viewers and archives, and reading one.

Binary, a segment for each lung, a frame for each slice that has some of it, in the series' study and frame of
reference. A frame names the slice that it lies in, a repaired series' frames that lie in none only the series.
highdicom does it; dcmqi is a program beside, and pydicom alone knows no rules of what must be there.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pydicom
from pydicom.valuerep import DA, TM

from cascadeseg._version import __version__
from cascadeseg.errors import ScanError
from cascadeseg.formats.dicom_files import lenient_dicom
from cascadeseg.formats.placement import LPS_TO_RAS, checked_grid
from cascadeseg.formats.scan import DicomSeries, Scan
from cascadeseg.geometry import Affine, Grid
from cascadeseg.labels import ANATOMICAL_STRUCTURE, LUNG, LUNGS, Code, Label

SERIES_NUMBER_ABOVE = 1000
"""The segmentation's SeriesNumber is the scan's and this: other segmentations of the study are seldom there."""
ALIKE = ("StudyInstanceUID", "FrameOfReferenceUID", "ImageOrientationPatient", "PixelSpacing")
"""What the slices of a scan have alike, but for a hair; highdicom does not allow for one."""
LARGEST_NUMBER = (1 << 31) - 1
SPACING_DIGITS = 6
"""Of mm behind the point: what a decimal string of DICOM (16 characters) has room for."""
MAY_BE_EMPTY: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("PatientID", "PatientName", "AccessionNumber", "StudyID"), str),
    **dict.fromkeys(("PatientBirthDate", "StudyDate"), DA),
    "StudyTime": TM,
    "PatientSex": ("M", "F", "O", "").index,
}
"""What the standard wants in every object, if need be without a value (type 2), and what raises at unfit values."""


def write_segmentation(
    labels: npt.NDArray[np.uint8], grid: Grid, series: DicomSeries, path: Path, model: Mapping[str, str]
) -> None:
    """Writes a label map of a series as DICOM SEG; only the slices from the first with lung to the last are looked at.

    Args:
        labels: (X, Y, Z) uint8; X along the slices' rows.
        grid: where they lie.
        series: what they are of; its files are read again, without their pixels.
        path: of the new file.
        model: what made the labels, as in `Segmentation.model`.

    Raises:
        RuntimeError: the series' files are gone, or are no base for a segmentation.
    """
    with _quiet_highdicom() as highdicom:
        try:
            sources = _headers(series, grid.spacing_mm[2])
            layers = np.flatnonzero(labels.any(axis=(0, 1)))
            first, last = (int(layers[0]), int(layers[-1])) if len(layers) else (0, 0)
            volume = highdicom.Volume(
                np.ascontiguousarray(labels[:, :, first : last + 1].T),
                _slices_first(grid, first),
                coordinate_system="PATIENT",
                frame_of_reference_uid=sources[0].FrameOfReferenceUID,
            )
            segmentation = highdicom.seg.Segmentation(
                source_images=sources,
                pixel_array=volume,
                segmentation_type="BINARY",
                segment_descriptions=[_described(label, model, highdicom) for label in LUNGS],
                series_instance_uid=highdicom.UID(),
                series_number=min(SERIES_NUMBER_ABOVE + int(sources[0].get("SeriesNumber", None) or 0), LARGEST_NUMBER),
                sop_instance_uid=highdicom.UID(),
                instance_number=1,
                manufacturer="cascadeseg",
                manufacturer_model_name="cascadeseg",
                software_versions=__version__,
                device_serial_number="0",
                content_label="LUNGS",
                content_description="Right and left lung",
                series_description="Lungs (cascadeseg)",
                omit_empty_frames=len(layers) > 0,
            )
            segmentation.save_as(path)
        except (AttributeError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as problem:
            raise RuntimeError(f"no DICOM segmentation of this series can be made: {problem}") from problem


def read_segmentation(path: Path) -> Scan:
    """The label map of a DICOM segmentation of any program: uint8, on the grid of its frames.

    The grid ends with the first and the last slice that has a frame. Lungs are told by their SNOMED CT codes or by
    their labels, what else there is counts as background.

    Raises:
        ScanError: its frames are no volume, or no segment is a lung.
    """
    with _quiet_highdicom() as highdicom:
        try:
            segmentation = highdicom.seg.segread(path)
            lungs = _numbers_of_lungs(segmentation.SegmentSequence, path)
            volume = segmentation.get_volume(segment_numbers=list(lungs), combine_segments=True)
        except ScanError:
            raise
        except Exception as problem:  # of what other programs write, highdicom and pydicom raise anything
            found = f"a DICOM segmentation that is no label map of a volume ({' '.join(str(problem).split())[:200]})"
            raise ScanError(path, found) from problem
    numbers = volume.array.T
    labels = np.zeros(numbers.shape, np.uint8, order="F")
    for number, value in lungs.items():
        labels[numbers == number] = value
    grid, warnings = checked_grid(labels.shape, LPS_TO_RAS @ volume.affine[:, [2, 1, 0, 3]], path)
    return Scan(labels, grid, source=str(path), warnings=warnings)


def _numbers_of_lungs(segments: Sequence[Any], path: Path) -> dict[int, int]:
    """The label of each segment that is a lung, by the segment's number."""
    numbers: dict[int, int] = {}
    for lung in LUNGS:
        found = [segment for segment in segments if _is(segment, lung)]
        if len(found) > 1:
            raise ScanError(path, f"{len(found)} segments of the {lung.title}", "one")
        numbers |= {int(segment.SegmentNumber): lung.value for segment in found}
    if not numbers:
        names = ", ".join(str(segment.get("SegmentLabel", "")) for segment in segments)
        expected = f"segments {' and '.join(lung.title for lung in LUNGS)}, by SNOMED CT code or by label"
        raise ScanError(path, f"a DICOM segmentation of neither lung (its segments: {names})", expected)
    return numbers


def _is(segment: Any, lung: Label) -> bool:
    """Whether a segment is that lung: by a code of its own, by those of a lung and of the side, or by its label."""
    from pydicom.sr.coding import Code as DicomCode  # which knows older codes, too, as equal

    def has(items: Sequence[Any], value: str) -> bool:
        codes = [DicomCode(item.get("CodeValue", ""), item.get("CodingSchemeDesignator", ""), "") for item in items]
        return DicomCode(value, "SCT", "") in codes

    kind = segment.get("SegmentedPropertyTypeCodeSequence", None) or []
    sides = [side for item in kind for side in item.get("SegmentedPropertyTypeModifierCodeSequence", None) or []]
    by_code = has(kind, lung.snomed) or (has(kind, LUNG.value) and has(sides, lung.laterality.value))
    return by_code or set(re.findall("[a-z]+", str(segment.get("SegmentLabel", "")).lower())) == {lung.side, "lung"}


def holds(path: Path, labels: npt.NDArray[np.uint8], grid: Grid) -> bool:
    """Whether a file, read back frame by frame, is the label map that `write_segmentation` was given."""
    to_index = np.linalg.inv(_slices_first(grid, 0))
    layers = range(labels.shape[2])
    missing = {(label.value, z) for label in LUNGS for z in layers if (labels[:, :, z] == label.value).any()}
    segmentation = pydicom.dcmread(path)
    packed = np.frombuffer(segmentation.PixelData, np.uint8)
    for number, frame in enumerate(segmentation.PerFrameFunctionalGroupsSequence):
        position = frame.PlanePositionSequence[0].ImagePositionPatient
        index = (to_index @ [*map(float, position), 1])[:3]
        layer = round(index[0])
        value = frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        if layer not in layers or not np.allclose(index, (layer, 0, 0), atol=1e-3):
            return False
        expected = value == labels[:, :, layer].T
        if not np.array_equal(_frame(packed, number, expected.shape), expected):
            return False
        missing.discard((value, layer))
    return not missing


def _frame(packed: npt.NDArray[np.uint8], number: int, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """(rows, columns) of a frame of bits, which lie one behind the other: it may begin inside a byte."""
    count = shape[0] * shape[1]
    start = number * count
    bits = np.unpackbits(packed[start // 8 : -(-(start + count) // 8)], bitorder="little")
    return bits[start % 8 :][:count].reshape(shape)


def is_segmentation(path: Path) -> bool:
    """Whether a file is a DICOM segmentation, which a new one may replace."""
    try:
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=["Modality"])
        return bool(header.get("Modality", "") == "SEG")
    except Exception:  # no DICOM, or so damaged that pydicom raises anything
        return False


def series_of(path: Path) -> str:
    """SeriesInstanceUID of the scan that a segmentation is of; only its header is read.

    Raises:
        ScanError: it is none, or does not say.
    """
    try:
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=["ReferencedSeriesSequence"])
        return str(header.ReferencedSeriesSequence[0].SeriesInstanceUID)
    except Exception as problem:  # a damaged header makes pydicom raise anything
        raise ScanError(path, "not a DICOM segmentation that names its series") from problem


def _headers(series: DicomSeries, spacing_mm: float) -> list[Any]:
    """The series' files in order, without their pixels, as highdicom wants them."""
    headers = []
    with zipfile.ZipFile(series.archive) if series.archive else nullcontext() as archive:
        for name in dict.fromkeys(series.files):  # the frames of an enhanced CT share one
            try:
                with archive.open(name) if archive else Path(name).open("rb") as stream:
                    headers.append(pydicom.dcmread(stream, force=True, stop_before_pixels=True))
            except OSError as problem:
                raise RuntimeError(f"the series cannot be read again: {problem}") from problem
    first = headers[0]
    first.FrameOfReferenceUID = first.get("FrameOfReferenceUID", None) or pydicom.uid.generate_uid()
    for header in headers:
        for keyword in [keyword for keyword in ALIKE if keyword in first]:
            setattr(header, keyword, first.get(keyword))
        _complete(header, spacing_mm)
    return headers


def _complete(header: Any, spacing_mm: float) -> None:
    """Adds what the standard wants and is not there, and empties what breaks it, so that no mask is lost for that.

    highdicom takes the spacing between slices from here, though its volume has one; the header's may be that along
    the table (of a tilted series), or of a series before it was repaired.
    """
    header.decode()
    header.SpecificCharacterSet = "ISO_IR 192"  # UTF-8; of the others highdicom refuses many
    for keyword, checked in MAY_BE_EMPTY.items():
        try:
            checked(value := header.get(keyword, None) or "")
        except ValueError:  # "19XX", which highdicom would refuse
            value = ""
        setattr(header, keyword, value)
    groups = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")  # of an enhanced CT
    frames = [frame for group in groups for frame in header.get(group, [])]
    for measures in (header, *(item for frame in frames for item in frame.get("PixelMeasuresSequence", []))):
        measures.SliceThickness = measures.get("SliceThickness", None) or spacing_mm
        measures.SpacingBetweenSlices = round(spacing_mm, SPACING_DIGITS)


def _slices_first(grid: Grid, first: int) -> Affine:
    """(4, 4) index (slice from ``first`` on, row, column) to LPS+ mm."""
    affine = LPS_TO_RAS @ grid.affine  # its own inverse
    affine[:3, 3] += first * affine[:3, 2]
    return np.asarray(affine[:, [2, 1, 0, 3]])


def _described(label: Label, model: Mapping[str, str], highdicom: Any) -> Any:
    def concept(code: Code) -> Any:
        return highdicom.sr.CodedConcept(code.value, "SCT", code.meaning)

    described = highdicom.seg.SegmentDescription(
        segment_number=label.value,
        segment_label=label.title,
        segmented_property_category=concept(ANATOMICAL_STRUCTURE),
        segmented_property_type=concept(LUNG),
        algorithm_type="AUTOMATIC",
        algorithm_identification=highdicom.AlgorithmIdentificationSequence(
            name="cascadeseg",
            version=__version__,
            family=highdicom.sr.CodedConcept("123110", "DCM", "Artificial Intelligence"),
            parameters={f"model {key}": value for key, value in model.items()} or None,
        ),
        display_color=highdicom.color.CIELabColor.from_rgb(*label.colour),
    )
    kind = described.SegmentedPropertyTypeCodeSequence[0]
    kind.SegmentedPropertyTypeModifierCodeSequence = [concept(label.laterality)]
    return described


@contextmanager
def _quiet_highdicom() -> Iterator[Any]:
    """highdicom, imported here as it takes 0.3 s; it warns of every patient whose name has no caret."""
    with lenient_dicom():
        import highdicom

        yield highdicom
