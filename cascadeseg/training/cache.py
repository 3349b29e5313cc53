"""Prepared patients on disk, made ahead of their use by worker processes.

A case is two memory-mappable arrays: ``NAME.image.npy``, (C, X, Y, Z) float16 as the network gets it, and
``NAME.labels.npy``, (X, Y, Z) uint8. A patient held out for validation is kept whole instead: ``KEY.scan.npy`` and
``KEY.reference.npy``. ``KEY.json``, written last, names a patient's files: where it is, the patient is ready. Every
file is written under a temporary name and renamed, so several processes (also of several runs) may fill one cache, and
one that was interrupted is simply gone on with. Zarr and blosc2 were weighed: patches are read from the page cache,
where a plain ``.npy`` is as fast as memory and chunks would only have to be decompressed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from cascadeseg import synthesis
from cascadeseg._version import __version__
from cascadeseg.atomic import replace_file, replace_text
from cascadeseg.errors import ConfigError
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid
from cascadeseg.memory import is_out_of_memory
from cascadeseg.network.engine import Engine, find_device
from cascadeseg.network.model import load_model
from cascadeseg.training.cases import LabelMap, Patient, prepare
from cascadeseg.training.config import TrainingConfig

Kind = Literal["cases", "whole"]
WAIT_S = 0.2
SIGNAL_S = 2.0
"""So long a signal that is meant for the whole run may take to reach it after its workers."""
KILLED = "a process that prepares cases ran out of memory or was killed"
WHOLE_SPACING = 1.5
"""Synthetic patients held out from stage 2 are scanned at this times its spacing, as thin clinical slices are."""
PACKAGE = Path(synthesis.__file__).parents[1]
PREPARE = (
    *("geometry.py", "labels.py", "formats/scan.py"),
    *("cascade/resample.py", "cascade/locate.py", "cascade/crop.py", "cascade/refine.py", "cascade/windowed.py"),
    *("training/preflight.py", "training/cases.py", "training/cache.py"),
)
"""The files that decide the voxels of every case, of those that it has read."""
RENDER, LOCATE = ("synthesis/*.py",), ("network/*.py",)
"""Those that decide a synthetic patient's as well, and what a locator says of a patient."""


class CaseStore:
    """The prepared patients of a run."""

    def __init__(
        self,
        folder: Path,
        config: TrainingConfig,
        wanted: Sequence[tuple[Patient, Kind]],
        *,
        workers: int = 1,
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts preparing.

        Args:
            folder: of all caches; this run's is a folder in it, named after the recipe and what depends on it.
            config: of the run.
            wanted: patients in the order in which they will be needed.
            workers: processes; 0 where another process of the run prepares for this one.
            stopped: called while waiting; raises to end the wait.
        """
        folds = sorted({patient.fold for patient, _ in wanted})
        self.folder = folder / f"stage{config.stage}-{recipe_digest(config, folds)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stopped = stopped
        self._closed = False
        self._futures: dict[Path, Future[None]] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._alive: Connection | None = None
        self._wanted = [_record(self.folder, patient, kind) for patient, kind in wanted]
        missing = [one for one, record in zip(wanted, self._wanted, strict=True) if not record.exists()]
        if missing and workers:
            spawn = get_context("spawn")
            ended, self._alive = spawn.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(workers, spawn, initializer=_be_modest, initargs=(ended,))
            for patient, kind in missing:
                record = _record(self.folder, patient, kind)
                # What failed in an earlier run is tried again, and must not end processes that wait for this one.
                _failure(record).unlink(missing_ok=True)
                job = self._pool.submit(_prepare_patient, config, patient, kind, self.folder)
                job.add_done_callback(partial(self._tell_others, patient, record))
                self._futures[record] = job

    def names(self, patient: Patient) -> list[str]:
        """The names of a patient's cases; waits until they are ready."""
        names: list[str] = self._description(patient, "cases")["cases"]
        return names

    def arrays(self, name: str) -> tuple[npt.NDArray[np.float16], LabelMap]:
        """Image (C, X, Y, Z) and labels (X, Y, Z) of a case, memory-mapped."""
        image = np.load(self.folder / f"{name}.image.npy", mmap_mode="r")
        return image, np.load(self.folder / f"{name}.labels.npy", mmap_mode="r")

    def whole(self, patient: Patient) -> tuple[Scan, LabelMap]:
        """A held-out patient's canonical scan and labels; waits until they are ready."""
        about = self._description(patient, "whole")
        voxels = np.load(self.folder / f"{patient.key}.scan.npy", mmap_mode="r")
        grid = Grid(voxels.shape, np.array(about["affine"]))
        scan = Scan(voxels, grid, about["slope"], about["intercept"], source=patient.key)
        return scan, np.load(self.folder / f"{patient.key}.reference.npy", mmap_mode="r")

    def room_gb(self) -> tuple[float, float]:
        """GB of disk that the patients to come will take, if they are as large as those there are; and what is free."""
        coming = sum(not record.exists() for record in self._wanted)
        there = len(list(self.folder.glob("*.json")))
        taken = sum(path.stat().st_size for path in self.folder.glob("*.npy"))
        return coming * taken / max(1, there) / 1e9, shutil.disk_usage(self.folder).free / 1e9

    def close(self) -> None:
        """Stops the workers at once: a case that is not written whole is not there, and is made anew another time.

        Who waits for one does not any more.
        """
        self._closed = True
        if self._pool is not None and self._alive is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._alive.close()

    def _description(self, patient: Patient, kind: Kind) -> dict[str, Any]:
        record = _record(self.folder, patient, kind)
        job = self._futures.get(record)
        if job is not None:
            while not wait([job], WAIT_S).done:
                self._check()
            try:
                job.result()
            except Exception as error:
                if not (isinstance(error, BrokenProcessPool) or is_out_of_memory(error)):
                    raise
                patient_until = time.monotonic() + SIGNAL_S
                while time.monotonic() < patient_until:
                    time.sleep(WAIT_S)
                    self._check()
                found = f"{patient.key}: {KILLED}"
                raise ConfigError("data.workers", found, "", "lower it (--set data.workers=1)") from error
        failure = _failure(record)
        while not record.exists():  # another process of this run is at it
            self._check()
            if failure.exists():
                raise ConfigError("data", failure.read_text(encoding="utf-8") or f"{patient.key} cannot be prepared")
            time.sleep(WAIT_S)
        described: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        return described

    def _check(self) -> None:
        """Ends a wait: of a run that is to end, or has ended."""
        self._stopped()
        if self._closed:
            raise RuntimeError("these cases are needed no more")

    def _tell_others(self, patient: Patient, record: Path, job: Future[None]) -> None:
        """Says so to the run's other processes, which wait for the case, where the worker that made it was killed."""
        if not (self._closed or job.cancelled()) and isinstance(job.exception(), BrokenProcessPool):
            with suppress(OSError):
                _failure(record).write_text(f"{patient.key}: {KILLED}", encoding="utf-8")


def locator_folder(config: TrainingConfig, fold: int) -> str | None:
    """The folder of the locator that predicts on a fold's patients; None for the shipped one."""
    return config.locator.replace("{fold}", str(fold)) or None


def predicts_boxes(config: TrainingConfig) -> bool:
    """Whether crops come from a locator's predictions."""
    boxes = config.data.boxes
    if boxes == "auto":
        boxes = "predicted" if "{fold}" in config.locator else "perturbed"
    return config.stage == 2 and boxes == "predicted"


def recipe_digest(config: TrainingConfig, folds: Sequence[int] = (0,)) -> str:
    """Of all that decides what a patient's prepared cases look like, but for the patient.

    Args:
        config: of the run.
        folds: that patients are in: each may have a locator of its own.

    Raises:
        ModelError: a locator that is needed cannot be read.
    """
    data = config.data
    what: dict[str, Any] = {
        "view": asdict(config.view),
        "stride": config.unet.stride,
        "labels": asdict(data.labels),
        "version": __version__,
        "prepared_by": _code_digest(PREPARE),
        "synthetic": [data.preset, _code_digest(RENDER)] if data.source == "synthetic" else None,
    }
    if config.stage == 2:
        what |= {"jitter": data.box_jitter_mm, "predicted": predicts_boxes(config)}
    if predicts_boxes(config):
        folders = dict.fromkeys(locator_folder(config, fold) for fold in folds)
        locators = map(load_model, folders)
        what["located_by"] = _code_digest(LOCATE)
        what["locators"] = [[model.sha256, asdict(model.locator.view)] for model in locators]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def _code_digest(files: Sequence[str]) -> str:
    """Of some of the package's files: who changes them does not train on yesterday's cases."""
    state = hashlib.sha256()
    for pattern in files:
        for module in sorted(PACKAGE.glob(pattern)):
            state.update(module.read_bytes())
    return state.hexdigest()[:12]


_locators: dict[str | None, Engine] = {}


def _locator(config: TrainingConfig, patient: Patient) -> Engine | None:
    if not predicts_boxes(config):
        return None
    folder = locator_folder(config, patient.fold)
    if folder not in _locators:
        _locators[folder] = Engine(load_model(folder).locator, find_device(config.data.device))
    return _locators[folder]


def _prepare_patient(config: TrainingConfig, patient: Patient, kind: Kind, folder: Path) -> None:
    record = _record(folder, patient, kind)
    if record.exists():  # another process was faster
        return
    try:
        about = _save_whole(config, patient, folder) if kind == "whole" else _save_cases(config, patient, folder)
        replace_text(record, json.dumps(about))
    except Exception as error:
        with suppress(OSError):  # on a full disk it stays empty
            _failure(record).write_text(f"{patient.key}: {error}", encoding="utf-8")
        raise
    _failure(record).unlink(missing_ok=True)


def _record(folder: Path, patient: Patient, kind: Kind) -> Path:
    """Names a patient's files; written last."""
    return folder / f"{patient.key}.{kind}.json"


def _failure(record: Path) -> Path:
    """Where a worker says why there will be no such record."""
    return record.with_suffix(".failed")


def _save_cases(config: TrainingConfig, patient: Patient, folder: Path) -> dict[str, Any]:
    cases = prepare(patient, config, _locator(config, patient))
    for case in cases:
        _save(folder / f"{case.name}.image.npy", case.image.half().numpy())
        _save(folder / f"{case.name}.labels.npy", case.labels.numpy())
    return {"cases": [case.name for case in cases]}


def _save_whole(config: TrainingConfig, patient: Patient, folder: Path) -> dict[str, Any]:
    scan, labels = patient.whole(config.view.spacing_mm * (WHOLE_SPACING if config.stage == 2 else 1.0))
    _save(folder / f"{patient.key}.scan.npy", scan.voxels)
    _save(folder / f"{patient.key}.reference.npy", labels)
    return {"affine": scan.grid.affine.tolist(), "slope": float(scan.slope), "intercept": float(scan.intercept)}


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    whole = np.ascontiguousarray(array)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(whole))
            file.write(whole.data)  # of a full disk `np.save` would only say "88000 requested and 55232 written"

    replace_file(path, write)


def _be_modest(ended: Connection) -> None:
    """Workers leave the processor to the loop, Ctrl-C to their parent, and do not outlive it (also if it is killed).

    Args:
        ended: has something to say (its end) when the workers are no longer wanted.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(4)  # more, and on few processors the loop would wait for the workers it displaces
    threading.Thread(target=_end_with, args=(ended,), daemon=True).start()


def _end_with(ended: Connection) -> None:
    ended.poll(None)
    os._exit(1)
