"""What lies around lungs, real scans beside synthetic: tissues just outside them, by region, gas of the bowel, domes.

    python scripts/surroundings.py SCANS [--presets healthy training] [--count 12] [--seed 7000]

SCANS holds NAME.nii.gz and NAME_ref.nii.gz (1 right lung, 2 left lung, 255 ignored, here taken for lung), as for
validate.py. Counted are voxels 2 to 6 mm outside both lungs, 6 to 12 mm straight below the outer half of their domes
and the backs of their bases, and the gas of the abdomen on the left, within 50 mm of them; and how far the right
lung's base lies below its highest place, from back to front. Where synthetic patients are not as patients are, a
network learns what it will not meet, and meets what it never learned. Prints three Markdown tables: medians over scans,
and from the 10th to the 90th percentile. The scans are looked at, nothing is trained on them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cc3d
import fill_voids
import numpy as np
import numpy.typing as npt
import SimpleITK
from phantoms import rendered
from validate import distance_mm, reference_of, scans_of

from cascadeseg import read_scan
from cascadeseg.formats import Scan, read_labels
from cascadeseg.geometry import canonical_view
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG
from cascadeseg.synthesis import PRESETS, sample_patient

TISSUES = {"gas": -500, "edge": -150, "fat": -30, "soft tissue": 130, "denser": np.inf}
"""The highest HU of each."""
SHELL_MM = 2.0, 6.0
UNDER_BASE_MM, DOME_MM, LUNG_ABOVE_MM = (6.0, 12.0), 25.0, 10.0
BACK = 0.15, 0.30
"""Where the back of a base is looked at, of the lung's depth from its back."""
DEPTHS, DEPTH, MIDDLE = (0.1, 0.3, 0.5, 0.7, 0.9), 0.05, (0.35, 0.75)
"""Where the shape of a base is looked at: so far from the lung's back, give or take, and in the middle of its width."""
STEP_MM = 1.5
"""Finer scans are looked at in every second, third, ... voxel."""
VOXEL_MM = 1.6, 1.6, 3.0
SMALLEST_LUNG_ML = 800.0
"""Of the synthetic patients that are looked at: both lungs are there, and whole."""
GAS_HU = -600
BONE_HU = 180
GAS_MM = 5.0, 50.0
"""How far from the lungs gas of the abdomen is looked at; what is nearer may be lung."""
CHEST_WALL_MM = 60.0
"""What is denser than bone and as near to the skin as that is a rib, or the like."""
POCKET_ML = 2.0
LEAST_GAS_ML = 5.0
PLACES = (
    "to the nearest rib, mm",
    "to the skin in its slice, mm",
    "from the middle, of half the body's width",
    "from back to front, of the body's depth",
)

Mask = npt.NDArray[np.bool_]
Labels = npt.NDArray[Any]
Shares = dict[str, list[float]]
"""By region: of each tissue, in per cent."""


class Measured(NamedTuple):
    """Of one scan: what lies around its lungs, `PLACES` of its gas if it has any, the shape of its right base."""

    around: Shares
    gas: list[float] | None
    base_mm: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scans", type=Path)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["healthy", "training"])
    parser.add_argument("--count", type=int, default=12, help="synthetic patients of a preset; default 12")
    parser.add_argument("--seed", type=int, default=7000, help="of the first one; default 7000")
    options = parser.parse_args()
    columns = {"real": [measured(*one) for one in real(options.scans)]}
    if not columns["real"]:
        parser.error(f"{options.scans}: no scan NAME.nii.gz with its reference NAME_ref.nii.gz")
    for preset in options.presets:
        seeds = range(options.seed, options.seed + options.count)
        columns[preset] = [measured(*one) for one in synthetic(preset, seeds)]
    print(as_markdown({kind: [scan.around for scan in scans] for kind, scans in columns.items()}))
    print()
    print(places_as_markdown({kind: [scan.gas for scan in scans] for kind, scans in columns.items()}))
    print()
    print(base_as_markdown({kind: [scan.base_mm for scan in scans] for kind, scans in columns.items()}))


def real(folder: Path) -> Iterator[tuple[Scan, Labels]]:
    """Scans whose references have both lungs, and these, canonical; what they ignore is of no lung, or of both."""
    for path in scans_of(folder):
        if reference_of(path).exists():
            labels, grid = read_labels(reference_of(path))
            if all((labels == n).any() for n in (1, 2)):
                yield read_scan(path).canonical(), np.asarray(canonical_view(labels, grid))


def synthetic(preset: str, seeds: Iterable[int]) -> Iterator[tuple[Scan, Labels]]:
    """Patients with two whole lungs, or nearly."""
    for seed in seeds:
        scan, phantom = rendered(sample_patient(seed, PRESETS[preset]), VOXEL_MM)
        labels = phantom.labels.numpy()
        if all(np.count_nonzero(labels == n) * scan.grid.voxel_volume_ml > SMALLEST_LUNG_ML for n in (1, 2)):
            yield scan, labels


def measured(scan: Scan, labels: Labels) -> Measured:
    """What lies around the lungs of a canonical scan, looked at in steps of `STEP_MM`.

    Args:
        scan: canonical.
        labels: (X, Y, Z), 1 right lung, 2 left lung.
    """
    steps = [max(1, round(STEP_MM / mm)) for mm in scan.grid.spacing_mm]
    every = tuple(slice(None, None, step) for step in steps)
    spacing_mm = [step * mm for step, mm in zip(steps, scan.grid.spacing_mm, strict=True)]
    hu, labels = scan.as_hu(scan.voxels[every]), labels[every]
    distance = distance_mm(labels > 0, spacing_mm)
    return Measured(
        shares(hu, labels, distance, spacing_mm),
        places(hu, labels, distance, spacing_mm),
        base_below_top(labels == RIGHT_LUNG.value, spacing_mm[2]),
    )


def shares(hu: Labels, labels: Labels, distance: Labels, spacing_mm: list[float]) -> Shares:
    """What lies around the lungs."""
    kind = np.searchsorted(list(TISSUES.values()), hu)
    return {
        name: [100 * float(np.mean(kind[where] == tissue)) for tissue in range(len(TISSUES))]
        for name, where in regions(labels, distance, spacing_mm).items()
    }


def regions(labels: Labels, distance: Labels, spacing_mm: list[float]) -> dict[str, Mask]:
    """Parts of the shell around the lungs, by how far they lie from the middle, and how far back and up; the domes."""
    lungs = labels > 0
    shell = (distance > SHELL_MM[0]) & (distance <= SHELL_MM[1])
    spans = [np.flatnonzero(lungs.any(axis=tuple({0, 1, 2} - {axis}))) for axis in range(3)]
    x, y, z = np.ogrid[tuple(slice(0, n) for n in lungs.shape)]
    beside_mm = np.abs(x - (spans[0][0] + spans[0][-1]) / 2) * spacing_mm[0]
    front, up = ((at - span[0]) / (span[-1] - span[0]) for at, span in ((y, spans[1]), (z, spans[2])))
    return {
        "all around": shell,
        "base, behind, medial": shell & (up < 0.25) & (front < 0.45) & (beside_mm < 60),
        "base, behind, lateral": shell & (up < 0.25) & (front < 0.45) & (beside_mm >= 60),
        "base, in front": shell & (up < 0.35) & (front > 0.6),
        "hilum": shell & (up > 0.4) & (up < 0.7) & (front > 0.25) & (front < 0.7) & (beside_mm < 50),
        "above, medial": shell & (up > 0.7) & (beside_mm < 50),
        "chest wall": shell & (up > 0.3) & (beside_mm >= 80),
        "under the right dome": under_dome(labels == RIGHT_LUNG.value, 1, spacing_mm),
        "under the left dome": under_dome(labels == LEFT_LUNG.value, -1, spacing_mm),
        "under the back of the right base": under_back(labels == RIGHT_LUNG.value, spacing_mm),
        "under the back of the left base": under_back(labels == LEFT_LUNG.value, spacing_mm),
    }


def under_dome(lung: Mask, outwards: int, spacing_mm: list[float]) -> Mask:
    """What lies below the outer half of a lung's base, but for what falls off from the dome.

    ``outwards`` is 1 where x grows from the middle of the body to the lung's side, -1 on the other one.
    """
    x, y = np.nonzero(lung.any(axis=2))
    outer = outwards * (x - np.median(x)) > 0 if len(x) else np.zeros(0, bool)
    x, y = x[outer], y[outer]
    base_mm = lung.argmax(axis=2)[x, y] * spacing_mm[2]
    on_dome = base_mm >= np.percentile(base_mm, 90) - DOME_MM if len(x) else outer[outer]
    return straight_below(lung, x[on_dome], y[on_dome], spacing_mm)


def under_back(lung: Mask, spacing_mm: list[float]) -> Mask:
    """What lies below a lung's base where this is `BACK` from the lung's back."""
    x, y = np.nonzero(lung.any(axis=2))
    from_back = along_span(y)
    at_back = (from_back > BACK[0]) & (from_back <= BACK[1])
    return straight_below(lung, x[at_back], y[at_back], spacing_mm)


def along_span(at: Labels) -> Labels:
    """How far each index lies along the span of all, from 0 to 1."""
    return (at - at.min()) / max(1, np.ptp(at)) if len(at) else np.zeros(0)


def base_below_top(lung: Mask, slice_mm: float) -> list[float]:
    """How far (mm) a lung's base lies below its highest place, at each of `DEPTHS`: medians over its columns there."""
    x, y = np.nonzero(lung.any(axis=2))
    base_mm = lung.argmax(axis=2)[x, y] * slice_mm
    across, from_back = along_span(x), along_span(y)
    middle = (across > MIDDLE[0]) & (across < MIDDLE[1])
    heights = [float(np.median(base_mm[middle & (np.abs(from_back - depth) < DEPTH)])) for depth in DEPTHS]
    return [max(heights) - height for height in heights]


def straight_below(lung: Mask, x: Labels, y: Labels, spacing_mm: list[float]) -> Mask:
    """What lies `UNDER_BASE_MM` straight below a lung in these columns, where it is `LUNG_ABOVE_MM` high at least."""
    lowest, reach = lung.argmax(axis=2), max(1, round(LUNG_ABOVE_MM / spacing_mm[2]))
    below = np.zeros(lung.shape, bool)
    for column in zip(x, y, strict=True):
        base = lowest[column]
        if lung[column][base : base + reach].all():
            low, high = (base - round(mm / spacing_mm[2]) for mm in UNDER_BASE_MM)
            below[column][max(0, high) : max(0, low)] = True
    return below & ~lung


def places(hu: Labels, labels: Labels, distance: Labels, spacing_mm: list[float]) -> list[float] | None:
    """`PLACES` of the gas below the left lung, medians over its voxels; None where there is hardly any."""
    body = body_of(hu, labels > 0)
    gas = cc3d.dust(
        body & (hu < GAS_HU) & (distance > GAS_MM[0]), threshold=round(1000 * POCKET_ML / np.prod(spacing_mm))
    )
    x, y, z = np.nonzero(gas & (distance < GAS_MM[1]))
    left = labels == LEFT_LUNG.value
    heights = np.flatnonzero(left.any(axis=(0, 1)))
    edges = np.array([_edges(part) for part in np.moveaxis(body, 2, 0)])[z]
    across = (2 * x - edges[:, 0] - edges[:, 1]) / np.maximum(edges[:, 1] - edges[:, 0], 1)
    side = np.sign(np.nonzero(left)[0].mean() - np.nonzero(labels)[0].mean())
    on_left = (z < heights[0] + 0.4 * len(heights)) & (across * side > 0)
    if np.count_nonzero(on_left) * np.prod(spacing_mm) < 1000 * LEAST_GAS_ML:
        return None
    x, y, z, across, edges = x[on_left], y[on_left], z[on_left], across[on_left], edges[on_left]
    skin = np.stack([-distance_mm(part, spacing_mm[:2]) for part in np.moveaxis(body, 2, 0)], axis=2)
    rib = distance_mm((hu > BONE_HU) & body & (skin < CHEST_WALL_MM), spacing_mm)
    forward = (y - edges[:, 2]) / (edges[:, 3] - edges[:, 2])
    return [float(np.median(each)) for each in (rib[x, y, z], skin[x, y, z], np.abs(across), forward)]


def body_of(hu: Labels, lungs: Mask) -> Mask:
    """The body with all its gas: the largest piece of tissue and lung in each slice that thin things do not join."""
    body = np.zeros(hu.shape, dtype=bool)
    for k in range(hu.shape[2]):
        tissue = SimpleITK.GetImageFromArray(((hu[..., k] > 2 * TISSUES["edge"]) | lungs[..., k]).astype(np.uint8))
        tissue = SimpleITK.BinaryMorphologicalOpening(tissue, [2, 2])
        largest = cc3d.largest_k(SimpleITK.GetArrayFromImage(tissue), k=1, connectivity=4)
        body[..., k] = fill_voids.fill(largest > 0)
    return body


def _edges(section: Mask) -> list[int]:
    """The first and last voxel of the body along x and y; all 0 where there is none."""
    rows, columns = np.flatnonzero(section.any(axis=1)), np.flatnonzero(section.any(axis=0))
    return [rows[0], rows[-1], columns[0], columns[-1]] if len(rows) else [0, 0, 0, 0]


def places_as_markdown(columns: dict[str, list[list[float] | None]]) -> str:
    """A row a kind of scan."""
    lines = [f"| gas on the left, within {GAS_MM[1]:g} mm of the lungs | scans with gas | {' | '.join(PLACES)} |"]
    lines.append("|---" * (2 + len(PLACES)) + "|")
    for kind, scans in columns.items():
        values = np.array([scan for scan in scans if scan is not None]).reshape(-1, len(PLACES)).T
        spreads = [spread(each, digits) if len(each) else "" for each, digits in zip(values, (0, 0, 2, 2), strict=True)]
        lines.append(f"| {kind} | {values.shape[1]} of {len(scans)} | {' | '.join(spreads)} |")
    return "\n".join(lines)


def base_as_markdown(columns: dict[str, list[list[float]]]) -> str:
    """A row a kind of scan."""
    depths = " | ".join(f"{depth:.0%}" for depth in DEPTHS)
    lines = [f"| right base, mm below its top, by depth from the back | scans | {depths} |"]
    lines.append("|---" * (2 + len(DEPTHS)) + "|")
    for kind, scans in columns.items():
        lines.append(f"| {kind} | {len(scans)} | {' | '.join(spread(each) for each in np.array(scans).T)} |")
    return "\n".join(lines)


def as_markdown(columns: dict[str, list[Shares]]) -> str:
    """A row a region and kind of scan."""
    lines = [f"| per cent, {SHELL_MM[0]:g} to {SHELL_MM[1]:g} mm outside the lungs | scans | {' | '.join(TISSUES)} |"]
    lines.append("|---" * (2 + len(TISSUES)) + "|")
    for region in next(iter(columns.values()))[0]:
        for kind, scans in columns.items():
            values = np.array([scan[region] for scan in scans])
            lines.append(f"| {region}, {kind} | {len(scans)} | {' | '.join(spread(each) for each in values.T)} |")
    return "\n".join(lines)


def spread(values: npt.NDArray[Any], digits: int = 0) -> str:
    low, middle, high = np.percentile(values, (10, 50, 90))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
