"""Painting the body around the lungs: couch, skin, fat, muscle, abdomen, mediastinum and bones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cascadeseg.synthesis import anatomy
from cascadeseg.synthesis.fields import Beads, Slices, ellipsoid, normalised, smooth_max, smooth_min, splat, strand
from cascadeseg.synthesis.scene import Scene
from cascadeseg.synthesis.tissue import Tissue


@dataclass(eq=False)
class Shapes:
    """The coarse distances (mm) that several layers share."""

    skin: Tensor
    muscle: Tensor
    cage: Tensor
    diaphragm: tuple[Tensor, Tensor]
    below: Tensor
    mediastinum: Tensor


def body_shapes(scene: Scene) -> Shapes:
    """Evaluate the shared shapes on the coarse lattice."""
    patient, p = scene.patient, scene.body
    torso = patient.torso
    x, y, z = p
    cage = normalised(anatomy.cage(p, torso))
    core = normalised(anatomy.core(p, torso))
    core = smooth_max(core, cage - anatomy.wall_depth(p, torso) * scene.scale, 10)
    limbs = scene.coarse_splat(anatomy.limbs(patient), 45.0)
    head = torch.minimum(
        ellipsoid(p, (0, 8, torso.height + 225), (70, 90, 105)), ellipsoid(p, (0, 45, torso.height + 140), (48, 42, 40))
    )
    muscle = smooth_min(smooth_min(core, limbs, 18), head * scene.scale, 12)
    fat = anatomy.fat_depth(p, torso) * scene.scale
    skin = smooth_min(core - fat, limbs - (0.4 * fat).clamp(max=25), 22)
    skin = smooth_min(skin, head * scene.scale - 3, 12)
    if torso.breast:
        skin = smooth_min(skin, _breasts(scene) * scene.scale, 14)
    vessels = anatomy.great_vessels(patient)
    large = Beads.joined([*vessels.values(), anatomy.oesophagus(patient), anatomy.risen_stomach(patient)]).grown(1.5)
    # The lungs follow the great vessels: aortic knob, caval vein, subclavian grooves.
    contents = scene.coarse_splat(large, 14.0)
    wander = scene.coarse_noise(patient.chest.tree_seed + 5, 45.0) * patient.chest.wander
    between = smooth_min(normalised(anatomy.mediastinum(p, patient)) + wander, contents, 13)
    # Nothing but its wall need lie between a large airway and a lung; the wall itself is cut out of the lung later.
    airways = scene.coarse_splat(anatomy.airways(patient).grown(patient.chest.airway_wall - 2.5))
    between = smooth_min(between, airways, 4)
    heights = [anatomy.diaphragm_height(x, y, patient, side) for side in (0, 1)]
    both = torch.lerp(heights[1], heights[0], torch.sigmoid(x / 12))
    return Shapes(
        skin=skin,
        muscle=muscle,
        cage=cage,
        diaphragm=(normalised(heights[0] - z), normalised(heights[1] - z)),
        below=normalised(z - both),
        mediastinum=between,
    )


def _breasts(scene: Scene) -> Tensor:
    torso = scene.patient.torso
    size = torso.breast
    front = torso.half_depth + torso.muscle + 0.6 * torso.fat - 8
    z = 0.36 * torso.height
    sides = [ellipsoid(scene.body, (s * 76, front, z), (62, size, 62)) for s in anatomy.SIDES]
    return torch.minimum(*sides)


def paint_couch(scene: Scene) -> None:
    """Couch, mattress and the shells under them, in the scanner's frame."""
    scanner = scene.patient.scanner
    if scanner.couch == "none":
        return
    height, across = _couch_frame(scene)
    drawn = np.random.default_rng(scanner.seed).random(20)
    draws = {k: float(v) for k, v in zip("abcdefghijklmnopqrst", drawn, strict=True)}
    half = 190 + 75 * draws["a"]
    top = height - across.square() * (0.0006 if scanner.couch == "curved" else 0.0)
    thick = 15 + 60 * draws["b"] ** 2 if scanner.couch != "thin" else 7.0
    beyond = (across.abs() - half).clamp(min=0)
    foam = -1000 + 160 * draws["d"]
    slab = torch.maximum(top, -height - thick) + beyond
    _paint_slab(scene, slab, -600 + 750 * draws["c"], foam, 1.2 + 2.5 * draws["e"])
    if draws["f"] < 0.6:
        mat = torch.maximum(top - 8 - 12 * draws["g"], -top + 1) + (across.abs() - half + 25).clamp(min=0)
        _paint_slab(scene, mat, -850 + 500 * draws["h"], -990 + 120 * draws["d"], 2.0)
    under = height + thick
    if draws["i"] < 0.5:
        _paint_cradle(scene, draws, under, across, half, foam)
    elif draws["n"] < 0.6:
        _paint_crescent(scene, draws, under, across, half)


def _paint_cradle(
    scene: Scene, draws: dict[str, float], under: Tensor, across: Tensor, half: float, foam: float
) -> None:
    """Under a flat board: a bowl of one or two thin shells, hollow or full of foam as on PET/CT."""
    beyond = (across.abs() - half).clamp(min=0)
    for depth in (20 + 60 * draws["j"], 45 + 90 * draws["j"])[: 1 + int(draws["k"] < 0.6)]:
        bowl = under + depth - across.square() * (0.0003 + 0.0007 * draws["l"])
        shell = torch.maximum(bowl.abs() - 1.5, across.abs() - half - 15)
        _paint_slab(scene, shell, -400 + 600 * draws["c"], 0.0, 100.0)
        if draws["m"] < 0.5:
            inside = torch.maximum(-bowl, under + 3) + beyond
            _paint_slab(scene, inside, -400 + 600 * draws["c"], foam, 1.2 + 2.5 * draws["e"])


def _paint_crescent(scene: Scene, draws: dict[str, float], under: Tensor, across: Tensor, half: float) -> None:
    """The scanner's own couch under a board laid on it, as for radiotherapy: a crescent of foam in a dense wall."""
    gap, depth, bent = 2 + 48 * draws["o"], 25 + 60 * draws["p"], 0.0003 + 0.0009 * draws["q"]
    upper = across.square() * bent
    lower = across.square() * (bent + depth / half**2) - depth
    below = under + gap
    crescent = torch.maximum(below - upper, lower - below)
    _paint_slab(scene, crescent, -200 + 800 * draws["r"], -960 + 120 * draws["s"], 1.5 + 4 * draws["t"])


def _couch_frame(scene: Scene) -> tuple[Tensor, Tensor]:
    """World height over the couch's top and distance from its middle line, (X, Y, 1) mm."""
    scanner = scene.patient.scanner
    x, y, _ = scene.axes.points(scene.device)
    ox, oy, _ = scene.patient.torso.offset
    ux, uy = scanner.up
    across = (x - ox) * uy - (y - oy) * ux
    tilt = math.radians(scanner.couch_tilt)
    height = (x - ox) * ux + (y - oy) * uy + _lowest_point(scene) + scanner.couch_gap + tilt * across
    return height, across + 12 * scanner.couch_tilt


def _paint_slab(scene: Scene, distance: Tensor, shell_hu: float, foam_hu: float, wall_mm: float) -> None:
    shell = (0.5 - distance / scene.voxel_mm).clamp(0, 1)
    foam = (0.5 - (distance + wall_mm) / scene.voxel_mm).clamp(0, 1)
    hu = scene.patient.hounsfield.air
    value = torch.lerp(torch.full_like(shell, shell_hu), torch.full_like(shell, foam_hu), foam)
    slab = torch.lerp(torch.full_like(shell, hu), value, shell)
    scene.hu[:] = torch.where(shell > 0, slab, scene.hu)
    scene.tissue.masked_fill_(shell > 0.5, int(Tissue.COUCH))


def _lowest_point(scene: Scene) -> float:
    """How far the body reaches from its middle towards the couch (world mm), from its proportions."""
    torso = scene.patient.torso
    ux, uy = scene.upward
    fat = 0.7 * torso.fat + 1.5
    if ux:
        return (torso.half_width + torso.muscle + fat + 22) * torso.size * torso.aspect[0]
    if uy < 0:
        return (
            (torso.half_depth + torso.muscle + 1.3 * fat + torso.belly + 0.5 * torso.breast)
            * torso.size
            * torso.aspect[1]
        )
    return (torso.half_depth + torso.muscle + 6 + fat) * torso.size * torso.aspect[1]


def paint_cloth(scene: Scene, shapes: Shapes) -> None:
    """Blankets, clothes and straps: thin, light layers around the body."""
    scanner = scene.patient.scanner
    rng = np.random.default_rng(scanner.seed + 3)
    for layer in range(scanner.cloth):
        gap, thick = float(rng.uniform(2, 14)), float(rng.uniform(1.5, 7))
        hu, reach = float(rng.uniform(-960, -600)), float(rng.uniform(-0.6, 0.7))
        part = scene.near(shapes.skin, gap + thick + 12)
        if part is None:
            return
        fold = scene.coarse_noise(scanner.seed + 4 + layer, 35.0) * 4 - gap
        shell = scene.up(shapes.skin + fold, part).abs_().sub_(thick / 2)
        here = scene.up(scene.coarse_noise(scanner.seed + 9 + layer, 60.0) + reach, part).clamp_(0, 1)
        scene.paint(part, scene.filled(shell).mul_(here), hu, Tissue.CLOTH)


def paint_body(scene: Scene, shapes: Shapes) -> None:
    """Skin, fat and muscle."""
    hu, torso = scene.patient.hounsfield, scene.patient.torso
    part = scene.near(shapes.skin)
    if part is None:
        return
    skin = scene.up(shapes.skin, part)
    seed = hu.texture_seed
    grain = scene.noise(seed + 1, 7.0, part)
    muscle = scene.filled(scene.up(shapes.muscle, part))
    # Sheets of fat between the muscles: wavy layers around the chest, wider in fat people; none between ribs, in arms.
    layers = (shapes.cage / scene.scale + 5 * scene.coarse_noise(seed + 2, 17.0) + 7).clamp(min=11, max=44) / 11
    sheets = scene.up(layers, part).frac_().sub_(0.5).abs_()
    sheets.mul_(-11 * 0.45).add_(1.0 + 0.02 * min(torso.fat, 40.0))
    muscle.mul_(sheets.add_(grain, alpha=0.3).clamp_(0, 0.9).neg_().add_(1))
    muscle.mul_(1 - scene.filled(scene.up(_fat_on_pleura(scene, shapes), part)))
    inner = torch.lerp(
        torch.full((), hu.fat, device=scene.device), torch.full((), hu.muscle, device=scene.device), muscle
    )
    inner.add_(grain, alpha=7.0)
    tissue = torch.where(muscle > 0.5, int(Tissue.MUSCLE), int(Tissue.FAT)).to(torch.uint8)
    deep = scene.filled(skin + 1.2 * torso.size)
    inner = torch.lerp(torch.full((), hu.skin, device=scene.device), inner, deep)
    weight = scene.filled(skin)
    scene.hu[part].lerp_(inner, weight)
    inside = weight > 0.5
    scene.tissue[part] = torch.where(inside, tissue, scene.tissue[part])
    if torso.breast:
        _paint_glands(scene)
    _paint_axillae(scene, shapes)
    _paint_wall_air(scene, shapes)


def _fat_on_pleura(scene: Scene, shapes: Shapes) -> Tensor:
    """Coarse distance to the fat between the costal pleura and the muscles: patches, most of them low and behind."""
    torso = scene.patient.torso
    noise = scene.coarse_noise(scene.patient.hounsfield.texture_seed + 7, 22.0)
    depth = (1.2 + 0.06 * min(torso.fat, 40.0)) * (noise + 1 + 1.6 * _low_behind(scene)).clamp(min=0, max=3.5)
    return torch.maximum(-shapes.cage, shapes.cage - depth * scene.scale)


def _low_behind(scene: Scene) -> Tensor:
    """0 in front and above, to 1 at the back of the lungs' bases."""
    torso = scene.patient.torso
    _, y, z = scene.body
    return (-1.5 * y / torso.half_depth).clamp(0, 1) * (1.2 - 2.5 * z / torso.height).clamp(0, 1)


def _paint_glands(scene: Scene) -> None:
    hu = scene.patient.hounsfield
    field = (_breasts(scene) * scene.scale + 12) + 9 * scene.coarse_noise(hu.texture_seed + 2, 14.0)
    scene.shape(field, hu.breast, Tissue.BREAST, 12.0)


def _paint_axillae(scene: Scene, shapes: Shapes) -> None:
    torso, hu = scene.patient.torso, scene.patient.hounsfield
    x, y, z = scene.body
    place = (torso.half_width + 4, -4.0, torso.height - 72)
    pocket = ellipsoid((x.abs(), y, z), place, (22, 30, 44)) * scene.scale
    pocket = torch.maximum(pocket, 11 - shapes.cage) + 5 * scene.coarse_noise(hu.texture_seed + 3, 18.0)
    pocket = torch.maximum(pocket, shapes.muscle - 8)
    scene.shape(pocket, hu.fat, Tissue.FAT, 8.0)


def _paint_wall_air(scene: Scene, shapes: Shapes) -> None:
    """Subcutaneous emphysema: gas that splits the muscles of one side of the chest wall."""
    side, strength = scene.patient.findings.wall_air
    if not strength:
        return
    x, _, z = scene.body
    seed, torso = scene.patient.findings.seed, scene.patient.torso
    # Between the ribs and the skin of this side, fading towards neck and belly.
    zone = torch.maximum(shapes.skin + 4, 7 - shapes.cage)
    zone = torch.maximum(zone, 10 - x * anatomy.SIDES[side])
    zone = zone + 0.25 * ((z - 0.55 * torso.height).abs() - 120).clamp(min=0)
    part = scene.near(zone)
    if part is None:
        return
    inside = scene.filled(scene.up(zone + 9 * scene.coarse_noise(seed + 140, 40.0), part))
    gas = scene.noise(seed + 141, 11.0, part).abs_().mul_(-4).add_(0.3 + 0.9 * strength)
    gas.add_(scene.noise(seed + 142, 26.0, part), alpha=0.7).clamp_(0, 1)
    scene.paint(part, gas.mul_(inside), scene.patient.hounsfield.lumen, Tissue.GAS)


def paint_cavities(scene: Scene, shapes: Shapes) -> None:
    """Fat fills the chest and the belly, the diaphragm parts them."""
    hu = scene.patient.hounsfield
    h, z = scene.patient.torso.height, scene.body[2]
    shell = torch.maximum(shapes.cage, (z - h - 25) * scene.scale)
    shell = torch.maximum(shell, (h - 480 - z) * scene.scale)
    scene.shape(shell, hu.deep_fat, Tissue.MEDIASTINUM, 9.0)
    _paint_nodes(scene, shell)
    _paint_beside_spine(scene, shell)
    _paint_above_apices(scene, shell)
    scene.shape(torch.maximum(shell, shapes.below), hu.muscle, Tissue.DIAPHRAGM)
    belly = normalised(anatomy.abdominal_cavity(scene.body, scene.patient))
    belly = torch.maximum(belly, shapes.below + 3.2)
    scene.shape(belly, hu.deep_fat, Tissue.ABDOMEN, 9.0)
    _paint_mesentery(scene, belly + 4)


def _paint_nodes(scene: Scene, shell: Tensor) -> None:
    """Nodes, small vessels and thymus in the fat of the mediastinum: most at the hila, hardly any beside the heart."""
    part = scene.near(shell)
    if part is None:
        return
    hu, (x, _, z) = scene.patient.hounsfield, scene.body
    up = z / scene.patient.torso.height
    many = 0.5 * ((up - 0.55).square() / 0.03 + (x / 70).square()).neg().exp() - (2 - 5 * up).clamp(0, 1)
    blobs = scene.noise(hu.texture_seed + 9, 10.0, part).sub_(0.35).add_(scene.up(many, part)).mul_(-6.0)
    weight = torch.minimum(scene.filled(blobs), scene.filled(scene.up(shell, part)))
    scene.paint(part, weight, hu.muscle - 8, Tissue.MEDIASTINUM)


def _paint_mesentery(scene: Scene, belly: Tensor) -> None:
    """Vessels through the fat of the belly: lines along which two random fields are both zero."""
    patient = scene.patient
    part = scene.near(belly)
    if part is None:
        return
    seed, wide = patient.abdomen.seed, 13.0
    line = scene.noise(seed + 12, wide, part).square_().add_(scene.noise(seed + 13, wide, part).square_()).sqrt_()
    weight = torch.minimum(scene.filled(line.mul_(wide).sub_(2.4)), scene.filled(scene.up(belly, part)))
    scene.paint(part, weight, patient.hounsfield.venous_blood, Tissue.ABDOMEN)


def _paint_beside_spine(scene: Scene, shell: Tensor) -> None:
    """Behind the vertebral bodies there is muscle and no fat, up to the lung's edge on the rib heads."""
    x, y, z = scene.body
    behind = y - anatomy.spine_y(z, scene.patient) + 0.3 * scene.patient.chest.vertebra
    behind = torch.maximum(behind, x.abs() - 62) * scene.scale + 3 * scene.coarse_noise(
        scene.patient.hounsfield.texture_seed + 5, 15.0
    )
    scene.shape(torch.maximum(shell, behind), scene.patient.hounsfield.muscle, Tissue.MUSCLE, 7.0)


def _paint_above_apices(scene: Scene, shell: Tensor) -> None:
    """On the apices lie scalene muscles and subclavian vessels, with a little fat between, not the mediastinum's."""
    (x, y, z), hu = scene.body, scene.patient.hounsfield
    right, left = (anatomy.apex_height(x, y, scene.patient, side) for side in (0, 1))
    above = torch.where(x > 0, right, left) + 2.5 - z
    above = torch.maximum(above, 25 - x.abs()) * scene.scale + 5 * scene.coarse_noise(hu.texture_seed + 6, 15.0)
    scene.shape(torch.maximum(shell, above), hu.muscle, Tissue.MUSCLE, 7.0)


def paint_abdomen(scene: Scene, shapes: Shapes) -> None:
    """Liver, spleen, kidneys, stomach and bowel."""
    patient, p = scene.patient, scene.body
    hu, k = patient.hounsfield, scene.scale
    under = shapes.below + 3.6 + _fat_under_diaphragm(scene)
    inside = shapes.cage + 4
    scene.shape(torch.maximum(anatomy.kidneys(p, patient) * k, under), hu.kidney, Tissue.KIDNEY, 12.0)
    for s in anatomy.SIDES:
        psoas = ellipsoid(p, (s * 36, -38, patient.torso.height - 390), (20, 20, 110)) * k
        scene.shape(psoas, hu.muscle, Tissue.MUSCLE)
    colon = torch.maximum(scene.coarse_splat(anatomy.colon(patient), 18.0), shapes.cage + 2)
    # The colon makes room for itself: fat around it, and its impression on liver, spleen and stomach.
    beside = torch.maximum(inside, (5.5 - colon))
    liver = smooth_max(anatomy.liver(p, patient, under / k) * k, beside, 6)
    scene.shape(liver, hu.liver, Tissue.LIVER, 5.0)
    scene.shape(smooth_max(anatomy.spleen(p, patient, under / k) * k, beside, 6), hu.spleen, Tissue.SPLEEN, 5.0)
    _paint_bowel(scene, torch.maximum(colon, under))
    stomach = smooth_max(anatomy.stomach_shape(p, patient, under / k) * k, beside, 6)
    _paint_hollow(scene, stomach, patient.abdomen.stomach_gas, 0.0, 62.0)


def _fat_under_diaphragm(scene: Scene) -> Tensor:
    """How thick (coarse, mm) the fat between the diaphragm and an organ is: none on the domes, most of it behind.

    The liver, the spleen and the stomach lie against the diaphragm.
    """
    patient, (x, _, z) = scene.patient, scene.body
    right, left = patient.chest.dome
    beside = ((torch.where(x > 0, right - 38, left - 30) - z) / 20).clamp(0, 1)
    noise = scene.coarse_noise(patient.hounsfield.texture_seed + 8, 35.0)
    room = (2.5 + 0.12 * min(patient.torso.fat, 40.0)) * (noise + 5 * _low_behind(scene) - 0.7).clamp(min=0, max=3)
    return room * beside * scene.scale


def _paint_hollow(scene: Scene, shape: Tensor, gas: float, middle_y: float, reach: float) -> None:
    """A part of the stomach: wall, content, and ``gas`` (0 to 1) above a level across gravity.

    ``middle_y`` and ``reach`` (body mm) place the level, so that a box of the volume has the same one.
    """
    hu = scene.patient.hounsfield
    scene.shape(shape, hu.muscle - 8, Tissue.STOMACH)
    lumen = shape + 3.0
    scene.shape(lumen, hu.stomach, Tissue.STOMACH)
    part = scene.near(lumen)
    if gas <= 0 or part is None:
        return
    ux, uy = scene.patient.scanner.up
    x, y, z = scene.coarse.points(scene.device)
    ox, oy, _ = scene.patient.torso.offset
    level = ((1 - 1.7 * gas) * reach * 0.6 + middle_y * uy) * scene.scale
    surface = level - ((x - ox) * ux + (y - oy) * uy) + 0 * z
    inside = scene.filled(scene.up(lumen, part), scene.patient.abdomen.gas_edge)
    _paint_gas(scene, part, torch.minimum(inside, scene.filled(scene.up(surface, part))))


def _paint_gas(scene: Scene, part: Slices, weight: Tensor) -> None:
    """Gas of stomach or bowel: not quite air and uneven, as scatter and motion leave it in scans."""
    patient = scene.patient
    level = patient.hounsfield.air + patient.abdomen.gas_hu
    grain = scene.noise(patient.abdomen.seed + 9, 4.0, part).mul_(10).add_(level)
    scene.paint(part, weight, grain, Tissue.GAS)


def _paint_bowel(scene: Scene, colon: Tensor) -> None:
    """Small bowel, and the colon (its coarse distance) with stool."""
    patient = scene.patient
    hu, abdomen = patient.hounsfield, patient.abdomen
    gas, fluid = anatomy.small_bowel(patient)
    scene.shape(scene.coarse_splat(fluid), 25.0, Tissue.BOWEL, 15.0)
    loops = scene.coarse_splat(gas)
    scene.shape(loops - 2, hu.muscle - 10, Tissue.BOWEL)
    part = scene.near(loops, 2.0)
    if part is not None:
        _paint_gas(scene, part, scene.filled(scene.up(loops, part), abdomen.gas_edge))
    part = scene.near(colon, 2.0)
    if part is None:
        return
    distance = scene.up(colon, part)
    scene.paint(part, scene.filled(distance - 2), hu.muscle - 10, Tissue.BOWEL)
    stool = scene.noise(abdomen.seed, 5.0, part).mul_(25).add_(hu.stool)
    bubbles = (scene.noise(abdomen.seed + 6, 2.8, part) - abdomen.bubbles).clamp_(min=0)
    stool.add_(bubbles, alpha=-500).clamp_(-950, 220)
    scene.paint(part, scene.filled(distance.clone()), stool, Tissue.BOWEL)
    if abdomen.colon_gas:
        _paint_colon_gas(scene, part, scene.filled(distance, abdomen.gas_edge))


def _paint_colon_gas(scene: Scene, part: Slices, lumen: Tensor) -> None:
    """Gas gathers in what lies highest of the colon's lumen (its share of each voxel)."""
    patient, abdomen = scene.patient, scene.patient.abdomen
    ux, uy = patient.scanner.up
    x, y, _ = scene.coarse.points(scene.device)
    ox, oy, _ = patient.torso.offset
    rise = ((x - ox) * ux + (y - oy) * uy) / (45 * scene.scale)
    where = (1.9 - 3.4 * abdomen.colon_gas - 1.2 * rise) - scene.coarse_noise(abdomen.seed + 5, 32.0)
    air = scene.filled(scene.up(where * 14, part), abdomen.gas_edge)
    # Folds of its wall stand in the gas and part it into cells, in some people so many that it looks like grapes.
    many = 5 * abdomen.folds - 0.5
    walls = scene.filled(_cell_walls(scene, part, 32.0 - 18.0 * many).sub_(abdomen.walls_mm / 2))
    walls.mul_(scene.noise(abdomen.seed + 11, 14.0, part).mul_(3).add_(0.3 + 2.5 * many).clamp_(0, 1))
    _paint_gas(scene, part, air.mul_(lumen).mul_(walls.neg_().add_(1)))


def _cell_walls(scene: Scene, part: Slices, apart_mm: float) -> Tensor:
    """How far (mm) each voxel is from the walls between cells: three sets of bent sheets across each other.

    Those of the first are about ``apart_mm`` from each other, those of the others farther.
    """
    seed = scene.patient.abdomen.seed
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))[0].tolist()
    sets: list[Tensor] = []
    for number, row in enumerate(turn):
        apart = apart_mm * scene.scale * (1.0, 1.5, 2.2)[number]
        bent = scene.coarse_noise(seed + 20 + number, 22.0).mul_(0.3 * apart)
        for ahead, points in zip(row, scene.coarse.points(scene.device), strict=True):
            bent = bent + ahead * points
        sets.append(scene.up(bent, part).div_(apart).frac_().abs_().sub_(0.5).abs_().mul_(apart))
    return torch.minimum(torch.minimum(sets[0], sets[1]), sets[2])


def paint_mediastinum(scene: Scene) -> None:
    """Heart, great vessels, oesophagus and thyroid."""
    patient = scene.patient
    hu = patient.hounsfield
    vessels = anatomy.great_vessels(patient)
    scene.tubes(vessels["cava"], hu.venous_blood, Tissue.BLOOD)
    scene.tubes(vessels["pulmonary"], hu.pulmonary_blood, Tissue.BLOOD)
    _paint_heart(scene)
    aorta = scene.world(vessels["aorta"])
    part = scene.box_of(aorta, scene.voxel_mm)
    if part is not None:
        distance = splat(aorta, scene.axes[part], scene.device, 2 * scene.voxel_mm)
        scene.paint(part, scene.filled(distance), hu.aortic_blood, Tissue.BLOOD)
    scene.tubes(anatomy.oesophagus(patient), hu.muscle - 8, Tissue.OESOPHAGUS)
    risen = anatomy.risen_stomach(patient)
    if len(risen):
        middle = float(risen.centres[:, 1].mean())
        _paint_hollow(scene, scene.coarse_splat(risen), patient.abdomen.stomach_gas, middle, float(risen.radii.max()))
    air = patient.chest.oesophagus_air
    if air:
        tube = anatomy.oesophagus(patient)
        some = Beads(tube.centres, torch.full_like(tube.radii, 0.5 * air))
        scene.tubes(some, hu.lumen, Tissue.GAS)


def _paint_heart(scene: Scene) -> None:
    """Muscle with fat in its grooves, and the four chambers."""
    patient, k = scene.patient, scene.scale
    hu, chest = patient.hounsfield, patient.chest
    p = anatomy.displaced(scene.body, patient)
    heart = normalised(anatomy.heart(scene.body, patient))
    # Fat under the pericardium: more of it in fat people, and uneven.
    fat = (2.0 + 2.6 * scene.coarse_noise(chest.tree_seed + 6, 19.0)).clamp(min=0)
    scene.shape(heart + fat * min(1.7, 0.5 + patient.torso.fat / 25), hu.myocardium, Tissue.HEART, 4.0)
    cx, cy, cz = chest.heart_centre
    rx, ry, rz = chest.heart_radii
    s = rx / 58
    chambers = (
        ((cx + 0.38 * rx, cy + 0.28 * ry, cz), (0.5 * rx, 0.5 * ry, 0.62 * rz), 3.0, hu.pulmonary_blood),
        ((cx + 44 * s, cy - 2, cz + 8), (22 * s, 25 * s, 32 * s), 4.0, hu.venous_blood),
        ((cx + 18, cy - 34 * s, cz + 18), (34 * s, 18 * s, 22 * s), 3.0, hu.aortic_blood),
        ((cx - 0.28 * rx, cy - 0.1 * ry, cz - 0.2 * rz), (0.42 * rx, 0.45 * ry, 0.5 * rz), 8.0, hu.aortic_blood),
    )
    for centre, radii, wall, blood in chambers:
        scene.shape(torch.maximum(ellipsoid(p, centre, radii) * k, heart + wall), blood, Tissue.BLOOD)


def paint_bones(scene: Scene) -> None:
    """Spine, ribs, sternum, shoulder girdle, pelvis and skull."""
    patient = scene.patient
    hu = patient.hounsfield
    _paint_spine(scene)
    ribs, cartilage = anatomy.rib_strands(patient)
    scene.tubes(cartilage, hu.cartilage, Tissue.CARTILAGE)
    bones = Beads.joined([ribs, anatomy.sternum(patient), anatomy.girdle(patient), anatomy.neural_arches(patient)])
    world = scene.world(bones)
    part = scene.box_of(world, 2 * scene.voxel_mm)
    if part is not None:
        distance = splat(world, scene.axes[part], scene.device, scene.voxel_mm)
        marrow = scene.filled(distance + 1.1)
        weight = scene.filled(distance)
        ends = [torch.full((), v, device=scene.device) for v in (0.75 * hu.cortical, 0.4 * hu.trabecular)]
        scene.paint(part, weight, torch.lerp(ends[0], ends[1], marrow), Tissue.BONE)
    _paint_head(scene)


def _paint_spine(scene: Scene) -> None:
    patient, (x, y, z) = scene.patient, scene.body
    hu, chest, h = patient.hounsfield, patient.chest, patient.torso.height
    heights = anatomy.vertebral_heights(patient)[::-1]
    number = anatomy.profile(z, [-900.0, *heights, 900.0], [-12.0, *range(len(heights)), len(heights) + 12.0])
    r = anatomy.profile(z, [h - 640, h - 430, h - 280, h - 20, h + 30, h + 130],
                        [14, chest.vertebra + 5, chest.vertebra + 2, chest.vertebra - 1, 11, 10])  # fmt: skip
    middle = anatomy.spine_y(z, patient)
    body = (((x / 1.15).square() + (y - middle).square()).sqrt() - r) * scene.scale
    ends = (torch.maximum(z - (h + 140), (h - 600) - z)) * scene.scale
    body = torch.maximum(body, ends)
    canal = ((x.square() + (y - middle + r + 10).square()).sqrt() - 8.5) * scene.scale
    scene.shape(torch.maximum(canal - 3, ends), hu.trabecular + 120, Tissue.BONE)
    scene.shape(torch.maximum(canal, ends), 35.0, Tissue.SPINAL_CANAL)
    part = scene.near(body)
    if part is None:
        return
    distance = scene.up(body, part)
    phase = scene.up(number, part)
    # 0 in the middle of a disc, 0.5 in the middle of a vertebra.
    phase = ((phase - 0.5) - (phase - 0.5).round()).abs_()
    disc = ((0.12 - phase) / 0.03).clamp_(0, 1)
    shell = torch.maximum(scene.filled(distance + 1.5).mul_(-1).add_(1), ((0.17 - phase) / 0.03).clamp_(0, 1))
    grain = scene.noise(hu.texture_seed + 9, 4.0, part).mul_(22).add_(hu.trabecular)
    cortex = torch.full((), 0.55 * hu.cortical + 0.3 * hu.trabecular, device=scene.device)
    value = grain.lerp_(cortex, shell).lerp_(torch.full((), hu.disc, device=scene.device), disc)
    scene.paint(part, scene.filled(distance), value, Tissue.BONE)


def _paint_head(scene: Scene) -> None:
    patient, p, k = scene.patient, scene.body, scene.scale
    hu, h = patient.hounsfield, patient.torso.height
    skull = ellipsoid(p, (0, 4, h + 235), (64, 84, 90)) * k
    if scene.near(skull) is None:
        return
    scene.shape(skull, hu.cortical + 300, Tissue.BONE)
    scene.shape(skull + 7, 34.0, Tissue.BRAIN, 3.0)
    scene.shape(ellipsoid(p, (0, 50, h + 178), (34, 36, 34)) * k, hu.trabecular + 150, Tissue.BONE)
    face = ellipsoid(p, (0, 62, h + 182), (30, 24, 24)) * k + 5 * scene.coarse_noise(hu.texture_seed + 4, 10.0)
    scene.shape(face, hu.lumen, Tissue.GAS)
    x, y, z = p
    mastoid = ellipsoid((x.abs(), y, z), (52, -14, h + 170), (13, 15, 17)) * k
    scene.shape(mastoid, -450.0, Tissue.BONE, 250.0)
    scene.tubes(strand([(0, 12, h + 150), (0, 40, h + 150), (0, 80, h + 160)], 8), hu.lumen, Tissue.GAS)
