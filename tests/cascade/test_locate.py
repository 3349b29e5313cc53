from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cascadeseg.cascade.locate import BESIDE_BODY_MM, BEYOND_MM, body_box, copy_of, found_in, locate, slabs_along_z
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid
from cascadeseg.network.slabs import Finish, Image, unchanged
from tests.cascade.chest import LUNG_HU, TISSUE_HU, Thresholder, chest, chest_grid, tiny_model

BESIDE = (20, 45, 0)
"""Voxels of air on either side of the toy chest."""


def in_air() -> Scan:
    """The toy chest on a couch, in a field of view of noisy air."""
    inner = chest(chest_grid())
    nx, ny, _ = inner.grid.shape
    grid = inner.grid.cropped(Box.whole(inner.grid.shape).grown(BESIDE))
    voxels = np.random.default_rng(0).normal(-1000, 60, grid.shape).astype(np.int16)
    voxels[20 : 20 + nx, 45 : 45 + ny] = inner.voxels
    voxels[20 : 20 + nx, 40:42] = -300
    return replace(inner, voxels=voxels, grid=grid)


def test_the_air_around_body_and_couch_is_left_out_and_nothing_else():
    scan = in_air()
    coarse = scan.grid.resampled(4.0)
    box = body_box(scan, coarse)
    beside = BESIDE_BODY_MM / 4
    assert box.start[:2] == (20 - beside, 40 - beside)
    assert box.stop[:2] == (scan.grid.shape[0] - 20 + beside, scan.grid.shape[1] - 45 + beside)
    assert (box.start[2], box.stop[2]) == (0, coarse.shape[2])


def test_stage_1_finds_the_same_without_the_air(monkeypatch):
    scan = in_air()
    around, everywhere = (Thresholder(tiny_model().locator, sides=True) for _ in range(2))
    found = locate(scan, around)
    box = body_box(scan, found.grid)
    monkeypatch.setattr("cascadeseg.cascade.locate.body_box", lambda scan, grid: Box.whole(grid.shape))
    whole = locate(scan, everywhere)
    assert found.grid.matches(whole.grid)
    assert torch.equal(found.lungs[:, *box.slices], whole.lungs[:, *box.slices])
    found.lungs[:, *box.slices] = 0
    assert not found.lungs.any()
    assert np.prod(around.shapes[0]) < 0.6 * np.prod(everywhere.shapes[0])


@pytest.mark.parametrize("slab_mm", [16.0, 64.0])
def test_slabs_give_what_the_whole_gives_near_the_lungs_and_nothing_elsewhere(monkeypatch, slab_mm):
    scan = chest(chest_grid((4.0, 4.0, 4.0)))
    engine = Thresholder(tiny_model().locator, sides=True)
    whole = locate(scan, engine).lungs
    assert len(engine.shapes) == 1
    beyond = 3
    for name, mm in (("SLAB_MM", slab_mm), ("CONTEXT_MM", 8.0), ("KEPT_MM", 4.0 * beyond)):
        monkeypatch.setattr(f"cascadeseg.cascade.locate.{name}", mm)
    slabs = locate(scan, engine).lungs
    assert len(engine.shapes) > 3
    layers = torch.nonzero(found_in(whole).any(dim=0).any(dim=0)).flatten()
    near = slice(int(layers[0]) - beyond, int(layers[-1]) + 1 + beyond)
    assert torch.equal(slabs[..., near], whole[..., near])
    for far in (slice(0, near.start), slice(near.stop, None)):
        assert whole[..., far].any()
        assert not slabs[..., far].any()


class Looker(Thresholder):
    """Keeps what it saw."""

    def __call__(self, image: Image, finish: Finish = unchanged) -> Tensor:
        self.seen = image[..., :]
        return super().__call__(image, finish)


def test_a_scan_goes_on_for_stage_1_where_it_ends_in_the_body():
    scan = in_air()
    engine = Looker(tiny_model().locator, sides=True)
    found = locate(scan, engine)
    box, beyond = body_box(scan, found.grid), round(BEYOND_MM / 4)
    nx, ny, nz = box.shape
    assert engine.seen.shape[1:] == (nx, ny, nz + 2 * beyond), "beside it is air, above and below more of it"
    for end, inner in ((slice(0, beyond), beyond), (slice(-beyond, None), -beyond - 1)):
        layers = engine.seen[0][..., end]
        assert (layers - engine.seen[0][..., inner : inner + 1 or None]).abs().max() < 0.02
    x = slice(box.start[0] + nx // 2, None)
    cut = replace(scan, voxels=scan.voxels[x], grid=scan.grid.cropped(Box((x.start, 0, 0), scan.grid.shape)))
    locate(cut, engine)
    assert (engine.seen[0][:beyond] - engine.seen[0][beyond]).abs().max() < 0.02


@pytest.mark.parametrize("depth", [1, 7, 40, 172, 173, 300, 1000])
def test_the_slabs_keep_each_layer_once_and_see_beyond_both_ends(depth):
    stage = tiny_model().locator
    slabs, beyond = slabs_along_z(depth, stage), round(BEYOND_MM / 4)
    kept = [layer for slab in slabs for layer in range(slab.kept.start, slab.kept.stop)]
    assert kept == list(range(depth))
    assert (slabs[0].seen.start, slabs[-1].seen.stop) == (-beyond, depth + beyond)
    assert all(slab.seen.start <= slab.kept.start < slab.kept.stop <= slab.seen.stop for slab in slabs)


@dataclass
class Elsewhere(Thresholder):
    """On a device of which no image can be made here."""

    def __call__(self, image: Image, finish: Finish = unchanged) -> Tensor:
        return finish(torch.ones(3, *image.shape[1:]))


class Besides(Thresholder):
    """With outputs for two things beside the lungs, the second of which is surer than they are in the lower half."""

    def __call__(self, image: Image, finish: Finish = unchanged) -> Tensor:
        logits = super().__call__(image)
        beside = torch.full_like(logits[:2], -90.0)
        beside[1, ..., : image.shape[-1] // 2] = 90.0
        return finish(torch.cat([logits, beside]))


def test_what_a_network_knows_beside_the_lungs_is_no_lung():
    scan, stage = chest(chest_grid((4.0, 4.0, 4.0))), tiny_model().locator
    found, whole = (locate(scan, engine(stage, sides=True)).lungs for engine in (Besides, Thresholder))
    half = whole.shape[-1] // 2
    assert found_in(whole[..., :half]).any()
    assert not found[..., :half].any()
    assert torch.equal(found[..., half:], whole[..., half:])


def test_stage_1s_opinion_is_in_the_hosts_memory_on_any_device():
    found = locate(chest(chest_grid()), Elsewhere(tiny_model().locator, sides=True, device=torch.device("meta")))
    assert found.lungs.device.type == "cpu"
    assert torch.equal(copy_of(found.lungs), found.lungs)
    assert found.lungs.any()


@pytest.mark.parametrize("hu", [-1024, LUNG_HU, TISSUE_HU])
def test_a_scan_of_one_thing_is_looked_at_as_a_whole(hu):
    grid = Grid.axis_aligned((30, 20, 10), (3, 3, 5))
    scan = Scan(np.full(grid.shape, hu, np.int16), grid)
    assert body_box(scan, grid) == Box.whole(grid.shape)


def test_what_is_no_number_counts_as_air_and_stored_values_are_scaled():
    scan = in_air()
    coarse = scan.grid.resampled(4.0)
    stored = (scan.voxels.astype(np.float32) + 1000) / 2
    stored[:10] = np.nan
    scaled = replace(scan, voxels=stored, slope=2.0, intercept=-1000.0)
    assert body_box(scaled, coarse) == body_box(scan, coarse)


def test_a_lung_cut_by_the_field_of_view_is_not_cut_further():
    scan = chest(chest_grid())
    cut = Box((0, 0, 0), (20, *scan.grid.shape[1:]))
    part = replace(scan, voxels=scan.voxels[cut.slices], grid=scan.grid.cropped(cut))
    assert (part.voxels[-1] == LUNG_HU).any()
    coarse = part.grid.resampled(4.0)
    assert body_box(part, coarse) == Box.whole(coarse.shape)
