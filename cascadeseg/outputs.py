"""Where the results of `cascadeseg infer` go: decided, and refused, before any work is done."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cascadeseg.atomic import staged
from cascadeseg.errors import CascadesegError, ConfigError, OutputError, ScanError
from cascadeseg.formats import (
    LABEL_SUFFIXES,
    SEGMENTATION_SUFFIX,
    Scan,
    check_writable,
    find_scans,
    is_not_dicom,
    not_of_dicom,
    read_outline,
    stem_of,
    suffix_of,
)
from cascadeseg.formats.find import may_be_dicom
from cascadeseg.formats.names import VOXELS_SUFFIX, may_be_cut
from cascadeseg.geometry import Grid, boxes_on_one_grid
from cascadeseg.terminal import Progress

ENDING = "_lungs"
BESIDE = ""
"""For `Wishes.report` and `Wishes.preview`: under the mask's name, beside it."""
SUFFIXES = {".mha": ".mha", ".mhd": ".mha", ".nrrd": ".nrrd", ".nhdr": ".nrrd"}
"""The mask's suffix by the scan's; NIfTI for all the others."""


@dataclass(frozen=True)
class Wishes:
    """What the user asked for.

    Attributes:
        output: a file, a folder, or None for beside each scan.
        suffix: the mask's suffix, or None for what the output's name or the scan's kind says.
        report: a file, `BESIDE`, or None for no report.
        preview: a file, `BESIDE`, or None for no picture.
        force: overwrite what is there.
        resume: leave out scans whose results are all there, make what others lack, and refuse those in whose mask's
            place something else lies.
        series: which DICOM series, as for `read_scan`.
        volume: which volume of a 4D file, as for `read_scan`.
        table: the table of them all; None for no table.
        in_table: scans, links followed, that have a row in the table of them all, which is a result as well; None
            without a table.
    """

    output: str | None = None
    suffix: str | None = None
    report: str | None = None
    preview: str | None = None
    force: bool = False
    resume: bool = False
    series: str | None = None
    volume: int | None = None
    table: Path | None = None
    in_table: frozenset[Path] | None = None


@dataclass(frozen=True)
class Job:
    """One scan and the files made of it.

    Attributes:
        scan: a file or a DICOM folder.
        labels: the mask.
        report: JSON, or None.
        preview: PNG, or None.
        keeps: a mask is there and stays: the other results are made if it is the scan's.
    """

    scan: Path
    labels: Path
    report: Path | None = None
    preview: Path | None = None
    keeps: bool = False

    @property
    def outputs(self) -> list[Path]:
        """All files made, the mask first."""
        return [path for path in (self.labels, self.preview, self.report) if path is not None]

    @property
    def files(self) -> list[Path]:
        """The outputs, and the file that holds the voxels of a mask that does not."""
        return [*self.outputs, *([self.labels.with_suffix(".zraw")] if suffix_of(self.labels) == ".mhd" else [])]


@dataclass(frozen=True)
class Found:
    """A scan, and the folder below which its results keep its place (None for a scan that was named itself)."""

    scan: Path
    root: Path | None = None


def find(arguments: Sequence[str]) -> tuple[list[Found], list[CascadesegError], list[str]]:
    """The scans that the arguments mean, each once, what is wrong with the other arguments, and lines on what was
    passed over, or given as slices of one series.
    """
    found: dict[Path, Found] = {}
    failures: list[CascadesegError] = []
    passed: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        try:
            if not argument:  # to Path it is the current folder
                raise ScanError("''", "an empty name", "a scan or a folder of scans", "see what the shell put in")
            scans = find_scans(path, passed.append)
        except CascadesegError as error:
            failures.append(error)
            continue
        for scan in scans:
            found.setdefault(followed(_header_of(scan)), Found(scan, None if scan == path else path))
    left = [file for file in passed if followed(file) not in found]
    files = "a file in a subfolder was" if len(left) == 1 else f"{len(left)} files in subfolders were"
    line = f"{files} passed over; if they are scans, give their folders too, such as {left[0].parent}" if left else ""
    scans_once, lines = _each_series_once(list(found.values()))
    return scans_once, failures, [line, *lines] if line else lines


def _each_series_once(scans: list[Found]) -> tuple[list[Found], list[str]]:
    """The scans without those that are slices of a series of which an earlier one is a slice, and a line on each such
    series: a shell makes all of them of ``series/*.dcm``, and of each the whole series would be read.
    """
    beside: dict[Path, list[Path]] = {}
    for scan in (found.scan for found in scans if found.root is None):
        if scan.is_file() and may_be_dicom(scan):
            beside.setdefault(followed(scan.parent), []).append(scan)
    extra: set[Path] = set()
    lines: list[str] = []
    for files in beside.values():
        for slices in _by_series(files) if len(files) > 1 else []:
            first, *rest = slices
            extra |= {*rest}
            if rest:
                lines.append(f"{first} and {len(rest)} more are slices of one series, which is one scan")
    return [found for found in scans if found.scan not in extra], lines


def _by_series(files: Sequence[Path]) -> list[list[Path]]:
    """Those files of a folder that are single slices, by their series."""
    from cascadeseg.formats.dicom import series_of_slices

    of_series: dict[tuple[str, str], list[Path]] = {}
    for file, key in series_of_slices(files).items():
        of_series.setdefault(key, []).append(file)
    return list(of_series.values())


def _header_of(scan: Path) -> Path:
    """The file that stands for a scan: of ``.hdr`` and ``.img`` the header, whichever of them was named."""
    header = scan.with_suffix(".hdr")
    return header if suffix_of(scan) == VOXELS_SUFFIX and header.exists() else scan


def plan(
    scans: Sequence[Found], wishes: Wishes, *, several: bool, progress: Progress = lambda step, done: None
) -> tuple[list[Job], dict[Path, CascadesegError]]:
    """Where the results of every scan go that is to be segmented. Makes the output folder; writes nothing else.

    Args:
        scans: as `find` gives them.
        wishes: what the user asked for.
        several: whether the user asked for more than one scan (even if only one of them is there).
        progress: hears which scan's mask `Wishes.resume` looks at, and what share of them is done.

    Returns:
        The jobs to be done, and the scans that `Wishes.resume` refuses, with what is wrong with them.

    Raises:
        OutputError: a place that cannot be written, that is taken, or that two scans would share.
        ConfigError: wishes that contradict each other.
    """
    if several:
        _refuse_single_files(wishes)
    jobs = [_job(found, wishes, several) for found in _told_apart(scans, wishes, several)]
    _refuse_clashes(jobs)
    jobs, refused = _left_to_do(jobs, wishes, progress) if wishes.resume else (jobs, {})
    for job in jobs:
        if suffix_of(job.labels) == SEGMENTATION_SUFFIX and is_not_dicom(job.scan):
            raise not_of_dicom(job.labels)
        _refuse_overwriting(job, wishes.force or wishes.resume)
    if wishes.table is not None and not _is_made(wishes.table.parent, jobs):
        check_place(wishes.table)
    for job in jobs:
        if wishes.output is not None and (several or _is_folder(wishes.output)):
            make_folder(job.labels.parent)
        check_writable(job.labels)
        for path in job.outputs[1:]:
            check_place(path)
    if wishes.table is not None:
        check_place(wishes.table)
    return jobs, refused


def _told_apart(scans: Sequence[Found], wishes: Wishes, several: bool) -> list[Found]:
    """Scans of one name in several folders get folders of those names: ``p1/ct.nii.gz`` and ``p2/ct.nii.gz``."""
    named: dict[Path, list[Found]] = {}
    for found in scans:
        named.setdefault(_labels_path(found, wishes, several), []).append(found)
    told: dict[Found, Found] = {}
    for same in named.values():
        root = _folder_above([found.scan for found in same])
        told |= {found: Found(found.scan, root) if len(same) > 1 else found for found in same}
    return [told[found] for found in scans]


def _folder_above(scans: Sequence[Path]) -> Path | None:
    """The folder that holds them all; None where they lie on several drives, and `_refuse_clashes` refuses them."""
    try:
        return Path(os.path.commonpath([Path(os.path.normpath(scan.absolute())).parent for scan in scans]))
    except ValueError:
        return None


def _is_made(folder: Path, jobs: Sequence[Job]) -> bool:
    """Whether a folder will be there once those of the masks are."""
    return any(folder.absolute() in job.labels.absolute().parents for job in jobs)


def _refuse_single_files(wishes: Wishes) -> None:
    """Several scans cannot share one file."""
    for option, wish in (("--report", wishes.report), ("--preview", wishes.preview)):
        if wish:
            remedy = f"give {option} without a name: each scan then has its own, beside its mask"
            raise ConfigError(f"{option} {wish}", "one file for several scans", remedy=remedy)
    output = wishes.output or ""
    if suffix_of(output) in LABEL_SUFFIXES and not _is_folder(output):
        raise OutputError(output, "one file for several scans", "a folder")


def _job(found: Found, wishes: Wishes, several: bool) -> Job:
    labels = _labels_path(found, wishes, several)
    stem = stem_of(labels)
    return Job(
        scan=found.scan,
        labels=labels,
        report=_side_file(wishes.report, labels.with_name(f"{stem}.json")),
        preview=_side_file(wishes.preview, labels.with_name(f"{stem}.png")),
    )


def _labels_path(found: Found, wishes: Wishes, several: bool) -> Path:
    scan = found.scan
    suffix = wishes.suffix or SUFFIXES.get(suffix_of(scan), ".nii.gz")
    # A DICOM folder may be given as "." or end in "..": its name is the resolved one's.
    named = scan if scan.name not in ("", "..") else scan.resolve()
    name = f"{stem_of(named)}{ENDING}{suffix}"
    if wishes.output is None:
        return named.parent / name
    if several or _is_folder(wishes.output):
        below = Path(os.path.relpath(scan, found.root)).parent if found.root else Path()
        folder = Path(wishes.output) / below
        return folder / name
    output = Path(wishes.output)
    if suffix_of(output) not in LABEL_SUFFIXES:
        kinds = f"a name that ends in {', '.join(LABEL_SUFFIXES)}, or a folder"
        raise OutputError(output, f"unknown suffix '{suffix_of(output)}'", kinds)
    if wishes.suffix and suffix_of(output) != wishes.suffix:
        raise ConfigError(f"--format {wishes.suffix[1:]}", f"the output is to be {output}", remedy="leave one out")
    return output


def _is_folder(output: str) -> bool:
    """Whether ``-o`` means a folder: there is one, it ends like one, or has no suffix."""
    return Path(output).is_dir() or output.endswith(("/", "\\")) or not Path(output).suffix


def _side_file(wish: str | None, beside: Path) -> Path | None:
    if wish is None:
        return None
    return beside if wish == BESIDE else Path(wish)


def _refuse_clashes(jobs: Sequence[Job]) -> None:
    read = {job: _known_as(job.scan) | _known_as(followed(job.scan)) for job in jobs}
    scans = set().union(*read.values())
    taken = Counter(_place(path) for job in jobs for path in job.files)
    for job in jobs:
        for path in job.files:
            if _known_as(path) & read[job]:
                raise OutputError(path, "the scan itself", "another name")
            if _known_as(path) & scans:
                remedy = "leave that scan out, or choose another place with -o"
                raise OutputError(path, f"the result of {job.scan}, and a scan as well", "", remedy)
            if taken[_place(path)] > 1:
                sharers = [str(other.scan) for other in jobs if _place(path) in map(_place, other.files)]
                found = f"the result of {' and of '.join(sharers[:2])}"
                raise OutputError(path, found, "one scan for each result", "segment them one by one, each with -o")


def followed(path: Path) -> Path:
    """A path, links followed. `Path.resolve` raises for a link to itself, which is a scan that cannot be read."""
    return Path(os.path.realpath(path))


def _known_as(path: Path) -> set[object]:
    """Where a file lies and, if it is there, its number: to some disks ``CT.nii`` and ``ct.nii`` are one file."""
    known: set[object] = {_place(path)}
    with suppress(OSError):
        status = path.lstat()
        known |= {(status.st_dev, status.st_ino)} if status.st_ino else set()  # not every disk has numbers
    return known


def _place(path: Path) -> Path:
    """Where a file is written, however its folder is called; what lies there may be a link, which is replaced."""
    return path.parent.resolve() / path.name


def _left_to_do(
    jobs: Sequence[Job], wishes: Wishes, progress: Progress
) -> tuple[list[Job], dict[Path, CascadesegError]]:
    """The jobs that are not done yet, and the scans that are refused, with what is wrong with them."""
    left: list[Job] = []
    refused: dict[Path, CascadesegError] = {}
    for number, job in enumerate(jobs):
        progress(job.scan.name, number / len(jobs))
        try:
            there = job.labels.exists()
            if there:
                _check_mask(job, read_outline(job.scan, series=wishes.series, volume=wishes.volume))
            if not _is_done(job, wishes):
                left.append(replace(job, keeps=there))
        except CascadesegError as failure:
            refused[job.scan] = failure
    return left, refused


def _is_done(job: Job, wishes: Wishes) -> bool:
    in_table = wishes.in_table is None or followed(job.scan) in wishes.in_table
    return in_table and all(path.exists() for path in job.files)


def _check_mask(job: Job, scan: Scan) -> None:
    """Looks in the header of the mask that is there for the scan's grid, of a DICOM segmentation for its series.

    One that 3D Slicer saved may lie on a part of the grid, that which its segments fill.

    Raises:
        OutputError: the mask is of another scan, or no mask.
    """
    try:
        if suffix_of(job.labels) == SEGMENTATION_SUFFIX:
            from cascadeseg.formats.dicom_seg import series_of

            series, own = series_of(job.labels), getattr(scan.native, "series_uid", "")
            same, found, expected = series == own, f"series {series}", f"series {own}" if own else "not DICOM"
        else:
            mask, grid = (of.grid.canonical() for of in (read_outline(job.labels), scan))
            boxes = boxes_on_one_grid(mask, grid, may_be_cut=(may_be_cut(job.labels), False))
            same, found, expected = boxes is not None, _extent(mask), _extent(grid)
    except ScanError as problem:
        remedy = "delete it, or choose another place with -o"
        raise OutputError(job.labels, problem.found, f"a mask of {job.scan}", remedy) from problem
    if not same:
        remedy = "choose another place with -o, or overwrite with --force"
        raise OutputError(job.labels, f"a mask of another scan ({found})", f"one of {job.scan} ({expected})", remedy)


def _extent(grid: Grid) -> str:
    """A grid in a few words: its voxels, and the centres of the first and the last."""
    first, last = grid.world([(0, 0, 0), [n - 1 for n in grid.shape]])
    corners = (" ".join(f"{mm:.2f}" for mm in corner) for corner in (first, last))
    return f"{' x '.join(map(str, grid.shape))} voxels, {' to '.join(corners)} mm"


def _refuse_overwriting(job: Job, force: bool) -> None:
    there = [path for path in job.files if path.exists()]
    if there and not force:
        raise OutputError(
            there[0], "exists", remedy="overwrite with --force, go on with --resume, or choose another place with -o"
        )


def check_place(path: Path) -> None:
    """Raises OutputError if nothing could be written here; meant to be called before any work is done."""
    with staged(path):
        pass


def check_folder(path: Path) -> None:
    """Raises OutputError if `make_folder` could not make this folder, or nothing could be written in it; makes none."""
    folders = (path, *path.absolute().parents)
    there = next((folder for folder in folders if folder.exists()), None)
    if there is None:
        raise OutputError(path, f"there is no {folders[-1]}", "", "choose another folder")
    if not there.is_dir():
        raise OutputError(there, "a file", "a folder", "choose another name")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(path, f"cannot be made or written in ({there} may not be)", "", "choose another folder")


def make_folder(path: Path) -> None:
    """Makes a folder for results, with those above it, unless it is there.

    Raises:
        OutputError: there is a file of that name, or the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise OutputError(path, "a file", "a folder", "choose another name") from None
    except OSError as problem:
        found = f"cannot be made ({problem.strerror})"
        raise OutputError(path, found, "", "choose another folder") from problem
