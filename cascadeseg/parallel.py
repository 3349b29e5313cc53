"""Two things at once: what is slim leaves half of a processor's cores idle, however many threads each step may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, Thread
from typing import Protocol, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
AT_ONCE = 2
"""As many as a body has lungs: more would take more memory than was planned for."""
_COUNTING = Lock()
"""Held while the process's count of torch's threads is one thread's share."""


class Each(Protocol):
    """A way to do the same work on each item; the results come in the order of the items."""

    def __call__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]: ...


def one_by_one(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Does the same work on each item, one after the other."""
    return [work(item) for item in items]


def threads_to_share() -> bool:
    """Whether torch has a thread for each, and counts them by OpenMP, which alone gives each thread its own count."""
    openmp: bool = torch.backends.openmp.is_available()  # type: ignore[no-untyped-call]
    return openmp and own_threads() >= AT_ONCE


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
    threads, inference = own_threads(), torch.is_inference_mode_enabled()

    def in_thread(item: Item) -> Result:
        with torch.inference_mode(inference):  # which each thread has for itself, too
            return work(item)

    with ThreadPoolExecutor(AT_ONCE, initializer=_take, initargs=(threads // AT_ONCE,)) as pool:
        return list(pool.map(in_thread, items))


def own_threads() -> int:
    """How many threads torch has in the thread that calls: from when it first asks, as many as it had then."""
    with _COUNTING:
        return torch.get_num_threads()


def _take(threads: int) -> None:
    """Gives the thread that calls, which has just begun, its own count of torch's threads, and no other one.

    What sets one thread's count sets that of all threads to come, too: another thread puts it back at once, or a
    request that begins meanwhile would keep the share for good.
    """
    with _COUNTING:
        of_others = torch.get_num_threads()
        torch.set_num_threads(threads)
        restorer = Thread(target=torch.set_num_threads, args=(of_others,))
        restorer.start()
        restorer.join()
