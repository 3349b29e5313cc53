"""What fluid and dense lung leave of the hilum, its vessels and its fat."""

import pytest
import torch

from cascadeseg.synthesis import Patient, Phantom, Tissue, anatomy, render
from cascadeseg.synthesis.acquisition import grid_axes
from cascadeseg.synthesis.fields import Beads, splat
from cascadeseg.synthesis.warp import Warp
from tests.synthesis.test_artefacts import chest_of, quiet

CPU = torch.device("cpu")


def scanned(patient: Patient, spacing: float = 3.0) -> Phantom:
    return render(patient, chest_of(patient, spacing=spacing))


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
            inner = -torch.nn.functional.max_pool3d(-(lung & (far > 3))[None].float(), 3, 1, 1)[0] > 0
            dense = phantom.hu[inner & (phantom.tissues == int(Tissue.CONSOLIDATION))]
            assert len(dense) > 0.5 * int(inner.sum())
            assert abs(float(dense.median()) - patient.findings.dense_hu) < 15


def test_a_little_fluid_changes_nothing_where_there_is_none() -> None:
    patient = quiet()
    without, little = scanned(patient), scanned(quiet(effusion=(10.0, 10.0), compression=(0.0, 0.0)))
    assert int((little.tissues == int(Tissue.EFFUSION)).sum()) * 27 > 10_000
    front = round((patient.torso.offset[1] - little.grid.affine[1, 3]) / 3)
    assert torch.equal(without.labels[:, front:], little.labels[:, front:])
    assert float((without.hu - little.hu)[:, front:].abs().max()) <= 1
