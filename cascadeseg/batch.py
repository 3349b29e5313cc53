"""The scans of one `cascadeseg infer`: segmented one after another or in several processes, each told when it is done.

Heavy libraries are imported inside the functions, so that the command line can answer at once.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from cascadeseg.errors import DeviceError, ModelError, OutputError
from cascadeseg.machine import bound_processors, processors
from cascadeseg.terminal import complain, in_one_line, progress_bar, say, survive_odd_terminals

if TYPE_CHECKING:
    from concurrent.futures import Future
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from cascadeseg.cascade.pipeline import Segmentation, Segmenter
    from cascadeseg.evaluation.report import Row
    from cascadeseg.formats import Scan
    from cascadeseg.outputs import Job

PATIENCE_S = 3.0
"""How long interrupted processes may take to notice that by themselves."""
_T = TypeVar("_T")
_Timed = tuple[_T, dict[str, float]]
"""Something, and the seconds of each step that led to it."""


@dataclass
class Loader:
    """The segmenter, loaded when the first scan turned out to be readable, and then kept.

    Attributes:
        model: a model folder, or None for the shipped one.
        device: as for `Segmenter`, like the rest.
        loaded: the segmenter, once it was needed.
    """

    model: str | None
    device: str
    max_memory_gb: float | None = None
    max_vram_gb: float | None = None
    loaded: Segmenter | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Loader:
        """As the options of ``cascadeseg infer`` have it."""
        return cls(options.model, options.device, options.max_memory, options.max_vram)

    def __call__(self) -> Segmenter:
        if self.loaded is None:
            from cascadeseg.cascade.pipeline import Segmenter

            self.loaded = Segmenter(
                self.model,
                device=self.device,
                max_memory_gb=self.max_memory_gb,
                max_vram_gb=self.max_vram_gb,
            )
        return self.loaded


def segment_all(jobs: Sequence[Job], options: argparse.Namespace) -> Iterator[Row]:
    """Segments scans, tells each, and gives its row of the table. A scan that fails is told, and is no reason to stop.

    Args:
        jobs: the scans, and where their results go.
        options: of ``cascadeseg infer``.

    Raises:
        ModelError, DeviceError: no other scan would fare better.
    """
    if min(options.jobs, len(jobs)) > 1:
        yield from _in_processes(jobs, options)
    else:
        set_up_libraries()
        yield from _one_by_one(jobs, Loader.of(options), options)


# -------------------------------------------------------------------------------------------------- one process


def _one_by_one(jobs: Sequence[Job], load: Loader, options: argparse.Namespace) -> Iterator[Row]:
    """While a scan is segmented the next is read and the last is written; with limited memory one follows another."""
    from concurrent.futures import ThreadPoolExecutor, wait

    writing: Future[Row] | None = None
    with ThreadPoolExecutor(1) as writer:
        for job, reading in _read_ahead(jobs, load, options):
            segmented = _segment_one(job, reading, load, options)
            if writing is not None:
                yield writing.result()
            writing = writer.submit(_finish_one, job, segmented, options)
            del segmented
            if options.max_memory is not None:
                wait([writing])
    if writing is not None:
        yield writing.result()


def _read_ahead(
    jobs: Sequence[Job], load: Loader, options: argparse.Namespace
) -> Iterator[tuple[Job, Future[_Timed[Scan]]]]:
    """Each job with its scan, which is being read; the next is read meanwhile unless memory is limited."""
    from concurrent.futures import ThreadPoolExecutor

    def read_one(job: Job) -> _Timed[Scan]:
        seconds: dict[str, float] = {}
        with timed(seconds, "read"):
            return read(job.scan, options, load, job.labels), seconds

    ahead = 1 if options.max_memory is None else 0
    waiting = iter(jobs)
    with ThreadPoolExecutor(1) as reader:
        readings: deque[tuple[Job, Future[_Timed[Scan]]]] = deque()
        for _ in jobs:
            readings.extend((job, reader.submit(read_one, job)) for job in islice(waiting, 1 + ahead - len(readings)))
            yield readings.popleft()


def _segment_one(
    job: Job, reading: Future[_Timed[Scan]], load: Loader, options: argparse.Namespace
) -> _Timed[Segmentation] | str:
    """The segmentation of one scan, or the line that told why there is none."""
    _import_pipeline()  # while the scan is being read: torch takes a second
    try:
        scan, seconds = reading.result()
    except (ModelError, DeviceError):
        raise
    except Exception as error:
        return _tell_failure(job, error, options)
    segmenter = load()
    try:
        with progress_bar(job.scan.name, options.quiet or options.jobs > 1) as progress:
            return segmenter.segment(scan, progress=progress), seconds
    except Exception as error:
        return _tell_failure(job, error, options)


def _finish_one(job: Job, segmented: _Timed[Segmentation] | str, options: argparse.Namespace) -> Row:
    """Writes and tells the results of one scan; its row of the table."""
    from cascadeseg.evaluation.report import failed_row, result_row

    if isinstance(segmented, str):
        return failed_row(job.scan, segmented)
    result, seconds = segmented
    try:
        write_results(job, result, seconds)
    except Exception as error:
        return failed_row(job.scan, _tell_failure(job, error, options))
    for warning in result.warnings:
        complain(f"{job.scan}: warning: {warning}")
    if not options.quiet:
        say(summary(job, result, seconds))
    if options.verbose:
        say(details(job, result))
    return result_row(job.scan, job.labels, result, seconds)


# --------------------------------------------------------------------------------------------- several processes


def _in_processes(jobs: Sequence[Job], options: argparse.Namespace) -> Iterator[Row]:
    """Each process takes the next scan when it is done with one, and has its share of processors and memory.

    Processes and not threads, as what lies between the convolutions keeps the interpreter's lock. One that is ended
    from outside costs the scan that it was at; another takes its place. None outlives this one.
    """
    from multiprocessing.connection import wait

    count = min(options.jobs, len(jobs))
    waiting = iter(jobs)
    at_work = dict(_started(job, count, options) for job in islice(waiting, count))
    try:
        while at_work:
            ready: list[Connection] = wait(list(at_work))  # type: ignore[assignment]
            for connection in ready:
                process, job = at_work.pop(connection)
                row = _answer(connection)
                following = next(waiting, None)
                if following is None:
                    connection.close()
                    process.join()
                elif row is not None and _taken(connection, following):
                    at_work[connection] = (process, following)
                else:
                    at_work |= [_started(following, count, options)]
                yield row or _lost(job)
    finally:
        _end(at_work)


def _taken(connection: Connection, job: Job) -> bool:
    """Whether a process is still there to take a scan."""
    try:
        connection.send(job)
    except OSError:
        return False
    return True


def _answer(connection: Connection) -> Row | None:
    """The row of a scan, or None where its process is gone; raises what stops them all."""
    try:
        answer: Row | ModelError | DeviceError = connection.recv()
    except (EOFError, OSError):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _lost(job: Job) -> Row:
    """Of a scan whose process was ended from outside, which is told."""
    from cascadeseg.evaluation.report import failed_row

    line = f"{job.scan}: its process was ended, maybe for its memory; use fewer --jobs, or --max-memory"
    complain(line)
    return failed_row(job.scan, line)


def _started(job: Job, count: int, options: argparse.Namespace) -> tuple[Connection, tuple[SpawnProcess, Job]]:
    """A process at its first scan, and the way to talk to it."""
    from multiprocessing import get_context

    limits = {name: getattr(options, name) for name in ("max_memory", "max_vram")}
    shares = {name: limit / count for name, limit in limits.items() if limit}
    threads = max(1, processors() // count)
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, argparse.Namespace(**vars(options) | shares), threads))
    with _ctrl_c_waits():
        process.start()
    theirs.close()
    ours.send(job)
    return ours, (process, job)


def _serve(connection: Connection, options: argparse.Namespace, threads: int) -> None:
    """What each process does: a row for every job, or the error that stops them all, until nobody asks any more."""
    survive_odd_terminals()
    with suppress(EOFError, OSError, KeyboardInterrupt), interrupted_once_by(signal.SIGINT, signal.SIGTERM):
        _ctrl_c_comes()
        import_when_used("torch._meta_registrations")
        set_up_libraries(threads)
        load = Loader.of(options)
        while True:
            job = connection.recv()
            try:
                connection.send(next(_one_by_one([job], load, options)))
            except (ModelError, DeviceError) as error:
                connection.send(error)
    os._exit(0)  # as `cli.program` ends, and for its reasons


def _end(at_work: dict[Connection, tuple[SpawnProcess, Job]]) -> None:
    """Ends processes, those that are at a scan in the middle of it, nothing half written."""
    for connection in at_work:
        connection.close()
    processes = [process for process, _ in at_work.values()]
    for end in ("terminate", "kill"):  # an interruption in an import may be lost, and leave its thread waiting for ever
        patient_until = time.monotonic() + PATIENCE_S  # Ctrl-C goes to all processes of a terminal
        for process in processes:
            process.join(max(0.0, patient_until - time.monotonic()))
        for process in processes:
            getattr(process, end)()
    for process in processes:
        process.join()


@contextmanager
def interrupted_once_by(*signals: signal.Signals) -> Iterator[None]:
    """The first of these signals ends the block as Ctrl-C does; what comes after it is ignored.

    SIGTERM is what schedulers and containers send. Not those that somebody else already listens to, nor outside the
    main thread, which alone hears signals.
    """

    def interrupt(*_: object) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # `timeout` sends SIGTERM twice: to us, and to our group
        raise KeyboardInterrupt

    heard = signals if threading.current_thread() is threading.main_thread() else ()
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number in heard if (handler := signal.getsignal(number)) in usual}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Ctrl-C comes after the block, and in a process that is started in it once that asks for it, not as it imports."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # which would be started with the first process, and lets Ctrl-C through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ctrl_c_comes() -> None:
    """What waited, in a process that was started while `_ctrl_c_waits`, comes now."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


# ------------------------------------------------------------------------------------------------ what both need


def read(path: Path, options: argparse.Namespace, load: Loader | None = None, labels: Path | None = None) -> Scan:
    """A scan; before its voxels are read, its header says whether ``labels`` can be its mask, and, where memory is
    limited or its plan is to be told, what it needs.
    """
    from cascadeseg.formats import check_source, read_scan

    def planned(outline: Scan) -> None:
        if labels is not None:
            check_source(labels, outline)
        if load is not None and (options.verbose or options.max_memory or options.max_vram):
            plan = load().plan(outline)
            if options.verbose:
                say(f"{path}: {plan}")

    return read_scan(path, series=options.series, volume=options.volume, before=planned)


def write_results(job: Job, result: Segmentation, seconds: dict[str, float]) -> None:
    """Writes the mask, the picture and the report; adds the segmentation's and its own times to ``seconds``."""
    from cascadeseg.atomic import replace_file, replace_text
    from cascadeseg.formats import holds_labels, write_labels

    seconds |= {step: value for step, value in result.seconds.items() if step not in seconds}
    with timed(seconds, "write"):
        if not job.keeps:
            write_labels(result.labels, job.labels, result.scan, result.model)
            for path in job.outputs[1:]:  # they speak of the mask that was there
                with suppress(OSError):
                    path.unlink()
        elif not holds_labels(job.labels, result.labels, result.scan):
            remedy = "choose another place with -o, or overwrite with --force"
            raise OutputError(job.labels, "a mask that was edited, or made otherwise", "that of now", remedy)
    if job.preview is not None:
        from cascadeseg.evaluation.preview import preview_png

        with timed(seconds, "preview"):
            title = f"{job.scan.name}:  {_volumes(result)};  {_verdict(result)}"
            picture = preview_png(result.scan, result.labels, title)
            replace_file(job.preview, lambda part: part.write_bytes(picture))
    if job.report is not None:
        from cascadeseg.evaluation.report import report_json

        kinds = {"labels": job.labels, "preview": job.preview, "report": job.report}
        written = {kind: path for kind, path in kinds.items() if path is not None}
        replace_text(job.report, report_json(result, written, seconds))


def summary(job: Job, result: Segmentation, seconds: dict[str, float]) -> str:
    """The line that tells a scan's result."""
    memory = "" if math.isnan(result.peak_memory_mb) else f"peak {result.peak_memory_mb:,.0f} MB; "
    split = ", ".join(f"{step} {value:.1f}" for step, value in seconds.items())
    return (
        f"{job.scan}: {_volumes(result)}; {_verdict(result)}; {sum(seconds.values()):.1f} s ({split}); "
        f"{memory}{job.labels}"
    )


def _verdict(result: Segmentation) -> str:
    """Whether to look at the mask, in two words, and the quality where the model has one."""
    quality = "" if result.quality is None else f", quality {result.quality:.2f}"
    return f"verdict {result.verdict}{quality}"


def _volumes(result: Segmentation) -> str:
    return ", ".join(f"{lung.label.title} {lung.volume_ml:,.0f} ml" for lung in result.lungs)


def details(job: Job, result: Segmentation) -> str:
    """What ``--verbose`` adds: the scan, the model, every lung, every file."""
    model = " ".join(result.model.get(key, "") for key in ("name", "version")).strip()
    lines = [f"scan: {geometry(result.scan)}", f"model: {model}, on {result.device} in {result.precision}"]
    for lung in result.lungs:
        whole = f"touches the {' and '.join(lung.touches)} border" if lung.touches else "whole"
        hu = f"mean {lung.mean_hu:.0f} HU, {whole}" if lung.mean_hu is not None else "not found"
        quality = "" if lung.quality is None else f", quality {lung.quality:.3f}"
        lines.append(f"{lung.label.title}: {hu}, crop grown {lung.regrown} times, {lung.verdict}{quality}")
    lines += [f"{'kept' if job.keeps and path == job.labels else 'wrote'} {path}" for path in job.outputs]
    return "\n".join(f"  {line}" for line in lines)


def geometry(scan: Scan) -> str:
    """Size, spacing and orientation in a few words."""
    shape = " x ".join(map(str, scan.grid.shape))
    spacing = " x ".join(f"{s:.4g}" for s in scan.grid.spacing_mm)
    return f"{shape} voxels of {spacing} mm, {scan.grid.orientation}"


def _tell_failure(job: Job, error: Exception, options: argparse.Namespace) -> str:
    """One line about a scan that failed, which is told and given back."""
    line = in_one_line(error, job.scan) or own_fault(job.scan, error) + " with the output of --verbose"
    if options.verbose:
        traceback.print_exception(error)
    complain(line)
    return line


def own_fault(scan: Path, error: Exception) -> str:
    """A line about a scan that failed for no fault of the user's."""
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{scan}: failed with {what}; this is a fault of cascadeseg, please report it"


@contextmanager
def timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    """Notes how long the block took."""
    start = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - start


# ------------------------------------------------------------------------------------------- before torch is there


def limit_threads(threads: int | None = None) -> None:
    """Has torch, before it is loaded, take so many threads; who set it is obeyed.

    Args:
        threads: how many; None: one for each processor that a container leaves of those that torch would count, which
            would be stopped again and again for taking more.
    """
    if threads or processors() < bound_processors():
        os.environ.setdefault("OMP_NUM_THREADS", str(threads or processors()))


def set_up_libraries(threads: int | None = None) -> None:
    """What libraries want to know before torch is loaded; no result depends on it, and who set it is obeyed.

    Threads of torch that wait for each other sleep instead of spinning: on a busy machine three times faster. And
    oneDNN remembers as many convolutions as one pass takes, not 1,024; and all threads share a heap.

    Args:
        threads: as for `limit_threads`.
    """
    limit_threads(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    from cascadeseg.memory import share_one_heap

    share_one_heap()


@cache
def _import_pipeline() -> None:
    """Imports torch and all that segments.

    A tenth of a second went into looking for garbage among 170,000 new objects, which are there to stay.
    """
    gc.disable()
    try:
        import cascadeseg.cascade.pipeline  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def import_when_used(name: str) -> None:
    """From now on whoever imports a module gets a stand-in, which imports it when something is looked up in it."""
    stand_in = ModuleType(name)

    def looked_up(attribute: str) -> Any:
        if attribute.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(attribute)
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return getattr(import_module(name), attribute)

    stand_in.__dict__["__getattr__"] = looked_up
    sys.modules.setdefault(name, stand_in)
