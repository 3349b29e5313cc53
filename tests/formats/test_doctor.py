"""The doctor: says what is odd, undoes a known offset, and leaves every real kind of CT alone."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import nibabel
import numpy as np
import pytest

from cascadeseg.formats import Scan, read_scan, scan_of, write_scan
from cascadeseg.geometry import Grid
from tests.formats.volumes import affine_of, ct_values, oblique_grid

SHAPE = (40, 44, 30)


def chest() -> np.ndarray:
    return ct_values(SHAPE)


def checked(values: np.ndarray) -> Scan:
    return scan_of(values, affine_of())


def test_a_chest_is_healthy() -> None:
    scan = checked(chest())
    assert scan.warnings == ()
    assert (scan.slope, scan.intercept) == (1.0, 0.0)


def test_other_parts_of_the_body_are_healthy() -> None:
    rng = np.random.default_rng(1)
    x, y, _ = np.meshgrid(*[np.linspace(-1, 1, n) for n in SHAPE], indexing="ij")
    noise = rng.normal(0, 15, SHAPE)
    head = np.where(np.hypot(x, y) < 0.8, 900.0, -1000) + noise
    head[np.hypot(x, y) < 0.7] = 35 + noise[np.hypot(x, y) < 0.7]
    leg = np.where(np.hypot(x, y) < 0.3, -90.0, -1000) + noise
    leg[np.hypot(x, y) < 0.25] = 60 + noise[np.hypot(x, y) < 0.25]
    leg[np.hypot(x, y) < 0.1] = 1200
    abdomen = chest()
    abdomen[abdomen < -500] = 50
    lung = chest()[10:16, 18:26]
    metal = chest()
    metal[20:22, 20:22] = 30000
    for values in (head, leg, abdomen, lung, metal, np.clip(chest(), -1000, 400)):
        assert [w for w in checked(values.astype(np.int16)).warnings if "slices along" not in w] == []


@pytest.mark.parametrize("offset", [1024, 1000, -1024])
@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_an_offset_is_undone_and_told(offset: int, dtype: type) -> None:
    scan = checked((chest() + offset).astype(dtype))
    sign = "plus" if offset > 0 else "minus"
    assert scan.warnings == (f"the values are HU {sign} {abs(offset)}; this was undone",)
    assert np.array_equal(scan.hu(), chest())


def test_an_offset_of_values_with_a_slope() -> None:
    image = nibabel.Nifti1Image(chest() + 1024, affine_of())
    nifti = scan_of(image)
    assert nifti.intercept == -1024
    assert nifti.voxels.dtype == np.int16


def test_signed_values_read_as_unsigned() -> None:
    scan = checked(chest().view(np.uint16))
    assert scan.warnings == ("negative values were stored as unsigned ones; they are read as signed",)
    assert np.array_equal(scan.hu(), chest())


def test_large_unsigned_values_that_a_slope_makes_hu(tmp_path: Path) -> None:
    """As nibabel writes floating-point HU in uint16: all of it is used, and the slope is negative."""
    image = nibabel.Nifti1Image(chest().astype(np.float32), affine_of())
    image.set_data_dtype(np.uint16)
    image.to_filename(tmp_path / "scan.nii")
    scan = read_scan(tmp_path / "scan.nii")
    assert scan.voxels.dtype == np.uint16
    assert scan.slope < 0
    assert scan.warnings == ()
    assert np.abs(scan.hu() - chest()).max() < 0.05


@pytest.mark.parametrize("level", [-2000, -2048, -3024])
def test_padding_is_told(level: int) -> None:
    values = chest()
    x, y = np.meshgrid(*[np.linspace(-1, 1, n) for n in SHAPE[:2]], indexing="ij")
    values[np.hypot(x, y) > 1.05] = level
    (warning,) = checked(values).warnings
    assert warning.startswith(f"padding of {level} HU (")
    assert warning.endswith("% of the volume) is read as air")
    padded_and_shifted = checked(values + np.int16(1024))
    assert padded_and_shifted.intercept == -1024
    assert padded_and_shifted.warnings[0] == warning


def test_voxels_that_are_not_numbers_are_counted_and_read_as_air() -> None:
    values = chest().astype(np.float32)
    values[3, 4, 5], values[7, 7, 7], values[1, 1, 1] = np.nan, np.inf, -np.inf
    scan = checked(values)
    assert scan.warnings == ("3 voxels (under 0.01 % of all) are not numbers and are read as air",)
    assert np.isfinite(scan.hu()).all()
    assert (scan.hu()[3, 4, 5], scan.hu()[7, 7, 7]) == (-1024, -1024)


@pytest.mark.parametrize(("slices", "share"), [(1, "3.3 %"), (10, "33 %"), (29, "97 %")])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_share_of_voxels_that_are_not_numbers_is_in_per_cent(slices: int, share: str, value: float) -> None:
    values = chest().astype(np.float32)
    values[..., :slices] = value
    assert f"({share} of all) are not numbers" in checked(values).warnings[0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_volume_without_a_number(value: float) -> None:
    nothing = checked(np.full(SHAPE, value, np.float32))
    assert nothing.warnings == ("no voxel is a number, so there is nothing in it: the mask may be wrong",)
    some = np.full((100, 100, 20), value, np.float32)
    some[1, 1, 1] = 40  # where the lattice does not look
    assert checked(some).warnings == (
        "199,999 voxels (100 % of all) are not numbers and are read as air",
        "hardly a voxel holds a number: the mask may be wrong",
    )


@pytest.mark.parametrize(
    ("dtype", "value", "said"), [("f4", 1e30, "1e+30"), ("f8", 2e5, "2e+05"), ("i4", 2**31 - 1, "2.147e+09")]
)
def test_values_that_no_ct_has(dtype: str, value: float, said: str) -> None:
    values = chest().astype(dtype)
    values[0, 0, 0] = value
    assert checked(values).warnings == (f"values up to {said} HU, which no CT has: the mask may be wrong",)
    values[0, 0, 0] = 90_000
    assert checked(values).warnings == ()


def test_values_that_no_ct_has_beside_others_that_are_odd() -> None:
    values = chest().astype(np.float32)
    values[1, 1, 1] = 1e30
    values[1, 1, 2] = np.nan
    windowed = np.where(values > 1e5, values, values.clip(-160, 240))
    assert [line.partition(" ")[0] for line in checked(windowed).warnings] == ["1", "all", "values"]
    assert len(checked(values[..., ::-1] + 1024).warnings) == 3
    assert len(checked(-chest().astype(np.float32) * 1e6).warnings) == 1, "said once"
    assert len(checked(chest().astype(np.float32) * 1e6).warnings) == 1, "they are made HU"


def test_the_highest_value_of_a_negative_slope() -> None:
    image = nibabel.Nifti1Image(-chest().astype(np.float32), affine_of())
    image.dataobj[5, 5, 5] = -1e6
    image.header.set_slope_inter(-1, 0)
    image = nibabel.Nifti1Image.from_bytes(image.to_bytes())
    assert scan_of(image).warnings == ("values up to 1e+06 HU, which no CT has: the mask may be wrong",)


def greys(low: int, high: int, white: float, values: np.ndarray | None = None) -> np.ndarray:
    """What a window from ``low`` to ``high`` HU shows, black 0, white 1 or 255 (whole numbers)."""
    values = chest() if values is None else values
    shown = ((values.clip(low, high) - low) / (high - low) * white).astype(np.float32)
    return shown if white == 1 else shown.round().astype(np.uint8)


@pytest.mark.parametrize("white", [1, 255])
@pytest.mark.parametrize(("low", "high"), [(-1250, 250), (-1000, 400), (-1024, 1024), (-1350, 150)])
@pytest.mark.parametrize("padded", [False, True])
def test_greys_in_which_lungs_can_be_seen_are_made_hu(low: int, high: int, white: float, padded: bool) -> None:
    values = chest()
    values[np.abs(values + 850) < 60] -= 50  # breathed in
    if padded:
        x, y = np.meshgrid(*[np.linspace(-1, 1, n) for n in SHAPE[:2]], indexing="ij")
        values[np.hypot(x, y) > 1.2] = -2048
    scan = checked(greys(low, high, white, values))
    (warning,) = scan.warnings
    assert re.fullmatch(
        r"values from \S+ to \S+ were made HU by what looks like a CT's air and tissue: the mask may be wrong", warning
    )
    for hu in (-1000, -900, 40):
        assert abs(np.median(scan.hu()[np.abs(values - hu) < 40]) - hu) < 75


def test_greys_that_are_made_hu_keep_what_the_header_said_of_them() -> None:
    image = nibabel.Nifti1Image(greys(-1250, 250, 255), affine_of())
    image.header.set_slope_inter(0.5, 10)
    image = nibabel.Nifti1Image.from_bytes(image.to_bytes())
    assert np.allclose(scan_of(image).hu(), checked(greys(-1250, 250, 255)).hu(), atol=1)


@pytest.mark.parametrize(
    ("slope", "intercept"),
    [
        (0.2, 0), (0.6, 0), (1.4, 0), (3, 0), (100, 0), (1e6, 0), (1, -1100), (1, -300), (1, -60), (1, 400), (1, 900),
        (0.001, 0), (0.5, 500), (16, 16384), (2, -3000),
    ],
)  # fmt: skip
@pytest.mark.parametrize("padded", [False, True])
def test_hu_of_another_scale_are_made_hu(slope: float, intercept: float, padded: bool) -> None:
    values = chest().astype(np.float32)
    if padded:
        x, y = np.meshgrid(*[np.linspace(-1, 1, n) for n in SHAPE[:2]], indexing="ij")
        values[np.hypot(x, y) > 1.2] = -3024
    scan = checked((slope * values + intercept).astype(np.float32))
    assert re.fullmatch(
        r"values from \S+ to \S+ were made HU by what looks like a CT's air and tissue: the mask may be wrong",
        scan.warnings[-1],
    )
    exact = 3 if slope == 1 or intercept == 0 else 60
    body = values > -1100
    assert np.abs(scan.hu() - values)[body & (values < 100)].max() < exact + 1


@pytest.mark.parametrize(("slope", "intercept"), [(0.9, 0), (1.03, 0), (1, -30), (1, 60)])
def test_small_errors_are_left_alone(slope: float, intercept: float) -> None:
    """Air is as far from -1000 HU in scans that are right, where noise is clipped or the field of view is narrow."""
    scan = checked((slope * chest() + intercept).astype(np.float32))
    assert (scan.slope, scan.intercept, scan.warnings) == (1, 0, ())


def test_padding_that_lossy_compression_blurred_is_not_taken_for_air() -> None:
    values = chest()
    x, y = np.meshgrid(*[np.linspace(-1, 1, n) for n in SHAPE[:2]], indexing="ij")
    values[np.hypot(x, y) > 1.05] = -2048
    values += np.random.default_rng(0).normal(0, 8, SHAPE).round().astype(np.int16)
    scan = checked(values)
    assert (scan.slope, scan.intercept) == (1, 0)


def test_parts_of_scans_that_lack_air_or_tissue_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    air = rng.normal(-997, 4, SHAPE)
    skin = np.where(rng.random(SHAPE) < 0.02, rng.normal(-196, 20, SHAPE), air)
    sick_lung = np.where(rng.random(SHAPE) < 0.6, rng.normal(-620, 100, SHAPE), rng.normal(40, 20, SHAPE))
    for values in (skin, sick_lung):
        assert checked(values.round().astype(np.int16)).warnings == ()


@pytest.mark.parametrize(("lung", "tissue"), [(-880, 40), (-800, 60), (-720, -60), (-830, 400)])
def test_lung_without_air_beside_it_is_not_taken_for_air(lung: int, tissue: int) -> None:
    rng = np.random.default_rng(0)
    values = np.where(rng.random(SHAPE) < 0.6, rng.normal(lung, 30, SHAPE), rng.normal(tissue, 20, SHAPE))
    assert checked(values.astype(np.int16)).warnings == ()
    if tissue < 100:
        assert checked((values + 1024).astype(np.int16)).intercept in (-1024, -1000)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.full(SHAPE, 7, np.int16), "every voxel is 7, so there is nothing in it"),
        (greys(-160, 240, 1), "values from 0 to 1 cannot be HU"),
        (greys(-160, 240, 255), "values from 0 to 255 look like an 8-bit"),
        ((chest() > -200).astype(np.uint8), "values from 0 to 1 cannot be HU"),
        (-chest(), "the values look inverted"),
        (4095 - (chest() + 1024), "hold neither air nor fat"),
        (np.random.default_rng(0).uniform(0, 2000, SHAPE), "hold neither air nor fat"),
        (chest().clip(-160, 240), r"all values below -160 HU are cut off \(a windowed scan\?\)"),
        (-chest().astype(np.float32) * 100, "cannot be HU"),
        (np.random.default_rng(0).normal(0, 8, SHAPE).astype(np.float32), "cannot be HU"),
    ],
    ids=[
        "constant",
        "unit",
        "8-bit",
        "mask",
        "inverted",
        "inverted 12-bit",
        "uniform",
        "windowed",
        "inverted and scaled",
        "noise",
    ],
)
def test_values_that_cannot_be_hu(values: np.ndarray, words: str) -> None:
    (warning,) = checked(values).warnings
    assert warning.endswith(": the mask may be wrong")
    assert re.search(words, warning)


def test_values_that_are_all_lower_than_air() -> None:
    scan = checked(chest() // 2 - 2000)
    assert scan.floor_hu is None


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("low", "floor"), [(-160, -160), (-600, -600), (-880, -880), (-100, None), (-950, None)])
def test_where_a_window_cut_values_off(low: int, floor: int | None, padded: bool) -> None:
    values = chest().clip(low, 240)
    if padded:
        x, y = np.meshgrid(*[np.linspace(-1, 1, n) for n in SHAPE[:2]], indexing="ij")
        values[np.hypot(x, y) > 1.05] = -2000
    scan = checked(values)
    assert scan.floor_hu == floor
    assert any(f"below {low} HU are cut off" in warning for warning in scan.warnings) == (low > -900)
    assert any("are read as lung" in warning for warning in scan.warnings) == (floor is not None)


def test_coarse_and_few_slices() -> None:
    thick = scan_of(chest(), np.diag([0.75, 0.8, 10, 1]))
    assert thick.warnings == ("voxels of 10 mm are too coarse for a precise mask",)
    assert scan_of(chest()[..., :4], affine_of()).warnings == ("only 4 slices along one axis",)


def test_a_field_of_view_that_no_chest_has() -> None:
    def told(*spacing: float) -> tuple[str, ...]:
        return scan_of(chest(), np.diag([*spacing, 1])).warnings

    assert told(0.075, 0.08, 0.25) == ("a field of view of 3 x 3.52 x 7.5 mm: is its spacing in cm?",)
    assert told(0.075, 0.08, 3.4) == ()
    assert told(0.75, 0.8, 2.5) == (), "a cut-out"


def test_reading_adds_what_the_doctor_says(tmp_path: Path) -> None:
    write_scan(ct_values() + np.int16(1024), oblique_grid(), tmp_path / "scan.nii.gz")
    scan = read_scan(tmp_path / "scan.nii.gz")
    assert scan.warnings == ("the values are HU plus 1024; this was undone",)
    assert np.array_equal(scan.hu(), ct_values())


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_no_copy_of_a_scan_is_made(tmp_path: Path, suffix: str) -> None:
    values = ct_values((192, 192, 96))
    write_scan(values, Grid.axis_aligned(values.shape, (1, 1, 1)), tmp_path / f"scan{suffix}")
    read_scan(tmp_path / f"scan{suffix}")  # imports done
    tracemalloc.start()
    scan = read_scan(tmp_path / f"scan{suffix}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(scan.voxels, values)
    lattice_bytes = 6e6
    assert peak < lattice_bytes + (0 if suffix == ".nii" else values.nbytes)
