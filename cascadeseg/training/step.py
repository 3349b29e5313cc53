"""One optimiser step: gradients gathered patch by patch, agreed upon, clipped, taken; or not, and then why.

The ladder, never climbed silently:

1. A loss or gradient that is not finite: the step is skipped and counted, BatchNorm's statistics are put back; after
   ``optimisation.skip_at_most`` in a row the run ends.
2. The device is out of memory: the step is tried again with every block's activations recomputed, then with the
   patch's longest axis halved, again and again; what was given up is kept in the checkpoint and told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cascadeseg.errors import ConfigError, DeviceError
from cascadeseg.memory import is_out_of_memory
from cascadeseg.network.engine import give_back
from cascadeseg.training.augmentation import Cut
from cascadeseg.training.config import OptimisationConfig, TrainingConfig
from cascadeseg.training.data import batch_of
from cascadeseg.training.loss import supervised_loss
from cascadeseg.training.optimiser import learning_rate
from cascadeseg.training.prefetch import Prefetch
from cascadeseg.training.processes import averaged_statistics, failure, summed, summed_gradients, worst
from cascadeseg.training.state import State, fix_statistics, kept_statistics, update_average

Batch = Sequence[Cut] | tuple[Tensor, Tensor]
"""Patches that go through the network together: still to be varied on the device, or varied already."""


@dataclass(frozen=True)
class Trainer:
    """What a step works on.

    Attributes:
        config: the recipe.
        state: what the step changes.
        fabric: device, precision, processes.
        optimiser: the state's, as Fabric steps it (with loss scaling).
        patches: the batches of this process's share of a step.
        tell: says a line to the user.
    """

    config: TrainingConfig
    state: State
    fabric: Any
    optimiser: Any
    patches: Prefetch[list[Batch]]
    tell: Any


def take_step(trainer: Trainer) -> dict[str, float] | None:
    """One step; None if the run was told to end before it could be taken.

    Returns:
        ``loss``, ``dice``, ``rate``, ``skipped`` (0 or 1).

    Raises:
        ConfigError: no finite loss for too long.
        DeviceError: even the smallest patch is too large for the device.
    """
    state, numbers = trainer.state, trainer.config.optimisation
    rate = learning_rate(numbers, state.step)
    for group in state.optimiser.param_groups:
        group["lr"] = rate
    while True:
        restore = kept_statistics(state.network)
        totals, out_of_memory, stopped, error = _gathered(trainer)
        out_of_memory, stopped, failed = worst(trainer.fabric, (out_of_memory, stopped, float(error is not None)))
        if failed or stopped:
            restore()  # what a checkpoint then holds is no half of a step
        if failed:
            raise failure(error)
        if stopped:
            return None
        if not out_of_memory:
            break
        restore()
        _give_way(trainer)
    loss, dice = summed(trainer.fabric, totals).tolist()
    skipped = not _stepped(trainer, loss, restore)
    state.step += 1
    return {"loss": loss, "dice": dice, "rate": rate, "skipped": float(skipped)}


def _gathered(trainer: Trainer) -> tuple[Tensor, float, float, Exception | None]:
    """The gradients of this process's patches; loss and Dice; and whether memory, time or data ended it."""
    state, fabric, count = trainer.state, trainer.fabric, trainer.config.optimisation.batch
    totals = torch.zeros(2, device=fabric.device)
    trainer.optimiser.zero_grad(set_to_none=True)
    _into_training(state, trainer.config.optimisation)
    try:
        batches = trainer.patches(state.step, state.relief)
        if batches is None:
            return totals, 0.0, 1.0, None
        for batch in batches:
            totals += _backward(trainer, batch, count)
    except Exception as error:
        if is_out_of_memory(error):  # of the step: of its data a ConfigError would say so
            return totals, 1.0, 0.0, None
        return totals, 0.0, 0.0, error  # the other processes must hear of it before it ends this one
    return totals, 0.0, 0.0, None


def _into_training(state: State, numbers: OptimisationConfig) -> None:
    """Training mode; in the last share of the steps with BatchNorm's averaged statistics (see ``fixed_norm``)."""
    state.network.train()
    if state.step >= round(numbers.fixed_norm * numbers.steps):
        fix_statistics(state.network, state.average)


def _backward(trainer: Trainer, batch: Batch, count: int) -> Tensor:
    """Adds a batch's share of the step's gradient; its share of loss and Dice."""
    image, labels = batch if isinstance(batch, tuple) else batch_of(batch, trainer.config, trainer.fabric.device)
    if trainer.config.optimisation.channels_last:
        image = image.contiguous(memory_format=torch.channels_last_3d)
    with trainer.fabric.autocast():
        logits = trainer.state.network(image)
    loss, dice = supervised_loss(logits, labels)
    share = len(labels) / count
    trainer.fabric.backward(loss * share)
    return share * torch.stack([loss.detach(), dice])


def _stepped(trainer: Trainer, loss: float, restore: Any) -> bool:
    """Moves the weights, unless loss or gradient are not finite."""
    state, numbers = trainer.state, trainer.config.optimisation
    summed_gradients(trainer.fabric, state.network)
    norm = trainer.fabric.clip_gradients(
        state.network, trainer.optimiser, max_norm=numbers.clip_norm, error_if_nonfinite=False
    )
    finite = bool(torch.isfinite(norm)) and abs(loss) < float("inf")
    scaled = getattr(state.precision, "scaler", None) is not None
    if finite or scaled:  # a loss scaler skips by itself, and must hear of it to lower its scale
        trainer.optimiser.step()
    if finite:
        state.skipped_in_a_row = 0
        averaged_statistics(trainer.fabric, state.network)
        update_average(state.average, state.network, numbers.ema, state.step - state.skipped)
        return True
    restore()
    _count_skipped(trainer, scaled)
    return False


def _count_skipped(trainer: Trainer, scaled: bool) -> None:
    state, most = trainer.state, trainer.config.optimisation.skip_at_most
    state.skipped += 1
    state.skipped_in_a_row += 1
    if not scaled:
        trainer.tell(
            f"step {state.step + 1}: loss or gradient not finite; the step is skipped ({state.skipped} so far)"
        )
    if state.skipped_in_a_row > most:
        raise ConfigError(
            "train",
            f"no finite loss in {state.skipped_in_a_row} steps in a row",
            "a recipe that converges",
            "lower optimisation.learning_rate, or try optimisation.precision=fp32",
        )


def _give_way(trainer: Trainer) -> None:
    """The next rung of the ladder for a device that is out of memory."""
    trainer.optimiser.zero_grad(set_to_none=True)
    give_back(trainer.fabric.device)
    state = trainer.state
    relief = state.relief.more(trainer.config)
    if relief is None:
        patch = " x ".join(map(str, state.relief.patch(trainer.config)))
        raise DeviceError(
            "train", f"out of memory even with patches of {patch}", "", "a smaller unet, or another device"
        )
    state.relieve(relief)
    if relief.halvings:
        change = f"patches of at most {' x '.join(map(str, relief.patch(trainer.config)))} from now on"
    else:
        change = "activations are recomputed from now on (optimisation.checkpoint_blocks)"
    trainer.tell(f"step {state.step + 1}: out of the device's memory; {change}")
