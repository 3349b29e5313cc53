"""Lines, tubes, wires and implants."""

from __future__ import annotations

from cascadeseg.synthesis import anatomy
from cascadeseg.synthesis.fields import Beads, strand
from cascadeseg.synthesis.scene import Scene
from cascadeseg.synthesis.tissue import Tissue


def paint_devices(scene: Scene) -> None:
    """Paint what the findings name."""
    patient = scene.patient
    chest, torso = patient.chest, patient.torso
    h, zc, front = torso.height, chest.carina, torso.half_depth + torso.muscle
    names = patient.findings.devices
    if "central_line" in names:
        path = [(42, 2, h + 60), (36, 8, h), (26, 14, h - 30), (27, 16, zc), (24, 14, zc - 40)]
        scene.tubes(strand(path, 1.1, 0.6), 900.0, Tissue.DEVICE)
    if "gastric_tube" in names:
        tube = anatomy.oesophagus(patient)
        scene.tubes(Beads(tube.centres, tube.radii * 0 + 1.8), 300.0, Tissue.DEVICE)
    if "tracheal_tube" in names:
        tube = strand([(0, 24, h + 95), (0, 18, h + 55), (1, 4, h), (2, 0, zc + 40)], 4.6)
        scene.tubes(tube, 200.0, Tissue.DEVICE)
        scene.tubes(tube.grown(-1.2), patient.hounsfield.lumen, Tissue.AIRWAY)
    if "pacemaker" in names:
        box = strand([(-92, front * 0.72, h - 62), (-66, front * 0.78, h - 66)], 9)
        scene.tubes(box, 3000.0, Tissue.METAL)
        wire = [(-80, front * 0.7, h - 50), (-60, 12, h - 12), (10, 22, zc + 36), (26, 16, zc - 40), (-40, 30, 20)]
        scene.tubes(strand(wire, 1.0, 0.6), 2500.0, Tissue.METAL)
    if "chest_drain" in names:
        side = 1 if patient.findings.effusion[0] >= patient.findings.effusion[1] else -1
        a = torso.half_width
        path = [
            (side * (a + 70), 20, 70),
            (side * (a + 2), 0, 75),
            (side * (a - 22), -30, 100),
            (side * 60, -50, 0.75 * h),
        ]
        scene.tubes(strand(path, 3.6), 350.0, Tissue.DEVICE)
        scene.tubes(strand(path, 2.3), -900.0, Tissue.DEVICE)
    if "sternal_wires" in names:
        for t in (0.3, 0.45, 0.6, 0.75):
            y = float(anatomy.cage_section(scene.body[2].new_tensor(t * h), torso).front) + 8
            ring = [(-9, y, t * h), (0, y + 9, t * h), (9, y, t * h), (0, y - 8, t * h), (-9, y, t * h)]
            scene.tubes(strand(ring, 0.7, 0.8), 2800.0, Tissue.METAL)
    if "spinal_rods" in names:
        y = chest.vertebra_y - chest.vertebra - 16
        for s in anatomy.SIDES:
            scene.tubes(strand([(s * 17, y, 40), (s * 17, y, 0.8 * h)], 3), 3000.0, Tissue.METAL)
    if "electrodes" in names:
        for x, z in ((80, 0.8 * h), (-80, 0.8 * h), (-110, 10)):
            y = front + torso.fat * 0.7 - (12 if abs(x) < 100 else 45)
            scene.tubes(strand([(x, y, z), (x + 4, y, z + 3)], 3.5), 600.0, Tissue.DEVICE)
