"""NIfTI: every type and header kind against nibabel, the rule about forms, and masks on the exact header."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from cascadeseg.errors import ScanError
from cascadeseg.formats import Scan, read_labels, read_outline, read_scan, write_labels, write_scan
from tests.formats.volumes import ORIENTATIONS, SHAPE, SPACING_MM, affine_of, ct_values, oblique_grid, rotation

SUFFIXES = [".nii", ".nii.gz"]


def stored(dtype: Any) -> np.ndarray:
    """CT values in a type: of unsigned ones the raw 12-bit values."""
    values = ct_values()
    dtype = np.dtype(dtype)
    return (values if dtype.kind in "if" and dtype.itemsize > 1 else np.clip(values + 1024, 0, 255)).astype(dtype)


def saved(path: Path, voxels: np.ndarray | None = None, affine: np.ndarray | None = None, **fields: Any) -> Path:
    """A NIfTI file by nibabel, with raw header fields set past nibabel's own tidying."""
    image = nibabel.Nifti1Image(ct_values() if voxels is None else voxels, affine_of() if affine is None else affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, path)
    if fields:
        patch_header(path, **fields)
    return path


def patch_header(path: Path, **fields: Any) -> None:
    packed = path.name.endswith(".gz")
    content = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    header = nibabel.Nifti1Header(content[:348], check=False)
    for name, value in fields.items():
        header[name] = value
    content = header.binaryblock + content[348:]
    path.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "f4", "f8"])
def test_voxels_are_nibabels_bit_for_bit(tmp_path: Path, dtype: str, order: str, suffix: str) -> None:
    path = tmp_path / f"scan{suffix}"
    header = nibabel.Nifti1Header(endianness=order)
    header.set_data_dtype(np.dtype(dtype))
    nibabel.save(nibabel.Nifti1Image(stored(dtype), affine_of(), header), path)
    scan = read_scan(path)
    expected = np.asanyarray(nibabel.load(path).dataobj)
    assert np.array_equal(scan.voxels, expected)
    assert scan.voxels.dtype == np.dtype(dtype)
    assert scan.voxels.dtype.isnative
    assert np.array_equal(scan.grid.affine, nibabel.load(path).affine)


def test_an_uncompressed_file_is_mapped_and_never_changed(tmp_path: Path) -> None:
    path = saved(tmp_path / "scan.nii")
    before = path.read_bytes()
    scan = read_scan(path)
    assert isinstance(scan.voxels.base, np.memmap)
    scan.voxels[0, 0, 0] = 77
    assert path.read_bytes() == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_slope_and_intercept_stay_aside(tmp_path: Path, suffix: str) -> None:
    raw = ((ct_values() + 1024) // 2).astype(np.uint16)
    path = saved(tmp_path / f"scan{suffix}", raw, scl_slope=2.0, scl_inter=-1024)
    scan = read_scan(path)
    assert (scan.voxels.dtype, scan.slope, scan.intercept) == (np.uint16, 2.0, -1024.0)
    assert np.allclose(scan.hu(), nibabel.load(path).get_fdata())


@pytest.mark.parametrize(("slope", "inter"), [(0, 55), (np.nan, 3), (np.nan, np.nan), (np.inf, 0), (1, np.nan)])
def test_a_slope_without_meaning_is_one(tmp_path: Path, slope: float, inter: float) -> None:
    scan = read_scan(saved(tmp_path / "scan.nii.gz", scl_slope=slope, scl_inter=inter))
    assert (scan.slope, scan.intercept) == (1.0, 0.0)


def test_nifti2_and_extensions(tmp_path: Path) -> None:
    image = nibabel.Nifti2Image(ct_values(), affine_of())
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"hello" * 20))
    for suffix in SUFFIXES:
        nibabel.save(image, tmp_path / f"scan{suffix}")
        scan = read_scan(tmp_path / f"scan{suffix}")
        assert np.array_equal(scan.voxels, ct_values())
        write_labels(np.ones(SHAPE, np.uint8), tmp_path / f"mask{suffix}", scan)
        assert isinstance(nibabel.load(tmp_path / f"mask{suffix}"), nibabel.Nifti2Image)


@pytest.mark.parametrize("kind", [nibabel.Nifti1Pair, nibabel.AnalyzeImage])
def test_the_outline_of_a_pair_is_its_header(tmp_path: Path, kind: Any) -> None:
    nibabel.save(kind(ct_values(), affine_of()), tmp_path / "scan.img")
    outline, scan = read_outline(tmp_path / "scan.hdr"), read_scan(tmp_path / "scan.hdr")
    assert outline.grid.matches(scan.grid)
    assert outline.voxels.strides == (0, 0, 0), "no voxel is read"


@pytest.mark.parametrize("kind", [nibabel.Nifti1Pair, nibabel.AnalyzeImage])
def test_header_and_image_pairs(tmp_path: Path, kind: Any) -> None:
    nibabel.save(kind(ct_values(), np.diag([-0.75, 0.8, 2.5, 1])), tmp_path / "scan.img")
    scan = read_scan(tmp_path / "scan.hdr")
    assert np.array_equal(scan.voxels, ct_values())
    assert np.allclose(scan.grid.affine[:3, :3], np.diag([-0.75, 0.8, 2.5]))
    write_labels(np.ones(SHAPE, np.uint8), tmp_path / "mask.nii.gz", scan)
    assert np.allclose(nibabel.load(tmp_path / "mask.nii.gz").affine, scan.grid.affine, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "header_kind", "intercept"),
    [
        (nibabel.Nifti1Pair, nibabel.nifti1.Nifti1PairHeader, -500),
        (nibabel.Nifti2Pair, nibabel.nifti2.Nifti2PairHeader, -500),
        (nibabel.AnalyzeImage, nibabel.spm2analyze.Spm2AnalyzeHeader, 0),
    ],
)
def test_slope_and_intercept_of_pairs(tmp_path: Path, kind: Any, header_kind: Any, intercept: int) -> None:
    path = tmp_path / "scan.hdr"
    stored = 2 * (ct_values() - np.int16(intercept))
    nibabel.save(kind(stored, np.diag([-0.75, 0.8, 2.5, 1])), tmp_path / "scan.img")
    content = path.read_bytes()
    header = header_kind(content[: header_kind.sizeof_hdr], check=False)
    header["scl_slope"] = 0.5
    if intercept:
        header["scl_inter"] = intercept
    path.write_bytes(header.binaryblock + content[header_kind.sizeof_hdr :])
    assert np.array_equal(nibabel.load(path).get_fdata(), ct_values())
    for opened in (path, path.with_suffix(".img")):
        scan = read_scan(opened)
        assert scan.voxels.dtype == np.int16
        assert np.array_equal(scan.hu(), ct_values())


@pytest.mark.parametrize("name", ["packed.nii", "plain.nii.gz", "räumlich über 2.nii.gz", "A.NII.GZ"])
def test_content_decides_and_not_the_name(tmp_path: Path, name: str) -> None:
    packed = saved(tmp_path / "whole.nii.gz").read_bytes()
    path = tmp_path / name
    path.write_bytes(gzip.decompress(packed) if name.startswith("plain") else packed)
    assert np.array_equal(read_scan(path).voxels, ct_values())


# ------------------------------------------------------------------------------------------------ 4D


@pytest.mark.parametrize("shape", [(*SHAPE, 1), (*SHAPE, 1, 1)])
def test_axes_of_one_do_not_count(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = saved(tmp_path / "scan.nii.gz", ct_values().reshape(shape))
    scan = read_scan(path)
    assert scan.voxels.shape == SHAPE
    write_labels(np.ones(SHAPE, np.uint8), tmp_path / "mask.nii.gz", scan)
    assert nibabel.load(tmp_path / "mask.nii.gz").shape == SHAPE


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_volume_of_a_4d_file(tmp_path: Path, suffix: str) -> None:
    both = np.stack([ct_values(seed=1), ct_values(seed=2)], axis=3)
    path = saved(tmp_path / f"scan{suffix}", both)
    for index in (0, 1):
        assert np.array_equal(read_scan(path, volume=index).voxels, both[..., index])
    with pytest.raises(ScanError, match=r"scan.nii(.gz)?: no volume 2; expected 0 to 1"):
        read_scan(path, volume=2)
    words = r"scan.nii(.gz)?: 4 dimensions \(12, 14, 10, 2\); expected one 3D volume; choose one with --volume N"
    with pytest.raises(ScanError, match=words):
        read_scan(path)


def test_volume_of_a_3d_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "scan.nii.gz")
    assert np.array_equal(read_scan(path, volume=0).voxels, ct_values())
    with pytest.raises(ScanError, match="no volume 1; expected 0, the only one"):
        read_scan(path, volume=1)


# ------------------------------------------------------------------------------------------------ forms


def with_forms(path: Path, sform: np.ndarray | None, qform: np.ndarray | None, codes: tuple[int, int]) -> Path:
    image = nibabel.Nifti1Image(ct_values(), None)
    image.header.set_zooms(SPACING_MM)
    if qform is not None:
        image.header.set_qform(qform, code=codes[1])
    if sform is not None:
        image.header.set_sform(sform, code=codes[0])
    image.header["sform_code"], image.header["qform_code"] = codes
    block, voxels = image.header, np.asfortranarray(ct_values())
    block["magic"], block["vox_offset"] = b"n+1", 352
    path.write_bytes(gzip.compress(block.binaryblock + bytes(4) + voxels.tobytes(order="F")))
    return path


LEFT = affine_of(np.diag([-1, 1, 1]))
OBLIQUE = affine_of(rotation(5, 6, 7))


def test_the_sform_is_preferred_and_a_disagreement_is_told(tmp_path: Path) -> None:
    scan = read_scan(with_forms(tmp_path / "scan.nii.gz", OBLIQUE, LEFT, (1, 1)))
    assert np.allclose(scan.grid.affine, OBLIQUE, atol=1e-5)
    (warning,) = scan.warnings
    assert warning.startswith("sform (RAS, 0.75 x 0.8 x 2.5 mm, origin -31.5, 12.25, -140) and qform (LAS, ")
    assert "the sform was used" in warning


def test_forms_that_agree_are_not_mentioned(tmp_path: Path) -> None:
    assert read_scan(with_forms(tmp_path / "scan.nii.gz", OBLIQUE, OBLIQUE, (1, 1))).warnings == ()


def test_only_one_form(tmp_path: Path) -> None:
    scan = read_scan(with_forms(tmp_path / "scan.nii.gz", None, OBLIQUE, (0, 1)))
    assert np.allclose(scan.grid.affine, OBLIQUE, atol=1e-4)
    assert scan.warnings == ()
    scan = read_scan(with_forms(tmp_path / "scan.nii.gz", OBLIQUE, LEFT, (2, 0)))
    assert np.allclose(scan.grid.affine, OBLIQUE, atol=1e-5)
    assert scan.warnings == ()


def test_an_sform_that_is_no_grid_gives_way_to_the_qform(tmp_path: Path) -> None:
    sheared = LEFT.copy()
    sheared[0, 2] = 0.6
    scan = read_scan(with_forms(tmp_path / "scan.nii.gz", sheared, LEFT, (1, 1)))
    assert np.allclose(scan.grid.affine, LEFT, atol=1e-4)
    assert "the sform cannot be a voxel grid (sheared by 13.50 degrees); the qform was used" in scan.warnings
    scan = read_scan(with_forms(tmp_path / "scan.nii.gz", np.zeros((4, 4)), LEFT, (1, 1)))
    assert np.allclose(scan.grid.affine, LEFT, atol=1e-4)


def test_an_sform_with_an_origin_that_is_no_number_gives_way_to_the_qform(tmp_path: Path) -> None:
    lost = LEFT.copy()
    lost[1, 3] = np.nan
    scan = read_scan(with_forms(tmp_path / "scan.nii.gz", lost, LEFT, (1, 1)))
    assert np.allclose(scan.grid.affine, LEFT, atol=1e-4)
    assert scan.warnings == ("the sform cannot be a voxel grid (an origin that is not a number); the qform was used",)


def test_a_qform_that_is_no_grid_is_told_beside_the_sform(tmp_path: Path) -> None:
    path = with_forms(tmp_path / "scan.nii.gz", OBLIQUE, OBLIQUE, (1, 1))
    patch_header(path, quatern_b=0.9, quatern_c=0.9)
    scan = read_scan(path)
    assert np.allclose(scan.grid.affine, OBLIQUE, atol=1e-5)
    (warning,) = scan.warnings
    assert warning == "the qform cannot be a voxel grid (a quaternion or qfac without a meaning); the sform was used"
    patch_header(path, sform_code=0)
    with pytest.raises(ScanError, match=r"scan.nii.gz, qform: a quaternion or qfac without a meaning; exp"):
        read_scan(path)


@pytest.mark.parametrize("codes", [(0, 1), (1, 1)])
def test_a_qfac_of_zero_is_one(tmp_path: Path, codes: tuple[int, int]) -> None:
    path = with_forms(tmp_path / "scan.nii.gz", OBLIQUE, OBLIQUE, codes)
    patch_header(path, pixdim=[0, *SPACING_MM, 0, 0, 0, 0])
    scan = read_scan(path)
    assert np.allclose(scan.grid.affine, OBLIQUE, atol=1e-4)
    assert np.allclose(scan.grid.affine, nibabel.load(path).affine, atol=1e-9)
    assert scan.warnings == ()


def test_a_sheared_scan_is_refused_by_name(tmp_path: Path) -> None:
    sheared = LEFT.copy()
    sheared[0, 2] = 0.6
    path = with_forms(tmp_path / "scan.nii.gz", sheared, None, (1, 0))
    words = r"scan.nii.gz, sform: sheared axes \(13.50 degrees off a right angle\); expected axes at right angles"
    with pytest.raises(ScanError, match=words):
        read_scan(path)


def test_nearly_right_angles_are_repaired(tmp_path: Path) -> None:
    bent = LEFT.copy()
    bent[0, 2] = 2.5 * np.tan(np.radians(0.3))
    scan = read_scan(with_forms(tmp_path / "scan.nii.gz", bent, None, (1, 0)))
    directions = scan.grid.directions
    assert np.allclose(directions.T @ directions, np.eye(3), atol=1e-12)
    assert (
        np.abs(scan.grid.world(np.array(SHAPE) / 2) - (bent[:3, :3] @ np.array(SHAPE) / 2 + bent[:3, 3])).max() < 0.05
    )
    assert scan.warnings[0].startswith(
        "axes 0.300 degrees off a right angle were straightened; the corners moved by 0.0"
    )
    write_labels(np.ones(SHAPE, np.uint8), tmp_path / "mask.nii.gz", scan)
    assert np.array_equal(nibabel.load(tmp_path / "mask.nii.gz").affine, nibabel.load(tmp_path / "scan.nii.gz").affine)


def test_rounded_directions_are_repaired_without_a_word(tmp_path: Path) -> None:
    scan = read_scan(with_forms(tmp_path / "scan.nii.gz", affine_of(rotation(5, 6, 7).round(5)), None, (1, 0)))
    directions = scan.grid.directions
    assert np.allclose(directions.T @ directions, np.eye(3), atol=1e-12)
    assert scan.warnings == ()


def test_a_header_without_forms_is_read_as_nibabel_does(tmp_path: Path) -> None:
    path = with_forms(tmp_path / "scan.nii.gz", None, None, (0, 0))
    scan = read_scan(path)
    assert np.allclose(scan.grid.affine, nibabel.load(path).affine)
    assert "does not say how the axes lie" in scan.warnings[0]


@pytest.mark.parametrize(("code", "factor", "name"), [(1, 0.001, "metres"), (3, 1000.0, "micrometres")])
def test_units(tmp_path: Path, code: int, factor: float, name: str) -> None:
    small = affine_of() * factor
    small[3, 3] = 1
    path = saved(tmp_path / "scan.nii.gz", affine=small, xyzt_units=code)
    scan = read_scan(path)
    assert np.allclose(scan.grid.affine, affine_of(), rtol=1e-5)
    assert not any("metres" in warning for warning in scan.warnings)
    said = (
        f"voxels of 0.75 x 0.8 x 2.5 {name}, as the header has it, cannot be: they were read as mm; check the spacing"
    )
    for codes in ({}, {"sform_code": 0, "qform_code": 0}):
        careless = read_scan(saved(tmp_path / "scan.nii.gz", xyzt_units=code, **codes))
        assert np.allclose(careless.grid.spacing_mm, SPACING_MM, rtol=1e-5)
        assert careless.warnings[0] == said


def test_pixdim_that_disagrees_with_the_sform_is_told(tmp_path: Path) -> None:
    path = saved(tmp_path / "scan.nii.gz", pixdim=[1, 0.75, 0.8, 5, 0, 0, 0, 0], qform_code=0)
    (warning,) = read_scan(path).warnings
    assert warning.startswith("pixdim (0.75 x 0.8 x 5) and sform (RAS, 0.75 x 0.8 x 2.5 mm")


# ------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
@pytest.mark.parametrize("codes", [(1, 1), (2, 0), (0, 1), (4, 3), (0, 0)], ids=str)
def test_a_mask_has_the_scans_header(tmp_path: Path, codes: tuple[int, int], order: str, suffix: str) -> None:
    header = nibabel.Nifti1Header(endianness=order)
    header.set_xyzt_units("mm", "sec")
    image = nibabel.Nifti1Image(ct_values(), OBLIQUE, header)
    image.header.set_qform(OBLIQUE, code=codes[1])
    image.header.set_sform(OBLIQUE if codes[0] else None, code=codes[0])
    nibabel.save(image, tmp_path / "scan.nii.gz")
    labels = (np.arange(np.prod(SHAPE)).reshape(SHAPE) % 3).astype(np.uint8)
    write_labels(labels, tmp_path / f"mask{suffix}", read_scan(tmp_path / "scan.nii.gz"))
    was, mask = nibabel.load(tmp_path / "scan.nii.gz"), nibabel.load(tmp_path / f"mask{suffix}")
    assert np.array_equal(np.asanyarray(mask.dataobj), labels)
    assert mask.get_data_dtype() == np.uint8
    assert np.array_equal(mask.affine, was.affine)
    for field in ("sform_code", "qform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "xyzt_units"):
        assert mask.header[field] == was.header[field]
    for field in ("srow_x", "srow_y", "srow_z", "pixdim", "dim"):
        assert np.array_equal(mask.header[field], was.header[field])
    raw = tmp_path / f"mask{suffix}"
    unpacked = gzip.decompress(raw.read_bytes()) if suffix == ".nii.gz" else raw.read_bytes()
    assert float(nibabel.Nifti1Header(unpacked[:348])["scl_slope"]) == 1
    assert mask.header["intent_code"] == 1002
    assert bytes(mask.header["descrip"]).startswith(b"1 right lung, 2 left lung")


@pytest.mark.parametrize("directions", ORIENTATIONS[::5])
def test_a_volume_written_from_its_grid(tmp_path: Path, directions: np.ndarray) -> None:
    grid = type(oblique_grid())(SHAPE, affine_of(rotation(4, 3, 2) @ directions))
    write_scan(ct_values(), grid, tmp_path / "scan.nii.gz")
    image = nibabel.load(tmp_path / "scan.nii.gz")
    assert np.allclose(image.affine, grid.affine, atol=1e-4)
    assert np.allclose(image.get_qform(), grid.affine, atol=1e-3)
    assert image.get_data_dtype() == np.int16
    scan = read_scan(tmp_path / "scan.nii.gz")
    assert np.array_equal(scan.voxels, ct_values())
    assert scan.grid.matches(grid)


def test_writing_is_the_same_for_any_memory_layout(tmp_path: Path) -> None:
    scan = read_scan(saved(tmp_path / "scan.nii.gz"))
    labels = np.random.default_rng(0).integers(0, 3, SHAPE).astype(np.uint8)
    for name, array in [
        ("c", np.ascontiguousarray(labels)),
        ("f", np.asfortranarray(labels)),
        ("v", labels[::-1][::-1]),
    ]:
        write_labels(array, tmp_path / f"{name}.nii.gz", scan)
    assert len({(tmp_path / f"{name}.nii.gz").read_bytes() for name in "cfv"}) == 1


def test_a_mask_of_a_scan_in_memory(tmp_path: Path) -> None:
    scan = Scan(ct_values(), oblique_grid())
    write_labels(np.ones(SHAPE, np.uint8), tmp_path / "mask.nii.gz", scan)
    labels, grid = read_labels(tmp_path / "mask.nii.gz")
    assert labels.dtype == np.uint8
    assert grid.matches(scan.grid)
