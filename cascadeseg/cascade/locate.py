"""Stage 1: where the lungs are, on a coarse grid over the whole scan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cascadeseg.cascade.resample import resample_scan, windows_of
from cascadeseg.formats.scan import Scan, sampled_hu
from cascadeseg.geometry import Box, Grid, Shape
from cascadeseg.labels import LUNG_CHANNELS, Label
from cascadeseg.network.bounded import Runner
from cascadeseg.network.model import Stage, View
from cascadeseg.network.slabs import Layers, Slab, slabs_of

SLAB_MM = 384.0
CONTEXT_MM = 96.0
BEYOND_MM = 16.0
"""How far a scan goes on for the network where its end may cut the body, as its outermost voxels are: air would be an
end of the body itself."""
KEPT_MM = 128.0
"""Further from all that was found stage 2 never looks: its boxes' margin, all their growth and some more."""
LAYERS = 32
"""Layers looked at or copied at a time."""
AIR_HU = -500.0
AIR_SHARE = 0.995
"""Of a sagittal or coronal plane's voxels, where it is nothing but air: the rest is noise, a tube, a blanket's fold."""
BESIDE_BODY_MM = 8.0


@dataclass(frozen=True)
class Coarse:
    """Stage 1's opinion of a scan.

    Attributes:
        lungs: (2, X, Y, Z) probabilities of the right and the left lung, of `locate` float16 and in the host's memory.
        grid: their grid: the scan's canonical directions, stage 1's spacing.
        renamed: the lungs that stage 1 for the most part called by the other's name, once sides are settled.
    """

    lungs: Tensor
    grid: Grid
    renamed: frozenset[Label] = frozenset()


def coarse_grid(scan: Scan, view: View) -> Grid:
    """The grid of stage 1: the canonical scan's field of view at the stage's spacing, with all its outermost slices."""
    return scan.grid.resampled(view.spacing_mm, all_centres=True)


def locate(scan: Scan, engine: Runner) -> Coarse:
    """Finds both lungs in a canonical scan, slab by slab along z: memory beyond what is kept is that of one slab.

    Slabs are the same at any memory limit, and so is what is found. Further than `KEPT_MM` above and below all that
    was found the probabilities are zero, and take no memory; beside the body as well, where nobody looks.
    """
    view = engine.stage.view
    whole = coarse_grid(scan, view)
    body = body_box(scan, whole)
    seen = beyond_faces(body, whole.shape, view)
    x, y, _ = body.shifted([-a for a in seen.start]).slices
    everywhere = _zeros(whole.shape)
    lungs = everywhere[:, *body.slices]
    found = torch.zeros(whole.shape[2], dtype=torch.bool)
    before: tuple[Slab, Tensor] | None = None
    for slab in slabs_along_z(whole.shape[2], engine.stage):
        image = _image(scan, whole.cropped(_layers(seen, slab.seen)), view, engine.device)
        probabilities = engine(image, _probabilities)[:, x, y, slab.kept_of_seen].clone()
        found[slab.kept] = found_in(probabilities).any(dim=0).any(dim=0).cpu()
        if before is not None:
            _keep(lungs, before, found, view)
        before = slab, probabilities
    if before is not None:
        _keep(lungs, before, found, view)
    return Coarse(everywhere, whole)


def body_box(scan: Scan, grid: Grid) -> Box:
    """What of a grid over a canonical scan lies around the body and its couch: all layers, without planes of mere air.

    A quarter of most fields of view is air, above the chest for the most part. To the network it is what lies outside
    an image anyway.
    """
    hu, sampled = sampled_hu(scan)
    dense = hu > AIR_HU
    start, stop = [0, 0, 0], list(scan.grid.shape)
    for axis, others in ((0, (1, 2)), (1, (0, 2))):
        planes = np.flatnonzero(dense.mean(axis=others) > 1 - AIR_SHARE)
        if len(planes):
            spacing = scan.grid.spacing_mm[axis]
            step, beside = round(sampled.spacing_mm[axis] / spacing), int(np.ceil(BESIDE_BODY_MM / spacing))
            start[axis] = int(planes[0]) * step - beside
            stop[axis] = (int(planes[-1]) + 1) * step + beside
    box = Box.of(start, stop).clipped(scan.grid.shape)
    around = scan.grid.covering(box, grid).clipped(grid.shape)
    (x0, y0, _), (x1, y1, _) = around.start, around.stop
    return Box((x0, y0, 0), (x1, y1, grid.shape[2]))


def beyond_faces(body: Box, shape: Shape, view: View) -> Box:
    """What stage 1 sees of a grid: the body, and beyond the faces of the scan that it reaches `BEYOND_MM` more."""
    beyond = round(BEYOND_MM / view.spacing_mm)
    start = [a - beyond * (a == 0) for a in body.start]
    stop = [b + beyond * (b == n) for b, n in zip(body.stop, shape, strict=True)]
    return Box.of(start, stop)


def _image(scan: Scan, grid: Grid, view: View, device: torch.device) -> Layers:
    """(C, X, Y, Z) what stage 1 sees on a grid."""

    def make(z: slice) -> Tensor:
        there = grid.cropped(_layers(Box.whole(grid.shape), z))
        return windows_of(resample_scan(scan, there, view, device, goes_on=True)[None], view)

    return Layers((view.channels, *grid.shape), make)


def _probabilities(logits: Tensor) -> Tensor:
    """(K, X, Y, z) logits, K >= 3, to (2, X, Y, z) float16 probabilities of the lungs."""
    return torch.softmax(logits, dim=0)[LUNG_CHANNELS].half()


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


def _zeros(shape: Shape) -> Tensor:
    """(2, X, Y, Z) float16, of which a layer takes no memory until it is written: a GPU's would at once."""
    nx, ny, nz = shape
    return torch.from_numpy(np.zeros((nz, 2, ny, nx), np.float16)).permute(1, 3, 2, 0)


def copy_of(lungs: Tensor) -> Tensor:
    """A copy of (2, X, Y, Z) probabilities that takes memory only where they do."""
    _, nx, ny, nz = lungs.shape
    copy = _zeros((nx, ny, nz))
    for start in range(0, nz, LAYERS):
        layers = lungs[..., start : start + LAYERS]
        if layers.numpy().view(f"i{layers.element_size()}").any():  # as integers: float16 takes thirty times as long
            copy[..., start : start + LAYERS] = layers
    return copy


def slabs_along_z(depth: int, stage: Stage) -> list[Slab]:
    """The slabs in which a coarse image of ``depth`` slices goes through stage 1; they see beyond its ends."""
    stride, spacing_mm = stage.unet.stride, stage.view.spacing_mm
    length, context = (max(stride, int(mm / spacing_mm) // stride * stride) for mm in (SLAB_MM, CONTEXT_MM))
    beyond = round(BEYOND_MM / spacing_mm)
    slabs = slabs_of(depth + 2 * beyond, length, context)
    kept = [slice(max(0, slab.kept.start - beyond), min(depth, slab.kept.stop - beyond)) for slab in slabs]
    seen = [slice(slab.seen.start - beyond, slab.seen.stop - beyond) for slab in slabs]
    return [Slab(part, around) for part, around in zip(kept, seen, strict=True) if part.start < part.stop]


def _layers(box: Box, z: slice) -> Box:
    return Box((*box.start[:2], z.start), (*box.stop[:2], z.stop))
