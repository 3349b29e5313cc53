"""Painting the lungs: pleural cavities, parenchyma, vessel trees, airways, and everything that goes wrong in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cascadeseg.synthesis import anatomy, pathology
from cascadeseg.synthesis.fields import Beads, Slices, common, smooth_max, splat, splat_weight, within
from cascadeseg.synthesis.render_body import Shapes
from cascadeseg.synthesis.scene import Scene
from cascadeseg.synthesis.tissue import Tissue
from cascadeseg.synthesis.trees import beads_beside, grow_tree, tree_beads

if TYPE_CHECKING:
    from cascadeseg.synthesis.patient import Patient


PLEURA_MM = 0.3
"""How far beyond the aerated edge the label goes: contours and masks of the field take in the pleura and run where a
voxel still holds some 30 % of lung (measured on public references: half-maximum masks are 1.4 to 2.6 % smaller)."""

THIN_MM = 1.0
"""Radius (body mm) up to which vessels of the lung are thin: half enhanced, and lost in airless lung."""
PLAIN_BLOOD = 42.0
"""HU of blood without contrast medium."""

BRONCHUS, BRONCHIAL_WALL = 0.7, (1.12, 0.3)
"""A bronchus's radius, of that of its artery, and its wall's outer one: so many times that, and mm."""


@dataclass(frozen=True, eq=False)
class Branches:
    """The vessel and bronchial trees of one lung (body space)."""

    vessels: Beads
    lumen: Beads
    wall: Beads
    central: Beads


@lru_cache(maxsize=16)
def _branches(patient: Patient, side: int) -> Branches:
    """Grow artery, vein and bronchi of one lung in body space (kept for the next box of the same patient)."""
    chest, s = patient.chest, anatomy.SIDES[side]
    rng = np.random.default_rng([chest.tree_seed, side])
    cloud = anatomy.points_inside(rng, patient, side, patient.config.anatomy.vessel_leaves * 2 + 60)
    if len(cloud) < 40:
        empty = Beads.joined([])
        return Branches(empty, empty, empty, empty)
    zc = chest.carina
    artery_root = np.array([s * 36.0, -5.0, zc - (26 if s > 0 else 12)])
    vein_root = np.array([s * 26.0, -8.0, zc - 48])
    roots = torch.from_numpy(np.stack([artery_root, vein_root])).float()
    roots = anatomy.moved(Beads(roots, torch.ones(2)), patient).centres
    artery_root, vein_root = roots.double().numpy()
    half = len(cloud) // 2
    artery = grow_tree(rng, artery_root, cloud[:half], chest.leaf, chest.tree_power, 6.0)
    vein = grow_tree(rng, vein_root, cloud[half:], chest.leaf, chest.tree_power, 6.0)
    vessels = Beads.joined([tree_beads(artery), tree_beads(vein)])
    # Bronchi run beside the arteries, wall to wall, down to about the fifth generation.
    towards = rng.normal(0, 1, 3)
    apart = 1 + BRONCHUS * BRONCHIAL_WALL[0], BRONCHIAL_WALL[1]
    bronchi = beads_beside(artery, max(8, half // 28), BRONCHUS, towards / np.linalg.norm(towards), apart)
    near = torch.cdist(vessels.centres, roots.float()).amin(dim=1) < 28 * chest.hilum
    central = vessels.where(near & (vessels.radii > chest.hilar_vessel))
    wall = Beads(bronchi.centres, bronchi.radii * BRONCHIAL_WALL[0] + BRONCHIAL_WALL[1])
    return Branches(vessels, bronchi, wall, central)


@dataclass(eq=False)
class Lung:
    """One lung while it is painted: its box, and the distances (mm) to it and to its pleural cavity.

    ``pleura`` is the distance to thickened pleura. ``bronchi`` is which part of each voxel the bronchi inside the lung
    and its hilum fill, ``vessels`` the same of its vessels, but for the thinnest, and ``blood`` the HU in these.
    ``dense`` is how dense lesions have made it.
    """

    side: int
    part: Slices
    distance: Tensor
    cavity: Tensor
    pleura: Tensor | None = None
    bronchi: Tensor | None = None
    vessels: Tensor | None = None
    blood: Tensor | None = None
    dense: Tensor | None = None


def paint_lungs(scene: Scene, shapes: Shapes) -> Tensor:
    """Paint both lungs; returns the label map (X, Y, Z) uint8 in patient sides."""
    labels = torch.zeros(scene.axes.shape, dtype=torch.uint8, device=scene.device)
    excluded = _central_structures(scene)
    for side in (0, 1):
        if not scene.patient.findings.missing[side]:
            pathology.paint_growths(scene, side)
    for side in (0, 1):
        lung = _lung(scene, shapes, side)
        if lung is None:
            continue
        pathology.paint_cavity(scene, lung)
        if scene.patient.findings.missing[side]:
            continue
        whole = scene.filled(lung.distance.clone())
        _cut_out(scene, lung, excluded)
        weight = scene.filled(lung.distance.clone())
        _paint_parenchyma(scene, lung, weight)
        _paint_fissures(scene, lung, weight)
        _paint_trees(scene, lung, whole)
        pathology.paint_lesions(scene, lung, weight)
        label = 1 if (side == 0) != scene.patient.mirror else 2
        labels[lung.part].masked_fill_(lung.distance < PLEURA_MM, label)
    return labels


def _lung(scene: Scene, shapes: Shapes, side: int) -> Lung | None:
    patient, (x, y, z) = scene.patient, scene.body
    s, k = anatomy.SIDES[side], scene.scale
    apex = (z - anatomy.apex_height(x, y, patient, side)) * (0.55 * k)
    middle, _ = anatomy.junction((x, y, z), patient)
    across = (middle - x) * (s * k)
    rough = patient.chest.roughness
    rough_field = scene.coarse_noise(patient.chest.tree_seed + 3, 22.0) * rough
    mediastinum = shapes.mediastinum + rough_field
    rough_cavity = torch.maximum(torch.maximum(shapes.cage, shapes.diaphragm[side]), torch.maximum(apex, across))
    part = scene.near(torch.maximum(rough_cavity, -mediastinum))
    if part is None:
        return None
    ribs = shapes.cage + scene.coarse_noise(patient.chest.tree_seed + 4, 12.0) * patient.chest.ribs_felt
    below, above = scene.up(shapes.diaphragm[side], part), scene.up(apex, part)
    between = scene.up(mediastinum, part).neg_()
    septum = scene.up(across, part).add_(0.5 * patient.chest.septum * k)

    def within_ribs(ribs: Tensor) -> Tensor:
        cavity = smooth_max(torch.maximum(scene.up(ribs, part), below), above, 8.0)
        return torch.maximum(smooth_max(cavity, between, patient.chest.corner), septum)

    cavity, pleura = within_ribs(ribs), None
    if patient.findings.pleura:
        plaques = (scene.coarse_noise(patient.findings.seed + 15, 24.0) - 0.6).clamp_(0, 1)
        whole, cavity = cavity, within_ribs(ribs + plaques * patient.findings.pleura * k)
        pleura = torch.maximum(whole, -cavity)
    distance = pathology.remaining_lung(scene, part, side, cavity)
    return Lung(side, part, distance, cavity, pleura)


def _central_structures(scene: Scene) -> tuple[Slices, Tensor] | None:
    """Distance to airways (with their wall) and hilar vessels: none of them is lung.

    Contours of the field leave out the lobar bronchi, too (the proximal bronchial tree, doi
    10.1016/j.ijrobp.2010.07.1977), and vessels of the hilum wider than 5 mm, give or take 2 (LCTSC, doi
    10.7937/K9/TCIA.2017.3R3FVZ08). How far out they do is not one convention, so it is drawn.
    """
    patient = scene.patient
    trunk = anatomy.airways(patient).grown(patient.chest.airway_wall + 0.1)
    parts = []
    for side in (0, 1):
        vessels = anatomy.hilar_vessels(patient, side)
        parts += [
            _root(anatomy.lobar_bronchi(patient, side), patient.chest.hilar_share).grown(0.8),
            vessels.where(vessels.radii > patient.chest.hilar_vessel),
            _branches(patient, side).central,
        ]
    beads = scene.world(Beads.joined([trunk, Beads.joined(parts).grown(patient.chest.hilar_cuff)]))
    part = scene.box_of(beads, 4.0)
    if part is None:
        return None
    return part, splat(beads, scene.axes[part], scene.device, 4.0)


def _root(bronchi: Beads, share: float) -> Beads:
    """The near part of bronchi that narrow: ``share`` of the way from their largest radius to their least."""
    low, high = float(bronchi.radii.min()), float(bronchi.radii.max())
    return bronchi.where(bronchi.radii >= high - share * (high - low))


def _cut_out(scene: Scene, lung: Lung, excluded: tuple[Slices, Tensor] | None) -> None:
    """Take the central structures out of a lung, with a rounded edge."""
    if excluded is None:
        return
    part, distance = excluded
    box = common(part, lung.part)
    if box is None:
        return
    mine = lung.distance[within(box, lung.part)]
    mine.copy_(smooth_max(mine, -distance[within(box, part)], 4.0))


def _paint_parenchyma(scene: Scene, lung: Lung, weight: Tensor) -> None:
    hu = scene.patient.hounsfield
    t16, t40, t8, threads = hu.texture
    seed = hu.texture_seed + 20 * lung.side
    base = scene.coarse_noise(seed + 1, 16.0).mul_(0.6 * t16)
    base += scene.coarse_noise(seed + 2, 40.0).mul_(t40)
    base += _gravity(scene) * hu.gravity + hu.lung
    base = pathology.diffuse(scene, lung.side, base)
    value = scene.up(base, lung.part)
    # Under the pleura lungs are a little denser.
    value.add_((lung.distance / 6).clamp_(max=0).exp_(), alpha=hu.rim)
    grain = scene.noise(seed + 3, 2.6, lung.part)
    value.add_(grain, alpha=t8)
    # Vessels too small to be drawn one by one.
    value.add_((grain - 0.8).clamp_(min=0), alpha=threads)
    scene.paint(lung.part, weight, value, Tissue.LUNG)


def _paint_fissures(scene: Scene, lung: Lung, weight: Tensor) -> None:
    """The pleura between the lobes: a faint line that fades here and there, as incomplete fissures do."""
    oblique, horizontal = pathology.fissure(scene, lung.side)
    field = scene.up(oblique, lung.part)
    line = scene.filled(field.abs() - 0.6)
    if lung.side == 0:
        front = scene.filled(scene.up(horizontal, lung.part).abs_() - 0.6)
        line = torch.maximum(line, front.mul_(field > 0))
    line.mul_(scene.noise(scene.patient.chest.tree_seed + 9, 30.0, lung.part).add_(0.7).clamp_(0, 1)).mul_(weight)
    scene.hu[lung.part].add_(line, alpha=140.0)
    scene.tissue[lung.part].masked_fill_(line > 0.45, int(Tissue.FISSURE))


def _gravity(scene: Scene) -> Tensor:
    """-0.5 at the non-dependent wall to about 0.8 at the dependent one, on the coarse lattice."""
    ux, uy = scene.patient.scanner.up
    torso = scene.patient.torso
    x, y, z = scene.coarse.points(scene.device)
    ox, oy, _ = torso.offset
    reach = (torso.half_width if scene.upward[0] else torso.half_depth) * scene.scale
    depth = -((x - ox) * ux + (y - oy) * uy) / (2 * reach) + 0 * z
    return depth + 0.5 * depth.clamp(min=0)


def _paint_trees(scene: Scene, lung: Lung, whole: Tensor) -> None:
    """Vessels and bronchi of a lung, those in its hilum, which are cut out of it, as well: they do not end there.

    ``whole`` is which part of each voxel the lung fills before its hilum is cut out; it is used up.
    """
    hu = scene.patient.hounsfield
    branches = _branches(scene.patient, lung.side)
    axes = scene.axes[lung.part]
    inside = whole.mul_(4).clamp_(max=1)
    _paint_vessels(scene, lung, branches.vessels, inside)
    for beads, value in ((branches.wall, hu.muscle - 150), (branches.lumen, hu.lumen + 30)):
        tube = splat_weight(scene.world(beads), axes, scene.device, scene.voxel_mm)
        scene.paint(lung.part, tube.mul_(inside), value, Tissue.BRONCHUS)
    lung.bronchi = tube


def _paint_vessels(scene: Scene, lung: Lung, vessels: Beads, inside: Tensor) -> None:
    """Thin vessels with half of the enhancement, wider ones with more, those as wide as the hilum's with all of it."""
    enhancement = scene.patient.hounsfield.pulmonary_blood - PLAIN_BLOOD
    axes = scene.axes[lung.part]
    thin = vessels.radii <= THIN_MM
    tube = splat_weight(scene.world(vessels.where(thin)), axes, scene.device, scene.voxel_mm)
    scene.paint(lung.part, tube.mul_(inside), PLAIN_BLOOD + 0.5 * enhancement, Tissue.LUNG_VESSEL)
    wide = vessels.where(~thin)
    share = (0.5 * wide.radii / THIN_MM).clamp(max=1)
    world = scene.world(wide)
    tube = splat_weight(world, axes, scene.device, scene.voxel_mm)
    blood = splat_weight(world, axes, scene.device, scene.voxel_mm, share).div_(tube.clamp(min=1e-6))
    lung.vessels, lung.blood = tube.mul_(inside), blood.mul_(enhancement).add_(PLAIN_BLOOD)
    scene.paint(lung.part, lung.vessels, lung.blood, Tissue.LUNG_VESSEL)


def paint_central(scene: Scene) -> None:
    """Vessels of the hila, then trachea, main and lobar bronchi, a thin wall and air: over everything else."""
    hu = scene.patient.hounsfield
    for side in (0, 1):
        if scene.patient.findings.missing[side]:
            continue
        scene.tubes(anatomy.hilar_vessels(scene.patient, side), hu.pulmonary_blood, Tissue.BLOOD)
        lobar = anatomy.lobar_bronchi(scene.patient, side)
        scene.tubes(lobar.grown(1.0), hu.muscle - 40, Tissue.BRONCHUS)
        scene.tubes(lobar, hu.lumen + 10, Tissue.BRONCHUS)
    beads = anatomy.airways(scene.patient)
    scene.tubes(beads.grown(scene.patient.chest.airway_wall), hu.muscle - 20, Tissue.AIRWAY_WALL)
    scene.tubes(beads, hu.lumen, Tissue.AIRWAY)
