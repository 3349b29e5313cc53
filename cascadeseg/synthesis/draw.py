"""Drawing parameters: a seeded stream of numbers for each group of a patient's parameters."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Draw:
    """A stream of random numbers that depends on the seed and the group's name only.

    Each group of parameters has its own stream, so that switching one group leaves all others as they were; within a
    stream whatever is left undrawn changes what comes after it.
    """

    def __init__(self, seed: int, group: str) -> None:
        self._rng = np.random.default_rng([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, zlib.crc32(group.encode())])

    def normal(self, mean: float, sd: float) -> float:
        """A normal number, cut at 2.2 standard deviations: no monsters."""
        return mean + sd * float(np.clip(self._rng.standard_normal(), -2.2, 2.2))

    def uniform(self, low: float, high: float) -> float:
        return float(self._rng.uniform(low, high))

    def about(self, low: float, high: float, spread: float) -> float:
        """A number of the range's middle, ``spread`` (0 to 1 and more) times as wide as the range."""
        middle = (low + high) / 2
        return middle + spread * (self.uniform(low, high) - middle)

    def lognormal(self, median: float, sigma: float, low: float, high: float) -> float:
        return float(np.clip(median * np.exp(sigma * self._rng.standard_normal()), low, high))

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """An integer of ``low .. high``, both included."""
        return int(self._rng.integers(low, high + 1))

    def pick(self, values: Sequence[T], weights: Sequence[float] | None = None) -> T:
        p = None if weights is None else np.asarray(weights, dtype=np.float64) / np.sum(weights)
        return values[int(self._rng.choice(len(values), p=p))]

    def seed(self) -> int:
        """A seed for a random field."""
        return int(self._rng.integers(2**31))
