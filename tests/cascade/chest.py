"""A toy chest whose truth is analytic: two ellipsoid lungs in soft tissue, and networks that only threshold."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cascadeseg.cascade.pipeline import Segmenter
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG
from cascadeseg.network import Model, UNet, UNetConfig, View, stage_of
from cascadeseg.network.slabs import Finish, Image, unchanged

CENTRES = {RIGHT_LUNG: (62.0, 0.0, 0.0), LEFT_LUNG: (-62.0, 0.0, 6.0)}
RADII = np.array([44.0, 60.0, 80.0])
LUNG_HU, TISSUE_HU = -850, 40


def truth(grid: Grid) -> np.ndarray:
    """(X, Y, Z) uint8 labels of the toy chest on any grid."""
    world = grid.world(np.stack(np.meshgrid(*map(np.arange, grid.shape), indexing="ij"), axis=-1))
    labels = np.zeros(grid.shape, np.uint8)
    for label, centre in CENTRES.items():
        labels[(((world - centre) / RADII) ** 2).sum(axis=-1) < 1] = label.value
    return labels


def chest(grid: Grid, dtype: str = "int16") -> Scan:
    """The scan of the toy chest on any grid."""
    hu = np.where(truth(grid) > 0, LUNG_HU, TISSUE_HU)
    return Scan(hu.astype(dtype), grid, source="toy chest")


def chest_grid(spacing_mm: tuple[float, float, float] = (4.0, 4.0, 5.0)) -> Grid:
    """A field of view of 330 x 240 x 240 mm about the toy chest."""
    extent = np.array([330.0, 240.0, 240.0])
    shape = np.round(extent / spacing_mm).astype(int)
    return Grid.axis_aligned(shape, spacing_mm, -(shape - 1) / 2 * np.asarray(spacing_mm))


def lung_like(image: Tensor) -> Tensor:
    """Above 0 below the level half-way between lung and tissue, but not in the air that pads an image."""
    half = ((LUNG_HU + TISSUE_HU) / 2 + 1024) / 1000
    return torch.where(image > 0.01, 10.0 * (half - image), -6.0)


@dataclass
class Thresholder:
    """An engine whose network is a threshold; with ``sides`` it also knows right from left by the image's middle.

    With ``all_right`` it calls both lungs right.
    """

    stage: object
    sides: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "fp32"
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shareable: bool = False
    streamed: bool = True
    all_right: bool = False

    def for_one_scan(self, streamed: bool, largest_tile: float = float("inf")) -> Thresholder:
        self.streamed = streamed
        return self

    def __call__(self, image: Image, finish: Finish = unchanged) -> Tensor:
        self.shapes.append(tuple(image.shape))
        image = image[..., :]
        lung = lung_like(image[0])
        if not self.sides:
            # Stage 2: this lung's share of the prior says which of the two it is.
            return finish(torch.where(image[1] > -0.5, lung, -6.0)[None])
        middle = image.shape[1] / 2
        right = (torch.arange(image.shape[1])[:, None, None] > middle) | self.all_right
        return finish(torch.stack([-lung, torch.where(right, lung, -9.0), torch.where(right, -9.0, lung)]))


def tiny_model() -> Model:
    """A model of two small untrained networks."""
    torch.manual_seed(0)
    coarse = UNetConfig(1, 3, widths=(4, 8))
    fine = UNetConfig(2, 1, widths=(4, 8, 8), block="bottleneck")
    return Model(
        stage_of(View(4.0), UNet(coarse)),
        stage_of(View(2.0, prior=True), UNet(fine)),
        name="tiny",
        version="0",
    )


def thresholding_segmenter() -> Segmenter:
    """A segmenter whose networks are thresholds, at 4 and 2 mm."""
    segmenter = Segmenter(tiny_model(), device="cpu", precision="fp32")
    segmenter.locator = Thresholder(segmenter.locator.stage, sides=True)  # type: ignore[assignment]
    segmenter.refiner = Thresholder(segmenter.refiner.stage, sides=False)  # type: ignore[assignment]
    return segmenter


def dice(a: np.ndarray, b: np.ndarray, value: int) -> float:
    """Dice of one label."""
    x, y = a == value, b == value
    return float(2 * (x & y).sum() / (x.sum() + y.sum()))
