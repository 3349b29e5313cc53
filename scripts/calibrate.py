"""Fits the confidence of a model's masks on synthetic scans that are meant to break it, and tests it: cross-validation.

    python scripts/calibrate.py OUT [--model DIR] [--count 400] [--workers 2] [--write]

Every second kind of scan is sick, noisy or oddly cut, the others are broken as files are: wrong HU, wrong spacing,
upside down, slices lost. To these stress scans comes a quarter as many ordinary ones, patients of the default preset,
usual voxel sizes; what is caught is told of the stress scans, false alarms of both, as most of what is segmented is
ordinary. All scans are fitted on in the end; what the tables tell of a mask is what a fit says of it that was made
without a seventh of the scans, the mask's own among them. Bad is a mask with a Dice below 0.9, and one of a scan whose
header is wrong about how the body lies, as right and left are. For review is a mask whose quality, the Dice to expect,
is below 0.89, and one whose header is doubted. OUT gets one JSON file a scan in a folder named by the model's hash,
confidence.json and table.md; a scan that is there is not done again, so it can be interrupted.
``--write`` puts the calibration into the notes of the model's model.json, next to the weights it was fitted to; their
hash stays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from phantoms import dice, lies_otherwise, made, rendered

from cascadeseg import Segmenter
from cascadeseg.atomic import replace_text
from cascadeseg.cascade.confidence import NOTE, Calibration, Signs, features, judged
from cascadeseg.cascade.orientation import UNLIKE_THE_HEADER
from cascadeseg.errors import ScanError
from cascadeseg.formats import Scan
from cascadeseg.formats.doctor import audit
from cascadeseg.geometry import Box, Grid
from cascadeseg.network import load_model, shipped_model
from cascadeseg.synthesis import PRESETS, Patient, sample_patient

FIRST_SEEDS = 700_000, 900_000
"""Of the two halves."""
ORDINARY = 50_000
"""From a half's stress scans to its ordinary ones."""
FOLDS = 7
"""Of the cross-validation; it has no factor in common with the number of kinds."""
GOOD_DICE = 0.9
REVIEW_BELOW = 0.89
"""Of quality: with it nine of ten bad masks of stress scans are caught, and fewer than one of twenty good ones."""
NARROWLY = 0.01
"""Dice this close to `GOOD_DICE` is good or bad by chance."""
CLEARLY_GOOD_DICE = 0.95
"""About as good as one reader's contours by another's."""
SMALLEST_ML = 5.0
"""What of a lung must be in the scan for its absence from the mask to be an error."""

Random = np.random.Generator
Case = tuple[Scan, np.ndarray[Any, Any]]


# ------------------------------------------------------------------------------------ scans that are hard


def patient_of(seed: int, kind: str, random: Random) -> Patient:
    """A patient of one of the kinds below; the broken kinds begin with a chest like any other."""
    sick = ["covid", "effusion", "emphysema", "fibrosis", "oncology", "intensive_care"]
    presets = {"as they come": "default", "sick": str(random.choice(sick)), "partial": "partial"}
    presets |= {"one lung": "one_lung", "abdomen": "abdomen"}
    patient = sample_patient(seed, PRESETS[presets.get(kind, str(random.choice(["healthy", *sick])))])
    findings, scanner, side = patient.findings, patient.scanner, int(random.integers(2))
    pair = (1, 0) if side == 0 else (0, 1)
    if kind == "solid":
        findings = replace(findings, consolidation=1.0, consolidation_extent=random.uniform(0.4, 1.1))
    elif kind == "white":
        findings = replace(findings, white=pair)
    elif kind == "effusion":
        findings = replace(findings, effusion=tuple(random.uniform(30, 140, 2)), compression=(20.0, 20.0))
    elif kind == "pneumothorax":
        depth = random.uniform(20, 100, 2) * pair
        findings = replace(findings, pneumothorax=(float(depth[0]), float(depth[1])))
    elif kind == "missing":
        findings = replace(findings, missing=pair)
    elif kind == "noise":
        scanner = replace(scanner, noise_hu=random.uniform(100, 600), streaks_hu=random.uniform(0, 150))
    return replace(patient, findings=findings, scanner=scanner)


def wrong_offset(scan: Scan, labels: np.ndarray[Any, Any], random: Random) -> Case:
    offset = random.choice([-1, 1]) * random.uniform(100, 1100)
    return replace(scan, intercept=scan.intercept + offset), labels


def wrong_slope(scan: Scan, labels: np.ndarray[Any, Any], random: Random) -> Case:
    return replace(scan, slope=random.choice([random.uniform(0.2, 0.7), random.uniform(1.4, 3.0)])), labels


def clipped(scan: Scan, labels: np.ndarray[Any, Any], random: Random) -> Case:
    low, high = [(-160, 240), (-1000, -150), (-600, 200), (-1350, -700)][int(random.integers(4))]
    return replace(scan, voxels=scan.voxels.clip(low, high)), labels


def upside_down(scan: Scan, labels: np.ndarray[Any, Any], random: Random) -> Case:
    return replace(scan, voxels=scan.voxels[:, :, ::-1].copy()), labels[:, :, ::-1]


def turned(scan: Scan, labels: np.ndarray[Any, Any], random: Random) -> Case:
    """Axes exchanged in a header that does not say so."""
    order = [(0, 2, 1), (2, 1, 0), (1, 0, 2)][int(random.integers(3))]
    spacing = [scan.grid.spacing_mm[axis] for axis in order]
    voxels = scan.voxels.transpose(order).copy()
    return Scan(voxels, Grid.axis_aligned(voxels.shape, spacing), source=scan.source), labels.transpose(order)


def wrong_spacing(scan: Scan, labels: np.ndarray[Any, Any], random: Random) -> Case:
    factor = np.ones(3)
    factor[[[2], [0, 1], [0, 1, 2]][int(random.integers(3))]] = random.choice(
        [random.uniform(0.25, 0.6), random.uniform(1.7, 4)]
    )
    spacing = (np.asarray(scan.grid.spacing_mm) * factor).tolist()
    grid = Grid.axis_aligned(scan.grid.shape, spacing)
    return replace(scan, grid=grid), labels


def cut_field(scan: Scan, labels: np.ndarray[Any, Any], random: Random) -> Case:
    """A field of view through the lungs, somewhere."""
    shape = np.asarray(scan.grid.shape)
    size = np.maximum(1, (shape * random.uniform([0.25, 0.25, 0.1], [0.7, 0.7, 1.0])).astype(int))
    start = (random.uniform(0, 1, 3) * (shape - size)).astype(int)
    box = Box.whole(size.tolist()).shifted(start.tolist())
    cut = replace(scan, voxels=scan.voxels[box.slices].copy(), grid=scan.grid.cropped(box))
    return cut, labels[box.slices]


def lost_slices(scan: Scan, labels: np.ndarray[Any, Any], random: Random) -> Case:
    """A stack that was put together without a block in the middle, or out of order."""
    order = np.arange(scan.grid.shape[2])
    if random.uniform() < 0.5:
        order = np.roll(order, int(len(order) * random.uniform(0.3, 0.7)))
    else:
        start, length = (int(len(order) * share) for share in (random.uniform(0.2, 0.5), random.uniform(0.15, 0.4)))
        order = np.delete(order, np.arange(start, start + length))
    grid = Grid((*scan.grid.shape[:2], len(order)), scan.grid.affine)
    return replace(scan, voxels=scan.voxels[:, :, order].copy(), grid=grid), labels[:, :, order]


def smeared(scan: Scan, labels: np.ndarray[Any, Any], random: Random) -> Case:
    """Averaged over centimetres, as by a wrong reconstruction or by motion."""
    size = [2 * round(random.uniform(4, 16) / mm / 2) + 1 for mm in scan.grid.spacing_mm]
    hu = torch.from_numpy(scan.voxels.astype(np.float32))[None, None]
    padding = [n // 2 for n in reversed(size) for _ in range(2)]
    blurred = F.avg_pool3d(F.pad(hu, padding, mode="replicate"), size, stride=1)[0, 0]
    return replace(scan, voxels=blurred.round().numpy().astype(np.int16)), labels


HARD = ("as they come", "sick", "solid", "white", "effusion", "pneumothorax", "missing", "noise", "thick", "partial",
        "one lung", "abdomen")  # fmt: skip
BROKEN: dict[str, Callable[[Scan, np.ndarray[Any, Any], Random], Case]] = {
    "wrong offset": wrong_offset,
    "wrong slope": wrong_slope,
    "clipped": clipped,
    "upside down": upside_down,
    "turned": turned,
    "wrong spacing": wrong_spacing,
    "cut field": cut_field,
    "lost slices": lost_slices,
    "smeared": smeared,
}
KINDS = tuple(kind for pair in zip(HARD, [*BROKEN, *BROKEN][: len(HARD)], strict=True) for kind in pair)


def ordinary(seed: int) -> tuple[str, Scan, np.ndarray[Any, Any]]:
    """The kind, the scan and the labels of a seed."""
    random = np.random.default_rng(seed)
    in_plane, slices = random.uniform(0.8, 1.2), random.uniform(1.0, 5.0)
    scan, phantom = rendered(sample_patient(seed, PRESETS["default"]), (in_plane, in_plane, slices))
    return "ordinary", scan, phantom.labels.numpy()


def stressed(seed: int) -> tuple[str, Scan, np.ndarray[Any, Any]]:
    """The kind, the scan and the labels of a seed; small, as thick and coarse voxels make it."""
    kind, random = KINDS[seed % len(KINDS)], np.random.default_rng(seed)
    patient = patient_of(seed, kind, random)
    in_plane, slices = random.uniform(1.6, 3.0), random.uniform(1.5, 5.0)
    scan, phantom = rendered(patient, (in_plane, in_plane, random.uniform(6, 15) if kind == "thick" else slices))
    labels = phantom.labels.numpy()
    if kind in BROKEN:
        scan, labels = BROKEN[kind](scan, labels, random)
    return kind, scan, labels


@cache
def lies(seed: int) -> bool:
    """Whether the header of a seed's scan is wrong about how the body lies, or its patient is a mirror image."""
    if is_ordinary(seed):
        kind, patient = "ordinary", sample_patient(seed, PRESETS["default"])
    else:
        kind = KINDS[seed % len(KINDS)]
        patient = patient_of(seed, kind, np.random.default_rng(seed))
    return kind in ("upside down", "turned") or lies_otherwise(patient)


def is_ordinary(seed: int) -> bool:
    """Whether a seed stands for an ordinary scan, not for one meant to break the model."""
    return seed % (2 * ORDINARY) >= ORDINARY


def judged_scan(segmenter: Segmenter, seed: int) -> dict[str, Any]:
    """One scan, segmented: each lung's Dice, and what the cascade itself says of it."""
    kind, scan, labels = (ordinary if is_ordinary(seed) else stressed)(seed)
    try:
        result = segmenter.segment(audit(scan))
    except ScanError as error:  # nothing to judge
        return {"seed": seed, "kind": kind, "lungs": [], "refused": str(error)}
    lungs = [
        {
            "side": lung.label.side,
            "dice": dice(result.labels, labels, lung.label.value),
            "volume_ml": lung.volume_ml,
            "reference_ml": float(np.count_nonzero(labels == lung.label.value)) * scan.grid.voxel_volume_ml,
            "reasons": list(lung.reasons),
            "signs": asdict(lung.signs) if lung.signs else None,
        }
        for lung in result.lungs
    ]
    return {"seed": seed, "kind": kind, "lungs": lungs}


# ------------------------------------------------------------------------------------ fitting and testing


@dataclass(frozen=True)
class Judgement:
    """One lung: how good its mask was, and what was seen of it (None: there is no mask)."""

    seed: int
    kind: str
    dice: float
    signs: Signs | None
    reasons: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether nobody needs to look at it."""
        return self.dice >= GOOD_DICE and not lies(self.seed)

    @property
    def ordinary(self) -> bool:
        return is_ordinary(self.seed)

    @property
    def unlike_the_header(self) -> bool:
        """Whether it is for review whatever its quality: the body lies otherwise than the header says."""
        return UNLIKE_THE_HEADER in self.reasons


def judgements(scans: list[dict[str, Any]]) -> list[Judgement]:
    """Of all lungs that have a mask, or should have one."""
    found = []
    for scan in scans:
        for lung in scan["lungs"]:
            signs = Signs(**lung["signs"]) if lung["signs"] else None
            if signs is not None or lung["reference_ml"] >= SMALLEST_ML:
                found.append(Judgement(scan["seed"], scan["kind"], lung["dice"], signs, tuple(lung["reasons"])))
    return found


def fitted(masks: list[Judgement], rounds: int = 10_000, ridge: float = 1e-2) -> Calibration:
    """Logistic regression of the Dice, with weights that are not negative, by projected gradients."""
    found = [features(mask.signs) for mask in masks if mask.signs]
    names = list(found[0])
    every = np.array([[one[name] for name in names] for one in found])
    mean, sd = every.mean(axis=0), every.std(axis=0) + 1e-9
    x, y = (every - mean) / sd, np.array([mask.dice for mask in masks if mask.signs])
    log_odds, weights = 0.0, np.zeros(len(names))
    step = 4 / (1 + len(names))  # no signs, however much alike, bend the likelihood more
    for _ in range(rounds):
        error = 1 / (1 + np.exp(x @ weights - log_odds)) - y
        log_odds -= step * error.mean()
        weights = np.maximum(0, weights - step * (ridge * weights - x.T @ error / len(y)))
    log_odds, weights = float(log_odds + mean / sd @ weights), weights / sd
    kept = {name: round(float(weight), 4) for name, weight in zip(names, weights, strict=True) if weight > 1e-4}
    return Calibration(round(log_odds, 4), kept, review_below=REVIEW_BELOW)


Fits = Sequence[Calibration]
"""By fold: what was fitted without it."""


def cross_fitted(rows: list[Judgement]) -> Fits:
    return [fitted([row for row in rows if row.seed % FOLDS != fold]) for fold in range(FOLDS)]


def quality(one: Judgement, fits: Fits) -> float:
    """What is said of a mask, if there is one, by the fit that knows nothing of its scan."""
    return fits[one.seed % FOLDS].quality(one.signs) if one.signs else np.nan


def reviewed(one: Judgement, fits: Fits) -> bool:
    """Whether the verdict on a lung is ``review``."""
    if one.signs is None or one.unlike_the_header:
        return bool(one.reasons)
    return bool(judged(one.signs, fits[one.seed % FOLDS])[1])


def grouped(rows: list[Judgement]) -> dict[str, list[Judgement]]:
    """Those of stress scans and of ordinary ones."""
    stress, ordinary_ones = ([row for row in rows if row.ordinary == wanted] for wanted in (False, True))
    return {"**all of these**": stress, "**ordinary**": ordinary_ones}


def of_lungs(rows: list[Judgement], fits: Fits) -> str:
    """By kind of scan: masks that should be looked at and are, and masks that should not and are all the same."""
    lines = ["| scans | bad masks | caught | good masks | false alarms | lungs without a mask | caught |"]
    lines.append("|---" * 7 + "|")
    by_kind = {kind: [row for row in rows if row.kind == kind] for kind in dict.fromkeys(KINDS)}
    for kind, mine in (by_kind | grouped(rows)).items():
        masks, missed = [row for row in mine if row.signs], [row for row in mine if not row.signs]
        bad, good = [row for row in masks if not row.good], [row for row in masks if row.good]
        told = [counted([reviewed(row, fits) for row in group]) for group in (bad, good, missed)]
        lines.append(f"| {kind} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def of_scans(rows: list[Judgement], fits: Fits) -> str:
    """Whole scans: bad where a lung is, and reviewed where a lung is."""
    lines = ["| scans | with a bad mask | caught | good | false alarms |", "|---" * 5 + "|"]
    for kind, mine in grouped(rows).items():
        scans: dict[int, list[Judgement]] = {}
        for row in mine:
            scans.setdefault(row.seed, []).append(row)
        told = []
        for wanted in (False, True):
            lungs_of = [lungs for lungs in scans.values() if all(lung.good for lung in lungs) == wanted]
            told.append(counted([any(reviewed(lung, fits) for lung in lungs) for lungs in lungs_of]))
        lines.append(f"| {kind} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def of_headers(rows: list[Judgement]) -> str:
    """Whole scans, stress and ordinary: those whose body lies otherwise than the header says, and all others."""
    doubted = {row.seed: row.unlike_the_header for row in rows if row.signs}
    lines = ["| the header is | scans | doubted |", "|---|---|---|"]
    for title, wanted in (("wrong", True), ("right", False)):
        lines.append(f"| {title} | {counted([told for seed, told in doubted.items() if lies(seed) == wanted])} |")
    return "\n".join(lines) + "\n"


def counted(told: list[bool]) -> str:
    """Two cells: how many there are, and how many of them were told."""
    return f"{len(told)} | {sum(told)} ({np.mean(told):.1%})" if told else "0 | "


def borders(rows: list[Judgement], fits: Fits) -> str:
    """What other values of ``review_below`` would give."""
    low, high = GOOD_DICE - NARROWLY, GOOD_DICE + NARROWLY
    stress, usual = ([row for row in rows if row.signs and row.ordinary == wanted] for wanted in (False, True))
    columns = {
        "bad stress masks caught": [row for row in stress if not row.good],
        "false alarms, stress": [row for row in stress if row.good],
        "false alarms, ordinary": [row for row in usual if row.good],
        f"Dice < {low:g} caught": [row for row in stress if row.dice < low],
        f"false alarms, Dice >= {high:g}": [row for row in stress if row.good and row.dice >= high],
        f"Dice >= {CLEARLY_GOOD_DICE:g}": [row for row in stress if row.good and row.dice >= CLEARLY_GOOD_DICE],
    }
    lines = [f"| review below | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for border in (0.84, 0.85, 0.86, 0.87, 0.88, 0.89, 0.9, 0.91, 0.92):
        told = [
            np.mean([row.unlike_the_header or quality(row, fits) < border for row in group]) if group else np.nan
            for group in columns.values()
        ]
        lines.append(f"| {border:g} | {' | '.join(f'{share:.1%}' for share in told)} |")
    return "\n".join(lines) + "\n"


def reliability(rows: list[Judgement], fits: Fits) -> str:
    """Whether masks of a quality have the Dice that it says."""
    expected = np.array([quality(row, fits) for row in rows if row.signs])
    reached = np.array([row.dice for row in rows if row.signs])
    lines = ["| quality | masks | mean quality | mean Dice | share with Dice >= 0.9 |", "|---" * 5 + "|"]
    for low, high in ((0, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 0.95), (0.95, 1.01)):
        here = (expected >= low) & (expected < high)
        if here.any():
            good = (reached[here] >= GOOD_DICE).mean()
            cells = f"{here.sum()} | {expected[here].mean():.3f} | {reached[here].mean():.3f} | {good:.2f}"
            lines.append(f"| {low:g} to {min(high, 1):g} | {cells} |")
    apart = np.abs(expected - reached).mean()
    return "\n".join([*lines, "", f"Dice and quality are {apart:.3f} apart in the mean."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="a model folder; default: the shipped one")
    parser.add_argument("--count", type=int, default=400, help="stress scans in all; default 400")
    parser.add_argument("--workers", type=int, default=1, help="processes; default 1")
    parser.add_argument("--write", action="store_true", help="put the calibration into the model's notes")
    options = parser.parse_args()
    folder = Path(options.model) if options.model else shipped_model()
    record = options.output / load_model(folder).sha256[:12]
    rows: list[Judgement] = []
    for first in FIRST_SEEDS:
        each = options.count // 2
        seeds = [*range(first, first + each), *range(first + ORDINARY, first + ORDINARY + each // 4)]
        jobs = {record / f"{n}.json": (n,) for n in seeds}
        rows += judgements(made(jobs, judged_scan, options.model, options.workers))
    calibration, fits = fitted(rows), cross_fitted(rows)
    tables = [table(rows, fits) for table in (of_lungs, of_scans, borders, reliability)] + [of_headers(rows)]
    text = "\n".join([*tables, f"{calibration}\n"])
    (options.output / "table.md").write_text(text, encoding="utf-8")
    (options.output / "confidence.json").write_text(json.dumps(asdict(calibration), indent=1) + "\n", encoding="utf-8")
    print(text)
    if options.write:
        description = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        description["notes"][NOTE] = calibration.note(description["sha256"])
        replace_text(folder / "model.json", json.dumps(description, indent=2) + "\n")


if __name__ == "__main__":
    main()
