"""What a run says while it goes on: ``metrics.jsonl``, TensorBoard, a progress bar, and its environment."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cascadeseg._version import __version__
from cascadeseg.atomic import replace_text

EVERY = 10
"""Steps from one line of ``metrics.jsonl`` to the next."""
LINE_EVERY = 100
"""Steps from one line of text to the next, where there is no terminal for a bar."""
STARVED = 0.05
"""Share of waiting for data from which a run says what to change."""


class Log:
    """Means of the steps since the last line; of a process that is not the first, nothing is written or shown."""

    def __init__(
        self, output: Path, step: int, steps: int, *, validated: int, title: str, first: bool, quiet: bool, board: bool
    ) -> None:
        """Opens the log of a run that goes on after ``step``; lines of later steps are dropped, and validations that
        come again, of steps later than ``validated``.
        """
        self._path = output / "metrics.jsonl" if first else None
        if first:
            _forget_after(output / "metrics.jsonl", step, validated)
        self._silent = quiet or not first
        hidden = True if self._silent else None  # None: shown on a terminal
        self._bar = tqdm(total=steps, initial=step, unit="step", desc=title, disable=hidden, dynamic_ncols=True)
        self._board: Any = _board(output, step) if first and board else None
        self._values: dict[str, list[float]] = {}
        self._step, self._steps, self._taken = step, steps, 0
        self._began = self._since = time.perf_counter()
        self._waited = self._waited_in_all = 0.0

    def step(self, step: int, values: Mapping[str, float], *, waited_s: float, patches: int) -> None:
        """Notes a step; ``waited_s`` is how long the loop has waited for data in all."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)
        self._step, self._taken, self._waited_in_all = step, self._taken + 1, waited_s
        self._bar.update()
        if step % EVERY:
            return
        elapsed = time.perf_counter() - self._since
        taken = len(self._values["loss"])
        means = {name: float(np.mean(values)) for name, values in self._values.items()}
        means |= {
            "seconds": elapsed / taken,
            "volumes_per_s": taken * patches / elapsed,
            "waiting": (waited_s - self._waited) / elapsed,
            **_device_use(),
        }
        self.note(step, means)
        self._show(step, means)
        self._values, self._waited, self._since = {}, waited_s, time.perf_counter()

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a line of numbers; one that is not finite (the loss of a skipped step) is null."""
        if self._path is None:
            return
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **known}, allow_nan=False) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def picture(self, step: int, path: Path) -> None:
        """Shows a PNG on the board."""
        if self._board is not None and path.exists():
            from PIL import Image

            self._board.add_image("sample", np.asarray(Image.open(path)), step, dataformats="HWC")

    def tell(self, line: str) -> None:
        """Says a line on stderr, beside the bar."""
        if not self._silent:
            tqdm.write(f"cascadeseg: {line}", file=sys.stderr)

    def pause(self, seconds: float) -> None:
        """Time that was no step's (a validation, a checkpoint) does not count as one's."""
        self._since += seconds
        self._began += seconds

    def close(self) -> None:
        """Sums up how well the device was fed."""
        if self._taken:
            share = self._waited_in_all / max(time.perf_counter() - self._began, 1e-9)
            remedy = "; raise data.steps_per_case or data.workers" if share > STARVED else ""
            self.tell(f"{self._step} of {self._steps} steps; {share:.1%} of their time waiting for data{remedy}")
        self._bar.close()
        if self._board is not None:
            self._board.close()

    def _show(self, step: int, means: Mapping[str, float]) -> None:
        shown = {title: form.format(means[name]) for name, (title, form) in _SHOWN.items() if name in means}
        self._bar.set_postfix(shown, refresh=False)
        if self._bar.disable and step % LINE_EVERY == 0:
            left = tqdm.format_interval((self._steps - step) * means["seconds"])
            values = ", ".join(f"{title} {value}" for title, value in shown.items())
            self.tell(f"step {step} of {self._steps}: {values}; {left} left")


_SHOWN = {
    "loss": ("loss", "{:.3f}"),
    "dice": ("Dice", "{:.3f}"),
    "volumes_per_s": ("volumes/s", "{:.2g}"),
    "waiting": ("waiting", "{:.1%}"),
    "gpu_gb": ("GPU GB", "{:.1f}"),
    "gpu_peak_gb": ("peak GB", "{:.1f}"),
    "gpu_percent": ("GPU %", "{:.0f}"),
}
"""What of a step is shown, as what and how."""


def _forget_after(path: Path, step: int, validated: int) -> None:
    """What a killed run wrote after its last checkpoint will be written again; half a line is no line."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
            if values["step"] <= (validated if "validation_dice" in values else step):
                kept.append(line)
        except ValueError:
            continue
    replace_text(path, "".join(f"{line}\n" for line in kept))


def _board(output: Path, step: int) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(output / "tensorboard"), purge_step=step)


def _device_use() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {}
    use = {
        "gpu_gb": torch.cuda.memory_allocated() / 1e9,
        "gpu_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    with suppress(Exception):  # needs NVML's Python package, which nothing else here does
        use["gpu_percent"] = float(torch.cuda.utilization())
    return use


def write_environment(output: Path, device: torch.device, precision: str, processes: int) -> None:
    """What the run runs on, for whoever wants to repeat it."""
    about = {
        "cascadeseg": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": precision,
        "processes": processes,
    }
    replace_text(output / "environment.json", json.dumps(about, indent=1) + "\n")
