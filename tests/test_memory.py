from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cascadeseg import memory
from cascadeseg.terminal import in_one_line


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not say")
def test_freed_memory_goes_back_where_the_process_is_larger_than_asked(monkeypatch):
    trimmed: list[int] = []
    monkeypatch.setattr(memory, "_c_library", lambda: SimpleNamespace(malloc_trim=trimmed.append))
    memory.give_back_freed_memory()
    memory.give_back_freed_memory(above_mb=1.0)
    assert trimmed == [0, 0]
    memory.give_back_freed_memory(above_mb=1e7)
    assert trimmed == [0, 0]


def test_where_nobody_knows_how_large_the_process_is_memory_goes_back(monkeypatch):
    trimmed: list[int] = []
    monkeypatch.setattr(memory, "_c_library", lambda: SimpleNamespace(malloc_trim=trimmed.append))
    monkeypatch.setattr(memory, "_resident_mb", lambda: float("inf"))
    memory.give_back_freed_memory(above_mb=1e7)
    assert trimmed == [0]


def test_a_library_that_cannot_give_back_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory, "_c_library", lambda: None)
    memory.give_back_freed_memory()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "out of memory; crop the scan, or use a larger machine"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            "out of memory; crop the scan, or use a larger machine",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "out of the device's memory; use --device cpu"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
)
def test_whatever_ran_out_of_memory_is_one_line(error, line):
    assert in_one_line(error) == line
