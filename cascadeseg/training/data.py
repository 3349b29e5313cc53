"""The data of a run: who is trained on and who is held out, and the patches of every step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from cascadeseg.atomic import replace_text
from cascadeseg.errors import ConfigError
from cascadeseg.labels import IGNORE
from cascadeseg.machine import processors
from cascadeseg.synthesis import PRESETS
from cascadeseg.training.augmentation import Cut, cut, padded, varied
from cascadeseg.training.cache import CaseStore, Kind
from cascadeseg.training.cases import FilePatient, Patient, SyntheticPatient, unknown_tissues
from cascadeseg.training.config import DataConfig, TrainingConfig
from cascadeseg.training.listing import listing, sides
from cascadeseg.training.preflight import READERS, Inspected, inspect
from cascadeseg.training.state import CHECKPOINT, Relief

LARGEST_BATCH = 4096
TELL_EVERY_S = 30.0
NAMED_AT_MOST = 10
"""Warnings that are told one by one, and cases that a message names."""


class Data:
    """Training and held-out patients, and patches by step and index.

    Attributes:
        training: patients; of synthetic ones those that the run gets to in its steps.
        validation: those of the held-out ones that validations segment.
        warnings: what is odd about the scans of both, one line each.
    """

    def __init__(
        self,
        config: TrainingConfig,
        output: Path,
        *,
        prepares: bool = True,
        stopped: Callable[[], None] = lambda: None,
    ) -> None:
        """Finds the patients, and starts preparing them.

        Args:
            config: of the run.
            output: the run folder, which keeps the split.
            prepares: whether this process starts workers (one of each machine does).
            stopped: called while waiting for a case, or for the data set to be examined; raises to end the wait.

        Raises:
            ConfigError, ModelError: the recipe names what is not there.
            ExceptionGroup: of everything that is wrong with the data set.
        """
        self.config = config
        self.training, held_out = patients_of(config, output / "split.json", stopped)
        self.validation = held_out[: config.data.validation]
        self.warnings = _warnings([*self.training, *self.validation])
        first = self.training[: config.data.initial]
        order: list[tuple[Patient, Kind]] = [(patient, "cases") for patient in first]
        order += [(patient, "whole") for patient in self.validation]
        order += [(patient, "cases") for patient in self.training[len(first) :]]
        folder = Path(config.data.cache) if config.data.cache else output / "cases"
        workers = (config.data.workers or max(1, processors() - 1)) if prepares else 0
        self.store = CaseStore(folder, config, order, workers=workers, stopped=stopped)

    def prepare_first(self, tell: Callable[[str], None]) -> None:
        """Waits for the patients that the first step may ask for.

        Args:
            tell: hears what is odd about their scans, and now and then how many are ready.

        Raises:
            Stopped: the run is to end.
        """
        for line in self.warnings[:NAMED_AT_MOST]:
            tell(line)
        if len(self.warnings) > NAMED_AT_MOST:
            tell(f"and {len(self.warnings) - NAMED_AT_MOST} more warnings")
        began = told = time.monotonic()
        known = self._known(0)
        for number, patient in enumerate(self.training[:known], start=1):
            self.store.names(patient)
            if number == known or time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                tell(f"patients ready: {number} of {known} after {told - began:.0f} s")
        coming_gb, free_gb = self.store.room_gb()
        if coming_gb > free_gb:
            found = f"the patients to come will take about {coming_gb:,.1f} GB of {self.store.folder}"
            tell(f"warning: {found}, where {free_gb:,.1f} GB are free; name another folder: --set data.cache=DIR")

    def _known(self, step: int) -> int:
        """How many of the training patients a step chooses from."""
        data = self.config.data
        return data.joined(step) if data.source == "synthetic" else len(self.training)

    def cut(self, step: int, index: int, relief: Relief) -> Cut:
        """The raw patch of a step, and the generator of its variation.

        Raises:
            ConfigError: in none of the patients of the step is there anything to learn from.
        """
        seed = self.config.optimisation.seed
        random = Generator().manual_seed(((seed * 1_000_003 + step) * LARGEST_BATCH + index) % 2**63)
        known = self._known(step)
        empty = set[int]()
        while len(empty) < known:
            chosen = int(torch.randint(0, known, (), generator=random))
            names = self.store.names(self.training[chosen])
            if names:
                name = names[int(torch.randint(0, len(names), (), generator=random))]
                return cut(*self.store.arrays(name), self.config, random, relief.patch(self.config))
            empty.add(chosen)
        found = f"none of {known} patients has a lung for stage {self.config.stage} to learn from"
        raise ConfigError("data", found, "one at least", "look at data.labels, and at the locator if it predicts boxes")

    def close(self) -> None:
        """Stops the workers."""
        self.store.close()


def _warnings(patients: Sequence[Patient]) -> list[str]:
    cases = [patient.case for patient in patients if isinstance(patient, FilePatient)]
    return [f"{case.entry.image}: warning: {warning}" for case in cases for warning in case.warnings]


def patients_of(
    config: TrainingConfig, record: Path, stopped: Callable[[], None] = lambda: None
) -> tuple[Sequence[Patient], Sequence[Patient]]:
    """Training and held-out patients.

    The split of files is written to ``record``, and read from it where there is a checkpoint beside it. ``stopped`` is
    called while files are examined, and raises to end that.
    """
    data = config.data
    if data.source == "synthetic":
        presets = data.presets
        unknown_presets = [name for name in presets if name not in PRESETS]
        if unknown_presets or not presets:
            raise ConfigError("data.preset", ", ".join(unknown_presets) or "none", "one of " + ", ".join(PRESETS))
        if unknown := unknown_tissues(data.labels):
            raise ConfigError("data.labels", ", ".join(unknown), "tissues of the synthetic chest CT (`Tissue`)")
        seeds = range(data.seed, data.seed + data.validation + data.joined(config.optimisation.steps))
        all_of_them = [SyntheticPatient(n, presets[n % len(presets)], data.labels, data.device) for n in seeds]
        return all_of_them[data.validation :], all_of_them[: data.validation]
    listed = listing(Path(data.source))
    mapping, problems = sides(listed, data.labels)
    cases = inspect(listed, mapping, problems, data.workers or min(READERS, processors()), stopped)
    folds = _kept_folds(cases, data, record)
    patients = [FilePatient(case, folds[case.entry.name]) for case in cases]
    training = [patient for patient in patients if patient.fold != data.fold]
    held_out = [patient for patient in patients if patient.fold == data.fold]
    if not training:
        raise ConfigError("data.fold", f"all {len(cases)} cases are in fold {data.fold}", "cases to train on")
    return training, held_out


def _kept_folds(cases: Sequence[Inspected], data: DataConfig, record: Path) -> dict[str, int]:
    """The fold of every case by name, as it was when the run began; a start that left no checkpoint began nothing."""
    digests = {case.entry.name: case.digest for case in cases}
    if record.exists() and (record.parent / CHECKPOINT).exists():
        content = json.loads(record.read_text(encoding="utf-8"))
        kept: dict[str, int] = content["folds"]
        if kept.keys() != digests.keys():
            raise ConfigError(record, "a split of other cases than the data set now has", "the same data as at first")
        before = content.get("digests", digests)  # that runs of earlier versions did not keep
        if changed := [name for name in digests if digests[name] != before.get(name)]:
            found = f"another scan, or other labels, than at first of {_some(changed)}"
            raise ConfigError(record, found, "the same data as at first", "put it back, or begin anew elsewhere")
        return kept
    folds = _folds(cases, data)
    if data.validation and data.fold not in folds.values():
        there = ", ".join(map(str, sorted(set(folds.values()))))
        raise ConfigError("data.fold", f"{data.fold}, which no case has", f"one of the data set's folds {there}")
    record.parent.mkdir(parents=True, exist_ok=True)
    replace_text(record, json.dumps({"held_out": data.fold, "folds": folds, "digests": digests}, indent=1) + "\n")
    return folds


def _folds(cases: Sequence[Inspected], data: DataConfig) -> dict[str, int]:
    """By patient: the data set's own folds where it names them for all, else by chance.

    The same for all recipes: stage 2 must not be validated on patients that its locator has been trained on.
    """
    own = {case.entry.name: case.entry.fold for case in cases}
    if all(fold is not None for fold in own.values()):
        _check_own_folds(cases)
        return {name: int(fold or 0) for name, fold in own.items()}
    if not 0 <= data.fold < data.folds:
        raise ConfigError("data.fold", str(data.fold), f"0 to {data.folds - 1}, one of data.folds = {data.folds}")
    patients = sorted({case.entry.patient for case in cases})
    shuffled = np.random.default_rng(0).permutation(len(patients))
    of_patient = {patients[index]: int(place % data.folds) for place, index in enumerate(shuffled)}
    return {case.entry.name: of_patient[case.entry.patient] for case in cases}


def _check_own_folds(cases: Sequence[Inspected]) -> None:
    folds: dict[str, set[int | None]] = {}
    for case in cases:
        folds.setdefault(case.entry.patient, set()).add(case.entry.fold)
    if parted := sorted(patient for patient, its in folds.items() if len(its) > 1):
        raise ConfigError("data.source", f"several folds for patient {_some(parted)}", "one fold for each patient")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more


def stacked(patches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Patches as one batch; smaller ones are padded with air about which nothing is asked."""
    shape = [max(labels.shape[axis] for _, labels in patches) for axis in range(3)]
    return torch.stack([padded(x, shape, 0.0) for x, _ in patches]), torch.stack(
        [padded(y, shape, IGNORE) for _, y in patches]
    )


def batch_of(cuts: Sequence[Cut], config: TrainingConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Image (B, C, x, y, z) and labels (B, x, y, z) on a device, varied there."""
    patches = [varied(one.to(device), config) for one in cuts]
    if config.optimisation.fixed_size:
        patches = [
            (padded(x, one.patch, 0.0), padded(y, one.patch, IGNORE)) for (x, y), one in zip(patches, cuts, strict=True)
        ]
    return stacked(patches)
