"""The scanner and the field of view it saved: drawn from the seed, and the grid that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cascadeseg.geometry import Grid
from cascadeseg.synthesis.config import SynthesisConfig
from cascadeseg.synthesis.draw import Draw

if TYPE_CHECKING:
    from cascadeseg.synthesis.patient import Patient, Torso


@dataclass(frozen=True)
class Scanner:
    """How the volume was acquired and reconstructed (mm, HU).

    Attributes:
        motion_mm, pulse_mm: how far apart the two contours of the diaphragm, and of the heart, are.
        starvation_hu: of the streaks between the shoulders, where hardly a photon comes through.
        metal_hu: of the streaks beside metal, in patients who have some.
    """

    pixel_mm: float
    slice_mm: float
    slice_step: float
    stairs: bool
    blur_mm: float
    sharpening: float
    noise_hu: float
    noise_colour: float
    streaks_hu: float
    cupping_hu: float
    offset_hu: float
    gain: float
    padding_hu: float
    circular: bool
    floor_hu: float
    ceiling_hu: float
    up: tuple[float, float]
    couch: str
    couch_gap: float
    couch_tilt: float
    cloth: int
    motion_mm: float
    seed: int
    pulse_mm: float
    starvation_hu: float
    metal_hu: float


@dataclass(frozen=True)
class View:
    """The field of view: ``centre`` and heights in body mm (before the patient's size), ``width`` in world mm."""

    kind: str
    centre: tuple[float, float, float]
    width: float
    low: float
    high: float


def draw_scanner(d: Draw, config: SynthesisConfig) -> Scanner:
    """Draw a scanner, its protocol and how the patient lies on its couch."""
    a, c = config.acquisition, config.confounders
    thin = d.uniform(0.5, 1.5) if d.chance(0.55) else d.pick((2.0, 2.5, 3.0, 5.0), (2, 3, 3, 3))
    rare = d.uniform(0, 1)
    slice_mm = 8.0 if rare < 0.012 else 10.0 if rare < 0.024 else thin
    noise = d.lognormal(14, 0.75, 2.5, 80)
    posture = d.pick(("supine", "prone", "right", "left"), _with_rest(0.07, 0.03, 0.03, factor=a.posture))
    up = {"supine": (0.0, 1.0), "prone": (0.0, -1.0), "right": (1.0, 0.0), "left": (-1.0, 0.0)}[posture]
    return Scanner(
        pixel_mm=d.uniform(0.45, 1.1),
        slice_mm=slice_mm if a.thick_slices else 1.0,
        slice_step=d.pick((1.0, 0.8, 0.5, 1.2), (6, 2, 1, 0.5)),
        stairs=d.chance(0.6),
        blur_mm=d.uniform(0.3, 1.4) * a.blur,
        sharpening=d.uniform(0.2, 1.2) * a.blur if d.chance(0.3) else 0.0,
        noise_hu=noise * a.noise,
        noise_colour=d.uniform(0.2, 1.0),
        streaks_hu=d.uniform(8, 60) * a.streaks if d.chance(0.25) else 0.0,
        cupping_hu=d.uniform(-25, 25) * a.streaks if d.chance(0.15) else 0.0,
        offset_hu=d.normal(0, 5) * a.offset + (d.uniform(-40, 40) * a.offset if d.chance(0.04) else 0),
        gain=1 + d.normal(0, 0.01) * a.offset,
        padding_hu=d.pick((-1024.0, -1000.0, -2000.0, -2048.0, -3024.0), (4, 1, 2, 2, 2)) if a.padding else -1000.0,
        circular=d.chance(0.45 * a.padding),
        floor_hu=-1024.0 if d.chance(0.8) else -1000.0 if d.chance(0.3) else -4000.0,
        ceiling_hu=3071.0 if d.chance(0.8) else 32767.0,
        up=up,
        couch=d.pick(("curved", "flat", "thin", "none"), (5, 3, 2, 1)) if c.couch else "none",
        couch_gap=d.uniform(0, 12),
        couch_tilt=d.normal(0, 2),
        cloth=d.integer(0, 3) if d.chance(0.7 * c.cloth) else 0,
        motion_mm=d.uniform(1.5, 6) if d.chance(0.15 * a.blur) else 0.0,
        seed=d.seed(),
        pulse_mm=d.uniform(2, 8) if d.chance(0.2 * a.blur) else 0.0,
        starvation_hu=d.uniform(20, 130) * a.streaks if d.chance(0.2) else 0.0,
        metal_hu=d.uniform(300, 1200) * a.streaks,
    )


def _with_rest(*rates: float, factor: float) -> list[float]:
    """Some rates times a factor, and before them what is left to 1."""
    scaled = [min(rate * factor, 1 / len(rates)) for rate in rates]
    return [1 - sum(scaled), *scaled]


def draw_view(d: Draw, config: SynthesisConfig, torso: Torso) -> View:
    """Draw what part of the patient was saved."""
    kinds = ("chest", "chest_abdomen", "lung_free", "partial", "one_lung", "abdominal_slab", "bases")
    kind = d.pick(kinds, [getattr(config.view, k) for k in kinds])
    top = torso.height
    body = 2 * torso.size * (torso.half_width + torso.muscle + 0.8 * torso.fat) + 10
    wide = d.pick((0, 1, 2), _with_rest(0.33, 0.17, factor=config.confounders.outside_air))
    tight = max(230.0, body * d.uniform(0.9, 1.15))
    width = (tight, d.uniform(max(380.0, min(tight, 500)), 510.0), d.uniform(500.0, 700.0))[wide]
    shift = 0.04 * width if d.chance(0.8) else 0.16 * width
    centre = (d.normal(0, shift), d.normal(0, shift), 0.0)
    low, high = -d.uniform(70, 150), top + d.uniform(5, 60)
    if kind == "chest":
        low = -d.uniform(90, 170) if d.chance(0.8) else -d.uniform(15, 90)
        high = top + (d.uniform(4, 50) if d.chance(0.8) else d.uniform(50, 160))
    elif kind == "chest_abdomen":
        low, high = -d.uniform(170, 460), top + d.uniform(0, 90)
    elif kind == "lung_free":
        return _lung_free_view(d, centre, width, top)
    elif kind == "partial":
        low, high = _partial_heights(d, top)
    elif kind == "abdominal_slab":
        high = d.uniform(-160, -60)
        low = high - d.uniform(25, 120)
    elif kind == "bases":
        high = d.uniform(-75, 5)
        low = high - d.uniform(40, 380)
    elif kind == "one_lung":
        side = 1 if d.chance(0.5) else -1
        width = d.uniform(150, 260) * max(torso.size, 0.6)
        centre = (side * d.uniform(45, 95), d.normal(0, 18), 0.0)
        if d.chance(0.3):
            low, high = _partial_heights(d, top)
    return View(kind, centre, width, low, high)


def _partial_heights(d: Draw, top: float) -> tuple[float, float]:
    kind = d.pick(("apex", "middle", "bases", "slab"))
    if kind == "apex":
        return d.uniform(0.35, 0.9) * top, top + d.uniform(10, 220)
    if kind == "middle":
        low = d.uniform(0.0, 0.4) * top
        return low, low + d.uniform(60, 140)
    if kind == "bases":
        return -d.uniform(120, 420), d.uniform(-40, 0.5 * top)
    low = d.uniform(-0.3, 0.9) * top
    return low, low + d.uniform(16, 60)


def _lung_free_view(d: Draw, centre: tuple[float, float, float], width: float, top: float) -> View:
    kind = d.pick(("abdomen", "pelvis", "head", "legs", "air"), (0.5, 0.18, 0.15, 0.1, 0.07))
    if kind == "abdomen":
        high = d.uniform(-110, -70) if d.chance(0.7) else d.uniform(-70, -30)
        return View("abdomen", centre, width, high - d.uniform(100, 380), high)
    if kind == "pelvis":
        high = d.uniform(-330, -200)
        return View("pelvis", centre, width, high - d.uniform(120, 300), high)
    if kind == "head":
        low = top + d.uniform(25, 90)
        return View("head", centre, d.uniform(220, 420), low, top + d.uniform(230, 330))
    if kind == "legs":
        high = top - d.uniform(640, 800)
        return View("legs", centre, width, high - d.uniform(150, 350), high)
    low = top + d.uniform(420, 500)
    return View("air", centre, width, low, low + d.uniform(60, 250))


def view_grid(patient: Patient, spacing_mm: float | tuple[float, float, float]) -> Grid:
    """The RAS+ grid of the patient's field of view."""
    view, torso = patient.view, patient.torso
    spacing = np.broadcast_to(np.asarray(spacing_mm, dtype=np.float64), (3,))
    scale = np.asarray(torso.aspect) * torso.size
    centre = np.array([view.centre[0], view.centre[1], (view.low + view.high) / 2]) * scale + np.asarray(torso.offset)
    size = np.array([view.width, view.width, (view.high - view.low) * scale[2]])
    shape = np.maximum(1, np.round(size / spacing)).astype(int)
    # Voxel centres lie at whole multiples of the spacing, so that every grid of one spacing shares one lattice.
    first = np.round((centre - (shape - 1) / 2 * spacing) / spacing) * spacing
    return Grid.axis_aligned([int(n) for n in shape], spacing.tolist(), first.tolist())
