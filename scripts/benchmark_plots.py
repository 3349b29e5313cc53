"""The plots of `benchmark.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from benchmark_runs import median

Result = dict[str, Any]


def plot_lengths(path: Path, rows: Sequence[Result]) -> None:
    """Wall time and peak memory against the number of slices."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    rows = sorted(rows, key=lambda row: row["shape"][2])
    slices = [row["shape"][2] for row in rows]
    for axis, field in zip(axes, ("wall_s", "peak_mb"), strict=True):
        axis.plot(slices, [median(row, field) for row in rows], "o-", label="the whole process")
    axes[1].plot(slices, [row["voxels_mb"] for row in rows], "k:", label="the scan's own voxels")
    for axis, title in zip(axes, ("wall time, s", "peak memory, MB"), strict=True):
        axis.set(xlabel="slices of 512 x 512", title=title, xlim=(0, None), ylim=(0, None))
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_steps(path: Path, rows: Sequence[Result], bounds: Sequence[Result]) -> None:
    """Where each second goes, and the least that it could be."""
    bars = {f"{row['shape'][2]} slices": _with_start(row) for row in rows}
    bars |= {f"{bound['scan'].partition('.')[0]}: lower bound": bound["seconds"] for bound in bounds}
    steps = list(dict.fromkeys(step for seconds in bars.values() for step in seconds))
    figure, axis = plt.subplots(figsize=(9, 1 + 0.45 * len(bars)), layout="constrained")
    left = [0.0] * len(bars)
    for number, step in enumerate(steps):
        widths = [seconds.get(step, 0.0) for seconds in bars.values()]
        axis.barh(list(bars), widths, left=left, label=step, color=plt.colormaps["tab20"](number))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("s")
    axis.legend(ncols=1, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _with_start(row: Result) -> dict[str, float]:
    """The steps, and what of the process they leave over."""
    return {**row["seconds"], "start and end": max(0.0, median(row, "wall_s") - sum(row["seconds"].values()))}
