"""What fluid and dense lung leave of the hilum, its vessels and its fat."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from cascadeseg.synthesis import Patient, Phantom, Tissue, anatomy, render, render_lungs
from cascadeseg.synthesis.acquisition import grid_axes
from cascadeseg.synthesis.fields import Beads, splat
from cascadeseg.synthesis.warp import Warp
from tests.synthesis.neighbours import grown, shrunk
from tests.synthesis.test_artefacts import chest_of, quiet

CPU = torch.device("cpu")


@lru_cache(maxsize=2)
def scanned(patient: Patient) -> Phantom:
    return render(patient, chest_of(patient, spacing=3.0))


def scanned_finely(patient: Patient) -> Phantom:
    """The middle of the chest."""
    return render(patient, chest_of(patient, (140, 90, 90), 1.5))


def distance_to_hilum(patient: Patient, phantom: Phantom, side: int) -> torch.Tensor:
    """Distance (mm) of each voxel to the vessels and lobar bronchi of one hilum, up to 30 mm."""
    beads = Beads.joined([anatomy.hilar_vessels(patient, side), anatomy.lobar_bronchi(patient, side)])
    return splat(Warp(patient).to_world(beads, CPU), grid_axes(phantom.grid), CPU, 30.0)


@pytest.mark.parametrize("compression", [0.0, 12.0])
@pytest.mark.parametrize("thick", [70.0, 300.0])
def test_dense_lung_stays_around_the_hilum_in_fluid(thick: float, compression: float) -> None:
    patient = quiet(effusion=(thick, thick), compression=(compression, compression), subpulmonic=(0.0, 0.0))
    phantom = scanned(patient)
    fluid = phantom.tissues == int(Tissue.EFFUSION)
    assert int(fluid.sum()) * 27 > 500_000
    for side, label in ((0, 1), (1, 2)):
        far = distance_to_hilum(patient, phantom, side)
        assert not bool((fluid & (far < 4)).any())
        assert bool((fluid & (far < 25)).any())
        lung = phantom.labels == label
        assert int((lung & (far > 3) & (far < 6)).sum()) * 27 > 10_000
        if thick == 300.0:
            # What is left of this lung is what the hilum holds.
            assert int((lung & (far > 28)).sum()) < 0.03 * int(lung.sum())
            inner = shrunk(lung & (far > 3), 1)
            dense = phantom.hu[inner & (phantom.tissues == int(Tissue.CONSOLIDATION))]
            assert len(dense) > 0.5 * int(inner.sum())
            assert abs(float(dense.median()) - patient.findings.dense_hu) < 15


def test_lung_stays_around_the_hilum_in_free_air() -> None:
    patient = quiet(pneumothorax=(150.0, 0.0))
    phantom, whole = scanned(patient), scanned(quiet())
    air = phantom.tissues == int(Tissue.PNEUMOTHORAX)
    assert int(air.sum()) * 27 > 1_000_000
    far = distance_to_hilum(patient, phantom, 0)
    assert not bool((air & (far < 4)).any())
    assert bool((air & (far < 25)).any())
    lung = phantom.labels == 1
    assert torch.equal(lung & (far > 3) & (far < 6), (whole.labels == 1) & (far > 3) & (far < 6))


def test_a_little_fluid_changes_nothing_where_there_is_none() -> None:
    patient = quiet()
    without, little = scanned(patient), scanned(quiet(effusion=(10.0, 10.0), compression=(0.0, 0.0)))
    assert int((little.tissues == int(Tissue.EFFUSION)).sum()) * 27 > 10_000
    front = round((patient.torso.offset[1] - little.grid.affine[1, 3]) / 3)
    assert torch.equal(without.labels[:, front:], little.labels[:, front:])
    assert float((without.hu - little.hu)[:, front:].abs().max()) <= 1


def sharp(blood: float, **findings: Any) -> Patient:
    """A patient with so many HU in the pulmonary vessels, and a scanner that hardly blurs them."""
    scanner = {"blur_mm": 0.3, "sharpening": 0.0, "slice_mm": 1.5, "slice_step": 1.5, "gain": 1.0, "offset_hu": 0.0}
    patient = quiet(1, scanner, **findings)
    return replace(patient, hounsfield=replace(patient.hounsfield, pulmonary_blood=blood))


def in_vessels(patient: Patient, phantom: Phantom, least: float, most: float) -> torch.Tensor:
    """HU in the middle of both lungs' own vessels of some radii (body mm), more than 3 mm inside the label."""
    inside = shrunk(phantom.labels != 0, 2)
    vessels = Beads.joined([render_lungs._branches(patient, side).vessels for side in (0, 1)])
    vessels = vessels.where((vessels.radii >= least) & (vessels.radii < most))
    place = phantom.grid.index(Warp(patient).to_world(vessels, CPU).centres.numpy())
    place = torch.from_numpy(place).round().long()
    x, y, z = place[((place >= 0) & (place < torch.tensor(phantom.hu.shape))).all(dim=1)].T
    return phantom.hu[x, y, z][inside[x, y, z]]


def test_wide_vessels_of_the_lung_have_the_contrast_of_the_hilum_and_thin_ones_half_of_it() -> None:
    patient = sharp(400.0)
    phantom = scanned_finely(patient)
    wide, narrow, thin = (in_vessels(patient, phantom, *radii) for radii in ((2.2, 9.0), (1.4, 1.6), (0.3, 1.0)))
    assert 330 < float(wide.median()) <= 402
    assert 230 < float(narrow.quantile(0.9)) < 340
    assert float(thin.quantile(0.9)) < 225


@pytest.mark.parametrize("findings", [{"white": (1.0, 1.0)}, {"consolidation": 1.0, "consolidation_extent": 1.0}])
def test_vessels_with_contrast_stand_out_in_dense_lung(findings: dict[str, Any]) -> None:
    patient = sharp(400.0, dense_hu=40.0, **findings)
    phantom = scanned_finely(patient)
    assert torch.equal(phantom.labels, scanned_finely(sharp(400.0)).labels)
    assert 370 < float(in_vessels(patient, phantom, 2.2, 9.0).median()) <= 402
    assert float(in_vessels(patient, phantom, 0.3, 0.9).median()) < 60


def test_vessels_do_not_darken_dense_lung() -> None:
    patient = sharp(20.0, dense_hu=90.0, white=(1.0, 1.0))
    assert 80 < float(in_vessels(patient, scanned_finely(patient), 1.2, 9.0).median()) < 100


def test_loculated_fluid_is_a_lens_at_the_ribs_with_air_beside_and_below_it() -> None:
    patient = quiet(pockets=(25.0, 0.0), pocket_width=1.8)
    plain, phantom = scanned(quiet()), scanned(patient)
    fluid = phantom.tissues == int(Tissue.EFFUSION)
    assert 20_000 < int(fluid.sum()) * 27 < 150_000
    assert torch.equal(phantom.labels == 2, plain.labels == 2)
    taken = (plain.labels == 1) & (phantom.labels == 0)
    assert int((taken & ~fluid).sum()) < 0.15 * int(taken.sum())
    assert abs(float(phantom.hu[fluid & taken].median()) - patient.findings.fluid_hu) < 8
    # Lung holds air in it right beside the fluid, also towards the wall that the patient lies on.
    near = grown(fluid, 4)
    beside = near & (phantom.labels == 1)
    assert float(phantom.hu[beside].median()) < -600
    places = torch.nonzero(fluid).float()
    lower = (phantom.labels == 1).nonzero()[:, 1].min()
    assert lower < places[:, 1].mean()
