"""DICOM segmentations: highdicom as reader, every voxel where it was, references to the slices, refusals."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import highdicom
import numpy as np
import numpy.typing as npt
import pydicom
import pytest

from cascadeseg._version import __version__
from cascadeseg.errors import OutputError, ScanError
from cascadeseg.formats import check_writable, find_scans, read_labels, read_scan, write_labels, write_scan
from cascadeseg.formats.dicom_seg import MAY_BE_EMPTY, holds
from cascadeseg.geometry import Grid, canonical_view
from tests.formats.dicom_series import write_enhanced, write_series
from tests.formats.volumes import ORIENTATIONS, SHAPE, affine_of, ct_values, oblique_grid, rotation

pytestmark = pytest.mark.filterwarnings("ignore:The string .* is unlikely:UserWarning")

LPS = np.array([-1.0, -1.0, 1.0])


def lung_labels(shape: tuple[int, int, int] = SHAPE) -> npt.NDArray[np.uint8]:
    """Two lungs of unlike shape, neither in the first slice nor in the last."""
    labels = np.zeros(shape, np.uint8, order="F")
    labels[1:5, 2:9, 2:-2] = 1
    labels[7:11, 3:12, 1:-3] = 2
    labels[4, 5, 3] = 2
    return labels


def places(labels: npt.NDArray[Any], affine: npt.NDArray[np.float64], value: int) -> npt.NDArray[np.float64]:
    """(n, 3) mm: the voxels of a label, sorted."""
    points = np.argwhere(labels == value) @ affine[:3, :3].T + affine[:3, 3]
    return points[np.lexsort(points.round(2).T)]


def check_places(path: Path, labels: npt.NDArray[np.uint8], grid: Grid) -> Any:
    """That a segmentation, read by highdicom, has every voxel of the labels at its place, and no others."""
    segmentation = highdicom.seg.segread(path)
    volume = segmentation.get_volume(combine_segments=True, allow_missing_positions=True)
    for value in (1, 2):
        there, meant = places(volume.array, volume.affine, value), places(labels, grid.affine, value) * LPS
        assert there.shape == meant.shape
        assert np.allclose(there, meant[np.lexsort(meant.round(2).T)], atol=2e-3)
    return segmentation


@pytest.mark.parametrize("directions", [*ORIENTATIONS[::7], rotation(12, -7, 20)])
def test_every_voxel_is_at_its_place_and_every_frame_names_its_slice(tmp_path: Path, directions: Any) -> None:
    write_series(tmp_path / "ct", ct_values(), Grid(SHAPE, affine_of(directions)), SeriesNumber=3)
    scan = read_scan(tmp_path / "ct")
    labels = lung_labels()
    write_labels(labels, tmp_path / "lungs.dcm", scan)
    segmentation = check_places(tmp_path / "lungs.dcm", labels, scan.grid)
    slices = [pydicom.dcmread(file) for file in (tmp_path / "ct").iterdir()]
    positions = {slice_.SOPInstanceUID: list(map(float, slice_.ImagePositionPatient)) for slice_ in slices}
    assert len(segmentation.PerFrameFunctionalGroupsSequence) == 6 + 6
    for frame in segmentation.PerFrameFunctionalGroupsSequence:
        named = frame.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        assert np.allclose(positions[named], list(map(float, frame.PlanePositionSequence[0].ImagePositionPatient)))
    assert segmentation.StudyInstanceUID == slices[0].StudyInstanceUID
    assert segmentation.SeriesInstanceUID != slices[0].SeriesInstanceUID
    assert segmentation.SeriesNumber == 1003
    assert segmentation.PatientID == "0"


def test_what_the_segments_are(tmp_path: Path) -> None:
    write_series(tmp_path / "ct", ct_values(), oblique_grid(), FrameOfReferenceUID="1.2.840.77")
    model = {"name": "Modell für uns", "version": "7", "sha256": "ab" * 32}
    write_labels(lung_labels(), tmp_path / "lungs.dcm", read_scan(tmp_path / "ct"), model)
    segmentation = highdicom.seg.segread(tmp_path / "lungs.dcm")
    assert (segmentation.Modality, segmentation.SegmentationType) == ("SEG", "BINARY")
    assert segmentation.FrameOfReferenceUID == "1.2.840.77"
    right, left = segmentation.SegmentSequence
    for segment, number, title, side in ((right, 1, "right lung", "Right"), (left, 2, "left lung", "Left")):
        kind = segment.SegmentedPropertyTypeCodeSequence[0]
        assert (segment.SegmentNumber, segment.SegmentLabel, segment.SegmentAlgorithmType) == (
            number,
            title,
            "AUTOMATIC",
        )
        assert (kind.CodeValue, kind.CodingSchemeDesignator) == ("39607008", "SCT")
        assert kind.SegmentedPropertyTypeModifierCodeSequence[0].CodeMeaning == side
        algorithm = segment.SegmentationAlgorithmIdentificationSequence[0]
        assert (algorithm.AlgorithmName, algorithm.AlgorithmVersion) == ("cascadeseg", __version__)
        assert algorithm.AlgorithmParameters == f"model name=Modell für uns,model version=7,model sha256={'ab' * 32}"


@pytest.mark.parametrize("kind", ["zip", "enhanced", "a missing slice", "tilted"])
def test_of_every_kind_of_series(tmp_path: Path, kind: str) -> None:
    grid, folder = oblique_grid(), tmp_path / "ct"
    if kind == "enhanced":
        write_enhanced(folder / "ct.dcm", ct_values(), grid)
    else:
        more: dict[str, Any] = {"a missing slice": {"leave_out": [4]}, "tilted": {"shift_mm": (0, 0.7, 0)}}.get(
            kind, {}
        )
        write_series(folder, ct_values(), grid, **more)
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "ct.zip", "w") as archive:
            for file in sorted(folder.iterdir()):
                archive.write(file, f"DICOM/{file.name}")
        shutil.rmtree(folder)
        folder = tmp_path / "ct.zip"
    scan = read_scan(folder)
    labels = lung_labels(scan.grid.shape)
    write_labels(labels, tmp_path / "lungs.dcm", scan)
    segmentation = check_places(tmp_path / "lungs.dcm", labels, scan.grid)
    named = [
        image
        for frame in segmentation.PerFrameFunctionalGroupsSequence
        for derivation in frame.get("DerivationImageSequence", [])
        for image in derivation.SourceImageSequence
    ]
    in_their_slices = {image.SpatialLocationsPreserved == "YES" for image in named}
    assert in_their_slices == {"zip": {True}, "enhanced": {True}, "a missing slice": set(), "tilted": {False}}[kind]
    assert len(segmentation.ReferencedSeriesSequence) == 1


@pytest.mark.parametrize("said_mm", [2.5, 5, 0, None])
@pytest.mark.parametrize("kind", ["upright", "tilted", "uneven"])
def test_the_frames_lie_as_far_apart_as_the_header_says(tmp_path: Path, kind: str, said_mm: float | None) -> None:
    """Scanners write the spacing along the table, whatever the tilt, and some another; readers trust it."""
    tags: dict[str, Any] = {"SpacingBetweenSlices": said_mm}
    if kind == "tilted":
        cosine, sine = np.cos(np.radians(15)), np.sin(np.radians(15))
        tags["ImageOrientationPatient"] = [1, 0, 0, 0, f"{cosine:.12f}", f"{-sine:.12f}"]
    if kind == "uneven":
        heights = np.array([0, 2.5, 5, 7.5, 10, 11.5, 13, 15, 17.5, 20.0])
        tags["ImagePositionPatient"] = lambda k: [31.5, -12.25, -140 + heights[k]]
    write_series(tmp_path / "ct", ct_values(), Grid(SHAPE, affine_of(np.diag([-1, -1, 1]))), **tags)
    scan = read_scan(tmp_path / "ct")
    labels = lung_labels(scan.grid.shape)
    write_labels(labels, tmp_path / "lungs.dcm", scan)
    volume = highdicom.seg.segread(tmp_path / "lungs.dcm").get_volume(combine_segments=True)
    spacing = 2.5 * np.cos(np.radians(15)) if kind == "tilted" else 2.5
    assert volume.spacing_between_slices == pytest.approx(spacing, abs=1e-5)
    for value in (1, 2):
        there, meant = places(volume.array, volume.affine, value), places(labels, scan.grid.affine, value) * LPS
        assert there.shape == meant.shape
        assert np.allclose(there, meant[np.lexsort(meant.round(2).T)], atol=2e-3)
    (measures,) = pydicom.dcmread(tmp_path / "lungs.dcm").SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    assert measures.SpacingBetweenSlices == pytest.approx(spacing, abs=1e-5)


@pytest.mark.parametrize("kind", ["oblique", "enhanced", "a missing slice", "tilted", "one slice", "no lung"])
def test_read_labels_reads_what_was_written(tmp_path: Path, kind: str) -> None:
    """On the grid of its frames, from the first slice with lung to the last."""
    grid, path = Grid(SHAPE, affine_of(rotation(12, -7, 20) @ np.diag([-1, 1, -1]))), tmp_path / "lungs.dcm"
    if kind == "enhanced":
        write_enhanced(tmp_path / "ct" / "ct.dcm", ct_values(), grid)
    else:
        more: dict[str, Any] = {"a missing slice": {"leave_out": [4]}, "tilted": {"shift_mm": (0, 0.7, 0)}}
        write_series(tmp_path / "ct", ct_values(), grid, **more.get(kind, {}))
    scan = read_scan(tmp_path / "ct")
    labels = lung_labels(scan.grid.shape)
    with_lung = {"one slice": [3], "no lung": []}.get(kind, [2, 3, 5, 6])  # not the one between, so without a frame
    labels[:, :, np.setdiff1d(range(labels.shape[2]), with_lung)] = 0
    write_labels(labels, path, scan)
    read = check_cut(path, labels, scan.grid)
    assert read.shape == (*scan.grid.shape[:2], max(with_lung, default=0) - min(with_lung, default=0) + 1)


def check_cut(path: Path, labels: npt.NDArray[np.uint8], grid: Grid) -> npt.NDArray[Any]:
    """That `read_labels` gives a part of a label map that holds all that is not 0; gives the part as it was read."""
    read, there = read_labels(path)
    box = there.canonical().box_in(grid.canonical(), 2e-3)
    assert box is not None
    assert read.dtype == np.uint8
    assert np.array_equal(canonical_view(read, there), canonical_view(labels, grid)[box.slices])
    assert np.count_nonzero(read) == np.count_nonzero(labels)
    return read


def write_of_others(path: Path, kind: str, segments: dict[str, tuple[str, ...]], **more: Any) -> npt.NDArray[np.uint8]:
    """Writes a segmentation as other programs do: boxes numbered in an order of their own; gives the label map.

    Args:
        path: of the segmentation; the series lies beside it.
        kind: its SegmentationType.
        segments: by label the SNOMED CT codes of what it is, and of the side.
        more: for highdicom.
    """
    empty = dict.fromkeys(MAY_BE_EMPTY.keys() - {"PatientID", "PatientName"}, "")
    write_series(path.parent / "ct", ct_values(), oblique_grid(), FrameOfReferenceUID="1.2.3.4", **empty)
    sources = [pydicom.dcmread(file) for file in sorted((path.parent / "ct").iterdir())]
    numbers = np.zeros(SHAPE, np.uint8)
    descriptions = []
    for number, (label, (kind_code, *side)) in enumerate(segments.items(), 1):
        numbers[3 * number - 2 : 3 * number, 3:8, 2 + number : 8] = number
        concept = highdicom.sr.CodedConcept(kind_code, "SCT", "what it is")
        description = highdicom.seg.SegmentDescription(
            number, label, highdicom.sr.CodedConcept("123037004", "SCT", "structure"), concept, "MANUAL"
        )
        sides = [highdicom.sr.CodedConcept(code, "SCT", "side") for code in side]
        description.SegmentedPropertyTypeCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence = sides
        descriptions.append(description)
    highdicom.seg.Segmentation(
        sources, more.pop("pixels", numbers.T), kind, descriptions, highdicom.UID(), 7, highdicom.UID(), 1,
        "someone", "something", "1", "0", **more,
    ).save_as(path)  # fmt: skip
    return numbers


LUNG_CODE, RIGHT_CODE, LEFT_CODE, HEART_CODE = "39607008", "24028007", "7771000", "80891009"


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
@pytest.mark.parametrize(
    ("segments", "values"),
    [
        ({"B": (LUNG_CODE, LEFT_CODE), "H": (HEART_CODE,), "A": (LUNG_CODE, RIGHT_CODE)}, [0, 2, 0, 1]),
        ({"A": ("44029006",), "B": ("3341006",)}, [0, 2, 1]),
        ({"Lung, Left": ("85756007",), "right_lung": ("85756007",), "left": (HEART_CODE, LEFT_CODE)}, [0, 2, 1, 0]),
        ({"Heart": (HEART_CODE,), "Left lung": (LUNG_CODE, LEFT_CODE)}, [0, 0, 2]),
    ],
)  # fmt: skip
def test_lungs_of_other_programs_are_known_by_code_or_label(
    tmp_path: Path, kind: str, segments: dict[str, tuple[str, ...]], values: list[int]
) -> None:
    numbers = write_of_others(tmp_path / "others", kind, segments)
    meant = np.array(values, np.uint8)[numbers]
    assert check_cut(tmp_path / "others", meant, read_scan(tmp_path / "ct").grid).any()


def test_segmentations_that_are_no_lungs_or_no_label_map(tmp_path: Path) -> None:
    path = tmp_path / "others.dcm"
    write_of_others(path, "BINARY", {"Heart": (HEART_CODE,), "Lungs": (LUNG_CODE,)})
    expected = r"expected segments right lung and left lung, by SNOMED CT code or by label$"
    with pytest.raises(ScanError, match=r"dcm: a DICOM segmentation of neither lung \(.*: Heart, Lungs\); " + expected):
        read_labels(path)
    write_of_others(path, "BINARY", {"Right lung": (HEART_CODE,), "A": (LUNG_CODE, RIGHT_CODE)})
    with pytest.raises(ScanError, match=r"dcm: 2 segments of the right lung; expected one$"):
        read_labels(path)
    half = np.full((*SHAPE[::-1], 1), 0.5, np.float32)
    write_of_others(path, "FRACTIONAL", {"Right lung": (LUNG_CODE,)}, pixels=half, fractional_type="PROBABILITY")
    with pytest.raises(ScanError, match=r"dcm: a DICOM segmentation that is no label map of a volume \(.*FRACTIONAL"):
        read_labels(path)
    both = np.ones((*SHAPE[::-1], 2), np.uint8)
    write_of_others(path, "BINARY", {"Right lung": (LUNG_CODE,), "Left lung": (LUNG_CODE,)}, pixels=both)
    with pytest.raises(ScanError, match=r"dcm: a DICOM segmentation that is no label map of a volume \(.*overlap"):
        read_labels(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ScanError, match=r"others\.dcm: "):
        read_labels(path)
    with pytest.raises(ScanError, match=r"slice003\.dcm: DICOM; expected a label map in one of .*, or a DICOM segment"):
        read_labels(tmp_path / "ct" / "slice003.dcm")


def test_frames_that_begin_inside_a_byte_and_a_single_one(tmp_path: Path) -> None:
    shape = (13, 15, 10)
    write_series(tmp_path / "ct", ct_values(shape), Grid(shape, affine_of()))
    scan = read_scan(tmp_path / "ct")
    labels = lung_labels(shape)
    single = np.zeros_like(labels)
    single[3, 2, -1] = 1
    for number, meant in enumerate((labels, single)):
        write_labels(meant, tmp_path / f"{number}.dcm", scan)
        check_places(tmp_path / f"{number}.dcm", meant, scan.grid)
        other = meant.copy()
        other[12, 14, 4 if number == 0 else 9] = 1
        assert not holds(tmp_path / f"{number}.dcm", other, scan.grid)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ({"PatientBirthDate": "19XX", "StudyDate": "2007-04-04", "StudyTime": "25:61", "PatientSex": "male"}, ""),
        ({"PatientName": None, "PatientID": None, "SliceThickness": None}, ""),
        ({"StudyID": "x" * 20, "AccessionNumber": "1" * 30, "PatientID": "p" * 80}, None),
        ({"SpecificCharacterSet": "ISO_IR 192", "PatientName": "山田^太郎", "StudyDate": "20070404"}, None),
        ({"SpecificCharacterSet": ["", "ISO 2022 IR 87"], "PatientName": "Yamada^Tarou=山田^太郎"}, None),
        ({"SpecificCharacterSet": "ISO-8859-1", "PatientName": "Müller"}, None),
        ({"SeriesNumber": (1 << 31) - 2}, (1 << 31) - 1),
        ({"FrameOfReferenceUID": lambda k: f"1.2.{k + 3}"}, "1.2.3"),
        ({"StudyInstanceUID": lambda k: f"1.2.{k + 3}"}, "1.2.3"),
        ({"ImageOrientationPatient": lambda k: ["1", "0", "0", "0", "1", f"{4e-4 * (k % 2)}"]}, None),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_headers_that_break_the_fine_print(tmp_path: Path, tags: dict[str, Any], expected: Any) -> None:
    settings = pydicom.config.settings
    settings.reading_validation_mode, before = pydicom.config.IGNORE, settings.reading_validation_mode
    try:
        write_series(tmp_path / "ct", ct_values(), oblique_grid(), **tags)
    finally:
        settings.reading_validation_mode = before
    scan = read_scan(tmp_path / "ct")
    labels = lung_labels(scan.grid.shape)
    write_labels(labels, tmp_path / "lungs.dcm", scan)
    segmentation = check_places(tmp_path / "lungs.dcm", labels, scan.grid)
    for tag in set(tags) - {"SliceThickness", "ImageOrientationPatient"}:
        said = "ISO_IR 192" if tag == "SpecificCharacterSet" else tags[tag] if expected is None else expected
        assert segmentation[tag].value == said


def test_slices_without_a_uid_of_their_own_are_no_segmentations_source(tmp_path: Path) -> None:
    write_series(tmp_path / "ct", ct_values(), oblique_grid(), SOPInstanceUID="1.2.3.4")
    scan = read_scan(tmp_path / "ct")
    with pytest.raises(OutputError, match=r"its slices lack SOPInstanceUIDs of their own, .*; choose another format"):
        write_labels(lung_labels(scan.grid.shape), tmp_path / "lungs.dcm", scan)
    assert not (tmp_path / "lungs.dcm").exists()


@pytest.mark.parametrize("values", [(), (1,), (2,)])
def test_scans_without_a_lung(tmp_path: Path, values: tuple[int, ...]) -> None:
    write_series(tmp_path / "ct", ct_values(), oblique_grid())
    scan = read_scan(tmp_path / "ct")
    labels = np.where(np.isin(lung_labels(), values), lung_labels(), np.uint8(0)).astype(np.uint8)
    write_labels(labels, tmp_path / "lungs.dcm", scan)
    segmentation = check_places(tmp_path / "lungs.dcm", labels, scan.grid)
    assert len(segmentation.SegmentSequence) == 2


def test_what_is_read_back_is_compared(tmp_path: Path) -> None:
    write_series(tmp_path / "ct", ct_values(), oblique_grid())
    scan, labels = read_scan(tmp_path / "ct"), lung_labels()
    path = tmp_path / "lungs.dcm"
    write_labels(labels, path, scan)
    assert holds(path, labels, scan.grid)
    for voxel, value in (((4, 5, 3), 0), ((6, 6, 6), 1), ((0, 0, 0), 2)):
        other = labels.copy()
        other[voxel] = value
        assert not holds(path, other, scan.grid)
    moved = scan.grid.affine.copy()
    moved[:3, 3] += 0.1
    assert not holds(path, labels, Grid(scan.grid.shape, moved))


def test_refusals(tmp_path: Path) -> None:
    write_scan(ct_values(), oblique_grid(), tmp_path / "ct.nii.gz")
    with pytest.raises(OutputError, match=r"lungs\.dcm: a DICOM segmentation, and its scan is not DICOM; expected the"):
        write_labels(lung_labels(), tmp_path / "lungs.dcm", read_scan(tmp_path / "ct.nii.gz"))
    with pytest.raises(OutputError, match=r"ct\.dcm: a scan as \.dcm; expected one of \.nii\.gz"):
        write_scan(ct_values(), oblique_grid(), tmp_path / "ct.dcm")
    write_series(tmp_path / "ct", ct_values(), oblique_grid())
    scan = read_scan(tmp_path / "ct")
    shutil.rmtree(tmp_path / "ct")
    with pytest.raises(OutputError, match=r"lungs\.dcm: cannot be written \(the series cannot be read again: .*slice"):
        write_labels(lung_labels(), tmp_path / "lungs.dcm", scan)
    write_series(tmp_path / "ct", ct_values(), oblique_grid(), StudyInstanceUID=None)
    with pytest.raises(
        OutputError, match=r"cannot be written \(no DICOM segmentation of this series can be made: .*St"
    ):
        write_labels(lung_labels(), tmp_path / "lungs.dcm", read_scan(tmp_path / "ct"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ct", "ct.nii.gz"]


def test_only_a_segmentation_is_overwritten(tmp_path: Path) -> None:
    write_series(tmp_path / "ct", ct_values(), oblique_grid())
    scan = read_scan(tmp_path / "ct")
    slice_ = tmp_path / "ct" / "slice003.dcm"
    before = slice_.read_bytes()
    with pytest.raises(OutputError, match=r"slice003\.dcm: a file that is no DICOM segmentation; choose another name"):
        check_writable(slice_)
    with pytest.raises(OutputError, match="no DICOM segmentation; choose"):
        write_labels(lung_labels(), slice_, scan)
    assert slice_.read_bytes() == before
    (tmp_path / "other.dcm").write_bytes(b"text")
    with pytest.raises(OutputError, match="no DICOM segmentation; choose"):
        check_writable(tmp_path / "other.dcm")
    for _ in range(2):
        check_writable(tmp_path / "lungs.dcm")
        write_labels(lung_labels(), tmp_path / "lungs.dcm", scan)


def test_segmentations_beside_and_among_slices_are_no_scans(tmp_path: Path) -> None:
    for name in ("p1", "p2"):
        write_series(tmp_path / name, ct_values(), oblique_grid(), study_uid=f"1.2.{name[1]}")
        write_labels(lung_labels(), tmp_path / f"{name}_lungs.dcm", read_scan(tmp_path / name))
    assert find_scans(tmp_path) == [tmp_path / "p1", tmp_path / "p2"]
    before = read_scan(tmp_path / "p1")
    write_labels(lung_labels(), tmp_path / "p1" / "any name.dcm", before)
    after = read_scan(tmp_path / "p1")
    assert np.array_equal(after.voxels, before.voxels)
    assert after.warnings == before.warnings
