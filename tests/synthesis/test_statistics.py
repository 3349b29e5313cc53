"""Over many patients, sizes and HU must lie in published ranges (sources beside each)."""

from functools import cache

import numpy as np
import pytest

from cascadeseg.geometry import Grid
from cascadeseg.synthesis import PRESETS, Tissue, render, sample_patient

SPACING = 6.0
PATIENTS = 200


@cache
def adults(count: int = PATIENTS) -> list[dict[str, float]]:
    """Volumes (ml) and median HU of the healthy adults among the first ``count`` seeds."""
    return [_measured(seed) for seed in range(count) if not sample_patient(seed, PRESETS["healthy"]).torso.child]


def _measured(seed: int) -> dict[str, float]:
    patient = sample_patient(seed, PRESETS["healthy"])
    half = (210, 170, 220)
    x, y, z = patient.torso.offset
    centre = np.array([x, y, z + 0.35 * patient.torso.height * patient.torso.size])
    grid = Grid.axis_aligned([int(2 * h / SPACING) + 1 for h in half], (SPACING,) * 3, centre - half)
    phantom = render(patient, grid)
    ml = SPACING**3 / 1000
    right, left = (float((phantom.labels == value).sum()) * ml for value in (1, 2))
    found = {"right": right, "left": left}
    for tissue in (Tissue.FAT, Tissue.MUSCLE, Tissue.LIVER, Tissue.LUNG, Tissue.AIR, Tissue.BONE):
        inside = phantom.tissues == int(tissue)
        found[tissue.name] = float(phantom.hu[inside].median()) if int(inside.sum()) > 100 else float("nan")
    return found


def column(name: str) -> np.ndarray:
    values = np.array([patient[name] for patient in adults()])
    return values[~np.isnan(values)]


def test_a_few_adults_are_human() -> None:
    few = adults(4)
    assert 2500 < np.median([patient["right"] + patient["left"] for patient in few]) < 6000
    assert -910 < np.median([patient["LUNG"] for patient in few]) < -650
    assert -130 < np.median([patient["FAT"] for patient in few]) < -80


@pytest.mark.slow
def test_lung_volumes() -> None:
    # On CT, supine, 4066 +- 1190 ml (Crit Care 2013, "Limits of normality of quantitative thoracic CT"); seated, at
    # full inspiration, 6.97 l for a man of 175 cm and 5.15 l for a woman of 162 cm (GLI 2021, doi
    # 10.1183/13993003.00289-2020). Ours spread wider on purpose: what a network saw too little of, it misses.
    total = column("right") + column("left")
    assert 4000 < total.mean() < 6000
    assert 1000 < total.std() < 2000
    assert np.percentile(total, 2) > 1200
    assert np.percentile(total, 98) < 8500


@pytest.mark.slow
def test_the_right_lung_is_a_little_larger() -> None:
    # Textbook anatomy: the right lung has a little more than half of the volume (about 53 %).
    share = column("right") / (column("right") + column("left"))
    assert 0.49 < np.median(share) < 0.56
    assert 0.4 < np.percentile(share, 3) < np.percentile(share, 97) < 0.66


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tissue", "low", "high"),
    [
        # Textbook CT numbers; the lung's from quantitative CT (mean -856 +- 30 at full inspiration, higher when not).
        ("FAT", -130, -80),
        ("MUSCLE", 20, 75),
        ("LIVER", 10, 130),
        ("LUNG", -910, -650),
        ("AIR", -1030, -970),
        ("BONE", 100, 700),
    ],
)
def test_median_hu_of_tissues(tissue: str, low: float, high: float) -> None:
    values = column(tissue)
    assert len(values) > 0.9 * len(adults())
    assert low < np.percentile(values, 10) < np.percentile(values, 90) < high


def test_drawn_sizes_and_blood_are_human() -> None:
    patients = [sample_patient(seed) for seed in range(PATIENTS)]
    grown = [p for p in patients if not p.torso.child]
    # Tracheal diameters of adults 10-27 mm (Breatnach 1984, AJR 142:903); as always, a little more spread than found.
    trachea = np.array([2 * p.chest.trachea * p.torso.size for p in grown])
    assert 9 < trachea.min() < 13 < np.median(trachea) < 21 < trachea.max() < 29
    # Transverse diameter inside the ribs: means by sex and age of 251-296 mm (Obikili 2006, West Afr J Med 25:186).
    thorax = np.array([2 * p.torso.size * p.torso.half_width for p in grown])
    assert 251 < thorax.mean() < 296
    assert 190 < thorax.min() < thorax.max() < 370
    # With its muscle and fat: broad bounds of slim to obese adults, of no one source.
    width = np.array([2 * p.torso.size * (p.torso.half_width + p.torso.muscle + 0.7 * p.torso.fat) for p in grown])
    assert 230 < width.min() < 300 < np.median(width) < 360 < width.max() < 480
    # Blood without contrast medium 30-55 HU, an aorta with it mostly 100-450 (textbook).
    plain = [p.hounsfield.aortic_blood for p in patients if p.hounsfield.aortic_blood < 60]
    full = [p.hounsfield.aortic_blood for p in patients if p.hounsfield.aortic_blood >= 60]
    assert 0.4 < len(full) / len(patients) < 0.62
    assert 25 < min(plain) <= max(plain) < 60
    assert 90 < min(full) <= max(full) < 490
