"""The demo's patient, and the demo from its start to its end with a threshold for a network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cascadeseg import cli, demo
from cascadeseg.cascade import pipeline
from cascadeseg.labels import LUNGS
from cascadeseg.synthesis import PRESETS, render, sample_patient
from tests.test_cli import ThresholdSegmenter


def test_both_lungs_of_the_demo_are_fully_in_view() -> None:
    patient = sample_patient(demo.SEED, PRESETS[demo.PRESET])
    labels = render(patient, patient.field_of_view(5.0)).labels.numpy()
    for lung in LUNGS:
        mask = labels == lung.value
        assert mask.any()
        for axis in range(3):
            assert not mask.take([0, -1], axis).any(), f"{lung.title} is cut along axis {axis}"
    assert np.isin(labels, (0, 1, 2)).all()


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pipeline, "Segmenter", ThresholdSegmenter)
    monkeypatch.setattr(demo, "SPACING_MM", 6.0)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "cascadeseg-demo"
    made = {"scan.nii.gz", "scan_ref.nii.gz", "scan_lungs.nii.gz", "scan_lungs.json", "scan_lungs.png", "scores.json"}
    assert {path.name for path in folder.iterdir()} == made
    for name in made:
        assert f"cascadeseg-demo/{name}  " in out
    assert "HD95 mm" in out
    assert (
        json.loads((folder / "scores.json").read_text(encoding="utf-8"))["cases"][0]["lung_right"]["reference_ml"] > 500
    )
    assert cli.main(["demo"]) == 2
    assert "scan.nii.gz: exists; overwrite with --force" in capsys.readouterr().err
    assert cli.main(["demo", "--force", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
