from __future__ import annotations

import numpy as np
import pytest
import torch

from cascadeseg.cascade.crop import LungBox, crop_lungs, regrow, settle_sides
from cascadeseg.cascade.locate import Coarse
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG
from tests.cascade.chest import CENTRES, RADII, TISSUE_HU, chest, chest_grid, truth

GRID = chest_grid((4.0, 4.0, 4.0))


def opinion(right: np.ndarray, left: np.ndarray) -> Coarse:
    return Coarse(torch.from_numpy(np.stack([right, left]).astype(np.float16)), GRID)


def lungs() -> tuple[np.ndarray, np.ndarray]:
    labels = truth(GRID)
    return labels == 1, labels == 2


def sides(coarse: Coarse) -> tuple[np.ndarray, np.ndarray]:
    right, left = settle_sides(coarse).lungs.numpy() > 0.5
    return right, left


def test_two_lungs_give_two_boxes_with_the_margin_and_the_lung_in_the_middle():
    boxes = crop_lungs(opinion(*lungs()), margin_mm=16)
    assert [box.label for box in boxes] == [RIGHT_LUNG, LEFT_LUNG]
    for box in boxes:
        low, high = GRID.world(np.asarray(box.box.start) - 0.5), GRID.world(np.asarray(box.box.stop) - 0.5)
        np.testing.assert_allclose((low + high) / 2, CENTRES[box.label], atol=4)
        np.testing.assert_allclose(high - low, 2 * RADII + 32, atol=8)


def test_what_is_right_already_is_left_alone():
    coarse = opinion(*(0.9 * mask for mask in lungs()))
    assert torch.equal(settle_sides(coarse).lungs, coarse.lungs)


def test_a_single_blob_called_by_one_name_is_split_at_the_centroids():
    right, left = lungs()
    bridge = np.zeros_like(right)
    middle = tuple(n // 2 for n in GRID.shape)
    bridge[middle[0] - 6 : middle[0] + 6, middle[1] - 2 : middle[1] + 2, middle[2] - 2 : middle[2] + 2] = True
    found_right, found_left = sides(opinion(right | left | bridge, np.zeros_like(left)))
    assert (found_right & right).sum() == right.sum()
    assert (found_left & left).sum() == left.sum()


@pytest.mark.parametrize("name", ["right", "left"])
@pytest.mark.parametrize("smaller", [False, True])
def test_two_lungs_apart_from_each_other_and_called_by_one_name_are_told_by_where_they_lie(name, smaller):
    right, left = lungs()
    if smaller:
        left &= np.arange(GRID.shape[2]) > GRID.shape[2] // 2
    nothing = np.zeros_like(left)
    coarse = settle_sides(opinion(*((right | left, nothing) if name == "right" else (nothing, right | left))))
    found_right, found_left = coarse.lungs.numpy() > 0.5
    assert np.array_equal(found_right, right)
    assert np.array_equal(found_left, left)
    assert coarse.renamed == {LEFT_LUNG if name == "right" else RIGHT_LUNG}


def test_gas_in_the_bowel_with_the_other_name_does_not_hide_that_both_lungs_have_one():
    right, left = lungs()
    gas = np.zeros_like(left)
    gas[12:18, 28:34, 0:5] = True
    assert gas.sum() * GRID.voxel_volume_ml > 5
    coarse = settle_sides(opinion(right | left, gas))
    found_right, found_left = coarse.lungs.numpy() > 0.5
    assert np.array_equal(found_right, right)
    assert np.array_equal(found_left & ~gas, left)
    assert coarse.renamed == {LEFT_LUNG}


@pytest.mark.parametrize("where", ["below", "light"])
def test_a_blob_beside_a_single_lung_is_a_second_one_only_if_it_lies_abreast_and_is_heavy(where):
    right, left = lungs()
    nothing = np.zeros_like(left)
    z = np.arange(GRID.shape[2])
    blob = left & (z < 26) if where == "below" else left & (abs(z - 30) < 2)
    if where == "below":
        right = right & (z > 24)
    share = blob.sum() / right.sum()
    assert share > 0.3 if where == "below" else 0.03 < share < 0.15
    coarse = settle_sides(opinion(right | blob, nothing))
    assert [box.label for box in crop_lungs(coarse)] == [RIGHT_LUNG]
    assert not coarse.renamed


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_lung_in_two_pieces_keeps_both_beside_one_of_the_other_name(collapsed):
    right, left = lungs()
    if collapsed:
        left &= abs(np.arange(GRID.shape[2]) - 30) < 4
    middle = np.argwhere(right).mean(axis=0).astype(int)
    right[middle[0] - 2 : middle[0] + 2] = False
    touching = left.copy()
    touching[GRID.shape[0] // 2 - 6 : middle[0] - 10, middle[1] - 2 : middle[1] + 2, middle[2] - 2 : middle[2] + 2] = (
        True
    )
    coarse = opinion(right, touching & ~right)
    assert torch.equal(settle_sides(coarse).lungs, coarse.lungs)


def test_a_lung_in_two_pieces_keeps_both_where_the_other_lies_in_front_of_it():
    """In a patient on the side."""
    right, left = np.zeros((2, *GRID.shape), bool)
    right[20:60, 5:25, 10:50] = True
    right[38:42] = False
    left[20:60, 32:52, 10:50] = True
    coarse = opinion(right, left)
    assert torch.equal(settle_sides(coarse).lungs, coarse.lungs)


def test_swapped_names_are_put_right_by_geometry():
    right, left = lungs()
    coarse = settle_sides(opinion(left, right))
    found_right, found_left = coarse.lungs.numpy() > 0.5
    assert (found_right == right).all()
    assert (found_left == left).all()
    assert coarse.renamed == {RIGHT_LUNG, LEFT_LUNG}


def test_lungs_that_could_be_either_have_the_names_of_where_they_lie():
    """No voxel is more of one than of the other."""
    right, left = lungs()
    unsure = 0.51 * (right | left)
    boxes = crop_lungs(settle_sides(opinion(unsure, unsure)))
    assert boxes == crop_lungs(opinion(right, left))


def test_one_lung_called_by_both_names_stays_one():
    right, _ = lungs()
    upper = np.arange(GRID.shape[2]) > GRID.shape[2] // 2 + 8
    found_right, found_left = sides(opinion(right & ~upper, right & upper))
    assert (found_right == right).all()
    assert not found_left.any()


def test_a_patient_on_the_side_keeps_the_networks_names():
    right, left = lungs()
    turned = chest_grid((4.0, 4.0, 4.0)).affine.copy()
    turned[:3, :2] = turned[:3, 1::-1] * [1, -1]
    grid = Grid(GRID.shape, turned)
    coarse = Coarse(opinion(left, right).lungs, grid)
    assert torch.equal(settle_sides(coarse).lungs, coarse.lungs)


def test_a_missing_lung_gives_one_box():
    right, left = lungs()
    assert [box.label for box in crop_lungs(settle_sides(opinion(right, np.zeros_like(left))))] == [RIGHT_LUNG]
    assert [box.label for box in crop_lungs(settle_sides(opinion(np.zeros_like(right), left)))] == [LEFT_LUNG]


def test_a_stray_blob_does_not_enlarge_the_box():
    right, left = lungs()
    stray = right.copy()
    stray[-4:-1, 1:4, 1:4] = True
    assert crop_lungs(settle_sides(opinion(stray, left))) == crop_lungs(opinion(right, left))


@pytest.mark.parametrize("behind", [True, False])
def test_foam_of_a_couch_is_no_part_of_a_lung_and_a_part_below_a_lung_is(behind):
    right, left = lungs()
    x, y, z = (slice(int(used.min()), int(used.max()) + 1) for used in np.nonzero(right))
    part = np.zeros_like(right)
    if behind:
        part[x, 0:2, z] = True
    else:
        part[x, y, 0:2] = True
    assert part.sum() > 0.05 * right.sum()
    found, other = sides(opinion(right | part, left))
    assert np.array_equal(found, right if behind else right | part)
    assert np.array_equal(other, left)


def couch_below(scan: Scan) -> tuple[Scan, np.ndarray]:
    """The scan with 30 mm of air and 60 mm of foam in a shell below it, and (X, Y, Z) where the foam is."""
    x, y, z = scan.grid.shape
    hu = np.full((x, y + 24, z), -1000, np.int16)
    hu[:, 24:] = scan.hu()
    hu[2:-2, 1:17] = 100
    foam = np.zeros(hu.shape, bool)
    foam[3:-3, 2:16] = True
    hu[foam] = -930
    grid = scan.grid.cropped(Box((0, -24, 0), (x, y, z)))
    return Scan(hu, grid, source="toy chest on a couch"), foam


def test_a_field_of_view_without_the_chests_walls_loses_no_lung_to_gas_in_the_bowel():
    right, left = lungs()
    y = np.flatnonzero(right.any(axis=(0, 2)))
    front = Box((0, int(y.mean()) + 1, 0), (GRID.shape[0], GRID.shape[1], GRID.shape[2]))
    scan = chest(GRID.cropped(front))
    gas = np.zeros_like(right)
    gas[20:24, -6:-3, :4] = True
    said = np.stack([right | gas, left]).astype(np.float16)[:, *front.slices]
    found = settle_sides(Coarse(torch.from_numpy(said), scan.grid), scan).lungs.numpy() > 0.5
    assert np.array_equal(found, np.stack([right, left])[:, *front.slices])


@pytest.mark.parametrize("called", ["right", "left", "both"])
def test_foam_larger_than_the_lungs_is_told_by_what_lies_outside_the_body(called):
    scan, foam = couch_below(chest(GRID))
    right, left = (np.pad(mask, ((0, 0), (24, 0), (0, 0))) for mask in lungs())
    assert foam.sum() > 2 * (right | left).sum()
    on_right = np.arange(len(foam))[:, None, None] > len(foam) // 2
    as_right = {"right": foam, "left": np.zeros_like(foam), "both": foam & on_right}[called]
    said = np.stack([right | as_right, left | (foam & ~as_right)]).astype(np.float16)
    found = settle_sides(Coarse(torch.from_numpy(said), scan.grid), scan).lungs.numpy() > 0.5
    assert np.array_equal(found, np.stack([right, left]))


@pytest.mark.parametrize("called", ["right", "both"])
def test_foam_of_a_couch_under_a_body_without_lungs_is_no_lung(called):
    body = chest(GRID)
    body.voxels[:] = TISSUE_HU
    scan, foam = couch_below(body)
    on_right = np.arange(len(foam))[:, None, None] > len(foam) // 2
    as_right = foam if called == "right" else foam & on_right
    said = torch.from_numpy(np.stack([as_right, foam & ~as_right]).astype(np.float16))
    assert not settle_sides(Coarse(said, scan.grid), scan).lungs.any()


def test_air_under_a_blanket_over_a_body_without_lungs_is_no_lung():
    scan = chest(GRID)
    scan.voxels[:] = TISSUE_HU
    air = np.zeros(GRID.shape, bool)
    air[20:60, -12:-4, 10:30] = True
    scan.voxels[:, -16:] = -1000
    scan.voxels[18:62, -3] = -100
    assert not settle_sides(opinion(air, np.zeros_like(air)), scan).lungs.any()


@pytest.mark.parametrize("at_back", [True, False])
def test_a_lung_cut_at_the_back_or_front_of_the_field_of_view_stays(at_back):
    right, left = lungs()
    y = int(np.flatnonzero(right.any(axis=(0, 2))).mean())
    kept = Box((0, y, 0), GRID.shape) if at_back else Box((0, 0, 0), (GRID.shape[0], y, GRID.shape[2]))
    scan = chest(GRID.cropped(kept))
    said = np.stack([right, left]).astype(np.float16)[:, *kept.slices]
    found = settle_sides(Coarse(torch.from_numpy(said), scan.grid), scan)
    assert np.array_equal(found.lungs.numpy(), said)


def test_air_above_the_shoulders_is_no_part_of_a_lung_though_it_lies_in_the_lungs_column():
    right, left = lungs()
    scan = chest(GRID)
    air = np.zeros_like(right)
    x, y, _ = (slice(int(used.min()) + 2, int(used.max()) - 2) for used in np.nonzero(right))
    air[x, y, -4:] = True
    scan.voxels[:, :, -4:] = -1000
    assert air.sum() > 0.05 * right.sum()
    said = torch.from_numpy(np.stack([right | air, left]).astype(np.float16))
    found = settle_sides(Coarse(said, GRID), scan).lungs.numpy() > 0.5
    assert np.array_equal(found, np.stack([right, left]))


def test_lungs_of_which_one_lies_behind_the_other_stay_both():
    right, left = (mask.transpose(1, 0, 2) for mask in lungs())
    turned = chest(GRID)
    grid = Grid.axis_aligned(right.shape, GRID.spacing_mm)
    coarse = Coarse(torch.from_numpy(np.stack([right, left]).astype(np.float16)), grid)
    scan = Scan(turned.hu().transpose(1, 0, 2).astype(np.int16), grid, source="toy chest on its side")
    assert torch.equal(settle_sides(coarse, scan).lungs, coarse.lungs)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_specks_in_a_single_layer_are_strays(axis):
    specks = np.zeros(GRID.shape, bool)
    layer = [slice(3, 8, 2)] * 3
    layer[axis] = slice(3, 4)
    specks[tuple(layer)] = True
    assert crop_lungs(settle_sides(opinion(specks, np.zeros_like(specks)))) == []


def test_nothing_found_gives_no_box():
    nothing = np.zeros(GRID.shape, bool)
    assert crop_lungs(settle_sides(opinion(nothing, nothing))) == []


@pytest.mark.parametrize("stride", [8, 16])
def test_the_crops_shape_is_a_multiple_of_the_stride_and_covers_the_box(stride):
    grid = Grid.axis_aligned((40, 40, 40), (2, 2, 2))
    lung = LungBox(RIGHT_LUNG, Box((3, 5, 7), (20, 33, 40)), grid)
    extent = lung.extent(1.0, stride)
    assert all(n % stride == 0 for n in extent.shape)
    low, high = extent.world((-0.5, -0.5, -0.5)), extent.world(np.asarray(extent.shape) - 0.5)
    assert (low <= grid.world(np.asarray(lung.box.start) - 0.5) + 1e-6).all()
    assert (high >= grid.world(np.asarray(lung.box.stop) - 0.5) - 1e-6).all()


def test_a_box_grows_only_at_the_faces_that_cut_and_never_out_of_the_scan():
    grid = Grid.axis_aligned((40, 40, 40), (2, 2, 2))
    lung = LungBox(LEFT_LUNG, Box((3, 10, 10), (20, 20, 20)), grid)
    grown = regrow(lung, [(0, False), (2, True)], growth_mm=10)
    assert grown.box == Box((0, 10, 10), (20, 20, 25))
    assert grown.regrown == 1
