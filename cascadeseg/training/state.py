"""What changes during a run, and how it is kept: written whole or not at all, whatever ends the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cascadeseg.atomic import replace_file
from cascadeseg.errors import ModelError
from cascadeseg.memory import is_out_of_memory
from cascadeseg.network.unet import UNet
from cascadeseg.training.config import TrainingConfig

SMALLEST_PATCH = 16
CHECKPOINT = "checkpoint.pt"
"""In the run folder; where it is, the run has begun."""


@dataclass(frozen=True)
class Relief:
    """What was given up so that a step fits the device's memory.

    Attributes:
        checkpoint_blocks: activations are recomputed although the recipe did not ask for it.
        halvings: how often the patch's longest axis was halved.
    """

    checkpoint_blocks: bool = False
    halvings: int = 0

    def patch(self, config: TrainingConfig) -> tuple[int, int, int]:
        """The largest patch, its longest axis halved (and rounded up to the network's stride) so many times."""
        shape, stride = list(config.optimisation.patch), config.unet.stride
        for _ in range(self.halvings):
            axis = shape.index(max(shape))
            shape[axis] = -(-shape[axis] // (2 * stride)) * stride
        return shape[0], shape[1], shape[2]

    def more(self, config: TrainingConfig) -> Relief | None:
        """The next rung of the ladder; None at its end."""
        if not (self.checkpoint_blocks or config.optimisation.checkpoint_blocks):
            return replace(self, checkpoint_blocks=True)
        if max(self.patch(config)) <= max(SMALLEST_PATCH, config.unet.stride):
            return None
        return replace(self, halvings=self.halvings + 1)


@dataclass
class State:
    """What changes during a run, and all that a checkpoint holds.

    Attributes:
        network: being trained.
        average: of its weights over the last steps; what validation and inference use.
        optimiser: with its moments.
        precision: anything with ``state_dict`` and ``load_state_dict``: keeps the loss scale.
        step: optimiser steps done.
        skipped: steps without a finite loss, in all and in a row.
        best: highest mean Dice of a validation so far.
        validated: the step of the last validation.
        relief: what was given up for memory.
    """

    network: UNet
    average: UNet
    optimiser: torch.optim.Optimizer
    precision: Any
    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best: float = -1.0
    validated: int = 0
    relief: Relief = Relief()

    def save(self, path: Path) -> None:
        """Writes a checkpoint.

        Raises:
            OutputError: it cannot be written; what was there is there still.
        """
        numbers = {name: getattr(self, name) for name in self._numbers}
        parts = {name: getattr(self, name).state_dict() for name in self._parts}
        content = {**numbers, "relief": asdict(self.relief), **parts}
        file = BytesIO()  # of a full disk torch would only say "unexpected pos 64 vs 0"
        torch.save(content, file)
        replace_file(path, lambda temporary: temporary.write_bytes(file.getbuffer()))

    def load(self, path: Path) -> None:
        """Takes over a checkpoint.

        Raises:
            ModelError: it is damaged, or none.
        """
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            for name in self._parts:
                getattr(self, name).load_state_dict(saved[name])
            for name in self._numbers:
                setattr(self, name, saved[name])
            self.relieve(Relief(**saved["relief"]))
        except Exception as problem:  # of a file that was cut short torch raises anything
            if is_out_of_memory(problem):
                raise
            why = " ".join(str(problem).split()) or type(problem).__name__
            found = f"a damaged checkpoint ({why[:120]})"
            remedy = "copy it again, or begin anew in another folder, with --init from the run's model"
            raise ModelError(path, found, "", remedy) from problem

    def relieve(self, relief: Relief) -> None:
        """Takes less memory from now on."""
        self.relief = relief
        self.network.checkpoint_blocks |= relief.checkpoint_blocks

    _parts = ("network", "average", "optimiser", "precision")
    _numbers = ("step", "skipped", "skipped_in_a_row", "best", "validated")


@torch.no_grad()
def update_average(average: UNet, network: UNet, decay: float, step: int) -> None:
    """Moves the average towards the network; less lazily over the first steps, where there is little to average.

    Args:
        average: moved in place, BatchNorm's statistics too.
        network: towards which.
        decay: of the average, reached after some ten times 1 / (1 - decay) steps.
        step: updates before this one.
    """
    share = 1 - min(decay, (1 + step) / (10 + step))
    mine, new = _tensors(average), _tensors(network)
    floats = [index for index, tensor in enumerate(mine) if tensor.is_floating_point()]
    torch._foreach_lerp_([mine[i] for i in floats], [new[i] for i in floats], share)
    for index in set(range(len(mine))) - set(floats):
        mine[index].copy_(new[index])


def _tensors(network: UNet) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


def averaged(network: UNet) -> UNet:
    """A copy to average into."""
    return deepcopy(network).requires_grad_(False)


@torch.no_grad()
def kept_statistics(network: UNet) -> Callable[[], None]:
    """A function that puts BatchNorm's statistics back to what they are now."""
    buffers = list(network.buffers())
    kept = [buffer.clone() for buffer in buffers]

    @torch.no_grad()
    def restore() -> None:
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)

    return restore


@torch.no_grad()
def fix_statistics(network: UNet, average: UNet) -> None:
    """Lets BatchNorm normalise by the average's statistics, and leave them; doing it again changes nothing."""
    for mine, averaged_one in zip(network.buffers(), average.buffers(), strict=True):
        mine.copy_(averaged_one)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm3d):
            module.eval()


@torch.no_grad()
def take_weights(network: UNet, weights: Mapping[str, Tensor]) -> None:
    """Starts a network from another's weights; if the numbers of outputs differ, those that both have."""
    own = network.state_dict()
    for name in own.keys() & weights.keys():
        mine, theirs = own[name].view(-1), weights[name].reshape(-1)  # the outputs are the first axis
        shared = min(len(mine), len(theirs))
        mine[:shared] = theirs[:shared]
