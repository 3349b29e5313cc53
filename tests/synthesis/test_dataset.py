"""Synthetic scans as files and as a torch dataset."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from cascadeseg.errors import OutputError
from cascadeseg.synthesis import PRESETS, SyntheticDataset, sample_patient, write_dataset

SPACING = 12.0


def test_the_layout_is_nnunets(tmp_path: Path) -> None:
    steps: list[tuple[str, float]] = []
    write_dataset(tmp_path, 2, 3, SPACING, PRESETS["healthy"], lambda name, share: steps.append((name, share)))
    scan = nibabel.load(tmp_path / "imagesTr" / "synth_00003_0000.nii.gz")
    labels = nibabel.load(tmp_path / "labelsTr" / "synth_00003.nii.gz")
    assert scan.get_data_dtype() == np.int16
    assert labels.get_data_dtype() == np.uint8
    assert np.array_equal(scan.affine, labels.affine)
    grid = sample_patient(3, PRESETS["healthy"]).field_of_view(SPACING)
    assert np.allclose(scan.affine, grid.affine)
    content = json.loads((tmp_path / "dataset.json").read_text())
    assert content["numTraining"] == 2
    assert content["labels"] == {"background": 0, "lung_right": 1, "lung_left": 2}
    assert steps[-1] == ("done", 1.0)
    assert not list(tmp_path.rglob("*.part*"))


def test_a_finished_case_is_kept_and_half_a_case_is_made_again(tmp_path: Path) -> None:
    write_dataset(tmp_path, 2, 0, SPACING)
    kept = tmp_path / "imagesTr" / "synth_00000_0000.nii.gz"
    before = kept.stat().st_mtime_ns
    (tmp_path / "labelsTr" / "synth_00001.nii.gz").unlink()
    write_dataset(tmp_path, 2, 0, SPACING)
    assert kept.stat().st_mtime_ns == before
    assert (tmp_path / "labelsTr" / "synth_00001.nii.gz").exists()


def test_a_folder_that_cannot_be_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_dataset(tmp_path / "file", 1, 0, SPACING)


def test_the_dataset_makes_its_items() -> None:
    dataset = SyntheticDataset(2, seed=5, spacing_mm=SPACING, config=PRESETS["healthy"])
    item = dataset[1]
    assert len(dataset) == 2
    assert item["hu"].shape == item["labels"].shape
    with pytest.raises(IndexError):
        dataset[2]


def test_the_loader_makes_the_same_items_ahead() -> None:
    dataset = SyntheticDataset(3, seed=5, spacing_mm=20.0, config=PRESETS["healthy"])
    items = list(dataset.loader(workers=1, ahead=2))
    assert len(items) == 3
    assert all(torch.equal(item["hu"], dataset[i]["hu"]) for i, item in enumerate(items))
