"""Whether the synthetic CT transfers: a small stage 1 trained on nothing else, measured on real scans.

    python scripts/transfer.py SCANS OUT --minutes 45          # stage 1's own recipe for a fixed time
    python scripts/transfer.py SCANS OUT --ablate --seeds 0 1  # a smaller recipe, each group of variation off

SCANS holds NAME.nii.gz and, for most, NAME_ref.nii.gz (1 right lung, 2 left lung, 255 ignore). OUT gets one folder of
results, a JSON file a run; a run that is there is not done again, one that was interrupted goes on, and the table is
written from all of them. Scores are Dice per lung on the stage's grid, after the sides are settled, as stage 2 would
get the masks; of a scan without a reference, the volume that was called lung.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from phantoms import dice
from validate import reference_of, scans_of

from cascadeseg import config as configs
from cascadeseg.cascade.crop import settle_sides
from cascadeseg.cascade.locate import coarse_grid, locate
from cascadeseg.formats import read_labels, read_scan
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import canonical_view
from cascadeseg.labels import BACKGROUND, IGNORE, LUNGS
from cascadeseg.network import Engine, load_model
from cascadeseg.network.model import View
from cascadeseg.synthesis import PRESETS
from cascadeseg.training.cases import labels_on
from cascadeseg.training.config import TrainingConfig
from cascadeseg.training.loop import train

RECIPE = Path(__file__).parent.parent / "configs" / "stage1.toml"
PACE_STEPS = 25
WHOLE = (
    "data.initial=24",
    "data.steps_per_case=5",
    "data.cases=2000",
    "data.validation=0",
    "optimisation.validate_every=1000000",
)
"""The budget is for training; real scans are looked at once, at its end."""
SMALL = (
    *WHOLE,
    "view.spacing_mm=3.0",
    "unet.widths=[16, 32, 48, 64, 96]",
    "data.initial=16",
    "data.steps_per_case=8",
    "optimisation.patch=[128, 96, 96]",
    "optimisation.warm_up=40",
    "optimisation.learning_rate=3e-3",
    "optimisation.ema=0.99",
)
ABLATIONS = ["default", *(name for name in PRESETS if name.startswith("without_"))]


@dataclass(frozen=True)
class RealScan:
    """A scan to measure on, and its labels on the stage's grid if it has any."""

    name: str
    scan: Scan
    reference: np.ndarray[Any, np.dtype[np.uint8]] | None


def main() -> None:
    """Does the runs that are missing, then writes the table."""
    options = _options()
    torch.set_num_threads(options.threads)
    overrides = list(SMALL if options.ablate else WHOLE)
    presets = options.presets or (ABLATIONS if options.ablate else ["default"])
    scans: list[RealScan] = []
    for seed in options.seeds:
        for preset in presets:
            record = options.out / "results" / f"{preset}-seed{seed}.json"
            if record.exists():
                continue
            config = _config(preset, seed, [*overrides, *options.set], options)
            began = time.time()
            model = _trained(config, options.out / f"{preset}-seed{seed}", options)
            scans = scans or _read(options.scans, config.view)
            result = _measured(model, scans) | {
                "preset": preset,
                "seed": seed,
                "planned_steps": config.optimisation.steps,
                "minutes": round((time.time() - began) / 60, 1),
            }
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(f"{record.name}: mean Dice {_mean(result):.3f}", flush=True)
            (options.out / "table.md").write_text(_table(options.out), encoding="utf-8")
    print(_table(options.out))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scans", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ablate", action="store_true", help="the smaller recipe, with each group off in turn")
    parser.add_argument("--presets", nargs="+", help=f"instead of: {', '.join(ABLATIONS)}")
    parser.add_argument("--steps", type=int, default=0, help="of each run; default: 500 with --ablate, else by time")
    parser.add_argument("--minutes", type=float, default=45.0, help="of each run, where no steps are given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of network and patients, a run each")
    parser.add_argument("--threads", type=int, default=1, help="of the network; data is prepared beside it")
    parser.add_argument("--workers", type=int, default=1, help="processes that render patients")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more overrides of the recipe")
    options = parser.parse_args()
    if not any(options.scans.glob("*_ref.nii.gz")):
        parser.error(f"{options.scans}: no NAME.nii.gz with a NAME_ref.nii.gz in it")
    return options


def _config(preset: str, seed: int, overrides: list[str], options: argparse.Namespace) -> TrainingConfig:
    """The recipe of one run; its steps follow from the time where none are given."""
    own = [f"data.preset={preset}", f"data.seed={1000 + 10_000 * seed}", f"optimisation.seed={seed}"]
    own += [f"data.workers={options.workers}", f"data.cache={options.out / 'cases'}", "optimisation.tensorboard=false"]
    config = configs.load(RECIPE, TrainingConfig, [*own, *overrides])
    steps = options.steps or (500 if options.ablate else _steps_in(config, options))
    return replace(config, optimisation=replace(config.optimisation, steps=steps, save_every=250))


def _steps_in(config: TrainingConfig, options: argparse.Namespace) -> int:
    """How many steps fit into the time, from the pace of a few (kept: a resumed run has the same recipe)."""
    record = options.out / "pace.json"
    if not record.exists():
        short = replace(config.optimisation, steps=2 * PACE_STEPS)
        trial = replace(config, optimisation=short, data=replace(config.data, cases=config.data.initial))
        shutil.rmtree(options.out / "pace", ignore_errors=True)  # half of a pace is none
        began = time.time()
        train(trial, options.out / "pace", device=options.device, quiet=True, stop_after=PACE_STEPS)
        prepared = time.time() - began
        began = time.time()
        train(trial, options.out / "pace", resume=True, device=options.device, quiet=True)
        pace = (time.time() - began) / PACE_STEPS
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"seconds_a_step": pace, "seconds_before": prepared}), encoding="utf-8")
    pace = json.loads(record.read_text(encoding="utf-8"))["seconds_a_step"]
    return max(100, int(0.95 * 60 * options.minutes / pace))


def _trained(config: TrainingConfig, run: Path, options: argparse.Namespace) -> Path:
    limit = None if options.steps or options.ablate else 60 * options.minutes
    return train(config, run, resume=True, device=options.device, quiet=True, time_limit_s=limit)


def _read(folder: Path, view: View) -> list[RealScan]:
    """The scans in memory, their references on the stage's grid."""
    found = []
    for path in scans_of(folder):
        scan = read_scan(path).canonical()
        reference = None
        if reference_of(path).exists():
            labels, grid = read_labels(reference_of(path))
            reference = labels_on(canonical_view(labels, grid), scan.grid, coarse_grid(scan, view)).numpy()
        found.append(RealScan(path.name.removesuffix(".nii.gz"), scan, reference))
    return found


def _measured(model: Path, scans: list[RealScan]) -> dict[str, Any]:
    """Dice per lung of every scan with a reference, ml of the others."""
    trained = load_model(model)
    engine = Engine(trained.locator, torch.device("cpu"))
    scores: dict[str, float] = {}
    found_ml: dict[str, float] = {}
    for one in scans:
        coarse = settle_sides(locate(one.scan, engine), one.scan)
        sure = np.asarray(coarse.lungs.sum(0) > 0.5)
        right = np.asarray(coarse.lungs[0] >= coarse.lungs[1])
        if one.reference is None:
            found_ml[one.name] = float(sure.sum()) * coarse.grid.voxel_volume_ml
            continue
        labels = np.where(right, *(lung.value for lung in LUNGS))
        labels[~sure | (one.reference == IGNORE)] = BACKGROUND
        scores |= {f"{one.name} {lung.side}": dice(labels, one.reference, lung.value) for lung in LUNGS}
    return {"notes": trained.notes, "dice": scores, "found_ml": found_ml}


def _mean(result: dict[str, Any]) -> float:
    return float(statistics.mean(result["dice"].values()))


def _table(out: Path) -> str:
    """All results so far as Markdown: a row a run, then a row a group with the difference to the whole."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((out / "results").glob("*.json"))]
    if not results:
        return "no results yet\n"
    lungs, free = list(results[0]["dice"]), list(results[0]["found_ml"])
    head = ["patients", "seed", "steps", "minutes", "mean", "median", "worst", *lungs, *(f"{f} ml" for f in free)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for r in results:
        values = list(r["dice"].values())
        numbers = [_mean(r), statistics.median(values), min(values), *(r["dice"][lung] for lung in lungs)]
        cells = [r["preset"], str(r["seed"]), str(r["notes"].get("stage1_steps", "")), str(r["minutes"])]
        cells += [f"{v:.3f}" for v in numbers] + [f"{r['found_ml'][f]:.0f}" for f in free]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_differences(results)]) + "\n"


def _differences(results: list[dict[str, Any]]) -> list[str]:
    """Each group's mean over the seeds that it shares with the whole, and what its absence costs."""
    whole = {r["seed"]: r for r in results if r["preset"] == "default"}
    lines = ["| patients | seeds | mean Dice | difference | worst lung | ml where there is no lung |", "|---" * 6 + "|"]
    for preset in dict.fromkeys(["default", *(r["preset"] for r in results)]):
        mine = [r for r in results if r["preset"] == preset and r["seed"] in whole]
        if not mine:
            continue
        mean = statistics.mean(_mean(r) for r in mine)
        difference = mean - statistics.mean(_mean(whole[r["seed"]]) for r in mine)
        worst = statistics.mean(min(r["dice"].values()) for r in mine)
        false = [sum(r["found_ml"].values()) for r in mine]
        lines.append(
            f"| {preset} | {len(mine)} | {mean:.3f} | {difference:+.3f} | {worst:.3f} | {statistics.mean(false):.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
