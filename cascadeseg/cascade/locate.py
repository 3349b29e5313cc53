"""Stage 1: where the lungs are, on a coarse grid over the whole scan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cascadeseg.cascade.resample import resample_scan
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid
from cascadeseg.network.engine import Engine, in_slabs
from cascadeseg.network.model import View

SLAB_MM = 384.0
CONTEXT_MM = 96.0


@dataclass(frozen=True)
class Coarse:
    """Stage 1's opinion of a scan.

    Attributes:
        lungs: (2, X, Y, Z) float32 probabilities of the right and the left lung.
        grid: their grid: the scan's canonical directions, stage 1's spacing.
    """

    lungs: Tensor
    grid: Grid


def coarse_grid(scan: Scan, view: View) -> Grid:
    """The grid of stage 1: the canonical scan's field of view at the stage's spacing."""
    return scan.grid.resampled(view.spacing_mm)


def locate(scan: Scan, engine: Engine) -> Coarse:
    """Finds both lungs in a canonical scan; long scans go through the network slab by slab along z."""
    view = engine.stage.view
    grid = coarse_grid(scan, view)
    image = resample_scan(scan, grid, view, engine.device)[None]
    stride = engine.stage.unet.stride

    def probabilities(part: Tensor) -> Tensor:
        return torch.softmax(engine(part), dim=0)[1:]

    length, context = (int(mm / view.spacing_mm) // stride * stride for mm in (SLAB_MM, CONTEXT_MM))
    return Coarse(in_slabs(probabilities, image, length=max(stride, length), context=max(stride, context)), grid)
