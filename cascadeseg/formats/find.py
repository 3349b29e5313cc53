"""Which scans a path means: a file, a DICOM folder, or a directory of scans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from cascadeseg.errors import ScanError
from cascadeseg.formats.names import DICOM_SUFFIXES, SCAN_SUFFIXES, is_mask_name, suffix_of

DICOM_DIRECTORY = "DICOMDIR"
"""The index of a disk, by its name; what it lists lies in folders beside it."""
GROUP_LENGTHS = (b"\2\0\0\0", b"\x08\0\0\0")
CHARACTER_SET, IMAGE_TYPE = b"\x08\0\5\0", b"\x08\0\x08\0"


def find_scans(path: str | Path, passed_over: Callable[[Path], object] = lambda file: None) -> list[Path]:
    """The scans that a path means, sorted by name.

    - A file is itself, whatever its name.
    - A folder with DICOM files directly in it is one scan, and so is a folder whose subfolders hold the DICOM
      series of one patient's study: `read_scan` takes the largest CT series and names the others.
    - Any other folder is a directory of scans: the scan files directly in it, and one scan for every DICOM study
      below it, through links too. Files that are masks by their names (`names.is_mask_name`, so also our own
      ``_lungs``) are passed over, and so are hidden ones and a DICOMDIR.
    - Scan files in subfolders are passed over: labels lie there as often (``labelsTr``, ``segmentations``), by whatever
      names. Who means them gives their folders.
    - What cannot be looked into (a link to nothing, a folder without permission) is in the list as a scan, so that
      reading it says so.

    Args:
        path: a file or a folder.
        passed_over: told each scan file in a subfolder that no mask's name has.

    Raises:
        ScanError: there is nothing at the path, or no scan in it, or it cannot be read.
    """
    path = Path(path)
    try:
        if not path.exists() and not path.is_symlink():
            raise ScanError(path, "no such file or folder")
        return _scans_in(path, passed_over) if path.is_dir() else [path]
    except OSError as problem:  # a name that is too long, a folder that may not be searched
        raise ScanError(path, f"cannot be read ({problem.strerror})") from problem


def _scans_in(folder: Path, passed_over: Callable[[Path], object]) -> list[Path]:
    children = _children(folder)
    volumes = _volumes(children)
    scans = [file for file in volumes if not is_mask_name(file)]
    scans += [child for child in children if not child.exists() and not suffix_of(child)]  # once a patient's folder?
    dicom: list[tuple[Path, Path]] = []
    deeper: list[Path] = []
    for below, held in _folders(folder, {folder.resolve(), *folder.resolve().parents}):
        unread = held == [below]
        first = below if unread else next((child for child in held if _is_file(child) and may_be_dicom(child)), None)
        dicom += [(below, first)] if first is not None else []
        deeper += [file for file in _volumes(held) if not is_mask_name(file)] if below != folder else []
    scans += _studies(dicom)
    if not scans:
        found = "nothing but masks (by their names)" if volumes else "no scan in this folder"
        remedy = f"scans in subfolders (such as {deeper[0].parent}) are given by their folders" if deeper else ""
        raise ScanError(folder, found, "NIfTI, MHA/MHD, NRRD or DICOM files", remedy)
    for file in deeper:
        passed_over(file)
    return sorted(scans)


def _volumes(children: list[Path]) -> list[Path]:
    """Those that are scan files by their names, but not DICOM; masks among them."""
    suffixes = set(SCAN_SUFFIXES) - set(DICOM_SUFFIXES)
    return [child for child in children if suffix_of(child) in suffixes and _is_file(child)]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    except OSError as problem:
        raise ScanError(folder, f"cannot be read ({problem.strerror})") from problem


def _is_file(child: Path) -> bool:
    """Whether a folder's child is a file, or a link to nothing, which may have been one."""
    return child.is_file() or not child.exists()


def _studies(folders: list[tuple[Path, Path]]) -> list[Path]:
    """Of folders with DICOM files directly in them, and the first of these, one a study: the deepest that holds all
    of it, or each of its folders where studies are mixed.
    """
    studies: dict[tuple[str, str], list[Path]] = {}
    for leaf, first in folders:
        studies.setdefault(_study(first) or ("", str(leaf)), []).append(leaf)
    scans: list[Path] = []
    for leaves in studies.values():
        top = Path(os.path.commonpath(leaves))
        others = [leaf for rest in studies.values() if rest is not leaves for leaf in rest]
        mixed = any(leaf.is_relative_to(top) for leaf in others)
        scans += leaves if mixed else [top]
    return scans


def _folders(folder: Path, entered: set[Path]) -> Iterator[tuple[Path, list[Path]]]:
    """Every folder, this one included, with what is directly in it: of one that cannot be read, nothing but itself.

    Each is entered once, and none above: a link upwards would lead back.
    """
    children = _children(folder)
    yield folder, children
    for child in children:
        if child.is_dir() and child.resolve() not in entered:
            entered.add(child.resolve())
            try:
                yield from _folders(child, entered)
            except (ScanError, OSError):
                yield child, [child]


def may_be_dicom(file: Path) -> bool:
    """Whether a file that is there is DICOM by its suffix or, where it has no scan's, by its first bytes."""
    if file.name.upper() == DICOM_DIRECTORY:
        return False
    if suffix_of(file) in SCAN_SUFFIXES:
        return suffix_of(file) in DICOM_SUFFIXES and not is_mask_name(file)
    try:
        with file.open("rb") as stream:
            return looks_like_dicom(stream.read(132))
    except OSError:
        return False


def looks_like_dicom(start: bytes) -> bool:
    """Whether a file's first 132 bytes are DICOM: by the magic word, or without a preamble by a usual first tag."""
    if start[128:132] == b"DICM":
        return True
    if start[:4] in GROUP_LENGTHS:
        return start[4:8] in (b"UL\4\0", b"\4\0\0\0")
    return start[:4] in (CHARACTER_SET, IMAGE_TYPE) and (start[4:6] == b"CS" or start[5:8] == bytes(3))


def _study(file: Path) -> tuple[str, str] | None:
    """StudyInstanceUID and PatientID, as some anonymisers give everybody the same UIDs; None if there is no UID."""
    import pydicom

    tags = ["StudyInstanceUID", "PatientID"]
    try:
        header = pydicom.dcmread(file, force=True, stop_before_pixels=True, specific_tags=tags)
        uid, patient_id = (str(header.get(tag, None) or "") for tag in tags)
    except Exception:  # any damage in a header that is only asked for its study
        return None
    return (uid, patient_id) if uid else None
