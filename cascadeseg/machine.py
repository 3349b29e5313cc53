"""What this process may take of the machine: bound, in a container or as a batch system's job it is less than all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

OWN_GROUPS, CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")
"""What a control group's processes are counted as using and the system takes back before any of them is refused memory:
files that were read, above all. As in the system's own ``MemAvailable``."""


def bound_processors() -> int:
    """How many of the machine's processors this process is bound to, as torch counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> int:
    """How many this process may use: those that it is bound to, as far as its control groups let it."""
    shares = []
    for group in _control_groups("cpu"):
        version_1 = (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        share, _, of = (_text(group / "cpu.max") or " ".join(version_1)).partition(" ")
        if share.isdigit() and of.isdigit():  # microseconds of how many; "max" or -1 is no limit
            shares.append(ceil(int(share) / int(of)))
    return min([bound_processors(), *shares])


def available_memory_bytes() -> int | None:
    """Memory a process may still take, or None where the system does not tell."""
    known = [value for value in (_free_bytes(), _left_of_limits_bytes()) if value is not None]
    return min(known) if known else None


def _free_bytes() -> int | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _left_of_limits_bytes() -> int | None:
    """The least that is left of a limit which a container, or a batch system on a job, sets on all of its processes."""
    left = []
    for group in _control_groups("memory"):
        for limit, used, total in (("max", "current", ""), ("limit_in_bytes", "usage_in_bytes", "total_")):
            most, taken = (_text(group / f"memory.{name}") for name in (limit, used))
            if most.isdigit():  # "max" is no limit
                stat = dict(line.split(maxsplit=1) for line in _text(group / "memory.stat").splitlines())
                given_back = sum(int(stat.get(total + name, 0)) for name in GIVEN_BACK)
                left.append(max(0, int(most) - max(0, int(taken or 0) - given_back)))
    return min(left, default=None)


def _control_groups(controller: str) -> Iterator[Path]:
    """Where Linux keeps a controller's limits of the groups that this process is in, and of those that these are in."""
    for line in _text(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):  # of version 2, of version 1
            group = Path(path.lstrip("/"))  # as seen from a container its own is the outermost
            folders = dict.fromkeys((controllers, controller if controllers else ""))  # "cpuacct,cpu" may lie in "cpu"
            yield from (CONTROL_GROUPS / folder / part for folder in folders for part in (group, *group.parents))


def _text(file: Path) -> str:
    """What is in a file, or nothing where there is none."""
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
