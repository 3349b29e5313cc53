"""Files of DICOM series that are missing, hidden, linked or malformed: told or read, never passed over."""

from __future__ import annotations

import os
import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import Dataset, dcmread
from pydicom.filebase import DicomBytesIO
from pydicom.filewriter import write_dataset, write_file_meta_info
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

from cascadeseg.errors import ScanError
from cascadeseg.formats import find_scans, read_scan
from cascadeseg.geometry import Box, Grid
from tests.formats.dicom_series import write_series
from tests.formats.test_dicom import GRID, same_in_patient
from tests.formats.volumes import SHAPE, ct_values

UPPER = GRID.cropped(Box((0, 0, 5), SHAPE))


def test_slices_without_a_pixel_spacing_are_told(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID, PixelSpacing=lambda k: "" if k > 6 else ["0.8", "0.75"])
    write_series(tmp_path, ct_values()[..., :2], GRID, name="other{}.dcm", PixelSpacing="")
    scan = read_scan(tmp_path)
    assert np.array_equal(scan.hu(), ct_values()[..., :7])
    first = f"{tmp_path / 'slice008.dcm'}: no PixelSpacing"
    assert scan.warnings[0] == f"left out, though perhaps of the series: 3 CT without a place (the first: {first})"


def test_links_to_nothing_are_told(tmp_path: Path) -> None:
    """As git-annex leaves files that were not fetched."""
    write_series(tmp_path, ct_values(), GRID)
    for k in (8, 9, 10):
        file = tmp_path / f"slice{k:03d}.dcm"
        file.unlink()
        file.symlink_to(tmp_path / "annex" / str(k))
    scan = read_scan(tmp_path)
    first = tmp_path / "slice008.dcm"
    assert scan.warnings[0] == f"left out, though perhaps of the series: 3 links to nothing (the first: {first})"
    assert read_scan(tmp_path / "slice001.dcm").warnings[1:] == scan.warnings


@pytest.mark.parametrize("name", ["slice{:03d}.dcm", "IM{:04d}", "1.2.840.{}.7", "{0:x}f{0:x}e.img"])
@pytest.mark.parametrize(("content", "kind"), [(b"", "of 0 bytes"), (bytes(3000), "not DICOM")])
def test_slices_without_dicom_in_them_are_told(tmp_path: Path, name: str, content: bytes, kind: str) -> None:
    write_series(tmp_path / "s", ct_values(), GRID, name=name)
    first, last = (tmp_path / "s" / name.format(k) for k in (4, 9))
    last.write_bytes(content)
    assert read_scan(tmp_path).warnings[0] == f"left out, though perhaps of the series: 1 {kind} ({last})"
    first.write_bytes(content)
    said = f"left out, though perhaps of the series: 2 {kind} (the first: {first})"
    assert said in read_scan(tmp_path).warnings
    assert said in read_scan(tmp_path / "s" / name.format(1)).warnings


def test_the_last_slice_without_dicom_in_it_is_told_in_a_zip(tmp_path: Path) -> None:
    write_series(tmp_path / "s", ct_values(), GRID)
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        for file in (tmp_path / "s").iterdir():
            archive.writestr(f"ct/{file.name}", b"" if file.name == "slice010.dcm" else file.read_bytes())
    said = "left out, though perhaps of the series: 1 of 0 bytes (ct/slice010.dcm)"
    assert read_scan(tmp_path / "s.zip").warnings[0] == said


def test_other_files_without_dicom_are_not_told(tmp_path: Path) -> None:
    """Neither by their names, nor where another series' slices have such names, nor elsewhere."""
    write_series(tmp_path / "ct", ct_values(), GRID)
    write_series(tmp_path / "ct", ct_values()[..., :4], GRID, name="other{}.dcm")
    for name in ("README.txt", "report1.pdf", "DICOMDIR", "done", ".DS_Store", ".slice011.dcm", "other5.dcm"):
        for content in (b"", b"text" * 99):
            (tmp_path / "ct" / name).write_bytes(content)
            (warning,) = read_scan(tmp_path).warnings
            assert warning.startswith("several CT series")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "slice011.dcm").touch()
    (tmp_path / "slice011.dcm").touch()
    assert len(read_scan(tmp_path).warnings) == 1


def test_linked_folders_are_read_once_and_never_upwards(tmp_path: Path) -> None:
    patient = tmp_path / "patients" / "p1"
    uid = write_series(patient / "a", ct_values()[..., :5], GRID)
    write_series(tmp_path / "elsewhere", ct_values()[..., 5:], UPPER, series_uid=uid)
    write_series(tmp_path / "patients" / "p2", ct_values((20, 20, 20)), GRID)
    (patient / "b").symlink_to(tmp_path / "elsewhere")
    (patient / "again").symlink_to(tmp_path / "elsewhere")
    (patient / "a" / "all").symlink_to(tmp_path / "patients")
    scan = read_scan(patient)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ()


def test_hidden_folders_are_passed_over(tmp_path: Path) -> None:
    write_series(tmp_path / "s", ct_values(), GRID)
    write_series(tmp_path / ".trash" / "s", ct_values((20, 20, 20)), GRID)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ()


def test_an_unreadable_subfolder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = write_series(tmp_path / "a", ct_values()[..., :5], GRID)
    write_series(tmp_path / "b", ct_values()[..., 5:], UPPER, series_uid=uid)
    scandir = os.scandir

    def denied(folder: str) -> Any:
        if str(folder).endswith("b"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ScanError, match=r"b: a folder that cannot be read \(Permission denied\)"):
        read_scan(tmp_path)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (PermissionError(13, "Permission denied"), r"no permission to read it; ask its owner for it"),
        (OSError(5, "Input/output error"), r"cannot be read \(Input/output error\)"),
    ],
)
def test_an_unreadable_slice_is_refused_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: OSError, said: str
) -> None:
    write_series(tmp_path, ct_values(), GRID)
    open_file = Path.open

    def denied(file: Path, *more: Any) -> Any:
        if file.name == "slice004.dcm":
            raise problem
        return open_file(file, *more)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ScanError, match=rf"slice004\.dcm: {said}$"):
        read_scan(tmp_path)


def test_a_file_of_0_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.dcm").touch()
    with pytest.raises(ScanError, match=r"a\.dcm: a file of 0 bytes; expected a DICOM CT series, NIfTI, .* or NRRD$"):
        read_scan(tmp_path / "a.dcm")


@pytest.mark.parametrize("encoding", [ImplicitVRLittleEndian, ExplicitVRLittleEndian, ExplicitVRBigEndian])
def test_files_that_do_not_say_their_encoding(tmp_path: Path, encoding: str) -> None:
    write_series(tmp_path, ct_values(), GRID, encoding=encoding, name="{:03d}")
    for file in tmp_path.iterdir():
        data = dcmread(file)
        del data.file_meta.TransferSyntaxUID
        is_implicit, is_little_endian = data.original_encoding
        data.save_as(file, implicit_vr=is_implicit, little_endian=is_little_endian)
    assert find_scans(tmp_path) == [tmp_path]
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [SHAPE, (120, 100, 10)], ids=str)
@pytest.mark.parametrize("is_implicit", [True, False])
def test_files_that_say_another_encoding_than_theirs(
    tmp_path: Path, is_implicit: bool, shape: tuple[int, int, int]
) -> None:
    true, said = (ImplicitVRLittleEndian, ExplicitVRLittleEndian)[:: 1 if is_implicit else -1]
    write_series(tmp_path, ct_values(shape), Grid(shape, GRID.affine), encoding=true)
    for file in tmp_path.iterdir():
        data = dcmread(file)
        data.file_meta.TransferSyntaxUID = said
        stream = DicomBytesIO()
        stream.write(bytes(128) + b"DICM")
        write_file_meta_info(stream, data.file_meta)
        stream.is_little_endian, stream.is_implicit_VR = True, is_implicit
        write_dataset(stream, data)
        file.write_bytes(stream.getvalue())
    scan = read_scan(tmp_path)
    assert np.array_equal(scan.hu(), ct_values(shape))
    assert scan.warnings == ()


@pytest.mark.parametrize("encoding", [ImplicitVRLittleEndian, ExplicitVRLittleEndian])
@pytest.mark.parametrize("first", ["SpecificCharacterSet", "ImageType", "group length"])
def test_files_without_a_preamble(tmp_path: Path, encoding: str, first: str) -> None:
    tags = {"SpecificCharacterSet": "ISO_IR 100"} if first == "SpecificCharacterSet" else {}
    write_series(tmp_path, ct_values(), GRID, encoding=encoding, name="{:03d}", **tags)
    for file in tmp_path.iterdir():
        is_implicit = encoding == ImplicitVRLittleEndian
        stream = BytesIO()
        data = Dataset(dcmread(file))
        data.save_as(stream, implicit_vr=is_implicit, little_endian=True)
        length = b"\x08\0\0\0" + (b"\4\0\0\0" if is_implicit else b"UL\4\0") + bytes(4)
        file.write_bytes((length if first == "group length" else b"") + stream.getvalue())
    assert find_scans(tmp_path) == [tmp_path]
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)
    assert same_in_patient(read_scan(tmp_path / "003"), ct_values(), GRID)


def spoilt(folder: Path, keyword: str, text: str) -> None:
    """Writes a text of the same length over a tag's value in every file of a folder, whatever the standard says."""
    for file in folder.iterdir():
        data = dcmread(file)
        placeholder = "9" * (len(text) - len(text) % 2 + 2 * (len(text) % 2))
        setattr(data, keyword, placeholder)
        data.save_as(file)
        content = file.read_bytes()
        assert content.count(placeholder.encode()) == 1
        file.write_bytes(content.replace(placeholder.encode(), text.ljust(len(placeholder)).encode()))


@pytest.mark.parametrize("keyword", ["SeriesNumber", "InstanceNumber", "AcquisitionNumber"])
@pytest.mark.parametrize("text", ["A1234567", "1.500000"])
def test_numbers_that_are_none_cost_nothing(tmp_path: Path, keyword: str, text: str) -> None:
    write_series(tmp_path, ct_values(), GRID)
    spoilt(tmp_path, keyword, text)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ()


@pytest.mark.parametrize(
    ("keyword", "text", "kind"),
    [
        ("PixelSpacing", "0,80\\0,75", "CT without a place"),
        ("PixelSpacing", "nan\\0.75", "CT without a place"),
        ("RescaleSlope", "1,0000000000", "damaged DICOM"),
        ("RescaleIntercept", "-1024.0 HU", "damaged DICOM"),
    ],
)
def test_values_that_are_no_numbers_are_named(tmp_path: Path, keyword: str, text: str, kind: str) -> None:
    write_series(tmp_path, ct_values(), GRID)
    spoilt(tmp_path, keyword, text)
    value = re.escape(text.split("\\")[0])
    said = rf"no CT slices; found 10 {kind} \(the first: .*slice001.dcm: {keyword} .*{value}.*\); expected a CT series"
    with pytest.raises(ScanError, match=said):
        read_scan(tmp_path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ({"ImageOrientationPatient": [1, 0, 0, 0, 1]}, "ImageOrientationPatient of 5 values, not 6"),
        ({"ImageOrientationPatient": [0, 0, 0, 0, 0, 0]}, "ImageOrientationPatient 0, 0, 0, 0, 0, 0"),
        ({"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]}, "ImageOrientationPatient 1, 0, 0, 1, 0, 0"),
        ({"ImagePositionPatient": [0, 0]}, "ImagePositionPatient of 2 values, not 3"),
        ({"PixelSpacing": "0.75"}, "PixelSpacing of 1 values, not 2"),
    ],
)
def test_a_picture_without_a_true_place_costs_itself_alone(tmp_path: Path, tags: dict[str, Any], said: str) -> None:
    uid = write_series(tmp_path, ct_values(), GRID)
    write_series(tmp_path, ct_values()[..., :1], GRID, series_uid=uid, name="odd.dcm", **tags)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    first = f"{tmp_path / 'odd.dcm'}: {said}"
    assert scan.warnings == (f"left out, though perhaps of the series: 1 CT without a place ({first})",)


@pytest.mark.parametrize("cosines", [[1.08, 0, 0, 0, 1, 0], [0.97, 0, 0, 0, 0.97, 0]])
def test_direction_cosines_of_another_length_scale_no_voxel(tmp_path: Path, cosines: list[float]) -> None:
    write_series(tmp_path, ct_values(), GRID, ImageOrientationPatient=cosines)
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)
