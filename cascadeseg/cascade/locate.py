"""Stage 1: where the lungs are, on a coarse grid over the whole scan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cascadeseg.cascade.resample import resample_scan
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid
from cascadeseg.network.bounded import Runner
from cascadeseg.network.engine import Slab, slabs_of
from cascadeseg.network.model import Stage, View

SLAB_MM = 384.0
CONTEXT_MM = 96.0


@dataclass(frozen=True)
class Coarse:
    """Stage 1's opinion of a scan.

    Attributes:
        lungs: (2, X, Y, Z) float16 probabilities of the right and the left lung.
        grid: their grid: the scan's canonical directions, stage 1's spacing.
    """

    lungs: Tensor
    grid: Grid


def coarse_grid(scan: Scan, view: View) -> Grid:
    """The grid of stage 1: the canonical scan's field of view at the stage's spacing."""
    return scan.grid.resampled(view.spacing_mm)


def locate(scan: Scan, engine: Runner) -> Coarse:
    """Finds both lungs in a canonical scan, slab by slab along z: memory beyond the probabilities is that of one slab.

    Slabs are the same at any memory limit, and so is what is found.
    """
    view = engine.stage.view
    grid = coarse_grid(scan, view)
    lungs = torch.zeros((2, *grid.shape), dtype=torch.float16, device=engine.device)
    for slab in slabs_along_z(grid.shape[2], engine.stage):
        image = resample_scan(scan, grid.cropped(_layers(grid, slab.seen)), view, engine.device)
        probabilities = torch.softmax(engine(image[None]), dim=0)[1:]
        lungs[..., slab.kept] = probabilities[..., slab.kept_of_seen]
    return Coarse(lungs, grid)


def slabs_along_z(depth: int, stage: Stage) -> list[Slab]:
    """The slabs in which a coarse image of ``depth`` slices goes through stage 1."""
    stride = stage.unet.stride
    length, context = (max(stride, int(mm / stage.view.spacing_mm) // stride * stride) for mm in (SLAB_MM, CONTEXT_MM))
    return slabs_of(depth, length, context)


def _layers(grid: Grid, z: slice) -> Box:
    nx, ny, _ = grid.shape
    return Box((0, 0, z.start), (nx, ny, z.stop))
