from __future__ import annotations

import numpy as np
import pytest
import torch

from cascadeseg.cascade.crop import LungBox
from cascadeseg.cascade.locate import Coarse
from cascadeseg.cascade.merge import box_on, merge
from cascadeseg.cascade.refine import Refined, lung_image, lung_layers, mirrored, refine
from cascadeseg.geometry import Box, Grid
from cascadeseg.labels import LEFT_LUNG, LUNGS, RIGHT_LUNG
from cascadeseg.network import View
from tests.cascade.chest import chest, chest_grid, dice, thresholding_segmenter, truth

CPU = torch.device("cpu")


def coarse_of(grid: Grid) -> Coarse:
    labels = torch.from_numpy(truth(grid))
    return Coarse(torch.stack([(labels == lung.value).float() for lung in LUNGS]), grid)


@pytest.mark.parametrize("label", LUNGS)
@pytest.mark.parametrize("face", range(6))
def test_a_box_that_cuts_the_lung_grows_until_it_does_not(label, face):
    scan = chest(chest_grid((3.0, 3.0, 3.0)))
    coarse = coarse_of(scan.grid)
    mask = truth(scan.grid) == label.value
    start, stop = [np.asarray(ends(np.argwhere(mask), axis=0)) for ends in (np.min, np.max)]
    if face < 3:
        start[face] += 9
    else:
        stop[face - 3] -= 9
    lung = LungBox(
        label,
        Box(
            tuple(map(int, start - (np.arange(3) != face) * 4)),
            tuple(map(int, stop + 1 + (np.arange(3) != face - 3) * 4)),
        ),
        scan.grid,
    )
    refined = refine(scan, lung, coarse, thresholding_segmenter().refiner)
    assert refined.lung.regrown >= 1
    assert dice(merge([refined], scan.grid), truth(scan.grid), label.value) > 0.97


def test_a_box_that_still_cuts_the_lung_at_last_says_so(monkeypatch):
    scan = chest(chest_grid((3.0, 3.0, 3.0)))
    mask = truth(scan.grid) == RIGHT_LUNG.value
    start, stop = np.argwhere(mask).min(axis=0) - 4, np.argwhere(mask).max(axis=0) + 5
    whole = Box(tuple(map(int, start)), tuple(map(int, stop)))
    shorter = Box(whole.start, (*whole.stop[:2], whole.stop[2] - 16))  # needs to grow twice

    def still_cut() -> list[bool]:
        boxes = [LungBox(RIGHT_LUNG, box, scan.grid) for box in (whole, shorter)]
        return [refine(scan, box, coarse_of(scan.grid), thresholding_segmenter().refiner).cut for box in boxes]

    assert still_cut() == [False, False]
    monkeypatch.setattr("cascadeseg.cascade.refine.LARGEST_REGROWTH", 1)
    assert still_cut() == [False, True]


def test_a_lung_that_ends_at_the_scans_border_does_not_grow_for_ever():
    grid = chest_grid((3.0, 3.0, 3.0))
    half = grid.cropped(Box((0, 0, 0), (grid.shape[0], grid.shape[1], grid.shape[2] // 2)))
    lung = LungBox(RIGHT_LUNG, Box((55, 15, 8), (100, 65, half.shape[2])), half)
    assert refine(chest(half), lung, coarse_of(half), thresholding_segmenter().refiner).lung.regrown == 0


def test_left_crops_are_mirrored_and_the_prior_is_this_lung_minus_the_other():
    scan = chest(chest_grid())
    grid = scan.grid.resampled(4.0)
    view = View(4.0, prior=True)
    right, left = (lung_image(scan, coarse_of(scan.grid), label, grid, view, CPU) for label in LUNGS)
    assert torch.equal(left[0], right[0].flip(0))
    assert torch.equal(left[1], -right[1].flip(0))
    assert right[1].max() == 1
    assert right[1].min() == -1
    assert torch.equal(mirrored(mirrored(right, LEFT_LUNG), LEFT_LUNG), right)


def test_a_coarsely_seen_opinion_tells_where_the_lung_is_but_not_its_surface():
    scan = chest(chest_grid((2.0, 2.0, 2.0)))
    grid, coarse = scan.grid, coarse_of(scan.grid)
    sharp, vague = (
        lung_image(scan, coarse, RIGHT_LUNG, grid, View(2.0, prior=True, prior_spacing_mm=spacing), CPU)[1]
        for spacing in (0.0, 24.0)
    )
    inside = coarse.lungs[0] > 0.5
    assert vague[inside].mean() > 0.5 > 0.2 > vague[~inside].mean()
    step = [float((opinion[1:] - opinion[:-1]).abs().max()) for opinion in (sharp, vague)]
    assert step[0] > 0.9
    assert step[1] < 0.2


def test_contrast_takes_the_haze_from_an_opinion_and_leaves_what_is_sure():
    grid = chest_grid()
    scan = chest(grid)
    seen = {
        probability: lung_image(
            scan,
            Coarse(torch.stack([torch.full(grid.shape, probability), torch.zeros(grid.shape)]), grid),
            RIGHT_LUNG,
            grid,
            View(4.0, prior=True, prior_contrast=2.5),
            CPU,
        )[1].unique()
        for probability in (0.0, 0.25, 0.5, 0.6, 0.75, 1.0)
    }
    assert {probability: round(float(value), 3) for probability, value in seen.items()} == {
        0.0: 0.0, 0.25: 0.0, 0.5: 0.5, 0.6: 0.75, 0.75: 1.0, 1.0: 1.0
    }  # fmt: skip


def test_a_crop_that_reaches_beyond_the_scan_sees_its_outermost_voxels_there():
    grid = chest_grid((4.0, 4.0, 4.0))
    nx, ny, nz = grid.shape
    half, wider = (grid.cropped(Box((0, 0, 0), (nx, ny, nz // 2 + beyond))) for beyond in (0, 3))
    image = lung_image(chest(half), None, RIGHT_LUNG, wider, View(4.0), CPU)
    outermost = image[..., -4:-3]
    assert outermost.max() > 1 > 0.5 > outermost.min() > 0, "it cuts the body, and the lungs in it"
    assert torch.equal(image[..., -3:], outermost.expand(*image.shape[:3], 3))


@pytest.mark.parametrize("spacing", [0.0, 24.0])
def test_an_image_made_slab_by_slab_equals_the_whole(spacing):
    scan = chest(chest_grid((2.0, 2.0, 2.0)))
    view = View(1.7, tissue_low_hu=-150, tissue_high_hu=150, prior=True, prior_spacing_mm=spacing)
    seen = scan, coarse_of(scan.grid), LEFT_LUNG, scan.grid.resampled(1.7), view
    layers, whole = lung_layers(*seen, CPU), lung_image(*seen, CPU)
    parts = [layers[..., start : start + 30] for start in range(0, layers.shape[3], 30)]
    assert torch.allclose(torch.cat(parts, dim=3), whole, atol=1e-5)
    assert layers[..., 30:30].shape == (*whole.shape[:3], 0)  # a piece may lie in the padding alone


def test_merging_gives_a_contested_voxel_to_the_larger_logit_slab_by_slab(monkeypatch):
    monkeypatch.setattr("cascadeseg.cascade.merge.SLAB_VOXELS", 600)
    grid = Grid.axis_aligned((30, 20, 25), (1, 1, 1))
    boxes = {RIGHT_LUNG: Box((10, 0, 0), (30, 20, 20)), LEFT_LUNG: Box((0, 0, 5), (20, 20, 25))}
    heights = {RIGHT_LUNG: 2.0, LEFT_LUNG: 1.0}
    lungs = [
        Refined(LungBox(label, box, grid), torch.full(box.shape, heights[label]), grid.cropped(box))
        for label, box in boxes.items()
    ]
    expected = np.zeros(grid.shape, np.uint8)
    expected[boxes[LEFT_LUNG].slices] = 2
    expected[boxes[RIGHT_LUNG].slices] = 1
    assert (merge(lungs, grid) == expected).all()
    assert (merge(lungs[::-1], grid) == expected).all()


def test_merging_interpolates_logits_onto_a_finer_grid():
    fine = chest_grid((1.5, 1.5, 2.0))
    coarse = fine.resampled(3.0)
    index = np.stack(np.meshgrid(*map(np.arange, coarse.shape), indexing="ij"), axis=-1)
    from tests.cascade.chest import CENTRES, RADII

    radius = (((coarse.world(index) - CENTRES[RIGHT_LUNG]) / RADII) ** 2).sum(axis=-1)
    logits = torch.from_numpy((1 - radius).astype(np.float32))
    refined = Refined(LungBox(RIGHT_LUNG, Box.whole(coarse.shape), coarse), logits, coarse)
    assert dice(merge([refined], fine), truth(fine), 1) > 0.998
    assert box_on(refined, fine).shape == fine.shape


def test_no_lung_gives_an_empty_label_map():
    assert not merge([], Grid.axis_aligned((3, 4, 5), (1, 1, 1))).any()
