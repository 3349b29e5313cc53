"""`render`: a patient's scan on any axis-aligned grid, painted layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cascadeseg.geometry import Box, Grid
from cascadeseg.synthesis import acquisition, devices, render_body, render_lungs
from cascadeseg.synthesis.fields import Axes
from cascadeseg.synthesis.patient import Patient
from cascadeseg.synthesis.scene import Scene
from cascadeseg.synthesis.tissue import Tissue


@dataclass(frozen=True, eq=False)
class Phantom:
    """A synthetic scan and what it shows.

    Attributes:
        hu: (X, Y, Z) float32, whole HU.
        labels: (X, Y, Z) uint8, 0 background, 1 right lung, 2 left lung: the patient's sides, or in a patient whom the
            header has turned round, the sides that the header gives, as that is all that geometry can know.
        tissues: (X, Y, Z) uint8, values of `Tissue`.
        grid: where the voxels lie.
    """

    hu: Tensor
    labels: Tensor
    tissues: Tensor
    grid: Grid

    def voxels(self) -> npt.NDArray[np.int16]:
        """(X, Y, Z) the HU as a file has them."""
        return self.hu.to(torch.int16).cpu().numpy()


SLAB_VOXELS = {"cpu": 6_000_000, "cuda": 100_000_000}
"""Larger volumes are rendered slab by slab: less memory, and faster where it stays in the cache."""


@torch.no_grad()
def render(patient: Patient, grid: Grid, device: str | torch.device = "cpu") -> Phantom:
    """Paint and scan a patient on an axis-aligned RAS+ grid.

    Every field is anchored to the world, so a box of a volume equals the same box cut from the whole.
    """
    device = torch.device(device)
    boxes = _slabs(grid, device)
    if len(boxes) == 1:
        return _render_box(patient, grid, device)
    hu = torch.empty(grid.shape, device=device)
    labels, tissues = (torch.empty(grid.shape, dtype=torch.uint8, device=device) for _ in range(2))
    for box in boxes:
        slab = _render_box(patient, grid.cropped(box), device)
        hu[box.slices], labels[box.slices], tissues[box.slices] = slab.hu, slab.labels, slab.tissues
    return Phantom(hu, labels, tissues, grid)


def _slabs(grid: Grid, device: torch.device) -> list[Box]:
    """Boxes of like thickness along x that make up the grid."""
    x, y, z = grid.shape
    count = min(x, math.ceil(x * y * z / SLAB_VOXELS.get(device.type, SLAB_VOXELS["cpu"])))
    edges = [round(i * x / count) for i in range(count + 1)]
    return [Box((a, 0, 0), (b, y, z)) for a, b in pairwise(edges)]


def _render_box(patient: Patient, grid: Grid, device: torch.device) -> Phantom:
    wanted = acquisition.grid_axes(grid)
    work = acquisition.working_axes(patient, wanted)
    scene = Scene.opened(patient, work, device)
    render_body.paint_couch(scene)
    shapes = render_body.body_shapes(scene)
    render_body.paint_cloth(scene, shapes)
    render_body.paint_body(scene, shapes)
    render_body.paint_cavities(scene, shapes)
    render_body.paint_abdomen(scene, shapes)
    render_body.paint_mediastinum(scene)
    render_body.paint_bones(scene)
    labels = render_lungs.paint_lungs(scene, shapes)
    render_lungs.paint_central(scene)
    devices.paint_devices(scene)
    hu = acquisition.acquire(patient, scene.hu, work, wanted)
    return _saved(patient, grid, hu, labels, scene.tissue, work, wanted)


def _saved(
    patient: Patient, grid: Grid, hu: Tensor, labels: Tensor, tissue: Tensor, work: Axes, wanted: Axes,
) -> Phantom:  # fmt: skip
    """Cut the margin off the maps, and blank what lies outside a circular field of view."""
    picks = []
    for a in range(3):
        parts = acquisition.sub_slices(wanted.step(2)) if a == 2 else 1
        margin = round(float(wanted.rows()[a][0] - work.rows()[a][0]) / work.step(a))
        picks.append(slice(margin, margin + (wanted.shape[a] - 1) * parts + 1, parts))
    labels = labels[picks[0], picks[1], picks[2]].contiguous()
    tissue = tissue[picks[0], picks[1], picks[2]].contiguous()
    outside = acquisition.outside_circle(patient, wanted, hu.device)
    if outside is not None:
        hu[outside] = patient.scanner.padding_hu
        labels[outside] = 0
        tissue[outside] = int(Tissue.PADDING)
    if abs((patient.torso.rotation[2] + 180) % 360 - 180) > 135:  # on the back or front, its header says otherwise
        labels = torch.where(labels > 0, 3 - labels, labels)
    return Phantom(hu, labels, tissue, grid)
