"""What the command line says: results on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from cascadeseg.errors import CascadesegError
from cascadeseg.memory import is_out_of_memory

Progress = Callable[[str, float], None]
_bars: list[Any] = []
"""What is drawn at the moment."""


@contextmanager
def progress_bar(name: str, quiet: bool) -> Iterator[Progress]:
    """A callback that draws a bar on stderr, where that is a terminal; elsewhere it does nothing."""
    if quiet or not sys.stderr.isatty():
        yield lambda step, done: None
        return
    from tqdm import tqdm

    form = "{desc} |{bar:30}| {percentage:3.0f}% {elapsed}"
    with tqdm(total=1.0, desc=name, bar_format=form, leave=False) as bar:
        _bars.append(bar)

        def show(step: str, done: float) -> None:
            bar.set_description_str(f"{name}: {step}", refresh=False)
            bar.n = min(done, 1.0)
            bar.refresh()

        try:
            yield show
        finally:
            _bars.remove(bar)


def say(text: str) -> None:
    """A result, on stdout. A reader that went away (``| head``) is no reason to stop segmenting."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """A line on stderr, if somebody reads it."""
    _write(sys.stderr, f"cascadeseg: {' '.join(text.split())}")


def _write(stream: TextIO, line: str) -> None:
    """A line of its own, also while a bar is drawn: one scan is told while the next is segmented."""
    bar = next(iter(_bars), None)  # of another thread, perhaps, which takes it away when it likes
    try:
        with nullcontext() if bar is None else bar.external_write_mode(file=stream):
            stream.write(f"{line}\n")
            stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def in_one_line(error: Exception, scan: Path | None = None) -> str | None:
    """What the user can mend, in one line that names the scan; None for a fault of our own."""
    if isinstance(error, CascadesegError):
        return str(error)
    if is_out_of_memory(error):
        where = f"{scan}: " if scan else ""
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            return f"{where}out of memory; crop the scan, or use a larger machine"
        return f"{where}out of the device's memory; use --device cpu"
    if isinstance(error, OSError):
        return f"{error.filename or 'system'}: {error.strerror or error}"
    return None


def survive_odd_terminals() -> None:
    """File names that the terminal's encoding cannot say are shown escaped, and streams that are closed take anything,
    instead of ending the program.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
