"""Optimisers and their schedules."""

from __future__ import annotations

import math

import torch

from cascadeseg.network.unet import UNet
from cascadeseg.training.config import OptimisationConfig

MOMENTUM = 0.99
POWER = 0.9


def optimiser_of(network: UNet, numbers: OptimisationConfig) -> torch.optim.Optimizer:
    """The recipe's optimiser.

    Adafactor (Shazeer 2018, arXiv 1804.04235) is the one with little state: no first moment, and factored second
    moments. Libraries with 8-bit moments were weighed; a slim UNet's moments are a hundredth of its activations.
    """
    rate, decay = numbers.learning_rate, numbers.weight_decay
    if numbers.optimiser == "sgd":
        return torch.optim.SGD(network.parameters(), rate, MOMENTUM, weight_decay=decay, nesterov=True)
    if numbers.optimiser == "adafactor":
        return torch.optim.Adafactor(network.parameters(), rate, weight_decay=decay)
    return torch.optim.AdamW(network.parameters(), rate, weight_decay=decay)


def learning_rate(numbers: OptimisationConfig, step: int) -> float:
    """Linear warm-up, then down to zero."""
    if step < numbers.warm_up:
        return numbers.learning_rate * (step + 1) / numbers.warm_up
    share = min(1.0, (step - numbers.warm_up) / max(1, numbers.steps - numbers.warm_up))
    if numbers.schedule == "poly":
        return float(numbers.learning_rate * (1 - share) ** POWER)
    return numbers.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
