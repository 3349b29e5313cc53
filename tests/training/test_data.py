from __future__ import annotations

import ast
import csv
import gzip
import json
import shutil
import tracemalloc
from dataclasses import replace
from multiprocessing import active_children
from multiprocessing.connection import wait
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import SimpleITK
import torch
import torch.nn.functional as F

from cascadeseg.cascade.crop import LungBox, crop_lungs
from cascadeseg.cascade.locate import Coarse, coarse_grid
from cascadeseg.cascade.refine import lung_image, mirrored
from cascadeseg.cascade.resample import resample_scan
from cascadeseg.cascade.windowed import restored
from cascadeseg.cli import main
from cascadeseg.errors import ConfigError, OutputError
from cascadeseg.formats import read_labels, read_scan, write_labels, write_scan
from cascadeseg.formats.scan import Scan
from cascadeseg.geometry import Box, Grid
from cascadeseg.labels import BESIDE, IGNORE, LEFT_LUNG, LUNGS, RIGHT_LUNG
from cascadeseg.network import View, load_model, save_model
from cascadeseg.training import cache as caching
from cascadeseg.training import data as reading
from cascadeseg.training import preflight
from cascadeseg.training.cache import CaseStore, predicts_boxes, recipe_digest
from cascadeseg.training.cases import SyntheticPatient, imagined, labels_on, prepare, stage2_case
from cascadeseg.training.config import LabelNames
from cascadeseg.training.data import Data, patients_of
from cascadeseg.training.listing import Entry, Listing, listing, sides
from cascadeseg.training.loop import train
from cascadeseg.training.prefetch import Prefetch, Stop, Stopped
from cascadeseg.training.preflight import inspect
from cascadeseg.training.state import Relief
from tests.cascade.chest import Thresholder, chest, chest_grid, dice, thresholding_segmenter, truth
from tests.training.toy import OURS, stage1, stage2, with_data, write_case, write_dataset_json

CASES = ["toy_0", "toy_1", "toy_2"]


def paths(name: str) -> dict[str, str]:
    return {"image": f"imagesTr/{name}_0000.nii.gz", "label": f"./labelsTr/{name}.nii.gz"}


def as_decathlon(root: Path) -> Path:
    labels = {"0": "background", "1": "right lung", "2": "left lung"}
    about = {"labels": labels, "training": [paths(name) for name in CASES], "numTraining": 3}
    (root / "dataset.json").write_text(json.dumps(about), encoding="utf-8")
    return root


def as_datalist(root: Path) -> Path:
    path = root / "datalist.json"
    cases = [paths(name) | {"fold": fold} for fold, name in enumerate(CASES)]
    path.write_text(
        json.dumps({"training": cases, "testing": [], "labels": {"0": "background", **_named(OURS)}}), encoding="utf-8"
    )
    return path


def _named(labels: dict[str, int]) -> dict[str, str]:
    return {str(number): name for name, number in labels.items() if number}


def as_csv(root: Path) -> Path:
    path = root / "cases.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["image", "label", "patient", "fold"])
        writer.writeheader()
        writer.writerows(paths(name) | {"patient": "p", "fold": ""} for name in CASES[:2])
        writer.writerow(paths(CASES[2]) | {"patient": "q", "fold": ""})
    return path


@pytest.mark.parametrize("layout", [lambda root: root, as_decathlon, as_datalist, as_csv])
def test_on_every_layout_the_same_training_starts(folder, cache, tmp_path, layout):
    root = shutil.copytree(folder, tmp_path / "set")
    source = layout(root)
    config = stage1(source)
    if source.suffix == ".csv":
        config = with_data(config, labels=LabelNames(right=("1",), left=("2",)), folds=2)
    training, held_out = patients_of(config, tmp_path / "split.json")
    assert sorted(patient.case.entry.name for patient in [*training, *held_out]) == CASES
    assert len(training)
    assert len(held_out)
    assert dict(training[0].case.sides) == {0: 0, 1: 1, 2: 2, 255: IGNORE}
    scan, labels = training[0].whole(2.0)
    assert dice(labels, truth(scan.grid), 1) == 1
    model = train(with_data(config, cache=cache), tmp_path / "run", device="cpu", stop_after=1, quiet=True)
    assert load_model(model).notes == {"stage1_steps": 1, "stage1_data": str(source)}


def test_patients_are_never_split_and_the_split_is_kept(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "set")
    config = with_data(stage1(as_csv(root)), labels=LabelNames(right=("1",), left=("2",)), folds=2)
    training, held_out = patients_of(config, tmp_path / "split.json")
    both = [{patient.case.entry.patient for patient in part} for part in (training, held_out)]
    assert not both[0] & both[1]
    (tmp_path / "checkpoint.pt").touch()
    kept = json.loads((tmp_path / "split.json").read_text(encoding="utf-8"))
    assert kept["folds"]["toy_0"] == kept["folds"]["toy_1"] != kept["folds"]["toy_2"]
    kept["folds"] = {name: 1 - fold for name, fold in kept["folds"].items()}
    (tmp_path / "split.json").write_text(json.dumps(kept), encoding="utf-8")
    again, _ = patients_of(config, tmp_path / "split.json")
    assert {patient.case.entry.patient for patient in again} == both[1]
    write_case(root, "toy_3", (6.0, 6.0, 6.0))
    with pytest.raises(ConfigError, match="a split of other cases"):
        patients_of(with_data(stage1(root), folds=2), tmp_path / "split.json")


def with_folds(root: Path, folds: list[int], patients: list[object]) -> Path:
    path = root / "folds.json"
    given = zip(CASES, folds, patients, strict=True)
    cases = [paths(name) | {"fold": fold, "patient": patient} for name, fold, patient in given]
    path.write_text(json.dumps({"training": cases, "labels": _named(OURS)}), encoding="utf-8")
    return path


def test_a_fold_that_no_case_has_is_refused_unless_nothing_is_validated(folder, tmp_path):
    record = tmp_path / "split.json"
    source = with_folds(shutil.copytree(folder, tmp_path / "set"), [1, 2, 3], ["a", "b", "c"])
    words = r"^data\.fold: 0, which no case has; expected one of the data set's folds 1, 2, 3$"
    with pytest.raises(ConfigError, match=words):
        patients_of(stage1(source), record)
    assert not record.exists()
    assert len(patients_of(with_data(stage1(source), fold=2), record)[1]) == 1
    training, held_out = patients_of(with_data(stage1(source), validation=0), record)
    assert (len(training), len(held_out)) == (3, 0)
    with pytest.raises(ConfigError, match=r"^data\.fold: 4, which no case has; expected .* folds 0, 1, 2$"):
        patients_of(with_data(stage1(folder), folds=5, fold=4), record)


def test_own_folds_must_not_part_a_patient(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "set")
    with pytest.raises(ConfigError, match=r"^data\.source: several folds for patient 0; expected one fold for each"):
        patients_of(stage1(with_folds(root, [0, 1, 1], [0, 0, "b"])), tmp_path / "split.json")
    training, _ = patients_of(stage1(with_folds(root, [0, 0, 1], [0, 0, "b"])), tmp_path / "split.json")
    assert [patient.case.entry.name for patient in training] == ["toy_2"]


def test_a_run_goes_on_only_with_the_data_it_began_with(folder, tmp_path):
    config = stage1(shutil.copytree(folder, tmp_path / "set"))
    record = tmp_path / "split.json"
    patients_of(config, record)
    (tmp_path / "checkpoint.pt").touch()
    patients_of(config, record)
    _relabel(tmp_path / "set" / "imagesTr", tmp_path / "set" / "labelsTr", "toy_1", (0, 1, 255))
    with pytest.raises(ConfigError) as caught:
        patients_of(config, record)
    found = "another scan, or other labels, than at first of toy_1; expected the same data as at first"
    assert str(caught.value) == f"{record}: {found}; put it back, or begin anew elsewhere"
    kept = json.loads(record.read_text(encoding="utf-8"))
    del kept["digests"]  # as earlier versions wrote it
    record.write_text(json.dumps(kept), encoding="utf-8")
    patients_of(config, record)


def test_a_split_of_a_start_that_left_no_checkpoint_is_made_anew(folder, cache, tmp_path):
    record = tmp_path / "split.json"
    patients_of(with_data(stage1(folder), folds=2, fold=1), record)
    anew = with_data(stage1(folder), folds=3, fold=2, cache=cache)
    training, held_out = patients_of(anew, record)
    assert {patient.fold for patient in [*training, *held_out]} == {0, 1, 2}
    assert json.loads(record.read_text(encoding="utf-8"))["held_out"] == 2
    train(anew, tmp_path, device="cpu", stop_after=1, quiet=True)
    with pytest.raises(ConfigError, match=r"another recipe .*\(data.folds was 3; data.fold was 2\)"):
        train(with_data(anew, folds=2, fold=1), tmp_path, device="cpu", resume=True, quiet=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lung_right", 1),
        ("Left Lung", 2),
        ("lung_upper_lobe_left", 2),
        ("lung_lower_lobe_right", 1),
        ("Lung_L", 2),
        ("RUL", 1),
        ("lll", 2),
        ("Right upper lobe (RUL)", 1),
        ("RUL_RML", 1),
        ("Trachea", 0),
        ("lung", None),
        ("lung_nodule_right", None),
        ("right", None),
        ("lung left right", None),
        ("infection", None),
        ("RUL_tumor", None),
        ("LLL_effusion", None),
        ("not RUL", None),
        ("left RUL", None),
        ("pneumothorax_RUL", None),
    ],
)
def test_a_label_must_say_its_side(name, value):
    mapping, problems = sides(Listing((), {1: name, 2: "lung_right", 3: "lung_left"}), LabelNames())
    assert mapping.get(1) == value
    assert len(problems) == (value is None)


def test_255_and_what_is_called_ignore_are_ignored_unless_named_otherwise():
    lungs = {1: "lung_right", 2: "lung_left"}
    assert sides(Listing((), lungs), LabelNames()) == ({0: 0, 1: 1, 2: 2, 255: IGNORE}, [])
    assert sides(Listing((), lungs | {3: "ignore"}), LabelNames())[0][3] == IGNORE
    assert sides(Listing((), lungs | {255: "trachea"}), LabelNames())[0][255] == 0


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ({0: "background"}, LabelNames(ignore=("background",))),
        ({0: "background"}, LabelNames(ignore=("0",))),
        ({}, LabelNames(ignore=("0",))),
        ({0: "lung_right"}, LabelNames()),
        ({0: "ignore"}, LabelNames()),
    ],
)
def test_0_is_background_and_nothing_else(names, wanted):
    lungs = {1: "lung_right", 2: "lung_left"}
    (problem,) = sides(Listing((), lungs | names), wanted)[1]
    assert problem.startswith(f"label 0 '{names.get(0, '')}': named as something else, but 0 is always background")
    for name in ("background", "unlabelled"):
        assert sides(Listing((), lungs | {0: name}), LabelNames(background=("0",)))[1] == []


def test_a_recipe_says_what_a_name_does_not():
    names = {1: "infection", 2: "lungs", 5: "L", 6: "R"}
    wanted = LabelNames(right=("R",), left=("5",), ignore=("infection",), background=("lungs",))
    assert sides(Listing((), names), wanted) == ({0: 0, 1: IGNORE, 2: 0, 5: 2, 6: 1, 255: IGNORE}, [])
    _, problems = sides(Listing((), names), replace(wanted, right=("Q",)))
    assert any("'Q', which the data set does not have" in problem for problem in problems)


def test_a_data_set_may_have_what_is_beside_the_lungs_and_need_not():
    names = {1: "lung_right", 2: "lung_left", 3: "stomach", 4: "trachea"}
    beside = LabelNames(beside=(("airway", "trachea"), ("stomach", "bowel")))
    assert sides(Listing((), names), beside) == ({0: 0, 1: 1, 2: 2, 3: BESIDE[1], 4: BESIDE[0], 255: IGNORE}, [])
    asked = replace(beside, ignore=("stomach",), background=("trachea",))
    assert sides(Listing((), names), asked) == ({0: 0, 1: 1, 2: 2, 3: IGNORE, 4: 0, 255: IGNORE}, [])


def test_ten_faults_are_told_in_one_go_and_nothing_is_started(tmp_path, capsys):
    root = tmp_path / "set"
    for number in range(9):
        write_case(root, f"case_{number}", (10.0, 10.0, 10.0))
    images, labels = root / "imagesTr", root / "labelsTr"
    (labels / "case_0.nii.gz").unlink()
    (images / "case_1_0000.nii.gz").unlink()
    shutil.copy(_written(tmp_path, (12.0, 12.0, 12.0)), labels / "case_2.nii.gz")
    (images / "case_3_0000.nii.gz").write_text("no volume", encoding="utf-8")
    whole = gzip.decompress((labels / "case_4.nii.gz").read_bytes())
    (labels / "case_4.nii.gz").write_bytes(gzip.compress(whole[:-5000]))
    _relabel(images, labels, "case_5", (0, 1, 7))
    _relabel(images, labels, "case_6", (0, 0, 0))
    _relabel(images, labels, "case_7", (0, 2, 1))
    _relabel(images, labels, "case_8", (3, 1, 2))
    write_case(root, "case_9", (10.0, 10.0, 10.0))
    (images / "case_9_0000.nii.gz").write_bytes(b"")
    write_dataset_json(root)
    run = tmp_path / "run"
    assert main(["train", "--stage", "1", "--data", str(root), "--output", str(run), "--quiet"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 11
    assert said[-1] == "cascadeseg: 10 problems in the training data; nothing was started"
    for number, words in enumerate(
        [
            "case_0.nii.gz: no such",
            "case_1_0000.nii.gz: no such",
            "case_2.nii.gz: a grid of",
            "case_3_0000",
            "case_4",
            "labels 7 without a name",
            "no lung of 1 ml",
            "right lung lies to the patient's left",
            "labels 3 without",
            "case_9_0000",
        ]
    ):
        assert words in said[number], said[number]
        assert f"case_{number}" in said[number]
    assert not run.exists()


def test_what_is_odd_about_scans_is_told_when_training_begins(folder, cache, tmp_path):
    root = shutil.copytree(folder, tmp_path / "set")
    image = root / "imagesTr" / "toy_1_0000.nii.gz"
    scan = read_scan(image)
    scan.voxels[:3] = -3024
    write_scan(scan.voxels, scan.grid, image)
    data = Data(with_data(stage1(root), cache=cache), tmp_path, prepares=False)
    (warning,) = [line for line in data.warnings if line.startswith(f"{image}: warning: padding of -3024 HU")]
    scans = sorted((root / "imagesTr").iterdir())
    expected = [f"{path}: warning: {words}" for path in scans for words in read_scan(path).warnings]
    assert sorted(data.warnings) == sorted(expected)
    data.training = data.training[:0]
    told: list[str] = []
    data.prepare_first(told.append)
    assert told == data.warnings
    data.warnings = [warning] * 12
    told.clear()
    data.prepare_first(told.append)
    assert told == [warning] * 10 + ["and 2 more warnings"]


def test_of_a_4d_file_training_is_told_more_than_an_option_it_does_not_have(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "set")
    for path in (root / "imagesTr" / "toy_0_0000.nii.gz", root / "labelsTr" / "toy_1.nii.gz"):
        image = SimpleITK.ReadImage(str(path))
        SimpleITK.WriteImage(SimpleITK.JoinSeries([image, image]), str(path))
    with pytest.raises(ExceptionGroup) as caught:
        patients_of(stage1(root), tmp_path / "split.json")
    for error in caught.value.exceptions:
        assert "4 dimensions" in str(error)
        assert str(error).endswith("choose one with --volume N (infer, check), or save it as a 3D file")
    assert len(caught.value.exceptions) == 2


def test_examining_a_data_set_is_ended_when_the_run_is_to_end(folder, tmp_path, monkeypatch):
    ending, examined = Event(), []

    def slow(entry, sides):
        examined.append(entry.name)
        ending.wait(60)
        return [], "", ()

    def stopped():
        raise Stopped

    monkeypatch.setattr(preflight, "_examined", slow)
    with pytest.raises(Stopped):
        Data(stage1(folder), tmp_path, stopped=stopped)
    ending.set()
    assert examined == ["toy_0"]
    assert not (tmp_path / "split.json").exists()


@pytest.mark.parametrize("kind", [np.uint8, np.int32])
def test_looking_at_a_label_map_takes_little_more_than_itself(kind):
    """Sorted, or with the place of each voxel of a lung, it took seven times as much, in every thread that reads."""
    labels = np.zeros((160, 160, 100), kind, order="F")
    labels[20:70, 20:140], labels[90:140, 20:140] = 2, 1
    grid = Grid.axis_aligned(labels.shape, (2, 2, 2))
    sides = {0: 0, 1: RIGHT_LUNG.value, 2: LEFT_LUNG.value}
    tracemalloc.start()
    try:
        assert preflight._label_problems(Path("labels"), labels, grid, sides) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.2 * labels.nbytes
    assert len(preflight._label_problems(Path("labels"), labels[::-1], grid, sides)) == 1


@pytest.mark.parametrize(("usable", "wanted", "expected"), [(64, 0, 4), (2, 0, 2), (64, 9, 9)])
def test_few_files_are_read_at_once_however_many_processors_there_are(
    folder, tmp_path, monkeypatch, usable, wanted, expected
):
    monkeypatch.setattr(reading, "processors", lambda: usable)
    asked = []
    monkeypatch.setattr(reading, "inspect", lambda *more: asked.append(more[3]) or inspect(*more))
    patients_of(with_data(stage1(folder), workers=wanted), tmp_path / "split.json")
    assert asked == [expected]


def _written(tmp_path: Path, spacing: tuple[float, float, float]) -> Path:
    write_case(tmp_path / "other", "other", spacing)
    return tmp_path / "other" / "labelsTr" / "other.nii.gz"


def _relabel(images: Path, labels: Path, name: str, numbers: tuple[int, int, int]) -> None:
    path = labels / f"{name}.nii.gz"
    changed = np.array(numbers, np.uint8)[read_labels(path)[0]]
    path.unlink()
    write_labels(changed, path, read_scan(images / f"{name}_0000.nii.gz"))


def test_names_that_say_no_side_are_refused_with_the_faults_of_the_files(folder, tmp_path, capsys):
    root = shutil.copytree(folder, tmp_path / "set")
    write_dataset_json(root, {"background": 0, "lungs": 1, "tumour": 2})
    (root / "labelsTr" / "toy_1.nii.gz").unlink()
    assert main(["train", "--stage", "1", "--data", str(root), "--output", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "label 1 'lungs': neither a lung with its side" in said
    assert "toy_1.nii.gz: no such file" in said
    assert "4 problems" in said


@pytest.mark.parametrize("content", ["{", "[]", '{"labels": {"lung_left": [1, 2]}, "file_ending": ".nii.gz"}', "{}"])
def test_what_is_no_data_set_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "dataset.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"dataset.json: not a description of a data set"):
        listing(tmp_path)
    with pytest.raises(ConfigError, match=r"no such file or folder; expected a folder with dataset.json"):
        listing(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"expected a folder with dataset.json"):
        listing(Path(__file__).parent)


def test_a_description_may_begin_with_a_byte_order_mark(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "set")
    for path in (root / "dataset.json", as_datalist(root)):
        path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
        assert [entry.name for entry in listing(path).entries] == CASES


def test_nnunets_first_version_lists_images_without_their_channel(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "set")
    pairs = [{"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"} for name in CASES]
    write_dataset_json(root, modality={"0": "CT"}, training=pairs)
    assert [(entry.name, entry.image) for entry in listing(root).entries] == [
        (name, root / "imagesTr" / f"{name}_0000.nii.gz") for name in CASES
    ]
    (root / "imagesTr" / "toy_0_0000.nii.gz").rename(root / "imagesTr" / "toy_0.nii.gz")
    assert listing(root).entries[0] == Entry(
        "toy_0", root / "imagesTr" / "toy_0.nii.gz", root / "labelsTr" / "toy_0.nii.gz", "toy_0"
    )


@pytest.mark.parametrize("key", ["channel_names", "modality"])
def test_of_several_channels_the_one_named_ct_is_taken(folder, tmp_path, key):
    root = shutil.copytree(folder, tmp_path / "set")
    for image in (root / "imagesTr").iterdir():
        image.rename(image.with_name(image.name.replace("_0000", "_0001")))
    expected = [(name, root / "imagesTr" / f"{name}_0001.nii.gz") for name in CASES]
    about = {"labels": OURS, "file_ending": ".nii.gz", key: {"0": "PET", "1": "ct"}}
    labels = [f"labelsTr/{name}.nii.gz" for name in CASES]
    for images in (
        None,
        [f"imagesTr/{name}.nii.gz" for name in CASES],
        [f"imagesTr/{name}_0001.nii.gz" for name in CASES],
        [[f"imagesTr/{name}_000{channel}.nii.gz" for channel in (0, 1)] for name in CASES],
    ):
        if images:
            pairs = zip(images, labels, strict=True)
            about["training"] = [{"image": image, "label": label} for image, label in pairs]
        (root / "dataset.json").write_text(json.dumps(about), encoding="utf-8")
        assert [(entry.name, entry.image) for entry in listing(root).entries] == expected
    (root / "dataset.json").write_text(
        json.dumps(about | {"training": [{"image": ["a"], "label": "b"}]}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="not a description of a data set"):
        listing(root)
    (root / "dataset.json").write_text(json.dumps(about | {key: {"0": "PET", "1": "MR"}}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"dataset.json: channels PET, MR; expected one that is named CT$"):
        listing(root)
    (root / "dataset.json").write_text(
        json.dumps({"labels": OURS, "file_ending": ".nii.gz", key: {"0": "noNorm"}}), encoding="utf-8"
    )
    assert listing(root).entries[0].image.name == "toy_0_0000.nii.gz"


@pytest.mark.parametrize(
    ("row", "words"),
    [("a.nii.gz", "no label in the case {'image': 'a.nii.gz', 'label': None}"), (",b.nii.gz", "no image in the case")],
)
def test_a_row_without_its_label_or_image_is_told_in_one_line(tmp_path, capsys, row, words):
    path = tmp_path / "cases.csv"
    path.write_text(f"image,label\nc.nii.gz,d.nii.gz\n{row}\n", encoding="utf-8")
    assert main(["train", "--stage", "1", "--data", str(path), "--output", str(tmp_path / "run")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"cascadeseg: data.source: {path}: not a table of cases (ValueError: {words}")
    assert said.endswith("expected a CSV of image,label[,patient,fold]")
    (tmp_path / "list.json").write_text('{"training": [{"image": [], "label": "b.nii.gz"}]}', encoding="utf-8")
    with pytest.raises(ConfigError, match="no image in the case"):
        listing(tmp_path / "list.json")


def test_a_cached_case_is_what_inference_sees(folder, cache, tmp_path):
    config = stage1(folder)
    (first, *_), _ = patients_of(config, tmp_path / "split.json")
    store = CaseStore(Path(cache), config, [(first, "cases")])
    image, labels = store.arrays(store.names(first)[0])
    scan = read_scan(first.case.entry.image).canonical()
    grid = scan.grid.resampled(6.0)
    seen = lung_image(scan, None, LUNGS[0], grid, View(6.0), torch.device("cpu"))
    assert torch.equal(torch.from_numpy(np.array(image)), seen.half())
    assert dice(np.asarray(labels), truth(grid), 1) > 0.95


def test_of_a_windowed_scan_training_sees_what_inference_sees(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "windowed")
    for image in (root / "imagesTr").iterdir():
        scan = read_scan(image)
        write_scan(scan.voxels.clip(-160, 240), scan.grid, image)
    (patient, *_), _ = patients_of(stage1(root), tmp_path / "split.json")
    scan, labels = patient.whole(6.0)
    assert np.array_equal(scan.voxels, restored(read_scan(patient.case.entry.image).canonical()).voxels)
    assert np.median(scan.hu()[labels > 0]) == -850


def test_a_crop_of_stage_2_is_what_the_refiner_sees(folder, tmp_path, monkeypatch):
    images = []
    segmenter = thresholding_segmenter()
    stage = segmenter.refiner.stage
    call = Thresholder.__call__
    monkeypatch.setattr(
        Thresholder, "__call__", lambda self, x, *more: images.append(x[..., :].clone()) or call(self, x, *more)
    )
    config = with_data(stage2(folder, Path("none")), boxes="predicted", box_jitter_mm=0.0)
    config = replace(config, view=stage.view, unet=stage.unet)
    (patient, *_), _ = patients_of(config, tmp_path / "split.json")
    cases = prepare(patient, config, segmenter.locator)
    segmenter.segment(patient.whole(2.0)[0])
    assert [case.name.rpartition("_")[2] for case in cases] == ["right", "left"]
    for case in cases:
        assert any(torch.equal(case.image, image) for image in images)


def test_labels_of_a_left_lung_are_mirrored_as_its_image_is():
    """Of each lung only the lateral half is air and labelled; inference mirrors back what it gets."""
    grid = chest_grid((4.0, 4.0, 4.0))
    lungs = truth(grid)
    labels = lungs.copy()
    for lung in LUNGS:
        middle = np.argwhere(lungs == lung.value)[:, 0].mean()
        x = grid.world([(i, 0, 0) for i in range(grid.shape[0])])[:, 0]
        medial = np.abs(x) < abs(grid.world((middle, 0, 0))[0])
        labels[medial[:, None, None] & (lungs == lung.value)] = 0
    scan = Scan(np.where(labels > 0, -850, 0).astype(np.int16), grid)
    coarse = Coarse(torch.stack([torch.from_numpy(lungs == lung.value).float() for lung in LUNGS]), grid)
    config = stage2("none", Path("none"))
    for lung in crop_lungs(coarse):
        crop = lung.extent(4.0, config.unet.stride)
        case = stage2_case("name", scan, labels, coarse, lung, crop, config)
        assert (case.image[0][case.labels == 1] < 0.5).float().mean() > 0.95
        back = mirrored(case.labels, lung.label).numpy()
        centre, expected = (
            where.world(np.argwhere(mask).mean(axis=0))
            for where, mask in ((crop, back == 1), (grid, labels == lung.label.value))
        )
        np.testing.assert_allclose(centre, expected, atol=1.0)
        lateral_half_first = case.labels[: len(back) // 2].sum() > case.labels[len(back) // 2 :].sum()
        assert bool(lateral_half_first) == (crop.affine[0, 0] < 0), "left lungs lie like right ones"


def test_all_recipes_hold_out_the_same_patients(folder, tmp_path):
    one, other = (
        [patient.case.entry.name for patient in patients_of(with_data(stage1(folder), seed=seed), record)[1]]
        for seed, record in ((1000, tmp_path / "one.json"), (5000, tmp_path / "other.json"))
    )
    assert one == other
    with pytest.raises(ConfigError, match=r"data\.fold: 5; expected 0 to 4"):
        patients_of(with_data(stage1(folder), folds=5, fold=5), tmp_path / "third.json")


def test_synthetic_patients_are_of_several_presets_by_turns(folder, tmp_path):
    mixed = with_data(
        stage1(folder), source="synthetic", preset=("healthy", "covid", "covid"), validation=2, cases=4, seed=30
    )
    mixed = with_data(mixed, labels=LabelNames())
    training, held_out = patients_of(mixed, tmp_path / "split.json")
    told = [(patient.seed, patient.preset) for patient in [*held_out, *training]]
    assert told == list(zip(range(30, 36), ("healthy", "covid", "covid") * 2, strict=True))
    later, _ = patients_of(with_data(mixed, seed=31), tmp_path / "split.json")
    assert all((patient.seed, patient.preset) in told for patient in later[:3])  # one cache serves both
    assert recipe_digest(mixed) != recipe_digest(with_data(mixed, preset="healthy"))
    for preset, found in ((("healthy", "helthy"), "helthy"), ((), "none")):
        with pytest.raises(ConfigError, match=rf"^data\.preset: {found}; expected one of default, healthy"):
            patients_of(with_data(mixed, preset=preset), tmp_path / "split.json")


def test_the_cache_is_keyed_by_recipe_and_content(folder, tmp_path):
    config = stage1(folder)
    assert recipe_digest(config) == recipe_digest(stage1(folder, steps=99, learning_rate=1.0))
    assert recipe_digest(config) != recipe_digest(replace(config, view=View(5.0)))
    training, _ = patients_of(config, tmp_path / "split.json")
    root = shutil.copytree(folder, tmp_path / "set")
    again, _ = patients_of(stage1(root), tmp_path / "split.json")
    assert [patient.key for patient in training] == [patient.key for patient in again]
    write_dataset_json(root, {"lung_right": 1, "trachea": 2})
    renamed, _ = patients_of(stage1(root), tmp_path / "split.json")
    assert renamed[0].key != again[0].key
    write_dataset_json(root, OURS)
    entry = again[0].case.entry
    _relabel(root / "imagesTr", root / "labelsTr", entry.name, (0, 1, 255))
    write_dataset_json(root, OURS | {"lobe_left_upper": 255})
    changed, _ = patients_of(stage1(root), tmp_path / "split.json")
    assert changed[0].key != again[0].key


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package's own files as the cache sees them, to change."""
    copy = shutil.copytree(caching.PACKAGE, tmp_path / "package", ignore=lambda *_: ["__pycache__", "weights"])
    monkeypatch.setattr(caching, "PACKAGE", copy)
    return copy


def changed(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")


def test_the_cache_is_keyed_by_the_code_that_decides_a_cases_voxels(folder, package):
    before, digests = recipe_digest(stage1(folder)), []
    for name in caching.PREPARE:
        changed(package / name)
        digests.append(recipe_digest(stage1(folder)))
    assert len({before, *digests}) == 1 + len(caching.PREPARE)
    for name in ("synthesis/patient.py", "network/unet.py", "cascade/export.py", "training/loop.py"):
        changed(package / name)
        assert recipe_digest(stage1(folder)) == digests[-1]


@pytest.mark.parametrize(("source", "boxes"), [("synthetic", "perturbed"), ("files", "predicted")])
def test_the_cache_is_keyed_by_the_generators_code_and_the_locators_where_they_matter(folder, package, source, boxes):
    config = stage2(folder if source == "files" else source, Path())
    config = replace(with_data(config, boxes=boxes), locator="")
    digests = [recipe_digest(config)]
    for name in ("synthesis/patient.py", "network/unet.py"):
        changed(package / name)
        digests.append(recipe_digest(config))
    rendered, located = digests[1] != digests[0], digests[2] != digests[1]
    assert (rendered, located) == (source == "synthetic", boxes == "predicted")


def test_every_module_of_the_cascade_that_prepares_cases_is_in_the_caches_key():
    reached, waiting = set(), {"training/cases.py"}
    while waiting:
        reached.add(file := waiting.pop())
        tree = ast.parse((caching.PACKAGE / file).read_text(encoding="utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        parts = [module.split(".")[1:] for module in modules if module.startswith("cascadeseg.cascade.")]
        waiting |= {"/".join(part) + ".py" for part in parts} - reached
    assert len(reached) > 4
    assert reached <= set(caching.PREPARE)


def test_the_cache_is_keyed_by_what_a_locator_sees(folder, tmp_path):
    """Which its weights, and their hash, do not tell."""
    model, digests = load_model(), set()
    for spacing in (2.0, 2.5):
        seen = replace(model, locator=replace(model.locator, view=replace(model.locator.view, spacing_mm=spacing)))
        save_model(seen, tmp_path / "model")
        digests.add(recipe_digest(with_data(stage2(folder, tmp_path / "model"), boxes="predicted")))
    assert len(digests) == 2


def test_the_cache_is_keyed_by_every_voxel(folder, tmp_path):
    """Also where they lie in another file than the one that is named, or in none that ends with a checksum."""
    entry = patients_of(stage1(folder), tmp_path / "split.json")[0][0].case.entry
    listed = Listing((Entry("one", tmp_path / "ct.mhd", tmp_path / "labels.mhd", "one"),))
    for path, name in ((entry.image, "ct"), (entry.label, "labels")):
        SimpleITK.WriteImage(SimpleITK.ReadImage(str(path)), str(tmp_path / f"{name}.mhd"))
    keys = []
    for file in ("ct.raw", "labels.raw", None):
        keys.append(inspect(listed, {0: 0, 1: 1, 2: 2})[0].digest)
        if file:
            with (tmp_path / file).open("r+b") as data:
                data.seek((tmp_path / file).stat().st_size // 2)
                was = data.read(1)[0]
                data.seek(-1, 1)
                data.write(bytes([was ^ 1]))
    assert len(set(keys)) == 3


def test_two_runs_may_fill_one_cache(folder, cache, tmp_path):
    config = stage1(folder)
    (first, *_), _ = patients_of(config, tmp_path / "split.json")
    ready = CaseStore(Path(cache), config, [(first, "cases")])
    stores = [CaseStore(tmp_path / "cache", config, [(first, "cases")]) for _ in range(2)]
    for store in stores:
        (name,) = store.names(first)
        for mine, expected in zip(store.arrays(name), ready.arrays(name), strict=True):
            np.testing.assert_array_equal(mine, expected)
        store.close()
    assert len(list(stores[0].folder.iterdir())) == 3


def test_what_failed_in_an_earlier_run_is_tried_again(folder, tmp_path):
    config = stage1(folder)
    (first, *_), _ = patients_of(config, tmp_path / "split.json")
    waiting = CaseStore(tmp_path / "cache", config, [(first, "cases")], workers=0)
    failed = waiting.folder / f"{first.key}.cases.failed"
    failed.write_text("the disk was full", encoding="utf-8")
    with pytest.raises(ConfigError, match="data: the disk was full"):
        waiting.names(first)
    failed.write_text("", encoding="utf-8")  # as far as it could be written
    with pytest.raises(ConfigError, match=f"data: {first.key} cannot be prepared"):
        waiting.names(first)
    preparing = CaseStore(tmp_path / "cache", config, [(first, "cases")])
    assert not failed.exists()  # and so nothing that waits ends by it
    preparing.close()


def test_patients_without_a_lung_end_a_run_of_stage_2_in_one_line(folder, cache, tmp_path, monkeypatch):
    data = Data(with_data(stage1(folder), cache=cache), tmp_path, prepares=False)
    some = data.store.names(data.training[0])
    monkeypatch.setattr(data.store, "names", lambda patient: some if patient is data.training[0] else [])
    assert all(data.cut(0, index, Relief()).labels.any() for index in range(8))
    monkeypatch.setattr(data.store, "names", lambda patient: [])
    with pytest.raises(ConfigError, match=r"^data: none of 2 patients has a lung for stage 1 to learn from; expected"):
        data.cut(0, 0, Relief())


def test_without_a_number_workers_take_all_processors_but_one_that_the_run_may_use(tmp_path, monkeypatch):
    """In a batch system's job that may be 3 of 64, and a process for each of 64 takes more memory than the job has."""
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 7, 60}, raising=False)
    monkeypatch.setattr("cascadeseg.training.data.CaseStore", lambda *_, workers, **__: workers)
    assert Data(with_data(stage1("synthetic"), workers=0), tmp_path).store == 2


def test_no_patient_is_rendered_that_the_run_does_not_get_to(tmp_path, monkeypatch):
    monkeypatch.setattr("cascadeseg.training.data.CaseStore", lambda _, config, order, **__: order)
    config = with_data(stage1("synthetic", steps=7), cases=60, initial=2, steps_per_case=3, validation=1)
    data = Data(config, tmp_path)
    assert [(patient.seed - config.data.seed, kind) for patient, kind in data.store] == [
        (1, "cases"), (2, "cases"), (0, "whole"), (3, "cases"), (4, "cases"),
    ]  # fmt: skip
    assert len(data.training) == 4


def test_workers_end_with_their_store(tmp_path):
    config = stage1("synthetic")
    patient = SyntheticPatient(1, "default", LabelNames())
    before = set(active_children())
    store = CaseStore(tmp_path, replace(config, view=View(1.0)), [(patient, "cases")])
    (worker,) = set(active_children()) - before
    store.close()
    # Not is_alive(): the pool's own thread waits for the worker too, and whoever asks second may be told nothing.
    assert wait([worker.sentinel], timeout=30)
    assert not list(store.folder.iterdir())


def test_a_worker_that_is_killed_is_told_in_one_line(tmp_path):
    config = replace(stage1("synthetic"), view=View(1.0))
    patient = SyntheticPatient(1, "default", LabelNames())
    before = set(active_children())
    store = CaseStore(tmp_path, config, [(patient, "cases")])
    (worker,) = set(active_children()) - before
    worker.kill()
    with pytest.raises(ConfigError) as caught:
        store.names(patient)
    found = "synthetic_000001: a process that prepares cases ran out of memory or was killed"
    assert str(caught.value) == f"data.workers: {found}; lower it (--set data.workers=1)"
    store.close()


def test_a_signal_that_reaches_the_workers_before_the_run_ends_it_all_the_same(tmp_path):
    config = replace(stage1("synthetic"), view=View(1.0))
    patient = SyntheticPatient(1, "default", LabelNames())
    before = set(active_children())
    stop = Stop()
    store = CaseStore(tmp_path, config, [(patient, "cases")], stopped=stop.check)
    (worker,) = set(active_children()) - before
    worker.terminate()
    wait([worker.sentinel])
    Timer(0.3, setattr, (stop, "interrupted", True)).start()
    with pytest.raises(Stopped):
        store.names(patient)
    store.close()


def test_a_full_disk_is_told_by_who_prepares_and_by_who_waits(folder, tmp_path, small_files):
    config = stage1(folder)
    (first, *_), _ = patients_of(config, tmp_path / "split.json")
    waiting = CaseStore(tmp_path / "cache", config, [(first, "cases")], workers=0)
    full = rf"{first.key}.image.npy: cannot be written \(File too large\)"
    with small_files(2000), pytest.raises(OutputError, match=full):
        caching._prepare_patient(config, first, "cases", waiting.folder)
    with pytest.raises(ConfigError, match=full):
        waiting.names(first)
    with small_files(0), pytest.raises(OutputError, match=full):  # nor is there room to say it to those who wait
        caching._prepare_patient(config, first, "cases", waiting.folder)
    assert [path.suffix for path in waiting.folder.iterdir()] == [".failed"]


def test_with_a_locator_a_fold_a_patient_meets_the_one_that_has_not_seen_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "load_model", lambda where: SimpleNamespace(locator=where))
    monkeypatch.setattr(caching, "Engine", lambda locator, device: locator)
    monkeypatch.setattr(caching, "_locators", {})
    config = stage2(folder, Path("fold{fold}/model"))
    training, held_out = patients_of(config, tmp_path / "split.json")
    assert predicts_boxes(config)
    seen = {patient.fold: caching._locator(config, patient) for patient in [*training, *held_out]}
    assert seen == {fold: f"fold{fold}/model" for fold in range(3)}
    assert not predicts_boxes(replace(config, locator="one/model"))
    assert predicts_boxes(with_data(replace(config, locator="one/model"), boxes="predicted"))


def test_crops_of_files_come_from_boxes_like_stage_1s_mistakes(folder, tmp_path):
    config = stage2(folder, Path("nowhere"))
    (patient, *_), _ = patients_of(config, tmp_path / "split.json")
    scan, labels = patient.whole(2.0)
    opinions = [imagined(scan, labels, View(8.0), f"{patient.key}{key}") for key in range(20)]
    reference = labels_on(labels, scan.grid, opinions[0].grid).numpy()
    right = [dice((one.lungs[0] > 0.5).numpy() * 1, (reference == 1) * 1, 1) for one in opinions]
    assert 0.6 < np.median(right) <= max(right) < 0.99
    coarse = imagined(scan, labels, View(8.0), patient.key)
    assert {box.label for box in crop_lungs(coarse)} == set(LUNGS)
    cases = prepare(patient, config, None)
    assert [case.name.rpartition("_")[2] for case in cases] == ["right", "left"]
    assert all(case.image.shape[0] == 2 and set(case.labels.unique().tolist()) - {IGNORE} == {0, 1} for case in cases)
    assert all((case.labels == IGNORE).float().mean() < 0.05 for case in cases)  # what reaches beyond the scan


def test_imagined_opinions_take_solid_tissue_for_lung_in_some_patients_and_leave_dense_lung_out_in_some():
    scan, labels = SyntheticPatient(6, "healthy", LabelNames()).whole(8.0)
    lungs = labels_on(labels, scan.grid, coarse_grid(scan, View(8.0))) > 0
    beyond = F.max_pool3d(lungs[None].float(), 5, stride=1, padding=2)[0] == 0
    image = resample_scan(scan, coarse_grid(scan, View(8.0)), View(8.0), torch.device("cpu"))
    solid = image * View(8.0).scale_hu + View(8.0).low_hu > -400
    said = [imagined(scan, labels, View(8.0), str(key)).lungs.sum(dim=0) for key in range(1000, 1100)]
    taken = [float((opinion > 0.3)[solid & beyond].sum()) for opinion in said]
    left_out = [float((opinion < 0.1)[solid & lungs].float().mean()) for opinion in said]
    assert sum(voxels > 20 for voxels in taken) in range(50, 85)
    assert sum(share > 0.5 for share in left_out) in range(8, 15)


def test_imagined_opinions_fill_hila_in_about_half_of_the_patients():
    labels = np.zeros((44, 40, 40), np.uint8)
    labels[3:17, 4:36, 4:36], labels[26:40, 4:36, 4:36] = LEFT_LUNG.value, RIGHT_LUNG.value
    labels[26:40, 17:23, :] = 0  # vessels, 12 mm wide
    hu = np.where(labels > 0, -850, 40).astype(np.int16)
    scan = Scan(hu, Grid.axis_aligned(hu.shape, (2, 2, 2)))
    said = [imagined(scan, labels, View(2.0), f"{key:07}").lungs[0, 30:36, 19:21, 10:30] for key in range(30)]
    assert sum(bool((opinion > 0.96).float().mean() > 0.7) for opinion in said) in range(7, 20)
    assert sum(bool((opinion < 0.1).float().mean() > 0.7) for opinion in said) in range(5, 24)


def test_imagined_opinions_take_fat_beside_the_lungs_for_lung_more_often_than_other_soft_tissue():
    labels = np.zeros((60, 40, 40), np.uint8)
    labels[4:28, 4:36, 4:36], labels[32:56, 4:36, 4:36] = LEFT_LUNG.value, RIGHT_LUNG.value
    hu = np.where(labels > 0, -850, 40).astype(np.int16)
    fatty = np.where(labels > 0, -850, -100).astype(np.int16)
    grid = Grid.axis_aligned(hu.shape, (8, 8, 8))
    beyond = F.max_pool3d(torch.from_numpy(labels > 0)[None].float(), 5, stride=1, padding=2)[0] == 0

    def taken(image: np.ndarray) -> int:
        said = [imagined(Scan(image, grid), labels, View(8.0), f"{key:07}").lungs.sum(dim=0) for key in range(30)]
        return sum(bool((opinion > 0.3)[beyond].float().mean() > 0.02) for opinion in said)

    assert taken(fatty) > taken(hu) > 0


def test_imagined_opinions_take_the_top_of_a_dome_for_lung_in_some_patients():
    x, y, z = np.meshgrid(*[np.arange(-48, 48, 4)] * 2, np.arange(0, 160, 4), indexing="ij")
    labels = np.where(x**2 + y**2 + z**2 > 70**2, RIGHT_LUNG.value, 0).astype(np.uint8)  # above a liver of 70 mm
    hu = np.where(labels > 0, -850, 40).astype(np.int16)
    scan = Scan(hu, Grid.axis_aligned(hu.shape, (4, 4, 4)))
    top = (np.hypot(x, y) < 15) & (z >= 60) & (z < 68)
    said = [imagined(scan, labels, View(4.0), f"{key:07}").lungs[0][top].mean() for key in range(40)]
    assert sum(float(opinion) > 0.5 for opinion in said) in range(3, 25)
    assert sum(float(opinion) < 0.1 for opinion in said) in range(10, 38)


def test_labels_on_another_grid_keep_their_volume():
    fine = chest_grid((2.0, 2.0, 2.0))
    coarse = fine.resampled(5.0)
    assert dice(labels_on(truth(fine), fine, coarse).numpy(), truth(coarse), 2) > 0.97


def test_synthetic_patients_can_teach_other_organs():
    patient = SyntheticPatient(7, "healthy", LabelNames(right=("liver",), left=("spleen",)))
    lungs = SyntheticPatient(7, "healthy", LabelNames())
    scan, labels = patient.whole(12.0)
    assert (labels == RIGHT_LUNG.value).sum() > (labels == LEFT_LUNG.value).sum() > 0
    x = scan.grid.world(np.argwhere(lungs.whole(12.0)[1] == RIGHT_LUNG.value).mean(axis=0))[0]
    assert x > 0
    bad = with_data(stage1("synthetic"), labels=LabelNames(right=("lever",)))
    with pytest.raises(ConfigError, match="lever; expected tissues"):
        patients_of(bad, Path("none"))


@pytest.mark.parametrize("asked", [LabelNames(ignore=("heart",)), LabelNames(background=("liver",))])
def test_what_is_not_asked_of_synthetic_patients_leaves_their_lungs(asked):
    lungs, labels = (SyntheticPatient(7, "healthy", names).whole(12.0)[1] for names in (LabelNames(), asked))
    assert np.array_equal(np.where(labels == IGNORE, 0, labels), lungs)
    assert (IGNORE in labels) == bool(asked.ignore)


def test_beyond_the_end_of_a_scan_a_crop_shows_its_outermost_voxels_and_nothing_is_asked():
    """Of files and of synthetic patients, who could show more of themselves there than inference ever sees."""
    config = with_data(stage2("synthetic", Path("none")), box_jitter_mm=0.0)
    grid = chest_grid((4.0, 4.0, 4.0))
    nx, ny, nz = grid.shape
    seen = 0
    for height in range(nz // 2, nz // 2 + 4):
        scanned = grid.cropped(Box((0, 0, 0), (nx, ny, height)))

        class Rendered:
            key, fold = "toy_000001", 0

            def whole(self, spacing_mm: float, scanned: Grid = scanned) -> Any:
                return chest(scanned), truth(scanned)

            def crop(self, grid: Grid) -> Any:
                return chest(grid), truth(grid)

        for case in prepare(Rendered(), config, None):
            beyond = int((case.labels == IGNORE).all(dim=0).all(dim=0).sum())
            assert (case.labels[..., : case.labels.shape[2] - beyond] != IGNORE).all()
            if beyond:
                shown, last = case.image[0, ..., -beyond:], case.image[0, ..., -beyond - 1 : -beyond]
                assert torch.allclose(shown, last.expand_as(shown), atol=1e-3)
                assert (case.labels[..., -beyond - 1] == 1).any(), "it ends in the lung"
                seen += beyond
    assert seen


def test_a_voxel_with_its_centre_beyond_a_scan_of_files_is_not_asked_for_as_background():
    """Their ends lie anywhere between the centres of a crop's voxels."""
    config = stage2("none", Path("none"))
    crop = Grid.axis_aligned((32, 32, 32), (config.view.spacing_mm,) * 3, (0.0, 0.0, 0.0))
    for end_mm in np.linspace(0, config.view.spacing_mm, 5):
        grid = Grid.axis_aligned((20, 20, 10), (9.0, 9.0, 9.0), (-20.0, -20.0, end_mm + 4.5))
        labels = np.full(grid.shape, RIGHT_LUNG.value, np.uint8)
        lung = LungBox(RIGHT_LUNG, Box.whole(crop.shape), crop)
        coarse = Coarse(torch.ones(2, *crop.shape), crop)
        case = stage2_case("name", Scan(np.full(grid.shape, -850, np.int16), grid), labels, coarse, lung, crop, config)
        assert set(case.labels.unique().tolist()) == {1, IGNORE}


def test_synthetic_patients_teach_what_is_beside_the_lungs():
    lungs = SyntheticPatient(7, "healthy", LabelNames()).whole(12.0)[1]
    beside = LabelNames(beside=(("stomach", "bowel", "gas"), ("airway", "lung")))
    labels = SyntheticPatient(7, "healthy", beside).whole(12.0)[1]
    assert np.array_equal(np.where(np.isin(labels, BESIDE), 0, labels), lungs)
    for value, least_ml in zip(BESIDE, (100, 5), strict=False):
        assert (labels == value).sum() * 1.2**3 > least_ml
    bad = with_data(stage1("synthetic"), labels=LabelNames(beside=(("bowl",),)))
    with pytest.raises(ConfigError, match="bowl; expected tissues"):
        patients_of(bad, Path("none"))


def test_labels_of_what_is_beside_the_lungs_come_along_to_another_grid():
    grid = Grid((40, 40, 40), np.eye(4))
    labels = np.zeros(grid.shape, np.uint8)
    labels[10:30, 10:30, 10:20], labels[10:30, 10:30, 20:30] = BESIDE[1], BESIDE[0]
    moved = labels_on(labels, grid, grid.resampled(2.0))
    assert [int((moved == value).sum()) for value in (BESIDE[0], BESIDE[1])] == [500, 500]
    assert int((moved > 0).sum()) == 1000


def test_patients_to_come_are_as_large_as_those_that_are_there(folder, cache, tmp_path):
    config = with_data(stage1(folder), cache=cache)
    patients, _ = patients_of(config, tmp_path / "split.json")
    wanted = [(patient, "cases") for patient in patients]
    ready = CaseStore(Path(cache), config, wanted, workers=0)
    assert ready.room_gb()[0] == 0
    empty = CaseStore(tmp_path / "empty", config, wanted, workers=0)
    assert empty.room_gb() == pytest.approx((0, shutil.disk_usage(tmp_path).free / 1e9), rel=0.1)
    names = [f"{patients[0].key}.cases.json", *(f"{name}.image.npy" for name in ready.names(patients[0]))]
    for name in names:
        shutil.copyfile(ready.folder / name, empty.folder / name)
    taken = sum((empty.folder / name).stat().st_size for name in names[1:])
    assert taken > 0
    assert empty.room_gb()[0] == pytest.approx((len(patients) - 1) * taken / 1e9)


def test_a_network_disk_that_times_out_ends_the_wait_for_it() -> None:
    def make(step: int, relief: Relief) -> int:
        raise TimeoutError("the disk does not answer")

    patches = Prefetch(make, 0, 1, Stop(time_limit_s=20), threads=1)
    with pytest.raises(TimeoutError, match="does not answer"):
        patches(0, Relief())
    patches.close()
