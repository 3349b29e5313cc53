"""Lines, tubes, wires and implants. Those in `METAL` are known as shapes, as the scanner makes streaks of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from cascadeseg.synthesis import anatomy
from cascadeseg.synthesis.fields import Beads, strand
from cascadeseg.synthesis.scene import Scene
from cascadeseg.synthesis.tissue import Tissue

if TYPE_CHECKING:
    from cascadeseg.synthesis.patient import Patient

Path = list[tuple[float, float, float]]


def paint_devices(scene: Scene) -> None:
    """Paint what the findings name."""
    for name in scene.patient.findings.devices:
        if name in METAL:
            for part in METAL[name](scene.patient):
                scene.tubes(part, 3000.0, Tissue.METAL)
        else:
            PAINTERS[name](scene)


def metal(patient: Patient) -> list[list[Beads]]:
    """The metal parts of each of a patient's devices (body space)."""
    return [METAL[name](patient) for name in patient.findings.devices if name in METAL]


def _central_line(scene: Scene) -> None:
    h, zc = scene.patient.torso.height, scene.patient.chest.carina
    path: Path = [(42, 2, h + 60), (36, 8, h), (26, 14, h - 30), (27, 16, zc), (24, 14, zc - 40)]
    scene.tubes(anatomy.moved(strand(path, 1.1, 0.6), scene.patient), 900.0, Tissue.DEVICE)


def _gastric_tube(scene: Scene) -> None:
    tube = anatomy.oesophagus(scene.patient)
    scene.tubes(Beads(tube.centres, tube.radii * 0 + 1.8), 300.0, Tissue.DEVICE)


def _tracheal_tube(scene: Scene) -> None:
    h, zc = scene.patient.torso.height, scene.patient.chest.carina
    tube = strand([(0, 24, h + 95), (0, 18, h + 55), (1, 4, h), (2, 0, zc + 40)], 4.6)
    tube = anatomy.moved(tube, scene.patient)
    scene.tubes(tube, 200.0, Tissue.DEVICE)
    scene.tubes(tube.grown(-1.2), scene.patient.hounsfield.lumen, Tissue.AIRWAY)


def _chest_drain(scene: Scene) -> None:
    torso, effusion = scene.patient.torso, scene.patient.findings.effusion
    s = 1 if effusion[0] >= effusion[1] else -1
    a = torso.half_width
    path: Path = [
        (s * (a + 70), 20, 70),
        (s * (a + 2), 0, 75),
        (s * (a - 22), -30, 100),
        (s * 60, -50, 0.75 * torso.height),
    ]
    scene.tubes(strand(path, 3.6), 350.0, Tissue.DEVICE)
    scene.tubes(strand(path, 2.3), -900.0, Tissue.DEVICE)


def _electrodes(scene: Scene) -> None:
    torso = scene.patient.torso
    for x, z in ((80, 0.8 * torso.height), (-80, 0.8 * torso.height), (-110, 10)):
        y = torso.half_depth + torso.muscle + torso.fat * 0.7 - (12 if abs(x) < 100 else 45)
        scene.tubes(strand([(x, y, z), (x + 4, y, z + 3)], 3.5), 600.0, Tissue.DEVICE)


def _stent(scene: Scene) -> None:
    tube = anatomy.airways(scene.patient)
    middle = tube.centres[:, 2]
    part = tube.where((middle > scene.patient.chest.carina + 8) & (middle < scene.patient.chest.carina + 45))
    scene.tubes(part.grown(0.7), 1500.0, Tissue.METAL)
    scene.tubes(part.grown(-0.6), scene.patient.hounsfield.lumen, Tissue.AIRWAY)


def _pacemaker(patient: Patient) -> list[Beads]:
    h, zc = patient.torso.height, patient.chest.carina
    front = patient.torso.half_depth + patient.torso.muscle
    box: Path = [(-92, front * 0.72, h - 62), (-66, front * 0.78, h - 66)]
    wire: Path = [(-80, front * 0.7, h - 50), (-60, 12, h - 12), (10, 22, zc + 36), (26, 16, zc - 40), (-40, 30, 20)]
    return [strand(box, 9), anatomy.moved(strand(wire, 1.0, 0.6), patient)]


def _sternal_wires(patient: Patient) -> list[Beads]:
    torso, rings = patient.torso, []
    for t in (0.3, 0.45, 0.6, 0.75):
        z = t * torso.height
        y = float(anatomy.cage_section(torch.tensor(z), torso).front) + 8
        ring: Path = [(-9, y, z), (0, y + 9, z), (9, y, z), (0, y - 8, z), (-9, y, z)]
        rings.append(strand(ring, 0.7, 0.8))
    return rings


def _spinal_rods(patient: Patient) -> list[Beads]:
    chest, h = patient.chest, patient.torso.height
    y = chest.vertebra_y - chest.vertebra - 16
    rods = [strand([(s * 17, y, 40), (s * 17, y, 0.8 * h)], 3) for s in anatomy.SIDES]
    # Screws through the pedicles into the vertebral bodies.
    for z in (50.0, 94.0, 0.8 * h - 10):
        rods += [strand([(s * 17, y, z), (s * 9, y + 34, z)], 2.4) for s in anatomy.SIDES]
    return rods


def _clips(patient: Patient) -> list[Beads]:
    """A handful of surgical clips where one side was operated on."""
    rng = np.random.default_rng(patient.findings.seed)
    place = np.array([30.0 * rng.choice([-1, 1]), 0.0, patient.chest.carina]) + rng.normal(0, 12, (6, 3))
    return [strand([p, p + rng.normal(0, 3, 3)], 0.9) for p in place]


def _dental(patient: Patient) -> list[Beads]:
    """Fillings and crowns in both rows of teeth."""
    h = patient.torso.height
    rng = np.random.default_rng(patient.findings.seed + 1)
    angles = rng.uniform(-1.2, 1.2, 7)
    heights = h + 158 + 9 * rng.integers(0, 2, 7)
    return [
        strand([(25 * np.sin(a), 48 + 32 * np.cos(a), z), (25 * np.sin(a), 48 + 32 * np.cos(a), z + 4)], 2.6)
        for a, z in zip(angles, heights, strict=True)
    ]


def _shoulder_prosthesis(patient: Patient) -> list[Beads]:
    torso = patient.torso
    s = anatomy.SIDES[patient.findings.seed % 2]
    raised = 30 if torso.arms == "up" else 0
    x, z = s * (torso.half_width + 30), torso.height - 30 + raised
    shaft = z + 90 if torso.arms == "up" else z - 90
    return [strand([(x, -14, z), (x + s * 2, -14, z - 4)], 19, 0.4), strand([(x, -14, z), (x + s * 20, -12, shaft)], 6)]


def _hip_prosthesis(patient: Patient) -> list[Beads]:
    h = patient.torso.height
    sides = [anatomy.SIDES, anatomy.SIDES[:1], anatomy.SIDES[1:]][patient.findings.seed % 3]
    return [
        strand([(s * 84, -8, h - 535), (s * 95, -10, h - 575), (s * 93, -4, h - 700)], [22, 12, 7], 0.4) for s in sides
    ]


METAL: dict[str, Callable[[Patient], list[Beads]]] = {
    "pacemaker": _pacemaker,
    "sternal_wires": _sternal_wires,
    "spinal_rods": _spinal_rods,
    "clips": _clips,
    "dental": _dental,
    "shoulder_prosthesis": _shoulder_prosthesis,
    "hip_prosthesis": _hip_prosthesis,
}

PAINTERS: dict[str, Callable[[Scene], None]] = {
    "central_line": _central_line,
    "gastric_tube": _gastric_tube,
    "tracheal_tube": _tracheal_tube,
    "chest_drain": _chest_drain,
    "electrodes": _electrodes,
    "stent": _stent,
}
