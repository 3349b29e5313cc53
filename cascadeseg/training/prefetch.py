"""Patches ahead of the loop, and the wishes to end it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

from cascadeseg.training.state import Relief

T = TypeVar("T")
WAIT_S = 0.2
SAME_SIGNAL_S = 1.0
"""`timeout` and schedulers send one signal twice, to the process and to its group."""


class Stopped(Exception):  # noqa: N818 (it is no error)
    """Raised where something waits while the run is to end."""


class Stop:
    """Whether the run is to end before its last step: by a signal, or because its time is up.

    A signal only leaves a note, and the loop ends after the step under way: a checkpoint never holds half a step. The
    second one interrupts at once, but not what comes within `SAME_SIGNAL_S`.
    """

    def __init__(self, time_limit_s: float | None = None) -> None:
        self.interrupted = False
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s

    @property
    def asked(self) -> bool:
        """Whether to end."""
        return self.interrupted or (self._deadline is not None and time.monotonic() > self._deadline)

    def check(self) -> None:
        """Ends a wait.

        Raises:
            Stopped: the run is to end.
        """
        if self.asked:
            raise Stopped

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM (a scheduler's time limit) and Ctrl-C are heard here; only in the main thread can they be."""

        first = math.inf

        def note(signum: int, frame: object) -> None:
            nonlocal first
            if time.monotonic() > first + SAME_SIGNAL_S:
                raise KeyboardInterrupt
            first = min(first, time.monotonic())
            self.interrupted = True

        try:
            before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Prefetch(Generic[T]):
    """Makes what steps need in threads, some steps ahead.

    Attributes:
        waited_s: how long the loop has waited in all.
    """

    def __init__(self, make: Callable[[int, Relief], T], ahead: int, last: int, stop: Stop, threads: int) -> None:
        """Nothing is made yet.

        Args:
            make: makes what a step needs; a function of the step and the relief alone.
            ahead: steps that are made before they are asked for.
            last: steps in all.
            stop: ends waits.
            threads: that make.
        """
        self.waited_s = 0.0
        self._make, self._ahead, self._last, self._stop = make, ahead, last, stop
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="patches")
        self._futures: dict[tuple[int, Relief], Future[T]] = {}

    def __call__(self, step: int, relief: Relief) -> T | None:
        """What a step needs; None if the run was told to end meanwhile."""
        began = time.perf_counter()
        for ahead in range(step, min(step + self._ahead + 1, self._last)):
            if (ahead, relief) not in self._futures:
                self._futures[ahead, relief] = self._pool.submit(self._make, ahead, relief)
        self._futures = {key: job for key, job in self._futures.items() if key[0] >= step and key[1] == relief}
        try:
            return self._result(self._futures[step, relief])
        finally:
            self.waited_s += time.perf_counter() - began

    def _result(self, job: Future[T]) -> T | None:
        while not self._stop.asked:
            if wait([job], WAIT_S).done:
                try:
                    return job.result()
                except Stopped:
                    break
        return None

    def close(self) -> None:
        """Makes no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
