"""What goes wrong while scanning: a beating heart, streaks at shoulders and metal, cupping.

Everything is a function of the place in the world, so that a box of a volume equals the same box cut from the whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cascadeseg.synthesis import anatomy, devices
from cascadeseg.synthesis.fields import Axes, Beads, lattice, linear_matrix, slab_matrix
from cascadeseg.synthesis.warp import Warp

if TYPE_CHECKING:
    from cascadeseg.synthesis.patient import Patient

SPOKES = 150
"""Directions in which the streaks of metal differ."""

STREAK_TILE = (1024, 512)
"""After how many rows of pixels, and layers of slices, streaks come again."""


def pulsating(patient: Patient, painted: Tensor, work: Axes) -> Tensor:
    """The painted volume with the heart seen twice, ``pulse_mm`` apart, as it beats while it is scanned."""
    reach = patient.scanner.pulse_mm / 2
    if not reach:
        return painted
    warp = Warp(patient)
    middle = Beads(torch.tensor([patient.chest.heart_centre]), torch.ones(1))
    centre = warp.to_world(anatomy.moved(middle, patient), torch.device("cpu")).centres[0].tolist()
    radius = 1.35 * float(warp.scale.max()) * max(patient.chest.heart_radii)
    parts = []
    for row, c in zip(work.rows(), centre, strict=True):
        start, stop = (int(torch.searchsorted(row, v)) for v in (c - radius, c + radius))
        if stop <= start:
            return painted
        parts.append(slice(start, stop))
    x, y, z = work[parts[0], parts[1], parts[2]].points(painted.device)
    far = ((x - centre[0]).square() + (y - centre[1]).square() + (z - centre[2]).square()).sqrt_().div_(radius)
    two = (linear_matrix(work.x, work.x[parts[0]] + reach) + linear_matrix(work.x, work.x[parts[0]] - reach)) / 2
    block = painted[:, parts[1], parts[2]]
    doubled = (two.to(block.device) @ block.reshape(block.shape[0], -1)).reshape(far.shape)
    painted[parts[0], parts[1], parts[2]].lerp_(doubled, (4 - 4 * far).clamp_(0, 1))
    return painted


def add_artefacts(patient: Patient, hu: Tensor, wanted: Axes, thick_mm: float, layers: tuple[Tensor, Tensor]) -> None:
    """Add to a scanned volume what this scanner suffers from (slices ``thick_mm`` thick, streaks from ``layers``)."""
    scanner = patient.scanner
    if scanner.streaks_hu:
        _add_rows(patient, hu, wanted, layers)
    if scanner.starvation_hu:
        _add_starvation(patient, hu, wanted, layers)
    if scanner.metal_hu:
        for parts in devices.metal(patient):
            _add_star(patient, parts, hu, wanted, thick_mm, layers)
    if scanner.cupping_hu:
        x, y, _ = wanted.points(hu.device)
        ox, oy, _ = patient.torso.offset
        hu.add_(((x - ox).square() + (y - oy).square()).div_(170.0**2).clamp_(max=1.5), alpha=scanner.cupping_hu)


def _shoulders(patient: Patient, wanted: Axes, device: torch.device, reach_mm: float) -> Tensor:
    """(Z) 1 at the height of the shoulders, falling to 0."""
    top = patient.torso.offset[2] + patient.torso.height * patient.torso.size
    z = wanted.z.to(device, torch.float32)
    return torch.exp(-((z - top) / reach_mm).square())


def _streaks(seed: int, layers: tuple[Tensor, Tensor]) -> Tensor:
    """(rows, Z) unit noise, of each slice its own as far as its layers are."""
    tile = torch.randn(STREAK_TILE, generator=torch.Generator().manual_seed(seed))
    number, matrix = layers
    return tile[:, number % STREAK_TILE[1]] @ matrix.T


def _rows_at(streaks: Tensor, where: Tensor, width_mm: float, row_mm: float) -> Tensor:
    """(places, Z) means of (rows, Z) streaks, ``row_mm`` wide each, over ``width_mm`` around each place (mm)."""
    number, rows = lattice(where, row_mm, width_mm)
    return slab_matrix(rows, where, width_mm) @ streaks[number % STREAK_TILE[0]]


def _add_rows(patient: Patient, hu: Tensor, wanted: Axes, layers: tuple[Tensor, Tensor]) -> None:
    """Noise that is constant along the direction of the shoulders, strongest at their height."""
    pixel = patient.scanner.pixel_mm
    tile = _streaks(patient.scanner.seed + 1, layers)
    tile = (tile + torch.roll(tile, 1, 0)) * 0.7
    streaks = _rows_at(tile, wanted.y, max(pixel, wanted.step(1)), pixel).to(hu.device)
    strength = _shoulders(patient, wanted, hu.device, 70) + 0.15
    hu.add_((streaks * strength[None]).unsqueeze(0), alpha=patient.scanner.streaks_hu)


def _add_starvation(patient: Patient, hu: Tensor, wanted: Axes, layers: tuple[Tensor, Tensor]) -> None:
    """Slanting streaks and a dark band from shoulder to shoulder, in the body only: too few photons come through."""
    strength = _shoulders(patient, wanted, hu.device, 55)
    parts = torch.nonzero(strength > 0.02)[:, 0]
    if len(parts) == 0:
        return
    here = slice(int(parts[0]), int(parts[-1]) + 1)
    axes = wanted[slice(None), slice(None), here]
    tile = _streaks(patient.scanner.seed + 2, (layers[0], layers[1][here]))
    row = 1.6 * patient.scanner.pixel_mm
    ox, oy, _ = patient.torso.offset
    x, y = axes.x - ox, axes.y - oy
    streaks = torch.zeros(axes.shape, device=hu.device)
    for slope in (-0.09, 0.0, 0.07):
        tile = torch.roll(tile, 31, 0)
        place = y[None, :] + slope * x[:, None]
        number, fine = lattice(torch.stack([place.min(), place.max()]), axes.step(1) / 4)
        table = _rows_at(tile, fine, max(row, axes.step(1)), row).to(hu.device)
        streaks += table[(torch.round(place * 4 / axes.step(1)).long() - number[0]).to(hu.device)]
    band = torch.exp(-((y + 12) / 24).square()).float().to(hu.device)
    streaks.mul_(0.55).sub_(0.7 * band[None, :, None]).mul_(strength[here])
    streaks.mul_((hu[:, :, here] * 0.001).add_(1.0).clamp_(0.1, 1.0))
    hu[:, :, here].add_(streaks, alpha=patient.scanner.starvation_hu)


def _add_star(
    patient: Patient, parts: list[Beads], hu: Tensor, wanted: Axes, thick_mm: float, layers: tuple[Tensor, Tensor]
) -> None:
    """Bright and dark fans around each metal part of a device, dark along the line on which its parts lie."""
    world = [Warp(patient).to_world(part, torch.device("cpu")) for part in parts]
    shares = [_share(beads, wanted.z, thick_mm) for beads in world]
    slices = torch.nonzero(torch.stack([share.sum(dim=1) for share in shares]).sum(dim=0) > 0)[:, 0]
    if len(slices) == 0:
        return
    angle, length = _line_through(world, [share[slices] for share in shares])
    axes = Axes(wanted.x, wanted.y, wanted.z[slices], wanted.steps)
    streaks = torch.zeros(axes.shape, device=hu.device)
    for number, (beads, share) in enumerate(zip(world, shares, strict=True)):
        spokes = _spokes(patient.scanner.seed + 10 + number, (layers[0], layers[1][slices]))
        _add_fans(streaks, axes, beads, share[slices], angle, length, spokes)
    chosen = slices.to(hu.device)
    block = hu[:, :, chosen]
    streaks.mul_((block * 0.0006).add_(1.0).clamp_(0.4, 1.0))
    hu[:, :, chosen] = block.add_(streaks, alpha=patient.scanner.metal_hu)


def _share(beads: Beads, z: Tensor, thick_mm: float) -> Tensor:
    """(slices, beads) float32: how far each bead lies in each slice, 0 to 1."""
    gap = (z[:, None] - beads.centres[None, :, 2]).abs().float()
    return ((thick_mm / 2 + beads.radii[None] + 1 - gap) / (thick_mm / 2 + 1)).clamp(0, 1)


def _line_through(world: list[Beads], shares: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Direction (radians, slices) of the line along which the metal of each slice lies, and its half length (mm)."""
    centres, share = torch.cat([b.centres[:, :2] for b in world]), torch.cat(shares, dim=1)
    share = share / share.sum(dim=1, keepdim=True).clamp(min=1e-6)
    middle = share @ centres
    xx, yy = (share @ centres.square() - middle.square()).clamp(min=0).unbind(dim=1)
    xy = share @ (centres[:, 0] * centres[:, 1]) - middle[:, 0] * middle[:, 1]
    return 0.5 * torch.atan2(2 * xy, xx - yy), (xx + yy).sqrt()


def _add_fans(
    streaks: Tensor, axes: Axes, beads: Beads, share: Tensor, angle: Tensor, length: Tensor, spokes: Tensor
) -> None:
    """Add one part's fans, of unit strength at its surface, to (X, Y, Z) streaks."""
    device = streaks.device
    total = share.sum(dim=1).clamp(min=1e-6)
    middle = (share @ beads.centres[:, :2] / total[:, None]).to(device)
    radius = (share @ beads.radii / total).to(device)
    x, y, _ = axes.points(device)
    dx, dy = x - middle[:, 0], y - middle[:, 1]
    away = (dx.square() + dy.square()).sqrt().clamp_(min=1.0)
    place = torch.atan2(dy, dx).add_(math.pi).mul_(SPOKES / (2 * math.pi)).clamp_(0, SPOKES - 1e-3)
    low = place.long()
    table, k = spokes.to(device), torch.arange(len(axes.z), device=device)
    fans = torch.lerp(table[k, low], table[k, low + 1], place - low)
    across = (dy * torch.cos(angle).to(device) - dx * torch.sin(angle).to(device)).div_(away).square_()
    line = torch.exp(across * -12).mul_(0.8).sub_(torch.exp(across * -110).mul_(1.6))
    fans.add_(line.mul_((length.to(device) / (radius + 4)).clamp(max=1.5)))
    present = share.amax(dim=1).to(device)
    streaks.add_(fans.mul_(radius * present).div_(away.add_(radius)))


def _spokes(seed: int, layers: tuple[Tensor, Tensor]) -> Tensor:
    """(slices, SPOKES + 1) strength of the streaks by direction: few strong ones, alike in neighbouring slices."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(SPOKES, generator=generator)
    tile = torch.randn((STREAK_TILE[1], SPOKES), generator=generator)
    number, matrix = layers
    table = 0.8 * common + 0.6 * (matrix @ tile[number % STREAK_TILE[1]])
    table = (torch.roll(table, 1, 1) + 2 * table + torch.roll(table, -1, 1)) / 4
    table = table * table.abs()
    return torch.cat([table, table[:, :1]], dim=1)
