from __future__ import annotations

import numpy as np
import pytest
import torch

from cascadeseg.cascade.clean import clean
from cascadeseg.cascade.locate import Coarse
from cascadeseg.geometry import Box, Grid
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG

GRID = Grid.axis_aligned((40, 40, 40), (2, 2, 2))
WHOLE = [(label, Box.whole(GRID.shape)) for label in (RIGHT_LUNG, LEFT_LUNG)]
SEEN = Coarse(torch.ones((2, *GRID.shape), dtype=torch.float16), GRID)


def lung() -> np.ndarray:
    labels = np.zeros(GRID.shape, np.uint8, order="F")
    labels[5:30, 5:30, 5:30] = RIGHT_LUNG.value
    return labels


def test_holes_are_lung_and_small_parts_are_not():
    labels = lung()
    labels[10:14, 10:14, 10:14] = 0
    labels[35:38, 35:38, 35:38] = RIGHT_LUNG.value
    assert (clean(labels, WHOLE, GRID, SEEN) == lung()).all()


def test_holes_are_filled_where_there_is_one_part_alone():
    labels = lung()
    labels[10:14, 10:14, 10:14] = 0
    assert (clean(labels, WHOLE, GRID, SEEN) == lung()).all()


def test_a_hole_that_holds_the_other_lung_keeps_it():
    labels = lung()
    labels[10:20, 10:20, 10:20] = LEFT_LUNG.value
    assert (clean(labels.copy(), WHOLE, GRID, SEEN) == labels).all()


@pytest.mark.parametrize(("lung", "other"), [(RIGHT_LUNG, LEFT_LUNG), (LEFT_LUNG, RIGHT_LUNG)])
def test_a_hole_in_either_lung_that_holds_a_speck_of_the_other_one_is_filled(lung, other):
    expected = np.zeros(GRID.shape, np.uint8)
    expected[3:18, 5:30, 5:30] = lung.value
    expected[22:37, 5:30, 5:30] = other.value
    labels = expected.copy()
    labels[9:12, 9:12, 9:12] = other.value
    assert (clean(labels, WHOLE, GRID, SEEN) == expected).all()


def test_a_second_large_part_stays():
    labels = lung()
    labels[5:30, 5:30, 32:39] = RIGHT_LUNG.value
    assert (clean(labels.copy(), WHOLE, GRID, SEEN) == labels).all()


def test_a_large_part_in_which_stage_1_saw_next_to_nothing_goes():
    labels = lung()
    labels[2:39, 2:39, 32:39] = RIGHT_LUNG.value
    coarse = Grid.axis_aligned((32, 32, 32), (2.5, 2.5, 2.5), (-1, 0, 1))
    probabilities = torch.zeros((2, *coarse.shape), dtype=torch.float16)
    probabilities[1, 6:14, 6:14, 6:14] = 0.9
    probabilities[0, 6:8, 6:8, 26:28] = 0.9
    assert (clean(labels, WHOLE, GRID, Coarse(probabilities, coarse)) == lung()).all()


def test_parts_that_stage_1_did_not_see_at_all_stay_together():
    labels = lung()
    labels[5:30, 5:30, 32:39] = RIGHT_LUNG.value
    blind = Coarse(torch.zeros_like(SEEN.lungs), GRID)
    assert (clean(labels.copy(), WHOLE, GRID, blind) == labels).all()


def test_a_tiny_lung_stays_if_it_is_all_there_is():
    labels = np.zeros(GRID.shape, np.uint8)
    labels[5:8, 5:8, 5:8] = LEFT_LUNG.value
    assert (clean(labels.copy(), WHOLE, GRID, SEEN) == labels).all()


def test_outside_its_box_nothing_is_touched():
    labels = lung()
    labels[35:38, 35:38, 35:38] = RIGHT_LUNG.value
    cleaned = clean(labels.copy(), [(RIGHT_LUNG, Box((0, 0, 0), (32, 32, 32)))], GRID, SEEN)
    assert (cleaned == labels).all()
