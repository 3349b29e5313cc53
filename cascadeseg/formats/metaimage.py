"""A MetaImage (``.mha``, ``.mhd``): written here, and looked at before ITK reads it: its text header, its data files.

ITK reads MetaImages well, but meets a damaged header with several lines on the terminal and an error without a
reason, and a missing spacing with silence. Of slices that no file is named for it gives back whatever lay in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.errors import ScanError
from cascadeseg.formats.packed import ZLIB, Data, deflated, slabs
from cascadeseg.formats.placement import NO_PLACE, NO_SPACING, ItkGeometry, refuse_other_units
from cascadeseg.geometry import Grid

HEADER_BYTES = 1 << 16
LIST_BYTES = 1 << 24
LIST_FILES = 1 << 16
ITEM_BYTES = {"CHAR": 1, "SHORT": 2, "INT": 4, "LONG": 4, "LONG_LONG": 8, "FLOAT": 4, "DOUBLE": 8}
TYPES = {
    "i1": "CHAR", "i2": "SHORT", "i4": "INT", "i8": "LONG_LONG", "f4": "FLOAT", "f8": "DOUBLE",
    "u1": "UCHAR", "u2": "USHORT", "u4": "UINT", "u8": "ULONG_LONG",
}  # fmt: skip


def checked_header(path: Path) -> tuple[Data, tuple[str, ...]]:
    """Where a MetaImage's header says that its voxels are, and what is odd about it.

    Raises:
        ScanError: it is no MetaImage, its header is damaged, or its lengths are not in millimetres.
    """
    fields, end = _fields(path)
    data = _data(path, fields, end)
    refuse_other_units([fields.get("DistanceUnits", "")], path)
    placed = {"TransformMatrix", "Orientation", "Rotation"} & set(fields)
    spaced = {"ElementSpacing", "ElementSize"} & set(fields)
    return data, (*(() if placed else (NO_PLACE,)), *(() if spaced else (NO_SPACING,)))


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
    packed = None
    try:
        size = [int(n) for n in fields["DimSize"].split()]
        files, axes = ([path], len(size)) if local else _data_files(path, fields["ElementDataFile"], size, end)
        count = prod(size[:axes]) * int(fields.get("ElementNumberOfChannels", 1))
        kind = fields.get("ElementType", "").removeprefix("MET_").removeprefix("U").removesuffix("_ARRAY")
        stored = count * ITEM_BYTES.get(kind, 1)
        if fields.get("CompressedData", "").startswith(("T", "t", "1")):
            packed, stored = count, int(fields.get("CompressedDataSize", 0))
            if stored and int(fields.get("HeaderSize", 0)) > 0:
                start = int(fields["HeaderSize"])
            if stored < 0:
                raise ValueError(f"CompressedDataSize = {stored}")
        elif not fields.get("BinaryData", "True").startswith(("T", "t", "1")):
            stored = count
    except (KeyError, ValueError) as problem:
        raise ScanError(path, f"a damaged MetaImage header ({problem})") from problem
    if local and packed is not None and stored == 0:  # ITK would take the header for data
        found = "compressed data without CompressedDataSize in the header"
        raise ScanError(path, found, "their number of bytes", "write the file again")
    order = fields.get("ElementByteOrderMSB", fields.get("BinaryDataByteOrderMSB", ""))
    return Data(files, start, stored, packed, big_endian=order.startswith(("T", "t", "1")))


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


def write_metaimage(voxels: npt.NDArray[Any], geometry: ItkGeometry, path: Path) -> None:
    """Writes (X, Y, Z) voxels, compressed, with the header that ITK would write.

    Of an ``.mhd`` they lie in a ``.zraw`` beside it. Of an ``.mha``, too, until the header is there, which has to say
    how many bytes they take; a number that is put in later would have to be filled up with blanks or zeros.
    """
    data = path.with_suffix(".zraw")
    local = path.suffix.lower() == ".mha"
    with data.open("xb") as file:
        file.writelines(deflated(slabs(voxels, voxels.dtype.newbyteorder("<")), ZLIB))
    with path.open("xb") as file:
        file.write(_header(voxels, geometry, data.stat().st_size, "LOCAL" if local else data.name).encode())
        if local:
            with data.open("rb") as packed:
                shutil.copyfileobj(packed, file)
            data.unlink()


def _header(voxels: npt.NDArray[Any], geometry: ItkGeometry, stored: int, data_file: str) -> str:
    """The header of voxels that take ``stored`` bytes, compressed."""
    fields = {
        "ObjectType": "Image",
        "NDims": "3",
        "BinaryData": "True",
        "BinaryDataByteOrderMSB": "False",
        "CompressedData": "True",
        "CompressedDataSize": str(stored),
        "TransformMatrix": _numbers(np.reshape(geometry.direction, (3, 3)).T.ravel()),  # an axis after the other
        "Offset": _numbers(geometry.origin),
        "CenterOfRotation": "0 0 0",
        "AnatomicalOrientation": _sides(Grid(voxels.shape, geometry.affine)),
        "ElementSpacing": _numbers(geometry.spacing),
        "DimSize": " ".join(map(str, voxels.shape)),
        "ElementType": f"MET_{TYPES[voxels.dtype.str[1:]]}",
        "ElementDataFile": data_file,
    }
    return "".join(f"{name} = {value}\n" for name, value in fields.items())


def _numbers(values: Iterable[float]) -> str:
    """As many digits as it takes to read the same numbers back."""
    return " ".join(f"{value:.17g}" for value in values)


def _sides(grid: Grid) -> str:
    """The side that each axis begins at, by its letter."""
    order, flips = grid.canonical_axes()
    letters = {axis: "RAS"[w] if flips[w] else "LPI"[w] for w, axis in enumerate(order)}
    return "".join(letters[axis] for axis in range(3))
