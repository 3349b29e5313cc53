"""The shipped weights, end to end on a synthetic patient they never saw: what a user gets from `infer`."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch

from cascadeseg.cascade.export import LIBRARIES
from cascadeseg.cascade.pipeline import Segmentation, Segmenter, _Clock
from cascadeseg.cascade.plan import GPU_PROGRAM_MB
from cascadeseg.cli import main
from cascadeseg.formats import read_labels, read_scan, write_labels, write_scan
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Grid, canonical_view
from cascadeseg.labels import LUNGS
from cascadeseg.network import shipped_model
from cascadeseg.synthesis import PRESETS, render, sample_patient
from tests.cascade.chest import dice
from tests.formats.dicom_series import write_series

SEED = 11
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ORDERS = [(o, f) for o in permutations(range(3)) for f in product((False, True), repeat=3)]


@pytest.fixture(scope="module")
def patient() -> tuple[Scan, np.ndarray]:
    """A scan of 2.5 x 2.5 x 3 mm and its labels."""
    patient = sample_patient(SEED, PRESETS["healthy"])
    grid = patient.field_of_view((2.5, 2.5, 3.0))
    phantom = render(patient, grid)
    voxels = phantom.hu.round().clamp(-1024, 3071).to(torch.int16).numpy()
    return Scan(voxels, grid, source="synthetic"), phantom.labels.numpy()


@pytest.fixture(scope="module")
def segmenter() -> Segmenter:
    return Segmenter(device="cpu")


@pytest.fixture(scope="module")
def result(patient, segmenter) -> Segmentation:
    return segmenter.segment(patient[0])


@pytest.fixture(scope="module")
def upright(result) -> np.ndarray:
    return result.labels


def turned(scan: Scan, order: tuple[int, ...], flips: tuple[bool, ...]) -> Scan:
    """The same patient with the array's axes in another order and direction."""
    voxels, affine = scan.voxels, scan.grid.affine.copy()
    for axis, flip in enumerate(flips):
        if flip:
            affine[:3, 3] += affine[:3, axis] * (voxels.shape[axis] - 1)
            affine[:3, axis] *= -1
            voxels = np.flip(voxels, axis)
    affine[:3, :3] = affine[:3, list(order)]
    voxels = voxels.transpose(order)
    return Scan(voxels, Grid(voxels.shape, affine), source="turned")


def test_both_lungs_of_an_unseen_patient_are_found(patient, upright):
    for lung in LUNGS:
        assert dice(upright, patient[1], lung.value) > 0.95


def test_lungs_are_found_in_a_window_of_soft_tissue(patient, segmenter):
    scan, labels = patient
    result = segmenter.segment(scan.voxels.clip(-160, 240), scan.grid.affine)
    for lung in LUNGS:
        assert dice(result.labels, labels, lung.value) > 0.9
    assert any("all values below -160 HU are cut off" in warning for warning in result.warnings)


@pytest.mark.parametrize(("order", "flips"), [ORDERS[9], ORDERS[22], ORDERS[47]])
def test_orientation_does_not_matter(patient, segmenter, upright, order, flips):
    check_orientation(patient[0], segmenter, upright, order, flips)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "flips"), ORDERS)
def test_no_orientation_matters(patient, segmenter, upright, order, flips):
    check_orientation(patient[0], segmenter, upright, order, flips)


def check_orientation(scan, segmenter, upright, order, flips):
    other = turned(scan, order, flips)
    labels = canonical_view(segmenter.segment(other).labels, other.grid)
    for lung in LUNGS:
        assert dice(labels, upright, lung.value) > 0.99


def test_a_header_that_tells_the_truth_is_believed(result):
    check_header(result, "RAS", lies=False)


@pytest.mark.parametrize(("axes", "body"), [((0, 1), "LPS"), ((0,), "LAS"), ((2,), "RAI"), ((0, 2), "LAI")])
def test_a_header_that_lies_is_told(patient, segmenter, axes, body):
    check_header(segmenter.segment(np.flip(patient[0].voxels, axes), patient[0].grid.affine), body, lies=True)


def check_header(result, body, *, lies):
    assert result.orientation is not None
    assert (result.orientation.header, result.orientation.body) == ("RAS", body)
    assert result.orientation.doubtful == lies
    assert any("correct the header" in warning for warning in result.warnings) == lies
    assert (result.verdict == "review") == lies


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ".mha", ".nrrd", "dicom"])
def test_the_format_does_not_matter(patient, segmenter, upright, suffix, tmp_path):
    scan, _ = patient
    path = tmp_path / (suffix if suffix == "dicom" else f"scan{suffix}")
    if suffix == "dicom":
        write_series(path, scan.voxels, scan.grid)
    else:
        write_scan(scan.voxels, scan.grid, path)
    read = read_scan(path)
    # The same HU at the same places: only of a series, whose axes and stored values are others, is more to be seen.
    assert np.allclose(read.grid.canonical().affine, scan.grid.canonical().affine, atol=1e-3)
    assert np.array_equal(read.canonical().hu(), scan.canonical().hu())
    labels = segmenter.segment(read).labels if suffix == "dicom" else upright
    write_labels(labels, tmp_path / "mask.nii.gz", read)
    written, grid = read_labels(tmp_path / "mask.nii.gz")
    back = canonical_view(written, grid)
    for lung in LUNGS:
        assert dice(back, canonical_view(upright, scan.grid), lung.value) > 0.99


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(name) is None for name in LIBRARIES), reason="ONNX is not installed")
def test_the_networks_find_the_lungs_in_a_program_without_torch(patient, upright, tmp_path):
    assert main(["export", str(tmp_path / "networks"), "--quiet"]) == 0
    other = turned(patient[0], *ORDERS[22])
    write_scan(other.voxels, other.grid, tmp_path / "scan.nii.gz")
    script = Path(__file__).parents[1] / "scripts" / "onnx_infer.py"
    code = f"import runpy, sys; runpy.run_path({str(script)!r}, run_name='__main__'); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "networks", "scan.nii.gz", "lungs.nii.gz"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("lung_right ")
    labels, grid = read_labels(tmp_path / "lungs.nii.gz")
    assert np.allclose(grid.affine, other.grid.affine)
    found = canonical_view(labels, grid)
    for lung in LUNGS:
        assert dice(found, upright, lung.value) > 0.99


@pytest.mark.parametrize(
    ("device", "waited_for"), [("cpu", []), ("cuda:1", [torch.device("cuda:1"), "its freed blocks"])]
)
def test_no_device_is_touched_but_the_one_in_use(monkeypatch, device, waited_for):
    touched: list[object] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: touched.append(device))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: touched.append("its freed blocks"))
    with _Clock(lambda step, done: None, torch.device(device)).step("locate", 0.0):
        pass
    assert touched == waited_for


@pytest.mark.cuda
@needs_cuda
def test_cuda_gives_the_cpus_mask(patient, upright):
    labels = Segmenter(device="cuda").segment(patient[0]).labels
    for lung in LUNGS:
        assert dice(labels, upright, lung.value) > 0.995


@pytest.mark.cuda
@needs_cuda
def test_cuda_again_gives_the_same_mask_in_the_same_memory(patient):
    segmenter = Segmenter(device="cuda")
    first = segmenter.segment(patient[0]).labels
    taken = torch.cuda.max_memory_reserved()
    again = segmenter.segment(patient[0]).labels
    assert torch.cuda.max_memory_reserved() == taken
    for lung in LUNGS:
        assert dice(again, first, lung.value) > 0.9999


@pytest.mark.cuda
@needs_cuda
def test_cuda_keeps_within_a_limit_and_gives_the_same_mask(patient, upright):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    segmenter = Segmenter(device="cuda", max_vram_gb=1)
    labels = segmenter.segment(patient[0]).labels
    # What CUDA itself takes, which the promise counts as `GPU_PROGRAM_MB`, is not torch's to tell.
    assert torch.cuda.max_memory_reserved() / 1e6 < segmenter.plan(patient[0]).device_mb - GPU_PROGRAM_MB
    for lung in LUNGS:
        assert dice(labels, upright, lung.value) > 0.995


def test_the_weights_are_small_checked_and_described():
    folder = shipped_model()
    description = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    weights = (folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == description["sha256"]
    assert len(description["description_sha256"]) == 64  # what a network sees is checked, too
    assert len(weights) < 8e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert description["sha256"] in card
    assert Path(folder).joinpath("model.json").stat().st_size < 1e5
