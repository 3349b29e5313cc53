"""Scans saved as a window shows them: what was cut off comes back as lung inside the body and as air outside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cascadeseg.cascade import windowed
from cascadeseg.cascade.windowed import restored
from cascadeseg.formats import Scan, scan_of
from cascadeseg.geometry import Box, Grid
from tests.formats.volumes import ct_values

SHAPE = (64, 64, 40)
GRID = Grid.axis_aligned(SHAPE, (4, 4, 4))
TISSUE_WINDOW = (-160, 240)
AIR_WINDOW = (-600, 200)


def body() -> np.ndarray:
    """(X, Y, Z) HU: two lungs in muscle in fat, in air, and some noise."""
    return ct_values(SHAPE)


def seen(values: np.ndarray, low: float, high: float) -> Scan:
    return restored(scan_of(values.clip(low, high), GRID.affine))


def where_right(values: np.ndarray, scan: Scan) -> np.ndarray:
    """(X, Y, Z) whether a voxel is on the side of its true value: air, lung, or all that is denser."""
    true, found = (np.digitize(hu, [-925, -400]) for hu in (values, scan.hu()))
    return true == found


@pytest.mark.parametrize("window", [TISSUE_WINDOW, AIR_WINDOW])
def test_lung_and_air_come_back(window):
    values = body()
    scan = seen(values, *window)
    assert where_right(values, scan).mean() > 0.93  # all but surfaces, which are a large part of so few voxels
    dense = values >= window[0] + 1
    assert np.array_equal(scan.hu()[dense], values[dense].clip(*window))
    x, y = np.meshgrid(*[np.linspace(-1, 1, n) for n in SHAPE[:2]], indexing="ij")
    assert (scan.hu()[np.hypot(np.abs(x) - 0.4, y) < 0.22] == -850).all()
    assert (scan.hu()[np.hypot(x, y) > 1.05] == -1000).all()


def test_a_scan_with_all_its_values_is_left_alone():
    scan = scan_of(body(), GRID.affine)
    assert restored(scan) is scan


def test_gas_below_the_lungs_comes_back_as_air():
    values = body()
    values[10:54, 20:44, :12] = 40
    values[30:38, 30:38, 3:8] = -1000
    scan = seen(values, *TISSUE_WINDOW)
    assert (scan.hu()[32:36, 32:36, 4:7] == -1000).all()
    assert (scan.hu()[20, 32, 16:38] == -850).all()
    upside_down = seen(values[..., ::-1], *TISSUE_WINDOW)
    assert (upside_down.hu()[32:36, 32:36, 33:36] == -850).all(), "above the lungs there is no bowel"


def test_fat_that_noise_takes_below_the_window_stays_fat():
    values = body() + np.random.default_rng(0).normal(0, 50, SHAPE)
    x, y = np.meshgrid(*[np.linspace(-1, 1, n) for n in SHAPE[:2]], indexing="ij")
    fat = (np.hypot(x, y) > 0.87) & (np.hypot(x, y) < 0.9)
    assert (values[fat] < -135).mean() > 0.2
    assert (seen(values, -135, 215).hu()[fat] < -400).mean() < 0.01


def test_lungs_that_are_cut_by_the_side_of_the_scan_come_back():
    values, box = body(), Box((0, 0, 0), (24, 64, 40))
    cut = Scan(values[box.slices].clip(*TISSUE_WINDOW), GRID.cropped(box), floor_hu=-160.0)
    assert (restored(cut).hu()[-3:, 28:36] == -850).all()


@pytest.mark.parametrize("shape", [(64, 64, 2), (2, 64, 40), (64, 2, 2)])
def test_very_few_slices(shape):
    values = body()[: shape[0], : shape[1], : shape[2]].clip(*TISSUE_WINDOW)
    spacing_mm = [2.0 if n == 2 else 4.0 for n in shape]
    scan = Scan(values, Grid.axis_aligned(shape, spacing_mm), floor_hu=-160.0)
    assert restored(scan).voxels.shape == shape


@pytest.mark.parametrize("layers", [1, 7, 64])
def test_slabs_do_not_show(monkeypatch, layers):
    whole = seen(body(), *TISSUE_WINDOW)
    monkeypatch.setattr(windowed, "LAYERS", layers)
    assert np.array_equal(seen(body(), *TISSUE_WINDOW).voxels, whole.voxels)


def test_any_type_and_direction_of_voxels():
    whole = seen(body(), *TISSUE_WINDOW)
    stored = (body().clip(*TISSUE_WINDOW) + 1024).astype(np.uint16)
    affine = GRID.affine @ np.diag([1, 1, -1, 1])
    scan = Scan(stored[..., ::-1], Grid(SHAPE, affine), intercept=-1024.0, floor_hu=-160.0)
    assert np.array_equal(restored(scan.canonical()).voxels, whole.voxels)
    floats = replace(scan, voxels=scan.voxels.astype(np.float32))
    assert np.array_equal(restored(floats.canonical()).voxels, whole.voxels)
