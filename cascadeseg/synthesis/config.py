"""What a synthetic chest CT may contain: groups that can be switched and scaled one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class AnatomyConfig:
    """How people differ.

    Attributes:
        variation: factor on the spread of all sizes.
        child_rate: share of children.
        deformity_rate: factor on scoliosis, kyphosis and pectus.
        warp: factor on the smooth random deformation.
        vessel_leaves: end branches of one vessel tree of one lung.
    """

    variation: float = 1.0
    child_rate: float = 0.07
    deformity_rate: float = 1.0
    warp: float = 1.0
    vessel_leaves: int = 1800


@dataclass(frozen=True)
class PathologyConfig:
    """How often each finding is drawn, in patients that are not healthy-ish (rates are per patient or per side).

    ``dependent`` (density of the lowest lung of people who lie), ``raised_diaphragm``, ``hiatal_hernia``, ``pull_up``
    and ``devices`` do not ask whether the patient is healthy-ish.

    ``consolidation_reach`` is how far the most extensive fifth of consolidations goes (the largest of them, roughly as
    a share of the lungs); ``consolidation_density`` is where the draw of how solid one is ends, above 1 for more of
    them without any air. ``effusion_depth`` is the median thickness of pleural fluid at the dependent wall, body mm;
    of effusions, ``subpulmonic`` is the share that lie on the diaphragm as well, ``compression`` that squeeze lung.
    ``pneumothorax_depth`` is the median thickness of free air at the non-dependent wall, body mm.
    ``mass_mm`` is the median radius of nodules and masses that are few.
    ``loculated`` is fluid that does not run to the lowest place, a lens at the wall with lung all around.
    """

    rate: float = 1.0
    healthy_share: float = 0.40
    healthy_factor: float = 0.12
    ground_glass: float = 0.28
    consolidation: float = 0.26
    consolidation_reach: float = 0.9
    consolidation_density: float = 1.0
    lobar: float = 0.20
    white_lung: float = 0.03
    atelectasis: float = 0.35
    nodules: float = 0.30
    mass_mm: float = 12.0
    emphysema: float = 0.17
    bullae: float = 0.10
    mosaic: float = 0.25
    fibrosis: float = 0.12
    pleural_thickening: float = 0.12
    effusion: float = 0.22
    effusion_depth: float = 20.0
    subpulmonic: float = 0.3
    compression: float = 0.75
    pneumothorax: float = 0.05
    pneumothorax_depth: float = 18.0
    missing_lung: float = 0.03
    subcutaneous_air: float = 0.03
    raised_diaphragm: float = 0.08
    hiatal_hernia: float = 0.07
    devices: float = 0.25
    dependent: float = 0.35
    pull_up: float = 0.02
    loculated: float = 0.05


@dataclass(frozen=True)
class ConfounderConfig:
    """Air and gas that is not lung, as factors on their rates; 0 switches one off.

    Attributes:
        bowel_gas: gas in oesophagus, stomach and bowel.
        high_colon: share of patients, above those by chance, whose colon is wide, full of gas and right under the left
            dome.
        outside_air: fields of view wider than the body, up to 700 mm; without, all are tight around it.
        couch: the scanner's table, 0 for none.
        arms: arms beside the trunk, with air between.
        cloth: blankets, clothes and straps.
    """

    bowel_gas: float = 1.0
    high_colon: float = 0.0
    outside_air: float = 1.0
    couch: float = 1.0
    arms: float = 1.0
    cloth: float = 1.0


@dataclass(frozen=True)
class AcquisitionConfig:
    """What the scanner adds; each number is a factor, 0 switches it off (``thick_slices``: 1 mm slices only).

    Attributes:
        blur: kernels, and double contours of diaphragm and heart.
        streaks: of shoulders and of metal, and cupping.
        posture: on the rates of prone and decubitus scans and of headers that have lost the posture.
    """

    noise: float = 1.0
    blur: float = 1.0
    streaks: float = 1.0
    offset: float = 1.0
    padding: float = 1.0
    thick_slices: float = 1.0
    posture: float = 1.0


@dataclass(frozen=True)
class RandomisationConfig:
    """How far tissues wander from patient to patient; 0: not at all.

    Attributes:
        intensity: factor on the spread of each tissue's mean HU.
        texture: factor on the textures of the lung.
        contrast: factor on the share of scans with contrast medium.
        density: share of patients whose lungs have any density there is, however deep they breathe; dark ones are
            likelier, as gas in the bowel looks like them.
    """

    intensity: float = 1.0
    texture: float = 1.0
    contrast: float = 1.0
    density: float = 0.0


@dataclass(frozen=True)
class ViewConfig:
    """How often each field of view is drawn (weights); a slab of the abdomen is 25 to 120 mm thick, ``bases`` begin
    between the domes and the recesses.
    """

    chest: float = 0.42
    chest_abdomen: float = 0.15
    lung_free: float = 0.18
    partial: float = 0.15
    one_lung: float = 0.10
    abdominal_slab: float = 0.0
    bases: float = 0.0


@dataclass(frozen=True)
class SynthesisConfig:
    """Everything that `sample_patient` may vary."""

    anatomy: AnatomyConfig = field(default_factory=AnatomyConfig)
    pathology: PathologyConfig = field(default_factory=PathologyConfig)
    confounders: ConfounderConfig = field(default_factory=ConfounderConfig)
    acquisition: AcquisitionConfig = field(default_factory=AcquisitionConfig)
    randomisation: RandomisationConfig = field(default_factory=RandomisationConfig)
    view: ViewConfig = field(default_factory=ViewConfig)


_CHEST = ViewConfig(chest=1, chest_abdomen=0, lung_free=0, partial=0, one_lung=0)
_SICK = PathologyConfig(healthy_share=0.0)


def _ablations() -> dict[str, SynthesisConfig]:
    """The default patients with one group of variation switched off."""
    still = replace(AnatomyConfig(), variation=0.0, deformity_rate=0.0, warp=0.0)
    return {
        "pathology": SynthesisConfig(pathology=PathologyConfig(rate=0.0)),
        "acquisition": SynthesisConfig(
            acquisition=AcquisitionConfig(
                noise=0.0, blur=0.0, streaks=0.0, offset=0.0, padding=0.0, thick_slices=0.0, posture=0.0
            )
        ),
        "confounders": SynthesisConfig(
            confounders=ConfounderConfig(bowel_gas=0.0, outside_air=0.0, couch=0.0, arms=0.0, cloth=0.0)
        ),
        "randomisation": SynthesisConfig(
            anatomy=still, randomisation=RandomisationConfig(intensity=0.0, texture=0.0, contrast=0.0)
        ),
        "views": SynthesisConfig(view=_CHEST),
    }


_TRAINING = SynthesisConfig(
    pathology=PathologyConfig(
        healthy_share=0.4,
        consolidation=0.5,
        consolidation_reach=1.5,
        consolidation_density=1.3,
        lobar=0.3,
        white_lung=0.1,
        nodules=0.4,
        mass_mm=16.0,
        emphysema=0.25,
        effusion=0.4,
        effusion_depth=40.0,
        loculated=0.2,
    ),
    randomisation=RandomisationConfig(density=0.3),
    view=ViewConfig(lung_free=0.14, partial=0.25, abdominal_slab=0.14),
)


def _training_with(**findings: float) -> SynthesisConfig:
    """The training patients, fewer of them healthy, with other rates of findings; colons near the left dome."""
    return replace(
        _TRAINING,
        pathology=replace(_TRAINING.pathology, healthy_share=0.2, **findings),
        confounders=ConfounderConfig(high_colon=0.4),
        view=ViewConfig(chest=0.4, lung_free=0.08, partial=0.2, one_lung=0.06, abdominal_slab=0.06, bases=0.08),
    )


PRESETS: dict[str, SynthesisConfig] = {
    "default": SynthesisConfig(),
    "healthy": SynthesisConfig(pathology=PathologyConfig(rate=0.0), view=_CHEST),
    "covid": SynthesisConfig(
        pathology=replace(_SICK, ground_glass=1.0, consolidation=0.6, atelectasis=0.5, white_lung=0.05), view=_CHEST
    ),
    "effusion": SynthesisConfig(pathology=replace(_SICK, effusion=0.85, atelectasis=0.6), view=_CHEST),
    "emphysema": SynthesisConfig(pathology=replace(_SICK, emphysema=1.0, bullae=0.5), view=_CHEST),
    "fibrosis": SynthesisConfig(pathology=replace(_SICK, fibrosis=1.0, ground_glass=0.5), view=_CHEST),
    "oncology": SynthesisConfig(pathology=replace(_SICK, nodules=1.0, lobar=0.4, missing_lung=0.1), view=_CHEST),
    "intensive_care": SynthesisConfig(
        pathology=replace(_SICK, atelectasis=1.0, effusion=0.6, consolidation=0.6, devices=1.0, pneumothorax=0.15),
        view=_CHEST,
    ),
    "chest_abdomen": SynthesisConfig(view=replace(_CHEST, chest=0, chest_abdomen=1)),
    "abdomen": SynthesisConfig(view=replace(_CHEST, chest=0, lung_free=1)),
    "one_lung": SynthesisConfig(view=replace(_CHEST, chest=0, one_lung=1)),
    "partial": SynthesisConfig(view=replace(_CHEST, chest=0, partial=1)),
    "training": _TRAINING,
    "training_bowel": replace(
        _TRAINING,
        confounders=ConfounderConfig(high_colon=0.6),
        view=ViewConfig(chest=0.25, lung_free=0.1, partial=0.2, one_lung=0.06, abdominal_slab=0.08, bases=0.3),
    ),
    "training_fluid": _training_with(effusion=0.6, subpulmonic=0.7, compression=0.9),
    "training_effusion": _training_with(effusion=0.7, subpulmonic=0.2, compression=0.6),
    "training_air": _training_with(pneumothorax=0.6, pneumothorax_depth=30.0),
    "training_dark": replace(
        _training_with(emphysema=0.7, bullae=0.3, pneumothorax=0.0), randomisation=RandomisationConfig(density=1.0)
    ),
} | {f"without_{name}": config for name, config in _ablations().items()}
"""Patients by name; ``without_...`` are the default ones less one group, for ablations."""
