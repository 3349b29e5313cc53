"""Validation: held-out patients, whole, through the cascade's own inference."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cascadeseg.atomic import replace_file
from cascadeseg.cascade.crop import settle_sides
from cascadeseg.cascade.locate import locate
from cascadeseg.cascade.pipeline import Segmenter
from cascadeseg.cascade.resample import resample_volume
from cascadeseg.errors import ScanError
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid
from cascadeseg.labels import IGNORE, LUNGS
from cascadeseg.network.engine import Engine
from cascadeseg.network.model import Model, load_model, stage_of
from cascadeseg.training.cache import locator_folder
from cascadeseg.training.cases import LabelMap
from cascadeseg.training.config import TrainingConfig
from cascadeseg.training.data import Data
from cascadeseg.training.state import State


@dataclass(frozen=True)
class Validated:
    """What a validation found.

    Attributes:
        scores: mean Dice, and where they can be had NSD (2 mm) and HD95, per lung; ``dice`` is the mean of both.
        scan: of the first patient.
        labels: what the cascade made of it.
        refused: why the cascade refused patients, which count as missed: a locator of few steps may see a lung of 20
            litres.
    """

    scores: dict[str, float]
    scan: Scan
    labels: LabelMap
    refused: tuple[str, ...] = ()


def model_of(config: TrainingConfig, state: State) -> Model:
    """The averaged weights as what `infer` takes; of stage 2, with the locator it was trained behind."""
    stage = stage_of(config.view, state.average)
    notes = {f"stage{config.stage}_steps": state.step, f"stage{config.stage}_data": config.data.source}
    if config.stage == 1:
        return Model(stage, None, name=config.name, notes=notes)
    base = load_model(locator_folder(config, config.data.fold))
    of_stage1 = {key: value for key, value in base.notes.items() if key.startswith("stage1_")}
    return Model(base.locator, stage, name=config.name, notes=of_stage1 | notes)


def validate(config: TrainingConfig, state: State, data: Data, device: torch.device) -> Validated | None:
    """Segments the held-out patients; None where there are none."""
    segment = _segmenter(config, state, device)
    scores: dict[str, list[float]] = {}
    refused: list[str] = []
    shown = None
    for patient in data.validation:
        scan, reference = data.store.whole(patient)
        try:
            with _no_search():
                labels = segment(scan)
        except ScanError as error:
            refused.append(str(error))
            labels = np.zeros(scan.grid.shape, np.uint8)
        for name, value in _scores(labels, reference, scan.grid).items():
            scores.setdefault(name, []).append(value)
        shown = shown or (scan, labels)
    if shown is None:
        return None
    means = {name: float(np.mean(values)) for name, values in sorted(scores.items())}
    sides = [value for name, value in means.items() if name.startswith("dice_")]
    return Validated({"dice": float(np.mean(sides)) if sides else math.nan} | means, *shown, tuple(refused))


@contextmanager
def _no_search() -> Iterator[None]:
    """Without cuDNN's search for algorithms, if the recipe has it: every patient has another shape."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _segmenter(config: TrainingConfig, state: State, device: torch.device) -> Callable[[Scan], LabelMap]:
    model = model_of(config, state)
    if config.stage == 2:
        cascade = Segmenter(model, device=str(device))
        return lambda scan: cascade.segment(scan).labels
    engine = Engine(model.locator, device)

    def located(scan: Scan) -> LabelMap:
        coarse = settle_sides(locate(scan, engine), scan)
        labels = np.zeros(scan.grid.shape, np.uint8)
        for lung, probability in zip(LUNGS, coarse.lungs.to(device), strict=True):
            labels[(resample_volume(probability, coarse.grid, scan.grid) > 0.5).cpu().numpy()] = lung.value
        return labels

    return located


def _scores(labels: LabelMap, reference: LabelMap, grid: Grid) -> dict[str, float]:
    """By name, of the lungs that the reference has; where it has none, the false volume."""
    asked = reference != IGNORE
    there = [lung for lung in LUNGS if bool((reference == lung.value).any())]
    scores = {}
    if not there:
        return {"false_ml": float((labels[asked] > 0).sum()) * grid.voxel_volume_ml}
    for lung in there:
        mine, truth = (labels == lung.value) & asked, reference == lung.value
        scores[f"dice_{lung.side}"] = float(2 * (mine & truth).sum() / (mine.sum() + truth.sum()))
    if surface_distances_available():
        from cascadeseg.evaluation.metrics import evaluate

        for found in evaluate(labels, np.asarray(reference), grid.spacing_mm):
            if found.label in there:
                scores[f"nsd_{found.label.side}"] = found.nsd_2mm
                if math.isfinite(found.hd95_mm):  # infinite where nothing was found; Dice says that
                    scores[f"hd95_{found.label.side}"] = found.hd95_mm
    return scores


def surface_distances_available() -> bool:
    """Whether the libraries behind NSD and HD95 are installed; a machine that only trains may lack them."""
    return all(importlib.util.find_spec(name) is not None for name in ("monai", "SimpleITK"))


def save_picture(validated: Validated, path: Path, title: str) -> None:
    """The first patient's mask as a PNG, if it can be drawn here."""
    if importlib.util.find_spec("PIL") is None:
        return
    from cascadeseg.evaluation.preview import preview_png

    path.parent.mkdir(exist_ok=True)
    picture = preview_png(validated.scan, validated.labels, title)
    replace_file(path, lambda temporary: temporary.write_bytes(picture))
