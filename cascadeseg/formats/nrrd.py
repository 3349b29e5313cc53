"""The text header of a NRRD (``.nrrd``, ``.nhdr``), looked at before ITK reads the file.

ITK meets a missing spacing, lengths in another unit than millimetres and axes of no anatomy with silence.
"""

from __future__ import annotations

import re
from pathlib import Path

from cascadeseg.formats.placement import NO_PLACE, NO_SPACING, refuse_other_units

HEADER_BYTES = 1 << 16


def checked_header(path: Path) -> tuple[str, ...]:
    """What is odd about a NRRD's header; what makes it unreadable is left to ITK.

    Raises:
        ScanError: its lengths are not in millimetres.
    """
    fields = _fields(path)
    for field in ("space units", "units"):
        refuse_other_units(re.findall(r'"([^"]*)"', fields.get(field, "")), path)
    vectors = fields.get("space directions", "").count("(")
    numbers = [word for word in fields.get("spacings", "").split() if word.lower() != "nan"]
    space = fields.get("space", "").lower()  # the others that NRRD knows are of a scanner, or of nothing
    placed = "superior" in space or space[:3] in ("ras", "las", "lps")
    spaced = vectors >= 3 or len(numbers) >= 3
    return (*(() if placed else (NO_PLACE,)), *(() if spaced else (NO_SPACING,)))


def _fields(path: Path) -> dict[str, str]:
    """The ``field: value`` lines, up to the empty line that the data follow."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES).decode(errors="replace")
    fields: dict[str, str] = {}
    for line in head.split("\n"):
        if not line.strip():
            break
        name, _, value = line.partition(": ")
        fields[name.strip().lower()] = value.strip()
    return fields
