"""From a file's shape and affine to a `Grid`: refuses what cannot be, repairs nearly orthonormal directions.

Rule: two axes may meet at 90 degrees give or take `MAX_SHEAR_DEGREES`. Within that the closest orthonormal
directions are taken (the polar factor of the directions, by SVD), about the centre of the volume, and a repair
above `SILENT_SHEAR_DEGREES` is told. A header that is further off is sheared, and refused: on a grid of right
angles the anatomy would lie elsewhere than the header says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from cascadeseg.errors import ScanError
from cascadeseg.geometry import Affine, Grid

MAX_SHEAR_DEGREES = 1.0
SILENT_SHEAR_DEGREES = 0.01
"""Rounding of direction cosines to a few digits: not worth a word."""
SPACING_RANGE_MM = (0.01, 50.0)
LONGEST_MM = 2500.0
"""No field of view is as long, of the tallest patient from head to toe."""
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
MILLIMETRES = ("", "?", "mm", "millimeter", "millimeters", "millimetre", "millimetres")
TIMES = ("s", "sec", "second", "seconds", "ms", "msec")
"""What the fourth axis may be in."""

NO_PLACE = "the header does not say how the axes lie: left, back, head was assumed; check the sides of the mask"
"""Of MetaImage and NRRD, in ITK's world."""
NO_SPACING = (
    "the header does not say how far apart the voxels are: 1 mm was assumed on each axis that it leaves out; "
    "check the spacing, every volume in the report comes of it"
)

WHOLE_SERIES = "give the whole series or stack, not one slice of it"
"""What to do about a picture."""


@dataclass(frozen=True)
class ItkGeometry:
    """Where an ITK image lies, in its own words (LPS+ mm), so that it can be written back to the last bit."""

    spacing: tuple[float, ...]
    origin: tuple[float, ...]
    direction: tuple[float, ...]

    @property
    def affine(self) -> Affine:
        """(4, 4) voxel index to RAS+ mm."""
        affine = np.eye(4)
        affine[:3, :3] = np.reshape(self.direction, (3, 3)) * np.asarray(self.spacing)
        affine[:3, 3] = self.origin
        return np.asarray(LPS_TO_RAS @ affine)

    @staticmethod
    def of_grid(grid: Grid) -> ItkGeometry:
        affine = LPS_TO_RAS @ grid.affine
        direction = (affine[:3, :3] / np.asarray(grid.spacing_mm)).ravel()
        return ItkGeometry(grid.spacing_mm, tuple(map(float, affine[:3, 3])), tuple(map(float, direction)))

    @staticmethod
    def of_image(image: Any) -> ItkGeometry:
        """Of a SimpleITK image or image reader, its first three axes."""
        n = image.GetDimension()
        matrix = np.reshape(image.GetDirection(), (n, n))[:3, :3]
        return ItkGeometry(image.GetSpacing()[:3], image.GetOrigin()[:3], tuple(map(float, matrix.ravel())))


def volume_shape(dims: tuple[int, ...], volume: int | None, where: object) -> tuple[tuple[int, int, int], int]:
    """The three axes of the wanted volume, and how many volumes lie before it in the file.

    Trailing axes of length 1 do not count.

    Raises:
        ScanError: fewer or more than three axes, an empty axis, or a volume that is not there.
    """
    while len(dims) > 3 and dims[-1] == 1:
        dims = dims[:-1]
    named = f"{len(dims)} dimensions ({', '.join(map(str, dims))})"
    if any(n < 1 for n in dims):
        raise ScanError(where, named, "one 3D volume", "the header is damaged")
    if len(dims) < 3:
        raise ScanError(where, named, "one 3D volume", WHOLE_SERIES)
    x, y, z, *rest = dims
    count = prod(rest)
    if volume is None and count > 1:
        remedy = "choose one with --volume N (infer, check), or save it as a 3D file"
        raise ScanError(where, named, "one 3D volume", remedy)
    if volume is not None and not 0 <= volume < count:
        raise ScanError(where, f"no volume {volume}", f"0 to {count - 1}" if count > 1 else "0, the only one")
    return (x, y, z), volume or 0


def spacing_of(affine: Affine) -> Affine:
    """(3,) mm: the lengths of the affine's columns."""
    lengths: Affine = np.linalg.norm(np.asarray(affine, dtype=np.float64)[:3, :3], axis=0)
    return lengths


def shear_degrees(affine: Affine) -> float:
    """How far the two axes furthest from square are off 90 degrees; infinite for a degenerate affine."""
    with np.errstate(all="ignore"):
        directions = affine[:3, :3] / spacing_of(affine)
        if not np.isfinite(directions).all():
            return float("inf")
        cosines = np.abs(directions.T @ directions - np.eye(3)).max()
    return float(np.degrees(np.arcsin(min(cosines, 1.0))))


def checked_spacing(spacing_mm: Sequence[float] | npt.NDArray[np.float64], where: object) -> None:
    """Raises ScanError for a spacing that is zero, negative, not a number or beyond `SPACING_RANGE_MM`."""
    low, high = SPACING_RANGE_MM
    if not all(np.isfinite(s) and low <= s <= high for s in spacing_mm):
        found = f"voxel spacing ({', '.join(f'{float(s):g}' for s in spacing_mm)}) mm"
        raise ScanError(where, found, f"{low:g} to {high:g} mm on each axis", "repair the header's spacing")


def refuse_other_units(units: Sequence[str], where: object) -> None:
    """Raises ScanError for a header whose lengths are in another unit than millimetres."""
    other = [unit for unit in units if unit.lower() not in (*MILLIMETRES, *TIMES)]
    if other:
        raise ScanError(where, f'lengths in "{other[0]}"', "mm", "write the file again in millimetres")


def checked_grid(shape: Sequence[int], affine: Affine, where: object) -> tuple[Grid, tuple[str, ...]]:
    """The grid of a volume, with orthonormal directions, and what had to be repaired.

    Args:
        shape: (X, Y, Z).
        affine: (4, 4) voxel index to RAS+ mm, as the file has it.
        where: the file, for messages.

    Raises:
        ScanError: a spacing that cannot be, alone or of so many voxels, an origin that is not a number, or sheared
            directions.
    """
    affine = np.asarray(affine, dtype=np.float64)
    spacing = spacing_of(affine)
    checked_spacing(spacing, where)
    if (longest := float((np.asarray(shape) * spacing).max())) > LONGEST_MM:
        found = f"voxels of {' x '.join(f'{mm:.3g}' for mm in spacing)} mm over {longest:,.0f} mm"
        raise ScanError(where, found, f"{LONGEST_MM:,.0f} mm at most", "repair the header's spacing")
    if not np.isfinite(affine).all():
        raise ScanError(where, "an origin that is not a number", "millimetres", "repair the header")
    shear = shear_degrees(affine)
    if shear > MAX_SHEAR_DEGREES:
        found = f"sheared axes ({shear:.2f} degrees off a right angle)"
        raise ScanError(where, found, "axes at right angles", "resample the scan onto an upright grid")
    x, y, z = map(int, shape)
    if shear < 1e-4:  # what float32 leaves of exact right angles (1e-6 radians): as good as the header itself
        return Grid((x, y, z), affine), ()
    grid = _orthonormal((x, y, z), affine)
    if shear <= SILENT_SHEAR_DEGREES:
        return grid, ()
    moved = np.abs(grid.world([0, 0, 0]) - affine[:3, 3]).max()
    said = f"axes {shear:.3f} degrees off a right angle were straightened; the corners moved by {moved:.2g} mm"
    return grid, (said,)


def _orthonormal(shape: tuple[int, int, int], affine: Affine) -> Grid:
    """The grid with the closest orthonormal directions, the same spacing and the same centre."""
    spacing = spacing_of(affine)
    u, _, vt = np.linalg.svd(affine[:3, :3] / spacing)
    middle = (np.asarray(shape) - 1) / 2
    centre = affine[:3, :3] @ middle + affine[:3, 3]
    straight = np.eye(4)
    straight[:3, :3] = (u @ vt) * spacing
    straight[:3, 3] = centre - straight[:3, :3] @ middle
    return Grid(shape, straight)
