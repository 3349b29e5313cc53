"""The training loop, top to bottom.

Everything random in step ``t`` is drawn from a generator seeded by ``(seed, t)``, so there is no random state to save:
a resumed run sees the patches that an uninterrupted one would have seen.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Generator, Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from cascadeseg import config as configs
from cascadeseg.errors import ConfigError
from cascadeseg.labels import LUNGS
from cascadeseg.network.engine import Engine, fast_precision, find_device
from cascadeseg.network.model import Model, load_model, save_model, stage_of
from cascadeseg.network.unet import UNet
from cascadeseg.training.augmentation import random_patch
from cascadeseg.training.cases import CaseStore, FolderPatients, patients_of
from cascadeseg.training.config import TrainingConfig
from cascadeseg.training.loss import segmentation_loss

LOG_EVERY = 10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class State:
    """What changes during a run, and all that a checkpoint holds."""

    network: UNet
    average: AveragedModel
    optimiser: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    step: int = 0

    def save(self, path: Path) -> None:
        """Writes a checkpoint; a run that is killed meanwhile keeps the one before."""
        temporary = path.with_suffix(".part")
        parts = (self.network, self.average, self.optimiser, self.scaler)
        torch.save({"step": self.step, "parts": [part.state_dict() for part in parts]}, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Takes over a checkpoint."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        parts = (self.network, self.average, self.optimiser, self.scaler)
        for part, state in zip(parts, saved["parts"], strict=True):
            part.load_state_dict(state)  # type: ignore[attr-defined]
        self.step = saved["step"]


def train(
    config: TrainingConfig,
    output: Path,
    *,
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
    stop_after: int | None = None,
) -> Path:
    """Trains one stage.

    Args:
        config: the recipe.
        output: the run folder: config, metrics, checkpoint, and at last the ``model`` folder for `infer`.
        resume: go on from the run folder's checkpoint, if there is one.
        device: as for inference.
        quiet: no progress bar.
        stop_after: end this session after so many steps, as an interruption would; resume for the rest.

    Returns:
        The model folder.

    Raises:
        ConfigError: the recipe contradicts itself, or the run folder holds another run.
        KeyboardInterrupt: interrupted (also by SIGTERM); the checkpoint is saved.
    """
    place = find_device(device)
    _open_run(config, output, resume)
    run = Run(config, output, Data(config, output), _begin(config, place), place)
    if resume and run.checkpoint.exists():
        run.state.load(run.checkpoint)
    last = config.optimisation.steps
    if stop_after is not None:
        last = min(last, run.state.step + stop_after)
    try:
        with _terminable():
            _train_until(last, run, quiet)
    finally:
        run.state.save(run.checkpoint)
        run.data.close()
    save_model(_model(config, run.state), output / "model")
    return output / "model"


@dataclass(frozen=True)
class Run:
    """A run under way: the recipe, where it is kept, and what it works on."""

    config: TrainingConfig
    output: Path
    data: Data
    state: State
    place: torch.device

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoint.pt"


def _train_until(last: int, run: Run, quiet: bool) -> None:
    numbers, state = run.config.optimisation, run.state
    title = f"stage {run.config.stage}"
    bar = tqdm(total=numbers.steps, initial=state.step, unit="step", disable=quiet or None, desc=title)
    log = _Log(run.output / "metrics.jsonl", state.step)
    while state.step < last:
        began = time.perf_counter()
        patches = [run.data.patch(state.step, index) for index in range(numbers.batch)]
        log.waited(time.perf_counter() - began)
        log.add(**_step(run.config, state, patches, run.place))
        state.step += 1
        bar.update()
        if state.step % LOG_EVERY == 0:
            bar.set_postfix(log.write(state.step))
        if state.step % numbers.validate_every == 0 or state.step == numbers.steps:
            scores = validate(run)
            log.note(state.step, scores)
            bar.write(f"step {state.step}: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
        if state.step % numbers.save_every == 0:
            state.save(run.checkpoint)
            save_model(_model(run.config, state), run.output / "model")
    bar.close()


def _step(
    config: TrainingConfig, state: State, patches: list[tuple[Tensor, Tensor]], place: torch.device
) -> dict[str, float]:
    """One optimiser step over a batch of patches, their gradients accumulated."""
    numbers = config.optimisation
    rate = learning_rate(numbers, state.step)
    for group in state.optimiser.param_groups:
        group["lr"] = rate
    state.network.train()
    state.optimiser.zero_grad(set_to_none=True)
    total = dice = 0.0
    for image, labels in patches:
        batch = image[None].to(place, memory_format=torch.channels_last_3d)
        with _autocast(config, place):
            logits = state.network(batch)
        loss, score = segmentation_loss(logits, labels[None].to(place))
        state.scaler.scale(loss / len(patches)).backward()  # type: ignore[no-untyped-call]
        total, dice = total + float(loss.detach()), dice + float(score)
    state.scaler.unscale_(state.optimiser)
    norm = torch.nn.utils.clip_grad_norm_(state.network.parameters(), numbers.clip_norm)
    skipped = not (math.isfinite(total) and bool(torch.isfinite(norm)))
    if not skipped:
        state.scaler.step(state.optimiser)
        state.average.update_parameters(state.network)
    state.scaler.update()
    return {
        "loss": total / len(patches),
        "dice": dice / len(patches),
        "rate": rate,
        "skipped": float(skipped),
    }


def learning_rate(numbers: Any, step: int) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < numbers.warm_up:
        return float(numbers.learning_rate * (step + 1) / numbers.warm_up)
    share = (step - numbers.warm_up) / max(1, numbers.steps - numbers.warm_up)
    return float(numbers.learning_rate * 0.5 * (1 + math.cos(math.pi * share)))


class Data:
    """Training and validation cases, by number."""

    def __init__(self, config: TrainingConfig, output: Path) -> None:
        self.config = config
        data = config.data
        if data.source == "synthetic":
            self.validation = list(range(data.validation))
            self.training = list(range(data.validation, data.validation + data.cases))
        else:
            count = len(FolderPatients(config, None).images)
            if count <= data.validation:
                raise ConfigError("data.validation", f"{data.validation} of {count} cases", "fewer than there are")
            self.validation, self.training = list(range(data.validation)), list(range(data.validation, count))
        order = self.training[: data.initial] + self.validation + self.training[data.initial :]
        if config.stage == 2:
            patients_of(config)  # a missing locator is told now, not by a worker
        folder = Path(data.cache) if data.cache else output / "cases"
        self.store = CaseStore(folder / f"stage{config.stage}", config, order)

    def patch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """The patch of a step: image (C, x, y, z) and labels (x, y, z)."""
        random = Generator().manual_seed((self.config.optimisation.seed * 1_000_003 + step) * 64 + index)
        data = self.config.data
        known = len(self.training)
        if data.source == "synthetic":
            known = min(known, data.initial + step // data.steps_per_case)
        while True:
            number = self.training[int(torch.randint(0, known, (), generator=random))]
            names = self.store.names(number)
            if names:
                name = names[int(torch.randint(0, len(names), (), generator=random))]
                return random_patch(*self.store.arrays(name), self.config, random)

    def close(self) -> None:
        """Stops the workers."""
        self.store.close()


def validate(run: Run) -> dict[str, float]:
    """Dice of the averaged weights on the held-out cases, whole, as inference runs them."""
    engine = Engine(stage_of(run.config.view, _averaged(run.state)), run.place)
    scores: dict[str, list[float]] = {}
    for number in run.data.validation:
        for name in run.data.store.names(number):
            image, labels = run.data.store.arrays(name)
            logits = engine(torch.from_numpy(np.array(image, dtype=np.float32)))
            for key, value in _dice(logits.cpu(), torch.from_numpy(np.array(labels))).items():
                scores.setdefault(key, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(scores.items())}


def _dice(logits: Tensor, labels: Tensor) -> dict[str, float]:
    predicted = logits.argmax(dim=0) if logits.shape[0] > 1 else (logits[0] > 0).long()
    names = [lung.side for lung in LUNGS] if logits.shape[0] > 1 else ["lung"]
    scores = {}
    for value, name in enumerate(names, start=1):
        mask, truth = predicted == value, labels == value
        if truth.any():
            scores[f"dice_{name}"] = float(2 * (mask & truth).sum() / (mask.sum() + truth.sum()))
        else:
            scores["false_voxels"] = float(mask.sum())
    return scores


def _begin(config: TrainingConfig, place: torch.device) -> State:
    torch.manual_seed(config.optimisation.seed)
    numbers = config.optimisation
    network = UNet(config.unet, checkpoint_blocks=numbers.checkpoint_blocks)
    network = network.to(place).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(numbers.ema), use_buffers=True)  # type: ignore[no-untyped-call]
    optimiser = torch.optim.AdamW(network.parameters(), lr=numbers.learning_rate, weight_decay=numbers.weight_decay)
    scaler = torch.amp.GradScaler(place.type, enabled=_precision(config, place) == "fp16")
    return State(network, average, optimiser, scaler)


def _averaged(state: State) -> UNet:
    return cast(UNet, state.average.module)


def _precision(config: TrainingConfig, place: torch.device) -> str:
    asked = config.optimisation.precision
    return fast_precision(place) if asked == "auto" else asked


def _autocast(config: TrainingConfig, place: torch.device) -> torch.autocast:
    precision = _precision(config, place)
    return torch.autocast(place.type, DTYPES[precision], enabled=precision != "fp32")


def _model(config: TrainingConfig, state: State) -> Model:
    stage = stage_of(config.view, _averaged(state))
    notes = {f"stage{config.stage}_steps": state.step, f"stage{config.stage}_data": config.data.source}
    if config.stage == 1:
        return Model(stage, None, name=config.name, notes=notes)
    base = load_model(config.locator or None)
    return replace(base, refiner=stage, name=config.name, notes={**base.notes, **notes})


def _open_run(config: TrainingConfig, output: Path, resume: bool) -> None:
    record = output / "config.toml"
    if (output / "checkpoint.pt").exists():
        if not resume:
            raise ConfigError(output, "a run that has begun", "a new folder", "add --resume to go on with it")
        _same_recipe(config, configs.load(record, TrainingConfig), record)
    output.mkdir(parents=True, exist_ok=True)
    record.write_text(configs.dump(config), encoding="utf-8")


def _same_recipe(config: TrainingConfig, begun: TrainingConfig, record: Path) -> None:
    """Where the data is prepared, and by how many, may change between sessions; what is learnt may not."""

    def essential(whole: TrainingConfig) -> TrainingConfig:
        return replace(whole, data=replace(whole.data, workers=0, cache=""))

    if essential(config) != essential(begun):
        changed = [
            f.name for f in fields(config) if getattr(essential(config), f.name) != getattr(essential(begun), f.name)
        ]
        raise ConfigError(record, f"another recipe than the one to resume with (in {', '.join(changed)})", "the same")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM (a scheduler's time limit) ends a run as Ctrl-C does: with its checkpoint saved."""

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Log:
    """Means of the steps since the last line of ``metrics.jsonl``."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        # What a killed run wrote after its last checkpoint will be written again.
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")
        self._values: dict[str, list[float]] = {}
        self._waited = 0.0
        self._since = time.perf_counter()

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def write(self, step: int) -> dict[str, str]:
        elapsed = time.perf_counter() - self._since
        means = {name: float(np.mean(values)) for name, values in self._values.items()}
        means |= {"seconds": elapsed / max(1, len(self._values["loss"])), "waiting": self._waited / elapsed}
        self.note(step, means)
        self._values, self._waited, self._since = {}, 0.0, time.perf_counter()
        return {name: f"{means[name]:.3f}" for name in ("loss", "dice", "seconds", "waiting")}

    def note(self, step: int, values: dict[str, float]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
