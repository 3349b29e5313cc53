"""Training cases: what a stage will see of a patient, prepared by inference's own functions.

A patient comes from the synthetic chest CT or from files; either can show itself whole or as a crop. Everything after
that is the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from cascadeseg.cascade.crop import MARGIN_MM, LungBox, crop_lungs, settle_sides
from cascadeseg.cascade.locate import Coarse, coarse_grid, locate
from cascadeseg.cascade.refine import lung_image, mirrored
from cascadeseg.cascade.resample import resample_scan, resample_volume
from cascadeseg.cascade.windowed import restored
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid, canonical_view, counted
from cascadeseg.labels import BACKGROUND, BESIDE, IGNORE, LUNGS, Label
from cascadeseg.network.engine import Engine
from cascadeseg.network.model import View
from cascadeseg.synthesis import PRESETS, Phantom, Tissue, render, sample_patient
from cascadeseg.training.config import LabelNames, TrainingConfig
from cascadeseg.training.preflight import Inspected, scan_and_labels

CPU = torch.device("cpu")
HILUM_MM, DOME_MM = 16.0, 50.0
"""How wide the gaps in a lung are that an opinion fills: in some only hila, in others the tops of domes, too."""
LabelMap = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Prepared:
    """One case in memory.

    Attributes:
        name: unique among the cases of a run.
        image: (C, X, Y, Z) float32, as the network gets it, but for the window of soft tissue, which is opened when the
            image has been varied.
        labels: (X, Y, Z) uint8: stage 1: 0, 1 right, 2 left; stage 2: 0, 1; `IGNORE` where nothing is asked.
    """

    name: str
    image: Tensor
    labels: Tensor


class Patient(Protocol):
    """Someone to learn from: picklable, and cheap until looked at."""

    @property
    def key(self) -> str:
        """A file name's worth of who and what this is."""

    @property
    def fold(self) -> int:
        """The part of the data set that the patient belongs to."""

    def whole(self, spacing_mm: float) -> tuple[Scan, LabelMap]:
        """The whole canonical scan and its labels, at about this spacing where there is a choice."""

    def crop(self, grid: Grid) -> tuple[Scan, LabelMap]:
        """A canonical scan, and its labels, that cover a grid."""


@dataclass(frozen=True)
class SyntheticPatient:
    """A patient of the synthetic chest CT, by seed."""

    seed: int
    preset: str
    labels: LabelNames
    device: str = "cpu"

    @property
    def key(self) -> str:
        return f"synthetic_{self.seed:06d}"

    @property
    def fold(self) -> int:
        return 0

    def whole(self, spacing_mm: float) -> tuple[Scan, LabelMap]:
        return self.crop(self._patient.field_of_view(spacing_mm))

    def crop(self, grid: Grid) -> tuple[Scan, LabelMap]:
        phantom = render(self._patient, grid, self.device)
        return Scan(phantom.voxels(), grid, source="synthetic"), _synthetic_labels(phantom, self.labels)

    @cached_property
    def _patient(self) -> Any:
        return sample_patient(self.seed, PRESETS[self.preset])


def _synthetic_labels(phantom: Phantom, wanted: LabelNames) -> LabelMap:
    """The lungs, or other organs: tissues by name, a ``_right`` or ``_left`` behind it takes that half of the body."""
    lungs: LabelMap = phantom.labels.cpu().numpy()
    if wanted == LabelNames():
        return lungs
    tissues = phantom.tissues.cpu().numpy()
    x = phantom.grid.world([(i, 0, 0) for i in range(phantom.grid.shape[0])])[:, 0]
    halves = {"right": (x > 0)[:, None, None], "left": (x <= 0)[:, None, None]}
    labels = np.zeros(tissues.shape, np.uint8) if wanted.right or wanted.left else lungs.copy()
    for value, names in wanted.by_value().items():
        for name in names:
            tissue, _, half = name.rpartition("_")
            sided = half in halves
            mask = tissues == Tissue[(tissue if sided else name).upper()]
            if value in BESIDE:
                mask &= labels == BACKGROUND
            labels[mask & halves[half] if sided else mask] = value
    return labels


def unknown_tissues(wanted: LabelNames) -> list[str]:
    """Names that no tissue of the synthetic chest CT has."""
    names = [name for names in wanted.by_value().values() for name in names]
    known = {tissue.name.lower() for tissue in Tissue}
    return [name for name in names if name.removesuffix("_right").removesuffix("_left") not in known]


@dataclass(frozen=True)
class FilePatient:
    """A patient of a data set on disk."""

    case: Inspected
    fold: int = 0

    @property
    def key(self) -> str:
        return f"{self.case.entry.name}-{self.case.digest[:10]}"

    def whole(self, spacing_mm: float) -> tuple[Scan, LabelMap]:
        return self._opened

    def crop(self, grid: Grid) -> tuple[Scan, LabelMap]:
        return self._opened

    @cached_property
    def _opened(self) -> tuple[Scan, LabelMap]:
        scan, labels, grid = scan_and_labels(self.case)
        turned = canonical_view(labels, grid)
        return restored(scan.canonical()), np.asarray(turned, dtype=np.uint8)


def prepare(patient: Patient, config: TrainingConfig, locator: Engine | None) -> list[Prepared]:
    """The cases of a patient: one for stage 1, one a lung that was found for stage 2.

    Args:
        patient: whose.
        config: of the run.
        locator: stage 1's network, where stage 2's boxes come from its predictions.
    """
    if config.stage == 1:
        scan, labels = patient.whole(config.view.spacing_mm)
        return [stage1_case(patient.key, scan, labels, config)]
    coarse_view = locator.stage.view if locator else View(2.0 * config.view.spacing_mm)
    scan, labels = patient.whole(coarse_view.spacing_mm)
    coarse = settle_sides(locate(scan, locator), scan) if locator else imagined(scan, labels, coarse_view, patient.key)
    cases = []
    for lung in crop_lungs(coarse, MARGIN_MM + config.data.box_jitter_mm):
        grid = lung.extent(config.view.spacing_mm, config.unet.stride)
        inside = scan.grid.covering(Box.whole(scan.grid.shape), grid).clipped(grid.shape)
        crop, its_labels = patient.crop(grid.cropped(inside))
        name = f"{patient.key}_{lung.label.side}"
        cases.append(stage2_case(name, crop, its_labels, coarse, lung, grid, config))
    return cases


def stage1_case(name: str, scan: Scan, labels: npt.NDArray[Any], config: TrainingConfig) -> Prepared:
    """The whole canonical scan as the locator sees it."""
    grid = coarse_grid(scan, config.view)
    image = resample_scan(scan, grid, config.view, CPU)[None]
    return Prepared(name, image, labels_on(labels, scan.grid, grid))


def stage2_case(
    name: str,
    scan: Scan,
    labels: npt.NDArray[Any],
    coarse: Coarse,
    lung: LungBox,
    grid: Grid,
    config: TrainingConfig,
) -> Prepared:
    """One lung's crop as the refiner sees it; beyond the scan nothing is asked."""
    one_window = replace(config.view, tissue_high_hu=config.view.tissue_low_hu)
    image = lung_image(scan, coarse, lung.label, grid, one_window, CPU)
    asked = labels_on(labels, scan.grid, grid)
    for axis, (row, n) in enumerate(zip(scan.grid.nearest(grid), scan.grid.shape, strict=True)):
        asked = asked.index_fill(axis, torch.from_numpy(np.flatnonzero((row < 0) | (row >= n))), IGNORE)
    return Prepared(name, image.cpu(), _of_one_lung(mirrored(asked, lung.label), lung.label))


def _of_one_lung(labels: Tensor, lung: Label) -> Tensor:
    """1 for this lung, and background for the other."""
    target = torch.where(labels == IGNORE, IGNORE, BACKGROUND)
    target[labels == lung.value] = 1
    return target.to(torch.uint8)


def labels_on(labels: npt.NDArray[Any], source: Grid, target: Grid) -> Tensor:
    """A label map on another grid: each label's share is interpolated, and one with more than half has the voxel."""
    if source.matches(target):
        return torch.from_numpy(np.ascontiguousarray(labels, dtype=np.uint8))
    result = torch.zeros(target.shape, dtype=torch.uint8)
    for value in sorted(counted(labels)):
        if value != BACKGROUND:
            mask = torch.from_numpy(np.ascontiguousarray(labels == value))
            result[resample_volume(mask, source, target) > 0.5] = value
    return result


def imagined(scan: Scan, labels: npt.NDArray[Any], view: View, name: str) -> Coarse:
    """What a stage 1 that never saw this patient might have said: the reference, vague, and wrong in places.

    On strange scans a stage 1 is wrong as it never is where it was trained: its surface lies millimetres too far in or
    out all over, hila are taken for lung, dense lung is missed, gas is taken for lung, and so is muscle or liver beside
    it, as if it were dense lung. A refiner that met only good opinions follows them to the voxel; from these it learns
    what one is worth.
    """
    grid = coarse_grid(scan, view)
    random = Generator().manual_seed(int.from_bytes(name.encode()[-7:], "big"))
    coarse = labels_on(labels, scan.grid, grid)
    lungs = torch.stack([(coarse == lung.value).float() for lung in LUNGS])
    if _between(0, 1, random) < 0.5:
        lungs = _filled(lungs, round(_between(HILUM_MM, DOME_MM, random) / 2 / min(grid.spacing_mm)))
    vague = F.avg_pool3d(F.pad(lungs[None], (2,) * 6, mode="replicate"), 5, stride=1)[0]
    surface = 0.3 * _between(-1, 1, random) + 0.25 * _wandering(2, grid, random)
    probabilities = torch.sigmoid(_between(6, 20, random) * (vague - 0.5 + surface))
    probabilities[vague == 0] = 0
    hu = resample_scan(scan, grid, view, CPU) * view.scale_hu + view.low_hu
    soft = hu > -400
    missed = soft & (coarse > 0) & (_wandering(1, grid, random)[0] > _between(-0.5, 1.5, random))
    beside = (coarse == BACKGROUND) & _near(lungs)
    gas = ~soft & beside & (_wandering(2, grid, random) > _between(0.2, 2, random))
    probabilities = torch.where(gas, 0.9, probabilities.masked_fill(missed, 0.05))
    least = torch.where((hu > -200) & (hu < -20), _between(0.3, 3, random), _between(0.9, 2.6, random))  # fat, the rest
    solid = soft & beside & (_wandering(2, grid, random) > least)
    probabilities = torch.where(solid, probabilities.clamp(min=_between(0.3, 0.95, random)), probabilities)
    return settle_sides(Coarse(probabilities / probabilities.sum(dim=0).clamp(min=1), grid))


def _filled(lungs: Tensor, radius: int) -> Tensor:
    """(2, X, Y, Z) lungs whose hila and bays no wider than twice ``radius`` voxels are lung, too."""
    closed = -_grown(-_grown(lungs, radius), radius)
    return torch.maximum(lungs, closed * (lungs.sum(dim=0) == 0))


def _grown(values: Tensor, radius: int) -> Tensor:
    """The largest value of a cube around each voxel, axis by axis."""
    for axis in range(3):
        reach = [radius * (other == axis) for other in range(3)]
        values = F.max_pool3d(values[None], [2 * n + 1 for n in reach], stride=1, padding=reach)[0]
    return values


def _between(low: float, high: float, random: Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=random))


def _wandering(channels: int, grid: Grid, random: Generator) -> Tensor:
    """(channels, X, Y, Z) smooth noise that changes over about 12 voxels."""
    noise = torch.randn((1, channels, *[max(2, n // 12) for n in grid.shape]), generator=random)
    return F.interpolate(noise, size=grid.shape, mode="trilinear", align_corners=False)[0]


def _near(lungs: Tensor) -> Tensor:
    """(X, Y, Z) true within about 16 voxels of a lung."""
    rough = F.max_pool3d(lungs.amax(dim=0)[None, None], 4, ceil_mode=True)
    grown = F.max_pool3d(rough, 9, stride=1, padding=4)
    return F.interpolate(grown, size=lungs.shape[1:], mode="nearest")[0, 0] > 0
