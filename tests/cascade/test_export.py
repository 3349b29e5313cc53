"""Networks as ONNX files, run by ONNX Runtime, and the program that uses them outside of the package."""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import SimpleITK
import torch

from cascadeseg.cascade import export
from cascadeseg.cascade.export import DESCRIPTION, LIBRARIES, Exported, exported, write_export
from cascadeseg.cascade.resample import image_of_hu
from cascadeseg.errors import ModelError, OutputError
from cascadeseg.formats import read_labels, write_scan
from cascadeseg.network import Engine, Model, Stage, UNet, UNetConfig, View, stage_of
from tests.cascade.chest import LUNG_HU, RADII, TISSUE_HU, chest, chest_grid, dice, tiny_model, truth

SCRIPTS = Path(__file__).parents[2] / "scripts"
CPU = torch.device("cpu")
LOCATOR = UNetConfig(2, 4, widths=(4, 8), deep_supervision=True)
REFINER = UNetConfig(2, 1, widths=(4, 8), block="bottleneck", norm="instance", stem="convolution")

pytestmark = pytest.mark.skipif(any(find_spec(name) is None for name in LIBRARIES), reason="ONNX is not installed")


def trained(view: View, config: UNetConfig) -> Stage:
    """A stage of random weights whose normalisations have seen something."""
    torch.manual_seed(0)
    network = UNet(config).train()
    for _ in range(3):
        network(torch.randn(1, config.in_channels, 16, 16, 24))
    return stage_of(view, network)


@pytest.fixture(scope="module")
def model() -> Model:
    """A locator with a window of soft tissue and coarser outputs, a refiner with an opinion and instance norm."""
    locator = View(4.0, tissue_low_hu=-150.0, tissue_high_hu=150.0)
    refiner = View(2.0, prior=True, prior_spacing_mm=12.0, prior_contrast=2.5)
    return Model(trained(locator, LOCATOR), trained(refiner, REFINER), name="toy", version="3", sha256="abc")


@pytest.fixture(scope="module")
def exports(model: Model) -> list[Exported]:
    return exported(model)


def run(content: bytes, **images: torch.Tensor) -> torch.Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {name: image[None].numpy() for name, image in images.items()})
    return torch.from_numpy(result)[0]


def made_before(one: Exported) -> object:
    """A file's graph as the exporter made it; to make one takes seconds."""
    import onnx

    return onnx.load_model_from_string(one.content)


def hu_of(shape: tuple[int, int, int]) -> torch.Tensor:
    """(1, X, Y, Z) HU from below air to above bone."""
    return torch.linspace(-2000, 2000, shape[0] * shape[1] * shape[2]).reshape(1, *shape)


@pytest.mark.parametrize("shape", [(4, 8, 12), (40, 4, 8)])
def test_the_files_give_what_the_engine_gives_of_any_shape(model, exports, shape):
    locator, refiner = exports
    hu, opinion = hu_of(shape), torch.linspace(-1, 1, shape[2]).expand(1, *shape).contiguous()
    wanted = Engine(model.locator, CPU, "fp32")(image_of_hu(hu, model.locator.view)).softmax(dim=0)[1:3]
    assert wanted.std() > 0.01, "a constant would agree with anything"
    assert torch.allclose(run(locator.content, hu=hu), wanted, atol=1e-4)
    image = torch.cat([image_of_hu(hu, model.refiner.view), opinion])
    wanted = Engine(model.refiner, CPU, "fp32")(image)
    assert wanted.std() > 0.01
    assert torch.allclose(run(refiner.content, hu=hu, opinion=opinion), wanted, atol=1e-4)


def test_a_file_says_what_it_is_and_nothing_of_the_machine_it_was_made_on(exports):
    import onnx

    for one in exports:
        assert one.largest_difference < 1e-4
        proto = onnx.load_model_from_string(one.content)
        onnx.checker.check_model(proto, full_check=True)
        known = {entry.key: entry.value for entry in proto.metadata_props}
        assert known["model_name"] == "toy"
        assert known["model_sha256"] == "abc"
        assert json.loads(known["inputs"]) == [entry.name for entry in proto.graph.input] == one.known["inputs"]
        assert [(entry.domain, entry.version) for entry in proto.opset_import if not entry.domain] == [
            ("", export.OPSET)
        ]
        for trace in (Path(torch.__file__).parent, Path(export.__file__).parent, Path(__file__).parent):
            assert str(trace).encode() not in one.content


def test_the_description_has_what_a_program_needs(model, exports, tmp_path):
    write_export(exports, model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [DESCRIPTION, "locator.onnx", "refiner.onnx"]
    found = json.loads((tmp_path / DESCRIPTION).read_text(encoding="utf-8"))
    for name in ("locator", "refiner"):
        content = (tmp_path / found[name]["file"]).read_bytes()
        assert found[name].pop("sha256") == hashlib.sha256(content).hexdigest()
        assert found[name].pop("largest_difference") < 1e-4
    assert found == {
        "format": 1,
        "model": {"name": "toy", "version": "3", "sha256": "abc"},
        "labels": {"background": 0, "lung_right": 1, "lung_left": 2},
        "boxes": {"smallest_lung_ml": 2.0, "margin_mm": 8.0, "growth_mm": 24.0, "largest_regrowth": 3},
        "locator": {
            "file": "locator.onnx",
            "spacing_mm": 4.0,
            "outside_hu": -1024.0,
            "highest_hu": 600.0,
            "multiple_of": 4,
            "context": LOCATOR.context,
            "inputs": ["hu"],
            "outputs": ["lungs"],
            "goes_on_mm": 16.0,
        },
        "refiner": {
            "file": "refiner.onnx",
            "spacing_mm": 2.0,
            "outside_hu": -1024.0,
            "highest_hu": 600.0,
            "multiple_of": 2,
            "inputs": ["hu", "opinion"],
            "outputs": ["logits"],
            "opinion": {"spacing_mm": 12.0, "contrast": 2.5},
        },
        "versions": found["versions"],
    }
    assert found["versions"]["onnxruntime"] == version("onnxruntime")


def test_of_a_locator_alone_there_is_one_file(model, exports, monkeypatch, tmp_path):
    monkeypatch.setattr(export, "_onnx_of", lambda graph: made_before(exports[0]))
    write_export(exported(replace(model, refiner=None)), model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [DESCRIPTION, "locator.onnx"]
    write_export(exports, model, tmp_path)
    write_export(exports[:1], model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [DESCRIPTION, "locator.onnx"], "no refiner of before"
    assert "refiner" not in json.loads((tmp_path / DESCRIPTION).read_text(encoding="utf-8"))


def test_a_refiner_without_an_opinion_is_given_hu_alone():
    graph = export.RefinerGraph(trained(View(1.0), replace(REFINER, in_channels=1)))
    assert graph.inputs == ("hu",)
    assert "opinion" not in export._known(graph)
    assert graph(hu_of((2, 4, 6))[None]).shape == (1, 1, 2, 4, 6)


def test_what_another_runtime_makes_otherwise_is_refused(model, exports, monkeypatch):
    monkeypatch.setattr(export, "_onnx_of", lambda graph: made_before(exports[0]))
    other = replace(model.locator, weights={key: value + 0.1 for key, value in model.locator.weights.items()})
    line = (
        "export of the locator: lungs of ONNX Runtime that differ by .* from torch's; expected 0.01 at most; try other"
    )
    with pytest.raises(ModelError, match=line):
        exported(replace(model, locator=other))


def test_libraries_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(ModelError) as error:
        exported(tiny_model())
    assert str(error.value) == "export: no onnx, no onnxscript, no onnxruntime; pip install 'cascadeseg[onnx]'"


def test_a_library_that_cannot_be_loaded_is_told_in_one_line(monkeypatch):
    def broken(name):
        if name == "onnxruntime":
            raise ImportError("libstdc++.so.6:\nversion not found")

    monkeypatch.setattr(export, "import_module", broken)
    with pytest.raises(ModelError) as error:
        exported(tiny_model())
    found = "onnxruntime is installed and cannot be loaded (libstdc++.so.6: version not found)"
    assert str(error.value) == f"export: {found}; mend it until python -c 'import onnxruntime' says nothing"


def test_a_folder_that_is_not_there_is_told(model, exports, tmp_path):
    with pytest.raises(OutputError, match="does not exist"):
        write_export(exports, model, tmp_path / "nowhere")


class ThresholdNetwork:
    """Stands in for `onnx_infer.Network`: air is lung, of the side that the image's middle or the opinion says."""

    seen: ClassVar[list[dict[str, np.ndarray]]] = []

    def __init__(self, folder: Path, known: dict[str, Any]) -> None:
        self.known = known

    def __call__(self, **images: Any) -> np.ndarray:
        arrays = {name: SimpleITK.GetArrayFromImage(image).transpose(2, 1, 0) for name, image in images.items()}
        (shape,) = {array.shape for array in arrays.values()}
        assert all(np.isfinite(array).all() for array in arrays.values()), "one NaN would be all of a network's output"
        lung = 10 * ((LUNG_HU + TISSUE_HU) / 2 - arrays["hu"]) / 1000
        lung[arrays["hu"] < -1000] = -6
        self.seen.append(arrays)
        if "opinion" in arrays:
            return np.where(arrays["opinion"] > -0.5, lung, -6)[None]
        on_right = np.arange(shape[0])[:, None, None] > shape[0] / 2
        return 0.6 * np.stack([(lung > 0) & on_right, (lung > 0) & ~on_right]).astype(np.float32)


@pytest.fixture
def program(monkeypatch) -> Any:
    """The program, with thresholds for networks; what they were given is in `ThresholdNetwork.seen`."""
    monkeypatch.syspath_prepend(SCRIPTS)
    ThresholdNetwork.seen.clear()
    module = importlib.import_module("onnx_infer")
    monkeypatch.setattr(module, "Network", ThresholdNetwork)
    return module


def toy_scan(folder: Path, spacing_mm: tuple[float, float, float], point: tuple[float, ...], hu: float) -> Any:
    """The toy chest as SimpleITK reads it, with other HU at a point of the world."""
    grid = chest_grid(spacing_mm)
    write_scan(chest(grid).voxels, grid, folder / "scan.nii.gz")
    scan = SimpleITK.ReadImage(folder / "scan.nii.gz", SimpleITK.sitkFloat32)
    scan[grid.index(point).round().astype(int).tolist()] = hu
    return scan


@pytest.mark.parametrize("directions", ["RAS", "LPS", "SLA", "PIR"])
@pytest.mark.parametrize("spacing_mm", [(4.0, 4.0, 5.0), (1.5, 1.5, 3.0)])
def test_the_program_without_torch_does_the_geometry(program, exports, model, tmp_path, directions, spacing_mm):
    write_export(exports, model, tmp_path)
    scan = SimpleITK.DICOMOrient(toy_scan(tmp_path, spacing_mm, (0.0, 100.0, 0.0), np.nan), directions)
    mask = program.segmented(tmp_path, scan)
    assert mask.GetSize() == scan.GetSize()
    assert np.allclose(mask.GetOrigin(), scan.GetOrigin())
    assert np.allclose(mask.GetDirection(), scan.GetDirection())
    SimpleITK.WriteImage(mask, tmp_path / "lungs.nii.gz")
    labels, there = read_labels(tmp_path / "lungs.nii.gz")
    for value in (1, 2):
        assert dice(labels, truth(there), value) > 0.97


def test_the_program_shows_the_networks_what_the_page_says(program, exports, model, tmp_path):
    write_export(exports, model, tmp_path)
    program.segmented(tmp_path, toy_scan(tmp_path, (2.0, 2.0, 2.0), (-110.0, 0.0, 6.0), 1000.0))
    _, right, left = ThresholdNetwork.seen
    for crop in (right, left):
        shape = np.array(crop["hu"].shape)
        assert not (shape % 2).any(), "multiple_of"
        assert (shape * 2 >= 2 * RADII + 2 * 8 - 2 * 4).all(), "margin_mm, of what a grid of 4 mm shows of it"
        middle = crop["opinion"][tuple(shape // 2)]
        assert middle == pytest.approx(0.75, abs=0.02), "contrast: (0.6 - 0.5) x 2.5 + 0.5"
        assert np.abs(np.diff(crop["opinion"], axis=0)).max() < 0.75 / 4, "spacing_mm: it is vague over 12 mm"
    bone = np.argwhere(left["hu"] > 500).mean(axis=0)
    assert bone[0] > 0.9 * left["hu"].shape[0], "beside a left lung that is mirrored, at its far end"


def test_the_programs_network_takes_images_of_any_shape(monkeypatch, exports, model, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    program = importlib.import_module("onnx_infer")
    write_export(exports, model, tmp_path)
    known = json.loads((tmp_path / DESCRIPTION).read_text(encoding="utf-8"))["locator"]
    hu = hu_of((5, 8, 10))
    (image,) = (SimpleITK.GetImageFromArray(array.transpose(2, 1, 0).copy()) for array in hu.numpy())
    given = program.Network(tmp_path, known)(hu=image)
    wanted = Engine(model.locator, CPU, "fp32")(image_of_hu(hu, model.locator.view)).softmax(dim=0)[1:3]
    assert np.allclose(given, wanted, atol=1e-4)


def test_the_program_finds_nothing_where_there_is_nothing(program, exports, model, tmp_path):
    write_export(exports, model, tmp_path)
    mask = program.segmented(tmp_path, SimpleITK.Image([20, 20, 20], SimpleITK.sitkInt16))
    assert not SimpleITK.GetArrayFromImage(mask).any()


def test_the_program_wants_both_stages(program, exports, model, tmp_path):
    write_export(exports[:1], model, tmp_path)
    with pytest.raises(SystemExit, match="a locator alone; export a model of both stages"):
        program.segmented(tmp_path, SimpleITK.Image([20, 20, 20], SimpleITK.sitkInt16))
