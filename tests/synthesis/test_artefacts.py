"""Metal, heartbeat, starved shoulders, and a mediastinum that moves: what they change, and what they must not."""

import math
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import cc3d
import numpy as np
import pytest
import SimpleITK
import torch

from cascadeseg.geometry import Box, Grid
from cascadeseg.synthesis import PRESETS, Patient, Phantom, Tissue, anatomy, pathology, render, sample_patient
from cascadeseg.synthesis.findings import Lesion
from tests.synthesis.neighbours import grown, shrunk

SPACING = 6.0
METAL = ("pacemaker", "spinal_rods", "sternal_wires", "clips", "dental", "shoulder_prosthesis", "hip_prosthesis")


def quiet(seed: int = 1, scanner: dict[str, Any] | None = None, **findings: Any) -> Patient:
    """A healthy patient in a scanner without noise, and what a test adds to them."""
    patient = sample_patient(seed, PRESETS["healthy"])
    still: dict[str, Any] = {
        "noise_hu": 0.0, "streaks_hu": 0.0, "cupping_hu": 0.0, "pulse_mm": 0.0, "starvation_hu": 0.0, "metal_hu": 0.0,
        "motion_mm": 0.0, "up": (0.0, 1.0), "circular": False,
    }  # fmt: skip
    return replace(
        patient,
        findings=replace(patient.findings, **findings),
        scanner=replace(patient.scanner, **(still | (scanner or {}))),
        torso=replace(patient.torso, rotation=(0.0, 0.0, 0.0)),
    )


def chest_of(patient: Patient, half: tuple[float, float, float] = (180, 150, 190), spacing: float = SPACING) -> Grid:
    x, y, z = patient.torso.offset
    middle = np.array([x, y, z + 0.35 * patient.torso.height * patient.torso.size])
    first = np.round((middle - np.asarray(half)) / spacing) * spacing
    return Grid.axis_aligned([2 * round(h / spacing) + 1 for h in half], (spacing,) * 3, first)


@lru_cache(maxsize=4)
def scanned(patient: Patient, grid_of: Patient, **grid: Any) -> Phantom:
    """A patient on the grid of another; many tests begin with the same one."""
    return render(patient, chest_of(grid_of, **grid))


def half_of(grid: Grid, side: int) -> Grid:
    """The right (0) or the left half (1) of a chest, and a little of the other."""
    nx, ny, nz = grid.shape
    start, stop = ((4 * nx // 10, nx), (0, 6 * nx // 10))[side]
    return grid.cropped(Box((start, 0, 0), (stop, ny, nz)))


def pair(patient: Patient, other: Patient, **grid: Any) -> tuple[Phantom, Phantom]:
    return scanned(patient, patient, **grid), scanned(other, patient, **grid)


def test_with_every_artefact_a_box_still_equals_the_box_cut_from_the_whole() -> None:
    scanner = {"pulse_mm": 7.0, "starvation_hu": 80.0, "metal_hu": 900.0, "streaks_hu": 30.0, "noise_hu": 10.0}
    patient = quiet(5, scanner, devices=METAL, shift=-25.0, dependent=(0.6, 10.0))
    grid = chest_of(patient)
    whole = render(patient, grid)
    a, b, c = grid.shape
    for box in (Box((a // 4, b // 5, c // 3), (3 * a // 4, 4 * b // 5, 2 * c // 3)), Box((3, 3, c // 2), (a, b, c))):
        part = render(patient, grid.cropped(box))
        assert torch.equal(part.labels, whole.labels[box.slices])
        assert (part.hu - whole.hu[box.slices]).abs().max() <= 1


@pytest.mark.parametrize("shift", [0.0, 0.5, -0.5])
def test_neighbouring_voxels_have_noise_of_their_own_wherever_the_grid_begins(shift: float) -> None:
    """Crops of stage 2 lie half a voxel beside whole multiples of their spacing."""
    scanner = {"noise_hu": 30.0, "noise_colour": 1.0, "slice_mm": 1.0, "slice_step": 1.0}
    noisy, still = (quiet(1, {**scanner, **other}) for other in ({}, {"noise_hu": 0.0}))
    x, y, z = noisy.torso.offset
    middle = np.round([x, y, z + 0.35 * noisy.torso.height * noisy.torso.size])
    grid = Grid.axis_aligned([24, 24, 24], (1.0, 1.0, 1.0), middle + shift)
    noise = render(noisy, grid).hu - render(still, grid).hu
    for axis in range(3):
        steps = noise.diff(dim=axis).abs().mean(dim=[a for a in range(3) if a != axis])
        assert steps.min() > 0.5 * steps.max(), f"axis {axis}"


def added(step: float, **scanner: Any) -> torch.Tensor:
    """What a fault of the scanner adds below the shoulders, less what all slices or all rows have in common."""
    common: dict[str, Any] = {"slice_step": 1.0, "pixel_mm": 0.7, "floor_hu": -4000.0, "ceiling_hu": 32767.0}
    still = {"noise_hu": 0.0, "streaks_hu": 0.0, "starvation_hu": 0.0}
    patient, without = (quiet(1, {**common, **scanner, **other}) for other in ({}, still))
    x, y, z = patient.torso.offset
    first = np.round([x - 15, y - 40, z + patient.torso.height * patient.torso.size - 60]) + (step - 1) / 2
    grid = Grid.axis_aligned([round(n / step) for n in (16, 80, 80)], (step,) * 3, first)
    change = render(patient, grid).hu - render(without, grid).hu
    change = change - change.mean(dim=(0, 1), keepdim=True)
    return change - change.mean(dim=(0, 2), keepdim=True)


FAULTS = pytest.mark.parametrize("fault", [{"noise_hu": 30.0}, {"streaks_hu": 60.0}, {"starvation_hu": 130.0}])
STAIRS = pytest.mark.parametrize("stairs", [True, False])


@FAULTS
@STAIRS
def test_noise_and_streaks_go_through_thick_slices_with_stairs_and_without(
    fault: dict[str, float], *, stairs: bool
) -> None:
    thin, thick = (added(1.0, slice_mm=slice_mm, stairs=stairs, **fault) for slice_mm in (1.0, 5.0))
    alike = [float((v[:, :, 2:] * v[:, :, :-2]).mean() / v.square().mean()) for v in (thin, thick)]
    assert alike[0] < 0.15
    assert 0.5 < alike[1] < 0.9
    # As strong as in thin slices, but for the places between two slices of which a file with stairs has the mean.
    assert (0.7 if stairs else 0.9) < float(thick.std() / thin.std()) < (1.0 if stairs else 1.2)


@pytest.mark.parametrize("fault", [{"streaks_hu": 60.0}, {"starvation_hu": 130.0}])
@pytest.mark.parametrize("slice_mm", [0.8, 5.0])
@STAIRS
def test_streaks_are_the_same_whatever_the_voxels(fault: dict[str, float], slice_mm: float, *, stairs: bool) -> None:
    fine, coarse = (added(step, slice_mm=slice_mm, stairs=stairs, **fault) for step in (1.0, 2.0))
    mean = torch.nn.functional.avg_pool3d(fine[None], 2)[0]
    assert float(torch.corrcoef(torch.stack([mean.flatten(), coarse.flatten()]))[0, 1]) > 0.95
    assert float(coarse.std() / mean.std()) == pytest.approx(1, abs=0.1)
    assert float(coarse.std() / fine.std()) < 0.9


@pytest.mark.parametrize(("degrees", "up"), [(90.0, (1.0, 0.0)), (270.0, (-1.0, 0.0)), (180.0, (0.0, -1.0))])
def test_fluid_and_couch_are_where_they_are_under_a_patient_who_was_turned_with_the_scanner(
    degrees: float, up: tuple[float, float]
) -> None:
    """A body turned in the header's frame lies on its couch as one whose scanner says how it lies."""
    couch = {"couch": "flat", "couch_gap": 2.0, "couch_tilt": 0.0, "cloth": 0}
    told = quiet(scanner={**couch, "up": up}, effusion=(40.0, 40.0))
    told = replace(
        told,
        torso=replace(told.torso, warp=(0.0, 0.0), offset=(0.0, 0.0, 0.0), belly=30.0),
        hounsfield=replace(told.hounsfield, gravity=150.0, texture=(0.0, 0.0, 0.0, 0.0)),
    )
    turned = replace(
        told,
        torso=replace(told.torso, rotation=(0.0, 0.0, degrees)),
        scanner=replace(told.scanner, up=(0.0, 1.0)),
    )
    fluid, heights = [], []
    half = 240
    phantoms = pair(told, turned, half=(half, half, 150))
    for phantom, (right, front) in zip(phantoms, (up, (0.0, 1.0)), strict=True):
        fluid.append(int((phantom.tissues == int(Tissue.EFFUSION)).sum()) * SPACING**3 / 1000)
        where = torch.nonzero(phantom.tissues == int(Tissue.COUCH)).float().mean(dim=0) * SPACING - half
        heights.append(float(where[0] * right + where[1] * front))
    assert fluid[0] > 200
    assert fluid[1] == pytest.approx(fluid[0], rel=0.15)
    assert heights[1] == pytest.approx(heights[0], abs=3)
    air = [float(phantom.hu[phantom.tissues == int(Tissue.LUNG)].mean()) for phantom in phantoms]
    assert air[1] == pytest.approx(air[0], abs=3)


def test_metal_streaks_its_own_slices_and_no_label() -> None:
    rods = ("spinal_rods",)
    clean, streaked = pair(quiet(devices=rods), quiet(scanner={"metal_hu": 900.0}, devices=rods))
    assert torch.equal(clean.labels, streaked.labels)
    difference = (streaked.hu - clean.hu).abs()
    metal = (clean.tissues == int(Tissue.METAL)).any(dim=0).any(dim=0)
    near = torch.nn.functional.max_pool1d(metal[None].float(), 7, 1, 3)[0] > 0
    assert difference[:, :, ~near].max() == 0
    here = difference[:, :, metal]
    assert float((here > 10).float().mean()) > 0.1
    lung = clean.labels[:, :, metal] > 0
    assert 5 < float(here[lung].mean()) < 200


def test_streaks_of_metal_change_from_slice_to_slice_not_from_voxel_to_voxel() -> None:
    changes = []
    for slice_mm in (1.0, 5.0):
        scanner = {"slice_mm": slice_mm, "stairs": False, "floor_hu": -4000.0, "ceiling_hu": 32767.0}
        patients = [quiet(1, {**scanner, "metal_hu": hu}, devices=("spinal_rods",)) for hu in (0.0, 900.0)]
        x, y, z = patients[0].torso.offset
        grid = Grid.axis_aligned([60, 60, 30], (1.0,) * 3, np.round([x - 30, y - 30, z + 60]))
        streaks = render(patients[1], grid).hu - render(patients[0], grid).hu
        changes.append(float(streaks.diff(dim=2).abs().mean() / streaks.abs().mean()))
    assert changes[0] > 0.3
    assert changes[1] < 0.6 * changes[0]


def test_without_metal_there_are_no_streaks() -> None:
    clean, same = pair(quiet(), quiet(scanner={"metal_hu": 900.0}))
    assert torch.equal(clean.hu, same.hu)


@cache
def whole_body(*devices: str) -> torch.Tensor:
    """HU from the teeth to the hips."""
    patient = quiet(devices=devices)
    return render(patient, chest_of(patient, (220, 120, 560), 8.0)).hu


@pytest.mark.parametrize("name", METAL)
def test_each_implant_is_dense_somewhere(name: str) -> None:
    assert float((whole_body(name) - whole_body()).max()) > 10


def test_a_beating_heart_has_two_contours_and_the_same_labels() -> None:
    calm, beating = pair(quiet(), quiet(scanner={"pulse_mm": 8.0}))
    assert torch.equal(calm.labels, beating.labels)
    changed = (calm.hu - beating.hu).abs() > 30
    assert float(changed[calm.tissues == int(Tissue.HEART)].float().mean()) > 0.01
    assert float(changed.float().mean()) < 0.05
    outer = torch.ones_like(changed)
    outer[changed.shape[0] // 8 : -changed.shape[0] // 8] = False
    assert not bool((changed & outer).any())


def test_starved_shoulders_leave_the_bases_alone() -> None:
    plain, starved = pair(quiet(), quiet(scanner={"starvation_hu": 100.0}))
    change = (plain.hu - starved.hu).abs().mean(dim=(0, 1))
    assert change[: len(change) // 3].max() == 0
    assert change[-len(change) // 4 :].max() > 5
    # Much less of it in air.
    air = plain.hu < -950
    difference = (plain.hu - starved.hu).abs()
    assert float(difference[air].mean()) < 0.3 * float(difference[~air].mean())


def test_the_mediastinum_moves_with_its_trachea_and_the_lungs_follow() -> None:
    centred, moved = pair(quiet(), quiet(shift=35.0))
    places = []
    for phantom in (centred, moved):
        low = phantom.tissues == int(Tissue.AIRWAY)
        places.append(float(torch.nonzero(low)[:, 0].float().mean()) * SPACING)
    assert 8 < places[1] - places[0] < 40
    right, left = ([int((p.labels == v).sum()) for p in (centred, moved)] for v in (1, 2))
    assert right[1] < 0.9 * right[0]
    assert left[1] > 1.1 * left[0]
    pieces = cc3d.connected_components(moved.labels.numpy(), connectivity=6)
    sizes = np.sort(np.bincount(pieces.ravel())[1:])[::-1]
    assert sizes[2:].sum() < 0.005 * sizes[:2].sum()


def test_it_moves_to_the_missing_lung_and_away_from_fluid() -> None:
    patients = [sample_patient(seed, PRESETS["oncology"]).findings for seed in range(300)]
    lost = [f for f in patients if sum(f.missing) and not any(f.effusion) and not any(f.pneumothorax)]
    assert len(lost) > 5
    for f in lost:
        assert f.shift * (1 if f.missing[0] else -1) > 0
    fluid = [sample_patient(seed, PRESETS["effusion"]).findings for seed in range(200)]
    flooded = [f for f in fluid if f.effusion[0] > 45 and f.effusion[1] < 25 and f.lobar == (-1, -1)]
    assert flooded
    assert all(f.shift < 0 for f in flooded if not any(f.white) and not any(f.missing) and not f.pneumothorax[1])
    healthy = [sample_patient(seed, PRESETS["healthy"]).findings for seed in range(50)]
    assert all(f.shift == 0 and f.dependent[0] == 0 for f in healthy)


def test_dependent_lung_is_densest_at_the_wall_and_stays_lung() -> None:
    airy, dense = pair(quiet(), quiet(dependent=(0.7, 10.0)))
    assert torch.equal(airy.labels, dense.labels)
    gain = dense.hu - airy.hu
    inside = airy.labels > 0
    # Rows from the back of each column of lung: 0 is the voxel at the dorsal wall.
    depth = inside.long().cumsum(dim=1) - 1
    means = [float(gain[inside & (depth == d) & (airy.tissues == int(Tissue.LUNG))].mean()) for d in range(8)]
    assert means[1] > 80
    assert means[1] > means[3] > means[5] >= means[7] >= 0


def test_emphysema_destroys_from_a_few_per_cent_of_the_lung_to_a_third_and_most_of_it_at_the_top() -> None:
    """Below -950 HU, as it is measured; from 5 % on it is called emphysema (10.2147/COPD.S284477)."""
    shares = []
    for strength in (0.0, 0.25, 0.5, 1.0):
        patient = quiet(emphysema=(strength, strength))
        phantom = render(patient, half_of(chest_of(patient, spacing=3.0), 0))
        lung, destroyed = phantom.labels == 1, (phantom.labels == 1) & (phantom.hu < -950)
        shares.append(float(destroyed.sum() / lung.sum()))
    none, mild, moderate, severe = shares
    assert none < 0.005 < mild < 0.05 < moderate < 0.15 < 0.2 < severe < 0.45
    middle = int(lung.any(dim=0).any(dim=0).nonzero().float().mean())
    lower, upper = (
        float(destroyed[part].sum() / lung[part].sum()) for part in (np.s_[..., :middle], np.s_[..., middle:])
    )
    assert upper > 1.3 * lower


def test_consolidation_that_has_settled_lies_at_the_back_and_the_base_and_holds_little_air() -> None:
    def dense_low_and_high(seed: int, settled: float) -> list[float]:
        patient = quiet(seed, consolidation=1.0, consolidation_extent=0.5, lower=0.0, peripheral=0.0, settled=settled)
        phantom = render(patient, half_of(chest_of(patient), 0))
        lung = phantom.labels == 1
        _, y, z = (place.float() for place in lung.nonzero(as_tuple=True))
        solid = (phantom.tissues == int(Tissue.CONSOLIDATION))[lung]
        corners = (y < y.mean()) & (z < z.mean()), (y > y.mean()) & (z > z.mean())
        return [float(solid[corner].float().mean()) for corner in corners]

    for strength, least, most in ((0.0, -0.3, 0.3), (1.2, 0.5, 1.0)):
        low, high = np.mean([dense_low_and_high(seed, strength) for seed in (2, 3, 4)], axis=0)
        assert least < low - high < most
    drawn = [sample_patient(seed, PRESETS["covid"]).findings for seed in range(60)]
    settled, scattered = (
        [f.consolidation for f in drawn if f.consolidation and bool(f.settled) == s] for s in (True, False)
    )
    assert np.mean(settled) > np.mean(scattered) + 0.1


def test_air_leads_from_the_trachea_into_both_lungs_and_the_large_airways_are_no_lung() -> None:
    patient = quiet()
    x, y, z = patient.torso.offset
    half = np.array([70.0, 60.0, 70.0])
    middle = np.array([x, y, z + (patient.chest.carina - 20) * patient.torso.size])
    grid = Grid.axis_aligned([71, 61, 71], (2.0,) * 3, np.round((middle - half) / 2) * 2)
    phantom = render(patient, grid)
    inside = phantom.labels > 0
    airway = phantom.tissues == int(Tissue.AIRWAY)
    assert int((airway & inside).sum()) <= 0.01 * int(airway.sum())
    air = (phantom.hu < -600) & (airway | (phantom.tissues == int(Tissue.BRONCHUS)))
    pieces = cc3d.connected_components(air.numpy(), connectivity=26)
    tree = pieces == np.bincount(pieces[airway.numpy()])[1:].argmax() + 1
    for value in (1, 2):
        assert (tree & (phantom.labels.numpy() == value)).sum() > 5


def test_the_right_lung_may_lie_against_the_trachea_which_stays_outside() -> None:
    patient = quiet()
    x, y, z = patient.torso.offset
    height = 0.5 * (patient.chest.carina + 10 + patient.torso.height - 18) * patient.torso.size
    half = np.array([50.0, 50.0, 10.0])
    grid = Grid.axis_aligned([101, 101, 21], (1.0,) * 3, np.round(np.array([x, y, z + height]) - half))
    walls = []
    for paratracheal in ((-8.0, 30.0), (30.0, 30.0)):
        phantom = render(replace(patient, chest=replace(patient.chest, paratracheal=paratracheal)), grid)
        airway = (phantom.tissues == int(Tissue.AIRWAY)).numpy()
        assert not (airway & (phantom.labels.numpy() > 0)).any()
        image = SimpleITK.GetImageFromArray(airway.astype(np.uint8))
        far = SimpleITK.GetArrayFromImage(SimpleITK.SignedMaurerDistanceMap(image, squaredDistance=False))
        walls.append([far[phantom.labels.numpy() == value].min() for value in (1, 2)])
    (right, left), (usual, _) = walls
    assert 0.5 < right < 4 < 7 < min(left, usual)


def test_lobar_bronchi_at_the_hilum_are_no_lung_further_out_they_are() -> None:
    patient, whole = quiet(), []
    for share in (0.0, 1.0):
        chest = replace(patient.chest, hilar_share=share)
        whole.append(render(replace(patient, chest=chest), chest_of(patient, spacing=3.0)))
    with_roots, without = whole
    gas = (with_roots.tissues == int(Tissue.BRONCHUS)) & (with_roots.hu < -850)
    lost = (with_roots.labels > 0) & (without.labels == 0)
    assert int((gas & lost).sum()) * 27 > 1000
    assert int((gas & (without.labels > 0)).sum()) * 27 > 1000
    assert int(lost.sum()) < 0.01 * int((without.labels > 0).sum())


def test_wide_vessels_of_the_hilum_are_no_lung_and_narrow_ones_are() -> None:
    patient = quiet()
    chests = [replace(patient.chest, hilar_vessel=least, hilar_cuff=1.5) for least in (0.0, 2.5, 20.0)]
    none, wide, every = (render(replace(patient, chest=chest), chest_of(patient, spacing=3.0)) for chest in chests)
    blood = none.tissues == int(Tissue.BLOOD)
    assert torch.equal(blood, every.tissues == int(Tissue.BLOOD))
    for label in (1, 2):
        vessels = blood & (every.labels == label)
        outside = [int((vessels & (phantom.labels == 0)).sum()) * 27 for phantom in (none, wide)]
        assert outside[0] > outside[1] > 5000
        # Some voxels that a vessel fills in part are lung.
        assert int((vessels & (none.labels == label)).sum()) < 0.08 * int(vessels.sum())
        assert int((every.labels == label).sum()) < 1.03 * int((none.labels == label).sum())


def test_trees_go_on_where_the_hilum_is_cut_out_of_the_lung() -> None:
    patient = quiet()
    chests = [replace(patient.chest, hilum=1.6, hilar_vessel=least, hilar_cuff=0.0) for least in (1.5, 20.0)]
    cut, whole = (render(replace(patient, chest=chest), chest_of(patient, spacing=2.0)) for chest in chests)
    lost = (whole.labels > 0) & (cut.labels == 0)
    for tissue, low, high in ((Tissue.LUNG_VESSEL, 0, 500), (Tissue.BRONCHUS, -1100, -800)):
        inner = lost & (whole.tissues == int(tissue)) & (whole.hu > low) & (whole.hu < high)
        assert int(inner.sum()) * 8 > 500
        assert bool((cut.tissues[inner] == int(tissue)).all())
        assert float((cut.hu[inner] - whole.hu[inner]).float().abs().median()) < 60


def test_a_stomach_in_the_chest_is_gas_that_is_no_lung() -> None:
    patient = quiet(pull_up=20.0)
    patient = replace(patient, abdomen=replace(patient.abdomen, stomach_gas=0.9))
    grid = chest_of(patient)
    phantom = render(patient, grid)
    high = round((patient.torso.offset[2] + 30 * patient.torso.size - grid.affine[2, 3]) / SPACING)
    gas = phantom.tissues[:, :, high:] == int(Tissue.GAS)
    assert int(gas.sum()) * SPACING**3 > 20_000
    assert not bool((gas & (phantom.labels[:, :, high:] > 0)).any())


def test_gas_of_the_bowel_has_its_own_hu_and_a_soft_edge() -> None:
    patient, shares = quiet(), []
    for edge in (0.0, 9.0):
        abdomen = replace(patient.abdomen, flexure_height=1.0, colon=40.0, colon_gas=1.0, gas_hu=40.0, gas_edge=edge)
        phantom = render(replace(patient, abdomen=abdomen), chest_of(patient, spacing=3.0))
        gas = phantom.tissues == int(Tissue.GAS)
        inner = shrunk(gas, 3)
        above = phantom.hu[inner].float().median() - patient.hounsfield.air
        assert above == pytest.approx(40, abs=6)
        shares.append(float((phantom.hu[gas] > -900).float().mean()))
    assert shares[1] > 1.5 * shares[0]


def test_the_colon_reaches_the_left_dome_and_lungs_reach_below_the_domes() -> None:
    patient = quiet()
    patient = replace(patient, abdomen=replace(patient.abdomen, flexure_height=1.0, colon_gas=1.0))
    grid = chest_of(patient)
    phantom = render(patient, grid)
    lung, gas = phantom.labels == 2, phantom.tissues == int(Tissue.GAS)
    bottom = lung.int().argmax(dim=2)
    under = [gas[i, j, max(0, int(bottom[i, j]) - 5) : bottom[i, j]].any() for i, j in lung.any(dim=2).nonzero()]
    assert sum(under) * SPACING**2 > 200
    dome = patient.torso.offset[2]
    lowest = grid.affine[2, 3] + SPACING * int(torch.nonzero(phantom.labels)[:, 2].min())
    assert lowest < dome - 25 * patient.torso.size


def test_the_left_flexure_lies_along_the_ribs_under_the_diaphragm_anywhere_from_the_side_to_the_front() -> None:
    forward = []
    for seed in range(30):
        patient = sample_patient(seed, PRESETS["healthy"])
        calibre = patient.abdomen.colon
        at = x, y, z = tuple(
            torch.tensor(v) for v in anatomy.left_flexure(patient, calibre, np.random.default_rng(seed))
        )
        assert 0.9 * calibre < -float(anatomy.cage(at, patient.torso)) < calibre + 18
        assert float(z) + calibre < min(float(anatomy.diaphragm_height(x, y, patient, 1)), patient.chest.dome[1])
        forward.append(float(y) / patient.torso.half_depth)
    assert min(forward) < 0.3
    assert max(forward) > 0.7


def test_one_person_in_three_has_a_loop_of_colon_beside_the_flexure() -> None:
    looped = []
    for seed in range(80):
        x, _, z = anatomy.colon(sample_patient(seed, PRESETS["healthy"])).centres.numpy().T
        down = int(np.flatnonzero((x < -60) & (z < -200))[0])  # past the flexure, however high
        left = z[int(np.flatnonzero(x[:down] > -15)[-1]) : down]
        peak = int(left.argmax())
        falls = [np.maximum.accumulate(part) - part for part in (left[: peak + 1], left[peak:][::-1])]
        looped.append(max(float(fall.max()) for fall in falls) > 20)
    assert 0.2 < np.mean(looped) < 0.5


def test_the_stomach_lies_against_the_wall_in_front() -> None:
    for seed in range(10):
        patient = sample_patient(seed, PRESETS["healthy"])
        dome = patient.chest.dome[1]
        axes = torch.arange(-150.0, 60, 6), torch.arange(-120.0, 200, 3), torch.arange(dome - 200, dome, 6)
        points = torch.meshgrid(*axes, indexing="ij")
        inside = anatomy.stomach_shape(points, patient, torch.tensor(-math.inf)) < 0
        assert 0.88 < float(points[1][inside].max()) / patient.torso.half_depth < 1.0


def test_folds_part_the_gas_of_the_colon_into_cells() -> None:
    patient = quiet()
    shares, volumes = [], []
    full = replace(patient.abdomen, flexure_height=1.0, colon=30.0, colon_gas=1.0, stomach_gas=0.0)
    for folds, walls_mm in ((0.13, 2.4), (0.32, 2.4), (0.32, 5.0)):
        abdomen = replace(full, folds=folds, walls_mm=walls_mm)
        grid = chest_of(patient, half=(170, 140, 160), spacing=3.0)
        gas = render(replace(patient, abdomen=abdomen), grid).tissues == int(Tissue.GAS)
        core = shrunk(gas, 2)
        shares.append(float(core.sum() / gas.sum()))
        volumes.append(int(gas.sum()))
    assert shares[1] < 0.6 * shares[0]
    assert volumes[2] < 0.8 * volumes[1]


def test_gas_of_the_colon_on_the_left_is_near_the_ribs() -> None:
    medians = []
    for seed in range(6):
        patient = quiet(seed)
        abdomen = replace(patient.abdomen, flexure_height=1.0, colon_gas=1.0, stomach_gas=0.0, loop_gas=0.0)
        grid = half_of(chest_of(patient, half=(170, 140, 160), spacing=4.0), 1)
        phantom = render(replace(patient, abdomen=abdomen), grid)
        bones, lung = (SimpleITK.GetImageFromArray(m.numpy().astype(np.uint8)) for m in
                       (phantom.tissues == int(Tissue.BONE), phantom.labels == 2))  # fmt: skip
        to_bone, to_lung = (SimpleITK.GetArrayFromImage(SimpleITK.SignedMaurerDistanceMap(image, squaredDistance=False))
                            for image in (bones, lung))  # fmt: skip
        left = np.arange(grid.shape[0])[:, None, None] < np.nonzero(phantom.labels.numpy() == 2)[0].max()
        gas = (phantom.tissues == int(Tissue.GAS)).numpy() & (to_lung * 4.0 < 50) & left
        if np.count_nonzero(gas) > 50:
            medians.append(4.0 * float(np.median(to_bone[gas])))
    assert len(medians) >= 4
    assert np.median(medians) < 32


def test_lesions_lie_in_their_lung_at_any_depth_or_at_its_hilum() -> None:
    depths: dict[bool, list[float]] = {False: [], True: []}
    hilar = 0
    for seed in range(5000, 5040):
        patient = sample_patient(seed, PRESETS["oncology"])
        for number, lesion in enumerate(patient.findings.lesions):
            place = pathology._place(patient, number)
            assert place is not None
            if lesion.hilar:
                hilar += 1
                continue
            x, y, z = place[:, None]
            depth = -float(anatomy.lung_part((x, y, z), patient, lesion.side))
            assert depth > 0
            depths[lesion.rim].append(depth)
    assert hilar > 15
    assert np.median(depths[True]) < 5 < 10 < np.median(depths[False])


def test_masses_on_the_diaphragm_are_common() -> None:
    heights = []
    for seed in range(5000, 5040):
        patient = sample_patient(seed, PRESETS["oncology"])
        for number, lesion in enumerate(patient.findings.lesions):
            place = pathology._place(patient, number)
            if place is not None and lesion.rim and not lesion.hilar:
                x, y, z = place[:, None]
                heights.append(float(z - anatomy.diaphragm_height(x, y, patient, lesion.side)))
    assert 0.28 < np.mean(np.array(heights) < 12) < 0.7


def test_masses_grow_beyond_the_lung_and_not_their_label() -> None:
    patient = quiet()
    mass = Lesion(
        0, radius=45.0, hu=40.0, cavity=0.0, lobulation=0.1, ground_glass=False, rim=True, hilar=False, grows=True
    )
    beyond = []
    for grows in (False, True):
        findings = replace(patient.findings, lesions=(replace(mass, grows=grows),))
        phantom = render(replace(patient, findings=findings), chest_of(patient, spacing=3.0))
        beyond.append((phantom, (phantom.tissues == int(Tissue.NODULE)) & (phantom.labels == 0)))
    (stays, out), (grows_on, further) = beyond
    assert torch.equal(stays.labels, grows_on.labels)
    assert int(out.sum()) * 27 < 500 < 5000 < int(further.sum()) * 27
    # What has grown out is there in a box that holds nothing of the lung.
    bare = further & ~grown(grows_on.labels > 0, 6)
    start = torch.nonzero(bare)[0].tolist()
    box = Box(tuple(start), tuple(n + 1 for n in start))
    alone = render(replace(patient, findings=findings), chest_of(patient, spacing=3.0).cropped(box))
    assert int(alone.tissues) == int(Tissue.NODULE)


@pytest.mark.parametrize(("draw", "kind"), [(0, "fat"), (2, "soft"), (3, "chalk")])
def test_thickened_pleura_is_fat_or_soft_or_has_chalk_in_it(draw: int, kind: str) -> None:
    patient = quiet()
    findings = replace(patient.findings, pleura=9.0, seed=70 + draw)
    plain, thick = pair(patient, replace(patient, findings=findings), spacing=3.0)
    band = (plain.labels == 1) & (thick.labels == 0)
    assert int(band.sum()) * 27 > 20_000
    pleura = thick.tissues == int(Tissue.PLEURA)
    assert bool(pleura.any()) == (kind != "fat")
    hu = thick.hu[band]
    assert (float(hu.median()) < -20) == (kind == "fat")
    assert bool((thick.hu[pleura] > 200).any()) == (kind == "chalk")
