"""The input doctor: are these values HU, and is the volume one that lungs can be found in?

It looks at about a hundred thousand voxels on a coarse lattice (at all of them only where they are floating-point
numbers, for NaN and values that no CT has, which a lattice would miss), says what is odd in a line each, and repairs
what has one cause only: a known offset is undone in the intercept, signed values read as unsigned are read again, and
greys that show lungs, or values with air and tissue where HU have neither, become HU by slope and intercept. Where a
window cut off low values it notes the HU, for the cascade to put something in their place. It changes no voxel and
refuses nothing.

What makes values HU: a CT of any part of the body holds soft tissue near +40, fat near -100 and, outside the body or
in lungs and bowel, air near -1000. So the rules look for where the low values end and where the bulk lies, never
for lungs: a leg, a head, an abdomen or a crop of lung passes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid

LATTICE = 48
"""Voxels looked at along each axis, about."""
THICK_MM = 8.0
FEW_SLICES = 10
SMALLEST_MM = 100.0
"""Of the field of view of a chest, of a newborn as well, along its longest side."""
FINEST_MM = 0.3
"""Voxels of a chest are no finer; a small field of view of coarser ones is a cut-out of a scan."""
PADDING_BELOW_HU = -1100.0
PADDING_SHARE = 0.005
PADDING_APART_HU = 300.0
LUNGS_SEEN_HU = -900.0
"""Of what a window cuts off above it some is lung."""
FAT_HU = -120.0
"""Where fat, too, is cut off nobody can tell it from lung."""
GREYS = 256
NARROW = 100.0
"""HU reach further."""
AIR_HU, MEDIAN_TISSUE_HU = -1000.0, -20.0
"""Air is at the one, the median of fat, muscle and bone near the other."""
AIR_MAY_BE_HU = (-1045.0, -680.0)
"""The commonest low value of a CT: air, or in a part of a lung without any air beside it, lung."""
TISSUE_MAY_BE_HU = (-160.0, 460.0)
"""The median of a CT's higher values: from fat to what holds little beside contrast medium and bone."""
MOSTLY = 0.9
"""Of the values of most CTs, so many are either: these need no closer look."""
ALMOST = 0.12
"""Of the way from air to tissue, by which tissue may differ where the scale is right."""
LUNG_SHARE = 0.15
"""Of what is not tissue, at least so much is not the blackest black where a window shows lungs."""
LUNG_DEPTH = 0.13
"""Of the way from black to tissue, where lungs lie; in a window of soft tissue fat lies higher."""
MOST_HU = 8000.0
"""Beyond what metal has."""
CANNOT_BE_HU = 100_000.0
"""No CT has as much in a single voxel, whatever its scanner makes of metal."""
LOST_SIGN = 2**16 - 5000
"""From here on 16 bits may be a negative value whose sign was lost."""
SIGNED_AGAIN = "negative values were stored as unsigned ones; they are read as signed"
UNSURE = "the mask may be wrong"

Values = npt.NDArray[np.float32]


def audit(scan: Scan) -> Scan:
    """The scan with a warning for everything odd about its values and spacing, and a wrong offset or scale undone."""
    lost, highest = _looked_through(scan)
    scan = _signed(scan.warned(*_spacing_oddities(scan.grid), *_not_finite(lost, scan.voxels.size)))
    everything = _lattice(scan)
    total = everything.size
    if lost == scan.voxels.size:
        return scan
    if not total:
        return scan.warned(f"hardly a voxel holds a number: {UNSURE}")
    highest = max(highest, float(everything.max()))
    values, padding = _without_padding(everything)
    slope, intercept, odd, doubt = 1.0, float(-offset_hu(values)), [], ""
    if scale := hu_of_air_and_tissue(values + np.float32(intercept)):
        slope, intercept = scale[0], scale[0] * intercept + scale[1]
        span = f"{values.min():.4g} to {values.max():.4g}"
        odd.append(f"values from {span} were made HU by what looks like a CT's air and tissue: {UNSURE}")
    elif intercept:
        odd.append(f"the values are HU {'plus' if intercept < 0 else 'minus'} {abs(intercept):g}; this was undone")
    elif doubt := not_hu(values):
        odd.append(f"{doubt}: {UNSURE}")
    elif (floor := cut_off_hu(everything[everything >= PADDING_BELOW_HU])) is not None:
        cut_off = f"all values below {floor:.4g} HU are cut off (a windowed scan?)"
        if floor < FAT_HU:
            cut_off += ", those in the body are read as lung"
            scan = replace(scan, floor_hu=floor)
        odd.append(f"{cut_off}: {UNSURE}")
    scan = replace(scan, slope=slope * scan.slope, intercept=slope * scan.intercept + intercept)
    padded = [
        f"padding of {hu:.5g} HU ({_per_cent(count, total)} of the volume) is read as air"
        for hu, count in ((slope * level + intercept, count) for level, count in padding)
        if hu < PADDING_BELOW_HU
    ]
    highest = slope * highest + intercept
    if highest > CANNOT_BE_HU and not doubt:
        odd.append(f"values up to {highest:.4g} HU, which no CT has: {UNSURE}")
    return scan.warned(*padded, *odd)


def offset_hu(values: Values) -> int:
    """By how much values are too high (+1024 or +1000) or too low (-1024) to be HU; 0 if they are not.

    Scanners store HU + 1024, some archives HU + 1000, and a rescale that was lost or done twice shows as one of
    them: air, the lowest values, then lies at 0 or at -2000, and soft tissue at 1000 or at -1000.

    Args:
        values: what should be HU, without padding.
    """
    tissue_at_1000 = _share(values, 880, 1150)
    if (
        _share(values, -np.inf, -200) < 0.001
        and tissue_at_1000 > 0.05
        and tissue_at_1000 > 2 * _share(values, 400, 800)
        and _share(values, -100, 400) > 0.02
    ):
        return 1000 if _is_hu_plus_1000(values) else 1024
    tissue_at_minus_1000 = _share(values, -1150, -850)
    twice = _share(values, -500, np.inf) < 0.1 and tissue_at_minus_1000 > 0.1
    return -1024 if twice and _share(values, -np.inf, -1300) > 0.01 else 0


def hu_of_air_and_tissue(values: Values) -> tuple[float, float] | None:
    """Slope and intercept that make HU of values that show lungs but are not HU.

    Such are a picture's greys, HU scaled to 0..1, to 16 bits or otherwise, and HU with a wrong slope or intercept.
    Otsu's threshold (doi 10.1109/TSMC.1979.4310076) parts air and lungs from tissue. Where an intercept or a
    slope alone puts both in their place it is that.

    Args:
        values: what should be HU, without padding.

    Returns:
        None where values may be HU, or where they do not show lungs.
    """
    are_greys = _are_greys(values)
    may_be_hu = _share(values, *AIR_MAY_BE_HU) + _share(values, *TISSUE_MAY_BE_HU) > MOSTLY
    if _flat(values) or (may_be_hu and not are_greys):
        return None
    black = float(values.min())
    values, _ = _without_padding(values, apart=0.1 * (float(np.median(_halves(values)[1])) - black))
    if _flat(values):
        return None
    low, high = _halves(values)
    tissue, black = float(np.median(high)), float(low.min())
    air = _commonest(low, 0.04 * (tissue - float(np.median(low))))
    seen = low[low > black + 0.005 * (tissue - black)]
    if len(seen) < LUNG_SHARE * len(low) or np.median(seen) > black + LUNG_DEPTH * (tissue - black):
        return None
    in_place = AIR_MAY_BE_HU[0] <= air <= AIR_MAY_BE_HU[1] and TISSUE_MAY_BE_HU[0] <= tissue <= TISSUE_MAY_BE_HU[1]
    if in_place and not are_greys:
        return None
    depth = (tissue - air) / (MEDIAN_TISSUE_HU - AIR_HU)
    if abs(depth - 1) < ALMOST:
        return 1.0, AIR_HU - air
    slope = AIR_HU / air if air < 0 else 0.0
    if abs(slope * depth - 1) < ALMOST:
        return slope, 0.0
    return 1 / depth, AIR_HU - air / depth


def not_hu(values: Values) -> str:
    """Why values cannot be HU, or an empty string.

    Args:
        values: what should be HU, without padding.
    """
    low, high = float(values.min()), float(values.max())
    span = f"{low:.4g} to {high:.4g}"
    if low == high:
        return f"every voxel is {low:.4g}, so there is nothing in it"
    if _are_greys(values):
        return f"values from {span} {'cannot be HU' if high - low < NARROW else 'look like an 8-bit picture, not HU'}"
    bright = _share(values, 700, 1100)
    inverted = bright > 0.1 and bright > 10 * _share(values, -1100, -800) and _share(values, 1200, np.inf) < 0.0005
    if inverted and _share(values, -np.inf, -150) > 0.002:
        return "the values look inverted (air bright, bone dark)"
    if _share(values, -MOST_HU, MOST_HU) < 0.99:
        return f"values from {span} cannot be HU"
    if _share(values, -np.inf, -20) < 0.001:
        return f"values from {span} hold neither air nor fat, so they can hardly be HU"
    return ""


def cut_off_hu(values: Values) -> float | None:
    """The HU at which a window cut off all that was lower, lungs for the most part; None where nothing was.

    Args:
        values: HU, all but those lower than air.
    """
    low = float(values.min(initial=np.inf))
    return low if low > LUNGS_SEEN_HU and _share(values, low, low + 0.5) > 0.05 else None


def _spacing_oddities(grid: Grid) -> list[str]:
    """A field of view that no chest has, thick slices and very few of them."""
    odd = []
    extent = [n * mm for n, mm in zip(grid.shape, grid.spacing_mm, strict=True)]
    if max(extent) < SMALLEST_MM and min(grid.spacing_mm) < FINEST_MM:
        odd.append(f"a field of view of {' x '.join(f'{mm:.3g}' for mm in extent)} mm: is its spacing in cm?")
    if (thickest := max(grid.spacing_mm)) > THICK_MM:
        odd.append(f"voxels of {thickest:.3g} mm are too coarse for a precise mask")
    if (fewest := min(grid.shape)) < FEW_SLICES:
        odd.append(f"only {fewest} slices along one axis")
    return odd


def _looked_through(scan: Scan) -> tuple[int, float]:
    """How many voxels are NaN or infinite, and the highest HU of the others; all are looked at, a slab at a time.

    Of whole numbers, which are all finite, none is looked at, and -inf is the highest.
    """
    lost, highest = 0, -np.inf
    for slab in np.moveaxis(scan.voxels, 2, 0) if scan.voxels.dtype.kind == "f" else ():
        ends = float(slab.min()), float(slab.max())
        if not np.isfinite(ends).all():
            finite = slab[np.isfinite(slab)]
            lost += slab.size - finite.size
            if not finite.size:
                continue
            ends = float(finite.min()), float(finite.max())
        highest = max(highest, *(scan.slope * end + scan.intercept for end in ends))
    return lost, highest


def _not_finite(lost: int, total: int) -> list[str]:
    """A line about NaN and infinite voxels."""
    if lost == total:
        return [f"no voxel is a number, so there is nothing in it: {UNSURE}"]
    share = _per_cent(lost, total)
    return [f"{lost:,} voxels ({share} of all) are not numbers and are read as air"] if lost else []


def _per_cent(count: int, total: int) -> str:
    share = 100 * count / total
    if share < 0.01:
        return "under 0.01 %"
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


def _signed(scan: Scan) -> Scan:
    """Undoes a signed type that was lost."""
    if not is_sign_lost(_on_lattice(scan), scan.slope, scan.intercept):
        return scan
    return replace(scan, voxels=scan.voxels.view(np.int16)).warned(SIGNED_AGAIN)


def is_sign_lost(stored: npt.NDArray[Any], slope: float, intercept: float) -> bool:
    """Whether 16 bits are signed, -1000 stored as 64536; where a slope makes HU of such values they are not."""
    if stored.dtype != np.uint16 or abs(slope * LOST_SIGN + intercept) < MOST_HU:
        return False
    return _share(stored.astype(np.float32), LOST_SIGN, np.inf) >= 0.005


def _lattice(scan: Scan) -> Values:
    """(n,) finite HU of a coarse lattice of voxels."""
    values = _on_lattice(scan).astype(np.float32)
    values = values[np.isfinite(values)]
    return values * np.float32(scan.slope) + np.float32(scan.intercept)


def _on_lattice(scan: Scan) -> npt.NDArray[Any]:
    """(n,) stored values of a coarse lattice of voxels."""
    steps = [max(1, n // LATTICE) for n in scan.voxels.shape]
    return scan.voxels[:: steps[0], :: steps[1], :: steps[2]].ravel()


def _are_greys(values: Values) -> bool:
    """Whether values are those of an 8-bit picture, or too close together to be HU."""
    low, high = float(values.min()), float(values.max())
    flat = low > -1100 and high < -500  # a crop of nothing but air or lung
    return (low >= 0 and high < GREYS) or (high - low < NARROW and not flat)


def _flat(values: Values) -> bool:
    return bool(values.min() == values.max())


def _halves(values: Values) -> tuple[Values, Values]:
    """The values below Otsu's threshold and the others."""
    import SimpleITK  # here alone: it takes a moment

    otsu = SimpleITK.OtsuThresholdImageFilter()
    otsu.SetNumberOfHistogramBins(GREYS)
    otsu.Execute(SimpleITK.GetImageFromArray(values[None]))
    above = values > otsu.GetThreshold()
    return values[~above], values[above]


def _without_padding(values: Values, apart: float = PADDING_APART_HU) -> tuple[Values, list[tuple[float, int]]]:
    """The values without those that fill the corners outside the reconstruction, and (level, count) of these.

    Padding is one low value, far below any other.
    """
    padding: list[tuple[float, int]] = []
    total = values.size
    while (low := float(values.min())) < float(values.max()):
        count = int((values == low).sum())
        above = int((values < low + apart).sum()) - count
        if count < PADDING_SHARE * total or above > count / 10:
            break
        values = values[values > low]
        padding.append((low, count))
    return values, padding


def _is_hu_plus_1000(values: Values) -> bool:
    """Whether values that are HU + 1000 or HU + 1024 are the former, which is rarer: both peaks have to say so.

    Air is at -1000 HU, but may be clipped (so the lowest value does not count); fat is at -115 to -90 HU.
    """
    air = _commonest(values[(values > values.min()) & (values > -60) & (values < 100)], 10)
    fat = _commonest(values[(values > 840) & (values < 990)], 10)
    return air < 12 and fat < 912


def _commonest(values: Values, width: float) -> float:
    """The median of the values that lie closest together: within ``width`` of the fullest stretch as wide as that.

    NaN where there are no values.
    """
    if not values.size:
        return float("nan")
    bins = int(np.clip(4 * (values.max() - values.min()) / width, 1, 10_000))
    counts, edges = np.histogram(values, bins)
    fullest = float(edges[int(np.convolve(counts, np.ones(4), mode="same").argmax())])
    return float(np.median(values[np.abs(values - fullest) <= width]))


def _share(values: Values, low: float, high: float) -> float:
    """The share of values from ``low`` to ``high``."""
    return float(((values >= low) & (values <= high)).mean()) if values.size else 0.0
