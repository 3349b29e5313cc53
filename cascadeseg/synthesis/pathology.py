"""What goes wrong in the lungs. The label stays the whole anatomical lung; fluid and free air are outside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cascadeseg.synthesis import anatomy
from cascadeseg.synthesis.fields import Beads, Slices, common, normalised, smooth_max, splat, within
from cascadeseg.synthesis.scene import Scene
from cascadeseg.synthesis.tissue import Tissue

if TYPE_CHECKING:
    from cascadeseg.synthesis.patient import Patient
    from cascadeseg.synthesis.render_lungs import Lung

MOST_UNEVEN = 0.25
"""Relative spread of how dense partly aerated lung is."""
GROWS_MM = 12.0
"""Radius (body mm) from which a mass may grow beyond the lung."""
EMPHYSEMA_HU = -985
"""Of destroyed lung: air, but for what is left of vessels and septa."""
GROWN_INTO = Tissue.FAT, Tissue.MUSCLE, Tissue.MEDIASTINUM, Tissue.DIAPHRAGM, Tissue.PLEURA


def _sideways(scene: Scene) -> tuple[Tensor, Tensor]:
    """World height against gravity, and distance across it, from the body's middle (mm, coarse lattice)."""
    ux, uy = scene.patient.scanner.up
    x, y, z = scene.coarse.points(scene.device)
    ox, oy, _ = scene.patient.torso.offset
    return (x - ox) * ux + (y - oy) * uy + 0 * z, (x - ox) * uy - (y - oy) * ux + 0 * z


def _dependent_wall(scene: Scene) -> float:
    """World height of the lowest point of the chest's inner wall."""
    torso = scene.patient.torso
    return -(torso.half_width if scene.upward[0] else torso.half_depth) * scene.scale


def _fluid_level(scene: Scene, side: int) -> Tensor | None:
    """Coarse distance to what fluid would fill if nothing held the lung (negative inside it), or None."""
    f = scene.patient.findings
    thick = f.effusion[side] * scene.scale
    if thick <= 0:
        return None
    height, across = _sideways(scene)
    # Fluid climbs along the side wall: its surface is a bowl.
    bowl = (across.abs() / (60 * scene.scale)).square() * 0.35 * thick
    level = _dependent_wall(scene) + thick + bowl.clamp(max=1.2 * thick)
    level = level + 5 * scene.coarse_noise(f.seed + 1 + side, 38.0)
    # Less of it further up the chest.
    z = scene.body[2] / scene.patient.torso.height
    fluid = height - level + (z - 0.25).clamp(min=0) * (0.9 * thick)
    if f.subpulmonic[side]:
        x, y, zb = scene.body
        over = (zb - anatomy.diaphragm_height(x, y, scene.patient, side)) * scene.scale - f.subpulmonic[side]
        fluid = torch.minimum(fluid, 0.7 * over)
    return fluid


def _pocket(scene: Scene, side: int) -> Tensor | None:
    """Coarse distance to fluid that adhesions keep at the ribs (negative inside it), or None: a lens."""
    patient, f = scene.patient, scene.patient.findings
    places = _places(patient, side, 500 + side) if f.pockets[side] else None
    if places is None:
        return None
    x, y, z = places.unbind(1)
    middle = places[int(anatomy.cage((x, y, z), patient.torso).argmax())].to(scene.device)
    x, y, z = scene.body
    away = (x - middle[0]).square() + (y - middle[1]).square() + (z - middle[2]).square()
    reach = f.pocket_width * f.pockets[side]
    depth = -normalised(anatomy.cage(scene.body, patient.torso))
    wavy = 1.5 * scene.coarse_noise(f.seed + 66 + side, 20.0)
    return depth - (1 - away / (reach * reach)) * f.pockets[side] * scene.scale + wavy


def _pleural_fluid(scene: Scene, side: int) -> Tensor | None:
    """Coarse distance to all fluid around a lung, or None."""
    found = [fluid for fluid in (_fluid_level(scene, side), _pocket(scene, side)) if fluid is not None]
    return _around_hilum(scene, side, torch.stack(found).amin(0)) if found else None


def _around_hilum(scene: Scene, side: int, filled: Tensor) -> Tensor:
    """Distance to fluid or air that leaves room for the lung around its hilum, where vessels and bronchi hold it."""
    patient = scene.patient
    seed = patient.findings.seed
    reach = (10 + seed % 11) * scene.scale
    held = Beads.joined([anatomy.hilar_vessels(patient, side), anatomy.lobar_bronchi(patient, side)])
    wavy = 2 * scene.coarse_noise(seed + 64 + side, 18.0).clamp(-2, 2)
    return smooth_max(filled, reach + wavy - scene.coarse_splat(held, reach + 12), 8.0)


def _free_air_distance(scene: Scene, side: int) -> Tensor | None:
    f = scene.patient.findings
    depth = f.pneumothorax[side] * scene.scale
    if depth <= 0:
        return None
    height, across = _sideways(scene)
    top = -_dependent_wall(scene)
    air = (top - depth) - height - 0.1 * across.abs() + 4 * scene.coarse_noise(f.seed + 7 + side, 40.0)
    return _around_hilum(scene, side, air)


def remaining_lung(scene: Scene, part: Slices, side: int, cavity: Tensor) -> Tensor:
    """Distance to the lung that is left in its cavity when fluid and free air have taken their room."""
    distance = cavity.clone()
    fluid = _pleural_fluid(scene, side)
    if fluid is not None:
        distance = torch.maximum(distance, scene.up(fluid, part).neg_())
    air = _free_air_distance(scene, side)
    if air is not None:
        distance = torch.maximum(distance, scene.up(air, part).neg_())
    return distance


def paint_cavity(scene: Scene, lung: Lung) -> None:
    """What fills the pleural cavity beside the lung: fluid, free air, or all of it where the lung is missing."""
    f = scene.patient.findings
    side = lung.side
    _paint_plaques(scene, lung)
    if f.missing[side]:
        grain = scene.noise(f.seed + 20, 12.0, lung.part).mul_(6).add_(f.fluid_hu + 12)
        scene.paint(lung.part, scene.filled(lung.cavity.clone()), grain, Tissue.EMPTY_HEMITHORAX)
        return
    fluid = _pleural_fluid(scene, side)
    if fluid is not None:
        grain = scene.noise(f.seed + 21, 9.0, lung.part).mul_(4).add_(f.fluid_hu)
        # A voxel further than it goes: the lung is painted over it, and what was there before must not shine through.
        filled = torch.maximum(lung.cavity, scene.up(fluid, lung.part).sub_(scene.voxel_mm))
        scene.paint(lung.part, scene.filled(filled), grain, Tissue.EFFUSION)
    air = _free_air_distance(scene, side)
    if air is not None:
        free = torch.maximum(lung.cavity, scene.up(air, lung.part))
        scene.paint(lung.part, scene.filled(free), scene.patient.hounsfield.air + 4, Tissue.PNEUMOTHORAX)


def _paint_plaques(scene: Scene, lung: Lung) -> None:
    """Thickened pleura, in two of five patients fat alone: soft tissue, in half of the others with specks of chalk."""
    seed = scene.patient.findings.seed
    if lung.pleura is None or seed % 5 < 2:
        return
    value = scene.noise(seed + 16, 8.0, lung.part)
    chalk = ((value - 1.2) * 4).clamp_(0, 1) if seed % 2 else None
    value = value.mul_(8).add_(30 + seed % 31)
    if chalk is not None:
        value.lerp_(torch.full((), 300.0 + seed % 500, device=scene.device), chalk)
    scene.paint(lung.part, scene.filled(lung.pleura.clone()), value, Tissue.PLEURA)


def diffuse(scene: Scene, side: int, base: Tensor) -> Tensor:
    """The lung's smooth HU (coarse lattice) with emphysema, mosaic attenuation and dependent density in it."""
    f = scene.patient.findings
    if f.mosaic:
        base = base + f.mosaic * torch.tanh(2.5 * scene.coarse_noise(f.seed + 30, 24.0)) * 0.6
    if f.dependent[0]:
        base = torch.lerp(base, torch.full_like(base, f.dense_hu), _dependent_density(scene))
    if f.emphysema[side]:
        up = (scene.body[2] / scene.patient.torso.height - 0.3).clamp(-0.3, 0.7)
        spots = torch.sigmoid((scene.coarse_noise(f.seed + 31, 9.0) - 1.8 + 2.4 * f.emphysema[side] + up) * 6)
        base = torch.lerp(base, torch.full_like(base, EMPHYSEMA_HU), spots)
    return base


def _dependent_density(scene: Scene) -> Tensor:
    """How little air the lowest lung has: least at the wall that the patient lies on, more with each mm above it."""
    f = scene.patient.findings
    strength, fade = f.dependent
    height, _ = _sideways(scene)
    low = (height / _dependent_wall(scene) - 0.2).div(0.6).clamp(0, 1)
    depth = -normalised(anatomy.cage(scene.body, scene.patient.torso)).clamp(max=0)
    uneven = (1 + 0.35 * scene.coarse_noise(f.seed + 63, 28.0)).clamp(0.3, 1.7)
    return (strength * uneven * low * torch.exp(-depth / (fade * scene.scale))).clamp(max=0.92)


def paint_lesions(scene: Scene, lung: Lung, weight: Tensor) -> None:
    """Everything denser (or emptier) than lung, in the order that hides nothing it should show."""
    f = scene.patient.findings
    if f.fibrosis:
        _paint_fibrosis(scene, lung, weight)
    _paint_bullae(scene, lung, weight)
    if f.ground_glass:
        _paint_patches(scene, lung, weight, f.ground_glass, f.ground_glass_extent, 40, Tissue.GROUND_GLASS)
    if f.consolidation:
        _paint_patches(scene, lung, weight, f.consolidation, f.consolidation_extent, 41, Tissue.CONSOLIDATION)
    if f.lobar[lung.side] >= 0:
        _paint_lobe(scene, lung, weight)
    _paint_atelectasis(scene, lung, weight)
    if f.white[lung.side]:
        _paint_dense(scene, lung, weight * f.white[lung.side], 45)
    _restore_vessels(scene, lung)
    if lung.bronchi is not None and f.seed % 3:
        # Air bronchograms: what was dense has kept its larger bronchi.
        scene.hu[lung.part].lerp_(torch.full((), -930.0, device=scene.device), lung.bronchi.mul_(0.85))
    _paint_nodules(scene, lung, weight)


def _paint_dense(scene: Scene, lung: Lung, weight: Tensor, key: int) -> None:
    f = scene.patient.findings
    grain = scene.noise(f.seed + key, 7.0, lung.part).mul_(12).add_(f.dense_hu)
    scene.paint(lung.part, weight, grain, Tissue.CONSOLIDATION)
    _thicken(lung, weight)


def _thicken(lung: Lung, dense: Tensor) -> None:
    """Remember where lung has become dense, over what was so before."""
    if lung.dense is None:
        lung.dense = dense.clone()
    else:
        lung.dense.lerp_(torch.ones_like(dense), dense)


def _restore_vessels(scene: Scene, lung: Lung) -> None:
    """Dense lung has kept its vessels, but for the thinnest: with contrast medium they stand out in it."""
    if lung.dense is None or lung.vessels is None or lung.blood is None:
        return
    brighter = (lung.blood - scene.patient.findings.dense_hu).clamp_(min=0)
    shown = lung.dense.mul_(lung.vessels)
    scene.hu[lung.part] += brighter.mul_(shown)
    scene.tissue[lung.part].masked_fill_((shown > 0.5) & (brighter > 0), int(Tissue.LUNG_VESSEL))


def _place_preference(scene: Scene, side: int) -> Tensor:
    """Where patches like to be: subpleural or central, lower or upper, or where all settles (coarse, about -1..1)."""
    f, torso = scene.patient.findings, scene.patient.torso
    x, y, z = scene.body
    s = anatomy.SIDES[side]
    radial = (((x - s * 62) / 60).square() + (y / 80).square()).sqrt() - 0.75
    dependent = -(_sideways(scene)[0] / (90 * scene.scale)).clamp(-1, 1)
    low = 0.45 - z / torso.height
    return 0.9 * f.peripheral * radial + (0.7 * f.lower + 2 * f.settled) * low + (0.4 * f.lower + f.settled) * dependent


def _paint_patches(
    scene: Scene, lung: Lung, weight: Tensor, strength: float, extent: float, key: int, tissue: Tissue
) -> None:
    f = scene.patient.findings
    blobs = scene.coarse_noise(f.seed + key, f.blob) + 0.7 * scene.coarse_noise(f.seed + key + 100, 0.45 * f.blob)
    level = 1.5 - 3.0 * extent
    sharp = 1.0 + (f.seed + key) % 7 * (0.5 if key == 41 else 0.2)
    field = (blobs + _place_preference(scene, lung.side) - level) * sharp
    if not bool((field > 0).any()):
        return
    dense = scene.up(field, lung.part)
    # Ragged edges, and air left in the small bronchi.
    dense.add_(scene.noise(f.seed + key + 7, 4.5, lung.part), alpha=0.3 * sharp)
    dense = dense.clamp_(0, 1).mul_(strength).mul_(weight)
    # What keeps some air keeps it unevenly; as even as fat, at the same HU, it would teach that fat is lung.
    if strength < 1:
        uneven = scene.noise(f.seed + key + 200, 4.0, lung.part).mul_(min(MOST_UNEVEN, 1.5 * (1 - strength))).add_(1)
        dense = torch.minimum(dense.mul_(uneven).clamp_(min=0), weight)
    grain = scene.noise(f.seed + key + 8, 5.0, lung.part).mul_(14).add_(f.dense_hu)
    scene.hu[lung.part].lerp_(grain, dense)
    _thicken(lung, dense)
    scene.tissue[lung.part].masked_fill_((dense > 0.3) & (weight > 0.5), int(tissue))


def fissure(scene: Scene, side: int) -> tuple[Tensor, Tensor]:
    """Distances (mm, coarse) to the oblique fissure (negative below and behind) and to the horizontal one."""
    x, y, z = scene.body
    h = scene.patient.torso.height
    s = anatomy.SIDES[side]
    curve = 10 * torch.sin(y / 45) + 0.12 * (s * x - 60)
    oblique = (0.66 * z + 0.75 * (y + 5) - 0.36 * h + curve) * scene.scale
    horizontal = (z - 0.5 * h + 0.12 * y + 6 * torch.sin(x / 30)) * scene.scale
    return oblique, horizontal


def _paint_lobe(scene: Scene, lung: Lung, weight: Tensor) -> None:
    f = scene.patient.findings
    oblique, horizontal = fissure(scene, lung.side)
    which = f.lobar[lung.side]
    if which == 0:
        lobe = oblique
    elif which == 1:
        lobe = torch.maximum(-oblique, horizontal)
    else:
        lobe = torch.maximum(-oblique, -horizontal)
    inside = scene.filled(scene.up(lobe, lung.part))
    patchy = scene.noise(f.seed + 50, 14.0, lung.part).mul_(0.5).add_(1.15).clamp_(0.1, 1)
    _paint_dense(scene, lung, inside.mul_(patchy).mul_(weight), 51)


def _paint_atelectasis(scene: Scene, lung: Lung, weight: Tensor) -> None:
    """Dense lung along the dependent wall, and lung squeezed by fluid or by free air."""
    f, side = scene.patient.findings, lung.side
    height, _ = _sideways(scene)
    band = None
    if f.atelectasis[side]:
        thick = f.atelectasis[side] * scene.scale
        z = (scene.body[2] / scene.patient.torso.height).clamp(-0.5, 1)
        wavy = scene.coarse_noise(f.seed + 60, 22.0) * 0.35 * thick
        level = _dependent_wall(scene) + thick * (1.25 - 0.9 * z) + wavy
        band = (level - height) / (3.0 + 0.15 * thick)
    fluid_level = _fluid_level(scene, side)
    if fluid_level is not None and f.compression[side]:
        fluid = _around_hilum(scene, side, fluid_level)
        squeezed = (f.compression[side] * scene.scale - fluid + 3 * scene.coarse_noise(f.seed + 61, 16.0)) / 4
        band = squeezed if band is None else torch.maximum(band, squeezed)
    if band is None and fluid_level is None:
        return
    dense = torch.zeros_like(weight) if band is None else scene.up(band, lung.part).clamp_(0, 1).mul_(0.95)
    if fluid_level is not None:
        # What the hilum holds in the fluid has no air at all.
        dense = torch.maximum(dense, scene.up(fluid_level, lung.part).mul_(-0.25).clamp_(0, 1))
    _paint_dense(scene, lung, dense.mul_(weight), 62)


def _paint_fibrosis(scene: Scene, lung: Lung, weight: Tensor) -> None:
    """Reticulation and honeycombs under the pleura, most of it at the bases."""
    f = scene.patient.findings
    z = scene.up(scene.body[2] / scene.patient.torso.height, lung.part)
    zone = torch.exp((lung.distance / (4 + 4 * f.fibrosis)).clamp_(max=0)) * (1.25 - z).clamp_(0.15, 1.3) * f.fibrosis
    net = scene.noise(f.seed + 70, 3.6, lung.part)
    lines = (1.1 - net.abs() * 1.8).clamp_(min=0)
    dense = (lines * zone).mul_(1.5 * weight).clamp_(0, 0.85)
    grain = torch.full((), 0.0, device=scene.device)
    scene.hu[lung.part].lerp_(grain, dense)
    holes = ((net - 0.9).clamp_(min=0) * zone * (f.fibrosis > 0.6)).mul_(weight).clamp_(0, 1)
    scene.hu[lung.part].lerp_(torch.full((), -940.0, device=scene.device), holes)
    scene.tissue[lung.part].masked_fill_((dense > 0.35) & (weight > 0.5), int(Tissue.FIBROSIS))


def _lung_frame(scene: Scene, side: int) -> tuple[Tensor, Tensor]:
    """Middle and half size of a lung in body space, for placing things in it."""
    torso = scene.patient.torso
    middle = torch.tensor([anatomy.SIDES[side] * 68.0, -6.0, 0.4 * torso.height])
    half = torch.tensor([48.0, 0.72 * torso.half_depth, 0.52 * torso.height])
    return middle, half


def _paint_bullae(scene: Scene, lung: Lung, weight: Tensor) -> None:
    f = scene.patient.findings
    if not f.bullae:
        return
    generator = torch.Generator().manual_seed(f.seed + 80 + lung.side)
    middle, half = _lung_frame(scene, lung.side)
    place = torch.randn((f.bullae, 3), generator=generator)
    place = place / place.norm(dim=1, keepdim=True)
    place[:, 2] = place[:, 2].abs() * (torch.rand(f.bullae, generator=generator) - 0.2).sign()
    radii = 4 + 26 * torch.rand(f.bullae, generator=generator) ** 2.5
    beads = scene.world(Beads(middle + place * half * 0.92, radii))
    part = scene.box_of(beads, scene.voxel_mm)
    if part is None:
        return
    distance = splat(beads, scene.axes[lung.part], scene.device, 3.0)
    scene.paint(lung.part, scene.filled(distance - 0.8).mul_(weight), -700.0, Tissue.BULLA)
    scene.paint(lung.part, scene.filled(distance).mul_(weight), -978.0, Tissue.BULLA)


def _paint_nodules(scene: Scene, lung: Lung, weight: Tensor) -> None:
    """Nodules and masses: lumpy spheres, some with a cavity, some of ground glass only."""
    for number, lesion in enumerate(scene.patient.findings.lesions):
        if lesion.side == lung.side:
            _paint_nodule(scene, lung, weight, number)


def paint_growths(scene: Scene, side: int) -> None:
    """What masses of one lung will fill beyond it; a box may hold this and nothing of the lung."""
    for number, lesion in enumerate(scene.patient.findings.lesions):
        grows = lesion.grows and lesion.radius > GROWS_MM and not lesion.ground_glass
        shape = _lesion(scene, number) if lesion.side == side and grows else None
        if shape is None:
            continue
        part, distance = shape
        soft = torch.isin(scene.tissue[part], torch.tensor(GROWN_INTO, dtype=torch.uint8, device=scene.device))
        scene.paint(part, scene.filled(distance).mul_(soft), lesion.hu, Tissue.NODULE)


def _lesion(scene: Scene, number: int) -> tuple[Slices, Tensor] | None:
    """The box of a nodule or mass, and the distance (mm) to it there."""
    f = scene.patient.findings
    lesion, centre = f.lesions[number], _place(scene.patient, number)
    if centre is None:
        return None
    generator = torch.Generator().manual_seed(f.seed + 90 + number)
    bumps = torch.randn((9, 3), generator=generator)
    bumps = bumps / bumps.norm(dim=1, keepdim=True)
    centres = torch.cat([centre[None], centre + bumps * lesion.radius * (0.3 + lesion.lobulation)])
    radii = torch.cat(
        [torch.tensor([lesion.radius]), lesion.radius * (0.55 + 0.25 * torch.rand(9, generator=generator))]
    )
    beads = scene.world(Beads(centres, radii))
    part = scene.box_of(beads, 6.0)
    if part is None:
        return None
    distance = splat(beads, scene.axes[part], scene.device, 6.0)
    return part, distance.add_(scene.noise(f.seed + 130, 5.0, part), alpha=0.8)


def _place(patient: Patient, number: int) -> Tensor | None:
    """The middle of a lesion (body mm): anywhere in the lung, near its pleura, a third of these right over the
    diaphragm, or at a vessel of its hilum.
    """
    lesion = patient.findings.lesions[number]
    if lesion.hilar:
        vessels = anatomy.hilar_vessels(patient, lesion.side).centres
        return vessels[int(np.random.default_rng([patient.findings.seed, number]).integers(len(vessels)))]
    places = _places(patient, lesion.side, number)
    if places is None:
        return None
    if not lesion.rim:
        return places[0]
    x, y, z = places.unbind(1)
    if (patient.findings.seed + number) % 3:
        return places[int(anatomy.lung_part((x, y, z), patient, lesion.side).argmax())]
    return places[int((anatomy.diaphragm_height(x, y, patient, lesion.side) - z).argmax())]


def _places(patient: Patient, side: int, number: int) -> Tensor | None:
    """(24, 3) points (body mm) in a lung, others for each number; None where there is no lung."""
    rng = np.random.default_rng([patient.findings.seed, number])
    places = torch.from_numpy(anatomy.points_inside(rng, patient, side, 24)).float()
    return places if len(places) else None


def _paint_nodule(scene: Scene, lung: Lung, weight: Tensor, number: int) -> None:
    lesion, shape = scene.patient.findings.lesions[number], _lesion(scene, number)
    box = common(shape[0], lung.part) if shape else None
    if shape is None or box is None:
        return
    distance = shape[1][within(box, shape[0])]
    inside = weight[within(box, lung.part)]
    body = scene.filled(distance.clone()).mul_(inside)
    if lesion.ground_glass:
        body.mul_(0.45)
    scene.paint(box, body, lesion.hu, Tissue.NODULE)
    if lesion.cavity:
        hole = scene.filled(distance + lesion.radius * (1 - lesion.cavity) * scene.scale)
        scene.paint(box, hole.mul_(inside), -900.0, Tissue.NODULE)
