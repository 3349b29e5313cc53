"""`Grid`, `Box` and `canonical_view`: all 48 orientations against nibabel, and the arithmetic of grids."""

from __future__ import annotations

from itertools import product

import nibabel
import numpy as np
import pytest

from cascadeseg.geometry import Box, Grid, bounding_box, boxes_on_one_grid, canonical_view, centroid, counted
from tests.formats.volumes import ORIENTATIONS, SHAPE, SPACING_MM, affine_of, ct_values, oblique_grid, rotation


@pytest.mark.parametrize("tilt", [(0, 0, 0), (9, -14, 20)], ids=["straight", "oblique"])
@pytest.mark.parametrize("directions", ORIENTATIONS, ids=lambda d: "".join(nibabel.aff2axcodes(affine_of(d))))
def test_canonical_view_is_nibabels(directions: np.ndarray, tilt: tuple[int, int, int]) -> None:
    voxels = ct_values()
    grid = Grid(SHAPE, affine_of(rotation(*tilt) @ directions))
    oracle = nibabel.as_closest_canonical(nibabel.Nifti1Image(voxels, grid.affine))
    view = canonical_view(voxels, grid)
    assert np.array_equal(view, np.asanyarray(oracle.dataobj))
    assert np.allclose(grid.canonical().affine, oracle.affine, atol=1e-9)
    assert grid.canonical().shape == view.shape
    assert np.shares_memory(view, voxels)
    assert grid.canonical().canonical_axes() == ((0, 1, 2), (False, False, False))


def test_a_voxel_keeps_its_place_in_the_canonical_view() -> None:
    for directions in ORIENTATIONS:
        grid = Grid(SHAPE, affine_of(directions))
        marked = np.zeros(SHAPE, np.uint8)
        marked[3, 5, 7] = 1
        index = np.argwhere(canonical_view(marked, grid))[0]
        assert np.allclose(grid.canonical().world(index), grid.world([3, 5, 7]))


def test_writing_into_the_view_writes_into_the_array() -> None:
    voxels = np.zeros(SHAPE, np.uint8)
    grid = Grid(SHAPE, affine_of(ORIENTATIONS[29]))
    canonical_view(voxels, grid)[0, 0, 0] = 7
    assert voxels.max() == 7


def test_world_and_index_undo_each_other() -> None:
    grid = oblique_grid()
    index = np.random.default_rng(0).uniform(-20, 20, (5, 4, 3))
    assert np.allclose(grid.index(grid.world(index)), index)
    assert np.allclose(grid.world([0, 0, 0]), grid.affine[:3, 3])


def test_spacing_directions_and_volume() -> None:
    grid = oblique_grid()
    assert np.allclose(grid.spacing_mm, SPACING_MM)
    assert np.allclose(grid.directions.T @ grid.directions, np.eye(3))
    assert grid.voxel_volume_ml == pytest.approx(np.prod(SPACING_MM) / 1000)


def test_a_grid_is_a_value() -> None:
    affine = affine_of()
    grid = Grid(SHAPE, affine)
    affine[0, 3] = 99
    assert grid.affine[0, 3] != 99
    with pytest.raises(ValueError, match="read-only"):
        grid.affine[0, 3] = 99


def test_resampled_keeps_the_field_of_view() -> None:
    grid = oblique_grid()
    coarse = grid.resampled(1.25)
    middle = [(np.asarray(g.shape) - 1) / 2 for g in (grid, coarse)]
    assert np.allclose(coarse.world(middle[1]), grid.world(middle[0]))
    assert np.allclose(coarse.spacing_mm, 1.25)
    assert np.allclose(coarse.directions, grid.directions)
    extents = [np.asarray(g.shape) * g.spacing_mm for g in (grid, coarse)]
    assert (np.abs(extents[0] - extents[1]) <= 1.25 / 2 + 1e-6).all()


def test_resampled_to_the_same_spacing_is_the_same_grid() -> None:
    assert oblique_grid().resampled(SPACING_MM).matches(oblique_grid())


@pytest.mark.parametrize("spacing_mm", [0.4, 0.5, 0.7, 0.75, 1.0, 3.0])
def test_resampled_to_hold_all_centres_does(spacing_mm: float) -> None:
    lost = 0
    for length in range(40, 90):
        grid = Grid.axis_aligned((length, 8, 8), (spacing_mm, 1, 1))
        first, last = (grid.world((i, 0, 0)) for i in (0, length - 1))
        coarse, rounded = grid.resampled(2.0, all_centres=True), grid.resampled(2.0)
        assert coarse.index(first)[0] >= -0.5 - 1e-6
        assert coarse.index(last)[0] <= coarse.shape[0] - 0.5 + 1e-6
        assert coarse.shape[0] - rounded.shape[0] in (0, 1)
        lost += coarse.shape[0] > rounded.shape[0]
    assert (lost > 0) == (spacing_mm < 1)


def test_resampled_never_loses_an_axis() -> None:
    assert Grid.axis_aligned((2, 32, 32), (0.5, 1, 1)).resampled(4.0).shape == (1, 8, 8)


def test_cropped_grid_is_that_of_the_cropped_array() -> None:
    grid, box = oblique_grid(), Box((2, 0, 3), (9, 14, 10))
    cropped = grid.cropped(box)
    assert cropped.shape == (7, 14, 7) == ct_values()[box.slices].shape
    assert np.allclose(cropped.world([1, 2, 3]), grid.world([3, 2, 6]))
    outside = grid.cropped(Box((-2, 0, 0), (3, 3, 3)))
    assert np.allclose(outside.world([2, 0, 0]), grid.world([0, 0, 0]))


def test_covering_covers_and_not_much_more() -> None:
    grid = oblique_grid()
    target = grid.resampled(1.1)
    box = Box((1, 2, 3), (8, 9, 6))
    cover = grid.covering(box, target)
    edges = target.index(grid.world(np.stack([box.start, box.stop]) - 0.5))
    assert (np.asarray(cover.start) - 0.5 <= edges.min(axis=0) + 1e-6).all()
    assert (np.asarray(cover.stop) - 0.5 >= edges.max(axis=0) - 1e-6).all()
    assert (np.asarray(cover.start) + 0.5 > edges.min(axis=0) - 1e-6).all()
    assert (np.asarray(cover.stop) - 1.5 < edges.max(axis=0) + 1e-6).all()


def test_nearest_are_the_voxels_nearest_to_each_sample_of_another_grid() -> None:
    grid = Grid.axis_aligned((10, 20, 30), (1, 2, 3), (5, 0, 0))
    other = Grid.axis_aligned((4, 1, 3), (3, 2, 2), (2.2, 7, 10))
    x, y, z = grid.nearest(other)
    assert x.tolist() == [-3, 0, 3, 6]
    assert y.tolist() == [4]
    assert z.tolist() == [3, 4, 5]


def test_covering_on_the_same_grid_is_the_box() -> None:
    grid, box = oblique_grid(), Box((1, 2, 3), (8, 9, 6))
    assert grid.covering(box, grid) == box


def test_covering_turns_with_flipped_axes() -> None:
    grid = Grid(SHAPE, affine_of(np.diag([-1, 1, -1])))
    whole = grid.covering(Box.whole(SHAPE), grid.canonical())
    assert whole == Box.whole(SHAPE)
    assert grid.covering(Box((0, 0, 0), (1, 14, 10)), grid.canonical()) == Box((11, 0, 0), (12, 14, 10))


def test_matches_is_about_places() -> None:
    grid = oblique_grid()
    moved = grid.affine.copy()
    moved[0, 3] += 0.01
    assert grid.matches(Grid(SHAPE, grid.affine + 0))
    assert not grid.matches(Grid(SHAPE, moved))
    assert grid.matches(Grid(SHAPE, moved), tolerance_mm=0.1)
    assert not grid.matches(grid.cropped(Box((0, 0, 0), (5, 5, 5))))


def test_box_in_is_where_the_voxels_of_a_grid_are_in_another() -> None:
    grid = oblique_grid()
    for box in (Box.whole(SHAPE), Box((1, 0, 2), (4, 5, 6)), Box((-3, 0, 2), (4, 50, 6))):
        assert grid.cropped(box).box_in(grid) == box
    affine = grid.affine.copy()
    affine[:3, 3] += 0.01
    assert Grid(SHAPE, affine).box_in(grid) is None
    assert Grid(SHAPE, affine).box_in(grid, tolerance_mm=0.1) == Box.whole(SHAPE)
    affine[:3, 3] += affine[:3, 0] / 2
    assert Grid(SHAPE, affine).box_in(grid, tolerance_mm=0.1) is None, "half a voxel away"
    assert grid.resampled(1.5).box_in(grid) is None
    assert Grid(SHAPE, affine_of(ORIENTATIONS[3])).box_in(Grid(SHAPE, affine_of(ORIENTATIONS[7]))) is None


def test_masks_of_one_scan_lie_on_one_grid_also_where_they_are_cut() -> None:
    grid = oblique_grid()
    axes = grid.canonical()
    whole, part, beyond = Box.whole(axes.shape), Box((1, 0, 2), (4, 5, 6)), Box((-1, 0, 2), (4, 5, 6))
    for may_be_cut in product((True, False), repeat=2):
        first, second = may_be_cut
        assert boxes_on_one_grid(grid, axes, may_be_cut=may_be_cut) == (whole, whole, whole)
        expected = (part, whole, whole) if first else None
        assert boxes_on_one_grid(axes.cropped(part), grid, may_be_cut=may_be_cut) == expected
        expected = (whole.shifted((-1, 0, -2)), Box.whole(part.shape), whole.shifted((-1, 0, -2))) if second else None
        assert boxes_on_one_grid(grid, axes.cropped(part), may_be_cut=may_be_cut) == expected
        expected = (beyond, whole, Box((-1, 0, 0), whole.stop)) if first and second else None
        assert boxes_on_one_grid(axes.cropped(beyond), axes, may_be_cut=may_be_cut) == expected
        apart = axes.cropped(part.shifted((axes.shape[0], 0, 0)))
        assert boxes_on_one_grid(apart, axes, may_be_cut=may_be_cut) is None
        assert boxes_on_one_grid(grid.resampled(1.5), grid, may_be_cut=may_be_cut) is None


def test_boxes() -> None:
    box = Box((2, 3, 4), (6, 9, 5))
    assert box.shape == (4, 6, 1)
    assert Box.whole(SHAPE) == Box((0, 0, 0), SHAPE)
    assert box.grown((1, 0, 5)) == Box((1, 3, -1), (7, 9, 10))
    assert box.grown((5, 5, 5)).clipped(SHAPE) == Box((0, 0, 0), (11, 14, 10))
    assert Box((20, -9, 0), (30, -2, 3)).clipped(SHAPE).shape == (0, 0, 3)
    assert ct_values()[box.slices].shape == box.shape
    assert Box.of(np.array([2, 3, 4]), [6, 9, 5]) == box
    assert Box.around([box]) == box
    assert Box.around([box, Box((0, 5, 4), (3, 12, 5))]) == Box((0, 3, 4), (6, 12, 5))


def test_bounding_box() -> None:
    mask = np.zeros((5, 6, 7), bool)
    assert bounding_box(mask) is None
    mask[1, 2, 3] = mask[2, 4, 6] = True
    assert bounding_box(mask) == Box((1, 2, 3), (3, 5, 7))


@pytest.mark.parametrize("kind", ["uint8", "<i2", ">i4", "int64"])
@pytest.mark.parametrize("directions", ORIENTATIONS[::7], ids=lambda d: "".join(nibabel.aff2axcodes(affine_of(d))))
def test_values_are_counted_and_their_centre_found_as_they_lie_in_memory(directions: np.ndarray, kind: str) -> None:
    grid = Grid(SHAPE, affine_of(rotation(9, -14, 20) @ directions))
    labels = canonical_view(np.random.default_rng(1).choice([0, 1, 2, 100], SHAPE).astype(kind), grid)
    labels[0], grid = 2, grid.canonical()
    assert counted(labels) == {value: np.count_nonzero(labels == value) for value in (0, 1, 2, 100)}
    assert np.allclose(centroid(labels, grid, [2, 100]), grid.world(np.argwhere(labels >= 2).mean(axis=0)))
    assert np.allclose(centroid(labels == 2, grid), centroid(labels, grid, [2]))


def test_values_beyond_a_byte_are_counted_as_they_are() -> None:
    labels = np.array([-(2**40), 0, 7, 7, 2**40, 0, 0, 0]).reshape(2, 2, 2)
    assert counted(labels) == {-(2**40): 1, 0: 4, 7: 2, 2**40: 1}
