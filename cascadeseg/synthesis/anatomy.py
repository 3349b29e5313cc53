"""Where the organs are: signed distances (mm, negative inside) and strands in body space.

Every function of points takes body coordinates as three tensors of one shape, so that the same anatomy serves the
coarse lattice of a rendering and the few points from which vessel trees grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cascadeseg.synthesis.fields import Beads, ellipsoid, smooth_max, smooth_min, strand

if TYPE_CHECKING:
    from cascadeseg.synthesis.patient import Chest, Patient, Torso

Points = tuple[Tensor, Tensor, Tensor]
SIDES = (1.0, -1.0)
"""x-direction of the right and of the left side."""


def profile(z: Tensor, heights: list[float], values: list[float]) -> Tensor:
    """A smooth curve through (height, value) pairs, read from a 4 mm table."""
    low, high = heights[0], heights[-1]
    count = int((high - low) / 4) + 2
    at = np.linspace(low, high, count)
    curve = np.interp(at, heights, values)
    kernel = np.hanning(13)
    curve = np.convolve(np.pad(curve, 6, mode="edge"), kernel / kernel.sum(), mode="valid")
    table = torch.from_numpy(curve).float().to(z.device)
    place = ((z - low) * ((count - 1) / (high - low))).clamp(0, count - 1.001)
    index = place.long()
    return torch.lerp(table[index], table[index + 1], place - index)


def superellipse(dx: Tensor, dy: Tensor, a: Tensor, b: Tensor, n: float) -> Tensor:
    """First-order distance to |dx/a|^n + |dy/b|^n = 1."""
    u, v = (dx / a).abs().clamp(min=1e-4), (dy / b).abs().clamp(min=1e-4)
    un, vn = u ** (n - 1), v ** (n - 1)
    s = (un * u + vn * v) ** (1 / n)
    slope = ((un / a).square() + (vn / b).square()).sqrt_() / s.clamp(min=1e-4) ** (n - 1)
    return (s - 1) / slope


# ---------------------------------------------------------------- the wall


@dataclass(frozen=True)
class CageSection:
    """The inner chest wall at some heights: half width, front and back (all mm)."""

    a: Tensor
    front: Tensor
    back: Tensor


def cage_section(z: Tensor, torso: Torso) -> CageSection:
    t = z / torso.height
    up = t.clamp(0, 1.25)
    low = (-t - 0.2).clamp(0, 1.5)
    a = torso.half_width * (1 - torso.width_taper * up**2.3 - 0.14 * low)
    front = torso.half_depth * (1 - torso.front_taper * ((t - 0.38) / 0.62).clamp(0, 1.3) ** 1.6)
    back = -torso.half_depth * (1 - torso.back_taper * ((t - 0.5) / 0.5).clamp(0, 1.3) ** 1.5 - 0.12 * low)
    return CageSection(a, front, back)


def cage(p: Points, torso: Torso) -> Tensor:
    """The inside of the rib cage, open above and below."""
    x, y, z = p
    section = cage_section(z, torso)
    dent = torso.pectus * torch.exp(-(x / 42).square() - ((z - 0.35 * torso.height) / 75).square())
    front = section.front - dent
    b = (front - section.back) / 2
    return superellipse(x, y - (front + section.back) / 2, section.a, b, torso.exponent)


def core(p: Points, torso: Torso) -> Tensor:
    """Bones and muscles of the trunk: the body without fat, arms, legs, head."""
    x, y, z = p
    h, m, a0, b0 = torso.height, torso.muscle, torso.half_width, torso.half_depth
    zs = [h - 700, h - 640, h - 560, h - 450, h - 360, h - 270, h - 180, h - 90, h - 40, h, h + 30, h + 70, h + 200]
    cage_a = [float(cage_section(torch.tensor(v), torso).a) for v in zs]
    wide = [150, 158, 160, 140, 0.98 * a0, a0 + 6, a0 + m, 0, 0, 0, 72, 58, 55]
    wide[7:10] = [cage_a[7] + m + 12, cage_a[8] + m + 18, cage_a[9] + m + 8]
    belly = torso.belly
    front = [70, 82, 90 + belly, 88 + belly, 88 + 1.2 * belly, b0 + 4 + belly, b0 + m - 6, 0, 0, 0, 52, 50, 48]
    front[7:10] = [float(cage_section(torch.tensor(zs[i]), torso).front) + m - 4 for i in (7, 8, 9)]
    back = [-95, -105, -96, -84, -88, -b0 - 0.7 * m, -b0 - m - 4, -b0 - m - 6, -b0 - m, -b0 - 4, -72, -58, -54]
    f, g = profile(z, zs, front), profile(z, zs, back)
    # A shallow groove over the spine.
    y = y - 6 * torch.exp(-(x / 20).square()) * (y < 0)
    trunk = superellipse(x, y - (f + g) / 2, profile(z, zs, wide), (f - g) / 2, 2.5)
    return smooth_max(trunk, torch.maximum(z - (h + 150), h - 645 - z), 25)


def wall_depth(p: Points, torso: Torso) -> Tensor:
    """How far ribs and muscles reach beyond the inside of the rib cage, between shoulders and belly.

    Thin at the side and in front, thick along the spine (erector muscles) and where chest and shoulder muscles begin.
    """
    x, y, z = p
    spine = torch.exp(-((x.abs() - 26) / 24).square()) * torch.sigmoid(-y / 12)
    high = torch.sigmoid((z - 0.62 * torso.height) / 14)
    elsewhere = torch.sigmoid((z - torso.height + 62) / 9) + torch.sigmoid((-10 - z) / 12)
    return torso.muscle * (0.6 + 0.75 * spine + 0.55 * high) + 7 + 100 * elsewhere


def fat_depth(p: Points, torso: Torso) -> Tensor:
    """Thickness of the fat under the skin: more on the belly and flanks, little over the back of the chest."""
    _, y, z = p
    low = torch.sigmoid((0.1 * torso.height - z) / 60)
    front = torch.sigmoid(y / 40)
    return torso.fat * (0.62 + 0.55 * low + 0.45 * low * front) + 1.5


def limbs(patient: Patient) -> Beads:
    """Muscle of neck, shoulders, arms and legs."""
    torso = patient.torso
    h, a = torso.height, torso.half_width
    parts = [strand([(0, -4, h - 10), (0, -2, h + 60), (0, 0, h + 120)], [50, 50, 52])]
    raised = torso.arms == "up"
    for s in SIDES:
        shoulder = (s * (a + 32), -14, h - 28 + (34 if raised else 0))
        parts.append(strand([(s * 34, -22, h + 22), (s * 85, -24, h + 4), shoulder], [34, 37, 41]))
        parts.append(strand([(s * (a - 8), -30, h - 60), shoulder], [40, 42]))
        parts += [strand(path, radii) for path, radii in arm_paths(torso, s)]
        parts.append(
            strand([(s * 82, -12, h - 590), (s * 88, -8, h - 700), (s * 84, -8, h - 1000), (s * 80, -10, h - 1300)],
                   [76, 74, 52, 45])
        )  # fmt: skip
    return Beads.joined(parts)


def arm_paths(torso: Torso, s: float) -> list[tuple[list[tuple[float, float, float]], list[float]]]:
    """The axis of one arm with its muscle radii; empty where arms are out of the way."""
    h, a = torso.height, torso.half_width
    out = a + 38 + 0.5 * torso.fat
    if torso.arms == "up":
        shoulder = (s * (a + 30), -10, h + 4)
        return [([shoulder, (s * (a + 52), 0, h + 110), (s * (a + 40), 20, h + 235), (s * 40, 60, h + 300)],
                 [42, 43, 37, 30])]  # fmt: skip
    if torso.arms == "none":
        return []
    shoulder = (s * (a + 34), -18, h - 34)
    elbow = (s * (out + 42), -28, h - 320)
    if torso.arms == "down":
        hand = (s * (out + 46), 0, h - 600)
        return [([shoulder, (s * (out + 30), -24, h - 150), elbow, hand], [45, 43, 37, 26])]
    front = torso.half_depth + torso.muscle + torso.fat + torso.belly + 20
    return [([shoulder, (s * (out + 30), -20, h - 150), elbow, (s * 120, front, h - 310)], [45, 43, 38, 28])]


# ---------------------------------------------------------------- the chest


def _mobility(y: Tensor, z: Tensor, patient: Patient) -> Tensor:
    """How far a place follows a mediastinum that moves: 0 at the spine, in the neck and in the belly, 1 in front."""
    chest = patient.chest
    free = ((y - chest.vertebra_y - chest.vertebra) / 40).clamp(0, 1)
    height = torch.sigmoid((patient.torso.height + 10 - z) / 22) * torch.sigmoid((z + 60) / 20)
    return free * free * (3 - 2 * free) * height


def displaced(p: Points, patient: Patient) -> Points:
    """Points as a mediastinum in its usual place would see them: undoes `Findings.shift`."""
    x, y, z = p
    shift = patient.findings.shift
    return (x - shift * _mobility(y, z, patient), y, z) if shift else p


def moved(beads: Beads, patient: Patient) -> Beads:
    """Beads of the mediastinum where `Findings.shift` has brought them."""
    shift = patient.findings.shift
    if not shift or len(beads) == 0:
        return beads
    x, y, z = beads.centres.unbind(dim=1)
    return Beads(torch.stack([x + shift * _mobility(y, z, patient), y, z], dim=1), beads.radii)


def diaphragm_height(x: Tensor, y: Tensor, patient: Patient, side: int) -> Tensor:
    """Height of the upper face of one dome, whose top lies in front of the middle in most people on their backs."""
    torso, chest = patient.torso, patient.chest
    s = SIDES[side]
    u = s * x / (0.55 * torso.half_width) - 0.48 / 0.55
    v = y / torso.half_depth - chest.dome_forward
    v = torch.where(v > 0, v / (1.03 - chest.dome_forward), v / (1.0 + chest.dome_forward))
    u2, v2 = u.square(), v.square()
    total = (u2 + v2).clamp(min=1e-6)
    lateral = torch.where(u > 0, 1.0, chest.recess_medial)
    sagittal = torch.where(v > 0, chest.recess_front, chest.recess_back)
    weight = (lateral * u2 + sagittal * v2) / total
    fall = total.clamp(max=1.9) ** (chest.dome_power / 2)
    return chest.dome[side] - chest.recess * weight * fall


def apex_height(x: Tensor, y: Tensor, patient: Patient, side: int) -> Tensor:
    """Height of the dome of the pleura at the apex; further down the ribs are narrower than it."""
    chest = patient.chest
    u = (x - SIDES[side] * chest.apex_x) / 67
    # It lies at the back; in front the lung ends lower, under the first rib.
    v = torch.where(y > chest.apex_y, (y - chest.apex_y) / 95, (y - chest.apex_y) / 70)
    return patient.torso.height - chest.apex_dip[side] - 36 * (u.square() + v.square())


def spine_y(z: Tensor, patient: Patient) -> Tensor:
    """Front-back place of the middle of the vertebral bodies at a height: lordosis above and below the chest."""
    h, y = patient.torso.height, patient.chest.vertebra_y
    heights = [h - 700, h - 640, h - 470, h - 380, h - 300, h - 200, h - 40, h + 40, h + 120, h + 200]
    return profile(z, heights, [-70, -70, -38, -25, -34, y, y + 3, -24, -14, -14])


def mediastinum(p: Points, patient: Patient) -> Tensor:
    """Everything between the lungs but the thin septum in front, rounded together as fat rounds it."""
    x, y, z = p
    torso, chest = patient.torso, patient.chest
    k = chest.blend
    vertebra_y, r = spine_y(z, patient), chest.vertebra
    spine = ((x / 1.12).square() + (y - vertebra_y).square()).sqrt() - (r + 1.5)
    # Rib heads and transverse processes: the lung leaves the vertebra outwards and backwards.
    behind = (vertebra_y + 2 - y).clamp(0, 60)
    wedge = torch.maximum(x.abs() - (r + 2) - chest.gutter * behind, y - (vertebra_y - 2))
    shape = smooth_min(spine, wedge, 12)
    x = displaced(p, patient)[0]
    t = z / torso.height
    # Wide above the carina; below it the lungs nearly meet behind the heart, in front of the spine.
    above = torch.sigmoid((z - chest.carina + 12) / 9)
    low = chest.low_column
    width = chest.column * (low + (1 - low) * above + 0.35 * (t - 0.6).clamp(min=0) + 0.1 * (0.3 - t).clamp(min=0))
    front = 10 + chest.column_depth * (0.75 + 0.25 * torch.sigmoid((t - 0.4) * 12))
    back = vertebra_y + 6 * above
    column = superellipse(x - 0.35 * chest.junction_x, y - (front + back) / 2, width, (front - back) / 2, 2.2)
    column = smooth_max(column, -beside_trachea((x, y, z), patient), 6)
    shape = smooth_min(shape, column, k)
    shape = smooth_min(shape, heart(p, patient, shadow=True), 0.8 * k)
    zc = chest.carina
    for s, dx, dz in ((1.0, 0.0, -26.0), (-1.0, 2.0, -20.0)):
        centre = (s * (33 + dx), -8.0, zc + dz)
        shape = smooth_min(shape, ellipsoid(p, centre, [v * chest.hilum for v in (12.0, 17.0, 24.0)]), k)
    subcarinal = ellipsoid(p, (-6.0, chest.vertebra_y + 34, zc - 24), (34.0, 20.0, 32.0))
    shape = smooth_min(shape, subcarinal, k)
    middle, half = junction(p, patient)
    # The septum itself is too thin for the coarse lattice; here only the triangle of fat behind the sternum.
    return smooth_min(shape, torch.maximum((p[0] - middle).abs() - (half - 0.5 * chest.septum), -y), 6)


def beside_trachea(p: Points, patient: Patient) -> Tensor:
    """Where a lung takes the place of the fat beside the trachea, from above the carina to below the apex.

    On the right it mostly comes to lie against the trachea's wall (the right paratracheal stripe: 1 to 4 mm of wall,
    fat and pleura, doi 10.1148/122.2.295), on the left seldom. Round vessels that lie there it goes.
    """
    x, y, z = p
    chest = patient.chest
    x0, _, zc = carina_point(chest)
    sides = [
        smooth_max(chest.trachea + chest.paratracheal[side] - s * (x - x0), y - chest.paratracheal_front, 6)
        for side, s in enumerate(SIDES)
    ]
    heights = torch.maximum(zc + 10 - z, z - patient.torso.height + 18)
    return smooth_max(torch.minimum(*sides), heights, 8)


def junction(p: Points, patient: Patient) -> tuple[Tensor, Tensor]:
    """Where the lungs meet in front: the x of the septum's middle and its half thickness, widening to the sternum."""
    _, y, z = p
    torso, chest = patient.torso, patient.chest
    front = cage_section(z, torso).front
    near = (1 - (front - y) / 40).clamp(0, 1)
    low = (0.45 - z / torso.height).clamp(0, 1)
    middle = chest.junction_x * (1 - near) - 10 * low
    if patient.findings.shift:
        middle = middle + patient.findings.shift * _mobility(y, z, patient)
    half = chest.septum / 2 + chest.front_fat * near.square() * (1 + 1.5 * low)
    return middle, half


def heart(p: Points, patient: Patient, shadow: bool = False) -> Tensor:
    """The heart in its sac; with ``shadow``, drawn out down to the diaphragm, where no lung goes under it."""
    x, y, z = displaced(p, patient)
    chest = patient.chest
    cx, cy, cz = chest.heart_centre
    dz = z - cz
    if shadow:
        dz = torch.where(dz < 0, 0.25 * dz, dz)
    dx, dy = x - cx, y - cy
    # The long axis points to the left, the front and down.
    tilt = chest.heart_tilt
    dz = dz - 0.45 * tilt * dx
    dy = dy + 0.35 * tilt * dx
    main = ellipsoid((dx, dy, dz), (0, 0, 0), chest.heart_radii)
    scale = chest.heart_radii[0] / 58
    atrium = ellipsoid((dx, dy, dz), (44 * scale, -4, 8), (26 * scale, 30 * scale, 38 * scale))
    left_atrium = ellipsoid((dx, dy, dz), (18, -36 * scale, 18), (38 * scale, 21 * scale, 26 * scale))
    return smooth_min(smooth_min(main, atrium, 14), left_atrium, 12)


def great_vessels(patient: Patient) -> dict[str, Beads]:
    """Aorta, pulmonary trunk and caval veins with their branches, inside the mediastinum."""
    chest, h = patient.chest, patient.torso.height
    zc, vy, ao, pa, ca = chest.carina, chest.vertebra_y, chest.aorta, chest.pulmonary, chest.cava
    side = chest.vertebra + ao * 0.9
    loin = [float(v) + chest.vertebra + 9 for v in spine_y(torch.tensor([-70.0, -170.0, h - 435]), patient)]
    aorta = strand(
        [(4, 22, zc - 45), (16, 26, zc - 5), (10, 18, zc + 26), (-10, -2, zc + 34), (-23, vy + 20, zc + 16),
         (-side, vy + 8, zc - 15), (-side, vy + 6, zc - 60), (-side + 6, vy + 10, zc - 120), (-9, loin[0], -70),
         (-7, loin[1], -170), (-5, loin[2], h - 435)],
        [ao * v for v in (1.2, 1.2, 1.1, 1.02, 1, 0.98, 0.95, 0.92, 0.85, 0.75, 0.65)],
    )  # fmt: skip
    branches = [
        strand([(8, 14, zc + 34), (16, 8, h - 18), (24, 6, h + 40), (30, 0, h + 130)], [6.5, 6, 4, 3.5]),
        strand([(-6, 6, zc + 40), (-16, 0, h - 10), (-26, 4, h + 40), (-30, 0, h + 130)], [4.5, 4.5, 4, 3.5]),
        strand([(-16, -4, zc + 40), (-28, -16, h - 12), (-60, -14, h + 2), (-130, -10, h - 22)], [5, 5, 4.5, 4]),
        strand([(20, 4, h - 14), (60, -10, h + 4), (130, -8, h - 22)], [5, 4.5, 4]),
        strand([(-5, loin[2], h - 435), (-50, -20, h - 520), (-80, 30, h - 600)], [6, 5.5, 5]),
        strand([(-3, loin[2], h - 435), (50, -20, h - 520), (80, 30, h - 600)], [6, 5.5, 5]),
    ]
    trunk = strand([(-20, 38, zc - 55), (-24, 26, zc - 26), (-28, 4, zc - 10), (-40, -10, zc - 8)],
                   [pa * 1.1, pa * 1.1, pa, 0.8 * pa])  # fmt: skip
    right = strand([(-22, 22, zc - 22), (0, 6, zc - 22), (24, 0, zc - 24), (38, -4, zc - 28)],
                   [pa, 0.9 * pa, 0.85 * pa, 0.75 * pa])  # fmt: skip
    cava = [
        strand([(24, 12, h - 25), (27, 16, zc + 10), (26, 16, zc - 50)], [ca * 0.9, ca, ca * 1.15]),
        strand([(-80, 2, h - 8), (-46, 20, h - 20), (0, 30, zc + 50), (25, 14, zc + 32)], [5, 6, 7, ca * 0.85]),
        strand([(90, 4, h - 10), (40, 14, h - 8), (26, 14, h - 30)], [5, 6.5, ca * 0.85]),
        strand([(24, -2, 30), (24, -6, -10), (18, loin[0], -80), (14, loin[2], h - 435)], [11, 11, 10, 9]),
        strand([(36, 6, h), (40, 4, h + 50), (42, 0, h + 130)], [6, 5.5, 5]),
        strand([(-36, 6, h), (-40, 4, h + 50), (-42, 0, h + 130)], [6, 5, 5]),
    ]
    veins = []
    for s in SIDES:
        for z0, z1 in ((-34, -20), (-52, -62)):
            veins.append(strand([(s * 12 + 4, -14, zc + z0 - 8), (s * 40, -2 if z0 > -40 else -16, zc + z1)], [8, 6]))
    named = {"aorta": [aorta, *branches], "pulmonary": [trunk, right, *veins], "cava": cava}
    return {name: moved(Beads.joined(parts), patient) for name, parts in named.items()}


def carina_point(chest: Chest) -> tuple[float, float, float]:
    return 2.0, -9.0, chest.carina


def airways(patient: Patient) -> Beads:
    """The lumen of pharynx, trachea, main bronchi and bronchus intermedius: never part of a lung."""
    chest, h = patient.chest, patient.torso.height
    r, (right, left) = chest.trachea, chest.bronchi
    x0, y0, zc = carina_point(chest)
    trachea = strand([(0, 10, h + 150), (0, 24, h + 95), (0, 20, h + 60), (1, 4, h), (2, -3, (h + zc) / 2),
                      (x0, y0, zc)],
                     [7, 7.5, r, r, r, r])  # fmt: skip
    bronchus_r = strand(
        [(x0, y0, zc + 3), (x0 + 12, y0 - 1, zc - 11), (25, -12, zc - 25), (31, -17, zc - 45)],
        [r * 0.8, right, right * 0.9, right * 0.75],
    )
    bronchus_l = strand([(x0, y0, zc + 3), (-16, y0 - 3, zc - 14), (-42, -15, zc - 31)], [r * 0.8, left, left * 0.92])
    return moved(Beads.joined([trachea, bronchus_r, bronchus_l]), patient)


def lobar_bronchi(patient: Patient, side: int) -> Beads:
    """The lumen of one side's lobar bronchi, from the main bronchus through the hilum into the lung."""
    zc, r = patient.chest.carina, patient.chest.bronchi[side]
    if side == 0:
        paths = [
            [(23, -12, zc - 21), (37, -11, zc - 18), (48, -8, zc - 12)],
            [(31, -17, zc - 44), (42, -5, zc - 53), (52, 8, zc - 62)],
            [(31, -17, zc - 44), (37, -25, zc - 60), (43, -31, zc - 80)],
        ]
    else:
        paths = [
            [(-40, -15, zc - 30), (-49, -5, zc - 27), (-56, 2, zc - 15)],
            [(-49, -5, zc - 27), (-55, 6, zc - 38), (-60, 16, zc - 50)],
            [(-42, -15, zc - 31), (-45, -24, zc - 49), (-49, -31, zc - 70)],
        ]
    return moved(Beads.joined([strand(path, [0.72 * r, 0.62 * r, 0.42 * r]) for path in paths]), patient)


def hilar_vessels(patient: Patient, side: int) -> Beads:
    """Pulmonary arteries and veins of one side from the mediastinum through the hilum into the lobes.

    Beside the lower lobe's bronchus goes the interlobar artery, up to 16 mm wide in health (Chang, Am J Roentgenol
    1962, 87: 929); one vein comes in front of it, and one below, to the left atrium.
    """
    chest, zc = patient.chest, patient.chest.carina
    pa, size = chest.pulmonary, chest.hilum
    if side == 0:
        descending = [(38, -4, -28), (45, -10, -42), (47, -18, -60), (50, -27, -80), (53, -36, -104)]
        basal = [[(50, -25, -76), (62, -20, -94)], [(50, -26, -78), (50, -46, -96)]]
        upper = [(30, 0, -22), (40, 0, -12), (48, 2, 2)]
        veins = [[(40, -2, -20), (45, 10, -22), (52, 15, -8)], [(40, -16, -62), (49, -26, -70), (58, -34, -84)]]
    else:
        descending = [(-40, -10, -8), (-50, -18, -20), (-54, -23, -40), (-56, -31, -62), (-59, -38, -90)]
        basal = [[(-56, -30, -60), (-68, -24, -78)], [(-56, -31, -62), (-55, -50, -80)]]
        upper = [(-44, -8, -6), (-52, -2, 4), (-57, 2, 16)]
        veins = [[(-40, -2, -20), (-50, 12, -24), (-57, 18, -10)], [(-40, -16, -62), (-49, -28, -68), (-58, -36, -82)]]
    rng = np.random.default_rng([chest.tree_seed, side, 1])
    parts = []
    for path, radii in (
        (descending, [0.68 * pa, 0.64 * pa, 0.56 * pa, 0.42 * pa, 2.5]),
        (upper, [0.5 * pa, 0.4 * pa, 2.5]),
        *((branch, [0.36 * pa, 2.0]) for branch in basal),
        *((vein, [6.0 * size, 5.0 * size, 2.5]) for vein in veins),
    ):
        nodes = np.asarray(path, dtype=np.float64) + np.array([0, 0, zc])
        nodes[1:] += rng.normal(0, 2.5, nodes[1:].shape)
        parts.append(strand(nodes.tolist(), radii))
    return moved(Beads.joined(parts), patient)


def oesophagus(patient: Patient) -> Beads:
    chest, h = patient.chest, patient.torso.height
    vy = chest.vertebra_y + chest.vertebra + 9
    path = strand([(0, vy + 12, h + 80), (-4, vy + 4, h), (-6, vy, chest.carina), (-4, vy + 2, 40), (-14, vy + 12, -8),
                   (-30, vy + 26, -30)], [7, 7, 7.5, 8, 9, 9])  # fmt: skip
    return moved(path, patient)


def risen_stomach(patient: Patient) -> Beads:
    """Stomach in the chest: a hiatal hernia behind the heart, or a gastric pull-up beside the spine; mostly none."""
    f, h = patient.findings, patient.torso.height
    y = patient.chest.vertebra_y + patient.chest.vertebra
    parts = []
    if f.hernia:
        r = 24 * f.hernia
        parts.append(
            strand([(-12, y + 26, -30), (-8, y + 0.8 * r + 4, 12), (-4, y + 0.8 * r + 2, 26)], [0.6 * r, r, 0.8 * r])
        )
    if f.pull_up:
        r = f.pull_up
        parts.append(
            strand(
                [(-4, y + 18, -25), (14, y + r, 30), (18, y + r - 4, 0.6 * h), (2, y + r, h)], [r, 1.1 * r, r, 0.7 * r]
            )
        )
    return moved(Beads.joined(parts), patient)


def lung_part(p: Points, patient: Patient, side: int) -> Tensor:
    """The pleural cavity of one side: a rough but complete distance, for growing trees and placing lesions."""
    x, y, z = p
    outside = torch.maximum(cage(p, patient.torso), -mediastinum(p, patient))
    outside = torch.maximum(outside, 0.45 * (diaphragm_height(x, y, patient, side) - z))
    outside = torch.maximum(outside, 0.5 * (z - apex_height(x, y, patient, side)))
    return torch.maximum(outside, -SIDES[side] * (displaced(p, patient)[0] - patient.chest.junction_x))


def points_inside(rng: np.random.Generator, patient: Patient, side: int, count: int) -> npt.NDArray[np.float64]:
    """``count`` points (N, 3) spread over one lung: fewer where it is much smaller than its box."""
    torso, s = patient.torso, SIDES[side]
    low = np.array([0.0, -torso.half_depth, -120.0])
    high = np.array([torso.half_width, torso.half_depth, torso.height])
    p = low + (high - low) * rng.random((count * 8, 3))
    p[:, 0] *= s
    x, y, z = (torch.from_numpy(p[:, a]).float() for a in range(3))
    inside = lung_part((x, y, z), patient, side) < -1.5
    chosen: npt.NDArray[np.float64] = p[inside.numpy()][:count]
    return chosen


# ---------------------------------------------------------------- bones


def vertebral_heights(patient: Patient) -> list[float]:
    """Middle heights of the vertebral bodies from the neck to the sacrum, the first thoracic one at index 7."""
    h = patient.torso.height
    neck = [h + 8 + 16.0 * i for i in range(7, 0, -1)]
    chest = [h - 22.0 * i for i in range(12)]
    loin = [h - 264 - 8 - 33.0 * i for i in range(5)]
    return neck + chest + loin


def rib_strands(patient: Patient) -> tuple[Beads, Beads]:
    """Ribs (bone) and their cartilages."""
    bone, cartilage = [], []
    for s in SIDES:
        for i in range(12):
            path = _rib_path(patient, s, i)
            end = len(path) if i > 6 else len(path) - 3
            # A rib is flat: three strands side by side along the height.
            for dz in (-3.2, 0.0, 3.2):
                bone.append(strand([(x, y, z + dz) for x, y, z in path[: end + 1]], 2.3, step=0.5))
            if i <= 6:
                for dz in (-3.0, 2.0):
                    cartilage.append(strand([(x, y, z + dz) for x, y, z in path[end:]], 4.6, step=0.5))
    return Beads.joined(bone), Beads.joined(cartilage)


def _rib_path(patient: Patient, s: float, i: int) -> list[tuple[float, float, float]]:
    torso, chest = patient.torso, patient.chest
    z0 = torso.height + 6 - 22.0 * i
    drop = float(np.interp(i, [0, 1, 7, 11], [30, 48, 105, 70])) * torso.rib_drop
    reach = float(np.interp(i, [0, 7, 9, 10, 11], [2.55, 2.55, 2.35, 1.9, 1.5]))
    angles = np.linspace(0.36, reach, 11)
    path = [(s * (chest.vertebra + 2), chest.vertebra_y - 10, z0)]
    n = torso.exponent
    for angle in angles:
        z = z0 - drop * ((angle / 2.6) ** 1.25)
        section = cage_section(torch.tensor(z), torso)
        a, front, back = (float(v) for v in (section.a, section.front, section.back))
        b, c = (front - back) / 2 + 4.3, (front + back) / 2
        x = (a + 4.3) * abs(math.sin(angle)) ** (2 / n)
        y = c - b * math.copysign(abs(math.cos(angle)) ** (2 / n), math.cos(angle))
        if y > 0.4 * front:
            y -= torso.pectus * math.exp(-((x / 42) ** 2) - ((z - 0.35 * torso.height) / 75) ** 2)
        path.append((s * x, y, z))
    if i <= 6:
        _, _, z = path[-1]
        target = max(0.22 * torso.height, z + 12 * (i - 2))
        front = float(cage_section(torch.tensor(target), torso).front)
        path.append((s * 18, front + 5 - _sternal_dent(torso, target), target))
    return path


def _sternal_dent(torso: Torso, z: float) -> float:
    return torso.pectus * math.exp(-(((z - 0.35 * torso.height) / 75) ** 2))


def sternum(patient: Patient) -> Beads:
    torso = patient.torso
    parts = []
    for dx in (-12.0, -4.0, 4.0, 12.0):
        path = []
        for t in (0.2, 0.4, 0.6, 0.75, 0.9):
            z = t * torso.height
            front = float(cage_section(torch.tensor(z), torso).front)
            path.append((dx * (1.4 if t > 0.7 else 0.8), front + 8 - _sternal_dent(torso, z), z))
        parts.append(strand(path, 6.5, step=0.5))
    return Beads.joined(parts)


def girdle(patient: Patient) -> Beads:
    """Clavicles, scapulae, humeri, hip bones and femora."""
    torso = patient.torso
    h, a = torso.height, torso.half_width
    raised = 30 if torso.arms == "up" else 0
    front = float(cage_section(torch.tensor(0.9 * h), torso).front)
    parts = []
    for s in SIDES:
        joint = (s * (a + 30), -14, h - 30 + raised)
        parts.append(
            strand(
                [(s * 20, front + 8, h - 12), (s * 70, front - 8, h + 2), (s * (a + 10), -8, h - 4 + raised)], 5.5, 0.5
            )
        )
        back = -torso.half_depth - 12
        spread = 24 if torso.arms == "up" else 0
        for i in np.linspace(0, 6, 15):
            low = (s * (58 + 8 * i + spread), back + 3 + 2.2 * i, h - 150 + 9 * i + raised)
            high = (s * (52 + 11 * i + spread), back + 18 + 3 * i, h - 24 - 3 * i + raised)
            parts.append(strand([low, high], 2.6, 0.8))
        parts.append(strand([(s * (54 + spread), back + 10, h - 40 + raised), joint], [4.5, 9], 0.5))
        parts.append(strand([joint, (joint[0] + s * 3, joint[1], joint[2] - 6)], [22, 20], 0.4))
        parts += [strand(path, [12, 11, 11, 8], 0.4) for path, _ in arm_paths(torso, s)]
        for i in range(7):
            angle = 0.2 + 0.2 * i
            rim = (s * (60 + 68 * math.sin(angle)), -60 + 95 * (1 - math.cos(angle)), h - 395 - 10 * i)
            parts.append(strand([rim, (s * (70 + 4 * i), -40 + 4 * i, h - 490)], 5, 0.6))
        parts.append(strand([(s * 84, -8, h - 530), (s * 92, -10, h - 590)], [26, 22], 0.3))
        parts.append(strand([(s * 96, -10, h - 580), (s * 92, -2, h - 800), (s * 84, -4, h - 1300)], [17, 15, 14], 0.4))
        parts.append(strand([(s * 60, 10, h - 520), (s * 10, 45, h - 570), (s * 45, -20, h - 600)], 9, 0.4))
    return Beads.joined(parts)


def neural_arches(patient: Patient) -> Beads:
    chest = patient.chest
    parts = []
    for i, z in enumerate(vertebral_heights(patient)):
        y0 = float(spine_y(torch.tensor(z), patient)) - chest.vertebra
        neck = i < 7
        tip = 26 if neck else 38
        parts.append(strand([(0, y0 - 24, z - 2), (0, y0 - tip - 4, z - (4 if neck else 18))], 3.6, 0.7))
        for s in SIDES:
            parts.append(strand([(s * 11, y0 + 2, z + 2), (s * 14, y0 - 12, z), (0, y0 - 24, z - 2)], 4, 0.7))
            if not neck:
                parts.append(strand([(s * 13, y0 - 10, z), (s * 36, y0 - 16, z + 3)], [4.5, 4], 0.7))
    return Beads.joined(parts)


# ---------------------------------------------------------------- the abdomen


def liver(p: Points, patient: Patient, under: Tensor) -> Tensor:
    """The liver under the right dome (``under``: distance below the diaphragm's lower face)."""
    size = patient.abdomen.liver
    torso = patient.torso
    top = patient.chest.dome[0] - 62 * size
    a, b = torso.half_width, torso.half_depth
    big = ellipsoid(p, (0.5 * a, -0.02 * b, top), (0.58 * a * size, 0.98 * b, 82 * size))
    left = ellipsoid(p, (-8, 0.45 * b, top + 28), (70 * size, 0.45 * b, 36 * size))
    dome = torch.maximum(-(under + 60 * size), 25 - p[0])
    return torch.maximum(smooth_min(smooth_min(big, left, 25), dome, 20), under)


def spleen(p: Points, patient: Patient, under: Tensor) -> Tensor:
    """The spleen, whose upper end lies against the left dome (``under`` as in `liver`), at the back and at the side."""
    k = patient.abdomen.spleen**0.5
    torso = patient.torso
    centre = (-0.7 * torso.half_width, -0.5 * torso.half_depth, patient.chest.dome[1] - 62)
    whole = ellipsoid(p, centre, (32 * k, 46 * k, 50 * k))
    cap = _under_dome(p, under, (centre[0] + 6, centre[1] - 4), (42 * k, 52 * k), 30 * k)
    return torch.maximum(smooth_min(whole, cap, 12), under)


def _under_dome(p: Points, under: Tensor, centre: Sequence[float], radii: Sequence[float], thick: float) -> Tensor:
    """Distance to what of an organ lies against a dome: an ellipse, seen from above, of the ``thick`` mm below it."""
    (x, y, _), (a, b) = p, radii
    across = (((x - centre[0]) / a).square() + ((y - centre[1]) / b).square()).sqrt()
    return torch.maximum((across - 1) * min(a, b), -(under + thick))


def stomach_shape(p: Points, patient: Patient, under: Tensor) -> Tensor:
    k = patient.abdomen.stomach
    x, y, z = p
    top = patient.chest.dome[1]
    fundus = ellipsoid(p, (-58, -12, top - 42 * k), (36 * k, 34 * k, 36 * k))
    # Its body lies against the wall in front.
    front = 0.95 * patient.torso.half_depth - 22 * k
    body = ellipsoid((x - 0.35 * (z - top), y, z), (-30, front, top - 105), (25 * k, 22 * k, 48 * k))
    cap = _under_dome(p, under, (-62.0, 7.0), (45 * k, 57 * k), 26 * k)
    return torch.maximum(smooth_min(smooth_min(fundus, cap, 15), body, 25), under)


def kidneys(p: Points, patient: Patient) -> Tensor:
    h, vy = patient.torso.height, patient.chest.vertebra_y
    shapes = [ellipsoid(p, (s * 62, vy - 6, h - 300 - 6 * s), (27, 27, 54)) for s in SIDES]
    return torch.minimum(*shapes)


def colon(patient: Patient) -> Beads:
    """Caecum to sigmoid, with haustra."""
    abdomen, h = patient.abdomen, patient.torso.height
    rng = np.random.default_rng(abdomen.seed)
    right_top = -95.0 if not abdomen.chilaiditi else patient.chest.dome[0] - 32
    front_right = 0.72 * patient.torso.half_depth if abdomen.chilaiditi else 15.0
    sag = rng.uniform(0, 90)
    wider = rng.uniform(1, 1.4)
    left_x, left_y, left_top = left_flexure(patient, abdomen.colon * wider, rng)
    nodes = np.array(
        [(92, 10, h - 480), (100, 0, h - 400), (98, 0, -150), (84, front_right, right_top),
         (45, 62, right_top - 30 - sag / 2),
         (0, 68, -135 - sag), (0.5 * left_x, 62, -110 - sag / 2), (left_x, left_y, left_top), (-103, -20, -140),
         (-102, -14, h - 400), (-80, 10, h - 480), (-20, 20, h - 500), (10, -30, h - 530), (0, -50, h - 600)]
    )  # fmt: skip
    nodes[[*range(7), *range(8, 14)]] += rng.normal(0, 8, (13, 3))
    # In some people the part in front of the flexure rises with it.
    nodes[6, 2] += rng.uniform(0, 1) * max(0.0, left_top - 10 - nodes[6, 2])
    calibre = abdomen.colon * np.interp(np.arange(14), [0, 3, 8, 13], [1.25, 1.1, 0.85, 0.8])
    calibre[5:8] *= wider
    if rng.uniform() < 0.35:
        # A loop more of a long colon beside the flexure, under the dome in front.
        up, down = rng.uniform(0.35, 0.65), rng.uniform(0.6, 0.9)
        loop = [(up * left_x, 62, left_top - rng.uniform(-5, 20)), (down * left_x, 50, left_top - rng.uniform(40, 70))]
        nodes, calibre = np.insert(nodes, 7, loop, axis=0), np.insert(calibre, 7, calibre[6:8])
    beads = strand(nodes.tolist(), calibre.tolist(), 0.18)
    along = torch.arange(len(beads))
    haustra = 1 + abdomen.folds * torch.sin(along * 1.25) + 0.1 * torch.sin(along * 0.31 + 1)
    return Beads(beads.centres, beads.radii * haustra)


def left_flexure(patient: Patient, calibre: float, rng: np.random.Generator) -> tuple[float, float, float]:
    """Where the colon is highest on the left: beside the ribs, from the side to the front, under the diaphragm there.

    It lies within 12 mm of the rib cage, as in scans of people on their backs, whose gas gathers in front.
    """
    torso, dome = patient.torso, patient.chest.dome[1]
    section = cage_section(torch.tensor(dome - 60.0), torso)
    angle, off = rng.uniform(0.1, 1.2), 0.95 * calibre + rng.uniform(0, 12)
    middle, half = float(section.front + section.back) / 2, float(section.front - section.back) / 2
    x = -(float(section.a) - off) * math.cos(angle) ** (2 / torso.exponent)
    y = middle + (half - off) * math.sin(angle) ** (2 / torso.exponent)
    lowest = min(float(diaphragm_height(torch.tensor(x + dx), torch.tensor(y + dy), patient, 1)) for dx, dy in
                 ((0.0, 0.0), (-calibre / 2, 0.0), (0.0, calibre / 2)))  # fmt: skip
    return x, y, min(lowest, dome) - calibre - 3 - 30 * (1 - patient.abdomen.flexure_height)


def small_bowel(patient: Patient) -> tuple[Beads, Beads]:
    """Loops with gas and loops with fluid."""
    abdomen, torso = patient.abdomen, patient.torso
    rng = np.random.default_rng(abdomen.seed + 1)
    gas: list[Beads] = []
    fluid: list[Beads] = []
    for _ in range(abdomen.loops):
        centre = np.array([rng.uniform(-85, 85), rng.uniform(0, 70), rng.uniform(torso.height - 500, -120)])
        walk = centre + np.cumsum(rng.normal(0, 20, (5, 3)), axis=0)
        walk[:, 1] = walk[:, 1].clip(-30, 80)
        loop = strand(walk.tolist(), float(rng.uniform(7, 17)), 0.3)
        (gas if rng.random() < abdomen.loop_gas else fluid).append(loop)
    return Beads.joined(gas), Beads.joined(fluid)


def abdominal_cavity(p: Points, patient: Patient) -> Tensor:
    """Inside the abdominal wall, down to the pelvic floor (not bounded above)."""
    x, y, z = p
    torso = patient.torso
    h = torso.height
    zs = [h - 640, h - 560, h - 450, h - 360, h - 270, h - 180, h]
    a0, b0, belly = torso.half_width, torso.half_depth, torso.belly
    wide = [40, 95, 118, 0.86 * a0, a0 - 10, a0, a0]
    front = [20, 70, 78 + belly, 78 + 1.2 * belly, b0 - 6 + belly, b0 - 3, b0]
    back = [-60, -70, -55, -60, -b0 + 10, -b0 + 2, -b0]
    f, g = profile(z, zs, front), profile(z, zs, back)
    shape = superellipse(x, y - (f + g) / 2, profile(z, zs, wide), (f - g) / 2, 2.4)
    return smooth_max(shape, h - 615 - z, 20)
