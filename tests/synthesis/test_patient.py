"""Sampling patients: ranges, groups that switch, fields of view."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from cascadeseg.synthesis import PRESETS, SynthesisConfig, sample_patient
from cascadeseg.synthesis.config import AcquisitionConfig, PathologyConfig
from cascadeseg.synthesis.findings import Findings
from cascadeseg.synthesis.patient import Patient


def test_presets_are_there() -> None:
    assert {"default", "healthy", "covid", "effusion", "abdomen"} <= set(PRESETS)
    assert PRESETS["default"] == SynthesisConfig()


def test_groups_switch_alone() -> None:
    whole = sample_patient(5)
    quiet = sample_patient(5, replace(SynthesisConfig(), acquisition=AcquisitionConfig(noise=0.0)))
    assert quiet.scanner.noise_hu == 0
    assert quiet.scanner == replace(whole.scanner, noise_hu=0.0)
    assert quiet.torso == whole.torso
    assert quiet.findings == whole.findings


def test_no_pathology_means_none() -> None:
    config = SynthesisConfig(pathology=PathologyConfig(rate=0.0))
    for seed in range(60):
        f = sample_patient(seed, config).findings
        assert f.ground_glass == f.consolidation == f.fibrosis == f.bullae == 0
        assert f.effusion == f.pneumothorax == f.emphysema == f.raised == (0.0, 0.0)
        assert f.missing == (0, 0)
        assert f.devices == f.lesions == ()


def test_findings_come_at_their_rates() -> None:
    sick = SynthesisConfig(pathology=PathologyConfig(healthy_share=0.0))
    findings = [sample_patient(seed, sick).findings for seed in range(400)]
    assert 0.2 < np.mean([f.ground_glass > 0 for f in findings]) < 0.36
    assert 0.2 < np.mean([f.effusion[0] > 0 for f in findings]) < 0.3
    assert 0.22 < np.mean([len(f.lesions) > 0 for f in findings]) < 0.38


def test_consolidation_reaches_as_far_and_is_as_solid_as_asked() -> None:
    def consolidations(config: PathologyConfig) -> list[Findings]:
        findings = [sample_patient(seed, SynthesisConfig(pathology=config)).findings for seed in range(150)]
        return [f for f in findings if f.consolidation > 0]

    usual = PathologyConfig(healthy_share=0.0, consolidation=1.0)
    far, solid = replace(usual, consolidation_reach=1.5), replace(usual, consolidation_density=1.3)
    assert max(f.consolidation_extent for f in consolidations(usual)) <= 0.9
    assert 0.9 < max(f.consolidation_extent for f in consolidations(far)) <= 1.5
    scattered = [[f.consolidation for f in consolidations(config) if not f.settled] for config in (usual, solid)]
    assert max(scattered[0]) < 1
    assert 0.25 < np.mean(np.array(scattered[1]) == 1) < 0.55


@pytest.mark.parametrize(("finding", "deepest_mm"), [("effusion", 110), ("pneumothorax", 90)])
def test_fluid_and_free_air_are_as_deep_as_asked(finding: str, deepest_mm: float) -> None:
    def deepest(config: PathologyConfig) -> list[float]:
        findings = [sample_patient(seed, SynthesisConfig(pathology=config)).findings for seed in range(150)]
        return [max(getattr(f, finding)) for f in findings]

    always = {finding: 1.0, f"{finding}_depth": 20.0}
    usual = PathologyConfig(healthy_share=0.0, **always)
    deep = replace(usual, **{f"{finding}_depth": 40.0})
    assert max(deepest(usual)) <= deepest_mm
    assert np.allclose(np.median(deepest(deep)), 2 * np.median(deepest(usual)), rtol=0.05)


def test_views_are_mixed_and_fields_range_from_small_to_700_mm() -> None:
    patients = [sample_patient(seed) for seed in range(400)]
    kinds = [p.view.kind for p in patients]
    assert 0.36 < kinds.count("chest") / 400 < 0.54
    assert 0.05 < kinds.count("one_lung") / 400 < 0.16
    widths = [p.view.width for p in patients]
    assert min(widths) < 200
    assert 600 < max(widths) <= 700


def test_thin_slabs_of_the_abdomen_are_for_training_only() -> None:
    views = {name: [sample_patient(n, PRESETS[name]).view for n in range(200)] for name in ("default", "training")}
    slabs = [view for view in views["training"] if view.kind == "abdominal_slab"]
    weights = asdict(PRESETS["training"].view)
    assert abs(len(slabs) / 200 - weights["abdominal_slab"] / sum(weights.values())) < 0.04
    assert all(view.high <= -60 and 25 <= view.high - view.low <= 120 for view in slabs)
    assert not any(view.kind == "abdominal_slab" for view in views["default"])


def test_bowel_that_looks_like_lung_is_common_where_it_is_asked_for() -> None:
    usual, bowel = ([sample_patient(n, PRESETS[name]) for n in range(200)] for name in ("training", "training_bowel"))

    def high(patient: Patient) -> bool:
        abdomen = patient.abdomen
        return abdomen.colon >= 18 and abdomen.colon_gas >= 0.45 and abdomen.flexure_height >= 0.7

    assert 100 < sum(map(high, bowel)) < 145
    assert sum(map(high, usual)) < 40
    assert all(patient.abdomen.walls_mm == 2.4 for patient in usual)
    assert sum(patient.abdomen.walls_mm > 3 for patient in bowel) > 60
    bases = [patient.view for patient in bowel if patient.view.kind == "bases"]
    assert 40 < len(bases) < 90
    assert all(-75 <= view.high <= 5 and 40 <= view.high - view.low <= 380 for view in bases)
    assert not any(patient.view.kind == "bases" for patient in usual)
    assert all(
        before.chest == now.chest and before.hounsfield == now.hounsfield
        for before, now in zip(usual, bowel, strict=True)
    )


def test_fluid_on_the_diaphragm_and_squeezed_lung_are_common_where_they_are_asked_for() -> None:
    usual, fluid, effusion = (
        [sample_patient(n, PRESETS[name]).findings for n in range(300)]
        for name in ("training", "training_fluid", "training_effusion")
    )

    def sides(patients: list[Findings], *, squeezed: bool) -> tuple[int, float]:
        wet = [(found, side) for found in patients for side in (0, 1) if found.effusion[side] > 0]
        shown = [(found.compression if squeezed else found.subpulmonic)[side] > 0 for found, side in wet]
        return len(wet), sum(shown) / len(wet)

    for asked_for in (fluid, effusion):
        assert sides(asked_for, squeezed=True)[0] > 1.3 * sides(usual, squeezed=True)[0]
    for squeezed, shares in ((False, (0.3, 0.7, 0.2)), (True, (0.75, 0.9, 0.6))):
        for patients, share in zip((usual, fluid, effusion), shares, strict=True):
            assert abs(sides(patients, squeezed=squeezed)[1] - share) < 0.08


def test_airless_lung_is_brighter_with_contrast_medium_and_fluid_is_not() -> None:
    patients = [sample_patient(seed) for seed in range(400)]
    contrast = np.array([patient.hounsfield.pulmonary_blood > 100 for patient in patients])
    dense, fluid = (np.array([getattr(p.findings, name) for p in patients]) for name in ("dense_hu", "fluid_hu"))
    assert 35 < dense[contrast].mean() - dense[~contrast].mean() < 50
    assert abs(fluid[contrast].mean() - fluid[~contrast].mean()) < 3
    assert np.mean(dense[~contrast] < np.quantile(fluid, 0.95)) < 0.15, "the two are mostly told apart without it, too"


def test_loculated_fluid_is_commoner_in_training() -> None:
    usual, training = (
        [sample_patient(n, PRESETS[name]).findings for n in range(300)] for name in ("default", "training")
    )
    shares = [np.mean([max(found.pockets) > 0 for found in patients]) for patients in (usual, training)]
    assert 0.02 < shares[0] < 0.12 < shares[1] < 0.35
    assert all(found.pockets == (0.0, 0.0) or 1.2 <= found.pocket_width <= 3.0 for found in training)


def test_some_patients_lie_askew() -> None:
    sideways = np.array([sample_patient(seed).torso.rotation[1] for seed in range(400)])
    assert 0.04 < np.mean(np.abs(sideways) > 8) < 0.15
    assert 15 < np.abs(sideways).max() < 32


def test_dark_lungs_are_common_in_training() -> None:
    presets = ("default", "training")
    lungs = {name: [sample_patient(n, PRESETS[name]).hounsfield.lung for n in range(200)] for name in presets}
    dark = {name: sum(hu < -905 for hu in all_of_it) for name, all_of_it in lungs.items()}
    assert dark["training"] > 2 * dark["default"]
    assert -940 <= min(lungs["training"]) < -920
    assert max(lungs["training"]) > -620


def test_dark_lungs_without_free_air_are_common_where_they_are_asked_for() -> None:
    usual, dark = ([sample_patient(n, PRESETS[name]) for n in range(200)] for name in ("training", "training_dark"))

    def black(patient: Patient) -> bool:
        return patient.hounsfield.lung < -905 or max(patient.findings.emphysema) > 0

    assert sum(map(black, dark)) > 2 * sum(map(black, usual))
    assert all(patient.findings.pneumothorax == (0.0, 0.0) for patient in dark)


def test_a_spleen_is_no_fattier_for_the_fat_of_the_liver() -> None:
    # Without contrast medium it lies 8 to 10 HU below a healthy liver (textbook), which has 50 to 65.
    drawn = [sample_patient(n, PRESETS["training"]).hounsfield for n in range(1500)]
    plain = [hu for hu in drawn if hu.aortic_blood < 60]
    assert 46 < np.median([hu.spleen for hu in plain]) < 50
    assert np.mean([hu.spleen < 30 for hu in plain]) < 0.06
    assert min(hu.spleen for hu in plain) > 15
    fatty = [hu for hu in plain if hu.liver < 30]
    assert 0.06 < len(fatty) / len(plain) < 0.14
    assert 45 < np.median([hu.spleen for hu in fatty]) < 51


def test_the_field_of_view_is_one_lattice_at_any_spacing() -> None:
    patient = sample_patient(9)
    for spacing in (2.0, (0.8, 0.8, 3.0)):
        grid = patient.field_of_view(spacing)
        steps = np.broadcast_to(np.asarray(spacing), (3,))
        assert np.allclose(grid.spacing_mm, steps)
        first = grid.affine[:3, 3] / steps
        assert np.allclose(first, np.round(first))
        assert abs(grid.shape[0] * steps[0] - patient.view.width) <= steps[0]


def test_native_spacing_is_a_scanners() -> None:
    spacings = np.array([sample_patient(seed).native_spacing_mm for seed in range(300)])
    assert 0.4 <= spacings[:, 0].min() <= spacings[:, 0].max() <= 1.2
    assert 0.5 <= spacings[:, 2].min() <= spacings[:, 2].max() <= 10
    for thick in (8, 10):  # as old and as exported scans have them, a few
        assert 0 < (spacings[:, 2] == thick).mean() < 0.03


def test_every_group_has_a_preset_without_it() -> None:
    without = {name for name in PRESETS if name.startswith("without_")}
    assert without == {f"without_{g}" for g in ("pathology", "acquisition", "confounders", "randomisation", "views")}
    for seed in range(60):
        plain = sample_patient(seed, PRESETS["without_acquisition"]).scanner
        assert plain.noise_hu == plain.blur_mm == plain.streaks_hu == plain.cupping_hu == plain.offset_hu == 0
        assert (plain.gain, plain.slice_mm, plain.circular, plain.up) == (1.0, 1.0, False, (0.0, 1.0))
        calm = sample_patient(seed, PRESETS["without_confounders"])
        assert calm.abdomen.stomach_gas == calm.abdomen.colon_gas == calm.abdomen.loop_gas == 0
        assert (calm.scanner.couch, calm.scanner.cloth) == ("none", 0)
        assert calm.torso.arms in ("up", "none")
        assert calm.view.width <= max(420.0, 1.15 * 2.5 * (calm.torso.half_width + calm.torso.muscle + calm.torso.fat))
        still = sample_patient(seed, PRESETS["without_randomisation"])
        assert still.torso.warp == (0.0, 0.0)
        assert still.hounsfield.texture == (0.0, 0.0, 0.0, 0.0)
        assert still.hounsfield.aortic_blood == still.hounsfield.pulmonary_blood
        assert sample_patient(seed, PRESETS["without_views"]).view.kind == "chest"
