"""A MetaImage (``.mha``, ``.mhd``) looked at before ITK reads it: its text header, its data files; and its packed data.

ITK reads MetaImages well, but meets a damaged header with several lines on the terminal and an error without a
reason, and a missing spacing with silence. Of damaged compressed data, and of slices that no file is named for, it
gives back whatever lay in memory: compressed data are unpacked here.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from cascadeseg.errors import ScanError
from cascadeseg.formats.placement import NO_PLACE, NO_SPACING, refuse_other_units

HEADER_BYTES = 1 << 16
LIST_BYTES = 1 << 24
LIST_FILES = 1 << 16
PACKED_BYTES = 1 << 12
"""Unpacked at a time, to 4 MB at the most: deflate packs no tighter than by a factor of 1,032."""
ZLIB_OR_GZIP = 47  # zlib's wbits: the largest window, in either wrapping, as ITK takes it
ITEM_BYTES = {"CHAR": 1, "SHORT": 2, "INT": 4, "LONG": 4, "LONG_LONG": 8, "FLOAT": 4, "DOUBLE": 8}
COPY_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class Data:
    """Where the voxels lie: in one file, or in several that hold equal shares.

    Attributes:
        files: in the order of the voxels.
        start: where the voxels begin in each file.
        stored: the bytes that each file has to hold from there; 0 if the header does not say.
        unpacked: of compressed data the bytes that come out of each file; None of others.
        big_endian: the order of a voxel's bytes.
    """

    files: list[Path]
    start: int
    stored: int
    unpacked: int | None
    big_endian: bool


def checked_header(path: Path) -> tuple[Data, tuple[str, ...]]:
    """Where a MetaImage's header says that its voxels are, and what is odd about it.

    Raises:
        ScanError: it is no MetaImage, or the data that it promises are not all there.
    """
    fields, end = _fields(path)
    data = _data(path, fields, end)
    for file in data.files:
        if not file.is_file():
            found = f"its data file {file.name} is missing"
            raise ScanError(path, found, "header and data side by side, as they were written")
        held = file.stat().st_size - data.start
        if held < data.stored:
            raise _cut_short(path, file, f"{held:,} of {data.stored:,} bytes of data")
    refuse_other_units([fields.get("DistanceUnits", "")], path)
    placed = {"TransformMatrix", "Orientation", "Rotation"} & set(fields)
    spaced = {"ElementSpacing", "ElementSize"} & set(fields)
    return data, (*(() if placed else (NO_PLACE,)), *(() if spaced else (NO_SPACING,)))


def unpacked_volume(
    path: Path, data: Data, shape: tuple[int, int, int], dtype: np.dtype[Any], volume: int
) -> npt.NDArray[Any]:
    """A volume of compressed data, unpacked a piece at a time; those of other volumes are looked at as well.

    Args:
        path: the header's file, for messages.
        data: as `checked_header` gives it.
        shape: (X, Y, Z) of a volume.
        dtype: of its voxels, in native byte order.
        volume: which one, from 0.

    Returns:
        (X, Y, Z) voxels.

    Raises:
        ScanError: the data are damaged, or not as many as the header promises.
    """
    voxels: npt.NDArray[Any] = np.empty(shape, dtype, order="F")
    wanted = voxels.reshape(-1, order="F").view(np.uint8)
    promised = data.unpacked or 0
    for number, file in enumerate(data.files):
        try:
            count, whole = _unpack(file, data, wanted, number * promised - volume * len(wanted))
        except isal_zlib.error as problem:  # type: ignore[misc]
            found = f"damaged compressed data{_of(file, path)} ({problem})"
            raise ScanError(path, found, "", COPY_AGAIN) from problem
        if not whole and count <= promised:
            raise _cut_short(path, file, f"its compressed data end after {count:,} of {promised:,} bytes of voxels")
        if count != promised:
            found = f"compressed data{_of(file, path)} of {'' if whole else 'over '}{count:,} bytes"
            raise ScanError(path, found, f"{promised:,}, as the header says", "the file is damaged")
    return voxels.byteswap(inplace=True) if data.big_endian == (sys.byteorder == "little") else voxels


def _unpack(file: Path, data: Data, wanted: npt.NDArray[np.uint8], place: int) -> tuple[int, bool]:
    """Unpacks one file's bytes into those wanted, the first at ``place``, which may be before them or behind.

    Returns:
        How many there were (no more than a piece above what the header promises), and whether that was their end.
    """
    unpacker = isal_zlib.decompressobj(ZLIB_OR_GZIP)
    left = data.stored or file.stat().st_size - data.start
    count = 0
    with file.open("rb") as stream:
        stream.seek(data.start)
        while not unpacker.eof and count <= (data.unpacked or 0) and (packed := stream.read(min(left, PACKED_BYTES))):
            left -= len(packed)
            piece = np.frombuffer(unpacker.decompress(packed), np.uint8)
            at = place + count
            low, high = (min(max(n, 0), len(wanted)) for n in (at, at + len(piece)))
            wanted[low:high] = piece[low - at : high - at]
            count += len(piece)
    return count, unpacker.eof


def _fields(path: Path) -> tuple[dict[str, str], int]:
    """The ``key = value`` lines, and where they end: there the data of a local file start, or a list of files."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    fields: dict[str, str] = {}
    end = 0
    while b"\n" in head[end:] and "ElementDataFile" not in fields:
        line_end = head.index(b"\n", end)
        key, equals, value = os.fsdecode(head[end:line_end]).partition("=")
        if not equals:
            break
        fields[key.strip()] = value.strip()
        end = line_end + 1
    if "NDims" not in fields or "ElementDataFile" not in fields:
        raise ScanError(path, "not a MetaImage file (no NDims and ElementDataFile)", "a MetaImage header")
    return fields, end


def _data(path: Path, fields: dict[str, str], end: int) -> Data:
    """What the header says of its data."""
    local = fields["ElementDataFile"].upper() == "LOCAL"
    start = end if local else 0
    unpacked = None
    try:
        size = [int(n) for n in fields["DimSize"].split()]
        files, axes = ([path], len(size)) if local else _data_files(path, fields["ElementDataFile"], size, end)
        count = prod(size[:axes]) * int(fields.get("ElementNumberOfChannels", 1))
        kind = fields.get("ElementType", "").removeprefix("MET_").removeprefix("U").removesuffix("_ARRAY")
        stored = count * ITEM_BYTES.get(kind, 1)
        if fields.get("CompressedData", "").startswith(("T", "t", "1")):
            unpacked, stored = stored, int(fields.get("CompressedDataSize", 0))
            if stored and int(fields.get("HeaderSize", 0)) > 0:
                start = int(fields["HeaderSize"])
            if stored < 0:
                raise ValueError(f"CompressedDataSize = {stored}")
        elif not fields.get("BinaryData", "True").startswith(("T", "t", "1")):
            stored = count
    except (KeyError, ValueError) as problem:
        raise ScanError(path, f"a damaged MetaImage header ({problem})") from problem
    if local and unpacked is not None and stored == 0:  # ITK would take the header for data
        found = "compressed data without CompressedDataSize in the header"
        raise ScanError(path, found, "their number of bytes", "write the file again")
    order = fields.get("ElementByteOrderMSB", fields.get("BinaryDataByteOrderMSB", ""))
    return Data(files, start, stored, unpacked, big_endian=order.startswith(("T", "t", "1")))


def _data_files(path: Path, named: str, size: list[int], end: int) -> tuple[list[Path], int]:
    """The data files of a header without local data, and how many of the axes lie in each."""
    words = named.split()
    if not words:
        raise ScanError(path, "ElementDataFile without a value", "LOCAL or the name of the data file")
    axes = len(size) - 1
    if named.startswith("LIST"):
        axes = int(words[1].upper().removesuffix("D")) if len(words) > 1 else axes
        if not 0 < axes <= len(size):
            raise ValueError(named)
        with path.open("rb") as file:
            file.seek(end)
            # Names that no line break follows, ITK passes over.
            *lines, _ = file.read(LIST_BYTES).replace(b"\r", b"").split(b"\n")
        names = [os.fsdecode(line) for line in lines if line.strip()]
    elif "%" in named:
        # ITK makes up what is left out of "pattern first last step", and divides by zero.
        try:
            pattern, first, last, step = words
            numbers = range(int(first), int(last) + 1, int(step))[:LIST_FILES]
            names = [pattern % number for number in numbers]
        except (TypeError, ValueError) as problem:
            found = f"ElementDataFile = {named}"
            raise ScanError(path, found, "a pattern with the first number, the last and the step") from problem
    else:
        return [path.parent / named], len(size)
    wanted = prod(size[axes:])
    if len(names) != wanted:
        found = f"{len(names)} data files in the header"
        raise ScanError(path, found, f"{wanted} by DimSize, in a list each with a line break behind it")
    return [path.parent / name for name in names], axes


def _cut_short(path: Path, file: Path, counts: str) -> ScanError:
    return ScanError(path, f"{'the file' if file == path else file.name} is cut short ({counts})", "", COPY_AGAIN)


def _of(file: Path, path: Path) -> str:
    return "" if file == path else f" in {file.name}"
