"""What the networks cost and give: layer by layer (torchinfo), or variants of them against stopwatch and real scans.

    python scripts/networks.py [--model DIR] [--stage 1|2] [--shape X Y Z] [--depth N]
    python scripts/networks.py --variants [--stage 1|2] [--shape X Y Z] [--runs 5] [--json FILE]
    python scripts/networks.py --variants --train OUT --scans SCANS [--steps 400] [--figure FILE] [...]

Variants change one thing each of the shipped networks: width, depth, bottleneck, norm, stem, deep supervision. Each
runs in a process of its own, with weights of chance, on one image of typical shape; what is told is the median of the
runs after the first, and how much the process's peak memory grew by all of them.

With ``--train`` each variant is also trained from nothing by its stage's recipe, for few steps and all on the same
patients, and the cascade of it and the model's other stage is scored as by validate.py. That compares variants with
one another; none is what it would be after all its steps. OUT keeps the runs: one that is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cascadeseg import config as configs
from cascadeseg.network import Engine, Model, Stage, UNet, UNetConfig, load_model, save_model, stage_of
from cascadeseg.training.config import TrainingConfig
from cascadeseg.training.loop import train

Shape = tuple[int, int, int]
RECIPES = Path(__file__).parent.parent / "configs"
SHAPES: dict[int, Shape] = {1: (160, 160, 192), 2: (176, 240, 304)}
"""A chest at 2 mm, and one lung at 1 mm."""
SCORES = ("dice", "worst", "nsd_2mm")
COLUMNS = {
    "parameters": ("parameters", "{:,}"),
    "seconds": ("median s", "{:.3f}"),
    "peak_mb": ("peak memory, MB", "{:.0f}"),
    "precision": ("precision", "{}"),
    "dice": ("mean Dice", "{:.3f}"),
    "worst": ("worst Dice", "{:.3f}"),
    "nsd_2mm": ("mean NSD 2 mm", "{:.3f}"),
}
"""What is told of a network: the heading, and how it is written."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; default: the shipped one")
    parser.add_argument("--stage", type=int, choices=(1, 2), help="default: both")
    parser.add_argument("--shape", type=int, nargs=3, help="of the image; default: a typical one")
    parser.add_argument("--depth", type=int, default=2, help="how deep to look into blocks; default 2")
    parser.add_argument("--variants", action="store_true", help="time variants instead")
    parser.add_argument("--device", default="cpu", help="variants only; default cpu")
    parser.add_argument("--threads", type=int, default=0, help="variants only; default: torch's own")
    parser.add_argument("--runs", type=int, default=5, help="variants only; default 5")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants only: these, by the names in the table")
    parser.add_argument("--json", type=Path, help="variants only: also write the rows here")
    parser.add_argument("--train", type=Path, metavar="OUT", help="variants only: train each, in this folder")
    parser.add_argument("--scans", type=Path, help="with --train: scans with references")
    parser.add_argument("--steps", type=int, default=400, help="with --train: of each variant; default 400")
    parser.add_argument("--figure", type=Path, help="with --train: Dice against seconds, as a picture")
    options = parser.parse_args()
    if options.train and not (options.variants and options.scans):
        parser.error("--train needs --variants, and --scans to score on")
    if options.figure and not options.train:
        parser.error("--figure needs --train")
    model = load_model(options.model)
    rows: list[dict[str, Any]] = []
    for number, stage in ((1, model.locator), (2, model.refiner)):
        if stage is None or options.stage not in (None, number):
            continue
        shape = tuple(options.shape or SHAPES[number])
        if options.variants:
            rows += measured_variants(number, stage, shape, model, options)
        else:
            print(f"\nStage {number}: {stage.unet}")
            print(described(stage, shape, options.depth))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        draw(rows, options.figure)


def described(stage: Stage, shape: tuple[int, ...], depth: int) -> str:
    """The table of one network for an image (X, Y, Z), a multiple of its stride."""
    from torchinfo import summary

    network = stage.network().eval()
    columns = ("output_size", "num_params", "mult_adds")
    return str(summary(network, (1, stage.unet.in_channels, *shape), depth=depth, col_names=columns, verbose=0))


def variants(base: UNetConfig) -> dict[str, UNetConfig]:
    """Networks that differ from one in one thing each, by what differs."""
    half, more = (tuple(int(factor * width) for width in base.widths) for factor in (0.5, 1.5))
    full_resolution = (max(8, base.widths[0] // 4), *(width // 2 for width in base.widths))
    other: Literal["residual", "bottleneck"] = "residual" if base.block == "bottleneck" else "bottleneck"
    named = {
        "as shipped": base,
        "half the width": replace(base, widths=half),
        "1.5 times the width": replace(base, widths=more),
        "a level less": replace(base, widths=base.widths[:-1]),
        "a level more": replace(base, widths=(*base.widths, 2 * base.widths[-1])),
        "a block more": replace(base, blocks=base.blocks + 1),
        f"{other} blocks": replace(base, block=other),
        "instance norm": replace(base, norm="instance"),
        "voxel stem, a level more": replace(base, stem="convolution", widths=full_resolution),
        "deep supervision (training only)": replace(base, deep_supervision=True),
    }
    if base.block == "bottleneck":
        named["bottleneck ratio 4"] = replace(base, bottleneck_ratio=4)
    return named


def measured_variants(
    number: int, stage: Stage, shape: tuple[int, ...], model: Model, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Prints the table of one stage's variants as they are measured; returns its rows."""
    told = ["parameters", "seconds", "peak_mb", "precision", *(SCORES if options.train else ())]
    print(f"\nStage {number}, {' x '.join(map(str, shape))} voxels\n")
    print(f"| network | {' | '.join(COLUMNS[key][0] for key in told)} |\n|---" + "|---" * len(told) + "|", flush=True)
    rows = []
    for name, unet in variants(stage.unet).items():
        if options.only and name not in options.only:
            continue
        scores = apart(trained_scores, number, model, name, unet, options) if options.train else {}
        row = apart(timed, replace(stage, unet=unet, weights={}), shape, options) | scores
        rows.append({"stage": number, "network": name, "shape": shape, **row})
        cells = [COLUMNS[key][1].format(row[key]) for key in told]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return rows


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Calls a function in a new process: peak memory cannot be set back, and a child's begins at its parent's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def trained_scores(
    number: int, model: Model, name: str, unet: UNetConfig, options: argparse.Namespace
) -> dict[str, Any]:
    """Mean Dice, worst Dice and mean NSD on real scans of the model with one stage exchanged for a variant."""
    from validate import validated

    folder = options.train / f"stage{number}-{options.steps}-steps" / name.replace(" ", "-")
    if not (folder / "scores.json").exists():
        combined = folder / "combined"
        variant = load_model(train(variant_recipe(number, unet, options), folder, resume=True, quiet=True))
        exchanged = {"locator": variant.locator} if number == 1 else {"refiner": variant.refiner}
        save_model(replace(model, **exchanged, notes=variant.notes), combined)
        validated(combined, options.scans, folder)
    cases = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    lungs = [lung for case in cases for lung in case.get("lungs", [])]
    dice = [lung["dice"] for lung in lungs]
    nsd = [lung["nsd_2mm"] for lung in lungs]
    return {"dice": statistics.mean(dice), "worst": min(dice), "nsd_2mm": statistics.mean(nsd)}


def variant_recipe(number: int, unet: UNetConfig, options: argparse.Namespace) -> TrainingConfig:
    """A stage's recipe for another network and fewer steps; the cases are those of all variants."""
    config = configs.load(RECIPES / f"stage{number}.toml", TrainingConfig)
    patch = [n // unet.stride * unet.stride for n in config.optimisation.patch]
    cases = config.data.initial + options.steps // config.data.steps_per_case
    data = replace(config.data, validation=0, cases=cases, cache=str(options.train / "cases"))
    steps = {"steps": options.steps, "validate_every": 10 * options.steps}
    optimisation = replace(config.optimisation, patch=(patch[0], patch[1], patch[2]), tensorboard=False, **steps)
    return replace(config, unet=unet, data=data, optimisation=optimisation)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Real Dice against seconds, a panel a stage; what no other network beats in both is joined by a line."""
    from matplotlib.figure import Figure

    stages = sorted({row["stage"] for row in rows})
    figure = Figure(figsize=(5.5 * len(stages), 4), dpi=110, layout="constrained")
    for place, stage in enumerate(stages, 1):
        mine = sorted((row for row in rows if row["stage"] == stage), key=lambda row: (row["seconds"], -row["dice"]))
        title = f"stage {stage}"
        axes = figure.add_subplot(
            1, len(stages), place, title=title, xlabel="seconds a forward pass", ylabel="mean Dice on real scans"
        )
        front: list[dict[str, Any]] = []
        for row in mine:
            if not front or row["dice"] > front[-1]["dice"]:
                front.append(row)
            axes.annotate(row["network"], (row["seconds"], row["dice"]), (4, 3), textcoords="offset points", fontsize=7)
        axes.plot([row["seconds"] for row in front], [row["dice"] for row in front], color="0.7", zorder=0)
        axes.scatter([row["seconds"] for row in mine], [row["dice"] for row in mine], s=18)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def timed(stage: Stage, shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and memory of one network's forward pass. Runs in a process of its own."""
    import torch

    from cascadeseg.memory import peak_memory_mb

    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    torch.manual_seed(0)
    network = UNet(stage.unet)
    engine = Engine(stage_of(stage.view, network), device)
    image = torch.rand((stage.unet.in_channels, *shape), device=device)
    before, seconds = peak_memory_mb(), []
    for _ in range(options.runs + 1):
        began = time.perf_counter()
        engine(image)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    on_gpu = torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else 0.0
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "seconds": statistics.median(seconds[1:]),
        "peak_mb": on_gpu or peak_memory_mb() - before,
        "precision": engine.precision,
    }


if __name__ == "__main__":
    main()
