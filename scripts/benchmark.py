"""Measures `cascadeseg infer` as a user meets it: whole processes, their wall time, processor time and peak memory.

    python scripts/benchmark.py                    # a synthetic 512 x 512 x 320 scan, three runs
    python scripts/benchmark.py --scan my.nii.gz --repeat 5
    python scripts/benchmark.py --slices 300 600 1200 2000 --engine openvino --max-memory 2

Scans are made once (half a minute for 320 slices) and kept in a temporary folder. Prints a Markdown table of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACROSS = (512, 512)
SLICES = 320
SPACING_MM = (0.75, 0.75, 1.0)
SEED = 1
SLAB = 40
"""Slices rendered at a time, to keep the memory small."""
COMMAND = [sys.executable, "-m", "cascadeseg"]


@dataclass(frozen=True)
class Run:
    """One process.

    Attributes:
        wall_s: from its start to its end.
        cpu_s: of all its threads together.
        peak_mb: its largest resident memory.
    """

    wall_s: float
    cpu_s: float
    peak_mb: float


def main() -> int:
    """Prints the table; returns the exit code."""
    options = _options()
    folder = Path(options.cache)
    folder.mkdir(parents=True, exist_ok=True)
    scans = [Path(options.scan)] if options.scan else [_synthetic_scan(folder, n) for n in options.slices]
    for scan in scans:
        _print_table(*_infer_runs(scan, folder, options))
    helps = [_measured([*COMMAND, "--help"]) for _ in range(max(5, options.repeat))]
    print(f"`cascadeseg --help`: {statistics.median(run.wall_s for run in helps):.2f} s")
    return 0


def _infer_runs(scan: Path, folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Run]]:
    """Reports and accounts of repeated runs on one scan."""
    report = folder / "mask.json"
    infer = ["infer", str(scan), "-o", str(folder / "mask.nii.gz"), "--report", str(report), "--force"]
    infer += ["--device", options.device, "--engine", options.engine]
    for option, value in (
        ("--model", options.model),
        ("--max-memory", options.max_memory),
        ("--max-vram", options.max_vram),
    ):
        infer += [option, value] if value else []
    runs, reports = [], []
    for _ in range(options.repeat):
        runs.append(_measured([*COMMAND, *infer]))
        reports.append(json.loads(report.read_text(encoding="utf-8")))
    return reports, runs


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs to take the median of; default 3")
    parser.add_argument("--scan", metavar="FILE", help="a scan of your own; default: a synthetic one")
    parser.add_argument(
        "--slices", type=int, nargs="+", default=[SLICES], metavar="N", help=f"of synthetic scans; default {SLICES}"
    )
    for option in ("--max-memory", "--max-vram"):
        parser.add_argument(option, metavar="GB", help="as for infer")
    parser.add_argument("--engine", default="auto", help="as for infer")
    parser.add_argument("--device", default="auto", help="as for infer")
    parser.add_argument("--model", metavar="DIR", help="as for infer")
    cache = str(Path(tempfile.gettempdir()) / "cascadeseg-benchmark")
    parser.add_argument("--cache", default=cache, metavar="DIR", help=f"default: {cache}")
    return parser.parse_args()


def _synthetic_scan(folder: Path, slices: int) -> Path:
    """A chest about the middle of the volume, with the noise and the file size of a real scan."""
    shape = (*ACROSS, slices)
    path = folder / f"synthetic_{'x'.join(map(str, shape))}.nii.gz"
    if path.exists():
        return path
    import numpy as np

    from cascadeseg.formats import write_scan
    from cascadeseg.geometry import Box, Grid
    from cascadeseg.synthesis import PRESETS, render, sample_patient

    sys.stderr.write(f"making {path}\n")
    patient = sample_patient(SEED, PRESETS["healthy"])
    seen = patient.field_of_view(SPACING_MM)
    centre = seen.world((np.asarray(seen.shape) - 1) / 2)
    origin = centre - (np.asarray(shape) - 1) / 2 * np.asarray(SPACING_MM)
    grid = Grid.axis_aligned(shape, SPACING_MM, origin)
    voxels = np.empty(shape, np.int16, order="F")
    for z in range(0, slices, SLAB):
        slab = Box((0, 0, z), (*ACROSS, min(z + SLAB, slices)))
        voxels[slab.slices] = render(patient, grid.cropped(slab)).hu.round().numpy()
    write_scan(voxels, grid, path)
    return path


def _measured(command: list[str]) -> Run:
    """Runs a command to its end; its memory and processor time are the kernel's own account."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    code = process.returncode = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise SystemExit(f"{' '.join(command)} ended with exit code {code}")
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return Run(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / unit)


def _print_table(reports: list[dict[str, Any]], runs: list[Run]) -> None:
    last = reports[-1]
    print(f"{last['scan']['shape']} voxels, {last['device']}, {last['precision']}, {os.cpu_count()} CPUs,", end=" ")
    print(f"medians of {len(runs)} runs\n")
    print("| | wall s | CPU s | peak MB |")
    print("|---|---|---|---|")
    wall, cpu, peak = (
        statistics.median(getattr(run, field) for run in runs) for field in ("wall_s", "cpu_s", "peak_mb")
    )
    print(f"| `cascadeseg infer` | {wall:.2f} | {cpu:.2f} | {peak:,.0f} |")
    for step in last["seconds"]:
        print(f"| - {step} | {statistics.median(report['seconds'][step] for report in reports):.2f} | | |")
    print()


if __name__ == "__main__":
    raise SystemExit(main())
