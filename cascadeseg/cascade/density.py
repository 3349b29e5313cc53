"""How dense a lung is: what densitometry reads off the HU in its mask, vessels and disease included.

Of the HU as they are in the scan: nothing is corrected for noise, kernel, slice thickness, contrast or how deep the
patient breathed in, all of which these numbers depend on (Mascalchi 2017, doi 10.21037/jtd.2017.08.17).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cascadeseg.formats.scan import Scan, sampled_hu
from cascadeseg.geometry import Box, Mask

LOWEST_HU, HIGHEST_HU = -1100, 3071
"""What lies beyond counts as these; below there is nothing but padding."""
LOW_ATTENUATION_HU = -950


@dataclass(frozen=True)
class Density:
    """The density of one lung, or of both.

    Attributes:
        laa950_percent: low attenuation area, the share below -950 HU: emphysema where it is large (Gevenois 1995, doi
            10.1164/ajrccm.152.2.7633722).
        perc15_hu: HU that 15 % of the lung do not exceed (Parr 2006, doi 10.1136/thx.2005.054890).
        haa_percent: high attenuation area, the share of -600 to -250 HU: ground glass, reticulation (Lederer 2009, doi
            10.1164/rccm.200812-1966OC).
        hyperaerated_percent: the share below -900 HU; this one and the next three are all of the lung (Gattinoni 2001,
            doi 10.1164/ajrccm.164.9.2103121, who ends the last at 100 HU).
        normally_aerated_percent: of -900 to -500 HU.
        poorly_aerated_percent: of -500 to -100 HU.
        not_aerated_percent: of -100 HU and more.
        mass_g: of tissue, blood and fluid, where air weighs nothing and water 1 g/ml (Protti 2014, doi
            10.1186/s40635-014-0031-0).
    """

    laa950_percent: float
    perc15_hu: float
    haa_percent: float
    hyperaerated_percent: float
    normally_aerated_percent: float
    poorly_aerated_percent: float
    not_aerated_percent: float
    mass_g: float


@dataclass(frozen=True, eq=False)
class Histogram:
    """The HU in a mask, of one lung or of both.

    Attributes:
        counts: how many voxels have HU of each whole number and less than one more, from `LOWEST_HU` to `HIGHEST_HU`;
            not all of them 0.
        mean_hu: the mean HU.
        voxel_volume_ml: of a voxel.
        cut_off: whether the HU of lungs are not known: a window cut them off, or they are no HU.
    """

    counts: npt.NDArray[np.int64]
    mean_hu: float
    voxel_volume_ml: float
    cut_off: bool = False

    @property
    def volume_ml(self) -> float:
        return float(self.counts.sum()) * self.voxel_volume_ml

    @property
    def density(self) -> Density | None:
        """None where the HU of lungs are not known."""
        return None if self.cut_off else _density(self.counts, self.voxel_volume_ml)


def histogram(scan: Scan, mask: Mask, box: Box) -> Histogram:
    """The HU in a mask.

    Args:
        scan: in the orientation of the box.
        mask: (X, Y, Z) of the box; not empty.
        box: of the scan.
    """
    stored = scan.voxels[box.slices]
    counts, total, lowest = np.zeros(HIGHEST_HU - LOWEST_HU + 1, np.int64), 0.0, lowest_hu(scan)
    for z in range(mask.shape[2]):
        hu = scan.as_hu(stored[..., z][mask[..., z]])
        total += float(hu.sum(dtype=np.float64))
        lowest = min(lowest, float(hu.min(initial=np.inf)))
        whole = np.floor(hu).clip(LOWEST_HU, HIGHEST_HU).astype(np.int64) - LOWEST_HU
        counts += np.bincount(whole, minlength=len(counts))
    cut_off = scan.floor_hu is not None or lowest >= LOW_ATTENUATION_HU
    return Histogram(counts, total / float(counts.sum()), scan.grid.voxel_volume_ml, cut_off)


def lowest_hu(scan: Scan) -> float:
    """About the lowest HU of a canonical scan, without padding: in every scan there is air, unless it was cut off."""
    hu, _ = sampled_hu(scan)
    return float(hu.min(where=hu >= LOWEST_HU, initial=np.inf))


def together(histograms: Iterable[Histogram | None]) -> Histogram | None:
    """The histogram of both lungs of one scan, of the one that is there, or None."""
    there = [one for one in histograms if one]
    if not there:
        return None
    counts = np.sum([one.counts for one in there], axis=0)
    mean_hu = float(np.average([one.mean_hu for one in there], weights=[one.counts.sum() for one in there]))
    return replace(there[0], counts=counts, mean_hu=mean_hu, cut_off=any(one.cut_off for one in there))


def _density(counts: npt.NDArray[np.int64], voxel_volume_ml: float) -> Density:
    hu, total = np.arange(LOWEST_HU, HIGHEST_HU + 1), counts.sum()

    def percent(low: int, high: int) -> float:
        """Of the lung, from ``low`` to below ``high``."""
        return float(100 * counts[(hu >= low) & (hu < high)].sum() / total)

    return Density(
        laa950_percent=percent(LOWEST_HU, LOW_ATTENUATION_HU),
        perc15_hu=float(hu[np.searchsorted(counts.cumsum(), 0.15 * total)]),
        haa_percent=percent(-600, -249),
        hyperaerated_percent=percent(LOWEST_HU, -900),
        normally_aerated_percent=percent(-900, -500),
        poorly_aerated_percent=percent(-500, -100),
        not_aerated_percent=percent(-100, HIGHEST_HU + 1),
        mass_g=float((counts * (1 + hu / 1000).clip(0)).sum() * voxel_volume_ml),
    )
