"""How masks fare as scans get worse: Dice on synthetic patients, one thing at a time, from none of it to much of it.

    python scripts/severity.py OUT [--model DIR] [--patients 5] [--workers 2] [--figure docs/images/severity-curves.png]

The same healthy patients in every curve (seeds from 600000): share of consolidated lung, volume of effusion, of fluid
that adhesions keep at the ribs and of free air, emphysema (the share of the lungs below -950 HU, doi
10.1164/ajrccm.152.2.7633722), slice thickness, noise, lung outside the field of view to the sides, lung above or below
it. How much there is of it is measured in the rendered scan, not read off the knob. OUT gets one JSON file a curve and
patient in a folder named by the model's hash (one that is there is not made again, so it can be interrupted), table.md
and the figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from phantoms import Volume, dice, made, rendered
from torch import Tensor

from cascadeseg import Segmenter
from cascadeseg.formats import Scan
from cascadeseg.geometry import Box
from cascadeseg.labels import LUNGS
from cascadeseg.network import load_model
from cascadeseg.synthesis import PRESETS, Patient, Phantom, Tissue, sample_patient

FIRST_SEED = 600_000
VOXEL_MM: Volume = (1.5, 1.5, 2.0)
COARSE_MM: Volume = (4.0, 4.0, 4.0)
KNOTS = 9
"""Coarse scans that tell how much of its knob a trouble needs."""
LOW_ATTENUATION_HU = -950
SMALLEST_ML = 5.0
"""Of a lung in the scan, for its Dice to mean anything."""

Labels = np.ndarray[Any, Any]
Case = tuple[Scan, Labels, float]
"""A scan, its labels, and how much of the trouble there is in it."""


@dataclass(frozen=True)
class Curve:
    """One kind of trouble.

    Attributes:
        title: of its panel, with the unit.
        points: how much of it, from none to much.
        make: the cases of a patient, one a point.
    """

    title: str
    points: tuple[float, ...]
    make: Callable[[Patient, Sequence[float]], Iterator[Case]]


# ------------------------------------------------------------------------------------ trouble in the patient


def sick(patient: Patient, **findings: Any) -> Patient:
    return replace(patient, findings=replace(patient.findings, **findings))


def consolidated(patient: Patient, extent: float) -> Patient:
    return sick(patient, consolidation=1.0 if extent else 0.0, consolidation_extent=extent)


def consolidated_share(phantom: Phantom) -> float:
    """Of the lungs, what is solid."""
    return _share_of_lungs(phantom, phantom.tissues == int(Tissue.CONSOLIDATION))


def effused(patient: Patient, depth: float) -> Patient:
    """Little fluid squeezes little lung, and lifts it little off the diaphragm."""
    lies_on_diaphragm = patient.findings.subpulmonic
    below = (min(lies_on_diaphragm[0], depth), min(lies_on_diaphragm[1], depth))
    squeezed = (min(15.0, depth), min(15.0, depth))
    return sick(patient, effusion=(depth, depth), subpulmonic=below, compression=squeezed)


def loculated(patient: Patient, depth: float) -> Patient:
    """A lens of fluid at the ribs on either side, with aerated lung around it."""
    return sick(patient, pockets=(depth, depth), pocket_width=2.0)


def effusion_ml(phantom: Phantom) -> float:
    """Fluid on both sides."""
    return _ml(phantom, Tissue.EFFUSION)


def free_air(patient: Patient, depth: float) -> Patient:
    """A pneumothorax: of every second patient on the right."""
    return sick(patient, pneumothorax=(depth, 0.0) if patient.seed % 2 else (0.0, depth))


def free_air_ml(phantom: Phantom) -> float:
    return _ml(phantom, Tissue.PNEUMOTHORAX)


def emphysematous(patient: Patient, strength: float) -> Patient:
    return sick(patient, emphysema=(strength, strength))


def low_attenuation_share(phantom: Phantom) -> float:
    """Of the lungs, what is below -950 HU."""
    return _share_of_lungs(phantom, phantom.hu < LOW_ATTENUATION_HU)


def _ml(phantom: Phantom, tissue: Tissue) -> float:
    return float((phantom.tissues == int(tissue)).sum()) * phantom.grid.voxel_volume_ml


def _share_of_lungs(phantom: Phantom, what: Tensor) -> float:
    lung = phantom.labels > 0
    return float((what & lung).sum()) / max(1, int(lung.sum()))


def with_as_much(
    patient: Patient,
    points: Sequence[float],
    *,
    trouble: Callable[[Patient, float], Patient],
    measure: Callable[[Phantom], float],
    highest: float,
) -> Iterator[Case]:
    """The patient with the trouble whose measure comes close to each point.

    A few coarse scans tell what the knob does; they lie closer where there is little of the trouble, as volumes grow
    faster than depths.
    """
    knots = highest * np.linspace(0, 1, KNOTS) ** 2
    amounts = np.maximum.accumulate([measure(rendered(trouble(patient, knot), COARSE_MM)[1]) for knot in knots])
    for point in points:
        knob = float(np.interp(point, amounts, knots)) if point else 0.0
        scan, phantom = rendered(trouble(patient, knob), VOXEL_MM)
        yield scan, phantom.labels.numpy(), measure(phantom)


# ------------------------------------------------------------------------------------ trouble in the scan


def each(patient: Patient, points: Sequence[float], *, make: Callable[[Patient, float], Case]) -> Iterator[Case]:
    return (make(patient, point) for point in points)


def thick(patient: Patient, slice_mm: float) -> Case:
    scanner = replace(patient.scanner, slice_mm=slice_mm, slice_step=1.0, stairs=False)
    scan, phantom = rendered(replace(patient, scanner=scanner), (*VOXEL_MM[:2], slice_mm))
    return scan, phantom.labels.numpy(), slice_mm


def noisy(patient: Patient, sd_hu: float) -> Case:
    """Noise that has this standard deviation in the voxels of these scans."""
    scanner = replace(patient.scanner, noise_hu=sd_hu, pixel_mm=VOXEL_MM[0], slice_mm=VOXEL_MM[2])
    scan, phantom = rendered(replace(patient, scanner=scanner), VOXEL_MM)
    return scan, phantom.labels.numpy(), sd_hu


def narrow(patient: Patient, share: float) -> Case:
    """A field of view around the middle of both lungs, too narrow by a share of their volume."""
    scan, phantom = rendered(patient, VOXEL_MM)
    labels = phantom.labels.numpy()
    place = np.argwhere(labels > 0)
    middle = (place.min(axis=0) + place.max(axis=0)) / 2
    distance = np.sort(np.abs(place - middle)[:, :2].max(axis=1))
    reach = distance[min(len(distance) - 1, int((1 - share) * len(distance)))] if share else max(labels.shape)
    low = [max(0, int(middle[a] - reach)) for a in range(2)]
    high = [min(labels.shape[a], int(middle[a] + reach) + 1) for a in range(2)]
    return cut(scan, labels, Box((low[0], low[1], 0), (high[0], high[1], labels.shape[2])))


def short(patient: Patient, share: float) -> Case:
    """A scan that begins too low or ends too high, by a share of the lungs' volume: of every second patient the top."""
    scan, phantom = rendered(patient, VOXEL_MM)
    labels = phantom.labels.numpy()
    total = np.cumsum(np.count_nonzero(labels, axis=(0, 1)))
    x, y, z = labels.shape
    bottom = int(np.searchsorted(total, share * total[-1])) if share and patient.seed % 2 else 0
    top = int(np.searchsorted(total, (1 - share) * total[-1])) + 1 if share and not patient.seed % 2 else z
    return cut(scan, labels, Box((0, 0, bottom), (x, y, top)))


def cut(scan: Scan, labels: Labels, box: Box) -> Case:
    inside = labels[box.slices]
    share = 1 - np.count_nonzero(inside) / max(1, int(np.count_nonzero(labels)))
    return replace(scan, voxels=scan.voxels[box.slices].copy(), grid=scan.grid.cropped(box)), inside, share


CURVES = {
    "consolidation": Curve(
        "consolidated share of the lungs",
        (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
        partial(with_as_much, trouble=consolidated, measure=consolidated_share, highest=1.6),
    ),
    "effusion": Curve(
        "effusion, both sides, ml",
        (0, 100, 250, 500, 1000, 1500, 2000),
        partial(with_as_much, trouble=effused, measure=effusion_ml, highest=160.0),
    ),
    "loculated": Curve(
        "loculated fluid, both sides, ml",
        (0, 25, 50, 100, 200),
        partial(with_as_much, trouble=loculated, measure=effusion_ml, highest=60.0),
    ),
    "pneumothorax": Curve(
        "free air on one side, ml",
        (0, 100, 250, 500, 1000),
        partial(with_as_much, trouble=free_air, measure=free_air_ml, highest=120.0),
    ),
    "emphysema": Curve(
        f"share of the lungs below {LOW_ATTENUATION_HU} HU",
        (0, 0.1, 0.2, 0.3, 0.5),
        partial(with_as_much, trouble=emphysematous, measure=low_attenuation_share, highest=1.0),
    ),
    "slices": Curve("slice thickness, mm", (0.6, 1, 2, 3, 5, 8), partial(each, make=thick)),
    "noise": Curve(
        f"noise, HU (SD in {VOXEL_MM[0]:g} x {VOXEL_MM[1]:g} x {VOXEL_MM[2]:g} mm)",
        (5, 20, 40, 80, 120, 200),
        partial(each, make=noisy),
    ),
    "width": Curve(
        "share of the lungs beside the field of view", (0, 0.1, 0.2, 0.4, 0.6, 0.8), partial(each, make=narrow)
    ),
    "height": Curve(
        "share of the lungs above or below the scan", (0, 0.1, 0.2, 0.4, 0.6, 0.8), partial(each, make=short)
    ),
}


# ------------------------------------------------------------------------------------ measuring and showing


def curve_of(segmenter: Segmenter, name: str, seed: int) -> list[dict[str, Any]]:
    """One patient at all points of one curve."""
    curve, patient = CURVES[name], sample_patient(seed, PRESETS["healthy"])
    cases = curve.make(patient, curve.points)
    return [
        {"curve": name, "point": point, "seed": seed, **scored(segmenter, *case)}
        for point, case in zip(curve.points, cases, strict=True)
    ]


def scored(segmenter: Segmenter, scan: Scan, labels: Labels, measured: float) -> dict[str, Any]:
    result = segmenter.segment(scan)
    there = [n for n in LUNGS if np.count_nonzero(labels == n.value) * scan.grid.voxel_volume_ml >= SMALLEST_ML]
    return {
        "measured": measured,
        "dice": {lung.side: dice(result.labels, labels, lung.value) for lung in there},
        "verdict": {lung.label.side: lung.verdict for lung in result.lungs},
        "quality": result.quality,
    }


def score(record: dict[str, Any]) -> float:
    """The mean Dice of the lungs that are in the scan."""
    return mean(record["dice"].values()) if record["dice"] else float("nan")


def table(records: list[dict[str, Any]]) -> str:
    """A row a point: how much there was of the trouble, and the Dice."""
    lines = ["| | measured | patients | mean Dice | median | worst lung | scans for review |", "|---" * 7 + "|"]
    for name, curve in CURVES.items():
        for point in curve.points:
            mine = [r for r in records if r["curve"] == name and r["point"] == point and r["dice"]]
            if not mine:
                continue
            worst = min(value for r in mine for value in r["dice"].values())
            review = sum("review" in r["verdict"].values() for r in mine)
            measured = f"{mean(r['measured'] for r in mine):.3g}"
            cells = [f"{curve.title}: {point:g}", measured, str(len(mine)), f"{mean(map(score, mine)):.3f}"]
            cells.append(f"{median(map(score, mine)):.3f}")
            lines.append("| " + " | ".join([*cells, f"{worst:.3f}", str(review)]) + " |")
    return "\n".join(lines) + "\n"


def draw(records: list[dict[str, Any]], figure: Path) -> None:
    """A panel a curve: patients thin, their mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, panels = pyplot.subplots(3, 3, figsize=(11, 9), sharey=True, constrained_layout=True)
    for panel, (name, curve) in zip(panels.flat, CURVES.items(), strict=True):
        mine = [r for r in records if r["curve"] == name and r["dice"]]
        for seed in sorted({r["seed"] for r in mine}):
            line = sorted((r["measured"], score(r)) for r in mine if r["seed"] == seed)
            panel.plot(*zip(*line, strict=True), color="0.7", linewidth=0.8)
        points = [[r for r in mine if r["point"] == point] for point in curve.points]
        means = [(mean(r["measured"] for r in here), mean(map(score, here))) for here in points if here]
        panel.plot(*zip(*means, strict=True), color="C0", linewidth=2, marker="o", markersize=3)
        panel.set_xlabel(curve.title)
        panel.grid(alpha=0.3)
    for panel in panels[:, 0]:
        panel.set_ylabel("Dice")
    lowest = min((score(r) for r in records if r["dice"]), default=0)
    panels[0, 0].set_ylim(max(0, lowest - 0.03), 1.0)
    figure.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(figure, dpi=90)
    pyplot.close(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="a model folder; default: the shipped one")
    parser.add_argument("--patients", type=int, default=5, help="default 5")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--workers", type=int, default=1, help="processes; default 1")
    parser.add_argument("--figure", type=Path, help="default: in OUT")
    options = parser.parse_args()
    record = options.output / load_model(options.model).sha256[:12]
    jobs = {
        record / f"{name}-{seed}.json": (name, seed)
        for name in options.curves
        for seed in range(FIRST_SEED, FIRST_SEED + options.patients)
    }
    records = [point for curve in made(jobs, curve_of, options.model, options.workers) for point in curve]
    (options.output / "table.md").write_text(table(records), encoding="utf-8")
    draw(records, options.figure or options.output / "severity-curves.png")
    print(table(records))


if __name__ == "__main__":
    main()
