"""Whether a body lies as its header says: the 48 ways round, and the words for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cascadeseg.cascade import orientation
from cascadeseg.cascade.crop import LungBox
from cascadeseg.cascade.orientation import (
    CUBE,
    FILE,
    LEAST_ML,
    TURNS,
    VIEW,
    Orientation,
    chest_cube,
    likelihoods_of,
    looked_like,
    orientation_of,
    shipped,
    turned,
)
from cascadeseg.errors import ModelError
from cascadeseg.formats import Scan
from cascadeseg.geometry import Box
from cascadeseg.labels import LEFT_LUNG, RIGHT_LUNG
from tests.cascade.chest import LUNG_HU, chest, chest_grid, thresholding_segmenter

STEPS = {1: "R", -1: "L", 10: "A", -10: "P", 100: "S", -100: "I"}
"""Of `RAMP` along an axis of an array, by what the axis grows towards."""
RAMP = (torch.arange(4)[:, None, None] + 10 * torch.arange(4)[:, None] + 100 * torch.arange(4)).double()


def test_there_are_48_ways_round_and_the_first_is_the_header_s():
    seen = {tuple(turned(RAMP, turn).flatten().tolist()) for turn in TURNS}
    assert len(seen) == len(TURNS) == 48
    assert turned(RAMP, TURNS[0]).equal(RAMP)


@pytest.mark.parametrize("turn", TURNS)
def test_letters_tell_what_a_turn_makes_upright(turn):
    wrong = next(other for step in TURNS if turned(other := turned(RAMP, step), turn).equal(RAMP))
    grows = [wrong[1, 0, 0] - wrong[0, 0, 0], wrong[0, 1, 0] - wrong[0, 0, 0], wrong[0, 0, 1] - wrong[0, 0, 0]]
    right, front, head = (STEPS[int(step)] for step in grows)
    assert looked_like("RAS", turn) == right + front + head
    mirrored = looked_like("LPI", turn)
    assert looked_like("SLA", turn) == head + mirrored[0] + front


@pytest.mark.parametrize(
    ("header", "body", "sides"),
    [
        ("RAS", "LPS", "right and left are exchanged; "),
        ("LPS", "RPS", "right and left are exchanged; "),
        ("LPS", "LPI", ""),
        ("SRA", "IRA", ""),
        ("RAS", "SAR", "right and left mean nothing; "),
    ],
)
def test_words_say_what_it_means_for_the_sides(header, body, sides):
    words = Orientation(header, body, 0.97, 0.001).words
    assert words.endswith(f": if so, {sides}correct the header")
    assert f"towards {', '.join(header)}, " in words
    assert f"towards {', '.join(body)}: " in words


def test_a_header_is_doubted_where_it_is_hardly_right_and_something_else_is():
    assert Orientation("RAS", "LPS", 0.97, 0.001).doubtful
    assert not Orientation("RAS", "LSP", 0.07, 0.006).doubtful, "of no chest at all"
    assert not Orientation("RAS", "LPS", 0.5, 0.3).doubtful


def test_the_network_sees_air_beyond_the_scan_and_a_chest_in_the_middle():
    grid = chest_grid()
    cube = chest_cube(chest(grid), np.array([62.0, 0.0, 0.0]))
    middle, lung = CUBE // 2, (LUNG_HU - VIEW.low_hu) / VIEW.scale_hu
    assert cube.shape == (2, CUBE, CUBE, CUBE)
    assert cube[:, -1].eq(0).all(), "228 mm from the middle the scan has ended"
    assert cube[0, middle, middle, middle] == pytest.approx(lung, abs=1e-3)
    assert cube[1, middle, middle, middle] == 0, "darker than all soft tissue"


def test_what_is_seen_follows_the_scan_wherever_it_lies_and_however_fine_it_is():
    lungs = [LungBox(RIGHT_LUNG, Box((0, 0, 0), (40, 60, 48)), chest_grid())]
    one, other = (orientation_of(chest(grid), lungs, grid) for grid in (chest_grid(), chest_grid((2.0, 2.0, 2.5))))
    assert one.header == other.header == "RAS"
    assert one.header_likelihood == pytest.approx(other.header_likelihood, abs=0.02)


def test_likelihoods_turn_with_the_chest():
    cube = torch.rand(2, CUBE, CUBE, CUBE, generator=torch.Generator().manual_seed(0))
    before, after = (likelihoods_of(seen, shipped()) for seen in (cube, turned(cube, TURNS[5])))
    assert before.sum() == pytest.approx(1)
    assert after.sort().values.numpy() == pytest.approx(before.sort().values.numpy(), abs=1e-5)
    assert after[0] == pytest.approx(float(before[5]), abs=1e-5)


def test_without_lungs_nothing_is_said():
    grid = chest_grid()
    assert orientation_of(chest(grid), [], grid) is None
    tissue = Scan(np.full(grid.shape, 40, np.int16), grid, source="tissue")
    assert thresholding_segmenter().segment(tissue).orientation is None


def test_slivers_are_too_little_to_tell_from():
    scan = chest(chest_grid())
    whole = thresholding_segmenter().segment(scan)
    assert whole.orientation is not None
    low = Box((0, 0, 0), (*scan.grid.shape[:2], 11))
    bases = thresholding_segmenter().segment(Scan(scan.voxels[low.slices], scan.grid.cropped(low)))
    assert 0 < sum(lung.volume_ml for lung in bases.lungs) < LEAST_ML
    assert bases.orientation is None
    assert {lung.label for lung in bases.lungs} == {RIGHT_LUNG, LEFT_LUNG}


@pytest.mark.parametrize("content", [None, b"cut off", "another network's"])
def test_damaged_weights_are_told_in_one_line(content, tmp_path, monkeypatch):
    if isinstance(content, str):
        save_file({"head.bias": torch.zeros(1)}, tmp_path / FILE)
    elif content:
        (tmp_path / FILE).write_bytes(content)
    monkeypatch.setattr(orientation, "shipped_model", lambda: tmp_path)
    with pytest.raises(ModelError, match="install cascadeseg again") as caught:
        orientation.shipped.__wrapped__()
    assert FILE in str(caught.value)
    assert "\n" not in str(caught.value)
