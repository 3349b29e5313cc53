"""`render`: a patient's scan on any axis-aligned grid, painted layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cascadeseg.geometry import Grid
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
        labels: (X, Y, Z) uint8, 0 background, 1 right lung, 2 left lung (the patient's sides).
        tissues: (X, Y, Z) uint8, values of `Tissue`.
        grid: where the voxels lie.
    """

    hu: Tensor
    labels: Tensor
    tissues: Tensor
    grid: Grid


@torch.no_grad()
def render(patient: Patient, grid: Grid, device: str | torch.device = "cpu") -> Phantom:
    """Paint and scan a patient on an axis-aligned RAS+ grid.

    Every field is anchored to the world, so a box of a volume equals the same box cut from the whole.
    """
    wanted = acquisition.grid_axes(grid)
    work = acquisition.working_axes(patient, wanted)
    scene = Scene.opened(patient, work, torch.device(device))
    render_body.paint_couch(scene)
    shapes = render_body.body_shapes(scene)
    render_body.paint_cloth(scene, shapes)
    render_body.paint_body(scene, shapes)
    render_body.paint_cavities(scene, shapes)
    render_body.paint_abdomen(scene, shapes)
    render_body.paint_mediastinum(scene)
    render_body.paint_bones(scene)
    labels = render_lungs.paint_lungs(scene, shapes)
    render_lungs.paint_airways(scene)
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
    return Phantom(hu, labels, tissue, grid)
