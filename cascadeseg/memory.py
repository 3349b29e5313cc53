"""What the C library keeps of freed memory."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


def give_back_freed_memory() -> None:
    """Has the C library return what was freed to the system: freed blocks of a step would stay with the process."""
    trim = getattr(_c_library(), "malloc_trim", None)  # of glibc; others give back by themselves
    if trim is not None:
        trim(0)


@cache
def _c_library() -> object:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
