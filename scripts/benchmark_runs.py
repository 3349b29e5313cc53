"""One process measured from outside: wall time, processor time, memory, the GPU's memory."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE_S = 0.1


@dataclass(frozen=True)
class Run:
    """One process.

    Attributes:
        wall_s: from its start to its end.
        cpu_s: of all its threads together.
        peak_mb: its largest resident memory.
        memory_area: MB times samples.
        cpu_area: per cent of the machine times samples.
        gpu_peak_mb: the largest use of the first GPU by anybody; None without one.
        gpu_area: MB times samples; None without a GPU.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float
    memory_area: float
    cpu_area: float
    gpu_peak_mb: float | None
    gpu_area: float | None


def median(row: dict[str, Any], field: str) -> float:
    """Of a field of `Run` over a row's runs."""
    return float(statistics.median(run[field] for run in row["runs"]))


def environment() -> dict[str, str]:
    """As `cascadeseg infer` sets it for itself (`batch.set_up_libraries`)."""
    own = {"OMP_WAIT_POLICY": "PASSIVE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "MALLOC_ARENA_MAX": "1"}
    return own | os.environ


def measured(command: list[str], stdout: int = subprocess.DEVNULL) -> Run:
    """Runs a command to its end; its memory and processor time are the kernel's own account."""
    with _gpu_memory() as gpu:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=stdout)
        with _memory(process.pid) as memory:
            _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start
    code = process.returncode = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise SystemExit(f"{' '.join(command)} ended with exit code {code}")
    unit = 1 if sys.platform == "darwin" else 1024
    cpu_s = usage.ru_utime + usage.ru_stime
    return Run(
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_mb=usage.ru_maxrss * unit / 1e6,
        memory_area=sum(memory) if memory else float("nan"),
        # The sum of what every sample would show is the processor time itself, in other units.
        cpu_area=100 * cpu_s / (os.cpu_count() or 1) / SAMPLE_S,
        gpu_peak_mb=max(gpu, default=None),
        gpu_area=sum(gpu) if gpu else None,
    )


@contextmanager
def _memory(pid: int) -> Iterator[list[float]]:
    """Resident MB of a process every 0.1 s while the block runs; nothing where there is no /proc."""
    samples: list[float] = []
    ended = threading.Event()

    def sample() -> None:
        statm, page_mb = Path(f"/proc/{pid}/statm"), os.sysconf("SC_PAGE_SIZE") / 1e6
        while not ended.wait(SAMPLE_S):
            try:
                samples.append(int(statm.read_text(encoding="ascii").split()[1]) * page_mb)
            except OSError:
                return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


@contextmanager
def _gpu_memory() -> Iterator[list[float]]:
    """MB in use of the first GPU every 0.1 s; filled when the block has ended, empty without a GPU."""
    samples: list[float] = []
    if shutil.which("nvidia-smi") is None:
        yield samples
        return
    every = ["-i", "0", "-lms", str(round(1000 * SAMPLE_S))]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", *every]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield samples
        finally:
            process.terminate()
        samples += [float(line) for line in process.communicate()[0].split() if line.isdigit()]
