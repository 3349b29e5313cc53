from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run
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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system tells no better")
def test_the_peak_is_that_of_the_process_not_of_what_started_it():
    child = "from cascadeseg.memory import peak_memory_mb as peak; own = b'x' * 10**8; print(peak())"
    parent = (
        f"import subprocess, sys; large = b'x' * 10**9; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    done = run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 100 < float(done.stdout) < 900


@pytest.mark.parametrize("variable", [None, "MALLOC_MMAP_THRESHOLD_"])
def test_training_keeps_what_it_freed_unless_the_environment_says_otherwise(monkeypatch, variable):
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    options: dict[int, int] = {}
    monkeypatch.setattr(memory, "_c_library", lambda: SimpleNamespace(mallopt=options.__setitem__))
    if variable:
        monkeypatch.setenv(variable, "131072")
    memory.keep_freed_memory()
    wanted = {memory.M_ARENA_MAX: 1, memory.M_MMAP_MAX: 0, memory.M_TRIM_THRESHOLD: -1}
    assert options == ({} if variable else wanted)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_what_was_kept_is_used_again_and_need_not_be_cleared():
    program = """
import resource, sys, torch
from cascadeseg.memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for number in range(36):
    if number == 32:  # by then the heap is as large as it gets
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    cleared = [
        int(run([sys.executable, "-c", program, how], check=True, capture_output=True).stdout)
        for how in ("by itself", "kept")
    ]
    assert cleared[0] >= 4 * 2**26 / 2**21, "pages of 2 MB are the largest"
    assert cleared[1] < cleared[0] / 4


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
    assert in_one_line(error, Path("a.nii.gz")) == (line and f"a.nii.gz: {line}")
