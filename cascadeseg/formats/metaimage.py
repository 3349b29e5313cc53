"""The text header of a MetaImage (``.mha``, ``.mhd``), looked at before ITK reads the file.

ITK reads MetaImages well, but meets a damaged one with several lines on the terminal and an error without a reason,
and a missing spacing with silence.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

from cascadeseg.errors import ScanError

HEADER_BYTES = 1 << 16
ITEM_BYTES = {"CHAR": 1, "SHORT": 2, "INT": 4, "LONG": 8, "LONG_LONG": 8, "FLOAT": 4, "DOUBLE": 8}
COPY_AGAIN = "copy or download it again"

NO_PLACE = (
    "the header does not say how the axes lie: left, back, head was assumed; "
    "check the spacing and the sides of the mask"
)


def checked_header(path: Path) -> tuple[str, ...]:
    """What is odd about a MetaImage's header.

    Raises:
        ScanError: it is no MetaImage, or the data that it promises are not all there.
    """
    fields, start = _fields(path)
    if "NDims" not in fields or "ElementDataFile" not in fields:
        raise ScanError(path, "not a MetaImage file (no NDims and ElementDataFile)", "a MetaImage header")
    data = fields["ElementDataFile"]
    local = data.upper() == "LOCAL"
    if local or ("%" not in data and data.upper().split()[0] != "LIST"):
        _check_data(path, fields, path if local else path.parent / data, start if local else 0)
    placed = {"ElementSpacing", "ElementSize", "TransformMatrix", "Orientation", "Rotation"}
    return () if placed & set(fields) else (NO_PLACE,)


def _fields(path: Path) -> tuple[dict[str, str], int]:
    """The ``key = value`` lines, and where the data of a local file start."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    fields: dict[str, str] = {}
    start = 0
    while b"\n" in head[start:] and "ElementDataFile" not in fields:
        end = head.index(b"\n", start)
        key, equals, value = os.fsdecode(head[start:end]).partition("=")
        if not equals:
            break
        fields[key.strip()] = value.strip()
        start = end + 1
    return fields, start


def _check_data(path: Path, fields: dict[str, str], data: Path, start: int) -> None:
    """Raises ScanError unless the file of the data is there and long enough."""
    if not data.is_file():
        raise ScanError(path, f"its data file {data.name} is missing", "both files of the pair, side by side")
    held = data.stat().st_size - start
    try:
        kind = fields.get("ElementType", "").removeprefix("MET_").removeprefix("U")
        count = prod(int(n) for n in fields["DimSize"].split()) * int(fields.get("ElementNumberOfChannels", 1))
        wanted = count * ITEM_BYTES.get(kind.removesuffix("_ARRAY"), 1)
        if fields.get("CompressedData", "").lower() in ("true", "1"):
            wanted = int(fields.get("CompressedDataSize", 1))
        elif fields.get("BinaryData", "True").lower() not in ("true", "1"):
            wanted = count
    except (KeyError, ValueError) as problem:
        raise ScanError(path, f"a damaged MetaImage header ({problem})") from problem
    if held < wanted:
        found = f"the file is cut short ({held:,} of {wanted:,} bytes of data)"
        raise ScanError(path, found, "", COPY_AGAIN)
