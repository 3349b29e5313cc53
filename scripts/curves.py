"""The curves of training runs: loss, Dice and waiting for data, from the `metrics.jsonl` of their folders.

    python scripts/curves.py runs/stage1 runs/stage2 --output curves.png

Needs matplotlib (`pip install '.[docs]'`). TensorBoard shows the same while a run goes on.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SIZE_INCHES = (10, 3)
DPI = 110
PANELS = {
    "loss": ("loss (cross-entropy + 1 - Dice)", ["loss"]),
    "dice": ("Dice", ["dice", "validation_dice"]),
    "waiting": ("share of time waiting for data", ["waiting"]),
}
"""What is drawn beside one another: title, and which numbers of a run."""


def main() -> None:
    """Draws one picture of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--output", "-o", type=Path, default=Path("curves.png"))
    options = parser.parse_args()
    if find_spec("matplotlib") is None:
        parser.exit(2, "curves.py: it draws with matplotlib, which is not installed; pip install '.[docs]'\n")
    draw({run.name: points(run / "metrics.jsonl") for run in options.runs}, options.output)


def points(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Every number of a run by name, as pairs of step and value."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        values: dict[str, Any] = json.loads(line)
        for name, value in values.items():
            if value is None:  # it was not finite
                continue
            found.setdefault(name, []).append((values["step"], value))
    return found


def draw(runs: dict[str, dict[str, list[tuple[int, float]]]], output: Path) -> None:
    """Writes the picture: thin lines are training patches, dots are validations on whole patients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    for place, (title, names) in enumerate(PANELS.values(), start=1):
        axes = figure.add_subplot(1, len(PANELS), place, title=title, xlabel="step")
        for number, (run, numbers) in enumerate(runs.items()):
            for name in names:
                steps, values = zip(*numbers.get(name, [(0, float("nan"))]), strict=True)
                style = "o" if name.startswith("validation") else "-"
                label = f"{run}, {'validation' if style == 'o' else 'training'}"
                axes.plot(steps, values, style, color=f"C{number}", linewidth=1, label=label)
        axes.set_ylim(bottom=0, top=1 if "loss" not in names else None)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[1].legend(frameon=False, fontsize="small", loc="lower right")
    figure.savefig(output)


if __name__ == "__main__":
    main()
