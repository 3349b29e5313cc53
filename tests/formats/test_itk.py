"""MHA, MHD and NRRD: SimpleITK as oracle, LPS and RAS, masks on the exact geometry, images in memory."""

from __future__ import annotations

import gc
import gzip
import zlib
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK

from cascadeseg.errors import ScanError
from cascadeseg.formats import packed, read_labels, read_scan, scan_of, write_labels, write_scan
from cascadeseg.formats.itk import VOXEL_TYPES
from cascadeseg.formats.placement import ItkGeometry
from cascadeseg.geometry import Grid
from tests.formats.volumes import ORIENTATIONS, SHAPE, SPACING_MM, affine_of, ct_values, oblique_grid, rotation

SUFFIXES = [".mha", ".mhd", ".nrrd"]
LPS = np.diag([-1.0, -1.0, 1.0])


def itk_image(voxels: np.ndarray | None = None, directions: np.ndarray | None = None) -> SimpleITK.Image:
    """The test volume as SimpleITK has it; directions are RAS+."""
    image = SimpleITK.GetImageFromArray((ct_values() if voxels is None else voxels).transpose(2, 1, 0))
    affine = affine_of(np.eye(3) if directions is None else directions)
    image.SetSpacing(SPACING_MM)
    image.SetOrigin((LPS @ affine[:3, 3]).tolist())
    image.SetDirection((LPS @ affine[:3, :3] / SPACING_MM).ravel().tolist())
    return image


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("directions", [*ORIENTATIONS[::7], rotation(10, 20, -15)])
def test_every_voxel_is_where_simpleitk_has_it(tmp_path: Path, directions: np.ndarray, suffix: str) -> None:
    image = itk_image(directions=directions)
    SimpleITK.WriteImage(image, str(tmp_path / f"scan{suffix}"))
    scan = read_scan(tmp_path / f"scan{suffix}")
    assert np.array_equal(scan.voxels, ct_values())
    assert np.allclose(scan.grid.affine, affine_of(directions), atol=1e-9)
    for index in [(0, 0, 0), (3, 5, 7), (11, 13, 9)]:
        assert np.allclose(scan.grid.world(index), LPS @ image.TransformIndexToPhysicalPoint(index), atol=1e-9)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8"])
def test_types_are_kept(tmp_path: Path, dtype: str, suffix: str) -> None:
    voxels = np.clip(ct_values() + 1024, 0, 120).astype(dtype)
    SimpleITK.WriteImage(itk_image(voxels), str(tmp_path / f"scan{suffix}"), useCompression=True)
    scan = read_scan(tmp_path / f"scan{suffix}")
    assert scan.voxels.dtype == np.dtype(dtype)
    assert np.array_equal(scan.voxels, voxels)


def test_big_endian_and_ras_nrrd(tmp_path: Path) -> None:
    header = (
        "NRRD0005\ntype: int16\ndimension: 3\nspace: right-anterior-superior\nsizes: 12 14 10\n"
        "space directions: (0.75,0,0) (0,0.8,0) (0,0,2.5)\nkinds: domain domain domain\nendian: big\n"
        "encoding: raw\nspace origin: (-31.5,12.25,-140)\n\n"
    )
    path = tmp_path / "scan.nrrd"
    path.write_bytes(header.encode() + ct_values().astype(">i2").tobytes(order="F"))
    scan = read_scan(path)
    assert np.array_equal(scan.voxels, ct_values())
    assert scan.voxels.dtype.isnative
    assert np.allclose(scan.grid.affine, affine_of())
    assert scan.warnings == ()


@pytest.mark.parametrize("space", ["LPST", "left-posterior-superior-time", "RAST", "left-anterior-superior-time"])
def test_nrrd_spaces_with_time(tmp_path: Path, space: str) -> None:
    header = (
        f"NRRD0005\ntype: int16\ndimension: 4\nspace: {space}\nsizes: 12 14 10 2\nencoding: raw\nendian: little\n"
        "space directions: (0.75,0,0,0) (0,0.8,0,0) (0,0,2.5,0) (0,0,0,1)\nspace origin: (31.5,-12.25,-140,0)\n"
        "kinds: space space space time\n\n"
    )
    path = tmp_path / "scan.nrrd"
    path.write_bytes(header.encode() + 2 * ct_values().tobytes(order="F"))
    if space.lower().startswith(("lp", "left-p")):
        assert np.allclose(read_scan(path, volume=1).grid.affine, affine_of(np.diag([-1, -1, 1])))
        return
    found = f"scan.nrrd: the space '{space.lower()}', whose sides would be taken for others; expected left-posterior-"
    with pytest.raises(ScanError, match=found):
        read_scan(path, volume=1)


def test_a_header_without_orientation_is_told(tmp_path: Path) -> None:
    header = "NRRD0004\ntype: int16\ndimension: 3\nsizes: 12 14 10\nspacings: 0.75 0.8 2.5\nencoding: raw\n"
    header += "endian: little\n\n"
    (tmp_path / "scan.nrrd").write_bytes(header.encode() + ct_values().tobytes(order="F"))
    scan = read_scan(tmp_path / "scan.nrrd")
    assert np.allclose(scan.grid.spacing_mm, SPACING_MM)
    assert "does not say how the axes lie" in scan.warnings[0]
    header = "ObjectType = Image\nNDims = 3\nDimSize = 12 14 10\nElementType = MET_SHORT\nElementDataFile = LOCAL\n"
    (tmp_path / "scan.mha").write_bytes(header.encode() + ct_values().tobytes(order="F"))
    scan = read_scan(tmp_path / "scan.mha")
    assert np.array_equal(scan.voxels, ct_values())
    assert "does not say how the axes lie" in scan.warnings[0]


SIDES, SPACING = "does not say how the axes lie", "does not say how far apart the voxels are"


def metaimage(path: Path, **fields: str) -> Path:
    """An uncompressed MetaImage of the test volume, with nothing of its geometry but these fields."""
    header = "NDims = 3\n" + "".join(f"{name} = {value}\n" for name, value in fields.items())
    header += "DimSize = 12 14 10\nElementType = MET_SHORT\nElementDataFile = LOCAL\n"
    path.write_bytes(header.encode() + ct_values().tobytes(order="F"))
    return path


def nrrd(path: Path, *fields: str) -> Path:
    """An uncompressed NRRD of the test volume, with nothing of its geometry but these fields."""
    lines = ["NRRD0005", "type: int16", "dimension: 3", *fields, "sizes: 12 14 10", "endian: little", "encoding: raw"]
    path.write_bytes("\n".join([*lines, "", ""]).encode() + ct_values().tobytes(order="F"))
    return path


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"TransformMatrix": "1 0 0 0 1 0 0 0 1", "ElementSpacing": "0.75 0.8 2.5"}, []),
        ({"TransformMatrix": "1 0 0 0 1 0 0 0 1", "ElementSize": "0.75 0.8 2.5"}, []),
        ({"TransformMatrix": "1 0 0 0 1 0 0 0 1"}, [SPACING]),
        ({"ElementSpacing": "0.75 0.8 2.5", "DistanceUnits": "mm"}, [SIDES]),
        ({}, [SIDES, SPACING]),
    ],
)
def test_what_a_metaimage_leaves_out_is_told(tmp_path: Path, fields: dict[str, str], told: list[str]) -> None:
    scan = read_scan(metaimage(tmp_path / "scan.mha", **fields))
    assert np.allclose(scan.grid.spacing_mm, (1, 1, 1) if SPACING in told else SPACING_MM)
    assert len(scan.warnings) == len(told)
    assert all(words in warning for words, warning in zip(told, scan.warnings, strict=True))


LPS_SPACE = "space: left-posterior-superior"
DIRECTIONS = "space directions: (0.75,0,0) (0,0.8,0) (0,0,2.5)"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ([LPS_SPACE, DIRECTIONS, 'space units: "mm" "mm" "mm"'], []),
        (["space: LPS", DIRECTIONS], []),
        (["space: 3D-right-handed", DIRECTIONS], [SIDES]),
        (["spacings: 0.75 0.8 2.5", 'units: "mm" "mm" "mm"'], [SIDES]),
        ([LPS_SPACE], [SPACING]),
        ([LPS_SPACE, "space directions: (0.75,0,0) (0,0.8,0) none"], [SPACING]),
        (["spacings: 0.75 0.8 nan"], [SIDES, SPACING]),
        ([], [SIDES, SPACING]),
    ],
)
def test_what_a_nrrd_leaves_out_is_told(tmp_path: Path, fields: list[str], told: list[str]) -> None:
    scan = read_scan(nrrd(tmp_path / "scan.nrrd", *fields))
    assert (scan.grid.spacing_mm[2] == 1) == (SPACING in told)
    assert len(scan.warnings) == len(told)
    assert all(words in warning for words, warning in zip(told, scan.warnings, strict=True))


def test_lengths_in_another_unit_are_refused(tmp_path: Path) -> None:
    words = r'lengths in "cm"; expected mm; write the file again in millimetres'
    with pytest.raises(ScanError, match=f"scan.mha: {words}"):
        read_scan(metaimage(tmp_path / "scan.mha", ElementSpacing="0.075 0.08 0.25", DistanceUnits="cm"))
    for fields in ([LPS_SPACE, 'space units: "cm" "cm" "cm"'], ["spacings: 0.075 0.08 0.25", 'units: "cm" "cm" "cm"']):
        with pytest.raises(ScanError, match=f"scan.nrrd: {words}"):
            read_scan(nrrd(tmp_path / "scan.nrrd", *fields))


@pytest.mark.parametrize(("kind", "dtype"), [("LONG", "<i4"), ("ULONG", "<u4"), ("LONG_LONG", "<i8")])
def test_what_a_metaimage_calls_long_has_32_bits(tmp_path: Path, kind: str, dtype: str) -> None:
    voxels = (ct_values() + 1024).astype(dtype)
    header = f"NDims = 3\nDimSize = 12 14 10\nElementType = MET_{kind}\nElementDataFile = LOCAL\n"
    (tmp_path / "scan.mha").write_bytes(header.encode() + voxels.tobytes(order="F"))
    assert np.array_equal(read_scan(tmp_path / "scan.mha").voxels, voxels)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_four_dimensions(tmp_path: Path, suffix: str) -> None:
    volumes = [itk_image(ct_values(seed=seed), rotation(5, 5, 5)) for seed in (1, 2)]
    path = tmp_path / f"scan{suffix}"
    SimpleITK.WriteImage(SimpleITK.JoinSeries(volumes), str(path))
    with pytest.raises(ScanError, match=r"4 dimensions \(12, 14, 10, 2\); .* choose one with --volume N"):
        read_scan(path)
    scan = read_scan(path, volume=1)
    assert np.array_equal(scan.voxels, ct_values(seed=2))
    assert np.allclose(scan.grid.affine, affine_of(rotation(5, 5, 5)), atol=1e-9)
    SimpleITK.WriteImage(SimpleITK.JoinSeries(volumes[:1]), str(path))
    assert np.array_equal(read_scan(path).voxels, ct_values(seed=1))


def check_read_as_itk_reads_it_without_itk(
    path: Path, volumes: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the volumes of a file are these, and those that ITK reads, though ITK's reader is not asked for voxels."""
    oracle = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path))).transpose(3, 2, 1, 0)
    monkeypatch.setattr(SimpleITK.ImageFileReader, "Execute", lambda reader: pytest.fail("unpacked twice"))
    for number, volume in enumerate(volumes):
        scan = read_scan(path, volume=number)
        assert scan.voxels.dtype == np.int16
        assert np.array_equal(scan.voxels, volume)
        assert np.array_equal(scan.voxels, oracle[..., number])


@pytest.mark.parametrize("field", ["BinaryDataByteOrderMSB", "ElementByteOrderMSB"])
def test_compressed_metaimages_are_read_as_itk_reads_them_and_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    header = "NDims = 4\nTransformMatrix = 1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1\nElementSpacing = 0.75 0.8 2.5 1\n"
    volumes = [ct_values(seed=seed) for seed in range(3)]
    packed = zlib.compress(b"".join(volume.astype(">i2").tobytes(order="F") for volume in volumes))
    header += f"DimSize = 12 14 10 3\nElementType = MET_SHORT\n{field} = True\nCompressedData = True\n"
    header += f"CompressedDataSize = {len(packed)}\nElementDataFile = LOCAL\n"
    path = tmp_path / "scan.mha"
    path.write_bytes(header.encode() + packed)
    check_read_as_itk_reads_it_without_itk(path, volumes, monkeypatch)


@pytest.mark.parametrize("field", ["encoding: gzip", "encoding: GZ", "data file: scan.gz\nencoding: gz"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_compressed_nrrds_are_read_as_itk_reads_them_and_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, line_end: str
) -> None:
    volumes = [ct_values(seed=seed) for seed in range(3)]
    gzipped = gzip.compress(b"".join(volume.astype(">i2").tobytes(order="F") for volume in volumes))
    header = "NRRD0005\n# by hand\ntype: int16\ndimension: 4\nsizes: 12 14 10 3\nspacings: 0.75 0.8 2.5 1\n"
    header += f"kinds: domain domain domain domain\nendian: big\nname:=a: b\n{field}\n\n"
    path, detached = tmp_path / "scan.nrrd", "file" in field
    path.write_bytes(header.replace("\n", line_end).encode() + (b"" if detached else gzipped))
    if detached:
        (tmp_path / "scan.gz").write_bytes(gzipped)
    check_read_as_itk_reads_it_without_itk(path, volumes, monkeypatch)


@pytest.mark.parametrize("skip", ["byte skip: 5", "line skip: 1", "data file: z%d.gz 0 9 1"])
def test_other_compressed_nrrds_are_left_to_itk(tmp_path: Path, skip: str) -> None:
    voxels = ct_values().tobytes(order="F")
    packed = {
        "byte skip: 5": gzip.compress(b"12345" + voxels),
        "line skip: 1": b"a line\n" + gzip.compress(voxels),
    }.get(skip, b"")
    header = f"NRRD0005\ntype: int16\ndimension: 3\n{LPS_SPACE}\n{DIRECTIONS}\nsizes: 12 14 10\nendian: little\n"
    header += f"encoding: gzip\n{skip}\n\n"
    (tmp_path / "scan.nrrd").write_bytes(header.encode() + packed)
    for z in range(10):
        (tmp_path / f"z{z}.gz").write_bytes(gzip.compress(ct_values()[..., z].tobytes(order="F")))
    assert np.array_equal(read_scan(tmp_path / "scan.nrrd").voxels, ct_values())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_mask_has_the_scans_geometry_to_the_last_bit(tmp_path: Path, suffix: str) -> None:
    image = itk_image(directions=rotation(3.3, -7.7, 1.1))
    SimpleITK.WriteImage(image, str(tmp_path / f"scan{suffix}"))
    labels = (np.arange(np.prod(SHAPE)).reshape(SHAPE) % 3).astype(np.uint8)
    write_labels(labels, tmp_path / f"mask{suffix}", read_scan(tmp_path / f"scan{suffix}"))
    was, mask = (SimpleITK.ReadImage(str(tmp_path / f"{name}{suffix}")) for name in ("scan", "mask"))
    assert mask.GetPixelID() == SimpleITK.sitkUInt8
    assert np.array_equal(SimpleITK.GetArrayFromImage(mask), labels.transpose(2, 1, 0))
    assert mask.GetOrigin() == was.GetOrigin()
    # NRRD stores the product of the two, which costs the last bit.
    tolerance = 1e-15 if suffix == ".nrrd" else 0
    assert np.abs(np.subtract(mask.GetSpacing(), was.GetSpacing())).max() <= tolerance
    assert np.abs(np.subtract(mask.GetDirection(), was.GetDirection())).max() <= tolerance


def header(path: Path) -> list[bytes]:
    """Its lines, without the number of bytes that the voxels take compressed."""
    content = path.read_bytes()
    end = content.index(b"\n", content.index(b"ElementDataFile")) if path.suffix != ".nrrd" else content.index(b"\n\n")
    return [line for line in content[:end].split(b"\n") if not line.startswith(b"CompressedDataSize")]


def check_written_as_simpleitk_writes(folder: Path, voxels: np.ndarray, directions: np.ndarray) -> None:
    grid = Grid(SHAPE, affine_of(directions))
    image = itk_image(voxels)
    geometry = ItkGeometry.of_grid(grid)
    image.SetOrigin(geometry.origin)
    image.SetSpacing(geometry.spacing)
    image.SetDirection(geometry.direction)
    (folder / "itk").mkdir()
    for suffix in SUFFIXES:
        path, own = folder / "itk" / f"scan{suffix}", folder / f"scan{suffix}"
        SimpleITK.WriteImage(image, str(path), useCompression=True)
        write_scan(voxels, grid, own)
        assert header(own) == header(path)
        read, oracle = SimpleITK.ReadImage(str(own)), SimpleITK.ReadImage(str(path))
        assert read.GetPixelID() == oracle.GetPixelID()
        assert np.array_equal(SimpleITK.GetArrayFromImage(read), voxels.transpose(2, 1, 0))
        assert (read.GetOrigin(), read.GetSpacing(), read.GetDirection()) == (
            oracle.GetOrigin(), oracle.GetSpacing(), oracle.GetDirection(),
        )  # fmt: skip


@pytest.mark.parametrize("directions", [*ORIENTATIONS, rotation(10, 20, -15)])
def test_files_have_the_headers_that_simpleitk_writes(tmp_path: Path, directions: np.ndarray) -> None:
    check_written_as_simpleitk_writes(tmp_path, ct_values(), directions)


@pytest.mark.parametrize("dtype", VOXEL_TYPES.values())
def test_every_type_is_written_as_simpleitk_writes_it(tmp_path: Path, dtype: str) -> None:
    voxels = np.clip(ct_values() + 1024, 0, 120).astype(dtype)
    check_written_as_simpleitk_writes(tmp_path, voxels, rotation(3.3, -7.7, 1.1))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_voxels_are_written_some_slices_at_a_time_whatever_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(packed, "SLAB_BYTES", 3 * 2 * 12 * 14)  # of 10 slices 3, 3, 3 and 1
    for order, voxels in (("C", np.ascontiguousarray(ct_values())), ("F", ct_values()), ("view", ct_values()[::-1])):
        path = tmp_path / f"{order}{suffix}"
        write_scan(voxels, oblique_grid(), path)
        image = SimpleITK.ReadImage(str(path))
        assert np.array_equal(SimpleITK.GetArrayFromImage(image), voxels.transpose(2, 1, 0))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffixes_in_capitals(tmp_path: Path, suffix: str) -> None:
    labels = (np.arange(np.prod(SHAPE)).reshape(SHAPE) % 3).astype(np.uint8)
    path = tmp_path / f"mask{suffix.upper()}"
    write_labels(labels, path, scan_of(itk_image()))
    assert [file.name for file in sorted(tmp_path.iterdir())] == [path.name, *(["mask.zraw"] * (suffix == ".mhd"))]
    assert np.array_equal(read_labels(path)[0], labels)


@pytest.mark.parametrize("target", SUFFIXES)
def test_rounded_cosines(tmp_path: Path, target: str) -> None:
    """Their columns are not quite of length 1; NRRD, which has no spacing of its own, takes that for the spacing's."""
    image = itk_image()
    image.SetDirection((0.9848, 0.1736, 0, -0.1736, 0.9848, 0, 0, 0, 1))
    SimpleITK.WriteImage(image, str(tmp_path / "scan.mha"))
    scan = read_scan(tmp_path / "scan.mha")
    write_labels(np.ones(SHAPE, np.uint8), tmp_path / f"mask{target}", scan)
    _, there = read_labels(tmp_path / f"mask{target}")
    assert np.allclose(there.affine, scan.grid.affine, atol=1e-9)


@pytest.mark.parametrize("source", [".nii.gz", *SUFFIXES])
@pytest.mark.parametrize("target", [".nii", ".nii.gz", *SUFFIXES])
def test_write_then_read_from_any_format_to_any(tmp_path: Path, source: str, target: str) -> None:
    grid = oblique_grid()
    write_scan(ct_values(), grid, tmp_path / f"scan{source}")
    scan = read_scan(tmp_path / f"scan{source}")
    assert np.array_equal(scan.voxels, ct_values())
    assert scan.grid.matches(grid, 1e-4)
    labels = np.random.default_rng(0).integers(0, 3, SHAPE).astype(np.uint8)
    write_labels(labels, tmp_path / f"mask{target}", scan)
    read, there = read_labels(tmp_path / f"mask{target}")
    assert np.array_equal(read, labels)
    assert there.matches(scan.grid, 1e-4)


def test_an_image_in_memory_is_not_copied_and_outlives_its_owner() -> None:
    image = itk_image(directions=rotation(1, 2, 3))
    view = SimpleITK.GetArrayViewFromImage(image)
    scan = scan_of(image)
    assert scan.voxels.__array_interface__["data"][0] == view.__array_interface__["data"][0]
    voxels = scan.voxels
    del view, image, scan
    gc.collect()
    filler = [np.full((64, 1024), i) for i in range(20)]
    assert np.array_equal(voxels, ct_values())
    assert len(filler) == 20


def test_images_in_memory_that_are_no_scan() -> None:
    image = itk_image()
    said = r"2 dimensions \(12, 14\); expected one 3D volume; give the whole series or stack, not one slice of it$"
    with pytest.raises(ScanError, match=f"^SimpleITK image: {said}"):
        scan_of(image[:, :, 3])
    with pytest.raises(ScanError, match=f"^nibabel image: {said}"):
        scan_of(nibabel.Nifti1Image(ct_values()[..., 3], np.eye(4)))
    with pytest.raises(ScanError, match=f"^phantom: {said}"):
        scan_of(image[:, :, 3], source="phantom")
    with pytest.raises(ScanError, match="phantom: 3 numbers per voxel"):
        scan_of(SimpleITK.Compose([image] * 3), source="phantom")
    for kind in (SimpleITK.sitkLabelUInt8, SimpleITK.sitkComplexFloat32):
        with pytest.raises(ScanError, match=r"^SimpleITK image: voxels of type .+; expected one number per voxel"):
            scan_of(SimpleITK.Image([5, 5, 5], kind))
    assert scan_of(SimpleITK.JoinSeries([image])).voxels.shape == SHAPE
