"""How much memory is free, so that a header's promise is refused before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

from cascadeseg.errors import ScanError

DEFLATE_LIMIT = 1040
"""Deflate packs at most about 1,032 bytes into one; nothing true is packed tighter than this."""
OWN_GROUPS, CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_memory_bytes() -> int | None:
    """Memory a process may still take, or None where the system does not tell."""
    known = [value for value in (_free_bytes(), _container_limit_bytes()) if value is not None]
    return min(known) if known else None


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


def _free_bytes() -> int | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _container_limit_bytes() -> int | None:
    """The lowest limit that a container, or a batch system on a job, sets on all of its processes together."""
    files = [group / name for group in _control_groups() for name in ("memory.max", "memory.limit_in_bytes")]
    return min((int(text) for text in map(_text, files) if text.isdigit()), default=None)


def _control_groups() -> Iterator[Path]:
    """Where Linux keeps the memory limits of the groups that this process is in, and of those that these are in."""
    for line in _text(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # of version 2, of version 1
            group = Path(path.lstrip("/"))  # as seen from a container its own is the outermost
            yield from (CONTROL_GROUPS / controllers / part for part in (group, *group.parents))


def _text(file: Path) -> str:
    """What is in a file, or nothing where there is none."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
