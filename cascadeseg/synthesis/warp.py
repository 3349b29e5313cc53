"""From the world to body space and back: size, posture, bends and a smooth random deformation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cascadeseg.synthesis.fields import Axes, Beads

if TYPE_CHECKING:
    from cascadeseg.synthesis.patient import Patient

_WAVES = 7


class Warp:
    """The map between a patient's world (mm, RAS+) and body space.

    The deformation is a sum of plane waves, so it is known exactly at any point and needs no lattice.
    """

    def __init__(self, patient: Patient) -> None:
        torso = patient.torso
        self.mirror = -1.0 if patient.mirror else 1.0
        self.offset = np.asarray(torso.offset)
        self.scale = np.asarray(torso.aspect) * torso.size
        self.rotation = torch.from_numpy(_rotation(torso.rotation)).float()
        self.kyphosis, self.scoliosis = torso.kyphosis, torso.scoliosis
        self.height = torso.height
        rng = np.random.default_rng(torso.field_seed)
        waves, pushes, phases = [], [], []
        for length, drawn in ((230 * torso.size, torso.warp[0]), (75 * torso.size, torso.warp[1])):
            # Waves as long as the patient is small are as high, too: children are no more crooked than adults.
            amplitude = drawn * min(1.0, torso.size)
            k = rng.standard_normal((_WAVES, 3))
            k *= (2 * np.pi / (length * rng.uniform(0.7, 1.6, _WAVES)) / np.linalg.norm(k, axis=1))[:, None]
            waves.append(k)
            pushes.append(rng.standard_normal((_WAVES, 3)) * amplitude * math.sqrt(2 / _WAVES))
            phases.append(rng.uniform(0, 2 * np.pi, _WAVES))
        self.waves = torch.from_numpy(np.concatenate(waves)).float()
        self.pushes = torch.from_numpy(np.concatenate(pushes)).float()
        self.phases = torch.from_numpy(np.concatenate(phases)).float()

    def to_body(self, axes: Axes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Body coordinates (x, y, z), each (X, Y, Z), of every point of a lattice."""
        shape = axes.shape
        x, y, z = axes.points(device)
        p = [x - float(self.offset[0]), y - float(self.offset[1]), z - float(self.offset[2])]
        p[0] = p[0] * self.mirror
        push = [torch.zeros(shape, device=device) for _ in range(3)]
        for k, a, phase in zip(self.waves.tolist(), self.pushes.tolist(), self.phases.tolist(), strict=True):
            # A plane wave is a product of one-axis waves: cos(a+b+c) from two outer products, no full cosine.
            xy = p[0] * k[0] + p[1] * k[1] + phase
            c = xy.cos() * (p[2] * k[2]).cos() - xy.sin() * (p[2] * k[2]).sin()
            for total, amount in zip(push, a, strict=True):
                total.add_(c, alpha=amount)
        q = [v + w for v, w in zip(p, push, strict=True)]
        r = self.rotation.tolist()
        out = [(q[0] * r[0][a] + q[1] * r[1][a] + q[2] * r[2][a]) / float(self.scale[a]) for a in range(3)]
        shift_x, shift_y = self._bend(out[2])
        return out[0] - shift_x, out[1] - shift_y, out[2]

    def to_world(self, beads: Beads, device: torch.device) -> Beads:
        """Beads of body space in the world."""
        p = beads.centres.to(device)
        shift_x, shift_y = self._bend(p[:, 2])
        p = torch.stack([p[:, 0] + shift_x, p[:, 1] + shift_y, p[:, 2]], dim=1)
        scale = torch.from_numpy(self.scale).float().to(device)
        target = (p * scale) @ self.rotation.to(device).T
        waves, pushes, phases = (v.to(device) for v in (self.waves, self.pushes, self.phases))
        world = target
        for _ in range(4):
            world = target - (world @ waves.T + phases).cos() @ pushes
        world = world * torch.tensor([self.mirror, 1.0, 1.0], device=device)
        world = world + torch.from_numpy(self.offset).float().to(device)
        return Beads(world, beads.radii.to(device) * float(self.scale.mean()))

    def _bend(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Sideways and backward shift of the spine (and all around it) at a body height."""
        t = (z / self.height).clamp(-2.5, 1.8)
        size, phase = self.scoliosis
        # Kyphosis: the middle of the thorax lies further back than both ends.
        return size * torch.sin(2.2 * t + phase), self.kyphosis * ((t - 0.45).square().clamp(max=1.2) * 2 - 0.3)


def _rotation(degrees: tuple[float, float, float]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    ax, ay, az = (math.radians(v) for v in degrees)
    rx = np.array([[1, 0, 0], [0, math.cos(ax), -math.sin(ax)], [0, math.sin(ax), math.cos(ax)]])
    ry = np.array([[math.cos(ay), 0, math.sin(ay)], [0, 1, 0], [-math.sin(ay), 0, math.cos(ay)]])
    rz = np.array([[math.cos(az), -math.sin(az), 0], [math.sin(az), math.cos(az), 0], [0, 0, 1]])
    matrix: np.ndarray[tuple[int, int], np.dtype[np.float64]] = rz @ rx @ ry
    return matrix
