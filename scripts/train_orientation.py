"""Trains the network that tells whether a body lies as its header says (cascadeseg/cascade/orientation.py).

    python scripts/train_orientation.py OUT --cases FOLDER [FOLDER ...] [--steps 6000] [--seed 0] [--held-out 150]
                                        [--scans DIR] [--install]

FOLDER is where trainings of stage 1 keep their synthetic patients (``data.cache``; OUT/cache of train_shipped.py); how
each of them lies follows from its seed. Those that lie otherwise than their header says, mirror images and patients
with less than 80 ml of lung are left out. Each step sees eight chests, cut to parts of them as scans are, and each of
these as it is, with right for left (the hardest to tell), in three of the six other ways of reversing axes and in four
of the 40 with axes exchanged: what is to be told is which of the nine is upright. The patients held out (the last of
all seeds) then tell how often a header that is right is doubted, and how often one that is wrong; with ``--scans`` (see
validate.py) real scans do, as they are and as robustness.py cuts, turns and thickens them, with the boxes of their
references.

OUT gets orientation.safetensors and table.md; ``--install`` puts the weights into the package. Weights that are
in OUT are not trained again, only measured.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from phantoms import lies_otherwise
from safetensors.torch import load_file, save_file

from cascadeseg.cascade.orientation import (
    FILE,
    LEAST_ML,
    TURNS,
    VIEW,
    Uprightness,
    chest_cube,
    is_doubtful,
    likelihoods_of,
    looked_like,
    turned,
)
from cascadeseg.cascade.windowed import restored
from cascadeseg.formats import Scan, read_labels, read_scan
from cascadeseg.formats.doctor import audit
from cascadeseg.formats.scan import sampled_hu
from cascadeseg.geometry import Box, Grid, bounding_box, canonical_view
from cascadeseg.labels import LUNGS
from cascadeseg.network import shipped_model
from cascadeseg.network.model import View
from cascadeseg.synthesis import PRESETS, sample_patient

CHESTS, FLIPS, OTHERS = 8, 3, 4
"""Of a step: chests, and of each so many with axes reversed and so many with axes exchanged, beside itself and with
right for left."""
SHIFT_MM, SIZE = 24.0, 0.2
"""What is varied: the centre, along each axis, and the logarithm of the size."""
COARSE_MM = 4.0
MIRRORS = [n for n, (order, flips) in enumerate(TURNS) if order == (0, 1, 2) and any(flips)]
LEFT_FOR_RIGHT = TURNS.index(((0, 1, 2), (True, False, False)))
EXCHANGED = [n for n, (order, _) in enumerate(TURNS) if order != (0, 1, 2)]
CASE = re.compile(r"synthetic_(\d+)\.image\.npy")
WORDS = {"RAS": "all axes right", "LPS": "RAS for LPS", "LAS": "right and left", "RPS": "front and back",
         "RAI": "upside down", "LAI": "feet for head", "RPI": "on the head, prone", "LPI": "all three"}  # fmt: skip
CHANGED = ("slices averaged to 10 mm", "noise of 150 HU", "0.7 times the size", "1.3 times the size",
           "without the lungs' upper third", "without their lower third", "without their upper two thirds",
           "without their front third", "without their left half", "without their right half",
           "turned by 20 degrees about the long axis", "turned by 20 degrees sideways")  # fmt: skip
"""Of robustness.py, what may make a chest hard to tell."""

Random = np.random.Generator
Labels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Chest:
    """A canonical scan at `COARSE_MM`, and where its lungs are."""

    scan: Scan
    lungs: Labels


# ------------------------------------------------------------------------------------------------- patients


def chests_in(folders: Iterable[Path]) -> list[Chest]:
    """All patients of stage 1 in some folders who lie as their headers say, by seed; each seed once."""
    paths = (path for folder in folders for path in folder.rglob("*.npy"))
    files = {int(found[1]): path for path in paths if (found := CASE.fullmatch(path.name))}
    with ThreadPoolExecutor(4) as pool:
        return [chest for chest in pool.map(chest_of, *zip(*sorted(files.items()), strict=True)) if chest]


def chest_of(seed: int, path: Path) -> Chest | None:
    """The patient of a seed, as a training of stage 1 has kept it; None for one not to learn from."""
    patient = sample_patient(seed, PRESETS["training"])  # of all presets alike, as far as it matters here
    if lies_otherwise(patient):
        return None
    view = View(spacing_mm=2.0)  # of stage 1; the window is the same in all recipes
    step = round(COARSE_MM / view.spacing_mm)
    image = np.load(path, mmap_mode="r")[0, ::step, ::step, ::step]
    labels = np.load(path.with_name(path.name.replace("image", "labels")), mmap_mode="r")[::step, ::step, ::step]
    lungs = np.isin(labels, [lung.value for lung in LUNGS])
    grid = Grid.axis_aligned(lungs.shape, (COARSE_MM,) * 3)
    if np.count_nonzero(lungs) * grid.voxel_volume_ml < LEAST_ML:
        return None
    scan = Scan(np.ascontiguousarray(image), grid, slope=view.scale_hu, intercept=view.low_hu)
    return Chest(scan, lungs)


def cut(chest: Chest, random: Random) -> Chest:
    """A part of a chest that holds lung, as fields of view do; often all of it."""
    shape = np.asarray(chest.lungs.shape)
    if random.random() < 0.4:
        return chest
    for _ in range(10):
        faces = (random.random((2, 3)) < 0.2) * random.random((2, 3)) * 0.6
        start, stop = (faces[0] * shape).astype(int), shape - (faces[1] * shape).astype(int)
        if random.random() < 0.2:  # a slab
            thickness = random.uniform(20, 160) / COARSE_MM
            start[2] = max(start[2], int(random.uniform(0, max(1, shape[2] - thickness))))
            stop[2] = min(stop[2], start[2] + int(thickness))
        box = Box.of(start, stop)
        lungs = chest.lungs[box.slices] if (stop - start > 2).all() else np.zeros((1, 1, 1), bool)
        if np.count_nonzero(lungs) * chest.scan.grid.voxel_volume_ml >= LEAST_ML:
            part = replace(chest.scan, voxels=chest.scan.voxels[box.slices], grid=chest.scan.grid.cropped(box))
            return Chest(part, lungs)
    return chest


def varied(chest: Chest, random: Random) -> torch.Tensor:
    """What the network sees of a part of a chest, with other noise, other HU, of other size and not in the middle."""
    chest = cut(chest, random)
    noise = np.float32(abs(random.normal(0, 0.06))) * random.standard_normal(chest.lungs.shape, np.float32)
    scale = np.exp(random.normal(0, 0.03))
    scan = replace(
        chest.scan,
        voxels=(chest.scan.voxels + noise).clip(0, None),
        slope=chest.scan.slope * scale,
        intercept=chest.scan.intercept + random.normal(0, 30),
    )
    centre = middle(chest) + random.uniform(-SHIFT_MM, SHIFT_MM, 3)
    return chest_cube(scan, centre, VIEW.spacing_mm * float(np.exp(random.uniform(-SIZE, SIZE))))


def middle(chest: Chest) -> np.ndarray[Any, Any]:
    """Of the box around the lungs, in mm."""
    box = bounding_box(chest.lungs) or Box.whole(chest.lungs.shape)
    return chest.scan.grid.world(box.middle)


# ------------------------------------------------------------------------------------------------- training


def trained(chests: list[Chest], steps: int, seed: int) -> Uprightness:
    """The network after so many steps."""
    torch.manual_seed(seed)
    random, network = np.random.default_rng(seed), Uprightness()
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps)
    losses: list[float] = []

    def seen(step: int) -> torch.Tensor:
        of_step = np.random.default_rng((seed, step))
        chosen = of_step.integers(0, len(chests), CHESTS)
        return torch.stack([varied(chests[n], of_step) for n in chosen])

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(seen, 0)
        for step in range(steps):
            cubes, following = following.result(), pool.submit(seen, step + 1)
            flips = random.choice([n for n in MIRRORS if n != LEFT_FOR_RIGHT], FLIPS, replace=False)
            some = [0, LEFT_FOR_RIGHT, *flips, *random.choice(EXCHANGED, OTHERS, replace=False)]
            scores = torch.stack([network(turned(cubes, TURNS[n])) for n in some], dim=1)
            loss = F.cross_entropy(scores, torch.zeros(CHESTS, dtype=torch.long))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
            if step % 100 == 99:
                print(f"step {step + 1} of {steps}: loss {np.mean(losses[-100:]):.3f}", flush=True)
    return network.eval()


# ------------------------------------------------------------------------------------------------ measuring


def table(chests: dict[str, list[tuple[str, Chest]]], network: Uprightness) -> str:
    """By group: how often the header is doubted, of all chests, if it is right and if it errs in one of seven ways."""
    likelihoods = {
        group: torch.stack([likelihoods_of(chest_cube(chest.scan, middle(chest)), network) for _, chest in members])
        for group, members in chests.items()
    }
    doubted = {
        group: torch.as_tensor(is_doubtful(of, of.amax(dim=1, keepdim=True))) for group, of in likelihoods.items()
    }
    lines = [f"| | {' | '.join(f'{group} ({len(of)})' for group, of in likelihoods.items())} |"]
    lines.append("|---" * (1 + len(chests)) + "|")
    for n in (0, *MIRRORS):
        code = looked_like("RAS", TURNS[n])
        told = [f"{doubted[group][:, n].float().mean():.1%}" for group in chests]
        lines.append(f"| {code}: {WORDS[code]} | {' | '.join(told)} |")
    rest = [f"{doubted[group][:, EXCHANGED].float().mean():.1%}" for group in chests]
    lines.append(f"| axes exchanged, 40 ways | {' | '.join(rest)} |")
    right = [f"{(of.argmax(dim=1) == 0).float().mean():.1%}" for of in likelihoods.values()]
    lines.append(f"| (upright is likeliest of all 48) | {' | '.join(right)} |")
    for group, of in likelihoods.items():
        for (name, _), one, doubts in zip(chests[group], of, doubted[group], strict=True):
            if doubts[0]:
                best = looked_like("RAS", TURNS[int(one.argmax())])
                lines.append(f"\n{name}: RAS {one[0]:.4f}, {best} {one.max():.3f}")
    return "\n".join(lines) + "\n"


def real_chests(folder: Path) -> dict[str, list[tuple[str, Chest]]]:
    """Real scans with references, as they are and changed."""
    from disease import changed
    from robustness import CHANGES
    from validate import reference_of, scans_of

    found: dict[str, list[tuple[str, Chest]]] = {"real scans": [], "real scans, changed": []}
    for path in scans_of(folder):
        if not reference_of(path).exists():
            continue
        scan = read_scan(path).canonical()
        labels = np.asarray(canonical_view(*read_labels(reference_of(path))))
        scan = changed(scan, scan.hu())
        for name in ("as it is", *CHANGED):
            if chest := sampled_chest(*CHANGES[name](scan, labels)):
                group = "real scans" if name == "as it is" else "real scans, changed"
                found[group].append((f"{path.name}, {name}", chest))
    return found


def sampled_chest(scan: Scan, labels: Labels) -> Chest | None:
    """A canonical scan as inference looks at it for its orientation; None where it shows hardly any lung."""
    lungs = np.isin(labels, [lung.value for lung in LUNGS])
    if np.count_nonzero(lungs) * scan.grid.voxel_volume_ml < LEAST_ML:
        return None
    hu, grid = sampled_hu(restored(audit(scan)))
    return Chest(Scan(hu, grid), lungs[np.ix_(*(row.clip(0) for row in scan.grid.nearest(grid)))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cases", type=Path, nargs="+", required=True, help="folders of stage 1's patients")
    parser.add_argument("--steps", type=int, default=6000, help="default 6000")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--held-out", type=int, default=150, metavar="N", help="patients not trained on; default 150")
    parser.add_argument("--scans", type=Path, help="real scans with references, to measure on, too")
    parser.add_argument("--install", action="store_true", help="put the weights into the package")
    options = parser.parse_args()
    chests = chests_in(options.cases)
    learned, held = chests[: -options.held_out], chests[-options.held_out :]
    print(f"{len(learned)} patients to learn from, {len(held)} held out", flush=True)
    weights = options.output / FILE
    if not weights.exists():
        options.output.mkdir(parents=True, exist_ok=True)
        network = trained(learned, options.steps, options.seed)
        save_file({name: tensor.half() for name, tensor in network.state_dict().items()}, weights)
    network = Uprightness()
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(weights).items()})
    random = np.random.default_rng(options.seed)
    groups = {
        "synthetic": [("synthetic", chest) for chest in held],
        "synthetic, cut": [("synthetic, cut", cut(chest, random)) for chest in held],
    }
    if options.scans:
        groups |= real_chests(options.scans)
    text = table(groups, network.eval())
    (options.output / "table.md").write_text(text, encoding="utf-8")
    print(text)
    if options.install:
        shutil.copyfile(weights, shipped_model() / FILE)


if __name__ == "__main__":
    main()
