"""Which scans a path means."""

from __future__ import annotations

from pathlib import Path

import pytest

from cascadeseg.errors import ScanError
from cascadeseg.formats import find_scans, stem_of, suffix_of


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 200)
    return folder


def test_a_file_is_itself(tmp_path: Path) -> None:
    made(tmp_path, "anything_lungs.xyz")
    assert find_scans(tmp_path / "anything_lungs.xyz") == [tmp_path / "anything_lungs.xyz"]


def test_a_directory_of_scans_without_its_masks(tmp_path: Path) -> None:
    made(tmp_path, "b.nii.gz", "a.mha", "C.NRRD", "d.zip", "a_lungs.nii.gz", "b_ref.nii.gz", "b_mask.mha")
    made(tmp_path, ".hidden.nii.gz", "notes.txt", "a.zraw", "segmentations/lung_left.nii.gz")
    assert [file.name for file in find_scans(tmp_path)] == ["C.NRRD", "a.mha", "b.nii.gz", "d.zip"]


def test_nothing_to_find(tmp_path: Path) -> None:
    with pytest.raises(ScanError, match=r"none: no such file or folder"):
        find_scans(tmp_path / "none")
    with pytest.raises(ScanError, match=r"no scan in this folder; expected NIfTI, MHA/MHD, NRRD or DICOM files$"):
        find_scans(tmp_path)
    made(tmp_path, "deeper/scan.nii.gz")
    with pytest.raises(ScanError, match="scans in subfolders are given one by one"):
        find_scans(tmp_path)
    made(tmp_path, "a_lungs.nii.gz")
    with pytest.raises(ScanError, match="nothing but masks"):
        find_scans(tmp_path)


@pytest.mark.parametrize(
    ("name", "stem", "suffix"),
    [
        ("scan.nii.gz", "scan", ".nii.gz"),
        ("scan.v2.NII.GZ", "scan.v2", ".nii.gz"),
        ("scan.nii", "scan", ".nii"),
        ("Müller 1.mha", "Müller 1", ".mha"),
        ("1.2.840.113", "1.2.840.113", ".113"),
        ("folder", "folder", ""),
    ],
)
def test_names(name: str, stem: str, suffix: str) -> None:
    assert (stem_of(name), suffix_of(name)) == (stem, suffix)
