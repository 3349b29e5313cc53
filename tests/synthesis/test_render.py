"""What a phantom must be, whatever it shows."""

from dataclasses import replace
from functools import cache

import cc3d
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cascadeseg.geometry import Box, Grid
from cascadeseg.synthesis import PRESETS, Patient, Phantom, Tissue, render, sample_patient
from cascadeseg.synthesis.trees import beads_beside, grow_tree, tree_beads
from tests.synthesis.neighbours import grown, shrunk

SPACING = 5.0


def around_the_chest(
    patient: Patient, spacing: float = SPACING, half: tuple[float, float, float] = (180, 150, 190)
) -> Grid:
    """A grid about the patient's middle line, symmetric in x: made to be compared with its mirror image."""
    x, y, z = patient.torso.offset
    centre = np.array([x, y, z + 0.35 * patient.torso.height * patient.torso.size])
    shape = [2 * round(h / spacing) + 1 for h in half]
    return Grid.axis_aligned(shape, (spacing,) * 3, centre - np.asarray(half) // spacing * spacing)


@pytest.mark.parametrize("preset", ["default", "intensive_care", "abdomen"])
def test_the_same_seed_gives_the_same_voxels(preset: str) -> None:
    scans = []
    for _ in range(2):
        patient = sample_patient(8, PRESETS[preset])
        scans.append(render(patient, patient.field_of_view(10.0)))
    assert torch.equal(scans[0].hu, scans[1].hu)
    assert torch.equal(scans[0].labels, scans[1].labels)
    assert torch.equal(scans[0].tissues, scans[1].tissues)


def test_another_seed_gives_another_patient() -> None:
    assert sample_patient(1).torso != sample_patient(2).torso


@pytest.mark.parametrize(
    ("seed", "preset", "spacing"),
    [(5, "default", 6.0), (11, "intensive_care", 6.0), (12, "fibrosis", (5.0, 5.0, 8.0)), (13, "oncology", 6.0)],
)
def test_a_box_equals_the_same_box_cut_from_the_whole(seed: int, preset: str, spacing: float) -> None:
    patient = sample_patient(seed, PRESETS[preset])
    grid = patient.field_of_view(spacing)
    whole = render(patient, grid)
    a, b, c = grid.shape
    box = Box((a // 4, b // 5, c // 3), (3 * a // 4, 4 * b // 5, 2 * c // 3))
    part = render(patient, grid.cropped(box))
    assert torch.equal(part.labels, whole.labels[box.slices])
    # Matrix products of another size may round differently in the last bit, then to the neighbouring whole HU.
    assert (part.hu - whole.hu[box.slices]).abs().max() <= 1
    assert part.hu.shape == part.labels.shape == part.tissues.shape == box.shape


def test_one_voxel_and_one_slice_can_be_rendered() -> None:
    patient = sample_patient(2, PRESETS["healthy"])
    grid = around_the_chest(patient)
    whole = render(patient, grid)
    for shape in ((1, 1, 1), (40, 1, 30), (1, 30, 30), (30, 30, 1)):
        start = (15, 20, 20)
        box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
        part = render(patient, grid.cropped(box))
        assert torch.equal(part.labels, whole.labels[box.slices])
        assert (part.hu - whole.hu[box.slices]).abs().max() <= 1


def test_slabs_are_seamless(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    patient = sample_patient(2, PRESETS["covid"])
    grid = around_the_chest(patient, 6.0)
    whole = render(patient, grid)
    monkeypatch.setitem(sys.modules["cascadeseg.synthesis.render"].SLAB_VOXELS, "cpu", whole.hu.numel() // 3)
    slabs = render(patient, grid)
    assert torch.equal(slabs.labels, whole.labels)
    assert (slabs.hu - whole.hu).abs().max() <= 1


def test_a_grid_whose_planes_are_larger_than_slabs_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    patient = sample_patient(2, PRESETS["healthy"])
    grid = around_the_chest(patient, 20.0, half=(60, 60, 60))
    whole = render(patient, grid)
    assert whole.labels.any()
    monkeypatch.setitem(sys.modules["cascadeseg.synthesis.render"].SLAB_VOXELS, "cpu", grid.shape[1])
    assert torch.equal(render(patient, grid).labels, whole.labels)


def test_values_and_types() -> None:
    patient = sample_patient(2, PRESETS["healthy"])
    phantom = render(patient, patient.field_of_view(6.0))
    assert phantom.hu.dtype == torch.float32
    assert phantom.labels.dtype == phantom.tissues.dtype == torch.uint8
    assert set(phantom.labels.unique().tolist()) == {0, 1, 2}
    assert set(phantom.tissues.unique().tolist()) <= {int(t) for t in Tissue}
    assert torch.equal(phantom.hu, phantom.hu.round())


@pytest.mark.parametrize("seed", [0, 1])
def test_healthy_lungs_are_one_piece_each_and_of_human_size(seed: int) -> None:
    patient = sample_patient(seed, PRESETS["healthy"])
    phantom = render(patient, around_the_chest(patient, 4.0))
    size = patient.torso.size**3
    for value in (1, 2):
        pieces = cc3d.connected_components(phantom.labels.numpy() == value, connectivity=6)
        sizes = np.sort(np.bincount(pieces.ravel())[1:])[::-1]
        assert len(sizes) == 1 or sizes[1] < 0.002 * sizes[0]
        assert 700 * size < sizes[0] * 0.064 < 5000 * size


def test_right_and_left_lie_where_the_patient_has_them() -> None:
    patient = sample_patient(1, PRESETS["healthy"])
    labels = render(patient, around_the_chest(patient)).labels
    x = [torch.nonzero(labels == value)[:, 0].float().mean() for value in (1, 2)]
    assert x[0] > x[1]


def test_mirrored_anatomy_swaps_the_labels() -> None:
    patient = sample_patient(1, PRESETS["healthy"])
    grid = around_the_chest(patient)
    labels, mirrored = render(patient, grid).labels, render(patient.mirrored(), grid).labels
    swapped = mirrored.flip(0)
    swapped = torch.where(swapped == 0, 0, 3 - swapped)
    for value in (1, 2):
        # Not voxel for voxel: the lattice and the waves of the contours stay where they are in the world.
        both = ((swapped == value) & (labels == value)).sum()
        assert 2 * both / ((swapped == value).sum() + (labels == value).sum()) > 0.95


def test_a_patient_turned_round_has_the_sides_of_the_header() -> None:
    patient = sample_patient(1, PRESETS["healthy"])
    turned = replace(patient, torso=replace(patient.torso, rotation=(0.0, 0.0, 180.0)))
    for each in (patient, turned):
        grid = around_the_chest(each)
        right, left = (grid.world(np.argwhere(render(each, grid).labels.numpy() == v).mean(axis=0)) for v in (1, 2))
        assert right[0] > left[0] + 50


@pytest.mark.parametrize("degrees", [90.0, 270.0])
def test_a_patient_on_the_side_has_the_bodys_own_sides(degrees: float) -> None:
    """Where the right lung lies below the left one, no header can say that it is not the right one."""
    patient = sample_patient(1, PRESETS["healthy"])
    turned = replace(patient, torso=replace(patient.torso, rotation=(0.0, 0.0, degrees)))
    half = (180, 180, 190)
    as_it_is, on_side = (render(each, around_the_chest(each, half=half)).labels for each in (patient, turned))
    expected = torch.rot90(as_it_is, round(degrees / 90), (0, 1))
    lung = (expected > 0) & (on_side > 0)
    assert lung.sum() > 0.85 * (expected > 0).sum()
    assert (expected == on_side)[lung].float().mean() > 0.99


def test_labels_do_not_depend_on_the_spacing() -> None:
    patient = sample_patient(4, PRESETS["healthy"])
    coarse = around_the_chest(patient, 6.0)
    fine = Grid.axis_aligned([2 * n - 1 for n in coarse.shape], (3.0,) * 3, coarse.affine[:3, 3])
    same = render(patient, coarse).labels == render(patient, fine).labels[::2, ::2, ::2]
    assert same.float().mean() > 0.9995


def test_tissues_have_their_hu() -> None:
    patient = sample_patient(6, PRESETS["healthy"])
    phantom = render(patient, around_the_chest(patient, 4.0))
    for tissue, low, high in (
        (Tissue.AIR, -1060, -930),
        (Tissue.FAT, -160, -40),
        (Tissue.MUSCLE, -20, 110),
        (Tissue.LUNG, -960, -500),
        (Tissue.LIVER, -30, 180),
        (Tissue.AIRWAY, -1060, -850),
    ):
        assert low < float(phantom.hu[phantom.tissues == int(tissue)].median()) < high, tissue


def test_the_label_keeps_sick_lung_and_leaves_out_airway_fluid_and_free_air() -> None:
    for seed in (40, 42, 49):  # of free air as thin as 41's a fiftieth and more is the pleura, which the label has
        patient = sample_patient(seed, PRESETS["intensive_care"])
        phantom = render(patient, around_the_chest(patient, 6.0))
        inside = phantom.labels > 0
        for tissue in (Tissue.AIRWAY, Tissue.EFFUSION, Tissue.PNEUMOTHORAX, Tissue.EMPTY_HEMITHORAX, Tissue.HEART):
            here = phantom.tissues == int(tissue)
            assert int((here & inside).sum()) <= 0.02 * int(here.sum()) + 2, tissue
        solid = phantom.tissues == int(Tissue.CONSOLIDATION)
        assert int((solid & inside).sum()) >= 0.95 * int(solid.sum())


@pytest.mark.parametrize("consolidation", [0.85, 0.92])
def test_lung_that_keeps_some_air_is_never_as_even_as_fat(consolidation: float) -> None:
    patient = sample_patient(600000, PRESETS["healthy"])
    sick = replace(patient.findings, consolidation=consolidation, consolidation_extent=0.5)
    phantom = render(replace(patient, findings=sick), around_the_chest(patient, 3.0))
    mean = F.avg_pool3d(phantom.hu[None], 3, stride=1, padding=1)[0]
    spread = (F.avg_pool3d(phantom.hu[None].square(), 3, stride=1, padding=1)[0] - mean.square()).clamp(min=0).sqrt()
    like_fat = (mean > -130) & (mean < -60) & (spread < 40)
    inside = shrunk(phantom.tissues == int(Tissue.CONSOLIDATION), 1)
    assert like_fat[inside].float().mean() < 0.03
    assert like_fat[phantom.tissues == int(Tissue.FAT)].float().mean() > 0.1


def test_lung_free_views_are_nearly_lung_free() -> None:
    shares = []
    for seed in range(4, 10):
        patient = sample_patient(seed, PRESETS["abdomen"])
        shares.append(float((render(patient, patient.field_of_view(10.0)).labels > 0).float().mean()))
    assert float(np.median(shares)) < 0.005


def test_thick_slices_are_blurred_along_z() -> None:
    from dataclasses import replace

    patient = sample_patient(1, PRESETS["healthy"])
    edges = []
    for slice_mm in (1.0, 8.0):
        scanner = replace(
            patient.scanner, slice_mm=slice_mm, slice_step=1.0, noise_hu=0.0, streaks_hu=0.0, stairs=False
        )
        thick = replace(patient, scanner=scanner)
        hu = render(thick, around_the_chest(patient, 3.0)).hu
        edges.append(float(hu.diff(dim=2).abs().quantile(0.9) if hu.numel() < 10**6 else hu.diff(dim=2).abs().max()))
    assert edges[1] < 0.75 * edges[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_and_cuda_agree() -> None:
    patient = sample_patient(11, PRESETS["intensive_care"])
    grid = patient.field_of_view(3.0)
    here, there = render(patient, grid), render(patient, grid, device="cuda")
    assert (here.labels != there.labels.cpu()).float().mean() < 1e-4
    assert ((here.hu - there.hu.cpu()).abs() > 3).float().mean() < 1e-3


@cache
def healthy_chest(seed: int) -> Phantom:
    """At 3 mm; for tests that stand together, so that one process has them."""
    patient = sample_patient(seed, PRESETS["healthy"])
    return render(patient, around_the_chest(patient, 3.0))


def test_fat_and_nodes_lie_where_scans_have_them() -> None:
    # Of what lies 2 to 6 mm outside the lungs of five scans behind their bases, to the sides, 22 to 31 % is fat, and 13
    # to 26 % at the hila (scripts/surroundings.py).
    bases, hila = [], []
    for seed in (7000, 7001, 7003, 7006):
        phantom = healthy_chest(seed)
        lungs = phantom.labels > 0
        shell = grown(lungs, 2) & ~grown(lungs, 1)
        fat = ((phantom.hu > -150) & (phantom.hu < -30)).float()
        across, back, low = (span_of(lungs, axis) for axis in range(3))
        beside, front, up = (across - 0.5).abs()[:, None, None], back[:, None], low
        bases.append(fat[shell & (beside > 0.25) & (front < 0.45) & (up < 0.25)].mean())
        middle = (front > 0.25) & (front < 0.7) & (up > 0.4) & (up < 0.7)
        hila.append(fat[shell & (beside < 0.2) & middle].mean())
    assert 0.15 < np.median(bases) < 0.4
    assert 0.1 < np.median(hila) < 0.28


def test_organs_not_fat_lie_under_the_domes() -> None:
    # 6 to 12 mm below the outer halves of five scans' domes 1 to 3 % is fat on the right, 23 to 46 % on the left
    # (scripts/surroundings.py).
    fat: dict[int, list[float]] = {1: [], 2: []}
    for seed in (7000, 7001, 7003, 7006):
        phantom = healthy_chest(seed)
        for side, shares in fat.items():
            lung = phantom.labels == side
            base = lung.byte().argmax(dim=2)
            x, y = torch.nonzero(lung.any(dim=2), as_tuple=True)
            outer = x > x.median() if side == 1 else x < x.median()
            x, y = x[outer], y[outer]
            high = base[x, y] >= base[x, y].float().quantile(0.9) - 8
            x, y = x[high], y[high]
            below = phantom.hu[x, y, base[x, y] - 3]
            shares.append(float(((below > -150) & (below < -30)).float().mean()))
    assert np.median(fat[1]) < 0.15
    assert 0.2 < np.median(fat[2]) < 0.53


def test_spleen_and_stomach_lie_under_the_back_of_the_left_dome() -> None:
    # 6 to 16 mm below the left bases of five scans, at 15 to 30 % of their way from the back, 15 to 55 % is fat.
    shares = []
    for seed in (7000, 7001, 7003, 7006):
        phantom = healthy_chest(seed)
        lung = phantom.labels == 2
        base, back = lung.byte().argmax(dim=2), span_of(lung, 1)
        x, y = torch.nonzero(lung.any(dim=2) & (back > 0.15) & (back < 0.3), as_tuple=True)
        below = torch.cat([phantom.hu[x, y, base[x, y] - n] for n in (3, 4, 5)])
        shares.append(float(((below > -160) & (below < -30)).float().mean()))
    assert 0.15 < np.median(shares) < 0.55


def test_domes_are_highest_in_front_of_the_middle() -> None:
    # The right bases of five scans, in the middle of their width, lie 6 to 58 mm below their top at 30 % of the way
    # from the back (median 25), 0 to 6 at 70 %, 12 to 27 at 90 % (scripts/surroundings.py).
    falls = []
    for seed in (7000, 7001, 7003, 7006):
        lung = healthy_chest(seed).labels == 1
        base, across, back = lung.byte().argmax(dim=2), span_of(lung, 0)[:, None], span_of(lung, 1)
        inner = lung.any(dim=2) & (across > 0.35) & (across < 0.75)
        depths = [inner & ((back - depth).abs() < 0.05) for depth in (0.3, 0.5, 0.7, 0.9)]
        heights = [3.0 * float(base[where].float().median()) for where in depths]
        falls.append([max(heights) - height for height in heights])
    behind, middle, top, front = np.median(falls, axis=0)
    assert 20 < behind < 45
    assert max(middle, top) < 12
    assert 15 < front < 33


def test_muscles_not_fat_lie_on_the_apices() -> None:
    # 4 to 7 mm outside the apices of five scans 19 % is fat (median).
    shares = []
    for seed in (7000, 7001, 7003):
        phantom = healthy_chest(seed)
        for side in (1, 2):
            lung = phantom.labels == side
            top = lung.shape[2] - 1 - lung.flip(2).byte().argmax(dim=2)
            x, y = torch.nonzero(lung.any(dim=2), as_tuple=True)
            high = top[x, y] > top[x, y].max() - 3
            x, y = x[high], y[high]
            above = phantom.hu[x, y, top[x, y] + 2]
            shares.append(float(((above > -150) & (above < -30)).float().mean()))
    assert np.median(shares) < 0.3


def span_of(mask: torch.Tensor, axis: int) -> torch.Tensor:
    """Places along an axis: 0 where a mask begins, 1 where it ends."""
    rows = torch.nonzero(mask.movedim(axis, 0).flatten(1).any(dim=1)).flatten()
    return (torch.arange(mask.shape[axis]) - rows[0]) / (rows[-1] - rows[0])


def test_lungs_hold_as_many_vessels_as_scans_show() -> None:
    # 12 to 25 mm deep in the lungs of five scans 5 to 8 % of the voxels are 200 HU and more above the lungs' median.
    shares = []
    for seed in (7000, 7001):
        patient = sample_patient(seed, PRESETS["healthy"])
        phantom = render(patient, around_the_chest(patient, 2.0))
        lungs = phantom.labels > 0
        deep, deeper = (shrunk(lungs, mm // 2) for mm in (12, 24))
        hu = phantom.hu[deep & ~deeper]
        shares.append(float((hu > phantom.hu[lungs].median() + 200).float().mean()))
    assert 0.035 < np.median(shares) < 0.1


def test_bronchi_run_beside_their_arteries() -> None:
    rng = np.random.default_rng(5)
    tree = grow_tree(rng, np.zeros(3), rng.uniform((20, -60, -90), (90, 60, 90), (900, 3)), 0.6, 3.0, 6.0)
    arteries, side = tree_beads(tree), np.array([0.6, 0.0, 0.8])
    bronchi = beads_beside(tree, 30, 0.7, side, (1.8, 0.3))
    assert len(bronchi.centres) > 200
    outside = (torch.cdist(bronchi.centres, arteries.centres) - arteries.radii).amin(dim=1)
    # But for those that a branch of the artery crosses.
    assert float((outside < 0).float().mean()) < 0.08
    assert float((outside < 0.5 + 1.2 * bronchi.radii).float().mean()) > 0.95


def test_lungs_are_denser_under_the_pleura() -> None:
    patient = sample_patient(7001, PRESETS["healthy"])
    grid = around_the_chest(patient, 3.0)
    plain, denser = (
        render(replace(patient, hounsfield=replace(patient.hounsfield, rim=hu)), grid) for hu in (0.0, 50.0)
    )
    assert torch.equal(plain.labels, denser.labels)
    inner = [shrunk(plain.labels > 0, n) for n in (1, 2, 8)]
    more = denser.hu - plain.hu
    assert 18 < float(more[inner[0] & ~inner[1]].median()) < 40
    assert float(more[inner[2]].median()) < 12
