"""Training cases: what a stage will see of a patient, prepared once by inference's own functions and kept on disk.

A case is two memory-mappable arrays: ``NAME.image.npy``, (C, X, Y, Z) float16 as the network gets it, and
``NAME.labels.npy``, (X, Y, Z) uint8. ``PATIENT.json``, written last, names a patient's cases: none, one (stage 1) or
one a lung (stage 2); where it is there, the patient is ready.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cascadeseg.cascade.crop import crop_lungs, settle_sides
from cascadeseg.cascade.locate import Coarse, coarse_grid, locate
from cascadeseg.cascade.refine import lung_image, mirrored
from cascadeseg.cascade.resample import resample_scan, resample_volume
from cascadeseg.errors import ConfigError, ScanError
from cascadeseg.formats import read_labels, read_scan
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid, canonical_view
from cascadeseg.labels import BACKGROUND, IGNORE, LUNGS, Label
from cascadeseg.network.engine import Engine
from cascadeseg.network.model import Stage, load_model
from cascadeseg.synthesis import PRESETS, render, sample_patient
from cascadeseg.training.config import TrainingConfig

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Prepared:
    """One case in memory.

    Attributes:
        name: unique among the cases of a run.
        image: (C, X, Y, Z) float32, as the network gets it.
        labels: (X, Y, Z) uint8: stage 1: 0, 1 right, 2 left; stage 2: 0, 1; `IGNORE` where nothing is asked.
    """

    name: str
    image: Tensor
    labels: Tensor


def stage1_case(name: str, scan: Scan, labels: npt.NDArray[Any], config: TrainingConfig) -> Prepared:
    """The whole canonical scan as the locator sees it."""
    grid = coarse_grid(scan, config.view)
    image = resample_scan(scan, grid, config.view, CPU)[None]
    return Prepared(name, image, labels_on(labels, scan.grid, grid))


def stage2_case(
    name: str,
    scan: Scan,
    labels: npt.NDArray[Any],
    coarse: Coarse,
    label: Label,
    grid: Grid,
    config: TrainingConfig,
) -> Prepared:
    """One lung's crop as the refiner sees it."""
    image = lung_image(scan, coarse, label, grid, config.view, CPU)
    sided = mirrored(labels_on(labels, scan.grid, grid), label)
    other = [lung.value for lung in LUNGS if lung != label]
    target = torch.where(sided == label.value, 1, sided)
    target[torch.isin(sided, torch.tensor(other, dtype=sided.dtype))] = BACKGROUND
    return Prepared(name, image, target.to(torch.uint8))


def labels_on(labels: npt.NDArray[Any], source: Grid, target: Grid) -> Tensor:
    """A label map on another grid: each label's share is interpolated, and one with more than half has the voxel."""
    if source.matches(target):
        return torch.from_numpy(np.ascontiguousarray(labels, dtype=np.uint8))
    result = torch.zeros(target.shape, dtype=torch.uint8)
    for value in (*(lung.value for lung in LUNGS), IGNORE):
        mask = labels == value
        if mask.any():
            share = resample_volume(torch.from_numpy(np.ascontiguousarray(mask)), source, target)
            result[share > 0.5] = value
    return result


class SyntheticPatients:
    """Patients that come from the synthetic chest CT, by number."""

    def __init__(self, config: TrainingConfig, locator: Stage | None) -> None:
        if config.data.preset not in PRESETS:
            raise ConfigError("data.preset", config.data.preset, "one of " + ", ".join(PRESETS))
        self.config = config
        self._locator = locator

    def prepare(self, number: int) -> list[Prepared]:
        """The cases of one patient."""
        seed = self.config.data.seed + number
        patient = sample_patient(seed, PRESETS[self.config.data.preset])
        name = f"synthetic_{seed:06d}"
        if self.config.stage == 1:
            scan, labels = _rendered(patient, patient.field_of_view(self.config.view.spacing_mm))
            return [stage1_case(name, scan, labels, self.config)]
        scan, _ = _rendered(patient, patient.field_of_view(self._engine.stage.view.spacing_mm))
        coarse = settle_sides(locate(scan, self._engine))
        cases = []
        for lung in crop_lungs(coarse):
            grid = lung.extent(self.config.view.spacing_mm, self.config.unet.stride)
            crop, labels = _rendered(patient, grid)
            cases.append(stage2_case(f"{name}_{lung.label.side}", crop, labels, coarse, lung.label, grid, self.config))
        return cases

    @cached_property
    def _engine(self) -> Engine:
        if self._locator is None:
            raise ConfigError("locator", "none", "a model folder with a trained stage 1", "train stage 1 first")
        return Engine(self._locator, CPU)


class FolderPatients:
    """Patients of a folder in nnU-Net's raw layout whose labels are ours (0, 1 right lung, 2 left lung)."""

    def __init__(self, config: TrainingConfig, locator: Stage | None) -> None:
        self.config = config
        self._locator = locator
        self._folder = Path(config.data.source)
        self.images = sorted((self._folder / "imagesTr").glob("*_0000.nii.gz"))
        if not self.images:
            raise ConfigError(
                "data.source",
                str(self._folder),
                "a folder with imagesTr/CASE_0000.nii.gz and labelsTr/CASE.nii.gz",
            )

    def prepare(self, number: int) -> list[Prepared]:
        """The cases of one patient."""
        path = self.images[number]
        name = path.name.removesuffix("_0000.nii.gz")
        scan = read_scan(path)
        label_path = self._folder / "labelsTr" / f"{name}.nii.gz"
        labels, grid = read_labels(label_path)
        if not grid.matches(scan.grid, tolerance_mm=0.1):
            raise ScanError(label_path, f"a grid of {grid.shape}", f"that of its scan, {scan.grid.shape}")
        canonical, labels = scan.canonical(), canonical_view(labels, grid)
        if self.config.stage == 1:
            return [stage1_case(name, canonical, labels, self.config)]
        if self._locator is None:
            raise ConfigError("locator", "none", "a model folder with a trained stage 1", "train stage 1 first")
        coarse = settle_sides(locate(canonical, Engine(self._locator, CPU)))
        return [
            stage2_case(
                f"{name}_{lung.label.side}", canonical, labels, coarse, lung.label,
                lung.extent(self.config.view.spacing_mm, self.config.unet.stride), self.config,
            )
            for lung in crop_lungs(coarse)
        ]  # fmt: skip


Patients = SyntheticPatients | FolderPatients


def _rendered(patient: Any, grid: Grid) -> tuple[Scan, npt.NDArray[np.uint8]]:
    phantom = render(patient, grid)
    voxels = phantom.hu.round().clamp(-32768, 32767).to(torch.int16).numpy()
    return Scan(voxels, grid, source="synthetic"), phantom.labels.numpy()


class CaseStore:
    """Prepared patients on disk; those that are not there yet are made ahead of their use by worker processes."""

    def __init__(self, folder: Path, config: TrainingConfig, numbers: Sequence[int]) -> None:
        """Starts preparing.

        Args:
            folder: of the cases; made if missing; what is in it is taken as it is.
            config: of the run.
            numbers: patients in the order in which they will be wanted.
        """
        self.folder = folder
        self._config = config
        folder.mkdir(parents=True, exist_ok=True)
        missing = [number for number in numbers if not self._record(number).exists()]
        self._futures: dict[int, Future[None]] = {}
        self._pool: ProcessPoolExecutor | None = None
        if missing:
            self._pool = ProcessPoolExecutor(
                max(1, config.data.workers), mp_context=get_context("spawn"), initializer=_be_modest
            )
            for number in missing:
                self._futures[number] = self._pool.submit(_prepare_patient, config, number, self.folder)

    def names(self, number: int) -> list[str]:
        """The names of a patient's cases; waits until they are ready."""
        future = self._futures.pop(number, None)
        if future is not None:
            future.result()
        names: list[str] = json.loads(self._record(number).read_text(encoding="utf-8"))["cases"]
        return names

    def arrays(self, name: str) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.uint8]]:
        """Image (C, X, Y, Z) and labels (X, Y, Z) of a case, memory-mapped."""
        image = np.load(self.folder / f"{name}.image.npy", mmap_mode="r")
        return image, np.load(self.folder / f"{name}.labels.npy", mmap_mode="r")

    def close(self) -> None:
        """Stops the workers; what they have not begun is left."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _record(self, number: int) -> Path:
        return self.folder / f"patient_{self._config.data.seed + number:06d}.json"


def patients_of(config: TrainingConfig) -> Patients:
    """The source of a run's patients."""
    locator = load_model(config.locator or None).locator if config.stage == 2 else None
    kind = SyntheticPatients if config.data.source == "synthetic" else FolderPatients
    return kind(config, locator)


_patients: dict[str, Patients] = {}


def _prepare_patient(config: TrainingConfig, number: int, folder: Path) -> None:
    key = repr(config)
    if key not in _patients:
        _patients[key] = patients_of(config)
    cases = _patients[key].prepare(number)
    for case in cases:
        _save(folder / f"{case.name}.image.npy", case.image.half().numpy())
        _save(folder / f"{case.name}.labels.npy", case.labels.numpy())
    record = folder / f"patient_{config.data.seed + number:06d}.json"
    temporary = record.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(json.dumps({"cases": [case.name for case in cases]}), encoding="utf-8")
    temporary.replace(record)


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.part")
    with temporary.open("wb") as file:
        np.save(file, np.ascontiguousarray(array))
    temporary.replace(path)


def _be_modest() -> None:
    """Workers leave the processor to the training loop."""
    torch.set_num_threads(1)
    if hasattr(os, "nice"):
        os.nice(10)
