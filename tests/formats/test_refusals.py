"""Bad input: one clear line each, and nothing allocated for a header's promise."""

from __future__ import annotations

import gzip
import os
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK

from cascadeseg.errors import OutputError, ScanError
from cascadeseg.formats import memory as memory_of_the_machine
from cascadeseg.formats import read_labels, read_scan, scan_of, write_scan
from cascadeseg.formats.metaimage import checked_header
from cascadeseg.formats.packed import unpacked_volume
from tests.formats.dicom_series import write_series
from tests.formats.test_itk import itk_image
from tests.formats.test_nifti import saved
from tests.formats.volumes import SHAPE, affine_of, ct_values, oblique_grid


def refusal(path: Path, **choices: int) -> str:
    with pytest.raises(ScanError) as caught:
        read_scan(path, **choices)
    words = str(caught.value)
    assert "\n" not in words
    assert words.startswith(str(path))
    return words.removeprefix(str(path))


def test_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "scan.nii.gz") == ": no such file or folder"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "scan.nii.gz")
    said = ": a pipe or a device; expected a file or a folder; save what comes through it as a file"
    assert refusal(tmp_path / "scan.nii.gz") == said


def test_unknown_kinds_of_file(tmp_path: Path) -> None:
    (tmp_path / "scan.txt").write_text("hello", encoding="utf-8")
    expected = ": unknown kind of file (.txt); expected NIfTI, MHA/MHD, NRRD or DICOM"
    assert refusal(tmp_path / "scan.txt") == expected
    (tmp_path / "scan").write_text("hello", encoding="utf-8")
    assert refusal(tmp_path / "scan").startswith(": unknown kind of file (no suffix)")


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_text_and_nothing_renamed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"scan{suffix}"
    path.write_text("this is no scan at all\n" * 40, encoding="utf-8")
    assert refusal(path) == ": not a NIfTI file (it starts with b'this'); expected a NIfTI header"
    path.write_bytes(b"")
    assert refusal(path) == ": the file is empty; expected a NIfTI file"
    path.write_bytes(gzip.compress(b"packed text " * 50))
    assert "not a NIfTI file (it starts with b'pack')" in refusal(path)
    path.write_bytes((348).to_bytes(4, "little") + bytes(100))
    assert "cut short inside its header" in refusal(path)
    path.write_bytes((348).to_bytes(4, "little") + bytes(500))
    assert "not a NIfTI file" in refusal(path)


def test_truncated_gzip(tmp_path: Path) -> None:
    whole = saved(tmp_path / "scan.nii.gz").read_bytes()
    path = tmp_path / "cut.nii.gz"
    for end in (15, 100, len(whole) // 2, len(whole) - 4):
        path.write_bytes(whole[:end])
        assert refusal(path) == ": the file is cut short; expected a whole gzip file; copy or download it again"


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = bytearray(saved(tmp_path / "scan.nii.gz").read_bytes())
    for at in (len(whole) // 2, len(whole) - 6):
        damaged = whole.copy()
        damaged[at] ^= 0xFF
        (tmp_path / "bad.nii.gz").write_bytes(damaged)
        words = refusal(tmp_path / "bad.nii.gz")
        assert "damaged gzip data" in words or "cut short" in words


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_fewer_voxels_than_promised(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path / f"scan{suffix}", dim=[3, 12, 14, 11, 1, 1, 1, 1])
    words = refusal(path)
    assert ("the header promises 12 x 14 x 11 voxels" if suffix == ".nii" else "cut short (3,360 of 3,696") in words


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_promise_beyond_the_file_is_refused_before_allocating(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path / f"scan{suffix}", dim=[3, 30000, 30000, 30000, 1, 1, 1, 1])
    tracemalloc.start()
    words = refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    expected = ": the header promises 30000 x 30000 x 30000 voxels (54 TB); expected no more than the file can hold"
    assert words.startswith(expected)


def test_a_promise_beyond_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "scan.nii.gz")
    write_scan(ct_values(), oblique_grid(), tmp_path / "scan.nrrd")
    monkeypatch.setattr(memory_of_the_machine, "available_memory_bytes", lambda: 2000)
    for file in (path, tmp_path / "scan.nrrd"):
        words = refusal(file)
        assert "the header promises 12 x 14 x 10 voxels (3.36 kB), and 2 kB of memory are free" in words
    assert read_scan(saved(tmp_path / "mapped.nii")).voxels.shape == SHAPE


@pytest.mark.parametrize("dims", [(12, 14), (12,), (12, 14, 1), (1, 1, 1), (1, 14, 10), (12, 14, 0), (12, -3, 10)])
def test_not_three_dimensions(tmp_path: Path, dims: tuple[int, ...]) -> None:
    full = [len(dims), *dims] + [1] * (7 - len(dims))
    path = saved(tmp_path / "scan.nii.gz", dim=full)
    words = refusal(path)
    named = f": {len(dims)} dimensions ({', '.join(map(str, dims))}); expected one 3D volume; "
    flat = f": a volume of {' x '.join(map(str, dims))} voxels; expected a 3D scan of at least 2 voxels on each axis; "
    remedy = "the header is damaged" if min(dims) < 1 else "give the whole series or stack, not one slice of it"
    assert words in (named + remedy, flat + remedy)


@pytest.mark.parametrize("suffix", [".mha", ".nrrd"])
def test_a_picture_of_itk(tmp_path: Path, suffix: str) -> None:
    SimpleITK.WriteImage(itk_image()[:, :, 4], str(tmp_path / f"scan{suffix}"))
    said = ": 2 dimensions (12, 14); expected one 3D volume; give the whole series or stack, not one slice of it"
    assert refusal(tmp_path / f"scan{suffix}") == said


def test_a_damaged_dim(tmp_path: Path) -> None:
    assert "a damaged NIfTI header (dim [77," in refusal(saved(tmp_path / "scan.nii.gz", dim=[77, 3, 4, 5, 1, 1, 1, 1]))


def test_colour_and_complex_voxels(tmp_path: Path) -> None:
    rgb = np.zeros(SHAPE, np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")]))
    nibabel.save(nibabel.Nifti1Image(rgb, affine_of()), tmp_path / "rgb.nii.gz")
    assert refusal(tmp_path / "rgb.nii.gz") == ": a colour image (RGB voxels); expected one number per voxel, in HU"
    nibabel.save(nibabel.Nifti1Image(ct_values().astype(np.complex64), affine_of()), tmp_path / "c.nii.gz")
    assert "voxels of type complex64" in refusal(tmp_path / "c.nii.gz")
    assert "unknown voxel type code 999" in refusal(saved(tmp_path / "odd.nii.gz", datatype=999))
    for suffix in (".mha", ".nrrd"):
        SimpleITK.WriteImage(SimpleITK.Compose([itk_image()] * 3), str(tmp_path / f"v{suffix}"))
        assert "3 numbers per voxel" in refusal(tmp_path / f"v{suffix}")


@pytest.mark.parametrize("value", [0, np.nan, -0.8, 1e-6, 900, np.inf])
def test_spacing_that_cannot_be(tmp_path: Path, value: float) -> None:
    pixdim = [1, 0.75, value, 2.5, 0, 0, 0, 0]
    words = refusal(saved(tmp_path / "scan.nii.gz", pixdim=pixdim))
    assert words.startswith(f": voxel spacing (0.75, {value:g}, 2.5) mm; expected 0.01 to 50 mm on each axis")


@pytest.mark.parametrize("value", [0, np.nan, 1e-6, 900, np.inf])
def test_affines_without_a_spacing(value: float) -> None:
    with pytest.raises(ScanError, match=r"array: voxel spacing \("):
        scan_of(ct_values(), np.diag([0.75, value, 2.5, 1]))


@pytest.mark.parametrize("value", ["0", "nan", "-0.8"])
def test_spacing_that_cannot_be_in_mha(tmp_path: Path, value: str) -> None:
    path = tmp_path / "scan.mha"
    SimpleITK.WriteImage(itk_image(), str(path), useCompression=False)
    content = path.read_bytes()
    assert b"ElementSpacing = 0.75 0.80000000000000004 2.5" in content
    path.write_bytes(content.replace(b"0.75 0.80000000000000004 2.5", f"0.75 {value} 2.5".encode()))
    assert ": voxel spacing (0.75, " in refusal(path)


def test_scans_longer_than_any_patient() -> None:
    """A spacing that could be by itself, not so often."""
    assert scan_of(np.zeros((8, 8, 50), np.int16), np.diag([1, 1, 50, 1])).grid.shape == (8, 8, 50)
    found = "array: voxels of 1 x 1 x 50 mm over 2,550 mm; expected 2,500 mm at most; repair the header's spacing"
    with pytest.raises(ScanError, match=found):
        scan_of(np.zeros((8, 8, 51), np.int16), np.diag([1, 1, 50, 1]))


def test_origin_that_is_no_number(tmp_path: Path) -> None:
    words = refusal(saved(tmp_path / "scan.nii.gz", srow_x=[0.75, 0, 0, np.nan]))
    assert words == ", sform: an origin that is not a number; expected millimetres; repair the header"


@pytest.mark.parametrize("suffix", [".mha", ".mhd", ".nrrd"])
def test_damaged_itk_files(tmp_path: Path, suffix: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"scan{suffix}"
    for content in (b"", b"hello world\n", b"\x00" * 600):
        path.write_bytes(content)
        empty = suffix == ".nrrd" and not content
        assert refusal(path).startswith(": the file is empty" if empty else ": not a ")
    SimpleITK.WriteImage(itk_image(), str(path), useCompression=True)
    data = tmp_path / "scan.zraw" if suffix == ".mhd" else path
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) * 2 // 3])
    words = refusal(path)
    assert "cut short (" in words or "expected 3360 bytes but received" in words
    if suffix == ".mhd":
        data.unlink()
        assert "its data file scan.zraw is missing" in refusal(path)
    assert capfd.readouterr() == ("", "")


METAIMAGE = (
    "ObjectType = Image\nNDims = 3\nTransformMatrix = 1 0 0 0 1 0 0 0 1\nElementSpacing = 0.75 0.8 2.5\n"
    "DimSize = 12 14 10\nElementType = MET_SHORT\n"
)


def packed_metaimage(path: Path, packed: bytes, fields: str = "") -> Path:
    """A compressed MetaImage, its data behind the header or in a file of their own, as the suffix has it."""
    local = path.suffix == ".mha"
    header = METAIMAGE + "CompressedData = True\n" + fields + f"ElementDataFile = {'LOCAL' if local else 'scan.zraw'}\n"
    path.write_bytes(header.encode() + (packed if local else b""))
    if not local:
        path.with_name("scan.zraw").write_bytes(packed)
    return path


@pytest.mark.parametrize("pack", [zlib.compress, gzip.compress])
@pytest.mark.parametrize("suffix", [".mha", ".mhd"])
def test_damaged_compressed_metaimages(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    voxels = ct_values().tobytes(order="F")
    whole = pack(voxels)
    path, size = tmp_path / f"scan{suffix}", f"CompressedDataSize = {len(whole)}\n"
    assert np.array_equal(read_scan(packed_metaimage(path, whole, size)).voxels, ct_values())
    named = " in scan.zraw" if suffix == ".mhd" else ""
    for at in (0.3, 0.7, 0.95):
        damaged = bytearray(whole)
        damaged[int(len(whole) * at)] ^= 0x40
        words = refusal(packed_metaimage(path, bytes(damaged), size))
        assert f"damaged compressed data{named} (" in words or "cut short" in words
    for length, promised in ((3360 + 2, 3360), (3360 - 2, 3360), (1 << 23, 3360)):
        other = pack(voxels.ljust(length, b"-")[:length])
        words = refusal(packed_metaimage(path, other, f"CompressedDataSize = {len(other)}\n"))
        assert words.startswith(f": compressed data{named} of ")
        assert f"{length:,} bytes; expected {promised:,}, as the header says" in words or length == 1 << 23
    packed_metaimage(path, whole, size + "ElementNumberOfChannels = 1\n")
    path.write_bytes(path.read_bytes().replace(b"MET_SHORT", b"MET_SHORT_ARRAY"))
    assert (
        refusal(path)
        == ": compressed data of type vector of 16-bit signed integer; expected one number per voxel, in HU"
    )
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("suffix", [".nrrd", ".nhdr"])
def test_damaged_compressed_nrrds(tmp_path: Path, suffix: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"scan{suffix}"
    SimpleITK.WriteImage(itk_image(), str(path), useCompression=True)
    assert np.array_equal(read_scan(path).voxels, ct_values())
    data, named = (path, "") if suffix == ".nrrd" else (tmp_path / "scan.raw.gz", " in scan.raw.gz")
    whole = data.read_bytes()
    start = whole.index(b"\n\n") + 2 if suffix == ".nrrd" else 0
    for at in (start + 40, (start + len(whole)) // 2, len(whole) - 6):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        data.write_bytes(damaged)
        words = refusal(path)
        assert f"damaged compressed data{named} (" in words or "cut short" in words
    data.write_bytes(whole[:start] + gzip.compress(bytes(3362)))
    assert refusal(path).startswith(f": compressed data{named} of 3,362 bytes; expected 3,360, as the header says")
    data.write_bytes(whole[: start + 900])
    assert "is cut short (its compressed data end after " in refusal(path)
    assert capfd.readouterr() == ("", "")


def nrrd_header(**changed: str) -> bytes:
    """The lines of a NRRD's header, without the empty one that ends it; what is changed to nothing is left out."""
    fields = {
        "type": "int16",
        "dimension": "3",
        "space": "left-posterior-superior",
        "sizes": "12 14 10",
        "space directions": "(0.75,0,0) (0,0.8,0) (0,0,2.5)",
        "endian": "little",
        "encoding": "raw",
    } | {name.replace("_", " "): value for name, value in changed.items()}
    return b"NRRD0005\n" + "".join(f"{name}: {value}\n" for name, value in fields.items() if value).encode()


CUT_SHORT = "the file is cut short, or its voxels are damaged; expected as many voxels as its header says; copy or"
DAMAGED = "a damaged NRRD header "


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty; expected a NRRD file; copy or download it again"),
        (
            b"\x1f\x8b\x08\x00\xff\xfe\n",
            "not a NRRD file (it does not start with NRRD and a version); expected a NRRD h",
        ),
        (nrrd_header(), "the file is cut short inside its header; copy or download it again"),
        (
            nrrd_header() + b"\n" + bytes(1000),
            "the file is cut short (1,000 of 3,360 bytes of data); copy or download it",
        ),
        (nrrd_header(byte_skip="10") + b"\n" + bytes(3360), CUT_SHORT),
        (nrrd_header(byte_skip="-1") + b"\n" + bytes(1000), CUT_SHORT),
        (nrrd_header(line_skip="3") + b"\n" + bytes(1000), CUT_SHORT),
        (nrrd_header(encoding="hex") + b"\n00ff", CUT_SHORT),
        (nrrd_header(encoding="text") + b"\n1 2 3", CUT_SHORT),
        (nrrd_header(encoding="bzip2") + b"\n", "voxels packed by bzip2; expected raw or gzipped ones; write the file"),
        (nrrd_header(data_file="no.raw"), "its data file no.raw is missing; expected header and data side by side"),
        (nrrd_header(data_file="no.gz", encoding="gzip"), "its data file no.gz is missing; expected header and data s"),
        (
            nrrd_header(data_file="n%d.raw 1 10 1"),
            "a data file that its header names is missing; expected header and d",
        ),
        (nrrd_header(data_file="LIST") + b"a.raw\n", f"{DAMAGED}(expected 10 filenames (of 2-D pieces) but got 1); c"),
        (nrrd_header(sizes="") + b"\n", f"{DAMAGED}(didn't see required field: sizes); copy or download it again"),
        (nrrd_header(type="\x01\x7f\xe9a") + b"\n", f'{DAMAGED}(couldn\'t parse type "a"); copy or download it again'),
        (
            nrrd_header(type="a" * 999) + b"\n",
            f"{DAMAGED}(couldn't parse type \"{'a' * 59}); copy or download it again",
        ),
    ],
)
def test_damaged_nrrds(tmp_path: Path, content: bytes, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scan.nrrd"
    path.write_bytes(content)
    words = refusal(path)
    assert words.startswith(f": {said}")
    assert words.isascii()
    assert words.isprintable()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["uchar", "unsigned char", "int8_t", "ushort", "unsigned short int", "uint16_t"])
@pytest.mark.parametrize("missing", [0, 1])
def test_nrrds_cut_short_by_a_byte(tmp_path: Path, kind: str, missing: int) -> None:
    size = 1680 if "8" in kind or "char" in kind else 3360
    (tmp_path / "scan.raw").write_bytes(bytes(size - missing))
    (tmp_path / "scan.nhdr").write_bytes(nrrd_header(type=kind, data_file="scan.raw"))
    if not missing:
        assert read_scan(tmp_path / "scan.nhdr").grid.shape == SHAPE
        return
    said = f": scan.raw is cut short ({size - 1:,} of {size:,} bytes of data); copy or download it again"
    assert refusal(tmp_path / "scan.nhdr") == said


def test_compressed_metaimages_that_do_not_say_their_size(tmp_path: Path) -> None:
    whole = zlib.compress(ct_values().tobytes(order="F"))
    assert np.array_equal(read_scan(packed_metaimage(tmp_path / "scan.mhd", whole)).voxels, ct_values())
    words = refusal(packed_metaimage(tmp_path / "scan.mhd", whole[: len(whole) * 6 // 10]))
    assert words.startswith(": scan.zraw is cut short (its compressed data end after ")
    assert words.endswith(" of 3,360 bytes of voxels); copy or download it again")
    words = refusal(packed_metaimage(tmp_path / "scan.mha", whole))
    assert words.startswith(
        ": compressed data without CompressedDataSize in the header; expected their number of bytes"
    )
    words = refusal(packed_metaimage(tmp_path / "scan.mhd", whole, "CompressedDataSize = -3\n"))
    assert words == ": a damaged MetaImage header (CompressedDataSize = -3)"


def test_compressed_data_are_unpacked_a_piece_at_a_time(tmp_path: Path) -> None:
    header = METAIMAGE.replace("12 14 10", "512 512 60")
    packed = zlib.compress(bytes(512 * 512 * 60 * 2))
    header += f"CompressedData = True\nCompressedDataSize = {len(packed)}\nElementDataFile = LOCAL\n"
    (tmp_path / "scan.mha").write_bytes(header.encode() + packed)
    data, _ = checked_header(tmp_path / "scan.mha")
    tracemalloc.start()
    voxels = unpacked_volume(tmp_path / "scan.mha", data, (512, 512, 60), np.dtype("i2"), 0)
    assert tracemalloc.get_traced_memory()[1] < voxels.nbytes + 20e6
    tracemalloc.stop()


def test_a_metaimage_that_names_no_data_file(tmp_path: Path) -> None:
    for ending in ("ElementDataFile =\n", "ElementDataFile = \r\n"):
        (tmp_path / "scan.mhd").write_bytes((METAIMAGE + ending).encode())
        expected = ": ElementDataFile without a value; expected LOCAL or the name of the data file"
        assert refusal(tmp_path / "scan.mhd") == expected


@pytest.mark.parametrize("packed", [False, True])
def test_metaimages_of_a_file_a_slice(tmp_path: Path, packed: bool) -> None:
    for z, plane in enumerate(ct_values().transpose(2, 1, 0)):
        content = plane.tobytes()
        (tmp_path / f"s{z}.raw").write_bytes(zlib.compress(content) if packed else content)
    header = METAIMAGE + f"CompressedData = {packed}\nElementDataFile = "
    names = "".join(f"s{z}.raw\n" for z in range(10))
    path = tmp_path / "scan.mhd"
    for named in ("LIST\n" + names, "LIST 2D\n" + names + "\n", "LIST\n" + names.replace("\n", "\r\n")):
        path.write_bytes((header + named).encode())
        assert np.array_equal(read_scan(path).voxels, ct_values())
    path.write_text(header + "s%d.raw 0 9 1\n", encoding="utf-8")
    assert np.array_equal(read_scan(path).voxels, ct_values())
    for named, count in (
        ("LIST\n" + names.removesuffix("s9.raw\n"), 9),
        ("LIST\n" + names.removesuffix("\n"), 9),
        ("LIST\n" + names + "s9.raw\n", 11),
        ("s%d.raw 0 8 1\n", 9),
    ):
        path.write_text(header + named, encoding="utf-8")
        expected = "expected 10 by DimSize, in a list each with a line break behind it"
        assert refusal(path) == f": {count} data files in the header; {expected}"
    for named in ("s%d.raw 0 9", "s%d.raw 0 9 0", "s%d.raw", "s%d%d.raw 0 9 1"):
        path.write_text(header + named + "\n", encoding="utf-8")
        expected = "expected a pattern with the first number, the last and the step"
        assert refusal(path) == f": ElementDataFile = {named}; {expected}"
    path.write_text(header + "LIST\n" + names, encoding="utf-8")
    whole = (tmp_path / "s4.raw").read_bytes()
    (tmp_path / "s4.raw").write_bytes(whole[:-9])
    assert refusal(path).startswith(": s4.raw is cut short (")
    (tmp_path / "s4.raw").unlink()
    assert refusal(path).startswith(": its data file s4.raw is missing")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"sc\xe4n")
    folder.mkdir()
    scan = read_scan(saved(folder / "scan.nii.gz"))
    assert np.array_equal(scan.voxels, ct_values())
    for suffix in (".mha", ".mhd", ".nrrd"):
        SimpleITK.WriteImage(itk_image(), str(tmp_path / f"scan{suffix}"))
        (tmp_path / f"scan{suffix}").rename(folder / f"scan{suffix}")
        if suffix == ".mhd":
            (tmp_path / "scan.raw").rename(folder / "scan.raw")
        words = f"not a readable {suffix[1:]} file (the name of the file or of a folder is not UTF-8, rename it)"
        assert refusal(folder / f"scan{suffix}") == f": {words}"
        with pytest.raises(OutputError, match=r"cannot be written \(the name of the file or of a folder is not UTF-8"):
            write_scan(ct_values(), oblique_grid(), folder / f"mask{suffix}")


def test_a_sheared_mha(tmp_path: Path) -> None:
    path = tmp_path / "scan.mha"
    SimpleITK.WriteImage(itk_image(), str(path), useCompression=False)
    content = path.read_bytes()
    straight = b"TransformMatrix = -1 0 0 0 -1 0 0 0 1"
    assert straight in content
    path.write_bytes(content.replace(straight, b"TransformMatrix = -1 0 0 0 -1 0 0 0.6 0.8"))
    assert refusal(path).startswith(": sheared axes (36.87 degrees off a right angle)")


def test_an_empty_folder_and_one_without_dicom(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert refusal(folder) == ": an empty folder; expected a folder of DICOM files"
    (folder / "notes.txt").write_text("no scan here", encoding="utf-8")
    assert refusal(folder) == ": a folder without DICOM; expected a DICOM CT series, NIfTI, MHA/MHD or NRRD"


def test_arrays_that_are_no_scan() -> None:
    with pytest.raises(ScanError, match="array: an array without an affine; expected a 4 x 4 affine"):
        scan_of(ct_values())
    with pytest.raises(ScanError, match=r"x: an affine of shape \(3, 3\)"):
        scan_of(ct_values(), np.eye(3), source="x")
    with pytest.raises(ScanError, match=r"an array of 4 dimensions \(12, 14, 10, 1\)"):
        scan_of(ct_values()[..., None], np.eye(4))
    with pytest.raises(
        ScanError, match=r"of 2 dimensions \(12, 14\) of int16; expected .*; give the whole series or stack"
    ):
        scan_of(ct_values()[..., 0], np.eye(4))
    with pytest.raises(ScanError, match="of complex64; expected 3 dimensions"):
        scan_of(ct_values().astype(np.complex64), np.eye(4))
    with pytest.raises(ScanError, match="a volume of 12 x 14 x 1 voxels"):
        scan_of(ct_values()[..., :1], np.eye(4))
    sheared = affine_of()
    sheared[0, 1] = 0.4
    with pytest.raises(ScanError, match="sheared axes"):
        scan_of(ct_values(), sheared)


def test_an_affine_that_cannot_be_meant() -> None:
    with pytest.raises(ScanError, match=r"an affine whose last row is -?\d.*; expected 0 0 0 1; turn it round"):
        scan_of(ct_values(), oblique_grid().affine.T)
    image = nibabel.Nifti1Image(ct_values(), affine_of())
    for one in (image, SimpleITK.GetImageFromArray(ct_values())):
        with pytest.raises(
            ScanError, match="an affine beside a scan that has its own; expected an affine with an array"
        ):
            scan_of(one, np.eye(4))


@pytest.mark.parametrize("read", [read_scan, read_labels])
def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    write_series(tmp_path, ct_values(), oblique_grid())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ScanError, match="'': an empty name; expected a file or a folder"):
        read("")


def test_series_of_a_nifti_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "scan.nii.gz")
    with pytest.raises(ScanError, match="not DICOM, so without series to choose from; leave out --series"):
        read_scan(path, series="1.2.3")


def test_labels_that_are_not_whole_numbers(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.full(SHAPE, 0.4, np.float32), affine_of()), tmp_path / "soft.nii.gz")
    with pytest.raises(ScanError, match="values that are not whole numbers; expected a label map"):
        read_labels(tmp_path / "soft.nii.gz")
    nibabel.save(nibabel.Nifti1Image(np.full(SHAPE, 2.0, np.float32), affine_of()), tmp_path / "hard.nii.gz")
    labels, _ = read_labels(tmp_path / "hard.nii.gz")
    assert labels.dtype.kind == "i"
    assert (labels == 2).all()
