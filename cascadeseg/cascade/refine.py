"""Stage 2: the exact surface of one lung, in its box, from the original scan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cascadeseg.cascade.crop import LungBox, regrow
from cascadeseg.cascade.locate import Coarse
from cascadeseg.cascade.resample import resample_scan, resample_volume, windows_of
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid, bounding_box
from cascadeseg.labels import LEFT_LUNG, LUNGS, Label
from cascadeseg.network.bounded import Runner
from cascadeseg.network.engine import give_back
from cascadeseg.network.model import View
from cascadeseg.network.slabs import Layers

LARGEST_REGROWTH = 3


@dataclass(frozen=True)
class Refined:
    """One lung as stage 2 sees it.

    Attributes:
        lung: the box it was refined in.
        logits: (X, Y, Z) float16, above 0 inside the lung, of the part of the box that holds all of the lung.
        grid: their grid.
        cut: whether the lung still reaches a face of the box inside the scan.
    """

    lung: LungBox
    logits: Tensor
    grid: Grid
    cut: bool = False


def lung_image(scan: Scan, coarse: Coarse | None, label: Label, grid: Grid, view: View, device: torch.device) -> Tensor:
    """What stage 2 sees of one lung, in training and in inference alike: left lungs mirrored.

    A crop can reach a few voxels beyond the scan, whose outermost voxels go on there: air would look like the lung's
    end.

    Args:
        scan: in canonical orientation.
        coarse: stage 1's opinion; needed where ``view.prior``.
        label: which lung.
        grid: the crop's grid, with the scan's directions.
        view: stage 2's.
        device: where to work.

    Returns:
        (C, X, Y, Z) float32: the image, soft tissue once more where ``view.tissue``, and where ``view.prior`` this
        lung's probability minus the other's.
    """
    return lung_layers(scan, coarse, label, grid, view, device)[..., :]


def lung_layers(
    scan: Scan, coarse: Coarse | None, label: Label, grid: Grid, view: View, device: torch.device
) -> Layers:
    """`lung_image`, made slab by slab: as a whole it would take as much memory as anything in the network."""
    nx, ny, nz = grid.shape
    opinion = _opinion(coarse, label, grid, view, device) if view.prior else None

    def make(z: slice) -> Tensor:
        part = grid.cropped(Box((0, 0, z.start), (nx, ny, z.stop)))
        channels = windows_of(resample_scan(scan, part, view, device, goes_on=True)[None], view)
        if opinion:
            channels = torch.cat([channels, opinion(part)[None]])
        return mirrored(channels, label)

    return Layers((view.channels, nx, ny, nz), make)


def _opinion(
    coarse: Coarse | None, label: Label, grid: Grid, view: View, device: torch.device
) -> Callable[[Grid], Tensor]:
    """This lung's probability minus the other's, at the view's contrast and spacing, on parts of a crop's grid."""
    if coarse is None:
        raise ValueError("a stage with a prior needs stage 1's probabilities")
    lungs, source = coarse.lungs, coarse.grid
    this = LUNGS.index(label)

    def difference(box: Box) -> Tensor:
        mine, others = (stretched(lungs[side][box.slices].float()) for side in (this, 1 - this))
        return (mine - others).to(device)

    def stretched(probability: Tensor) -> Tensor:
        return (probability - 0.5).mul_(view.prior_contrast).add_(0.5).clamp_(0, 1)

    if not view.prior_spacing_mm:
        return partial(resample_volume, difference, source)
    vague = grid.resampled(view.prior_spacing_mm)
    return partial(resample_volume, resample_volume(difference, source, vague), vague)


def mirrored(volume: Tensor, label: Label) -> Tensor:
    """(..., X, Y, Z) turned so that the lung lies like a right lung; twice is the identity."""
    return volume.flip(-3) if label == LEFT_LUNG else volume


def refine(scan: Scan, lung: LungBox, coarse: Coarse, engine: Runner) -> Refined:
    """Segments one lung; a box that cuts it is grown and segmented again, `LARGEST_REGROWTH` times at most."""
    while True:
        refined = _refine_once(scan, lung, coarse, engine)
        give_back(engine.device)
        cut = cut_faces(refined, scan.grid)
        larger = regrow(lung, cut)
        if not cut or lung.regrown == LARGEST_REGROWTH or larger.box == lung.box:
            return replace(_tight(refined, scan.grid), cut=bool(cut))
        lung = larger


def _refine_once(scan: Scan, lung: LungBox, coarse: Coarse, engine: Runner) -> Refined:
    stage = engine.stage
    grid = lung.extent(stage.view.spacing_mm, stage.unet.stride)
    image = lung_layers(scan, coarse, lung.label, grid, stage.view, engine.device)
    return Refined(lung, mirrored(engine(image, Tensor.half)[0], lung.label), grid)


def _tight(refined: Refined, scan_grid: Grid) -> Refined:
    """The lung without the margins around it, as far as they cannot matter on the scan's grid.

    What is kept around the lung covers the window over which `resample` averages where the scan is coarser.
    """
    step = np.asarray(scan_grid.spacing_mm) / np.asarray(refined.grid.spacing_mm)
    lung = bounding_box((refined.logits > 0).numpy(force=True)) or Box((0, 0, 0), (1, 1, 1))
    kept = lung.grown(np.ceil(step).astype(int) + 2).clipped(refined.grid.shape)
    return replace(refined, logits=refined.logits[kept.slices].clone(), grid=refined.grid.cropped(kept))


def cut_faces(refined: Refined, scan_grid: Grid) -> list[tuple[int, bool]]:
    """The faces (axis, at the far end) of the crop that the lung touches and that lie inside the scan."""
    faces = []
    for axis in range(3):
        for far in (False, True):
            layer = refined.logits.select(axis, -1 if far else 0)
            if _is_inside(refined.grid, scan_grid, axis, far) and bool((layer > 0).any()):
                faces.append((axis, far))
    return faces


def _is_inside(crop: Grid, scan: Grid, axis: int, far: bool) -> bool:
    index = float(crop.index(scan.world([n - 0.5 if far else -0.5 for n in scan.shape]))[axis])
    return index > crop.shape[axis] + 0.5 if far else index < -1.5
