"""Which scans a path means."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cascadeseg.errors import ScanError
from cascadeseg.formats import find_scans, read_scan, stem_of, suffix_of


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 200)
    return folder


def test_a_file_is_itself(tmp_path: Path) -> None:
    made(tmp_path, "anything_lungs.xyz")
    assert find_scans(tmp_path / "anything_lungs.xyz") == [tmp_path / "anything_lungs.xyz"]


def test_a_directory_of_scans_without_its_masks(tmp_path: Path) -> None:
    made(tmp_path, "b.nii.gz", "a.mha", "C.NRRD", "d.zip", "a_lungs.nii.gz", "b_ref.nii.gz", "b.seg.nrrd", "b.Seg.nhdr")
    made(tmp_path, ".hidden.nii.gz", "notes.txt", "a.zraw", "segmentations/lung_left.nii.gz")
    assert [file.name for file in find_scans(tmp_path)] == ["C.NRRD", "a.mha", "b.nii.gz", "d.zip"]


def test_what_is_passed_over_in_subfolders_is_told(tmp_path: Path) -> None:
    made(tmp_path, "a.nii.gz", "p1/ct.nii.gz", "p1/ct_seg.nii.gz", "p1/notes.txt", "p1/late/ct.mha", "out/a_lungs.mha")
    (tmp_path / "p1" / "up").symlink_to(tmp_path)
    passed: list[Path] = []
    assert find_scans(tmp_path, passed.append) == [tmp_path / "a.nii.gz"]
    assert passed == [tmp_path / "p1/ct.nii.gz", tmp_path / "p1/late/ct.mha"]
    assert find_scans(tmp_path / "p1") == [tmp_path / "p1/ct.nii.gz"]


def test_nothing_to_find(tmp_path: Path) -> None:
    with pytest.raises(ScanError, match=r"none: no such file or folder"):
        find_scans(tmp_path / "none")
    with pytest.raises(ScanError, match=r"no scan in this folder; expected NIfTI, MHA/MHD, NRRD or DICOM files$"):
        find_scans(tmp_path)
    made(tmp_path, "deeper/scan.nii.gz")
    with pytest.raises(ScanError, match=r"scans in subfolders \(such as .*/deeper\) are given by their folders$"):
        find_scans(tmp_path)
    made(tmp_path, "a_lungs.nii.gz")
    with pytest.raises(ScanError, match="nothing but masks"):
        find_scans(tmp_path)


def test_what_cannot_be_looked_into_is_listed_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "a.nii.gz", "lost+found/file")
    for name in ("b.nii.gz", "b_lungs.nii.gz", "p1/IM1.dcm", "p2", "latest.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tmp_path / "gone" / name)
    listed, walked = Path.iterdir, os.scandir

    def denied(to: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def asked(folder: Any) -> Any:
            if Path(folder).name == "lost+found":
                raise PermissionError(13, "Permission denied", str(folder))
            return to(folder)

        return asked

    monkeypatch.setattr(Path, "iterdir", denied(listed))
    monkeypatch.setattr(os, "scandir", denied(walked))
    found = find_scans(tmp_path)
    assert [path.name for path in found] == ["a.nii.gz", "b.nii.gz", "lost+found", "p1", "p2"]
    assert find_scans(found[1]) == [found[1]]
    with pytest.raises(ScanError, match=r"b.nii.gz: a link to nothing \(.*gone.*\); expected a file; fetch what it"):
        read_scan(found[1])
    with pytest.raises(ScanError, match=r"lost\+found: a folder that cannot be read \(Permission denied\)"):
        read_scan(found[2])
    with pytest.raises(ScanError, match=r"p1: no CT slices; found 1 links to nothing"):
        read_scan(found[3])


@pytest.mark.parametrize(
    ("name", "stem", "suffix"),
    [
        ("scan.nii.gz", "scan", ".nii.gz"),
        ("scan.v2.NII.GZ", "scan.v2", ".nii.gz"),
        ("scan.nii", "scan", ".nii"),
        ("pair.hdr", "pair", ".hdr"),
        ("pair.IMG", "pair", ".img"),
        ("scan.v2.Seg.NRRD", "scan.v2", ".seg.nrrd"),
        ("scan.seg.nii.gz", "scan.seg", ".nii.gz"),
        ("Müller 1.mha", "Müller 1", ".mha"),
        ("1.2.840.113", "1.2.840.113", ".113"),
        ("folder", "folder", ""),
    ],
)
def test_names(name: str, stem: str, suffix: str) -> None:
    assert (stem_of(name), suffix_of(name)) == (stem, suffix)
