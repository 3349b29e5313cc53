"""What a training run is made of: frozen values, read from TOML by `cascadeseg.config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import ClassVar, Literal

from cascadeseg.config import Limits
from cascadeseg.labels import BACKGROUND, BESIDE, IGNORE, LEFT_LUNG, RIGHT_LUNG
from cascadeseg.network.engine import Precision
from cascadeseg.network.model import View
from cascadeseg.network.unet import UNetConfig


@dataclass(frozen=True)
class LabelNames:
    """Which labels of a data set are whose lung: names as its ``dataset.json`` has them, or numbers as text.

    Left empty, names that say *lung* or *lobe* and a side are taken by themselves; everything else must be named here,
    because a side is never guessed.

    Attributes:
        right: of the patient's right lung (several are merged: lobes, lesions inside it).
        left: of the patient's left lung.
        background: of anything else.
        ignore: of what nothing is asked about.
        beside: stage 1 only: groups of what else the network learns to tell from the lungs, each by an output of its
            own (`unet.out_channels` is 3 and one for each); whatever it finds of them, inference leaves out.
            What a data set lacks is passed over, and what is named above as well is what it is there.
    """

    right: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    background: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    beside: tuple[tuple[str, ...], ...] = ()

    def by_value(self) -> dict[int, tuple[str, ...]]:
        """The names by the value that they get; of two values for one name the later one counts."""
        beside = dict(zip(BESIDE, self.beside, strict=False))
        sides = {RIGHT_LUNG.value: self.right, LEFT_LUNG.value: self.left}
        return beside | sides | {BACKGROUND: self.background, IGNORE: self.ignore}


@dataclass(frozen=True)
class DataConfig:
    """Where cases come from.

    Attributes:
        source: ``"synthetic"``; a folder in nnU-Net's raw layout or with a Medical Segmentation Decathlon
            ``dataset.json``; a MONAI datalist (JSON); or a CSV of ``image,label[,patient,fold]``.
        labels: what the data set's labels are; for synthetic patients, tissues instead of the lungs.
        folds: files only: patients are split into so many parts, by one chance for all recipes, unless the data set
            itself names folds.
        fold: files only: the part that is held out.
        preset: synthetic only: a name from `cascadeseg.synthesis.PRESETS`, or a list of them, of which patients are
            by turns (a name may stand in it more than once).
        cases: synthetic only: how many training patients there are at most; only those that the steps get to are made.
        initial: synthetic only: patients that are ready before the first step.
        steps_per_case: synthetic only: after this many steps one more patient joins, until there are ``cases``.
        validation: patients of the held-out part that each validation segments.
        boxes: stage 2 only: crops from the locator's predictions, or from references damaged to look like its
            mistakes; ``auto`` predicts only with one locator a fold: on patients like those it was trained on a
            locator is better than it ever will be on strange ones, and the refiner would follow it to the voxel.
        box_jitter_mm: stage 2 only: where a patch is as large as the case, each face of the box lies anywhere from this
            much inside inference's to as much outside (where the scan ends, only inside, by up to twice as much).
        workers: processes that prepare cases ahead of training, and threads that read files before; 0: all processors
            that the run may use but one, and at most four.
        device: where workers render synthetic patients and run the locator.
        cache: folder of prepared cases, shared by runs; empty: inside the run folder.
        seed: synthetic only: of the first patient; the others count up from it.
    """

    source: str = "synthetic"
    labels: LabelNames = field(default_factory=LabelNames)
    folds: int = 5
    fold: int = 0
    preset: str | tuple[str, ...] = "default"
    cases: int = 400
    initial: int = 16
    steps_per_case: int = 8
    validation: int = 8
    boxes: Literal["auto", "predicted", "perturbed"] = "auto"
    box_jitter_mm: float = 8.0
    workers: int = 0
    device: str = "cpu"
    cache: str = ""
    seed: int = 1000

    @property
    def presets(self) -> tuple[str, ...]:
        """``preset`` as a list, whether one was named or several."""
        return (self.preset,) if isinstance(self.preset, str) else self.preset

    def joined(self, step: int) -> int:
        """How many synthetic training patients a step chooses from."""
        return min(self.cases, self.initial + step // self.steps_per_case)


@dataclass(frozen=True)
class AugmentationConfig:
    """How patches are varied; every amount is a standard deviation or a probability.

    Attributes:
        shorter: stage 1: probability that a case is cut along z, as a shorter scan would be.
        goes_on: stage 1: probability that a case goes on beyond its faces, as inference has each scan do.
        scale: sd of the size factor, per axis (log scale).
        warp: probability that a patch is also rotated and bent.
        rotation_deg: sd of a warped patch's rotation about each axis.
        elastic_mm: sd of a warped patch's displacements, smooth over a third of the patch.
        mirror: probability of mirroring left and right, labels swapped (stage 1 only: stage 2 mirrors by itself).
        gain: sd of the HU gain.
        offset_hu: sd of the HU offset.
        gamma: sd of the logarithm of an exponent on the image.
        noise_hu: largest sd of added white noise.
        blur: probability of a light blur along one random axis, as soft kernels give.
        low_resolution: probability that an axis is averaged into thick slices and interpolated back.
        thickest_mm: of those slices; the thinnest has the image's own spacing.
        window: probability that a patch is clipped to the window of a display, as some data sets were when they were
            saved: from -1000 to -900 HU up to 100 to 600 HU. Of higher floors the networks see nothing, as what they
            hide is put back before (`cascade.windowed`).
        prior: stage 2: probability that stage 1's opinion is damaged (bites taken out, then blurred).
    """

    shorter: float = 0.15
    goes_on: float = 1.0
    scale: float = 0.08
    warp: float = 0.2
    rotation_deg: float = 8.0
    elastic_mm: float = 3.0
    mirror: float = 0.3
    gain: float = 0.03
    offset_hu: float = 15.0
    gamma: float = 0.05
    noise_hu: float = 30.0
    blur: float = 0.15
    low_resolution: float = 0.15
    thickest_mm: float = 5.0
    window: float = 0.08
    prior: float = 0.6


@dataclass(frozen=True)
class OptimisationConfig:
    """The loop's numbers.

    Attributes:
        steps: optimiser steps in all.
        patch: largest patch, voxels; a smaller case gives a smaller patch, one as large as the cases whole crops.
        fixed_size: pad smaller patches with air to ``patch``, so that every one has the same shape.
        batch: patches of a step, over all processes and accumulations.
        micro_batch: patches that go through the network together.
        on_lung: probability that a patch is centred on a lung voxel rather than anywhere.
        optimiser: ``adamw``, ``sgd`` (Nesterov momentum 0.99), or ``adafactor`` (factored second moments, no first).
        learning_rate: at its highest, after the warm-up.
        schedule: how it falls to zero: half a cosine, or (1 - t) to the power of 0.9.
        warm_up: steps.
        weight_decay: the optimiser's.
        clip_norm: largest norm of the gradient.
        ema: decay of the averaged weights, which are what is shipped; less over the first steps.
        fixed_norm: from this share of the steps on, BatchNorm normalises by its averaged statistics, as inference does,
            instead of by each patch's own; 1: never. A network that always saw a patch of its own normalised to itself
            fails at inference on scans unlike the average, such as those that dark lungs fill.
        precision: ``auto`` (what the device is fast at), ``fp32``, ``bf16`` or ``fp16`` (with loss scaling).
        checkpoint_blocks: recompute every block's activations in the backward pass (less memory, more time).
        channels_last: memory format of weights and images.
        compile: `torch.compile` the network (slow first steps).
        cudnn_benchmark: let cuDNN try its algorithms for each new shape; for ``fixed_size``.
        deterministic: only algorithms that give the same bits again (a GPU is then slower; a CPU does it anyway).
        prefetch: steps whose patches are prepared ahead of the loop.
        skip_at_most: steps without a finite loss in a row before the run gives up.
        validate_every: steps between validations.
        save_every: steps between checkpoints.
        tensorboard: write TensorBoard events too, where it is installed.
        seed: of everything random in the loop.
    """

    steps: int = 4000
    patch: tuple[int, int, int] = (128, 128, 128)
    fixed_size: bool = False
    batch: int = 1
    micro_batch: int = 1
    on_lung: float = 0.6
    optimiser: Literal["adamw", "sgd", "adafactor"] = "adamw"
    learning_rate: float = 2e-3
    schedule: Literal["cosine", "poly"] = "cosine"
    warm_up: int = 100
    weight_decay: float = 1e-4
    clip_norm: float = 2.0
    ema: float = 0.998
    fixed_norm: float = 0.5
    precision: Precision = "auto"
    checkpoint_blocks: bool = False
    channels_last: bool = True
    compile: bool = False
    cudnn_benchmark: bool = False
    deterministic: bool = False
    prefetch: int = 2
    skip_at_most: int = 20
    validate_every: int = 250
    save_every: int = 250
    tensorboard: bool = True
    seed: int = 0


@dataclass(frozen=True)
class TrainingConfig:
    """A whole run.

    Attributes:
        stage: 1, the locator, or 2, the refiner.
        name: of the model that comes out.
        init: start from these weights instead of chance: ``"shipped"``, or a model folder.
        locator: stage 2 only: the model folder whose stage 1 it builds on; empty: the shipped one. With ``{fold}`` in
            it, predictions on a patient come from the locator that was trained without the patient's fold.
    """

    stage: int
    view: View
    unet: UNetConfig
    name: str = "untitled"
    init: str = ""
    locator: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    optimisation: OptimisationConfig = field(default_factory=OptimisationConfig)

    LIMITS: ClassVar[Limits] = {
        "1 or more": (
            lambda n: n >= 1,
            "unet.in_channels unet.out_channels unet.widths unet.bottleneck_ratio data.folds data.cases data.initial "
            "data.steps_per_case optimisation.steps optimisation.patch optimisation.batch optimisation.micro_batch "
            "optimisation.validate_every optimisation.save_every",
        ),
        "0 or more": (
            lambda n: 0 <= n < inf,
            "view.prior_spacing_mm unet.blocks data.fold data.validation data.box_jitter_mm data.workers "
            "augmentation.scale augmentation.rotation_deg augmentation.elastic_mm augmentation.gain "
            "augmentation.offset_hu augmentation.gamma augmentation.noise_hu augmentation.thickest_mm "
            "optimisation.warm_up optimisation.weight_decay optimisation.prefetch optimisation.skip_at_most",
        ),
        "above 0": (
            lambda n: 0 < n < inf,
            "view.spacing_mm view.scale_hu view.prior_contrast optimisation.learning_rate optimisation.clip_norm",
        ),
        "0 to 1": (
            lambda n: 0 <= n <= 1,
            "augmentation.shorter augmentation.goes_on augmentation.warp augmentation.mirror augmentation.blur "
            "augmentation.low_resolution augmentation.window augmentation.prior optimisation.on_lung "
            "optimisation.fixed_norm",
        ),
        "a finite number": (isfinite, "view.low_hu view.high_hu view.tissue_low_hu view.tissue_high_hu"),
        "0 or more and below 1": (lambda n: 0 <= n < 1, "optimisation.ema"),
    }
