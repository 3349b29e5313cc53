"""The scripts that measure on real scans, on references that lack a lung, or both."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from cascadeseg import read_scan
from cascadeseg.cascade.confidence import Calibration, Signs
from cascadeseg.formats import Scan
from cascadeseg.geometry import Grid
from cascadeseg.network import load_model, shipped_model

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scans of nothing but air, in which no lung is found: of the first the reference has none, of the other one."""
    lung = np.zeros((24, 20, 16), np.uint8)
    lung[3:9, 5:15, 4:12] = 1
    for name, reference in (("none", np.zeros_like(lung)), ("one", lung)):
        for file, voxels in ((name, np.full(lung.shape, -1000, np.int16)), (f"{name}_ref", reference)):
            nibabel.save(nibabel.Nifti1Image(voxels, np.diag([2.0, 2.0, 5.0, 1.0])), tmp_path / f"{file}.nii.gz")
    return tmp_path


def test_validate_scores_them_and_what_is_undefined_is_in_no_mean(folder: Path) -> None:
    strict = ["-X", "warn_default_encoding", "-W", "ignore::EncodingWarning", "-W", "error::EncodingWarning:__main__"]
    command = [*strict, str(SCRIPTS / "validate.py"), str(folder), str(folder / "out"), "--device", "cpu"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    scores = json.loads((folder / "out" / "scores.json").read_text(encoding="utf-8"), parse_constant=lambda _: 1 / 0)
    assert [[lung["dice"] for lung in case["lungs"]] for case in scores] == [[1, 1], [0, 1]]
    assert [[lung["hd95_mm"] for lung in case["lungs"]] for case in scores] == [[None, None]] * 2
    rows = {
        line.split(" | ")[0]: line for line in (folder / "out" / "scores.md").read_text(encoding="utf-8").splitlines()
    }
    assert rows["| **mean**"] == "| **mean** | 0.750 | 0.750 | 0.750 | inf | 100.0 (absolute) | |"
    errors = (folder / "out" / "errors.md").read_text(encoding="utf-8")
    assert "| none | reference | 0.0 | 0.0 | 0.0 |" in errors
    assert "| one | left out | 1.4 |" in errors, "2 x 6 x 6 voxels lie deeper than 2 mm"
    assert "| one | reference | 40.3 | 0.0 | 59.7 |" in errors, "60 + 2 x 28 of 2 x 60 + 6 x 28 voxels are of the base"


def test_other_scripts_leave_them_out_where_they_have_no_use_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    robustness, surroundings = map(importlib.import_module, ("robustness", "surroundings"))
    scan, labels = read_scan(folder / "none.nii.gz"), np.zeros((24, 20, 16), np.uint8)
    voxels = {name: change(scan, labels)[1].size for name, change in robustness.CHANGES.items()}
    assert {name for name, count in voxels.items() if not count} == {
        name for name in robustness.CHANGES if name in robustness.PAINTED or name.startswith(("without", "only"))
    }
    assert list(surroundings.real(folder)) == []


def test_what_lies_under_the_back_of_a_base_is_counted_in_its_columns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    surroundings = importlib.import_module("surroundings")
    lung = np.zeros((6, 45, 40), dtype=bool)
    lung[1:5, 2:43, 20:] = True
    lung[2, 9:, 22:] = False  # too thin to be a base
    below = np.zeros(lung.shape, dtype=bool)
    below[1:5, 9:15, 12:16] = True  # 7 to 12 of 40 voxels from the back; 6 to 12 mm below, of 1.5 mm each
    below[2, 9:15] = False
    assert np.array_equal(surroundings.under_back(lung, [2.0, 2.0, 1.5]), below)
    assert not surroundings.under_back(np.zeros_like(lung), [2.0, 2.0, 1.5]).any()


def test_a_base_is_measured_from_its_highest_place_in_the_middle_of_the_lung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    surroundings = importlib.import_module("surroundings")
    lung = np.zeros((21, 41, 40), dtype=bool)
    for part, base in enumerate((8, 14, 18, 20, 15)):
        lung[:, 8 * part : 8 * part + 9, base:] = True
    lung[:7] = True  # beside the middle of its width it reaches to the bottom
    assert surroundings.base_below_top(lung, 3.0) == [36.0, 18.0, 6.0, 0.0, 15.0]


def test_disease_is_painted_into_as_much_of_the_lungs_as_it_says_and_into_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    robustness = importlib.import_module("robustness")
    x, y, z = np.ogrid[:60, :50, :40]
    labels = np.zeros((60, 50, 40), np.uint8)
    for value, middle in ((1, 42), (2, 16)):
        labels[((x - middle) / 10) ** 2 + ((y - 25) / 18) ** 2 + ((z - 20) / 16) ** 2 < 1] = value
    lung = labels > 0
    hu = np.where(lung, -850, 40).astype(np.int16)
    vessel = np.s_[40:44, 20:30, 18:22]
    hu[vessel] = 60
    scan = Scan(hu, Grid.axis_aligned(hu.shape, (4.0, 4.0, 4.0)), source="two lungs")
    half_of_the_change = {"consolidated": 445, "fluid": 430, "free air": 75, "emphysema": 67}
    lies_low = {"consolidated": True, "fluid": True, "free air": False, "emphysema": None}
    for name, change in robustness.PAINTED.items():
        case, reference = change(scan, labels)
        new = case.hu()
        share = 1 / 3 if "third" in name else int(name.split(" %")[0].split()[-1]) / 100
        kind = next(word for word in lies_low if word in name)
        other = np.abs(new - hu) > half_of_the_change[kind]
        assert not other[~lung].any(), name
        if "squeezed" in name:
            plain, its_reference = robustness.PAINTED[name.split(",")[0]](scan, labels)
            assert (reference == its_reference).all(), "lung that fluid squeezes is lung"
            squeezed = np.abs(new - plain.hu()) > half_of_the_change[kind]
            beside = np.roll(reference != labels, 1, axis=1) & (reference > 0) & (hu < 0)
            assert not squeezed[lung & (reference == 0)].any()
            assert squeezed[beside].mean() > 0.95
            assert 0.08 < squeezed[lung].mean() < 0.25
            assert abs(np.median(new[squeezed & beside]) - 42) < 3
            other &= ~squeezed
        assert abs(other[lung].mean() - share) < 0.03, name
        gone = lung & (reference != labels)
        assert not reference[gone].any(), name
        if kind in ("fluid", "free air"):
            assert max(abs(gone[labels == value].mean() - share) for value in (1, 2)) < 0.01, name
            assert abs(np.median(new[gone]) - (10 if kind == "fluid" else -1000)) < 3, name
        else:
            assert not gone.any(), name
            assert (new[vessel] >= 60).all(), f"{name}: vessels stay"
        below = np.nonzero(other & lung)[1].mean() < np.nonzero(lung)[1].mean()
        assert lies_low[kind] in (None, below), name


def test_no_air_is_left_around_painted_fluid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of what the scan blurred at the border, nor in recesses and pockets that the reference leaves out."""
    monkeypatch.syspath_prepend(SCRIPTS)
    painted = importlib.import_module("robustness").PAINTED["fluid in 15 % of each lung"]
    labels = np.zeros((40, 60, 60), np.uint8)
    labels[10:30, 10:50, 20:50] = 1
    hu = np.full(labels.shape, 40, np.int16)
    hu[8:32, 8:52, 8:52] = -120
    hu[10:30, 10:50, 10:50] = -850
    hu[12:18, 10:14, 3:6] = -850
    hu[34:] = -850  # an airway, larger than a pocket
    new = painted(Scan(hu, Grid.axis_aligned(hu.shape, (1.0, 1.0, 1.0)), source="a lung"), labels)[0].hu()
    assert new[10:30, 8:13, 10:50].min() > -100
    assert new[12:18, 10:14, 3:6].min() > -100
    assert (new[34:] == hu[34:]).all()
    assert (new[:, 22:] == hu[:, 22:]).all(), "nothing is painted above the level"


def test_a_lung_that_neither_mask_has_is_a_full_match_as_in_any_score(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that both found nothing agree; and one lung that is rightly not found must not make a mean NaN."""
    monkeypatch.syspath_prepend(SCRIPTS)
    parts, transfer = map(importlib.import_module, ("benchmark_parts", "transfer"))
    rows = parts.agreement(Namespace(scans=[folder / "none.nii.gz"], device="cpu", model=None))
    assert [score for row in rows for score in row["dice"].values()] == [1] * 2 * len(rows)
    scans = transfer._read(folder, load_model().locator.view)
    dice = transfer._measured(shipped_model(), scans)["dice"]
    assert dice == {"none right": 1, "none left": 1, "one right": 0, "one left": 1}


def test_the_network_for_the_orientation_learns_from_those_who_lie_as_their_header_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("train_orientation")
    labels = np.zeros((80, 60, 70), np.uint8)
    labels[8:30, 10:50, 5:65] = 1
    labels[50:72, 10:50, 5:65] = 2
    image = np.where(labels > 0, 0.2, 1.06).astype(np.float16)[None]
    right, turned, mirrored, no_lungs = 700001, 900001, 700000, 700002
    for seed in (right, turned, mirrored, no_lungs):
        np.save(tmp_path / f"synthetic_{seed}.image.npy", image)
        np.save(tmp_path / f"synthetic_{seed}.labels.npy", labels if seed != no_lungs else labels * 0)
    (chest,) = script.chests_in([tmp_path])
    assert script.middle(chest) == pytest.approx([79, 58, 68], abs=4), "mm from the first voxel, at 4 mm"
    random = np.random.default_rng(0)
    parts = [script.cut(chest, random) for _ in range(20)]
    assert min(part.lungs.sum() * part.scan.grid.voxel_volume_ml for part in parts) >= script.LEAST_ML
    assert any(part.lungs.size < chest.lungs.size for part in parts)
    torch.manual_seed(0)
    before = script.Uprightness().state_dict()
    network = script.trained([chest], 2, 0)
    assert not all(before[name].equal(tensor) for name, tensor in network.state_dict().items())
    rows = script.table({"toys": [("toy", chest)]}, network).splitlines()
    assert rows[0] == "| | toys (1) |"
    assert [row[2:5] for row in rows[2:10]] == ["RAS", "RAI", "RPS", "RPI", "LAS", "LAI", "LPS", "LPI"]


def test_the_calibration_is_found_again_in_what_it_foretells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    calibrate = importlib.import_module("calibrate")
    known = Calibration(4.0, {"disagreement": 5.0, "others": 3.0}, review_below=0.9)
    random, none = np.random.default_rng(0), dict.fromkeys(Signs.__dataclass_fields__, 0.0)
    masks = []
    for seed in range(300):
        disagreement, others, missed = random.uniform(0, 0.8, 3)
        signs = Signs(**none | {"disagreement": disagreement, "others": others, "missed": missed})
        better = float(np.sqrt(missed)) / 50  # a sign that goes with better masks is not believed
        masks.append(calibrate.Judgement(seed, "solid", known.quality(signs) + better, signs, ()))
    found = calibrate.fitted(masks, ridge=1e-4)
    assert found.log_odds == pytest.approx(4.0, abs=0.3)
    assert found.weights == pytest.approx({"disagreement": 5.0, "others": 3.0}, rel=0.1)
