"""Lines, tubes, wires and implants."""

from __future__ import annotations

from collections.abc import Callable

from cascadeseg.synthesis import anatomy
from cascadeseg.synthesis.fields import Beads, strand
from cascadeseg.synthesis.scene import Scene
from cascadeseg.synthesis.tissue import Tissue

Path = list[tuple[float, float, float]]


def paint_devices(scene: Scene) -> None:
    """Paint what the findings name."""
    for name in scene.patient.findings.devices:
        PAINTERS[name](scene)


def _central_line(scene: Scene) -> None:
    h, zc = scene.patient.torso.height, scene.patient.chest.carina
    path: Path = [(42, 2, h + 60), (36, 8, h), (26, 14, h - 30), (27, 16, zc), (24, 14, zc - 40)]
    scene.tubes(strand(path, 1.1, 0.6), 900.0, Tissue.DEVICE)


def _gastric_tube(scene: Scene) -> None:
    tube = anatomy.oesophagus(scene.patient)
    scene.tubes(Beads(tube.centres, tube.radii * 0 + 1.8), 300.0, Tissue.DEVICE)


def _tracheal_tube(scene: Scene) -> None:
    h, zc = scene.patient.torso.height, scene.patient.chest.carina
    tube = strand([(0, 24, h + 95), (0, 18, h + 55), (1, 4, h), (2, 0, zc + 40)], 4.6)
    scene.tubes(tube, 200.0, Tissue.DEVICE)
    scene.tubes(tube.grown(-1.2), scene.patient.hounsfield.lumen, Tissue.AIRWAY)


def _pacemaker(scene: Scene) -> None:
    h, zc = scene.patient.torso.height, scene.patient.chest.carina
    front = scene.patient.torso.half_depth + scene.patient.torso.muscle
    box: Path = [(-92, front * 0.72, h - 62), (-66, front * 0.78, h - 66)]
    scene.tubes(strand(box, 9), 3000.0, Tissue.METAL)
    wire: Path = [(-80, front * 0.7, h - 50), (-60, 12, h - 12), (10, 22, zc + 36), (26, 16, zc - 40), (-40, 30, 20)]
    scene.tubes(strand(wire, 1.0, 0.6), 2500.0, Tissue.METAL)


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


def _sternal_wires(scene: Scene) -> None:
    torso = scene.patient.torso
    for t in (0.3, 0.45, 0.6, 0.75):
        z = t * torso.height
        y = float(anatomy.cage_section(scene.body[2].new_tensor(z), torso).front) + 8
        ring: Path = [(-9, y, z), (0, y + 9, z), (9, y, z), (0, y - 8, z), (-9, y, z)]
        scene.tubes(strand(ring, 0.7, 0.8), 2800.0, Tissue.METAL)


def _spinal_rods(scene: Scene) -> None:
    chest, h = scene.patient.chest, scene.patient.torso.height
    y = chest.vertebra_y - chest.vertebra - 16
    for s in anatomy.SIDES:
        scene.tubes(strand([(s * 17, y, 40), (s * 17, y, 0.8 * h)], 3), 3000.0, Tissue.METAL)


def _electrodes(scene: Scene) -> None:
    torso = scene.patient.torso
    for x, z in ((80, 0.8 * torso.height), (-80, 0.8 * torso.height), (-110, 10)):
        y = torso.half_depth + torso.muscle + torso.fat * 0.7 - (12 if abs(x) < 100 else 45)
        scene.tubes(strand([(x, y, z), (x + 4, y, z + 3)], 3.5), 600.0, Tissue.DEVICE)


def _stent(scene: Scene) -> None:
    tube = anatomy.airways(scene.patient)
    middle = tube.centres[:, 2]
    chosen = (middle > scene.patient.chest.carina + 8) & (middle < scene.patient.chest.carina + 45)
    part = Beads(tube.centres[chosen], tube.radii[chosen])
    scene.tubes(part.grown(0.7), 1500.0, Tissue.METAL)
    scene.tubes(part.grown(-0.6), scene.patient.hounsfield.lumen, Tissue.AIRWAY)


PAINTERS: dict[str, Callable[[Scene], None]] = {
    "central_line": _central_line,
    "gastric_tube": _gastric_tube,
    "tracheal_tube": _tracheal_tube,
    "pacemaker": _pacemaker,
    "chest_drain": _chest_drain,
    "sternal_wires": _sternal_wires,
    "spinal_rods": _spinal_rods,
    "electrodes": _electrodes,
    "stent": _stent,
}
