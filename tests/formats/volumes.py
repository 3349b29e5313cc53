"""Tiny volumes with values like a CT's, and grids of every kind, for the tests of reading and writing."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import numpy.typing as npt

from cascadeseg.geometry import Grid

SHAPE = (12, 14, 10)
SPACING_MM = (0.75, 0.8, 2.5)
ORIGIN_MM = (-31.5, 12.25, -140.0)


def ct_values(shape: tuple[int, int, int] = SHAPE, seed: int = 0) -> npt.NDArray[np.int16]:
    """(X, Y, Z) HU: a body of muscle, fat and bone with two lungs, in air; Fortran order, as files have it."""
    rng = np.random.default_rng(seed)
    x, y, _ = np.meshgrid(*[np.linspace(-1, 1, n) for n in shape], indexing="ij")
    radius = np.hypot(x, y)
    hu = np.full(shape, -1000.0)
    hu[radius < 0.95] = -100
    hu[radius < 0.85] = 40
    hu[(np.abs(x) < 0.15) & (y < -0.5) & (radius < 0.9)] = 400
    hu[(np.hypot(np.abs(x) - 0.4, y) < 0.3)] = -850
    return np.asfortranarray(np.rint(hu + rng.normal(0, 12, shape)).clip(-1024, 3071).astype(np.int16))


def rotation(*degrees: float) -> npt.NDArray[np.float64]:
    """A rotation about x, then y, then z."""
    matrix = np.eye(3)
    for axis, angle in enumerate(np.radians(degrees)):
        turn = np.eye(3)
        i, j = (axis + 1) % 3, (axis + 2) % 3
        turn[i, i] = turn[j, j] = np.cos(angle)
        turn[j, i], turn[i, j] = np.sin(angle), -np.sin(angle)
        matrix = turn @ matrix
    return matrix


def affine_of(directions: npt.ArrayLike = ((1, 0, 0), (0, 1, 0), (0, 0, 1))) -> npt.NDArray[np.float64]:
    """The tests' spacing and origin in these directions."""
    affine = np.eye(4)
    affine[:3, :3] = np.asarray(directions, dtype=float) * SPACING_MM
    affine[:3, 3] = ORIGIN_MM
    return affine


def oblique_grid() -> Grid:
    return Grid(SHAPE, affine_of(rotation(12, -7, 20)))


ORIENTATIONS = [
    np.eye(3)[:, list(order)] * signs for order in permutations(range(3)) for signs in product((1, -1), repeat=3)
]
"""Direction matrices of all 48 ways that axes can lie."""
