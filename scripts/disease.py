"""Disease painted into the lungs of real scans, so that its truth is known, and what changes a scan's voxels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cc3d
import numpy as np
import SimpleITK

from cascadeseg.formats import Scan
from cascadeseg.formats.doctor import audit
from cascadeseg.geometry import Box, Grid
from cascadeseg.labels import LUNGS

DENSE_HU, FLUID_HU, DESTROYED_HU, FREE_AIR_HU, GRAIN_HU = 40.0, 10.0, -985.0, -1000.0, 15.0
"""Of disease painted into real lungs; the grain is the standard deviation of its noise."""
BRIGHTER, BLOOD_HU, VESSELS = 0.25, 50.0, 0.998
"""How much of what contrast medium adds to the HU of blood, as the lungs' widest vessels hold it, dense lung gets."""
BRONCHUS_HU = 60.0
"""Darker than lung by this: the air of bronchi."""
SQUEEZED_MM, SQUEEZED_EDGE_MM = 15.0, 1.5
"""How far lung beside fluid is without air, on average, and how soft its edge is."""
HALF_AIR_HU, SOME_AIR_HU = -600.0, -30.0
"""Below which a voxel is lung, and no vessel; and holds some of the lung's air, at its border."""
RECESS_MM, BORDER_MM = 40.0, 2.0
"""How far lung with air may go on below its reference, as contours end flat above recesses, and some of it beside."""
POCKET_MM, POCKET_ML, POCKET_HU = 8.0, 15.0, -300.0
"""How far from it pockets of lung lie that contours leave out, how large (airways are larger), how dark."""
EDGE = 0.15
"""How soft the edges of disease are, in standard deviations of the noise that it follows."""

Labels = np.ndarray[Any, Any]
Case = tuple[Scan, Labels]


# ------------------------------------------------------------------------------------ disease


def painted(scan: Scan, labels: Labels, disease: Callable[..., Case], share: float) -> Case:
    """Disease in a share of the lungs; of a scan without them there is no such case."""
    return disease(scan, labels, share) if lungs_of(labels).any() else nothing_of(scan, labels)


def consolidated(scan: Scan, labels: Labels, share: float) -> Case:
    """Lung without air, in patches, most of it low and at the back."""
    lung = lungs_of(labels)
    y, z = (along(lung, axis) for axis in (1, 2))
    weight = where_most(patches(scan, 14) - 1.5 * (y[:, None] + z), lung, share)
    return changed(scan, without_air(scan, lung, weight)), labels


def emphysematous(scan: Scan, labels: Labels, share: float) -> Case:
    """Lung destroyed, in spots, most of it at the top; what is not air there, as vessels, stays."""
    hu, lung = scan.hu(), lungs_of(labels)
    weight = where_most(patches(scan, 4) + along(lung, 2), lung, share) * (lung & (hu < HALF_AIR_HU))
    return changed(scan, hu + weight * (grained(scan, DESTROYED_HU) - hu)), labels


def effused(scan: Scan, labels: Labels, share: float, squeezed_mm: float = 0) -> Case:
    """Fluid in place of the lowest part of each lung of a patient who lies on the back: no lung any more.

    Lung that it squeezes is lung still: a layer beside it, of uneven depth, without air.
    """
    hu, lung = scan.hu(), lungs_of(labels)
    fluid = beyond_a_level(scan, labels, share, up=-1.0)
    if squeezed_mm:
        image = image_of(scan, fluid.astype(np.uint8))
        away = array_of(SimpleITK.SignedMaurerDistanceMap(image, squaredDistance=False, useImageSpacing=True))
        inside = (squeezed_mm * (1 + 0.3 * patches(scan, 20)) - away) / SQUEEZED_EDGE_MM
        hu = without_air(scan, lung, risen(inside))
    return changed(scan, np.where(fluid, grained(scan, FLUID_HU), hu)), np.where(fluid & lung, 0, labels)


def free_air(scan: Scan, labels: Labels, share: float) -> Case:
    """Air in place of the highest part of each lung, as in a pneumothorax: no lung any more."""
    air = beyond_a_level(scan, labels, share, up=1.0) & lungs_of(labels)
    return changed(scan, np.where(air, grained(scan, FREE_AIR_HU), scan.hu())), np.where(air, 0, labels)


def without_air(scan: Scan, lung: Labels, weight: Labels) -> Labels:
    """HU of the scan whose lung lost its air where a weight is 1.

    Vessels stand out of it, bronchi keep their air, and contrast medium brightens it.
    """
    hu = scan.hu()
    smooth = array_of(SimpleITK.SmoothingRecursiveGaussian(image_of(scan, hu), 1.0))
    weight = weight * open_to(scan, lung) * (smooth > np.median(hu[lung]) - BRONCHUS_HU)
    dense_hu = DENSE_HU + BRIGHTER * max(0.0, float(np.quantile(hu[lung], VESSELS)) - BLOOD_HU)
    solid: Labels = hu + weight * (np.maximum(grained(scan, dense_hu), hu) - hu)
    return solid


def along(lung: Labels, axis: int) -> Labels:
    """By index: how far it lies along the lungs' extent, from 0 to 1."""
    place = np.flatnonzero(lung.any(tuple({0, 1, 2} - {axis})))
    part: Labels = (np.arange(lung.shape[axis]) - place[0]) / max(1, place[-1] - place[0])
    return part.clip(0, 1)


def where_most(field: Labels, lung: Labels, share: float) -> Labels:
    """From 0 to 1, with a soft edge: where a field is so high that a share of the lungs is."""
    return risen((field - np.quantile(field[lung], 1 - share)) / EDGE)


def risen(field: Labels) -> Labels:
    """A step at 0, with a soft edge."""
    step: Labels = 1 / (1 + np.exp(-field.clip(-50, 50)))
    return step


def beyond_a_level(scan: Scan, labels: Labels, share: float, up: float) -> Labels:
    """What lies above (``up`` = -1: below) an uneven level that cuts a share off each lung, border voxels with it."""
    height = up * along(lungs_of(labels), 1)[:, None] + 0.03 * patches(scan, 20)
    beyond = np.zeros(labels.shape, bool)
    for lung in LUNGS:
        if (mine := labels == lung.value).any():
            beyond |= open_to(scan, mine) & (height > np.quantile(height[mine], 1 - share))
    return beyond


def patches(scan: Scan, sd_mm: float) -> Labels:
    """Smooth noise of standard deviation 1."""
    noise = np.random.default_rng(1).normal(size=scan.grid.shape).astype(np.float32)
    smooth = array_of(SimpleITK.SmoothingRecursiveGaussian(image_of(scan, noise), sd_mm))
    centred: Labels = (smooth - smooth.mean()) / smooth.std()
    return centred


def grained(scan: Scan, hu: float) -> Labels:
    """A tissue, with noise."""
    grain: Labels = np.random.default_rng(2).normal(hu, GRAIN_HU, scan.grid.shape).astype(np.float32)
    return grain


def open_to(scan: Scan, lung: Labels) -> Labels:
    """Lung, what of it contours leave out (recesses, pockets beside it), and of its border what is not soft tissue.

    A line of air around fluid or dense lung, or specks of it below, would tell that lung is there.
    """
    hu, whole = scan.hu(), lung.copy()
    for _ in range(round(RECESS_MM / scan.grid.spacing_mm[2])):
        whole[..., :-1] |= (hu[..., :-1] < HALF_AIR_HU) & whole[..., 1:]
    air = (hu < POCKET_HU) & ~whole
    large = cc3d.dust(air, threshold=round(POCKET_ML / scan.grid.voxel_volume_ml), connectivity=6)
    whole |= air & ~large & grown(scan, whole, POCKET_MM)
    return whole | (grown(scan, whole, BORDER_MM) & (hu < SOME_AIR_HU))


def grown(scan: Scan, mask: Labels, by_mm: float) -> Labels:
    """The mask and what lies within this of it, a voxel along each axis at least."""
    radius = [max(1, round(by_mm / mm)) for mm in scan.grid.spacing_mm]
    wider: Labels = array_of(SimpleITK.BinaryDilate(image_of(scan, mask.astype(np.uint8)), radius)) > 0
    return wider


PAINTED: dict[str, Callable[[Scan, Labels], Case]] = {
    "20 % of the lungs consolidated": partial(painted, disease=consolidated, share=0.2),
    "40 % of the lungs consolidated": partial(painted, disease=consolidated, share=0.4),
    "60 % of the lungs consolidated": partial(painted, disease=consolidated, share=0.6),
    "fluid in 15 % of each lung": partial(painted, disease=effused, share=0.15),
    "fluid in 30 % of each lung": partial(painted, disease=effused, share=0.3),
    "fluid in 30 % of each lung, lung beside it squeezed": partial(
        painted, disease=partial(effused, squeezed_mm=SQUEEZED_MM), share=0.3
    ),
    "free air in 15 % of each lung": partial(painted, disease=free_air, share=0.15),
    "emphysema in a third of the lungs": partial(painted, disease=emphysematous, share=1 / 3),
}


# ------------------------------------------------------------------------------------ scans and arrays


def changed(scan: Scan, hu: Labels, spacing_mm: Any = None) -> Scan:
    """The scan with other voxels, whole numbers as scanners store them, and what the doctor says of those."""
    voxels = np.ascontiguousarray(hu.round().clip(-32768, 32767).astype(np.int16))
    grid = Grid.axis_aligned(voxels.shape, scan.grid.spacing_mm if spacing_mm is None else spacing_mm)
    return audit(Scan(voxels, grid, source=scan.source))


def nothing_of(scan: Scan, labels: Labels) -> Case:
    """No voxels: of this scan there is no such case."""
    none = Box.whole((0, 0, 0))
    return changed(scan, scan.hu(none)), labels[none.slices]


def lungs_of(labels: Labels) -> Labels:
    return np.isin(labels, [lung.value for lung in LUNGS])


def image_of(scan: Scan, array: Labels) -> Any:
    """(X, Y, Z) as ITK's image."""
    image = SimpleITK.GetImageFromArray(array.transpose(2, 1, 0))
    image.SetSpacing([float(mm) for mm in scan.grid.spacing_mm])
    return image


def array_of(image: Any) -> Labels:
    """ITK's image as (X, Y, Z)."""
    array: Labels = SimpleITK.GetArrayFromImage(image).transpose(2, 1, 0)
    return array
