from __future__ import annotations

import numpy as np
import pytest
import torch

from cascadeseg.cascade.resample import axis_weights, image_of_hu, resample_scan, resample_volume, windows_of
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid
from cascadeseg.network import View

WIDE = View(1.0, low_hu=-4000.0, high_hu=4000.0, scale_hu=1.0)
CPU = torch.device("cpu")


def ramp(grid: Grid) -> np.ndarray:
    """A value that is linear in the world: 2 x - y + 3 z."""
    index = np.stack(np.meshgrid(*map(np.arange, grid.shape), indexing="ij"), axis=-1)
    return (grid.world(index) @ [2.0, -1.0, 3.0]).astype(np.float32)


@pytest.mark.parametrize("spacing", [0.7, 1.0, 1.9, 3.3])
def test_a_linear_image_resamples_exactly_away_from_the_border(spacing):
    source = Grid.axis_aligned((40, 36, 30), (1.0, 1.2, 1.5), (-20, 3, 9))
    target = source.resampled(spacing)
    result = resample_volume(torch.from_numpy(ramp(source)), source, target)
    margin = int(np.ceil(3 / spacing)) + 1
    inner = (slice(margin, -margin),) * 3
    np.testing.assert_allclose(result.numpy()[inner], ramp(target)[inner], atol=2e-3)


def test_the_same_grid_is_the_identity():
    grid = Grid.axis_aligned((9, 8, 7), (1, 2, 3))
    volume = torch.rand(9, 8, 7)
    assert torch.allclose(resample_volume(volume, grid, grid), volume, atol=1e-6)


def test_outside_the_source_is_zero_and_the_outer_half_voxel_is_not():
    weights = axis_weights(4, 8, offset=-2.0, step=1.0)
    assert weights.sum(dim=1).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert axis_weights(4, 1, offset=-0.5, step=1.0).sum() == 1


def test_a_source_that_goes_on_is_beyond_its_ends_as_it_is_there():
    weights = axis_weights(4, 8, offset=-2.0, step=1.0, goes_on=True)
    assert weights.argmax(dim=1).tolist() == [0, 0, 0, 1, 2, 3, 3, 3]
    assert weights.sum(dim=1).tolist() == [1] * 8
    grid = Grid.axis_aligned((6, 5, 4), (1, 1, 2))
    voxels = np.random.default_rng(0).integers(-900, 100, grid.shape).astype(np.int16)
    wider = grid.cropped(Box((-2, 0, -3), (7, 5, 5)))
    image = resample_scan(Scan(voxels, grid), wider, WIDE, CPU, goes_on=True)
    expected = np.pad(voxels, ((2, 1), (0, 0), (3, 1)), mode="edge")
    outside = resample_scan(Scan(expected, wider), wider, WIDE, CPU)
    assert torch.allclose(image, outside, atol=1e-3)


def test_shrinking_averages_noise_instead_of_sampling_it():
    source = Grid.axis_aligned((60, 60, 60), (0.5, 0.5, 0.5))
    noise = torch.randn(60, 60, 60, generator=torch.Generator().manual_seed(0))
    assert float(resample_volume(noise, source, source.resampled(2.0)).std()) < 0.25


def test_a_scan_in_slabs_equals_the_whole(monkeypatch):
    grid = Grid.axis_aligned((20, 18, 33), (0.8, 0.8, 1.1))
    scan = Scan((ramp(grid) * 10).astype(np.int16), grid, slope=0.1)
    target = grid.resampled(1.7)
    whole = resample_scan(scan, target, WIDE, CPU)
    monkeypatch.setattr("cascadeseg.cascade.resample.SLAB_VOXELS", 20 * 18 * 4)
    assert torch.allclose(resample_scan(scan, target, WIDE, CPU), whole, atol=1e-2)
    same = resample_volume(torch.from_numpy(scan.hu()) + 4000, grid, target)
    assert torch.allclose(whole, same, atol=1e-2)


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "float32", "uint8", ">i2"])
def test_every_stored_type_gives_the_same_image(dtype):
    grid = Grid.axis_aligned((6, 5, 4), (1, 1, 1))
    stored = np.arange(120).reshape(6, 5, 4)
    scan = Scan(stored.astype(dtype), grid, slope=2.0, intercept=-100.0)
    image = resample_scan(scan, grid, View(1.0, low_hu=-100, high_hu=1000, scale_hu=1), CPU)
    np.testing.assert_allclose(image.numpy(), stored * 2.0, rtol=1e-6)


def test_a_box_of_the_target_equals_the_same_box_of_the_whole():
    grid = Grid.axis_aligned((22, 20, 18), (1.3, 1.1, 2.0))
    scan = Scan((ramp(grid) * 3).astype(np.int16), grid)
    target, box = grid.resampled(1.0), Box((3, 4, 5), (19, 17, 30))
    whole = resample_scan(scan, target, WIDE, CPU)
    part = resample_scan(scan, target.cropped(box), WIDE, CPU)
    assert torch.allclose(part, whole[box.slices], atol=1e-3)


def test_padding_below_air_and_nan_are_air():
    grid = Grid.axis_aligned((3, 3, 3), (1, 1, 1))
    voxels = np.full((3, 3, 3), -3024.0, np.float32)
    voxels[0] = np.nan
    assert not resample_scan(Scan(voxels, grid), grid, View(1.0), CPU).any()


def test_a_target_entirely_outside_is_air():
    grid = Grid.axis_aligned((3, 3, 3), (1, 1, 1))
    far = Grid.axis_aligned((2, 2, 2), (1, 1, 1), (50, 50, 50))
    assert not resample_scan(Scan(np.full((3, 3, 3), 100, np.int16), grid), far, View(1.0), CPU).any()


def test_a_window_of_soft_tissue_runs_from_its_lowest_hu_to_its_highest():
    hu = np.array([-1024, -150, 0, 75, 150, 3000], np.int16).reshape(1, 1, 6)
    grid = Grid.axis_aligned(hu.shape, (1, 1, 1))
    view = View(1.0, tissue_low_hu=-150, tissue_high_hu=150)
    whole, tissue = windows_of(resample_scan(Scan(hu, grid), grid, view, CPU)[None], view)
    np.testing.assert_allclose(whole.flatten(), [0, 0.874, 1.024, 1.099, 1.174, 1.624], atol=1e-6)
    np.testing.assert_allclose(tissue.flatten(), [0, 0, 0.5, 0.75, 1, 1], atol=1e-5)
    assert windows_of(whole[None], View(1.0)).shape == (1, 1, 1, 6)
    assert torch.allclose(
        image_of_hu(torch.from_numpy(hu)[None].float(), view), torch.stack([whole, tissue]), atol=1e-6
    )


def test_no_value_is_asked_of_a_device():
    """Which a GPU's would have to be waited for; the meta device has none."""
    grid, meta = Grid.axis_aligned((50, 48, 40), (0.8, 0.9, 1.5)), torch.device("meta")
    target = grid.resampled(1.1)
    image = resample_scan(Scan(np.zeros(grid.shape, np.int16), grid), target, View(1.0), meta)
    back = resample_volume(image, target, grid)
    assert (image.device, image.shape, back.device, back.shape) == (meta, target.shape, meta, grid.shape)
