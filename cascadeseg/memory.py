"""What the process has in memory, what the C library keeps of it once freed, how to tell that there is none left."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD = -8, -4, -1
"""Of glibc's ``mallopt``: how many heaps a process may have, how many blocks of their own, what may stay unused."""
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
"""How the RuntimeErrors of torch on a processor or on MPS, of CUDA, cuBLAS and cuDNN say so, in small letters."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of any device; torch need not be imported for it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


def give_back_freed_memory(above_mb: float = 0.0) -> None:
    """Has the C library return what was freed to the system: freed blocks of a step would stay with the process.

    Args:
        above_mb: only where the process has more than this in memory (MB of 10^6 bytes).
    """
    trim = getattr(_c_library(), "malloc_trim", None)  # of glibc; others give back by themselves
    if trim is not None and (not above_mb or _resident_mb() > above_mb):
        trim(0)


def _resident_mb() -> float:
    """What the process has in memory; infinity where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return float("inf")
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_memory_mb() -> float:
    """The largest resident memory this process ever had, in 10^6 bytes as all memory here."""
    if sys.platform == "win32":
        return float("nan")
    if sys.platform == "linux":  # where getrusage begins with what the program had that started this one
        with suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) * (1 if sys.platform == "darwin" else 1024) / 1e6


def share_one_heap() -> None:
    """Has the threads to come share the first one's heap, the only one of which `give_back_freed_memory` trims the end.

    Unless the environment says otherwise (``MALLOC_ARENA_MAX``).
    """
    set_option = getattr(_c_library(), "mallopt", None)
    if set_option is not None and "MALLOC_ARENA_MAX" not in os.environ:
        set_option(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Has the C library keep what is freed, in one heap, for who asks for as much again and again.

    By itself it gives blocks of more than 32 MB back at once, and the system clears each page of the next one anew.
    Unless the environment says otherwise (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_ARENA_MAX``).
    """
    set_option = getattr(_c_library(), "mallopt", None)
    if set_option is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        share_one_heap()
        set_option(M_MMAP_MAX, 0)
        set_option(M_TRIM_THRESHOLD, -1)


@cache
def _c_library() -> object:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
