"""What the scanner makes of the anatomy: slices, blur, noise, offsets, rounding and padding (see also `artefacts`)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cascadeseg.geometry import Grid
from cascadeseg.synthesis import artefacts
from cascadeseg.synthesis.fields import Axes, lattice, linear_matrix, separable, slab_matrix
from cascadeseg.synthesis.scanner import Scanner

if TYPE_CHECKING:
    from cascadeseg.synthesis.patient import Patient

NOISE_TILE = 160
"""Voxels after which noise comes again: more than a patch of stage 2 has."""
MAX_STEP_MM = 2.5
STREAK_LAYER_MM = 0.5
"""Streaks of slices that overlap from voxel to voxel are made of layers no thicker than this."""


def grid_axes(grid: Grid) -> Axes:
    """The voxel centres of an axis-aligned RAS+ grid."""
    rows = []
    for a in range(3):
        step, first = float(grid.affine[a, a]), float(grid.affine[a, 3])
        # Voxel numbers in the world's lattice: the same float for the same voxel, whatever the box.
        number = round(first / step)
        rows.append((torch.arange(grid.shape[a], dtype=torch.float64) + number) * step + (first - number * step))
    return Axes(rows[0], rows[1], rows[2], grid.spacing_mm)


def working_axes(patient: Patient, wanted: Axes) -> Axes:
    """The voxels to paint: finer slices where the wanted ones are thick, and a margin for blur and slices."""
    scanner = patient.scanner
    rows = []
    for a, row in enumerate(wanted.rows()):
        step = wanted.step(a)
        parts = sub_slices(step) if a == 2 else 1
        reach = 2.5 * scanner.blur_mm + 0.5 * step
        if a == 0 and scanner.pulse_mm:
            reach += scanner.pulse_mm / 2 + step
        if a == 2:
            reach = 0.5 * slice_thickness(scanner, step) + slice_distance(scanner, step) + step + scanner.motion_mm / 2
        margin = math.ceil(reach / (step / parts))
        number = torch.arange(-margin, (len(row) - 1) * parts + margin + 1, dtype=torch.float64)
        rows.append(row[0] + number * (step / parts))
    x, y, z = wanted.steps
    return Axes(rows[0], rows[1], rows[2], (x, y, z / sub_slices(z)))


def sub_slices(step: float) -> int:
    """Into how many (an odd number) thinner slices a thick one is painted."""
    if step <= MAX_STEP_MM:
        return 1
    count = math.ceil(step / 2.0)
    return count if count % 2 else count + 1


def slice_thickness(scanner: Scanner, step: float) -> float:
    return max(scanner.slice_mm, step)


def slice_distance(scanner: Scanner, step: float) -> float:
    return max(scanner.slice_mm * scanner.slice_step, step) if scanner.stairs else step


def slice_matrix(scanner: Scanner, work: Tensor, wanted: Tensor, step: float) -> Tensor:
    """(wanted, work) weights: averaging over the slice thickness and, for thick slices, interpolating between them."""
    thick, distance = slice_thickness(scanner, step), slice_distance(scanner, step)
    if distance <= 1.01 * step:
        return _slab(work, wanted, thick, scanner.motion_mm)
    _, slices = lattice(wanted, distance)
    return linear_matrix(slices, wanted) @ _slab(work, slices, thick, scanner.motion_mm)


def _slab(work: Tensor, centres: Tensor, thick: float, motion_mm: float = 0.0) -> Tensor:
    """(centres, work) means over slabs; with motion, of two places of the body: every contour is seen twice."""
    if motion_mm:
        return (_slab(work, centres - motion_mm / 2, thick) + _slab(work, centres + motion_mm / 2, thick)) / 2
    return slab_matrix(work, centres, thick)


def noise_layers(scanner: Scanner, wanted: Axes) -> tuple[Tensor, Tensor]:
    """Numbers of the layers of white noise at the wanted slices, and (wanted, layers) how much of each these take.

    A layer is a slice of the scanner where these show as stairs, else a layer of voxels.
    """
    step = wanted.step(2)
    reach = slice_thickness(scanner, step) / 2
    distance = slice_distance(scanner, step)
    if distance > 1.01 * step:
        number, layers = lattice(wanted.z, distance, reach)
    else:
        start = float(wanted.z[0]) - int(wanted.numbers(2)[0]) * step
        number, layers = lattice(wanted.z, step, reach, start)
    return number, noise_matrix(scanner, layers, wanted.z, step)


def streak_layers(scanner: Scanner, wanted: Axes) -> tuple[Tensor, Tensor]:
    """Like `noise_layers`, but the same layers whatever the voxels, of which voxels thicker than a slice take less."""
    step = wanted.step(2)
    thick = slice_thickness(scanner, step)
    parts = scanner.slice_step if scanner.stairs else 1 / math.ceil(scanner.slice_mm / STREAK_LAYER_MM)
    number, layers = lattice(wanted.z, scanner.slice_mm * parts, thick / 2 + slice_distance(scanner, step))
    return number, noise_matrix(scanner, layers, wanted.z, step) * math.sqrt(scanner.slice_mm / thick)


def noise_matrix(scanner: Scanner, layers: Tensor, wanted: Tensor, step: float) -> Tensor:
    """(wanted, layers) weights of noise: through the same slabs as the image, as strong as in one layer."""
    thick, distance = slice_thickness(scanner, step), slice_distance(scanner, step)
    slices = lattice(wanted, distance)[1] if distance > 1.01 * step else wanted
    slab = slab_matrix(layers, slices, thick)
    slab = slab / slab.square().sum(dim=1, keepdim=True).sqrt()
    return slab if slices is wanted else linear_matrix(slices, wanted) @ slab


def blur_matrix(work: Tensor, wanted: Tensor, sigma: float, sharpening: float) -> Tensor:
    """(wanted, work) weights of the in-plane point spread: a Gaussian, some kernels overshooting at edges."""
    gap = (work[None, :] - wanted[:, None]).float()
    near = torch.exp(-0.5 * (gap / max(sigma, 0.05)).square()) * (gap.abs() < 2.5 * sigma + 1e-4)
    near = near / near.sum(dim=1, keepdim=True)
    if sharpening and sigma:
        wide = torch.exp(-0.5 * (gap / (1.6 * sigma)).square()) * (gap.abs() < 2.5 * sigma + 1e-4)
        near = (1 + 0.35 * sharpening) * near - 0.35 * sharpening * wide / wide.sum(dim=1, keepdim=True)
    return near


def acquire(patient: Patient, painted: Tensor, work: Axes, wanted: Axes) -> Tensor:
    """The HU that the scanner saves (wanted shape, float32 whole numbers) of the painted anatomy."""
    scanner = patient.scanner
    step = wanted.step(2)
    matrices = [
        *(blur_matrix(w, v, _blur(scanner, wanted.step(a)), scanner.sharpening)
          for a, (w, v) in enumerate(zip(work.rows()[:2], wanted.rows()[:2], strict=True))),
        slice_matrix(scanner, work.z, wanted.z, step),
    ]  # fmt: skip
    hu = separable(matrices, artefacts.pulsating(patient, painted, work))
    if scanner.noise_hu:
        _add_noise(scanner, hu, wanted)
    artefacts.add_artefacts(patient, hu, wanted, slice_thickness(scanner, step), streak_layers(scanner, wanted))
    hu.mul_(scanner.gain).add_(scanner.offset_hu + 1000 * (scanner.gain - 1))
    return hu.round_().clamp_(scanner.floor_hu, scanner.ceiling_hu)


def _blur(scanner: Scanner, step: float) -> float:
    """Blur that painting at this voxel size has not done already (mm)."""
    return math.sqrt(max(scanner.blur_mm**2 - (0.25 * step) ** 2, 0.01))


@lru_cache(maxsize=4)
def _noise_tile(seed: int, colour: float, step_mm: float) -> Tensor:
    """A periodic tile of unit noise: white in z, coloured in the plane as a reconstruction kernel colours it."""
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn((NOISE_TILE, NOISE_TILE, NOISE_TILE), generator=generator)
    f = torch.fft.fftfreq(NOISE_TILE) / step_mm
    radius = (f[:, None].square() + f[None, :].square()).sqrt()
    # A ramp at low frequencies, cut off near the kernel's limit (cycles per mm).
    power = (radius + 0.02) ** 0.5 * torch.exp(-((radius / (0.2 + 0.5 * colour)) ** 2))
    tile: Tensor = torch.fft.ifft2(torch.fft.fft2(white, dim=(0, 1)) * power[:, :, None], dim=(0, 1)).real
    return (tile / tile.std()).contiguous()


def _add_noise(scanner: Scanner, hu: Tensor, wanted: Axes) -> None:
    step = wanted.step(0)
    tile = _noise_tile(scanner.seed, round(scanner.noise_colour, 2), round(step, 3)).to(hu.device)
    where = [wanted.numbers(a) % NOISE_TILE for a in range(2)]
    # Coarser voxels average the noise of the scanner's own.
    ratio = (scanner.pixel_mm / max(step, scanner.pixel_mm)) * math.sqrt(
        scanner.slice_mm / max(wanted.step(2), scanner.slice_mm)
    )
    sd = scanner.noise_hu * max(ratio, 0.12) ** 0.7
    noise = tile[where[0].to(hu.device)][:, where[1].to(hu.device)]
    number, matrix = noise_layers(scanner, wanted)
    noise = torch.matmul(noise[:, :, (number % NOISE_TILE).to(hu.device)], matrix.T.to(hu.device))
    # Less noise where little is in the way: air beside the patient.
    noise.mul_((hu * 0.0004).add_(1.0).clamp_(0.6, 1.0))
    hu.add_(noise, alpha=sd)


def outside_circle(patient: Patient, wanted: Axes, device: torch.device) -> Tensor | None:
    """(X, Y) mask of the padding outside a circular field of view, or None where the scanner saved squares."""
    if not patient.scanner.circular:
        return None
    x, y, _ = wanted.points(device)
    torso, view = patient.torso, patient.view
    cx = view.centre[0] * torso.aspect[0] * torso.size + torso.offset[0]
    cy = view.centre[1] * torso.aspect[1] * torso.size + torso.offset[1]
    return ((x - cx).square() + (y - cy).square() > (view.width / 2) ** 2)[:, :, 0]
