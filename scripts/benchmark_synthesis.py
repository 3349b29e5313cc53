"""How long a synthetic volume takes: a chest at 2 mm and one lung at 1 mm, on the CPU and on CUDA if there is one.

python scripts/benchmark_synthesis.py [--threads 1] [--patients 4] [--device cpu cuda] [--step 1.0]

The share of training is that of one process that renders and trains in turn: a volume, then the steps it serves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from cascadeseg.geometry import Grid
from cascadeseg.synthesis import Patient, render, sample_patient

VOLUMES = {
    "2 mm chest 160 x 160 x 192": ((160, 160, 192), 2.0, 0.0),
    "1 mm lung 160 x 224 x 288": ((160, 224, 288), 1.0, 70.0),
}


def grid_of(patient: Patient, shape: Sequence[int], spacing_mm: float, shift_mm: float) -> Grid:
    """A grid over the middle of the chest, or over the right lung."""
    x, y, z = patient.torso.offset
    centre = (x + shift_mm, y, z + 0.4 * patient.torso.height * patient.torso.size)
    first = [
        round((c - (n - 1) / 2 * spacing_mm) / spacing_mm) * spacing_mm for c, n in zip(centre, shape, strict=True)
    ]
    return Grid.axis_aligned(shape, (spacing_mm,) * 3, first)


def seconds(seed: int, shape: Sequence[int], spacing_mm: float, shift_mm: float, device: str) -> float:
    """Of one volume: processor time on the CPU, which a busy machine changes little; elsewhere wall time."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    patient = sample_patient(seed)
    render(patient, grid_of(patient, shape, spacing_mm, shift_mm), device)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    """Prints a Markdown table."""
    options = _options()
    torch.set_num_threads(options.threads)
    print(f"| volume | device | median s | slowest s | volumes/s | share of training |\n{'|---' * 6}|")
    for device in options.device:
        for name, (shape, spacing_mm, shift_mm) in VOLUMES.items():
            seconds(0, shape, spacing_mm, shift_mm, device)
            times = [seconds(seed, shape, spacing_mm, shift_mm, device) for seed in range(1, options.patients + 1)]
            median = statistics.median(times)
            share = median / (median + options.step * options.steps_per_case)
            print(f"| {name} | {device} | {median:.3f} | {max(times):.3f} | {1 / median:.2f} | {100 * share:.0f} % |")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of one process on the CPU")
    parser.add_argument("--patients", type=int, default=4, help="to take the median of")
    parser.add_argument("--device", nargs="+", default=["cpu"] + (["cuda"] if torch.cuda.is_available() else []))
    parser.add_argument("--step", type=float, default=1.0, help="seconds of one training step, for the share")
    parser.add_argument("--steps-per-case", type=int, default=5, help="that one volume serves; of stage 1's recipe 5")
    return parser.parse_args()


if __name__ == "__main__":
    main()
