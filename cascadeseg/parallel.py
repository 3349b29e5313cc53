"""Two things at once: what is slim leaves half of a processor's cores idle, however many threads each step may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
AT_ONCE = 2
"""As many as a body has lungs: more would take more memory than was planned for."""


class Each(Protocol):
    """A way to do the same work on each item; the results come in the order of the items."""

    def __call__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]: ...


def one_by_one(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Does the same work on each item, one after the other."""
    return [work(item) for item in items]


def threads_to_share() -> bool:
    """Whether torch has a thread for each, and counts them by OpenMP, which alone gives each thread its own count."""
    openmp: bool = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    return openmp and torch.get_num_threads() >= AT_ONCE


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Does the same work on each item, `AT_ONCE` at a time, each in a thread with its share of torch's threads.

    One after the other where there are no `threads_to_share`.

    Args:
        work: releases the interpreter's lock for most of its time.
        items: on which.

    Returns:
        The results, in the order of the items.

    Raises:
        Exception: what ``work`` raised first; the others have ended by then.
    """
    if len(items) < AT_ONCE or not threads_to_share():
        return one_by_one(work, items)
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def in_thread(item: Item) -> Result:
        with torch.inference_mode(inference):  # which each thread has for itself, too
            return work(item)

    try:
        with ThreadPoolExecutor(AT_ONCE, initializer=torch.set_num_threads, initargs=(threads // AT_ONCE,)) as pool:
            return list(pool.map(in_thread, items))
    finally:
        torch.set_num_threads(threads)
