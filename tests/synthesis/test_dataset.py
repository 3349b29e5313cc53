"""Synthetic scans as files and as a torch dataset."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from cascadeseg.errors import OutputError
from cascadeseg.synthesis import PRESETS, SyntheticDataset, sample_patient, write_dataset
from cascadeseg.synthesis.config import AcquisitionConfig, SynthesisConfig

SPACING = 12.0
FIRST = 12
"""The default patients from here on have small fields of view."""


def test_the_layout_is_nnunets(tmp_path: Path) -> None:
    steps: list[tuple[str, float]] = []
    write_dataset(tmp_path, 2, 7, SPACING, PRESETS["healthy"], lambda name, share: steps.append((name, share)))
    scan = nibabel.load(tmp_path / "imagesTr" / "synth_00007_0000.nii.gz")
    labels = nibabel.load(tmp_path / "labelsTr" / "synth_00007.nii.gz")
    assert scan.get_data_dtype() == np.int16
    assert labels.get_data_dtype() == np.uint8
    assert np.array_equal(scan.affine, labels.affine)
    grid = sample_patient(7, PRESETS["healthy"]).field_of_view(SPACING)
    assert np.allclose(scan.affine, grid.affine)
    content = json.loads((tmp_path / "dataset.json").read_text(encoding="utf-8"))
    assert content["numTraining"] == 2
    assert content["labels"] == {"background": 0, "lung_right": 1, "lung_left": 2}
    assert steps[-1] == ("done", 1.0)
    assert not list(tmp_path.rglob("*.part*"))


def test_a_finished_case_is_kept_and_half_a_case_is_made_again(tmp_path: Path) -> None:
    write_dataset(tmp_path, 2, FIRST, SPACING)
    kept = tmp_path / "imagesTr" / "synth_00012_0000.nii.gz"
    before = kept.stat().st_mtime_ns
    (tmp_path / "labelsTr" / "synth_00013.nii.gz").unlink()
    write_dataset(tmp_path, 2, FIRST, SPACING)
    assert kept.stat().st_mtime_ns == before
    assert (tmp_path / "labelsTr" / "synth_00013.nii.gz").exists()


def test_a_folder_takes_scans_of_its_own_settings_only(tmp_path: Path) -> None:
    write_dataset(tmp_path, 1, FIRST, SPACING)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused = f"{tmp_path}: synthetic scans of other settings (%s); expected the same settings; choose another folder"
    for settings, found in (
        ((FIRST, 8.0), "spacing_mm was [12.0, 12.0, 12.0]"),
        ((FIRST, None), "spacing_mm was [12.0, 12.0, 12.0]"),
        ((5, SPACING, PRESETS["emphysema"]), 'preset was "default", seed was 12'),
        ((FIRST, SPACING, SynthesisConfig(acquisition=AcquisitionConfig(noise=2.0))), 'preset was "default"'),
    ):
        with pytest.raises(OutputError, match=re.escape(refused % found)):
            write_dataset(tmp_path, 1, *settings)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    write_dataset(tmp_path, 2, FIRST, (SPACING, SPACING, SPACING), PRESETS["default"])
    assert json.loads((tmp_path / "dataset.json").read_text(encoding="utf-8"))["numTraining"] == 2
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != "dataset.json")


ALL_AT_ONCE = """
import importlib, resource, sys
import torch
from cascadeseg.synthesis import Phantom, write_dataset

voxels = 0


def painted(patient, grid, device):
    global voxels
    voxels += torch.Size(grid.shape).numel()
    hu = torch.full(grid.shape, -1000.0)
    return Phantom(hu, torch.ones_like(hu, dtype=torch.uint8), torch.ones_like(hu, dtype=torch.uint8), grid)


def kilobytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


importlib.import_module("cascadeseg.synthesis.render")._render_box = painted
write_dataset(sys.argv[1] + "/small", 1, 0, 40.0)
voxels, before = 0, kilobytes()
write_dataset(sys.argv[1] + "/large", 1, 0, 1.1)
print(1024 * (kilobytes() - before) / voxels)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts in kilobytes")
def test_a_large_scan_is_in_memory_once(tmp_path: Path) -> None:
    """Bytes a voxel: 6 of the phantom, 2 of what is written and 2 of nibabel's, not a phantom of slabs beside it."""
    said = subprocess.run(
        [sys.executable, "-c", ALL_AT_ONCE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert float(said.stdout) < 12


def test_where_there_is_no_memory_for_a_scan_a_larger_spacing_is_advised_and_taken(tmp_path: Path) -> None:
    words = (
        r"synth_00012_0000.nii.gz: no memory for its \d+ x \d+ x \d+ voxels; choose a larger spacing, or use a larger"
    )
    with pytest.raises(OutputError, match=words):
        write_dataset(tmp_path, 1, FIRST, 0.003)
    write_dataset(tmp_path, 1, FIRST, SPACING)
    assert json.loads((tmp_path / "synthesis.json").read_text(encoding="utf-8"))["spacing_mm"] == [SPACING] * 3


def test_somebody_elses_data_set_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("theirs", encoding="utf-8")
    with pytest.raises(
        OutputError, match=r"dataset\.json of unknown settings, without a synthesis\.json; expected a new"
    ):
        write_dataset(tmp_path, 1, FIRST, SPACING)
    (tmp_path / "synthesis.json").write_text("[", encoding="utf-8")
    with pytest.raises(OutputError, match=r"synthesis\.json: no record of synthetic scans"):
        write_dataset(tmp_path, 1, FIRST, SPACING)
    assert (tmp_path / "dataset.json").read_text(encoding="utf-8") == "theirs"


def test_a_folder_that_cannot_be_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OutputError, match="cannot be written"):
        write_dataset(tmp_path / "file", 1, 0, SPACING)


def test_the_python_of_the_page_runs() -> None:
    """As printed, but for larger voxels, and fewer patients without workers, which take long to start."""
    page = (Path(__file__).parents[2] / "docs" / "synthesis.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    changes = {
        "field_of_view(2.0)": "field_of_view(20.0)",
        "(40, 40, 40), (72, 72, 72)": "(4, 4, 4), (7, 7, 7)",
        "(4, spacing_mm=2.0)": "(1, spacing_mm=20.0)",
        "workers=2": "workers=0",
    }
    for block in blocks:
        for printed, quick in changes.items():
            block = block.replace(printed, quick)
        exec(block, {})


def test_the_dataset_makes_its_items() -> None:
    dataset = SyntheticDataset(2, seed=7, spacing_mm=SPACING, config=PRESETS["healthy"])
    item = dataset[1]
    assert len(dataset) == 2
    assert item["hu"].shape == item["labels"].shape
    with pytest.raises(IndexError):
        dataset[2]


def test_the_loader_makes_the_same_items_ahead() -> None:
    dataset = SyntheticDataset(3, seed=6, spacing_mm=20.0, config=PRESETS["one_lung"])
    items = list(dataset.loader(workers=1, ahead=2))
    assert len(items) == 3
    assert all(torch.equal(item["hu"], dataset[i]["hu"]) for i, item in enumerate(items))
