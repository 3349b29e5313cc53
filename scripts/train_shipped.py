"""Trains the shipped model from nothing: both stages on synthetic patients alone, in pieces of a few minutes.

    python scripts/train_shipped.py OUT [--preset cpu|gpu|smoke] [--seed S] [--steps-scale F]
                                    [--device auto] [--chunk-minutes 9] [--stage 1|2] [--scans DIR] [--install]
                                    [--patients-only]

Run the same command until it says that it is finished: after each piece it ends with exit code 4, all saved. In a shell

    while python scripts/train_shipped.py OUT --chunk-minutes 9; [ $? -eq 4 ]; do :; done

Without ``--chunk-minutes`` it goes to the end at once. Stage 2 learns from references damaged to look like a locator's
mistakes and needs no stage 1: ``--stage 1`` and ``--stage 2`` may run beside each other on one large GPU, each in its
own shell; the command without ``--stage`` then puts them together. ``--patients-only``, in a third one, renders the
patients of all trainings meanwhile, so that no training waits for its own (``--set1 data.workers=9``: by so many
processes; the trainings themselves then need one each). The recipes are those of configs/ (``--preset gpu``:
their -gpu variants; ``smoke``: toys, to see the script work). ``--seed`` changes both the networks' chance and the
patients; ``--steps-scale 0.5`` takes half the steps, on the schedule that goes with them, to compare seeds; below 1,000
steps stage 1 is no locator (docs/model-development.md, entry 12).

Both stages are several trainings, each going on from the one before, but for the gpu recipe's stage 2, which is one.
The cpu recipe's stage 1 is five, each with patients of its own: the recipe; twice 2,500 steps on 500 patients of the
preset training_bowel; 7,000 on 3,000 of training, training_bowel, training_fluid, training_effusion, training_dark and
training_air together; 1,500 on 500 of training_bowel. What counts is the mean of the third and the fifth, which keeps
most of what each of them is better at (docs/model-development.md, entries 34, 36, 41, 65 and 67). The gpu recipe's is
four of the same kinds, with bowel once where the other has it twice, and the mean of the second and the fourth. The cpu
recipe's stage 2 is three, on the same patients and more of them each time, and the last of them is taken. (The shipped
stage 2 is the mean of such three, which with fewer steps is worse than the last: entries 56 and 70.)

OUT/model is what `cascadeseg infer --model` takes; OUT/card.md is the part of the model card that can be written by a
machine: hash, recipe, effort, and with ``--scans`` (see validate.py) the scores. ``--install`` puts the model into the
package and that part into its card, between the lines that mark it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cascadeseg import __version__
from cascadeseg import config as configs
from cascadeseg.atomic import replace_text
from cascadeseg.errors import CascadesegError, ModelError
from cascadeseg.network import Model, Stage, load_model, save_model, shipped_model
from cascadeseg.training.config import TrainingConfig
from cascadeseg.training.data import Data
from cascadeseg.training.loop import train
from cascadeseg.training.state import CHECKPOINT

RECIPES = Path(__file__).parent.parent / "configs"
SUFFIX = {"cpu": "", "gpu": "-gpu", "smoke": "-smoke"}
SEED_STEP = 1_000_000
"""Between the patients of two seeds: far more than any recipe draws."""
UNFINISHED, INTERRUPTED = 4, 130
BEGIN, END = "<!-- written by scripts/train_shipped.py -->", "<!-- end -->"


class Further(NamedTuple):
    """A training that goes on from another: on whom, how many of them and how many steps a patient, how fast.

    Its patients are others than those before; without ``others``, those before and more.
    """

    preset: str | tuple[str, ...]
    steps: int
    cases: int
    steps_per_case: int
    learning_rate: float
    others: bool = True


BOWEL = Further("training_bowel", 2500, 500, 5, 6e-4)
"""Colon that looks like lung is rare among the patients before."""
DISEASE = *("training_effusion", "training_fluid", "training_dark") * 2, "training_air"
MIXED = Further((*("training",) * 2, "training_bowel", *DISEASE), 7000, 3000, 2, 1e-3)
"""All of it once more, with disease: of parts one after the other each forgets some of those before."""
LONGER = Further("training", 8000, 640, 28, 1.5e-3, others=False)
"""Stage 2: disease takes more patients than clear lungs."""
FURTHER = {
    ("cpu", 1): (BOWEL, BOWEL, MIXED, BOWEL._replace(steps=1500, steps_per_case=3)),
    ("gpu", 1): (
        BOWEL._replace(steps=1500, cases=400, steps_per_case=4),
        MIXED._replace(steps=3500, cases=1200, steps_per_case=3),
        BOWEL._replace(steps=1000, cases=350, steps_per_case=3),
    ),
    ("cpu", 2): (LONGER._replace(steps=1500, learning_rate=1.2e-3), LONGER),
}
"""By preset and stage; the gpu recipe's stage 2 sees enough patients in its first training."""


class Training(NamedTuple):
    """One training: which stage, the run's folder, the recipe."""

    stage: int
    run: Path
    config: TrainingConfig


def main() -> int:
    options = _options()
    began = time.monotonic()
    if options.patients_only:
        for stage, run, config in trainings(options):
            rendered(stage, run, config)
        return 0
    for stage, run, config in trainings(options):
        left_s = 60 * options.chunk_minutes - (time.monotonic() - began) if options.chunk_minutes else None
        if steps_done(run, stage) < config.optimisation.steps:
            if left_s is not None and left_s < 10:
                return unfinished(stage, run, config)
            trained(config, run, options.device, left_s)
        if steps_done(run, stage) < config.optimisation.steps:
            return unfinished(stage, run, config)
    if options.stage:
        return 0
    folder = combined(options)
    scores = scored(folder, options) if options.scans else ""
    card = as_card(folder, options, scores)
    replace_text(options.output / "card.md", card)
    if options.install:
        install(folder, card)
    print(f"{folder}: the model\n\n{card}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--preset", choices=SUFFIX, default="cpu", help="default cpu")
    parser.add_argument("--seed", type=int, default=0, help="of networks and patients; default 0, the recipes' own")
    parser.add_argument("--steps-scale", type=float, default=1.0, metavar="F", help="factor on both stages' steps")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument(
        "--chunk-minutes", type=float, default=0.0, metavar="M", help="stop after so long; default never"
    )
    parser.add_argument("--stage", type=int, choices=(1, 2), nargs=1, help="train this one only; default both, in turn")
    parser.add_argument("--patients-only", action="store_true", help="render patients, train nothing")
    parser.add_argument("--scans", type=Path, help="scans with references, to score the finished model on")
    parser.add_argument(
        "--model-version", default=__version__, metavar="V", help=f"default the package's, {__version__}"
    )
    parser.add_argument("--install", action="store_true", help="put the finished model into the package")
    parser.add_argument("--set1", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of stage 1's recipe")
    parser.add_argument("--set2", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of stage 2's recipe")
    options = parser.parse_args()
    if options.scans:
        from validate import scans_of

        if not scans_of(options.scans):
            parser.error(f"--scans {options.scans}: no NAME.nii.gz in it")
    return options


# ------------------------------------------------------------------------------------------------- training


def recipe(stage: int, options: argparse.Namespace) -> TrainingConfig:
    """A stage's recipe with the seed and the steps of this run; stage 2 validates behind the shipped locator."""
    path = RECIPES / f"stage{stage}{SUFFIX[options.preset]}.toml"
    overrides: Sequence[str] = options.set1 if stage == 1 else options.set2
    config = configs.load(path, TrainingConfig, overrides)
    steps = max(1, round(config.optimisation.steps * options.steps_scale))
    optimisation = replace(config.optimisation, steps=steps, seed=config.optimisation.seed + options.seed)
    cache = config.data.cache or str(options.output / "cache")
    data = replace(config.data, seed=config.data.seed + SEED_STEP * options.seed, cache=cache)
    return replace(config, data=data, optimisation=optimisation, locator="")


def trainings(options: argparse.Namespace) -> list[Training]:
    """All that is trained, in turn."""
    found: list[Training] = []
    for stage in options.stage or (1, 2):
        first = Training(stage, options.output / f"stage{stage}", recipe(stage, options))
        found += [first, *trained_on(first, options)]
    return found


def trained_on(first: Training, options: argparse.Namespace) -> list[Training]:
    """Further trainings of a stage, one after the other."""
    config, before, found = first.config, first.run, []
    known = patients(config)
    for number, further in enumerate(FURTHER.get((options.preset, first.stage), ()), start=1):
        steps = max(1, round(further.steps * options.steps_scale))
        data = replace(
            config.data,
            preset=further.preset,
            cases=further.cases,
            initial=min(config.data.initial if further.others else known, further.cases),
            steps_per_case=further.steps_per_case,
            seed=config.data.seed + (number * SEED_STEP if further.others else 0),
        )
        optimisation = replace(
            config.optimisation,
            steps=steps,
            learning_rate=further.learning_rate,
            fixed_norm=0.0,
            seed=config.optimisation.seed + number,
        )
        on = replace(config, init=str(before / "model"), data=data, optimisation=optimisation)
        known = patients(on)
        before = before.with_name(f"stage{first.stage}-on{number}")
        found.append(Training(first.stage, before, on))
    return found


def patients(config: TrainingConfig) -> int:
    """How many a training sees."""
    return config.data.joined(config.optimisation.steps)


def rendered(stage: int, run: Path, config: TrainingConfig) -> None:
    """Renders a training's patients into the cache where it looks for them, those first that it needs first."""
    began = time.monotonic()
    data = Data(config, run)
    try:
        for patient in data.training:
            data.store.names(patient)
    finally:
        data.close()
    minutes = (time.monotonic() - began) / 60
    print(f"stage {stage}, {run.name}: {len(data.training)} patients ready after {minutes:.1f} minutes", flush=True)


def trained(config: TrainingConfig, run: Path, device: str, limit_s: float | None) -> None:
    """Trains, or goes on, and adds the minutes to those of earlier pieces."""
    record = run / "minutes.json"
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() else 0.0
    began = time.monotonic()
    try:
        train(config, run, resume=True, device=device, time_limit_s=limit_s, quiet=not sys.stderr.isatty())
    finally:
        if run.exists():
            replace_text(record, json.dumps(round(before + (time.monotonic() - began) / 60, 2)) + "\n")


def steps_done(run: Path, stage: int) -> int:
    """Steps of the model that a run has saved; 0 where it was killed while it wrote that: its checkpoint has them."""
    if not (run / "model" / "model.json").exists():
        return 0
    try:
        return int(load_model(run / "model").notes[f"stage{stage}_steps"])
    except ModelError:
        if (run / CHECKPOINT).exists():
            return 0
        raise


def unfinished(stage: int, run: Path, config: TrainingConfig) -> int:
    done, steps = steps_done(run, stage), config.optimisation.steps
    print(f"stage {stage}: step {done} of {steps}; run the same command again to go on", flush=True)
    return UNFINISHED


def combined(options: argparse.Namespace) -> Path:
    """The model folder of both finished stages."""
    models = [(one.stage, load_model(one.run / "model")) for one in trainings(options)]
    notes = {key: value for _, model in models for key, value in model.notes.items()}
    notes |= {"training_data": "synthetic chest CT only", "recipe": options.preset, "seed": options.seed}
    for stage in (1, 2):
        notes[f"stage{stage}_steps"] = sum(
            int(model.notes[f"stage{stage}_steps"]) for of, model in models if of == stage
        )
    locators = [model.locator for stage, model in models if stage == 1]
    locator = mean_of(locators[-3::2])  # the last, and that from which MIXED went on
    last = models[-1][1]
    model = Model(locator, last.refiner, name=last.name, version=options.model_version, notes=notes)
    folder: Path = options.output / "model"
    save_model(model, folder)
    return folder


def mean_of(stages: Sequence[Stage]) -> Stage:
    """A stage with the mean of the weights of several, each trained on from the one before."""
    kept = stages[0].weights
    stacked = {name: torch.stack([stage.weights[name].float() for stage in stages]) for name in kept}
    return replace(stages[0], weights={name: every.mean(dim=0).to(kept[name].dtype) for name, every in stacked.items()})


# ------------------------------------------------------------------------------------------------ the card


def scored(folder: Path, options: argparse.Namespace) -> str:
    """The table of the finished model's scores on real scans."""
    from validate import validated

    return validated(folder, options.scans, options.output / "validation", options.device)


def as_card(folder: Path, options: argparse.Namespace, scores: str) -> str:
    """What a machine can write of the model card."""
    model = load_model(folder)
    rows: list[tuple[str, Any]] = [("SHA-256", f"`{model.sha256}` (checked at every load)")]
    command = f"python scripts/train_shipped.py OUT --preset {options.preset} --seed {options.seed}"
    if options.steps_scale != 1:
        command += f" --steps-scale {options.steps_scale:g}"
    for number, overrides in ((1, options.set1), (2, options.set2)):
        command += f" --set{number} {shlex.join(overrides)}" if overrides else ""
    rows += [("recipe", f"`{command}`"), ("size", f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f} MB")]
    lines = [BEGIN, "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += [f"| {' | '.join(row)} |" for row in _effort(options)]
    return "\n".join([*lines, "", *([scores] if scores else []), END]) + "\n"


def _effort(options: argparse.Namespace) -> list[list[str]]:
    """Rows: what is told, and it of each training; the second one is the line below the heads."""
    columns = [["", "---", "patients", "steps", "patch", "patches a step", "peak learning rate", "minutes", "device"]]
    for _, run, config in trainings(options):
        data, numbers = config.data, config.optimisation
        presets = ", ".join(f"`{name}`" for name in dict.fromkeys(data.presets))
        environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
        columns.append([
            run.name,
            "---",
            f"{patients(config)} ({presets}, seeds from {data.seed + data.validation})",
            str(numbers.steps),
            f"{' x '.join(map(str, numbers.patch))} at {config.view.spacing_mm:g} mm",
            str(numbers.batch),
            f"{numbers.learning_rate:g}",
            (run / "minutes.json").read_text(encoding="utf-8").strip(),
            " ".join(str(environment.get(key, "")) for key in ("device", "precision")).strip(),
        ])  # fmt: skip
    return [list(row) for row in zip(*columns, strict=True)]


def install(folder: Path, card: str) -> None:
    """Puts the model into the package, and the machine's part into its card, where the card has a place for it."""
    for name in ("model.safetensors", "model.json"):
        shutil.copyfile(folder / name, shipped_model() / name)
    readme = shipped_model() / "README.md"
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text:
        print(f"{readme}: no line '{BEGIN}'; put OUT/card.md in by hand", file=sys.stderr)
        return
    before, rest = text.split(BEGIN, 1)
    replace_text(readme, before + card.rstrip("\n") + rest.split(END, 1)[1])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CascadesegError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(INTERRUPTED)
