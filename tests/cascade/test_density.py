from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from cascadeseg.cascade.density import Histogram, histogram, together
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid

HU = np.array([-2000, -960, -950, -949, -900, -600, -500, -250, -249, -100, 0, 3000])
"""A voxel each, at the limits and beside them."""


def lung(hu: np.ndarray, **scan: object) -> Histogram:
    """Of a lung of voxels of 8 mm3 that is in the middle of a scan of bone."""
    voxels = np.full((3, len(hu) + 2, 3), 1000, hu.dtype)
    voxels[1, 1:-1, 1] = hu
    mask = np.zeros((1, len(hu) + 2, 3), bool)
    mask[0, 1:-1, 1] = True
    whole = Scan(voxels, Grid.axis_aligned(voxels.shape, (2.0, 2.0, 2.0)), **scan)
    return histogram(whole, mask, Box((1, 0, 0), (2, len(hu) + 2, 3)))


def test_the_density_of_known_voxels():
    inside = lung(HU.astype(np.int16))
    assert inside.volume_ml == pytest.approx(0.008 * 12)
    assert inside.mean_hu == pytest.approx(HU.mean())
    assert asdict(inside.density) == pytest.approx(
        {
            "laa950_percent": 100 * 2 / 12,
            "perc15_hu": -960.0,
            "haa_percent": 100 * 3 / 12,
            "hyperaerated_percent": 100 * 4 / 12,
            "normally_aerated_percent": 100 * 2 / 12,
            "poorly_aerated_percent": 100 * 3 / 12,
            "not_aerated_percent": 100 * 3 / 12,
            "mass_g": 0.008 * (0.04 + 0.05 + 0.051 + 0.1 + 0.4 + 0.5 + 0.75 + 0.751 + 0.9 + 1.0 + 4.0),
        }
    )


def test_shares_of_aeration_are_all_of_the_lung():
    inside = lung(np.random.default_rng(0).normal(-700, 300, 5000).astype(np.float32))
    shares = [value for name, value in asdict(inside.density).items() if name.endswith("aerated_percent")]
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(100)


def test_the_percentile_is_numpys():
    hu = np.random.default_rng(1).normal(-850, 60, 4001).round()
    assert lung(hu.astype(np.int16)).density.perc15_hu == np.percentile(hu, 15, method="inverted_cdf")


def test_stored_values_are_made_hu():
    stored = ((HU.clip(-1024) + 1024) * 2).astype(np.uint16)
    one, other = lung(stored, slope=0.5, intercept=-1024.0), lung(HU.clip(-1024).astype(np.int16))
    assert (one.mean_hu, one.density) == (other.mean_hu, other.density)


def test_both_lungs_together_are_as_one():
    hu = np.random.default_rng(2).normal(-800, 150, 900).round().astype(np.int16)
    whole, both = lung(hu), together([lung(hu[:200]), lung(hu[200:])])
    assert (both.volume_ml, both.density) == (whole.volume_ml, whole.density)
    assert both.mean_hu == pytest.approx(whole.mean_hu)
    assert together([None, whole]).density == whole.density
    assert together([None, None]) is None


@pytest.mark.parametrize(("floor_hu", "known"), [(-1024, True), (-960, True), (-950, False), (-119, False), (0, False)])
def test_there_is_no_density_where_low_values_are_cut_off(floor_hu, known):
    hu = np.random.default_rng(3).normal(-880, 60, 3000).clip(floor_hu).astype(np.int16)
    inside = lung(hu)
    assert (inside.density is not None) == known
    if known:
        assert inside.density.laa950_percent == pytest.approx(100 * np.mean(hu < -950))


def test_air_beside_the_lung_shows_that_nothing_is_cut_off():
    voxels = np.full((12, 12, 3), -850, np.int16)
    mask, whole = np.ones(voxels.shape, bool), Box.whole(voxels.shape)
    scan = Scan(voxels, Grid.axis_aligned(voxels.shape, (2.0, 2.0, 2.0)))
    assert histogram(scan, mask, whole).density is None
    mask[:2], voxels[:2] = False, -2048  # padding is no air
    assert histogram(scan, mask, whole).density is None
    voxels[:2] = -1000
    assert histogram(scan, mask, whole).density.perc15_hu == -850


def test_parts_of_a_hu_count_as_they_lie():
    hu = np.array([-950.4, -950.0, -949.6, -899.6, -900.2, -500.0], np.float32)
    density = lung(hu).density
    assert density.laa950_percent == pytest.approx(100 / 6)
    assert density.hyperaerated_percent == pytest.approx(100 * 4 / 6)


def test_a_window_that_cut_off_lungs_leaves_no_density():
    hu = HU.clip(-160, 240).astype(np.int16)
    inside = lung(hu, floor_hu=-160.0)
    assert (inside.mean_hu, inside.density) == (pytest.approx(hu.mean()), None)
    assert together([None, inside]).density is None
