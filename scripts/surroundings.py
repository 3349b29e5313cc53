"""What lies around lungs: shares of gas, fat and soft tissue just outside them, by region, real scans beside synthetic.

    python scripts/surroundings.py SCANS [--presets healthy training] [--count 12] [--seed 7000]

SCANS holds NAME.nii.gz and NAME_ref.nii.gz (1 right lung, 2 left lung, 255 ignored, here taken for lung), as for
validate.py. Counted are voxels 2 to 6 mm outside both lungs. Where the shares of synthetic patients are not those of
patients, a network learns what it will not meet, and meets what it never learned. Prints a Markdown table: medians over
scans, and from the 10th to the 90th percentile. The scans are looked at, nothing is trained on them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from phantoms import rendered
from validate import distance_mm, reference_of, scans_of

from cascadeseg import read_scan
from cascadeseg.formats import Scan, read_labels
from cascadeseg.geometry import canonical_view
from cascadeseg.synthesis import PRESETS, sample_patient

TISSUES = {"gas": -500, "edge": -150, "fat": -30, "soft tissue": 130, "denser": np.inf}
"""The highest HU of each."""
SHELL_MM = 2.0, 6.0
STEP_MM = 1.5
"""Finer scans are looked at in every second, third, ... voxel."""
VOXEL_MM = 1.6, 1.6, 3.0
SMALLEST_LUNG_ML = 800.0
"""Of the synthetic patients that are looked at: both lungs are there, and whole."""

Mask = npt.NDArray[np.bool_]
Shares = dict[str, list[float]]
"""By region: of each tissue, in per cent."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scans", type=Path)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["healthy", "training"])
    parser.add_argument("--count", type=int, default=12, help="synthetic patients of a preset; default 12")
    parser.add_argument("--seed", type=int, default=7000, help="of the first one; default 7000")
    options = parser.parse_args()
    columns = {"real": [shares(scan, lungs) for scan, lungs in real(options.scans)]}
    if not columns["real"]:
        parser.error(f"{options.scans}: no scan NAME.nii.gz with its reference NAME_ref.nii.gz")
    for preset in options.presets:
        columns[preset] = [shares(*one) for one in synthetic(preset, range(options.seed, options.seed + options.count))]
    print(as_markdown(columns))


def real(folder: Path) -> Iterator[tuple[Scan, Mask]]:
    """Scans with a reference, and their lungs, canonical."""
    for path in scans_of(folder):
        if reference_of(path).exists():
            labels, grid = read_labels(reference_of(path))
            yield read_scan(path).canonical(), np.asarray(canonical_view(labels, grid)) > 0


def synthetic(preset: str, seeds: Iterable[int]) -> Iterator[tuple[Scan, Mask]]:
    """Patients with two whole lungs, or nearly."""
    for seed in seeds:
        scan, phantom = rendered(sample_patient(seed, PRESETS[preset]), VOXEL_MM)
        labels = phantom.labels.numpy()
        if all(np.count_nonzero(labels == n) * scan.grid.voxel_volume_ml > SMALLEST_LUNG_ML for n in (1, 2)):
            yield scan, labels > 0


def shares(scan: Scan, lungs: Mask) -> Shares:
    """What lies around the lungs of a canonical scan.

    Args:
        scan: canonical.
        lungs: (X, Y, Z) true in both lungs.
    """
    steps = [max(1, round(STEP_MM / mm)) for mm in scan.grid.spacing_mm]
    every = tuple(slice(None, None, step) for step in steps)
    spacing_mm = [step * mm for step, mm in zip(steps, scan.grid.spacing_mm, strict=True)]
    hu, lungs = scan.as_hu(scan.voxels[every]), lungs[every]
    kind = np.searchsorted(list(TISSUES.values()), hu)
    return {
        name: [100 * float(np.mean(kind[where] == tissue)) for tissue in range(len(TISSUES))]
        for name, where in regions(lungs, spacing_mm).items()
    }


def regions(lungs: Mask, spacing_mm: list[float]) -> dict[str, Mask]:
    """Parts of the shell around the lungs, by how far they lie from the middle, and how far back and up."""
    distance = distance_mm(lungs, spacing_mm)
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
    }


def as_markdown(columns: dict[str, list[Shares]]) -> str:
    """A row a region and kind of scan."""
    lines = [f"| per cent, {SHELL_MM[0]:g} to {SHELL_MM[1]:g} mm outside the lungs | scans | {' | '.join(TISSUES)} |"]
    lines.append("|---" * (2 + len(TISSUES)) + "|")
    for region in next(iter(columns.values()))[0]:
        for kind, scans in columns.items():
            values = np.array([scan[region] for scan in scans])
            lines.append(f"| {region}, {kind} | {len(scans)} | {' | '.join(spread(each) for each in values.T)} |")
    return "\n".join(lines)


def spread(values: npt.NDArray[Any]) -> str:
    low, middle, high = np.percentile(values, (10, 50, 90))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()
