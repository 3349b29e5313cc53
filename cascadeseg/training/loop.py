"""Training, top to bottom.

Everything random in step ``t`` is drawn from a generator seeded by ``(seed, t)``, so there is no random state to save:
a resumed run sees the patches that an uninterrupted one would have seen, and two processes see what one would have.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from cascadeseg import config as configs
from cascadeseg.atomic import replace_text
from cascadeseg.errors import CascadesegError, ConfigError, ModelError, OutputError
from cascadeseg.labels import BESIDE
from cascadeseg.machine import processors
from cascadeseg.memory import keep_freed_memory
from cascadeseg.network.model import load_model, save_model
from cascadeseg.network.unet import UNet
from cascadeseg.training.cache import locator_folder
from cascadeseg.training.config import TrainingConfig
from cascadeseg.training.data import LARGEST_BATCH, Data, batch_of
from cascadeseg.training.log import Log, write_environment
from cascadeseg.training.optimiser import optimiser_of
from cascadeseg.training.prefetch import Prefetch, Stop, Stopped
from cascadeseg.training.processes import Processes, agreed, launched, training_precision
from cascadeseg.training.state import CHECKPOINT, Relief, State, averaged, take_weights
from cascadeseg.training.step import Batch, Trainer, take_step
from cascadeseg.training.validation import model_of, save_picture, surface_distances_available, validate

COMPILERS = ("g++", "clang++", "cl")
CUTTING_THREADS = 4
"""That fetch patches for a GPU; on a CPU one is enough, and takes least from the network."""


def train(
    config: TrainingConfig,
    output: Path,
    *,
    resume: bool = False,
    device: str = "auto",
    processes: Processes | None = None,
    time_limit_s: float | None = None,
    stop_after: int | None = None,
    quiet: bool = False,
) -> Path:
    """Trains one stage.

    Args:
        config: the recipe.
        output: the run folder: config, environment, split, metrics, checkpoint, pictures, ``best`` and ``model``, two
            model folders.
        resume: go on from the run folder's checkpoint, if there is one.
        device: as for inference.
        processes: how many there are; one by default.
        time_limit_s: stop after so long, with the checkpoint saved; resume for the rest.
        stop_after: stop after so many steps, with the checkpoint saved; resume for the rest.
        quiet: no progress bar.

    Returns:
        The folder of the latest averaged weights, and of how many steps they are (in its notes): a model of both
        stages, or of stage 1 a locator alone. It is not there where the time was up before the data were looked at.

    Raises:
        ConfigError: the recipe contradicts itself, or the run folder holds another run, or one that is at work.
        ExceptionGroup: of everything that is wrong with the data set.
        KeyboardInterrupt: interrupted (also by SIGTERM); the checkpoint is saved.
    """
    _check(config, output, resume)
    keep_freed_memory()
    fabric = launched(config.optimisation, device, processes or Processes())
    stop = Stop(time_limit_s)
    with stop.listening(), _alone(output, fabric), suppress(Stopped), _data(config, output, fabric, stop) as data:
        state = _begun(config, fabric)
        run = Run(config, output, data, state, fabric, stop)
        if resume and run.checkpoint.exists():
            state.load(run.checkpoint)
        if fabric.is_global_zero:
            _record(run)
        fabric.barrier()
        last = config.optimisation.steps
        _train_until(last if stop_after is None else min(last, state.step + stop_after), run, quiet)
    if stop.interrupted:
        raise KeyboardInterrupt
    return output / "model"


@dataclass(frozen=True)
class Run:
    """A run under way: the recipe, where it is kept, what it works on and with."""

    config: TrainingConfig
    output: Path
    data: Data
    state: State
    fabric: Any
    stop: Stop

    @property
    def checkpoint(self) -> Path:
        return self.output / CHECKPOINT

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return bool(self.fabric.is_global_zero)

    def save(self) -> None:
        """Writes the checkpoint and the model; where that fails, every process hears of it."""
        agreed(self.fabric, self.write)

    def write(self) -> None:
        """The same, by the first process alone."""
        if self.first:
            self.state.save(self.checkpoint)
            save_model(model_of(self.config, self.state), self.output / "model")


def _train_until(last: int, run: Run, quiet: bool) -> None:
    numbers, state = run.config.optimisation, run.state
    log = _log(run, quiet)
    patches = Prefetch(
        lambda step, relief: _batches(run, step, relief), numbers.prefetch, last, run.stop, _threads(run)
    )
    optimiser = run.fabric.setup_optimizers(state.optimiser)
    trainer = Trainer(run.config, state, run.fabric, optimiser, patches, log.tell)
    try:
        with _paused(log):
            _prepare_first(run, log)
        while True:
            if _validation_is_due(run):
                _validate(run, log)
            if state.step >= last:
                break
            values = take_step(trainer)
            if values is None:
                break
            noted = partial(log.step, state.step, values, waited_s=patches.waited_s, patches=numbers.batch)
            agreed(run.fabric, noted)
            if state.step % numbers.save_every == 0 and state.step < last:
                with _paused(log):
                    run.save()
        run.save()
        if state.step < numbers.steps:
            log.tell(f"stopped after step {state.step} of {numbers.steps}, which is saved; go on with --resume")
    except (CascadesegError, OSError) as error:
        raise _ended(run, error) from error
    finally:
        patches.close()
        log.close()


def _ended(run: Run, error: CascadesegError | OSError) -> CascadesegError:
    """What ended a run and what to do, with all its steps saved unless the disk is full or no loss is finite."""
    if isinstance(error, OSError):
        error = OutputError(error.filename or run.output, error.strerror or str(error))
    state, numbers = run.state, run.config.optimisation
    if state.skipped_in_a_row > numbers.skip_at_most:
        return error
    kept = "the last checkpoint is kept" if run.checkpoint.exists() else ""
    if state.step:  # before the first one a run has not begun, and starts again without more ado
        with suppress(CascadesegError, OSError):
            run.write()
            kept = f"step {state.step} of {numbers.steps} is saved"
    remedies = [error.remedy, f"{kept}: mend this, and go on with --resume" if kept else ""]
    return type(error)(error.where, error.found, error.expected, "; ".join(filter(None, remedies)))


def _prepare_first(run: Run, log: Log) -> None:
    """Waits until the first step has all it may ask for; a process that fails takes the others with it."""
    with suppress(Stopped):  # the first step ends the run
        if run.state.step < run.config.optimisation.steps:
            agreed(run.fabric, lambda: run.data.prepare_first(log.tell))


def _batches(run: Run, step: int, relief: Relief) -> list[Batch]:
    """This process's share of a step's patches, in batches for the network."""
    numbers, fabric = run.config.optimisation, run.fabric
    mine = range(fabric.global_rank, numbers.batch, fabric.world_size)
    cuts = [run.data.cut(step, index, relief) for index in mine]
    groups = [cuts[start : start + numbers.micro_batch] for start in range(0, len(cuts), numbers.micro_batch)]
    if fabric.device.type == "cuda":
        return [[one.pinned() for one in group] for group in groups]
    return [batch_of(group, run.config, fabric.device) for group in groups]


def _threads(run: Run) -> int:
    on_cpu = run.fabric.device.type == "cpu"
    return 1 if on_cpu else min(CUTTING_THREADS, 1 + run.config.optimisation.prefetch)


def _validation_is_due(run: Run) -> bool:
    numbers, step = run.config.optimisation, run.state.step
    due = step > 0 and (step % numbers.validate_every == 0 or step == numbers.steps)
    return due and run.state.validated < step


def _validate(run: Run, log: Log) -> None:
    """On the first process; the others wait."""
    with suppress(Stopped), _paused(log):  # the next step ends the run, and a resumed one validates first
        agreed(run.fabric, lambda: _validate_here(run, log) if run.first else None)
        run.state.validated = run.state.step


def _validate_here(run: Run, log: Log) -> None:
    state = run.state
    validated = validate(run.config, state, run.data, run.fabric.device)
    if validated is None:
        return
    line = ", ".join(f"{name} {value:.4g}" for name, value in validated.scores.items())
    log.note(state.step, {f"validation_{name}": value for name, value in validated.scores.items()})
    log.tell(f"step {state.step}: {line}")
    for reason in validated.refused:
        log.tell(f"validation counts as missed: {reason}")
    picture = run.output / "samples" / f"step_{state.step:06d}.png"
    save_picture(validated, picture, f"step {state.step}: {line}")
    log.picture(state.step, picture)
    if validated.scores["dice"] > state.best:
        state.best = validated.scores["dice"]
        save_model(model_of(run.config, state), run.output / "best")


@contextmanager
def _paused(log: Log) -> Iterator[None]:
    began = time.perf_counter()
    yield
    log.pause(time.perf_counter() - began)


@contextmanager
def _alone(output: Path, fabric: Any) -> Iterator[None]:
    """Holds a run folder: another run that comes meanwhile is refused. However this one ends, the system lets go of it;
    a folder that was made for it and stayed empty goes.

    Where there are no such locks (Windows, some network disks), nobody is refused.
    """
    with ExitStack() as held:

        def hold() -> None:
            if not output.exists():
                output.mkdir(parents=True)
                held.callback(_remove_if_empty, output)
            try:
                fcntl = import_module("fcntl")
                folder = os.open(output, os.O_RDONLY)
                held.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                remedy = "wait for its end, or choose another folder"
                raise ConfigError(output, "another run is at work in it", "", remedy) from error
            except (ImportError, OSError):
                pass

        agreed(fabric, lambda: hold() if fabric.is_global_zero else None)
        yield


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _data(config: TrainingConfig, output: Path, fabric: Any, stop: Stop) -> Iterator[Data]:
    data = agreed(fabric, lambda: Data(config, output, prepares=fabric.local_rank == 0, stopped=stop.check))
    try:
        yield data
    finally:
        data.close()


def _log(run: Run, quiet: bool) -> Log:
    numbers = run.config.optimisation
    title = f"stage {run.config.stage}"
    log = Log(
        run.output,
        run.state.step,
        numbers.steps,
        validated=run.state.validated,
        title=title,
        first=run.first,
        quiet=quiet,
        board=numbers.tensorboard,
    )
    if run.state.step < numbers.steps:
        patients = f"{len(run.data.training)} patients to train on, {len(run.data.validation)} to validate with"
        precision = training_precision(numbers, run.fabric.device)
        where = f"{run.fabric.device.type} ({precision})"
        begins = f"goes on after step {run.state.step}" if run.state.step else "begins with the first step"
        log.tell(f"{title} on {where}: {patients}; kept in {run.output}; {begins}")
    usable, alone = processors(), run.fabric.device.type == "cpu" and run.fabric.world_size == 1
    if alone and torch.get_num_threads() == 1 < usable:
        remedy = f"unset OMP_NUM_THREADS, or set it to {usable}"
        log.tell(f"warning: torch uses 1 of {usable} processors, which trains far slower; {remedy}")
    if run.data.validation and not surface_distances_available():
        log.tell("without monai and SimpleITK validation gives Dice alone, no surface distances")
    return log


def _begun(config: TrainingConfig, fabric: Any) -> State:
    """The state before the first step: chance of the seed, or another model's weights."""
    torch.manual_seed(config.optimisation.seed % 2**63)
    numbers = config.optimisation
    network = UNet(config.unet, checkpoint_blocks=numbers.checkpoint_blocks)
    if config.init:
        _initialise(network, config)
    network = network.to(fabric.device)
    if numbers.channels_last:
        network = network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    average = averaged(network)
    if numbers.compile:
        network.compile()
    return State(network, average, optimiser_of(network, numbers), fabric.strategy.precision)


def _initialise(network: UNet, config: TrainingConfig) -> None:
    model = load_model(None if config.init == "shipped" else config.init)
    stage = model.locator if config.stage == 1 else model.refiner
    if stage is None:
        raise ModelError(config.init, "a locator without a refiner", "both stages", "leave out --init")
    if changed := _changed(config.view, stage.view, "view."):
        found = f"weights of another view ({'; '.join(changed)})"
        raise ConfigError("init", found, "the recipe's", "change [view], or leave out --init")
    mine = config.unet
    theirs = replace(stage.unet, out_channels=mine.out_channels, deep_supervision=mine.deep_supervision)
    if changed := _changed(mine, theirs, "unet."):
        found = f"weights of another network ({'; '.join(changed)})"
        raise ConfigError("init", found, "the recipe's", "change [unet], or leave out --init")
    take_weights(network, stage.weights)


def _check(config: TrainingConfig, output: Path, resume: bool) -> None:
    """What can be known to be wrong before anything is started."""
    _check_numbers(config)
    if config.optimisation.compile and not any(map(shutil.which, COMPILERS)):
        expected = f"one of {', '.join(COMPILERS)} on the path"
        raise ConfigError("optimisation.compile", "no C++ compiler", expected, "leave it off")
    if config.stage == 2:
        load_model(locator_folder(config, config.data.fold))  # else missed only when the model is to be written
    if (output / CHECKPOINT).exists():
        if not resume:
            raise ConfigError(output, "a run that has begun", "a new folder", "add --resume to go on with it")
        _same_recipe(config, configs.load(output / "config.toml", TrainingConfig), output / "config.toml")


def _check_numbers(config: TrainingConfig) -> None:
    numbers, unet, view = config.optimisation, config.unet, config.view
    configs.check_limits(config)
    if not view.high_hu > view.low_hu:
        raise ConfigError("view.high_hu", str(view.high_hu), f"above view.low_hu, {view.low_hu}")
    if numbers.batch > LARGEST_BATCH:
        raise ConfigError("optimisation.batch", str(numbers.batch), f"{LARGEST_BATCH} at most")
    if any(n % unet.stride for n in numbers.patch):
        raise ConfigError("optimisation.patch", str(list(numbers.patch)), f"multiples of {unet.stride}")
    beside = config.data.labels.beside
    if len(beside) > (len(BESIDE) if config.stage == 1 else 0):
        expected = f"{len(BESIDE)} at most" if config.stage == 1 else "none: stage 2 knows one lung and what is not"
        raise ConfigError("data.labels.beside", f"{len(beside)} groups", expected)
    wanted = view.channels, 3 + len(beside) if config.stage == 1 else 1
    if (unet.in_channels, unet.out_channels) != wanted:
        found = f"{unet.in_channels} channels in and {unet.out_channels} out"
        expected = f"{wanted[0]} in and {wanted[1]} out, for stage {config.stage}, its view and labels"
        raise ConfigError("unet", found, expected, "change unet.in_channels, unet.out_channels or the view")


def _record(run: Run) -> None:
    run.output.mkdir(parents=True, exist_ok=True)
    replace_text(run.output / "config.toml", configs.dump(run.config))
    precision = training_precision(run.config.optimisation, run.fabric.device)
    write_environment(run.output, run.fabric.device, precision, run.fabric.world_size)


def _same_recipe(config: TrainingConfig, begun: TrainingConfig, record: Path) -> None:
    """Where and how fast data is prepared may change between sessions; what is learnt may not."""

    def essential(whole: TrainingConfig) -> TrainingConfig:
        data = replace(whole.data, workers=0, cache="", device="cpu")
        return replace(whole, data=data, optimisation=replace(whole.optimisation, prefetch=0, tensorboard=True))

    if changed := _changed(essential(config), essential(begun)):
        found = f"another recipe than the one to resume with ({'; '.join(changed)})"
        raise ConfigError(record, found, "the same", "leave them out: a run goes on by its own recipe")


def _changed(now: Any, before: Any, prefix: str = "") -> list[str]:
    """The keys whose values differ, with what they were."""
    changed = []
    for key in fields(now):
        new, old = getattr(now, key.name), getattr(before, key.name)
        if is_dataclass(new):
            changed += _changed(new, old, f"{prefix}{key.name}.")
        elif new != old:
            changed.append(f"{prefix}{key.name} was {json.dumps(old)}")
    return changed
