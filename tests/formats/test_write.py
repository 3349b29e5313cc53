"""A mask is whole and verified, or not there; and where it cannot go is known before any work."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cascadeseg.atomic import replace_file
from cascadeseg.errors import OutputError, ScanError
from cascadeseg.formats import (
    MASK_SUFFIXES,
    Scan,
    check_writable,
    holds_labels,
    itk,
    metaimage,
    nifti,
    nrrd,
    packed,
    read_labels,
    read_scan,
    write,
    write_labels,
    write_scan,
)
from cascadeseg.geometry import Grid
from tests.formats.volumes import SHAPE, ct_values, oblique_grid

LABELS = np.ones(SHAPE, np.uint8)


@pytest.fixture
def scan() -> Scan:
    return Scan(ct_values(), oblique_grid())


@pytest.mark.parametrize("suffix", MASK_SUFFIXES)
def test_names_with_spaces_and_letters_of_all_kinds(tmp_path: Path, scan: Scan, suffix: str) -> None:
    folder = tmp_path / "Ergebnisse für Müller 肺"
    folder.mkdir()
    check_writable(folder / f"Maske nº 1{suffix}")
    write_labels(LABELS, folder / f"Maske nº 1{suffix}", scan)
    labels, grid = read_labels(folder / f"Maske nº 1{suffix}")
    assert np.array_equal(labels, LABELS)
    assert grid.matches(scan.grid)
    expected = {f"Maske nº 1{suffix}"} | ({"Maske nº 1.zraw"} if suffix == ".mhd" else set())
    assert {file.name for file in folder.iterdir()} == expected


@pytest.mark.parametrize("name", ["ct.nii.gz", "ct.mha"])
def test_a_mask_never_replaces_its_scan(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_scan(ct_values(), oblique_grid(), path)
    before = path.read_bytes()
    scan = read_scan(path)
    with pytest.raises(OutputError, match="the scan itself; expected another name"):
        write_labels(LABELS, path, scan)
    assert path.read_bytes() == before
    write_labels(LABELS, tmp_path / f"other{name}", scan)


def test_checking_leaves_no_trace(tmp_path: Path) -> None:
    check_writable(tmp_path / "mask.nii.gz")
    assert list(tmp_path.iterdir()) == []


def refusal(path: Path) -> str:
    with pytest.raises(OutputError) as caught:
        check_writable(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    expected = ": unknown suffix '.png'; expected one of .nii.gz .nii .mha .mhd .nrrd .seg.nrrd .dcm"
    assert refusal(tmp_path / "mask.png") == expected
    assert refusal(tmp_path / "mask").startswith(": a name without a suffix; expected one of")
    assert refusal(tmp_path / "none" / "mask.nii").startswith(f": the folder {tmp_path / 'none'} does not exist")
    (tmp_path / "folder.nii").mkdir()
    assert refusal(tmp_path / "folder.nii") == ": a folder; expected the name of a file"
    (tmp_path / "file").touch()
    assert "is not a folder" in refusal(tmp_path / "file" / "mask.nii")
    assert "cannot be written" in refusal(tmp_path / ("a" * 300 + ".nii"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_places_without_permission(tmp_path: Path) -> None:
    (tmp_path / "mask.nii").touch(mode=0o400)
    assert "may not be overwritten" in refusal(tmp_path / "mask.nii")
    tmp_path.chmod(0o500)
    try:
        assert "cannot be written (Permission denied)" in refusal(tmp_path / "other.nii")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("path", [Path("/proc/mask.nii.gz")])
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder here that even the superuser cannot write in")
def test_a_place_that_nobody_can_write_in(path: Path) -> None:
    assert "cannot be written" in refusal(path)


@pytest.mark.parametrize("suffix", MASK_SUFFIXES)
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, scan: Scan, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"mask{suffix}"
    write_labels(LABELS, path, scan)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(voxels: npt.NDArray[np.uint8], *_: object) -> Iterator[bytes]:
        yield voxels[..., 0].tobytes()
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in (nifti, metaimage, nrrd):
        monkeypatch.setattr(module, "slabs", full_disk)
    with pytest.raises(OutputError, match=r"cannot be written \(No space left on device\)"):
        write_labels(LABELS * 2, path, scan)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", MASK_SUFFIXES)
def test_what_reads_back_differently_is_not_kept(
    tmp_path: Path, scan: Scan, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((nifti, "write_nifti"), (itk, "write_itk")):
        write = getattr(module, name)
        monkeypatch.setattr(module, name, lambda voxels, where, part, write=write: write(voxels * 3, where, part))
    with pytest.raises(OutputError, match="what was read back is not what was written"):
        write_labels(LABELS, tmp_path / f"mask{suffix}", scan)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [suffix for suffix in MASK_SUFFIXES if suffix != ".nii"])
def test_what_cannot_be_read_back_is_not_kept(
    tmp_path: Path, scan: Scan, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of the checksum, or of the voxels before it, that the disk turned."""
    deflated = packed.deflated

    def turned(pieces: object, wrapping: int) -> Iterator[bytes]:
        whole = bytearray(b"".join(deflated(pieces, wrapping)))  # type: ignore[arg-type]
        whole[-1 if wrapping == packed.ZLIB else -8] ^= 1
        yield bytes(whole)

    for module in (nifti, metaimage, nrrd):
        monkeypatch.setattr(module, "deflated", turned)
    words = r"mask\S+: cannot be read back \(damaged .*\); check the disk$"
    with pytest.raises(OutputError, match=words):
        write_labels(LABELS, tmp_path / f"mask{suffix}", scan)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["100%", "LIST of lungs", "a%d b c d"])
def test_a_name_by_which_a_metaimage_does_not_find_its_voxels(tmp_path: Path, scan: Scan, name: str) -> None:
    path = tmp_path / f"{name}.mhd"
    words = ": a name by which an .mhd does not lead to its .zraw; expected one without % that does not begin with LIST"
    assert refusal(path) == f"{words}; or choose .mha"
    with pytest.raises(OutputError, match=r"does not lead to its \.zraw"):
        write_labels(LABELS, path, scan)
    assert list(tmp_path.iterdir()) == []
    write_labels(LABELS, tmp_path / f"{name}.mha", scan)
    assert np.array_equal(read_labels(tmp_path / f"{name}.mha")[0], LABELS)


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from cascadeseg.formats import Scan, holds_labels, write_labels
from cascadeseg.geometry import Grid


def kilobytes(field):
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def growth(shape):
    labels = np.zeros(shape, np.uint8, order="F")
    labels[2:5, 3:7] = 1
    labels[5:, 3:7] = 2
    scan = Scan(labels, Grid.axis_aligned(shape, (1, 1, 1)))
    before = kilobytes("VmRSS")
    write_labels(labels, sys.argv[1], scan)
    if not holds_labels(sys.argv[1], labels, scan):
        raise SystemExit("another mask")
    return 1024 * (kilobytes("VmHWM") - before) / labels.nbytes


growth((8, 8, 8))  # loads what there is to load
print(growth((512, 512, 400)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no peak of a process's memory to be had")
@pytest.mark.parametrize("suffix", MASK_SUFFIXES)
def test_writing_and_comparing_take_less_memory_than_half_the_mask(tmp_path: Path, suffix: str) -> None:
    """Of the whole process, which has the mask already: ITK's own memory is no part of what Python counts."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path / f"mask{suffix}")]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(said.stdout) < 0.5


@pytest.mark.parametrize("source", ["ct.nii.gz", "ct.mha"])
@pytest.mark.parametrize("suffix", MASK_SUFFIXES)
def test_a_mask_on_disk_is_known_again_and_one_that_was_edited_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, source: str
) -> None:
    write_scan(ct_values(), oblique_grid(), tmp_path / source)
    scan, path = read_scan(tmp_path / source), tmp_path / f"mask{suffix}"
    labels = np.zeros(SHAPE, np.uint8)
    labels[3:6, 4:8, 2:9] = 1
    edited = labels.copy()
    edited[5, 7, 8] = 2
    write_labels(labels, path, scan)
    assert not holds_labels(path, edited, scan)
    turned, affine = labels.transpose(2, 0, 1), scan.grid.affine[:, [2, 0, 1, 3]]
    write_labels(turned, path, Scan(turned, Grid(turned.shape, affine)))
    assert holds_labels(path, labels, scan), "stored with other axes"
    assert not holds_labels(path, edited, scan)
    write_labels(labels, path, scan)
    monkeypatch.setattr(write, "read_labels", lambda path: pytest.fail("read whole"))
    assert holds_labels(path, labels, scan)


@pytest.mark.parametrize("suffix", [".nii.gz", ".mha", ".nrrd"])
def test_a_damaged_mask_is_no_mask_and_says_why(tmp_path: Path, scan: Scan, suffix: str) -> None:
    path = tmp_path / f"mask{suffix}"
    write_labels(LABELS, path, scan)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ScanError, match=rf"mask{suffix}: the file is cut short"):
        holds_labels(path, LABELS, scan)


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(part: Path) -> None:
        part.write_text("half", encoding="utf-8")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "report.json", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_any_file_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old", encoding="utf-8")
    replace_file(path, lambda part: part.write_text("new", encoding="utf-8") and None)
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_labels_of_another_shape_are_a_mistake_of_the_caller(tmp_path: Path, scan: Scan) -> None:
    with pytest.raises(ValueError, match="voxels of shape"):
        write_labels(LABELS[1:], tmp_path / "mask.nii.gz", scan)
