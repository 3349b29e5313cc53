"""Stage 1: where the lungs are, on a coarse grid over the whole scan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cascadeseg.cascade.resample import resample_scan, windows_of
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid, Shape
from cascadeseg.network.bounded import Runner
from cascadeseg.network.engine import slabs_of
from cascadeseg.network.levels import Layers, Slab
from cascadeseg.network.model import Stage, View

SLAB_MM = 384.0
CONTEXT_MM = 96.0
KEPT_MM = 128.0
"""Further from all that was found stage 2 never looks: its boxes' margin, all their growth and some more."""
LAYERS = 32
"""Layers looked at or copied at a time."""


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
    """Finds both lungs in a canonical scan, slab by slab along z: memory beyond what is kept is that of one slab.

    Slabs are the same at any memory limit, and so is what is found. Further than `KEPT_MM` above and below all that
    was found the probabilities are zero, and take no memory.
    """
    view = engine.stage.view
    grid = coarse_grid(scan, view)
    lungs = _zeros(grid.shape, engine.device)
    found = torch.zeros(grid.shape[2], dtype=torch.bool)
    before: tuple[Slab, Tensor] | None = None
    for slab in slabs_along_z(grid.shape[2], engine.stage):
        image = _image(scan, grid.cropped(_layers(grid, slab.seen)), view, engine.device)
        probabilities = engine(image, _probabilities)[..., slab.kept_of_seen].clone()
        found[slab.kept] = found_in(probabilities).any(dim=0).any(dim=0).cpu()
        if before is not None:
            _keep(lungs, before, found, view)
        before = slab, probabilities
    if before is not None:
        _keep(lungs, before, found, view)
    return Coarse(lungs, grid)


def _image(scan: Scan, grid: Grid, view: View, device: torch.device) -> Layers:
    """(C, X, Y, Z) what stage 1 sees on a grid."""

    def make(z: slice) -> Tensor:
        return windows_of(resample_scan(scan, grid.cropped(_layers(grid, z)), view, device)[None], view)

    return Layers((view.channels, *grid.shape), make)


def _probabilities(logits: Tensor) -> Tensor:
    """(3, X, Y, z) logits to (2, X, Y, z) float16 probabilities of the lungs."""
    return torch.softmax(logits, dim=0)[1:].half()


def found_in(lungs: Tensor) -> Tensor:
    """(2, X, Y, Z) probabilities to (X, Y, Z): what is lung, of either side.

    A sum of two tensors: over a dimension of two it takes a processor ten times as long.
    """
    return lungs[0] + lungs[1] > 0.5


def _keep(lungs: Tensor, slab: tuple[Slab, Tensor], found: Tensor, view: View) -> None:
    """Puts what lies near enough to what was found in its place."""
    here, probabilities = slab
    beyond = int(KEPT_MM / view.spacing_mm)
    layers = torch.nonzero(found[max(0, here.kept.start - beyond) : here.kept.stop + beyond]).flatten()
    if len(layers) == 0:
        return
    first, last = (int(layer) + max(0, here.kept.start - beyond) for layer in (layers[0], layers[-1]))
    low, high = max(here.kept.start, first - beyond), min(here.kept.stop, last + 1 + beyond)
    lungs[..., low:high] = probabilities[..., low - here.kept.start : high - here.kept.start]


def _zeros(shape: Shape, device: torch.device) -> Tensor:
    """(2, X, Y, Z) float16; a layer of it takes no memory of the host until it is written."""
    nx, ny, nz = shape
    if device.type != "cpu":
        return torch.zeros((2, *shape), dtype=torch.float16, device=device)
    return torch.from_numpy(np.zeros((nz, 2, ny, nx), np.float16)).permute(1, 3, 2, 0)


def copy_of(lungs: Tensor) -> Tensor:
    """A copy of (2, X, Y, Z) probabilities that takes memory only where they do."""
    _, nx, ny, nz = lungs.shape
    copy = _zeros((nx, ny, nz), lungs.device)
    for start in range(0, nz, LAYERS):
        layers = lungs[..., start : start + LAYERS]
        if bool(layers.any()):
            copy[..., start : start + LAYERS] = layers
    return copy


def slabs_along_z(depth: int, stage: Stage) -> list[Slab]:
    """The slabs in which a coarse image of ``depth`` slices goes through stage 1."""
    stride = stage.unet.stride
    length, context = (max(stride, int(mm / stage.view.spacing_mm) // stride * stride) for mm in (SLAB_MM, CONTEXT_MM))
    return slabs_of(depth, length, context)


def _layers(grid: Grid, z: slice) -> Box:
    nx, ny, _ = grid.shape
    return Box((0, 0, z.start), (nx, ny, z.stop))
