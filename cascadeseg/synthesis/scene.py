"""`Scene`: the volume being painted, layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cascadeseg.synthesis.fields import (
    Axes,
    Beads,
    Slices,
    coarse_axes,
    extent_below,
    random_field,
    splat,
    splat_weight,
    upsample,
)
from cascadeseg.synthesis.tissue import Tissue
from cascadeseg.synthesis.warp import Warp

if TYPE_CHECKING:
    from cascadeseg.synthesis.patient import Patient


@dataclass(eq=False)
class Scene:
    """A volume in the making.

    Attributes:
        axes: the voxels being painted (the requested ones and a margin for the scanner's blur).
        coarse: the 5 mm lattice around them.
        body: body coordinates (x, y, z) on the coarse lattice.
        hu: (X, Y, Z) float32.
        tissue: (X, Y, Z) uint8.
        voxel_mm: edge of a cube as large as a voxel: how soft a painted edge is.
    """

    patient: Patient
    device: torch.device
    axes: Axes
    coarse: Axes
    warp: Warp
    body: tuple[Tensor, Tensor, Tensor]
    hu: Tensor
    tissue: Tensor
    voxel_mm: float

    @staticmethod
    def opened(patient: Patient, axes: Axes, device: torch.device) -> Scene:
        """Nothing but air."""
        warp = Warp(patient)
        coarse = coarse_axes(axes)
        return Scene(
            patient=patient,
            device=device,
            axes=axes,
            coarse=coarse,
            warp=warp,
            body=warp.to_body(coarse, device),
            hu=torch.full(axes.shape, patient.hounsfield.air, device=device),
            tissue=torch.zeros(axes.shape, dtype=torch.uint8, device=device),
            voxel_mm=math.prod(axes.step(a) for a in range(3)) ** (1 / 3),
        )

    @property
    def scale(self) -> float:
        """World mm of one body mm."""
        return float(self.warp.scale.mean())

    @property
    def upward(self) -> tuple[float, float]:
        """The body's own axis, (1, 0) for its right or (0, 1) for its front, that points up most, or its opposite."""
        ux, uy = self.patient.scanner.up
        right, front = (torch.tensor([self.warp.mirror * ux, uy]) @ self.warp.rotation[:2, :2]).tolist()
        return (math.copysign(1, right), 0.0) if abs(right) > abs(front) else (0.0, math.copysign(1, front))

    def near(self, field: Tensor, mm: float = 0.0) -> Slices | None:
        """The box of voxels where a coarse field is below ``mm`` (with a margin), or None."""
        return extent_below(field, mm + self.voxel_mm, self.coarse, self.axes)

    def up(self, field: Tensor, part: Slices) -> Tensor:
        """A coarse field at the voxels of a box."""
        return upsample(field, self.coarse, self.axes[part])

    def filled(self, distance: Tensor, soft_mm: float = 0.0) -> Tensor:
        """Which part of each voxel lies inside, from its signed distance (which is used up).

        An edge that moved while the scan was taken is ``soft_mm`` wider than a voxel.
        """
        return distance.mul_(-1 / (self.voxel_mm + soft_mm)).add_(0.5).clamp_(0, 1)

    def noise(self, seed: int, spacing_mm: float, part: Slices) -> Tensor:
        """A random field of unit variance at the voxels of a box, features about ``spacing_mm`` wide."""
        return random_field(seed, spacing_mm, self.axes[part], self.device)

    def coarse_noise(self, seed: int, spacing_mm: float) -> Tensor:
        return random_field(seed, spacing_mm, self.coarse, self.device)

    def paint(self, part: Slices, weight: Tensor, value: Tensor | float, tissue: Tissue) -> None:
        """Mix a tissue into a box: ``weight`` (0 to 1) of each voxel becomes ``value`` HU."""
        end = value if isinstance(value, Tensor) else torch.full((), value, device=self.device)
        self.hu[part].lerp_(end, weight)
        self.tissue[part].masked_fill_(weight > 0.5, int(tissue))

    def shape(self, field: Tensor, value: float, tissue: Tissue, texture: float = 0.0) -> None:
        """Paint a whole organ given as a coarse distance."""
        part = self.near(field)
        if part is None:
            return
        weight = self.filled(self.up(field, part))
        if texture:
            grain = self.noise(self.patient.hounsfield.texture_seed + int(tissue), 6.0, part)
            self.paint(part, weight, grain.mul_(texture).add_(value), tissue)
        else:
            self.paint(part, weight, value, tissue)

    def world(self, beads: Beads) -> Beads:
        return self.warp.to_world(beads, self.device)

    def coarse_splat(self, beads: Beads, reach_mm: float = 12.0) -> Tensor:
        """Distance to thick tubes (radius of 7 mm or more) on the coarse lattice."""
        return splat(self.world(beads), self.coarse, self.device, reach_mm)

    def box_of(self, beads: Beads, reach_mm: float) -> Slices | None:
        """The voxels that world beads can reach."""
        if len(beads) == 0:
            return None
        reach = beads.radii.max() + reach_mm
        low, high = (beads.centres.amin(0) - reach).tolist(), (beads.centres.amax(0) + reach).tolist()
        parts = []
        for row, a, b in zip(self.axes.rows(), low, high, strict=True):
            start, stop = int(torch.searchsorted(row, a)), int(torch.searchsorted(row, b, right=True))
            if stop <= start:
                return None
            parts.append(slice(start, stop))
        return parts[0], parts[1], parts[2]

    def tubes(self, beads: Beads, value: float, tissue: Tissue) -> None:
        """Paint thin tubes straight at the voxels."""
        world = self.world(beads)
        part = self.box_of(world, self.voxel_mm)
        if part is not None:
            self.paint(part, splat_weight(world, self.axes[part], self.device, self.voxel_mm), value, tissue)
