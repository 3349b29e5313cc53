"""DICOM series: every voxel where the scanner had it, whatever folders hold besides and series lack."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import SimpleITK
from pydicom import FileDataset, dcmread
from pydicom.data import get_testdata_file
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGLosslessSV1,
    JPEGLSLossless,
    MediaStorageDirectoryStorage,
    RLELossless,
    generate_uid,
)

from cascadeseg.errors import ScanError
from cascadeseg.formats import Scan, dicom_pixels, find_scans, read_scan, scan_of, write_labels
from cascadeseg.formats.dicom import series_of_slices
from cascadeseg.formats.dicom_files import lenient_dicom
from cascadeseg.formats.scan import DicomSeries
from cascadeseg.geometry import Box, Grid
from tests.formats.dicom_series import write_enhanced, write_series
from tests.formats.volumes import ORIENTATIONS, SHAPE, affine_of, ct_values, oblique_grid, rotation

GRID = Grid(SHAPE, affine_of(np.diag([-1, -1, 1])))
"""As scanners store an axial slice: rows to the patient's left, columns to the back, slices to the head."""


def same_in_patient(scan: Scan, hu: np.ndarray, grid: Grid) -> bool:
    """Whether every voxel of ``hu`` on ``grid`` is in the scan, at its place, whatever the order of the slices."""
    places = np.argwhere(np.ones(SHAPE, bool))
    there = scan.grid.index(grid.world(places))
    if np.abs(there - np.rint(there)).max() > 1e-3 or scan.grid.shape != grid.shape:
        return False
    return np.array_equal(scan.hu()[tuple(np.rint(there).astype(int).T)], hu.ravel())


@pytest.mark.parametrize("directions", [*ORIENTATIONS, rotation(7, -12, 15), rotation(80, 3, 5)])
def test_every_orientation(tmp_path: Path, directions: np.ndarray) -> None:
    grid = Grid(SHAPE, affine_of(directions))
    write_series(tmp_path, ct_values(), grid)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), grid)
    assert scan.warnings == ()


def test_itks_own_series_reader_agrees(tmp_path: Path) -> None:
    grid = Grid(SHAPE, affine_of(rotation(7, -12, 15) @ np.diag([-1, -1, 1])))
    write_series(tmp_path, ct_values(), grid)
    reader = SimpleITK.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(tmp_path)))
    oracle = scan_of(reader.Execute())
    scan = read_scan(tmp_path)
    assert np.array_equal(scan.hu(), oracle.hu())
    assert scan.grid.matches(oracle.grid, 1e-3)


@pytest.mark.parametrize(
    "encoding",
    [
        ImplicitVRLittleEndian,
        ExplicitVRLittleEndian,
        ExplicitVRBigEndian,
        DeflatedExplicitVRLittleEndian,
        RLELossless,
        JPEGLSLossless,
    ],
)
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_every_encoding(tmp_path: Path, encoding: Any, signed: bool) -> None:
    write_series(tmp_path, ct_values(), GRID, encoding=encoding, signed=signed)
    scan = read_scan(tmp_path)
    assert scan.voxels.dtype == (np.int16 if signed else np.uint16)
    assert same_in_patient(scan, ct_values(), GRID)


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("no decoder")


@pytest.mark.parametrize("encoding", [RLELossless, JPEGLSLossless])
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_what_pydicom_cannot_decode_is_decoded_by_gdcm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: Any, signed: bool
) -> None:
    write_series(tmp_path, ct_values(), GRID, encoding=encoding, signed=signed)
    monkeypatch.setattr(dicom_pixels, "pixel_array", broken)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert (scan.voxels.dtype, scan.intercept) == ((np.int16, 0.0) if signed else (np.uint16, -1024.0))


def test_lossless_jpeg(tmp_path: Path) -> None:
    """GDCM's own writing of it, which keeps neither place nor scale."""
    write_series(tmp_path, ct_values(), GRID)
    for file in tmp_path.iterdir():
        writer = SimpleITK.ImageFileWriter()
        writer.UseCompressionOn()
        writer.SetCompressor("JPEG")
        data = dcmread(file)
        writer.Execute(SimpleITK.GetImageFromArray(data.pixel_array[None]), str(tmp_path / "jpeg.dcm"), True, -1)
        jpeg = dcmread(tmp_path / "jpeg.dcm")
        data.PixelData, data.file_meta.TransferSyntaxUID = jpeg.PixelData, jpeg.file_meta.TransferSyntaxUID
        data["PixelData"].is_undefined_length = True
        data.save_as(file)
        (tmp_path / "jpeg.dcm").unlink()
    assert data.file_meta.TransferSyntaxUID == JPEGLosslessSV1
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)


def test_jpeg_of_twelve_bits(tmp_path: Path) -> None:
    """pydicom has a decoder for it (Pillow), which decodes 8 bits only."""
    picture = dcmread(str(get_testdata_file("JPEG-lossy.dcm", download=False)))
    values = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(picture.filename)))[0]
    grid = Grid((*values.T.shape, 3), GRID.affine)
    jpeg = {key: picture[key].value for key in ("PixelData", "BitsStored", "HighBit", "PixelRepresentation")}
    write_series(tmp_path, np.zeros(grid.shape, int), grid)
    for file in tmp_path.iterdir():
        data = dcmread(file)
        for key, value in jpeg.items():
            setattr(data, key, value)
        data.file_meta.TransferSyntaxUID = picture.file_meta.TransferSyntaxUID
        data["PixelData"].is_undefined_length = True
        data.save_as(file)
    scan = read_scan(tmp_path)
    assert np.array_equal(scan.voxels, np.repeat(values.T[..., None], 3, axis=2))


def changed_words(folder: Path, change: Callable[[np.ndarray], np.ndarray], **tags: int) -> None:
    """Changes the 16-bit words of every picture in a folder."""
    for file in folder.iterdir():
        data = dcmread(file)
        data.PixelData = change(np.frombuffer(data.PixelData, "<u2")).astype("<u2").tobytes()
        for keyword, value in tags.items():
            setattr(data, keyword, value)
        data.save_as(file)


def test_an_overlay_beside_the_stored_bits_is_no_value(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID)
    changed_words(tmp_path, lambda words: np.where(np.arange(len(words)) % 7, words, words | 0x9000))
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)


def test_values_in_the_upper_bits(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID)
    changed_words(tmp_path, lambda words: words << 4 | 5, HighBit=15)
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)


@pytest.mark.parametrize("kept", [0x0FFF, 0xFFFF], ids=["no sign beside them", "sign beside them"])
def test_signed_values_of_twelve_bits(tmp_path: Path, kept: int) -> None:
    write_series(tmp_path, ct_values(), GRID, signed=True, PixelPaddingValue=int(ct_values().min()))
    changed_words(tmp_path, lambda words: words & kept, BitsStored=12, HighBit=11)
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)


@pytest.mark.parametrize(
    "encoding", [ImplicitVRLittleEndian, ExplicitVRLittleEndian, DeflatedExplicitVRLittleEndian, RLELossless]
)
def test_padding_beside_the_stored_bits_is_air(tmp_path: Path, encoding: str) -> None:
    hu = ct_values()
    hu[:3], hu[3, 3] = -1024, 63536 % 4096 - 1024  # what is left of that padding in the stored bits is bone
    plain = encoding if encoding == ImplicitVRLittleEndian else ExplicitVRLittleEndian
    write_series(tmp_path, hu, GRID, encoding=plain, PixelPaddingValue=63536)
    changed_words(tmp_path, lambda words: np.where(words == 0, 63536, words))
    if encoding != plain:
        encoded(tmp_path, encoding)
    assert same_in_patient(read_scan(tmp_path), hu, GRID)


@pytest.mark.parametrize("encoding", [DeflatedExplicitVRLittleEndian, RLELossless])
def test_packed_values_in_the_upper_bits(tmp_path: Path, encoding: str) -> None:
    write_series(tmp_path, ct_values(), GRID)
    changed_words(tmp_path, lambda words: words << 4 | 5, HighBit=15)
    encoded(tmp_path, encoding)
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)


def encoded(folder: Path, encoding: str) -> None:
    """Packs every picture in a folder, whatever its words hold."""
    for file in folder.iterdir():
        data = dcmread(file)
        if encoding == RLELossless:
            bits = data.BitsStored, data.HighBit
            data.BitsStored, data.HighBit = 16, 15  # else pydicom refuses to write what lies beside the stored bits
            data.compress(encoding, generate_instance_uid=False)
            data.BitsStored, data.HighBit = bits
        data.file_meta.TransferSyntaxUID = encoding
        data.save_as(file)


def test_pixels_that_nothing_can_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_series(tmp_path, ct_values(), GRID, encoding=JPEGLSLossless)
    for file in tmp_path.iterdir():
        data = dcmread(file)
        data.PixelData = encapsulate([bytes(100)])
        data.save_as(file)
    with pytest.raises(ScanError, match=r"pixels that cannot be decoded \(JPEG-LS Lossless.*: .+\); decompress"):
        read_scan(tmp_path)


def test_nested_folders_names_without_a_suffix_and_other_files(tmp_path: Path) -> None:
    uid = generate_uid()
    write_series(tmp_path / "ä ö" / "DISK1", ct_values()[..., :6], GRID, series_uid=uid, name="IM{:04d}")
    upper = GRID.cropped(Box((0, 0, 6), SHAPE))
    write_series(tmp_path / "ä ö" / "DISK2", ct_values()[..., 6:], upper, series_uid=uid, name="IM{:04d}")
    (tmp_path / "ä ö" / "README.txt").write_text("from the archive", encoding="utf-8")
    (tmp_path / ".DS_Store").write_bytes(bytes(200))
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)


def test_a_zip(tmp_path: Path) -> None:
    write_series(tmp_path / "series", ct_values(), GRID)
    with zipfile.ZipFile(tmp_path / "scan.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in (tmp_path / "series").iterdir():
            archive.write(file, f"folder/{file.name}")
        archive.writestr("folder/notes.txt", "hello")
    assert same_in_patient(read_scan(tmp_path / "scan.zip"), ct_values(), GRID)
    whole = (tmp_path / "scan.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ScanError, match="a damaged zip file, or none; expected a zip of DICOM files"):
        read_scan(tmp_path / "cut.zip")


def test_a_zip_of_one_slice_is_not_sought_beside_it(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID)
    with zipfile.ZipFile(tmp_path / "scan.zip", "w") as archive:
        archive.write(tmp_path / "slice003.dcm", "slice003.dcm")
    with pytest.raises(ScanError, match=r"scan\.zip: single CT pictures, no two of which make a volume"):
        read_scan(tmp_path / "scan.zip")


def test_zips_without_dicom(tmp_path: Path) -> None:
    def zipped(*names: str) -> Path:
        with zipfile.ZipFile(tmp_path / "scan.zip", "w") as archive:
            for name in names:
                archive.writestr(name, "x")
        return tmp_path / "scan.zip"

    with pytest.raises(ScanError, match=r"scan\.zip: an empty zip; expected a zip of DICOM files$"):
        read_scan(zipped())
    with pytest.raises(ScanError, match=r"scan\.zip: a zip without DICOM; expected a zip of a DICOM series$"):
        read_scan(zipped("notes.txt"))
    remedy = r"unpack it and give what is in it, such as p1/ct\.nii\.gz"
    with pytest.raises(ScanError, match=rf"a zip without DICOM; expected a zip of a DICOM series; {remedy}$"):
        read_scan(zipped("notes.txt", "p1/ct.nii.gz"))


def test_damaged_zips(tmp_path: Path) -> None:
    shape = (120, 100, 5)  # the first look at a file stops before the end of its pixels
    write_series(tmp_path / "series", ct_values(shape), Grid(shape, GRID.affine), encoding=RLELossless)
    with zipfile.ZipFile(tmp_path / "scan.zip", "w") as archive:
        for file in (tmp_path / "series").iterdir():
            archive.write(file, file.name)
    whole = (tmp_path / "scan.zip").read_bytes()
    (tmp_path / "list.zip").write_bytes(whole.replace(b"PK\x01\x02", b"XX\x01\x02", 1))
    with pytest.raises(ScanError, match=r"list\.zip: a damaged zip file, or none; expected a zip of .*; copy it again"):
        read_scan(tmp_path / "list.zip")
    pixels = (tmp_path / "series" / "slice003.dcm").read_bytes()[-99:]
    (tmp_path / "pixels.zip").write_bytes(whole.replace(pixels, bytes(1) + pixels[1:]))
    with pytest.raises(ScanError, match=r"dcm: damaged in its zip \(Bad CRC-32 .*slice003.dcm.*\); copy the zip again"):
        read_scan(tmp_path / "pixels.zip")


def test_an_enhanced_ct_in_a_zip_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_enhanced(tmp_path / "e.dcm", ct_values(), oblique_grid())
    with zipfile.ZipFile(tmp_path / "scan.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "e.dcm", "e.dcm")
    opened = []
    open_member = zipfile.ZipFile.open

    def counted(archive: zipfile.ZipFile, name: str, *more: Any) -> Any:
        opened.append(name)
        return open_member(archive, name, *more)

    monkeypatch.setattr(zipfile.ZipFile, "open", counted)
    assert same_in_patient(read_scan(tmp_path / "scan.zip"), ct_values(), oblique_grid())
    assert opened == ["e.dcm"] * 2  # the header, the pixels


def test_one_file_means_its_series(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID)
    write_series(tmp_path, ct_values(seed=9), GRID, name="other{}.dcm")
    scan = read_scan(tmp_path / "slice004.dcm")
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ("this is one slice of a series; the 10 slices of it in the folder were read",)


def test_one_file_and_another_series(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID)
    other = write_series(tmp_path, ct_values(seed=9), GRID, name="other{}.dcm")
    scan = read_scan(tmp_path / "slice004.dcm", series=other)
    assert same_in_patient(scan, ct_values(seed=9), GRID)
    said = f"this is one slice of a series; the 10 slices of series {other} in the folder were read"
    assert scan.warnings == (said,)
    with pytest.raises(ScanError, match=r"no CT series 9.9; expected one of "):
        read_scan(tmp_path / "slice004.dcm", series="9.9")


def test_one_file_alone(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values()[..., :1], GRID)
    with pytest.raises(ScanError, match="single CT pictures, no two of which make a volume; expected a CT series"):
        read_scan(tmp_path / "slice001.dcm")


def test_enhanced_ct(tmp_path: Path) -> None:
    write_enhanced(tmp_path / "enhanced.dcm", ct_values(), oblique_grid())
    for path in (tmp_path, tmp_path / "enhanced.dcm"):
        assert same_in_patient(read_scan(path), ct_values(), oblique_grid())


def refused(*_: object) -> None:
    raise PermissionError


def test_other_files_of_an_enhanced_cts_series_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, slices in enumerate((slice(0, 4), slice(4, 7), slice(7, 10))):
        part = oblique_grid().cropped(Box((0, 0, slices.start), (*SHAPE[:2], slices.stop)))
        write_enhanced(tmp_path / f"part{i}.dcm", ct_values()[..., slices], part, series_uid="1.2.3.4")
    write_enhanced(tmp_path / "another.dcm", ct_values(), oblique_grid())
    (tmp_path / "notes.txt").write_text("of the archive", encoding="utf-8")
    (tmp_path / "gone.dcm").symlink_to(tmp_path / "nothing")
    scan = read_scan(tmp_path / "part0.dcm")
    assert np.array_equal(scan.hu(), ct_values()[..., :4])
    said = "files of its series lie in the folder; only this one was read, give the folder to read all"
    assert scan.warnings[0] == f"2 more {said}"
    assert read_scan(tmp_path / "another.dcm").warnings == ()
    for file in (tmp_path / "another.dcm", tmp_path / "gone.dcm"):
        file.unlink()
    assert same_in_patient(read_scan(tmp_path), ct_values(), oblique_grid())
    (tmp_path / "part2.dcm").unlink()
    assert read_scan(tmp_path / "part1.dcm").warnings[0].startswith("1 more file of its series lies in the folder;")
    monkeypatch.setattr(Path, "iterdir", refused)
    assert np.array_equal(read_scan(tmp_path / "part1.dcm").hu(), ct_values()[..., 4:7])


@pytest.mark.parametrize("by_gdcm", [False, True])
def test_a_compressed_enhanced_ct_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_gdcm: bool
) -> None:
    intercepts = [-1024 - 10 * k for k in range(10)]
    write_enhanced(tmp_path / "e.dcm", ct_values(), oblique_grid(), encoding=RLELossless, intercepts=intercepts)
    opened = []
    read = dicom_pixels._pixel_data
    monkeypatch.setattr(dicom_pixels, "_pixel_data", lambda source: opened.append(source) or read(source))
    if by_gdcm:
        monkeypatch.setattr(dicom_pixels, "pixel_array", broken)
    assert same_in_patient(read_scan(tmp_path), ct_values(), oblique_grid())
    assert len(opened) == 1


def test_the_largest_series_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    lung = write_series(tmp_path / "a", ct_values(), GRID, SeriesDescription="lung 1.0", SeriesNumber=3)
    thick = write_series(tmp_path / "b", ct_values()[..., :4], GRID, SeriesDescription="thick", SeriesNumber=2)
    write_series(tmp_path / "c", ct_values()[..., :1], GRID, ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])
    write_series(tmp_path / "d", ct_values(), GRID, Modality="MR")
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert isinstance(scan.native, DicomSeries)
    assert scan.native.series_uid == lung
    expected = f"several CT series: took the largest, {lung} ('lung 1.0', 10 slices); left {thick} ('thick', 4 slices)"
    assert scan.warnings[0].startswith(expected)
    assert read_scan(tmp_path, series=thick).voxels.shape == (12, 14, 4)
    with pytest.raises(
        ScanError, match=rf"no CT series 9.9; expected one of {lung} \('lung 1.0', 10 slices\); {thick}"
    ):
        read_scan(tmp_path, series="9.9")


def test_series_of_one_size_are_each_one_of_the_largest(tmp_path: Path) -> None:
    second = write_series(tmp_path / "a", ct_values(), GRID, SeriesNumber=3)
    first = write_series(tmp_path / "b", ct_values(), GRID, SeriesNumber=2)
    (warning,) = read_scan(tmp_path).warnings
    named = [f"{uid} (10 slices)" for uid in (first, second)]
    assert warning == f"several CT series: took one of the largest, {named[0]}; left {named[1]}; see --series"


@pytest.mark.parametrize("told", ["HU", "US", "", None])
def test_a_spectral_map_is_no_ct_where_there_is_one(tmp_path: Path, told: str | None) -> None:
    ct = write_series(tmp_path / "a", ct_values(), GRID, RescaleType=told, SeriesNumber=3)
    larger = (*SHAPE[:2], SHAPE[2] + 1)
    iodine = write_series(tmp_path / "b", ct_values(larger), Grid(larger, GRID.affine), RescaleType="MGML")
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    named = f"took the largest in HU, {ct} (10 slices); left {iodine} (11 slices)"
    assert scan.warnings == (f"several CT series: {named}; see --series",)
    said = "the values are of the type MGML (RescaleType), not HU: the mask may be wrong"
    for scan in (read_scan(tmp_path, series=iodine), read_scan(tmp_path / "b")):
        assert np.array_equal(scan.hu(), ct_values(larger))
        assert scan.warnings == (said,)


def test_folders_without_ct(tmp_path: Path) -> None:
    write_series(tmp_path / "mr", ct_values(), GRID, Modality="MR")
    with pytest.raises(ScanError, match=r"mr: no CT slices; found 10 MR; expected a CT series"):
        read_scan(tmp_path / "mr")
    write_series(tmp_path / "scout", ct_values()[..., :2], GRID, ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])
    with pytest.raises(ScanError, match=r"found 2 localiser"):
        read_scan(tmp_path / "scout")
    write_series(tmp_path / "nowhere", ct_values(), GRID, ImagePositionPatient=None)
    with pytest.raises(ScanError, match=r"found 10 CT without a place \(the first: .*slice001.dcm: no ImagePos"):
        read_scan(tmp_path / "nowhere")


def test_missing_slices_are_interpolated_and_named(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.arange(-500, 500, 100), SHAPE).astype(np.int16)
    write_series(tmp_path, ramp, GRID, leave_out=[3, 6, 7])
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ramp, GRID)
    said = "3 missing slices were interpolated from the neighbours (at -132.5, -125, -122.5 mm)"
    assert said in scan.warnings
    assert isinstance(scan.native, DicomSeries)
    assert len(scan.native.files) == 7


def test_uneven_slices_are_made_even(tmp_path: Path) -> None:
    heights = np.array([0, 2.5, 5, 7.5, 10, 11.5, 13, 15, 17.5, 20.0])
    ramp = np.broadcast_to(heights * 40 - 500, SHAPE)
    positions = lambda k: [31.5, -12.25, -140 + heights[k]]  # noqa: E731
    write_series(tmp_path, np.rint(ramp).astype(np.int16), GRID, ImagePositionPatient=positions)
    scan = read_scan(tmp_path)
    assert scan.voxels.shape == (12, 14, 9)
    assert np.allclose(scan.grid.spacing_mm, (0.75, 0.8, 2.5))
    assert np.allclose(scan.hu()[0, 0], np.arange(9) * 100 - 500, atol=1)
    assert "uneven slice spacing (1.5 to 2.5 mm) was made even at 2.5 mm" in scan.warnings


def test_a_wide_gap_ends_the_scan(tmp_path: Path) -> None:
    heights = [0, 1, 2, 3, 4, 5, 6, 200, 201, 202]
    write_series(tmp_path, ct_values(), GRID, ImagePositionPatient=lambda k: [0, 0, heights[k]])
    scan = read_scan(tmp_path)
    assert scan.voxels.shape == (12, 14, 7)
    said = "the series has a gap of 194 mm; 3 slices beyond it were left out"
    assert scan.warnings == (said, "only 7 slices along one axis")


def test_gantry_tilt_is_put_upright(tmp_path: Path) -> None:
    """A tilted scan of a rod along the body's axis: the rod moves in the slices, and not on the upright grid."""
    tilt_mm = 2.5 * np.tan(np.radians(15))
    rows_mm = np.arange(SHAPE[1])[:, None] * 0.8 + np.arange(SHAPE[2]) * tilt_mm
    rod = np.broadcast_to(1500 * np.exp(-(((rows_mm - 7) / 1.5) ** 2)) - 1024, SHAPE)
    write_series(tmp_path, np.rint(rod).astype(np.int16), GRID, shift_mm=(0, tilt_mm, 0))
    scan = read_scan(tmp_path)
    said = "slices tilted by 15.0 degrees (gantry tilt) were shifted by up to 6.03 mm onto an upright grid"
    assert scan.warnings[0].startswith(said)
    assert np.allclose(scan.grid.affine[:3, :3], GRID.affine[:3, :3])
    assert scan.voxels.shape[0] >= 12
    assert scan.voxels.shape[1] == 14 + 8 + 1
    hu = scan.hu()
    centres = [np.average(np.arange(hu.shape[1]), weights=hu[5, :, k] + 1024) for k in range(5)]
    assert np.ptp(centres) < 0.05
    assert scan.grid.world([0, centres[0], 0])[1] == pytest.approx(12.25 - 7, abs=0.05)


def test_shear_beyond_any_gantry_is_refused(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID, shift_mm=(0, 6, 0))
    with pytest.raises(ScanError, match="slices sheared by 67 degrees; expected a gantry tilt of at most 45 degrees"):
        read_scan(tmp_path)


def test_slices_scaled_one_by_one(tmp_path: Path) -> None:
    slopes = [1, 2, 0.5] * 4
    write_series(tmp_path, ct_values(), GRID, RescaleSlope=lambda k: slopes[k])
    scan = read_scan(tmp_path)
    expected = (ct_values().astype(float) + 1024) * np.array(slopes[:10]) - 1024
    assert (scan.voxels.dtype, scan.slope, scan.intercept) == (np.int16, 1.0, 0.0)
    assert np.allclose(scan.hu(), expected, atol=0.51)


@pytest.mark.parametrize("encoding", [ExplicitVRLittleEndian, RLELossless])
@pytest.mark.parametrize("intercepts", [[-1024], [-1024, -1023]], ids=["one rescale", "slices scaled one by one"])
def test_negative_padding_without_its_sign_is_air(tmp_path: Path, intercepts: list[int], encoding: str) -> None:
    hu = ct_values()
    hu[:3] = -1024
    write_series(tmp_path, hu, GRID, BitsStored=16, HighBit=15, PixelPaddingValue=63536)
    changed_words(tmp_path, lambda words: np.where(words == 0, 63536, words))
    changed = dcmread(tmp_path / "slice005.dcm")
    changed.RescaleIntercept = intercepts[-1]
    changed.save_as(tmp_path / "slice005.dcm")
    if encoding != ExplicitVRLittleEndian:
        encoded(tmp_path, encoding)
    scan = read_scan(tmp_path)
    expected = np.where(hu == -1024, -2000 - 1024, hu).astype(float)
    expected[..., 4] += intercepts[-1] + 1024
    assert np.array_equal(scan.hu(), expected)
    assert scan.warnings[0] == "negative values were stored as unsigned ones; they are read as signed"


def test_no_rescale_tags(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID, signed=True, RescaleSlope=None, RescaleIntercept=None)
    assert same_in_patient(read_scan(tmp_path), ct_values(), GRID)


def test_slices_that_are_there_twice(tmp_path: Path) -> None:
    uid = write_series(tmp_path / "a", ct_values(), GRID)
    write_series(tmp_path / "copy", ct_values(seed=5), GRID, series_uid=uid, InstanceNumber=lambda k: 100 + k)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings[0].startswith("10 slices lie where another one does and were left out")


def test_several_acquisitions_in_a_series(tmp_path: Path) -> None:
    uid = write_series(tmp_path / "a", ct_values(), GRID, AcquisitionNumber=4)
    write_series(tmp_path / "b", ct_values(seed=5)[..., :7], GRID, series_uid=uid, AcquisitionNumber=2)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ("the series holds 2 acquisitions; number 4 was read (10 of 17 slices)",)


@pytest.mark.parametrize("slices_each", [1, 2])
def test_a_copied_file_in_a_series_of_many_acquisitions(tmp_path: Path, slices_each: int) -> None:
    """Step and shoot: each turn of the tube is an acquisition."""
    write_series(tmp_path, ct_values(), GRID, AcquisitionNumber=lambda k: k // slices_each + 1)
    (tmp_path / "slice004 (1).dcm").write_bytes((tmp_path / "slice004.dcm").read_bytes())
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ("1 copy of a slice was left out (the same SOPInstanceUID)",)


def test_acquisitions_that_share_a_slice(tmp_path: Path) -> None:
    uid = write_series(tmp_path / "a", ct_values()[..., :6], GRID, AcquisitionNumber=1)
    upper = GRID.cropped(Box((0, 0, 5), SHAPE))
    write_series(tmp_path / "b", ct_values()[..., 5:], upper, series_uid=uid, AcquisitionNumber=2)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    said = "1 slice lies where another one does and was left out (acquisition 1, then the lower instance number stays)"
    assert scan.warnings == (said,)


def write_acquisition(folder: Path, number: int, slices: slice, shift_mm: float = 0, seed: int = 0) -> None:
    """Writes some slices of a scan as an acquisition of the series 1.2.3.4, all of them ``shift_mm`` higher."""
    affine = GRID.affine.copy()
    affine[2, 3] += shift_mm + GRID.spacing_mm[2] * slices.start
    hu = ct_values(seed=seed)[..., slices]
    place = Grid((*SHAPE[:2], hu.shape[2]), affine)
    write_series(folder / f"a{number}", hu, place, series_uid="1.2.3.4", AcquisitionNumber=number)


@pytest.mark.parametrize("shift_mm", [-1.25, 0.3, 1.25])
def test_one_of_two_acquisitions_between_each_others_slices_is_read(tmp_path: Path, shift_mm: float) -> None:
    write_acquisition(tmp_path, 1, slice(0, 10), shift_mm, seed=5)
    write_acquisition(tmp_path, 2, slice(0, 9))
    scan = read_scan(tmp_path)
    assert np.array_equal(scan.hu(), ct_values(seed=5))
    assert scan.warnings == ("the series holds 2 acquisitions; number 1 was read (10 of 19 slices)",)
    write_acquisition(tmp_path, 2, slice(0, 10))
    write_acquisition(tmp_path, 1, slice(0, 10), shift_mm, seed=5)
    assert np.array_equal(read_scan(tmp_path).hu(), ct_values(seed=5)), "of as many slices the lower number"


def test_acquisitions_one_above_the_other_are_one_scan(tmp_path: Path) -> None:
    """A table that moves on; then two turns at its upper step."""
    write_acquisition(tmp_path, 1, slice(0, 5))
    write_acquisition(tmp_path, 2, slice(5, 10))
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ()
    write_acquisition(tmp_path, 3, slice(5, 10), shift_mm=0.5, seed=5)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ("the series holds 3 acquisitions; 2 of them were read (10 of 15 slices)",)


def test_acquisitions_that_overlap_a_little_are_one_scan(tmp_path: Path) -> None:
    write_acquisition(tmp_path, 1, slice(0, 6), shift_mm=0.5)
    write_acquisition(tmp_path, 2, slice(4, 10))
    scan = read_scan(tmp_path)
    lowest, highest = (scan.grid.world([0, 0, k])[2] for k in (0, scan.grid.shape[2] - 1))
    assert highest - lowest == pytest.approx(9 * GRID.spacing_mm[2] - 0.5)
    assert [warning.partition(" (")[0] for warning in scan.warnings] == ["uneven slice spacing"]


def test_one_instance_uid_for_all_slices(tmp_path: Path) -> None:
    """As some anonymisers leave it: no copies for all that."""
    write_series(tmp_path, ct_values(), GRID, SOPInstanceUID="1.2.3.4")
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ()


def test_reconstructions_a_hair_apart_share_their_places(tmp_path: Path) -> None:
    uid = write_series(tmp_path / "a", ct_values(), GRID)
    for i in (1, 2):
        affine = GRID.affine.copy()
        affine[2, 3] += 0.03 * i
        write_series(tmp_path / f"b{i}", ct_values(seed=5), Grid(SHAPE, affine), series_uid=uid, AcquisitionNumber=i)
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ("the series holds 3 acquisitions; number 0 was read (10 of 30 slices)",)


def test_thin_slices_among_thick_ones_keep_their_places(tmp_path: Path) -> None:
    heights = [0, 0.625, 1.25, 1.875, 2.5, 3.125, 3.75, 13.75, 23.75, 33.75]
    write_series(tmp_path, ct_values(), GRID, ImagePositionPatient=lambda k: [0, 0, heights[k]])
    scan = read_scan(tmp_path)
    assert scan.grid.spacing_mm[2] == pytest.approx(0.625)
    assert np.array_equal(scan.hu()[..., :7], ct_values()[..., :7])


def test_other_pictures_in_the_series(tmp_path: Path) -> None:
    uid = write_series(tmp_path / "a", ct_values(), GRID)
    sagittal = Grid((14, 10, 3), affine_of(np.eye(3)[:, [1, 2, 0]]))
    write_series(tmp_path / "b", ct_values()[:3].transpose(1, 2, 0), sagittal, series_uid=uid, name="s{}.dcm")
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    said = "3 slices of the series do not fit the others in size, pixel spacing or direction: left out"
    assert scan.warnings == (f"{said} (the first: {tmp_path / 'b' / 's1.dcm'})",)


@pytest.mark.parametrize("at_end", [True, False], ids=["last", "in the middle"])
@pytest.mark.parametrize("odd", ["taller", "turned", "coarser"])
def test_one_slice_unlike_the_others_is_named(tmp_path: Path, odd: str, at_end: bool) -> None:
    write_series(tmp_path, ct_values(), GRID)
    file = tmp_path / ("slice010.dcm" if at_end else "slice005.dcm")
    data = dcmread(file)
    if odd == "taller":
        data.Rows, data.PixelData = data.Rows + 1, data.PixelData + bytes(2 * data.Columns)
    elif odd == "turned":
        data.ImageOrientationPatient = [1, 0, 0, 0, 0, -1]
    else:
        data.PixelSpacing = [2, 2]
    data.save_as(file)
    scan = read_scan(tmp_path)
    assert np.array_equal(scan.hu()[..., :4], ct_values()[..., :4])
    assert scan.voxels.shape[2] == (9 if at_end else 10)
    said = "1 slice of the series does not fit the others in size, pixel spacing or direction: left out"
    assert scan.warnings[0] == f"{said} ({file})"


def two_patients(folder: Path, **uids: str) -> tuple[Path, Path]:
    """Two patients' folders with the same UIDs in them; the second one's slices lie between those of the first."""
    affine = GRID.affine.copy()
    affine[2, 3] += 1
    write_series(folder / "p1", ct_values(), GRID, PatientID="1", **uids)
    write_series(folder / "p2", ct_values(seed=5), Grid(SHAPE, affine), PatientID="2", **uids)
    return folder / "p1", folder / "p2"


def test_two_patients_of_one_series_uid_are_never_mixed(tmp_path: Path) -> None:
    one, other = two_patients(tmp_path, series_uid="1.2.3.4")
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    first = other / "slice001.dcm"
    said = f"10 slices of the series are of another patient (PatientID): left out (the first: {first})"
    assert scan.warnings == (said,)
    for file in one.iterdir():
        file.rename(other / f"one_{file.name}")
    scan = read_scan(first)
    assert np.array_equal(scan.hu(), ct_values(seed=5))
    assert scan.warnings == ("this is one slice of a series; the 10 slices of it in the folder were read",)
    assert len(set(series_of_slices([first, other / "one_slice001.dcm"]).values())) == 2


def test_damaged_slices_are_left_out_and_filled(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID)
    for name, length in (("slice004.dcm", -80), ("slice007.dcm", 300)):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:length])
    scan = read_scan(tmp_path)
    assert scan.voxels.shape == SHAPE
    assert np.array_equal(scan.hu()[..., [0, 1, 2, 4, 5, 7, 8, 9]], ct_values()[..., [0, 1, 2, 4, 5, 7, 8, 9]])
    assert any("2 missing slices were interpolated" in warning for warning in scan.warnings)
    said = (
        f"left out, though perhaps of the series: 2 damaged DICOM (the first: {tmp_path / 'slice004.dcm'}: the file is"
    )
    assert scan.warnings[0] == f"{said} cut short)"


def test_spacing_that_cannot_be(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID, PixelSpacing=["0", "0.8"])
    with pytest.raises(ScanError, match=r"10 CT without a place \(the first: .*slice001.dcm: PixelSpacing 0, 0.8\)"):
        read_scan(tmp_path)
    write_series(tmp_path, ct_values(), GRID, PixelSpacing=["80", "0.8"])
    with pytest.raises(ScanError, match=r"voxel spacing \(80, 0.8, 2.5\) mm"):
        read_scan(tmp_path)


def test_volume_is_not_for_dicom(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values(), GRID)
    with pytest.raises(ScanError, match="a DICOM series, and --volume"):
        read_scan(tmp_path, volume=0)


def test_masks_of_a_series(tmp_path: Path) -> None:
    write_series(tmp_path / "series", ct_values(), GRID)
    scan = read_scan(tmp_path / "series")
    for suffix in (".nii.gz", ".mha", ".nrrd"):
        write_labels((scan.hu() < -500).astype(np.uint8), tmp_path / f"mask{suffix}", scan)
        assert read_scan(tmp_path / f"mask{suffix}").grid.matches(scan.grid)


# ------------------------------------------------------------------------------------------------ find_scans


def test_a_study_is_one_scan_and_a_folder_of_studies_is_many(tmp_path: Path) -> None:
    for patient in ("p1", "p2"):
        study = generate_uid()
        for series in ("s1", "s2"):
            folder = tmp_path / patient / "study" / series
            write_series(folder, ct_values()[..., :3], GRID, study_uid=study, name="{}")
    assert find_scans(tmp_path / "p1" / "study" / "s1") == [tmp_path / "p1" / "study" / "s1"]
    assert find_scans(tmp_path / "p1") == [tmp_path / "p1" / "study"]
    assert find_scans(tmp_path) == [tmp_path / "p1" / "study", tmp_path / "p2" / "study"]


def test_studies_that_are_mixed_are_taken_by_folder(tmp_path: Path) -> None:
    for series, study in (("a", "1.1"), ("b", "1.2"), ("c", "1.1")):
        write_series(tmp_path / series, ct_values()[..., :2], GRID, study_uid=study)
    assert find_scans(tmp_path) == [tmp_path / name for name in "abc"]


def test_two_patients_of_one_study_uid_are_two_scans(tmp_path: Path) -> None:
    folders = two_patients(tmp_path, study_uid="1.2")
    assert find_scans(tmp_path) == [*folders]
    for file in folders[0].iterdir():
        file.rename(tmp_path / file.name)
    assert find_scans(tmp_path) == [tmp_path, folders[1]]
    scan = read_scan(tmp_path)
    assert same_in_patient(scan, ct_values(), GRID)
    assert scan.warnings == ()


def test_a_study_below_another_is_a_scan_of_its_own(tmp_path: Path) -> None:
    write_series(tmp_path, ct_values()[..., :4], GRID, study_uid="1.1")
    write_series(tmp_path / "more", ct_values()[..., :6], GRID, study_uid="1.1")
    prior = write_series(tmp_path / "prior", ct_values(), GRID, study_uid="1.2")
    assert find_scans(tmp_path) == [tmp_path, tmp_path / "more", tmp_path / "prior"]
    assert read_scan(tmp_path).grid.shape == (*SHAPE[:2], 6)
    assert same_in_patient(read_scan(tmp_path / "prior"), ct_values(), GRID)
    assert same_in_patient(read_scan(tmp_path, series=prior), ct_values(), GRID)


def test_a_disk_with_a_dicomdir(tmp_path: Path) -> None:
    study = tmp_path / "DICOM" / "ST0"
    write_series(study / "SE0", ct_values(), GRID, name="IM{}")
    write_series(study / "SE1", ct_values()[..., :5], GRID, name="IM{}")
    index = FileMetaDataset()
    index.MediaStorageSOPClassUID, index.TransferSyntaxUID = MediaStorageDirectoryStorage, ExplicitVRLittleEndian
    index.MediaStorageSOPInstanceUID = generate_uid()
    FileDataset(None, {}, bytes(128), index).save_as(tmp_path / "DICOMDIR", enforce_file_format=True)
    assert find_scans(tmp_path) == [study]
    scan = read_scan(tmp_path / "DICOMDIR")
    assert same_in_patient(scan, ct_values(), GRID)
    assert [warning.partition(":")[0] for warning in scan.warnings] == ["several CT series"]


def test_links_to_studies_are_followed_once(tmp_path: Path) -> None:
    write_series(tmp_path / "store" / "p2", ct_values()[..., :2], GRID, study_uid="1.2")
    write_series(tmp_path / "scans" / "p1", ct_values()[..., :2], GRID, study_uid="1.1")
    (tmp_path / "scans" / "p2").symlink_to(tmp_path / "store" / "p2")
    (tmp_path / "scans" / "p1" / "back").symlink_to(tmp_path / "scans")
    (tmp_path / "scans" / "p1" / "all").symlink_to(tmp_path)
    assert find_scans(tmp_path / "scans") == [tmp_path / "scans" / name for name in ("p1", "p2")]


def test_several_readers_at_a_time_leave_the_processs_settings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = pydicom.config.settings
    monkeypatch.setattr(settings, "reading_validation_mode", pydicom.config.RAISE)
    filters = list(warnings.filters)
    first, second = lenient_dicom(), lenient_dicom()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert settings.reading_validation_mode == pydicom.config.IGNORE, "the second still reads"
    second.__exit__(None, None, None)
    assert settings.reading_validation_mode == pydicom.config.RAISE
    assert warnings.filters == filters
