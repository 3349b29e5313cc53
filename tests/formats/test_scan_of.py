"""Scans that are already in memory, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest

from cascadeseg.formats import read_scan, scan_of, write_labels
from tests.formats.volumes import SHAPE, affine_of, ct_values, oblique_grid


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_is_not_copied(order: str) -> None:
    values = np.array(ct_values(), order=order)  # type: ignore[call-overload]
    scan = scan_of(values, oblique_grid().affine, source="phantom")
    assert np.shares_memory(scan.voxels, values)
    assert scan.source == "phantom"
    assert scan.grid.matches(oblique_grid())
    assert scan_of(values.astype(">i2"), np.eye(4)).voxels.dtype.isnative


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_nibabel_image_is_not_copied(tmp_path: Path, order: str) -> None:
    values = np.array(ct_values(), order=order)  # type: ignore[call-overload]
    image = nibabel.Nifti1Image(values, oblique_grid().affine)
    scan = scan_of(image)
    assert np.shares_memory(scan.voxels, values)
    write_labels(np.ones(SHAPE, np.uint8), tmp_path / "mask.nii.gz", scan)
    assert np.allclose(nibabel.load(tmp_path / "mask.nii.gz").affine, image.affine, atol=1e-5)
    assert scan_of(nibabel.Nifti1Image(values[..., None], image.affine)).voxels.shape == SHAPE


def test_a_lazy_nibabel_image_keeps_its_stored_type(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(ct_values(), affine_of())
    nibabel.save(image, tmp_path / "scan.nii.gz")
    lazy = nibabel.load(tmp_path / "scan.nii.gz")
    scan, read = scan_of(lazy), read_scan(tmp_path / "scan.nii.gz")
    assert scan.voxels.dtype == np.int16
    assert np.array_equal(scan.voxels, read.voxels)
    assert np.array_equal(scan.grid.affine, read.grid.affine)
    scaled = nibabel.Nifti1Image((ct_values() + 1 / 3).astype(np.float32), affine_of())
    scaled.header.set_data_dtype(np.int16)
    nibabel.save(scaled, tmp_path / "scaled.nii.gz")
    lazy = nibabel.load(tmp_path / "scaled.nii.gz")
    assert scan_of(lazy).voxels.dtype == np.int16
    assert np.allclose(scan_of(lazy).hu(), lazy.get_fdata(), atol=1e-2)


def test_importing_formats_loads_no_library_of_formats() -> None:
    code = (
        "import sys, cascadeseg.formats; "
        "print(sorted({'nibabel', 'SimpleITK', 'pydicom', 'torch', 'scipy'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize("change", ["affine", "header"])
def test_a_nibabel_image_that_was_moved_gets_its_mask_where_it_is(tmp_path: Path, change: str) -> None:
    image = nibabel.Nifti1Image(ct_values(), affine_of())
    moved = oblique_grid().affine
    if change == "affine":
        image.affine[...] = moved
    else:
        image.header.set_sform(affine_of() + 7, code=1)
        image.affine[...] = moved
    scan = scan_of(image)
    write_labels(np.ones(SHAPE, np.uint8), tmp_path / "mask.nii.gz", scan)
    assert np.allclose(scan.grid.affine, moved)
    assert np.allclose(nibabel.load(tmp_path / "mask.nii.gz").affine, moved, atol=1e-4)


@pytest.mark.parametrize("odd", ["forms apart", "sheared sform", "metres"])
def test_a_nibabel_image_is_judged_as_its_file_is(tmp_path: Path, odd: str) -> None:
    image = nibabel.Nifti1Image(ct_values(), affine_of())
    image.header.set_xyzt_units("mm")
    image.set_qform(affine_of(), code=1)
    if odd == "forms apart":
        away = affine_of()
        away[:3, 3] += 90
        image.set_sform(away, code=1)
    if odd == "sheared sform":
        sheared = affine_of()
        sheared[0, 1] += 2.0
        image.set_sform(sheared, code=1)
    if odd == "metres":
        for form in (image.set_sform, image.set_qform):
            form(np.diag([0.001, 0.001, 0.001, 1.0]) @ affine_of(), code=1)
        image.header.set_xyzt_units("meter")
    nibabel.save(image, tmp_path / "scan.nii.gz")
    read, taken = read_scan(tmp_path / "scan.nii.gz"), scan_of(nibabel.load(tmp_path / "scan.nii.gz"))
    assert taken.grid.matches(read.grid)
    assert taken.warnings == read.warnings
    assert (odd == "metres") == (not read.warnings)
