"""Toy chests as data sets, and recipes that train on them in seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cascadeseg.formats import read_scan, write_labels, write_scan
from cascadeseg.network import UNetConfig, View
from cascadeseg.training.config import AugmentationConfig, DataConfig, OptimisationConfig, TrainingConfig
from tests.cascade.chest import chest, chest_grid, truth

NOTHING_RANDOM = AugmentationConfig(
    shorter=0,
    goes_on=0,
    scale=0,
    warp=0,
    mirror=0,
    gain=0,
    offset_hu=0,
    gamma=0,
    noise_hu=0,
    blur=0,
    low_resolution=0,
    window=0,
    prior=0,
)
SPACINGS = [(6.0, 6.0, 6.0), (5.0, 5.0, 8.0), (6.0, 6.0, 5.0)]
OURS = {"background": 0, "lung_right": 1, "lung_left": 2}


def write_case(root: Path, name: str, spacing: tuple[float, float, float], numbers: Any = (0, 1, 2)) -> None:
    """One toy chest in nnU-Net's raw layout; ``numbers`` are its labels for background, right and left."""
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    scan = chest(chest_grid(spacing))
    image = root / "imagesTr" / f"{name}_0000.nii.gz"
    write_scan(scan.voxels, scan.grid, image)
    labels = np.array(numbers, np.uint8)[truth(scan.grid)]
    write_labels(labels, root / "labelsTr" / f"{name}.nii.gz", read_scan(image))


def write_dataset_json(root: Path, labels: dict[str, int] | None = None, **more: Any) -> None:
    about = {"channel_names": {"0": "CT"}, "labels": labels or OURS, "file_ending": ".nii.gz", **more}
    (root / "dataset.json").write_text(json.dumps(about), encoding="utf-8")


def toy_dataset(root: Path) -> Path:
    """Three toy chests in nnU-Net's raw layout."""
    for number, spacing in enumerate(SPACINGS):
        write_case(root, f"toy_{number}", spacing)
    write_dataset_json(root)
    return root


def stage1(source: Path | str, **optimisation: Any) -> TrainingConfig:
    numbers = {
        "steps": 6,
        "patch": (32, 32, 32),
        "precision": "fp32",
        "validate_every": 3,
        "save_every": 2,
        "warm_up": 2,
        "tensorboard": False,
    }
    return TrainingConfig(
        stage=1,
        view=View(6.0),
        unet=UNetConfig(1, 3, widths=(8, 16)),
        name="toy",
        data=DataConfig(source=str(source), folds=3, workers=1),
        optimisation=OptimisationConfig(**(numbers | optimisation)),
    )


def stage2(source: Path | str, locator: Path, **optimisation: Any) -> TrainingConfig:
    base = stage1(source, **optimisation)
    unet = UNetConfig(2, 1, widths=(8, 16), block="bottleneck")
    return replace(base, stage=2, view=View(4.0, prior=True), unet=unet, locator=str(locator))


def with_data(config: TrainingConfig, **data: Any) -> TrainingConfig:
    return replace(config, data=replace(config.data, **data))
