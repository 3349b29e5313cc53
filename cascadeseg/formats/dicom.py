"""Reading a DICOM CT series: the largest stack of slices in a folder or zip, as stored, in order.

Rule: slices of one patient's series, size, pixel spacing and orientation make a stack; localisers, other modalities,
colour pictures and slices without a position are left out; the stack with most voxels is the scan, one in HU before a
spectral map, unless a series is asked for, and the others are named in a warning. Missing slices are interpolated,
uneven ones made even, tilted ones shifted upright, each with a warning.

Own code rather than dicom2niix (a program beside), dicom2nifti (refuses gantry tilt and uneven slices) or ITK's
series reader (sorts, but neither chooses, nor sees gaps, nor reads zips); pydicom and GDCM do the decoding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.errors import ScanError
from cascadeseg.formats.dicom_files import (
    EMPTY,
    LOST,
    NO_DICOM,
    Found,
    Slice,
    Source,
    files_in,
    lenient_dicom,
    looked_into,
    series_key_of,
    source_of,
    sources_of,
)
from cascadeseg.formats.dicom_pixels import values_reader
from cascadeseg.formats.dicom_stack import Layer, Stack, stacks_of
from cascadeseg.formats.doctor import SIGNED_AGAIN, is_sign_lost
from cascadeseg.formats.find import DICOM_DIRECTORY
from cascadeseg.formats.memory import refuse_oversized
from cascadeseg.formats.names import DICOM_SUFFIXES, is_not_dicom, suffix_of
from cascadeseg.formats.placement import checked_grid, checked_spacing
from cascadeseg.formats.scan import Before, DicomSeries, Scan, hollow, nothing

READERS = 8
"""Threads: they wait for the disk or the network more than they compute."""
MAX_TILT_DEGREES = 45.0
PADDING_HU = -1024.0
NAMED_SERIES = 6


def read_dicom(path: Path, series: str | None = None, before: Before = nothing) -> Scan:
    """A DICOM series as a `Scan` whose ``native`` is a `DicomSeries`, not yet audited.

    Args:
        path: a folder (nested ones too), a zip of one, or a single file: an enhanced CT is read from it alone, as other
            files of its series may be other phases, of a slice the rest of its series (or ``series``) is looked for in
            its folder, and a DICOMDIR means its folder.
        series: SeriesInstanceUID; the largest CT series if None.
        before: see `read_scan`.

    Raises:
        ScanError: there is no CT volume, not this series, or it cannot be read.
    """
    path = path.parent if path.name.upper() == DICOM_DIRECTORY and path.is_file() else path
    with lenient_dicom(), sources_of(path) as sources:
        if not sources:
            kind = "folder" if path.is_dir() else "zip"
            raise ScanError(path, f"an empty {kind}", f"a {kind} of DICOM files")
        files = _looked_into(sources)
        slices = _slices(files)
        odd: list[str] = []
        if path.is_dir() and series is None:
            slices = _of_its_own_study(slices, path)
        is_file = path.is_file() and not sources[0].archive
        if is_file and len(slices) > 1:
            odd = _more_beside(path, slices[0])
        elif is_file and slices:
            files = _looked_into([source_of(file) for file in _siblings(path)])
            own = slices[0].series
            series = series or own.uid
            slices = [s for s in _slices(files) if s.series.uid != own.uid or s.series.key == own.key]
            count = sum(slice_.series.uid == series for slice_ in slices)
            which = "it" if series == own.uid else f"series {series}"
            odd = [f"this is one slice of a series; the {count} slices of {which} in the folder were read"]
        if not slices:
            raise _no_ct(path, files)
        stack, others = _chosen(stacks_of(slices), series, path)
        outline = _outline(stack, path, (*odd, *_lost(files, stack), *others, *stack.warnings))
        before(outline)
        voxels, repaired = _volume(stack, outline)
        return replace(outline, voxels=voxels).warned(*repaired)


def series_of_slices(files: Sequence[Path]) -> dict[Path, tuple[str, str]]:
    """Of those files that are single CT slices, for which `read_dicom` reads their series, its `Series.key`."""

    def own_series(file: Path) -> tuple[str, str] | None:
        try:
            slices = looked_into(source_of(file)).slices
        except ScanError:  # told when it is read
            return None
        return slices[0].series.key if len(slices) == 1 else None

    with lenient_dicom(), ThreadPoolExecutor(READERS) as pool:
        return {file: key for file, key in zip(files, pool.map(own_series, files), strict=True) if key is not None}


def _looked_into(sources: Sequence[Source]) -> list[Found]:
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(looked_into, sources))


def _slices(files: Sequence[Found]) -> list[Slice]:
    return [slice_ for file in files for slice_ in file.slices]


def _of_its_own_study(slices: Sequence[Slice], folder: Path) -> list[Slice]:
    """Those of the studies that lie in a folder itself, or all if none does: what lies below may be another study,
    which `find_scans` takes as a scan of its own.
    """
    own = {slice_.series.study_key for slice_ in slices if Path(slice_.source.name).parent == folder}
    return [slice_ for slice_ in slices if not own or slice_.series.study_key in own]


def _more_beside(path: Path, slice_: Slice) -> list[str]:
    """A warning of the files beside one of many frames that are of its series."""
    try:
        others = [source_of(file) for file in _siblings(path) if file.name != path.name]
    except OSError:  # a folder that nobody may list
        return []
    with ThreadPoolExecutor(READERS) as pool:
        count = sum(key == slice_.series.key for key in pool.map(series_key_of, others))
    noun = "1 more file of its series lies" if count == 1 else f"{count} more files of its series lie"
    return [f"{noun} in the folder; only this one was read, give the folder to read all"] if count else []


def _siblings(path: Path) -> list[Path]:
    """The files beside a file, itself included."""
    return sorted(files_in(path.parent, [file.name for file in path.parent.iterdir()]))


def _lost(files: Sequence[Found], stack: Stack) -> list[str]:
    """A warning of the files that may have held slices of the stack's series and gave none."""
    uid = stack.series.uid
    unlike = {_shape_of(slice_) for slice_ in _slices(files) if slice_.series.uid != uid}
    like = {_shape_of(slice_) for slice_ in stack.slices}
    lost = [
        file
        for file in files
        if (file.kind in LOST and file.series_uid in ("", uid))
        or (file.kind in NO_DICOM and _is_named_as_slice(file, like, unlike))
    ]
    return [f"left out, though perhaps of the series: {_counted(lost)}"] if lost else []


_Shape = tuple[Path, str, str]
"""A file's folder, its name and its suffix, with a 0 for every number: ``IM0012.dcm`` is like ``IM0013.dcm``."""


def _shape_of(slice_: Slice) -> _Shape:
    return _name_shape(slice_.source.name)


def _name_shape(name: str) -> _Shape:
    file = Path(name)
    return file.parent, re.sub(r"\d+", "0", file.name), re.sub(r"\d+", "0", file.suffix)


def _is_named_as_slice(file: Found, like: set[_Shape], unlike: set[_Shape]) -> bool:
    """Whether a file without DICOM in it was once a slice, by its name.

    Args:
        file: its ``problem`` is its name.
        like: the names of the series' slices.
        unlike: those of other series.
    """
    shape = folder, name, suffix = _name_shape(file.problem)
    if shape in like:
        return True
    if folder not in {at for at, _, _ in like} or shape in unlike or name.upper() == DICOM_DIRECTORY:
        return False
    is_alike = file.kind == EMPTY and (folder, suffix) in {(at, ending) for at, _, ending in like}
    return is_alike or suffix.lower() in DICOM_SUFFIXES


def _counted(files: Sequence[Found]) -> str:
    """How many files there are of each kind, and what is wrong with the first of them."""
    kinds = Counter(file.kind for file in files)
    first = {file.kind: file.problem for file in reversed(files)}
    return ", ".join(
        f"{count} {kind}" + (f" ({'the first: ' if count > 1 else ''}{first[kind]})" if first[kind] else "")
        for kind, count in kinds.most_common()
    )


def _no_ct(path: Path, files: Sequence[Found]) -> ScanError:
    dicom = [file for file in files if file.kind not in NO_DICOM]
    if not dicom and not path.is_dir() and suffix_of(path) == ".zip":
        volume = next((file.problem for file in files if is_not_dicom(file.problem)), "")
        remedy = f"unpack it and give what is in it, such as {volume}" if volume else ""
        return ScanError(path, "a zip without DICOM", "a zip of a DICOM series", remedy)
    if not dicom:
        is_empty = not path.is_dir() and files[0].kind == EMPTY
        found = "a file of 0 bytes" if is_empty else f"a {'folder' if path.is_dir() else 'file'} without DICOM"
        return ScanError(path, found, "a DICOM CT series, NIfTI, MHA/MHD or NRRD")
    return ScanError(path, f"no CT slices; found {_counted(dicom)}", "a CT series")


def _chosen(stacks: list[Stack], series: str | None, path: Path) -> tuple[Stack, list[str]]:
    """The stack to read, and a warning that names those left out."""
    if not stacks:
        raise ScanError(path, "single CT pictures, no two of which make a volume", "a CT series")
    named = "; ".join(_named(stack) for stack in stacks[:NAMED_SERIES])
    if series is not None:
        stacks = [stack for stack in stacks if stack.series.uid == series]
        if not stacks:
            raise ScanError(path, f"no CT series {series}", f"one of {named}")
    stack, *rest = stacks
    others = [other for other in rest if other.series.uid != stack.series.uid]
    odd = []
    if others:
        left = "; ".join(_named(other) for other in others[:NAMED_SERIES])
        left += f"; and {len(others) - NAMED_SERIES} more" if len(others) > NAMED_SERIES else ""
        rivals = [other for other in others if other.is_hu == stack.is_hu]
        is_alone = all(np.prod(other.shape) < np.prod(stack.shape) for other in rivals)
        which = ("the largest" if is_alone else "one of the largest") + (" in HU" if len(rivals) < len(others) else "")
        odd.append(f"several CT series: took {which}, {_named(stack)}; left {left}; see --series")
    return stack, odd


def _named(stack: Stack) -> str:
    description = f"'{stack.series.description}', " if stack.series.description else ""
    return f"{stack.series.uid} ({description}{len(stack.slices)} slices)"


def _outline(stack: Stack, path: Path, odd: tuple[str, ...]) -> Scan:
    """A stack as a scan without its voxels."""
    checked_spacing((*stack.slices[0].pixel_spacing_mm, stack.spacing_mm), path)
    if stack.tilt_degrees > MAX_TILT_DEGREES:
        found = f"slices sheared by {stack.tilt_degrees:.0f} degrees"
        raise ScanError(path, found, f"a gantry tilt of at most {MAX_TILT_DEGREES:.0f} degrees")
    rescales = {slice_.rescale for slice_ in stack.slices}
    if len(rescales) == 1:
        dtype, slope, intercept = rescales.pop()
    else:  # slices scaled one by one meet in whole HU
        dtype, slope, intercept = np.dtype(np.int16), 1.0, 0.0
    refuse_oversized(path, stack.shape, dtype.itemsize, None)
    grid, repaired = checked_grid(stack.shape, stack.affine, path)
    files = tuple(slice_.source.name for slice_ in stack.slices)
    uids = frozenset(slice_.uid for slice_ in stack.slices)
    native = DicomSeries(stack.series.study_uid, stack.series.uid, files, stack.slices[0].source.archive, uids)
    return Scan(hollow(stack.shape, dtype), grid, slope, intercept, str(path), native, (*odd, *repaired))


def _volume(stack: Stack, outline: Scan) -> tuple[npt.NDArray[Any], list[str]]:
    """(X, Y, Z) values of a stack, as its outline says, and a warning if some of them were repaired."""
    dtype = outline.voxels.dtype
    as_hu = len({slice_.rescale for slice_ in stack.slices}) > 1
    volume = np.empty((len(stack.layers), *stack.canvas), dtype)
    stored_values = values_reader()
    air = _into((PADDING_HU - outline.intercept) / outline.slope, dtype)
    signed = set()

    def placed(index: int) -> npt.NDArray[Any]:
        slice_ = stack.slices[index]
        values = stored_values(slice_)
        if as_hu:
            if is_sign_lost(values, slice_.slope, slice_.intercept):  # in HU nobody could tell any more
                values = values.view(np.int16)
                signed.add(index)
            values = values.astype(np.float32) * np.float32(slice_.slope) + np.float32(slice_.intercept)
        if stack.is_tilted:
            values = _shifted(values, stack.shifts[index] - stack.shifts.min(axis=0), stack.canvas, float(air))
        return values

    def fill(item: tuple[int, Layer]) -> None:
        index, layer = item
        volume[index] = _layer_values(layer, placed, dtype)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(fill, enumerate(stack.layers)))
    return volume.transpose(2, 1, 0), [SIGNED_AGAIN] if signed else []


def _layer_values(layer: Layer, placed: Callable[[int], npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """(rows, columns) of one layer, of type ``dtype``, from what gives each slice on the volume's canvas."""
    values = placed(layer.lower)
    if layer.weight:
        lower, upper = values.astype(np.float32), placed(layer.upper).astype(np.float32)
        values = (1 - np.float32(layer.weight)) * lower + np.float32(layer.weight) * upper
    return values if values.dtype == dtype else _into(values, dtype)


def _shifted(
    values: npt.NDArray[Any], shift: npt.NDArray[np.float64], canvas: tuple[int, int], air: float
) -> npt.NDArray[np.float32]:
    """A slice moved by a fraction of pixels down and right on a larger canvas of air, bilinearly."""
    whole = np.floor(shift).astype(int)
    row, column = (shift - whole).astype(np.float32)
    edged = np.pad(values.astype(np.float32), 1, constant_values=air)
    moved = (1 - row) * edged[1:] + row * edged[:-1]
    moved = (1 - column) * moved[:, 1:] + column * moved[:, :-1]
    placed = np.full(canvas, air, np.float32)
    placed[whole[0] : whole[0] + moved.shape[0], whole[1] : whole[1] + moved.shape[1]] = moved
    return placed


def _into(values: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Rounded and clipped into an integer type."""
    limits = np.iinfo(dtype)
    return np.clip(np.rint(values), limits.min, limits.max).astype(dtype)
