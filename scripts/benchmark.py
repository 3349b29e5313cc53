"""Measures `cascadeseg infer` as a user meets it, and what stands behind it: the source of docs/performance.md.

    python scripts/benchmark.py                                       # a 512 x 512 x 320 scan: cold, warm, lower bound
    python scripts/benchmark.py --slices 300 600 1200 2000 --parts cold
    python scripts/benchmark.py --parts cold --slices 2000 --max-memory 2
    python scripts/benchmark.py --parts agreement
    python scripts/benchmark.py --parts batch --batch 20
    python scripts/benchmark.py --parts lungmask --lungmask /path/to/its/python
    python scripts/benchmark.py --parts onnx --scan a.nii.gz b.mha    # the exported networks (docs/export.md)
    python scripts/benchmark.py --parts cuda                          # a line and no more where there is no GPU

Scans are made once and kept in ``--cache``. Prints Markdown tables of medians; ``--output DIR`` also gets them as
``performance.md``, every run as ``performance.json``, and plots as ``performance-*.png``.

Efficiency areas are those of the FLARE challenges (doi 10.48550/arXiv.2308.05862): the sum of samples taken every 0.1 s
of the memory in MB, of the GPU's memory in MB, and of the processor's use in per cent of the whole machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmark_runs import environment, measured, median

ACROSS = (512, 512)
SLICES = 320
SPACING_MM = (0.75, 0.75, 1.0)
SEED = 1
SLAB = 40
"""Slices rendered at a time, to keep the memory small."""
COMMAND = [sys.executable, "-m", "cascadeseg"]
HERE = Path(__file__).parent
PARTS = ("cold", "warm", "bound", "agreement", "batch", "lungmask", "onnx", "cuda")
Result = dict[str, Any]


def main() -> int:
    """Prints the tables; returns the exit code."""
    options = _options()
    folder = Path(options.cache)
    folder.mkdir(parents=True, exist_ok=True)
    scans = [Path(scan) for scan in options.scan] or [_synthetic_scan(folder, n) for n in options.slices]
    results: Result = {"machine": _machine(), "repeat": options.repeat}
    text = [f"{results['machine']}; medians of {options.repeat} runs.\n"]
    print(text[0], flush=True)
    for part in options.parts:
        results[part], lines = MEASURES[part](scans, folder, options)
        text += lines
        print("\n".join(lines), flush=True)
    if options.output:
        _write(Path(options.output), results, text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=["cold", "warm", "bound"], help="default: cold warm bound")
    add("--repeat", type=int, default=3, metavar="N", help="runs to take the median of; default 3")
    add("--scan", nargs="+", default=[], metavar="FILE", help="scans of your own; default: a synthetic one")
    add("--slices", type=int, nargs="+", default=[SLICES], metavar="N", help=f"of synthetic scans; default {SLICES}")
    add("--batch", type=int, default=20, metavar="N", help="scans of the batch; default 20")
    add("--lungmask", metavar="PYTHON", help="an interpreter that has lungmask")
    for option in ("--max-memory", "--max-vram"):
        add(option, metavar="GB", help="as for infer")
    add("--device", default="auto", help="as for infer")
    add("--model", metavar="DIR", help="as for infer")
    cache = str(Path(tempfile.gettempdir()) / "cascadeseg-benchmark")
    add("--cache", default=cache, metavar="DIR", help=f"default: {cache}")
    add("--output", metavar="DIR", help="for performance.md, performance.json and plots")
    options = parser.parse_args()
    if options.output and find_spec("matplotlib") is None:
        parser.error("--output draws plots, for which matplotlib is missing: pip install 'cascadeseg[docs]'")
    return options


# ---------------------------------------------------------------------------------------------------- the parts


def _cold(scans: Sequence[Path], folder: Path, options: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """Whole processes."""
    rows = [_infer_runs(scan, folder, options) for scan in scans]
    helps = [measured([*COMMAND, "--help"]) for _ in range(max(5, options.repeat))]
    steps = list(rows[0]["seconds"])
    return rows, [
        "## Cold: the whole process\n",
        *_table(("scan", "wall s", "CPU s", "peak MB", "voxels MB", "memory area", "CPU area"), [
            (_size(row), *_numbers(row, "wall_s", "cpu_s"), f"{median(row, 'peak_mb'):,.0f}",
             f"{row['voxels_mb']:,.0f}", f"{median(row, 'memory_area'):,.0f}", f"{median(row, 'cpu_area'):,.0f}")
            for row in rows
        ]),
        f"`cascadeseg --help`: {statistics.median(run.wall_s for run in helps):.2f} s. By step, seconds:\n",
        *_table(("scan", *steps), [
            (_size(row), *(f"{row['seconds'].get(step, 0):.2f}" for step in steps)) for row in rows
        ]),
    ]  # fmt: skip


def _warm(scans: Sequence[Path], folder: Path, options: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """The same scan again by one `Segmenter`: read, segmented, written."""
    rows = [{"scan": scan.name, **_part("warm", [scan], options)} for scan in scans]
    return rows, ["## Warm: read, segmented and written again\n", *_table(("scan", "wall s", "by step"), [
        (row["scan"], f"{statistics.median(row['wall_s']):.2f}",
         ", ".join(f"{step} {seconds:.2f}" for step, seconds in row["seconds"].items()))
        for row in rows
    ])]  # fmt: skip


def _bound(scans: Sequence[Path], folder: Path, options: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """What no implementation could undercut here."""
    rows = [{"scan": scan.name, **_part("bound", [scan], options)} for scan in scans]
    return rows, [
        "## Lower bound\n",
        *_table(("scan", "bound s", "decompress", "convolutions", "compress", "GFLOP", "GFLOP/s"), [
            (row["scan"], f"{row['bound_s']:.2f}", *(f"{seconds:.3f}" for seconds in row["seconds"].values()),
             f"{row['gflop']:,.0f}", f"{row['gflop_per_s']:,.0f}")
            for row in rows
        ]),
    ]  # fmt: skip


def _agreement(scans: Sequence[Path], folder: Path, options: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """Every precision against float32 on the processor."""
    rows: list[Result] = _part("agreement", scans[:1], options)
    lungs = list(rows[0]["dice"])
    return rows, ["## Dice against float32 on the processor\n", *_table(("device", "precision", *lungs), [
        (row["device"], row["precision"], *(f"{row['dice'][lung]:.5f}" for lung in lungs))
        for row in rows
    ])]  # fmt: skip


def _batch(scans: Sequence[Path], folder: Path, options: argparse.Namespace) -> tuple[Result, list[str]]:
    """A folder by one command, one scan and two at once, and by one warm call after another."""
    copies = _copies(scans[0], folder / "batch", options.batch)
    calls = _part("one-by-one", sorted(copies.iterdir()), options)
    masks = ["-o", str(folder / "masks"), "--force", "--quiet", *_infer_options(options)]
    ways = {"one warm call after another": calls}
    for jobs in ("1", "2"):
        whole = measured([*COMMAND, "infer", str(copies), *masks, "--jobs", jobs])
        ways[f"`cascadeseg infer DIR --jobs {jobs}`, its start included"] = asdict(whole)
    return ways, [f"## Batch of {options.batch} scans\n", *_table(("", "wall s", "CPU s", "times as fast"), [
        (way, f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}", f"{calls['wall_s'] / row['wall_s']:.2f}")
        for way, row in ways.items()
    ])]  # fmt: skip


def _lungmask(scans: Sequence[Path], folder: Path, options: argparse.Namespace) -> tuple[Result, list[str]]:
    """lungmask and cascadeseg on the same scan, one after the other."""
    if not options.lungmask:
        return {}, ["lungmask: skipped; name an interpreter that has it with --lungmask PYTHON\n"]
    ours = _infer_runs(scans[0], folder, options)
    warm = _part("warm", scans[:1], options)
    answer = folder / "lungmask.json"
    with answer.open("wb") as file:
        theirs = measured([options.lungmask, str(HERE / "benchmark_lungmask.py"), str(scans[0])], stdout=file.fileno())
    times = json.loads(answer.read_text(encoding="utf-8"))
    warm_s = times["read_s"] + times["apply_s"]
    cold_s = times["load_s"] + warm_s
    our_cold_s, our_warm_s = median(ours, "wall_s"), statistics.median(warm["wall_s"])
    return {"lungmask": {**times, **asdict(theirs)}, "cascadeseg": ours, "cascadeseg_warm": warm}, [
        "## Beside lungmask (R231, random weights, no post-processing)\n",
        *_table(("", "cold s", "warm s", "peak MB"), [
            ("lungmask", f"{cold_s:.1f}", f"{warm_s:.1f}", f"{theirs.peak_mb:,.0f}"),
            ("cascadeseg", f"{our_cold_s:.2f}", f"{our_warm_s:.2f}", f"{median(ours, 'peak_mb'):,.0f}"),
            ("times as fast", f"{cold_s / our_cold_s:.0f}", f"{warm_s / our_warm_s:.0f}", ""),
        ]),
    ]  # fmt: skip


def _onnx(scans: Sequence[Path], folder: Path, options: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """The exported networks by `onnx_infer.py` and by cascadeseg, scan by scan."""
    networks, mask = folder / "networks", folder / "mask_onnx.nii.gz"
    model = ["--model", options.model] if options.model else []
    subprocess.run([*COMMAND, "export", str(networks), "--force", *model], check=True, stdout=subprocess.DEVNULL)
    script = [sys.executable, str(HERE / "onnx_infer.py"), str(networks)]
    rows: list[Result] = []
    for scan in scans:
        runs = [asdict(measured([*script, str(scan), str(mask)])) for _ in range(options.repeat)]
        ours = _infer_runs(scan, folder, options)
        rows.append({"scan": scan.name, "onnx_infer.py": {"runs": runs}, "cascadeseg infer": ours})
    return rows, ["## Without torch: ONNX\n", *_table(("scan", "", "wall s", "CPU s", "peak MB"), [
        (row["scan"], f"`{way}`", *_numbers(row[way], "wall_s", "cpu_s"), f"{median(row[way], 'peak_mb'):,.0f}")
        for row in rows for way in ("onnx_infer.py", "cascadeseg infer")
    ])]  # fmt: skip


def _cuda(scans: Sequence[Path], folder: Path, options: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """Cold, and warm with and without ``--max-vram 1`` and cuDNN's search for algorithms (whether that would pay)."""
    found = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", found], check=False).returncode:
        return [], ["CUDA: skipped; this machine has no CUDA device\n"]
    rows = []
    for limit in (None, "1"):
        asked = argparse.Namespace(**{**vars(options), "device": "cuda", "max_vram": limit})
        cold, warm = _infer_runs(scans[0], folder, asked), _part("warm", scans[:1], asked)
        tried = _part("warm", scans[:1], asked, "--cudnn-benchmark")
        rows.append({"max_vram_gb": limit, "cold": cold, "warm": warm, "warm_cudnn_benchmark": tried})
    head = ("--max-vram", "cold s", "warm s", "with cuDNN's search", "GPU peak MB", "of it torch's", "GPU memory area")
    return rows, [
        "## CUDA\n",
        *_table(head, [
            (row["max_vram_gb"] or "none", *_numbers(row["cold"], "wall_s"),
             *(f"{statistics.median(row[key]['wall_s']):.2f}" for key in ("warm", "warm_cudnn_benchmark")),
             *_gpu(row["cold"], "gpu_peak_mb"),
             f"{row['warm']['gpu_mb']:,.0f}", *_gpu(row["cold"], "gpu_area"))
            for row in rows
        ]),
    ]  # fmt: skip


MEASURES = {
    "cold": _cold,
    "warm": _warm,
    "bound": _bound,
    "agreement": _agreement,
    "batch": _batch,
    "lungmask": _lungmask,
    "onnx": _onnx,
    "cuda": _cuda,
}


# ---------------------------------------------------------------------------------------------------- processes


def _infer_runs(scan: Path, folder: Path, options: argparse.Namespace) -> Result:
    """Repeated runs on one scan: their accounts, and the medians of their steps."""
    report = folder / "mask.json"
    infer = ["infer", str(scan), "-o", str(folder / "mask.nii.gz"), "--report", str(report), "--force", "--quiet"]
    runs, reports = [], []
    for _ in range(options.repeat):
        runs.append(asdict(measured([*COMMAND, *infer, *_infer_options(options)])))
        reports.append(json.loads(report.read_text(encoding="utf-8")))
    last = reports[-1]
    shape = last["scan"]["shape"]
    return {
        "scan": scan.name,
        "shape": shape,
        "voxels_mb": 2 * shape[0] * shape[1] * shape[2] / 1e6,
        "device": last["device"],
        "precision": last["precision"],
        "runs": runs,
        "seconds": {step: statistics.median(r["seconds"][step] for r in reports) for step in last["seconds"]},
    }


def _infer_options(options: argparse.Namespace) -> list[str]:
    asked = {"--model": options.model, "--max-memory": options.max_memory, "--max-vram": options.max_vram}
    given = [word for option, value in asked.items() if value for word in (option, str(value))]
    return ["--device", options.device, *given]


def _part(name: str, scans: Sequence[Path], options: argparse.Namespace, *more: str) -> Any:
    """What a part of `benchmark_parts.py` says, in a process of its own."""
    command = [sys.executable, str(HERE / "benchmark_parts.py"), name, *map(str, scans)]
    command += ["--repeat", str(options.repeat), "--device", options.device]
    for option, value in (("--model", options.model), ("--max-vram", options.max_vram)):
        command += [option, str(value)] if value else []
    command += more
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    return json.loads(done.stdout)


# -------------------------------------------------------------------------------------------------------- scans


def _synthetic_scan(folder: Path, slices: int) -> Path:
    """A scan, made where it is not there yet; by another process, as those measured start with the peak of this one."""
    path = folder / f"synthetic_{'x'.join(map(str, (*ACROSS, slices)))}.nii.gz"
    if not path.exists():
        sys.stderr.write(f"making {path}\n")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(_make_scan, (path, slices))
    return path


def _make_scan(path: Path, slices: int) -> None:
    """A chest about the middle of the volume, with the noise and the file size of a real scan."""
    import numpy as np

    from cascadeseg.formats import write_scan
    from cascadeseg.geometry import Box, Grid
    from cascadeseg.synthesis import PRESETS, render, sample_patient

    shape = (*ACROSS, slices)
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


def _copies(scan: Path, folder: Path, count: int) -> Path:
    """A folder with a scan under several names (hard links, which are files of their own to every reader)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number in range(count):
        copy = folder / f"{folder.name}_{number:02d}.nii.gz"
        try:
            os.link(scan, copy)
        except OSError:  # another file system
            shutil.copyfile(scan, copy)
    return folder


# ------------------------------------------------------------------------------------------------------- output


def _machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} CPUs, Python {platform.python_version()}, {platform.system()}"


def _numbers(row: Result, *fields: str) -> list[str]:
    return [f"{median(row, field):.2f}" for field in fields]


def _gpu(row: Result, field: str) -> list[str]:
    return ["" if row["runs"][0][field] is None else f"{median(row, field):,.0f}"]


def _size(row: Result) -> str:
    return " x ".join(map(str, row["shape"]))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown, and an empty line."""
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _write(folder: Path, results: Result, text: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "performance.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "performance.md").write_text("\n".join(text), encoding="utf-8")
    if results.get("cold"):
        from benchmark_plots import plot_lengths, plot_steps

        plot_lengths(folder / "performance-slices.png", results["cold"])
        plot_steps(folder / "performance-steps.png", results["cold"], results.get("bound") or [])


if __name__ == "__main__":
    raise SystemExit(main())
