"""What a training run is made of: frozen values, read from TOML by `cascadeseg.config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cascadeseg.network.model import View
from cascadeseg.network.unet import UNetConfig


@dataclass(frozen=True)
class DataConfig:
    """Where cases come from.

    Attributes:
        source: ``"synthetic"``, or a folder with ``imagesTr`` and ``labelsTr`` (nnU-Net raw layout).
        preset: synthetic only: a name from `cascadeseg.synthesis.PRESETS`.
        cases: synthetic only: how many training patients there are in all.
        initial: synthetic only: patients that are ready before the first step.
        steps_per_case: synthetic only: after this many steps one more patient joins, until there are ``cases``.
        validation: patients held out (synthetic), or cases held out of the folder.
        workers: processes that prepare cases ahead of training.
        cache: folder of prepared cases, shared by runs; empty: inside the run folder.
        seed: of the first synthetic patient; the others count up from it.
    """

    source: str = "synthetic"
    preset: str = "default"
    cases: int = 400
    initial: int = 16
    steps_per_case: int = 8
    validation: int = 8
    workers: int = 1
    cache: str = ""
    seed: int = 1000


@dataclass(frozen=True)
class AugmentationConfig:
    """How patches are varied; every amount is a standard deviation or a probability.

    Attributes:
        scale: sd of the size factor, per axis (log scale).
        mirror: probability of mirroring left and right, labels swapped (stage 1 only: stage 2 mirrors by itself).
        gain: sd of the HU gain.
        offset_hu: sd of the HU offset.
        noise_hu: largest sd of added white noise.
        blur: probability of a light blur along one random axis, as thick slices and soft kernels give.
        prior: stage 2: probability that stage 1's opinion is damaged (blurred, with a bite taken out).
    """

    scale: float = 0.08
    mirror: float = 0.3
    gain: float = 0.03
    offset_hu: float = 15.0
    noise_hu: float = 30.0
    blur: float = 0.15
    prior: float = 0.3


@dataclass(frozen=True)
class OptimisationConfig:
    """The loop's numbers.

    Attributes:
        steps: optimiser steps in all.
        patch: largest patch, voxels; a smaller case gives a smaller patch.
        batch: patches of a step, one after another (gradients are accumulated).
        on_lung: probability that a patch is centred on a lung voxel rather than anywhere.
        learning_rate: at its highest, after the warm-up; falls to zero by a cosine.
        warm_up: steps.
        weight_decay: AdamW's.
        clip_norm: largest norm of the gradient.
        ema: decay of the averaged weights, which are what is shipped.
        precision: ``auto`` (what the device is fast at), ``fp32``, ``bf16`` or ``fp16``.
        checkpoint_blocks: recompute every block's activations in the backward pass (less memory, more time).
        validate_every: steps between validations.
        save_every: steps between checkpoints.
        seed: of everything random in the loop.
    """

    steps: int = 4000
    patch: tuple[int, int, int] = (128, 128, 128)
    batch: int = 1
    on_lung: float = 0.6
    learning_rate: float = 2e-3
    warm_up: int = 100
    weight_decay: float = 1e-4
    clip_norm: float = 2.0
    ema: float = 0.998
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    checkpoint_blocks: bool = False
    validate_every: int = 250
    save_every: int = 250
    seed: int = 0


@dataclass(frozen=True)
class TrainingConfig:
    """A whole run.

    Attributes:
        stage: 1, the locator, or 2, the refiner.
        name: of the model that comes out.
        locator: stage 2 only: the model folder whose stage 1 it builds on; empty: the shipped one.
    """

    stage: int
    view: View
    unet: UNetConfig
    name: str = "untitled"
    locator: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    optimisation: OptimisationConfig = field(default_factory=OptimisationConfig)
