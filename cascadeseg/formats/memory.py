"""A header's promise that memory cannot hold is refused before anything is allocated."""

from __future__ import annotations

from math import prod

from cascadeseg.errors import ScanError
from cascadeseg.machine import available_memory_bytes

DEFLATE_LIMIT = 1040
"""Deflate packs at most about 1,032 bytes into one; nothing true is packed tighter than this."""


def refuse_oversized(
    where: object, shape: tuple[int, ...], item_bytes: int, held_bytes: int | None, *, mapped: bool = False
) -> None:
    """Raises ScanError if a volume cannot come out of its file, or cannot fit in memory.

    Args:
        where: the file, for the message.
        shape: voxels along each axis.
        item_bytes: size of a stored voxel.
        held_bytes: the most that the file could hold, or None if that is not known.
        mapped: the volume stays in its file, memory-mapped, and needs no memory of its own.
    """
    wanted = prod(shape) * item_bytes
    size = f"{' x '.join(map(str, shape))} voxels ({_in_words(wanted)})"
    if held_bytes is not None and wanted > held_bytes:
        found = f"the header promises {size}"
        raise ScanError(where, found, "no more than the file can hold", "the file is damaged")
    free = None if mapped else available_memory_bytes()
    if free is not None and wanted > free:
        found = f"the header promises {size}, and {_in_words(free)} of memory are free"
        raise ScanError(where, found, "a scan that fits in memory", "crop it, or use a larger machine")


def _in_words(count: int) -> str:
    value, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.4g} {unit}"
