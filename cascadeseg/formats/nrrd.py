"""The text header of a NRRD (``.nrrd``, ``.nhdr``), looked at before ITK reads the file.

ITK meets a missing spacing, lengths in another unit than millimetres and axes of no anatomy with silence.
"""

from __future__ import annotations

import os
import re
from math import prod
from pathlib import Path

from cascadeseg.errors import ScanError
from cascadeseg.formats.packed import Data
from cascadeseg.formats.placement import NO_PLACE, NO_SPACING, refuse_other_units

HEADER_BYTES = 1 << 16
NOT_TURNED = ("right-anterior-superior-time", "rast", "left-anterior-superior-time", "last")
"""Spaces that ITK takes for LPS, though it knows them without the time."""


def checked_header(path: Path) -> tuple[Data | None, tuple[str, ...]]:
    """Where a NRRD's gzipped voxels lie, and what is odd about its header; what makes it unreadable is left to ITK.

    Returns:
        The data if they are gzipped and in one file, None of others; and the remarks.

    Raises:
        ScanError: its lengths are not in millimetres, or its axes are such as ITK takes for others.
    """
    fields, end = _fields(path)
    for field in ("space units", "units"):
        refuse_other_units(re.findall(r'"([^"]*)"', fields.get(field, "")), path)
    vectors = fields.get("space directions", "").count("(")
    numbers = [word for word in fields.get("spacings", "").split() if word.lower() != "nan"]
    space = fields.get("space", "").lower()  # the others that NRRD knows are of a scanner, or of nothing
    if space in NOT_TURNED:
        expected = "left-posterior-superior-time, or a file of three dimensions"
        raise ScanError(path, f"the space '{space}', whose sides would be taken for others", expected, "convert it")
    placed = "superior" in space or space[:3] in ("ras", "las", "lps")
    spaced = vectors >= 3 or len(numbers) >= 3
    odd = (*(() if placed else (NO_PLACE,)), *(() if spaced else (NO_SPACING,)))
    return _packed_data(path, fields, end), odd


def _packed_data(path: Path, fields: dict[str, str], end: int) -> Data | None:
    """Where gzipped voxels lie; None of data of another encoding, in several files or behind other data."""
    fields = {name.replace(" ", ""): value for name, value in fields.items()}  # "data file" is "datafile" as well
    gzipped = fields.get("encoding", "").lower() in ("gzip", "gz")
    skipping = any(fields.get(field, "0") != "0" for field in ("lineskip", "byteskip"))
    sizes = fields.get("sizes", "").split()
    if not gzipped or skipping or not all(size.isdecimal() for size in sizes):
        return None
    file, start = (path.parent / fields["datafile"], 0) if "datafile" in fields else (path, end)
    if not file.is_file() or (file == path and not end):
        return None
    return Data([file], start, 0, prod(map(int, sizes)), big_endian=fields.get("endian", "").lower() == "big")


def _fields(path: Path) -> tuple[dict[str, str], int]:
    """The ``field: value`` lines, and where the empty line ends that the data follow; 0 if there is none."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    fields: dict[str, str] = {}
    end = 0
    for line in head.splitlines(keepends=True):
        end += len(line)
        if not line.strip():
            return fields, end
        name, _, value = os.fsdecode(line).partition(": ")
        fields[name.strip().lower()] = value.strip()
    return fields, 0
