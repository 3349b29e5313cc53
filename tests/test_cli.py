"""The command line: its options are frozen, its mistakes are one line, its exit codes mean what they say.

The networks are replaced by a threshold, so that nothing here needs weights or time.
"""

from __future__ import annotations

import argparse
import csv
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pydicom
import pytest
import SimpleITK
import torch
from PIL import Image

import cascadeseg
from cascadeseg import atomic, batch, cli, outputs, terminal
from cascadeseg.cascade import pipeline
from cascadeseg.cascade.confidence import Signs
from cascadeseg.cascade.density import histogram
from cascadeseg.cascade.pipeline import LungResult, Segmentation, Segmenter
from cascadeseg.errors import DeviceError, ModelError, OutputError
from cascadeseg.evaluation import preview, tables
from cascadeseg.formats import LABEL_SUFFIXES, MASK_SUFFIXES, Scan, read, read_labels, write_scan
from cascadeseg.geometry import Box, Grid, canonical_view
from cascadeseg.labels import LUNGS
from cascadeseg.outputs import check_folder
from tests.formats.dicom_series import write_enhanced, write_series
from tests.formats.volumes import affine_of, rotation

SHAPE = (24, 20, 16)

OPTIONS = {
    "infer": "SCAN -o/--output --model --device --series --volume --format --report --preview --csv --force --resume"
    " --max-memory --max-vram --jobs --quiet --verbose",
    "demo": "DIR --model --device --force --quiet --verbose",
    "check": "SCAN --model --device --series --volume",
    "evaluate": "PRED REF --json --csv --force",
    "synth": "OUT --count --seed --spacing --preset --quiet",
    "train": "--stage --data --config --preset --set --init -o/--output --resume --time-limit --device --devices"
    " --nodes --quiet",
    "export": "OUT --model --force --quiet",
}
"""The command line as its users know it: a change here is a change for them, and belongs in the changelog."""

OF_AIR = {
    "laa950_percent": 100.0,
    "perc15_hu": -1000.0,
    "haa_percent": 0.0,
    "hyperaerated_percent": 100.0,
    "normally_aerated_percent": 0.0,
    "poorly_aerated_percent": 0.0,
    "not_aerated_percent": 0.0,
    "mass_g": 0.0,
}
"""The density of a lung that is nothing but air."""


class ThresholdSegmenter:
    """Stands in for the networks: air is lung, and the patient's side decides which."""

    def __init__(self, model: Any = None, *, device: str = "auto", **options: Any) -> None:
        if model == "broken":
            raise ModelError(model, "no readable model.json")
        if device == "cuda:7":
            raise DeviceError("--device", "cuda:7, but this machine has no cuda device", "", "use --device auto")
        self.device = torch.device("cuda" if device == "cuda" else "cpu")

    def plan(self, scan: Scan) -> str:
        return "at most 1,000 MB of memory"

    def segment(self, scan: Scan, progress: Callable[[str, float], None]) -> Segmentation:
        progress("locate", 0.5)
        if scan.source.endswith("interrupt.nii.gz"):
            raise KeyboardInterrupt
        if scan.source.endswith("fault.nii.gz"):
            raise RuntimeError("shapes\ndo not match")
        if scan.source.endswith("memory.nii.gz"):
            raise MemoryError
        hu = scan.hu()
        labels = np.zeros(hu.shape, np.uint8)
        right_first = canonical_view(labels, scan.grid)
        lung = canonical_view(hu, scan.grid) < -500
        middle = lung.shape[0] // 2
        right_first[middle:][lung[middle:]] = 1
        right_first[:middle][lung[:middle]] = 2
        whole = Box.whole(lung.shape)
        lungs = tuple(
            LungResult(
                label=label,
                height_mm=100.0,
                histogram=histogram(scan.canonical(), mask, whole) if mask.any() else None,
                touches=("superior",) if label.side == "left" else (),
                regrown=0,
                box_mm=((0.0, 0.0, 0.0), (1.0, 2.0, 3.0)),
            )
            for label in LUNGS
            for mask in [right_first == label.value]
        )
        return Segmentation(
            labels=labels,
            scan=scan,
            lungs=lungs,
            seconds={"read": 0.0, "locate": 0.25, "refine": 1.5},
            peak_memory_mb=1234.5,
            warnings=(*scan.warnings, "the left lung touches the superior border of the scan"),
            device="cpu",
            precision="fp32",
            model={"name": "threshold", "version": "1", "sha256": "0" * 64},
        )


@pytest.fixture(autouse=True)
def _fake_networks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pipeline, "Segmenter", ThresholdSegmenter)
    monkeypatch.chdir(tmp_path)


def make_scan(path: Path) -> Path:
    """A block of tissue with two boxes of air."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(two_boxes(), np.diag([2.0, 2.0, 5.0, 1.0])), path)
    return path


def make_scan_at(path: Path, z_mm: float) -> Path:
    """The same at another height, of the kind that its suffix says; without one a DICOM folder."""
    grid = Grid.axis_aligned(SHAPE, (2, 2, 5), (0, 0, z_mm))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix:
        write_scan(two_boxes(), grid, path)
    else:
        write_series(path, two_boxes(), grid)
    return path


def two_boxes() -> npt.NDArray[np.int16]:
    voxels = np.full(SHAPE, 40, np.int16)
    voxels[3:9, 5:15, 4:12] = -800
    voxels[14:22, 5:15, 4:12] = -1000
    return voxels


def run(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with the package under test."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cascadeseg.__file__).parents[1])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def names(folder: Path) -> list[str]:
    """Everything below a folder, also what is hidden."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Refused:
    """Runs a command that must fail, and checks its one line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, arguments: Sequence[str | Path], *words: str, code: int = 2) -> None:
        before = sorted(Path().rglob("*"))
        assert run(*arguments) == code
        out, err = self.capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1, err
        assert "Traceback" not in err
        for word in words:
            assert word in err
        assert sorted(Path().rglob("*")) == before, "nothing is left behind"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(capsys)


# ------------------------------------------------------------------------------------------------ the frozen part


def test_infer_which_ends_at_once_says_all_it_has_to_say(tmp_path):
    ended = python("-m", "cascadeseg", "infer", str(tmp_path / "nothing.nii.gz"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"cascadeseg: {tmp_path}/nothing.nii.gz: no such file or folder\n"


def test_the_command_line_is_frozen() -> None:
    (commands,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = {
        name: " ".join(
            "/".join(action.option_strings) or str(action.metavar)
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        )
        for name, parser in commands.choices.items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize("command", ["", *OPTIONS])
def test_help_is_exit_code_0(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*filter(None, [command]), "--help") == 0
    assert f"usage: cascadeseg {command}".strip() in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"cascadeseg {cascadeseg.__version__}\n"


def test_help_loads_no_heavy_library() -> None:
    """Which is what makes it quick."""
    heavy = "{'torch', 'numpy', 'monai', 'SimpleITK', 'nibabel', 'scipy', 'PIL', 'tqdm', 'pydicom'}"
    code = f"import sys; from cascadeseg.cli import main; main(['--help']); sys.exit(str({heavy} & set(sys.modules)))"
    done = python("-c", code)
    assert done.stderr.strip() == "set()"


def test_infer_as_a_program_leaves_out_what_only_compilers_need(tmp_path: Path) -> None:
    """A torch that looks into it at its import would work, but later: then `program` had better not do it."""
    arguments = ["cascadeseg", "infer", str(make_scan(tmp_path / "scan.nii.gz"))]
    code = f"""import os, sys
from cascadeseg import cli
sys.argv = {arguments}
os._exit = lambda code: print(code, "__file__" in vars(sys.modules["torch._meta_registrations"]))
cli.program()"""
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
    assert (tmp_path / "scan_lungs.nii.gz").exists()


def test_a_stand_in_gives_way_to_its_module_when_something_is_looked_up() -> None:
    code = """import sys
from cascadeseg.batch import import_when_used
import_when_used("colorsys")
import colorsys
before = "__file__" in vars(sys.modules["colorsys"])
from colorsys import rgb_to_hsv
import colorsys as after
print(before, rgb_to_hsv(1, 0, 0)[1], "__file__" in vars(after))"""
    assert python("-c", code).stdout == "False 1.0 True\n"


def test_the_package_exports_lazily() -> None:
    code = "import sys, cascadeseg; before = 'torch' in sys.modules; cascadeseg.Segmenter; sys.exit(before)"
    assert python("-c", code).returncode == 0
    assert set(dir(cascadeseg)) >= {"Segmenter", "read_scan", "write_labels", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Segmentor'"):
        _ = cascadeseg.Segmentor


# ----------------------------------------------------------------------------------------------------- infer, well


def test_infer_writes_the_mask_beside_the_scan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan = make_scan(tmp_path / "with space" / "scan ä.nii.gz")
    assert run("infer", scan) == 0
    out, err = capsys.readouterr()
    labels, grid = read_labels(scan.with_name("scan ä_lungs.nii.gz"))
    assert sorted(np.unique(labels)) == [0, 1, 2]
    assert grid.shape == SHAPE
    assert len(out.splitlines()) == 1
    assert f"{scan}: right lung 13 ml, left lung 10 ml; " in out
    assert "locate 0.2, refine 1.5, write 0." in out
    assert "peak 1,234 MB" in out
    assert err == f"cascadeseg: {scan}: warning: the left lung touches the superior border of the scan\n"
    assert names(tmp_path) == ["with space/scan ä.nii.gz", "with space/scan ä_lungs.nii.gz"]


def test_progress_is_for_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = make_scan(tmp_path / "scan.nii.gz")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("infer", scan) == 0
    assert "scan.nii.gz: locate |" in capsys.readouterr().err
    assert run("infer", scan, "--force", "--quiet") == 0
    assert "locate" not in capsys.readouterr().err


def test_lines_do_not_begin_behind_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One scan is told while the bar of the next is drawn, on the same terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", sys.stderr)
    with terminal.progress_bar("b.nii.gz", quiet=False) as progress:
        progress("locate", 0.5)
        terminal.say("a.nii.gz: right lung")
        terminal.complain("a.nii.gz: warning")
        progress("refine", 0.6)
    shown = capsys.readouterr().err.replace("\n", "\r").split("\r")
    assert {"a.nii.gz: right lung", "cascadeseg: a.nii.gz: warning"} <= set(shown)


def test_quiet_and_verbose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan = make_scan(tmp_path / "scan.nii.gz")
    assert run("infer", scan, "--quiet") == 0
    assert capsys.readouterr().out == ""
    assert run("infer", scan, "--force", "--verbose", "--report") == 0
    out = capsys.readouterr().out
    assert "24 x 20 x 16 voxels of 2 x 2 x 5 mm, RAS" in out
    assert "model: threshold 1, on cpu in fp32" in out
    assert "left lung: mean -800 HU, touches the superior border" in out
    assert f"wrote {tmp_path / 'scan_lungs.json'}" in out


def test_report_and_preview_beside_the_mask(tmp_path: Path) -> None:
    scan = make_scan(tmp_path / "scan.nii.gz")
    assert run("infer", scan, "-o", tmp_path / "masks" / "m.nii.gz") == 2, "the folder is not there"
    (tmp_path / "masks").mkdir()
    assert run("infer", scan, "-o", tmp_path / "masks" / "m.nii.gz", "--report", "--preview") == 0
    assert names(tmp_path / "masks") == ["m.json", "m.nii.gz", "m.png"]
    with Image.open(tmp_path / "masks" / "m.png") as picture:
        assert picture.size[0] > 1000


def test_the_report_names_the_series_of_a_dicom_scan(tmp_path: Path) -> None:
    hu = np.full(SHAPE, 40, np.int16)
    series = write_series(tmp_path / "ct", hu, Grid.axis_aligned(SHAPE, (2, 2, 5)), study_uid="1.2.3")
    assert run("infer", tmp_path / "ct", "-o", "m.nii.gz", "--report", "r.json") == 0
    said = json.loads(Path("r.json").read_text(encoding="utf-8"))["scan"]["dicom"]
    assert said == {"study_uid": "1.2.3", "series_uid": series, "slices": SHAPE[2]}


def test_the_report_has_everything(tmp_path: Path) -> None:
    scan = make_scan(tmp_path / "scan.nii.gz")
    assert run("infer", scan, "--report", tmp_path / "r.json", "--preview", tmp_path / "p.png") == 0
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert set(report) == {
        "schema", "versions", "scan", "model", "device", "precision", "lungs", "seconds", "total_seconds",
        "peak_memory_mb", "warnings", "outputs", "verdict", "quality", "orientation", "both_lungs",
    }  # fmt: skip
    assert report["schema"] == 1
    assert report["versions"]["cascadeseg"] == cascadeseg.__version__
    assert {"python", "torch", "numpy"} <= set(report["versions"])
    assert report["scan"] == {
        "path": str(scan),
        "shape": list(SHAPE),
        "spacing_mm": [2, 2, 5],
        "orientation": "RAS",
        "affine_ras_mm": np.diag([2, 2, 5, 1]).tolist(),
        "dicom": None,
    }
    right, left = report["lungs"]
    assert right == {
        "name": "lung_right",
        "value": 1,
        "side": "right",
        "snomed_ct": "3341006",
        "volume_ml": 12.8,
        "height_mm": 100.0,
        "mean_hu": -1000.0,
        "density": OF_AIR,
        "complete": True,
        "touches": [],
        "regrown": 0,
        "box_ras_mm": [[0, 0, 0], [1, 2, 3]],
        "verdict": "ok",
        "quality": None,
        "reasons": [],
        "signs": None,
    }
    assert (left["complete"], left["touches"]) == (False, ["superior"])
    assert (left["volume_ml"], left["mean_hu"], left["density"]["laa950_percent"]) == (9.6, -800.0, 0.0)
    both = report["both_lungs"]
    assert (both["volume_ml"], both["mean_hu"]) == (22.4, -914.3)
    assert (both["density"]["laa950_percent"], both["density"]["mass_g"]) == (57.14, 1.92)
    assert list(report["seconds"]) == ["read", "locate", "refine", "write", "preview"]
    assert report["seconds"]["read"] > 0, "the reading of the file, not of the scan in memory"
    assert report["total_seconds"] == pytest.approx(sum(report["seconds"].values()), abs=0.01)
    assert report["warnings"] == ["the left lung touches the superior border of the scan"]
    assert report["outputs"] == {
        "labels": str(tmp_path / "scan_lungs.nii.gz"),
        "preview": str(tmp_path / "p.png"),
        "report": str(tmp_path / "r.json"),
    }


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("a.nii", [], "a_lungs.nii.gz"),
        ("a.v2.nii.gz", [], "a.v2_lungs.nii.gz"),
        ("a.nii.gz", ["--format", "mha"], "a_lungs.mha"),
        ("a.nii.gz", ["--format", "nrrd", "-o", "out/"], "out/a_lungs.nrrd"),
        ("a.nii.gz", ["--format", "seg.nrrd"], "a_lungs.seg.nrrd"),
        ("a.nii.gz", ["-o", "out"], "out/a_lungs.nii.gz"),
        ("a.nii.gz", ["-o", "m.nrrd"], "m.nrrd"),
        ("a.nii.gz", ["-o", "m.nii", "--force"], "m.nii"),
    ],
)
def test_where_the_mask_goes(tmp_path: Path, name: str, arguments: list[str], expected: str) -> None:
    scan = make_scan(tmp_path / name)
    assert run("infer", scan, *arguments) == 0
    assert names(tmp_path) == sorted([name, expected])
    assert read_labels(tmp_path / expected)[1].shape == SHAPE


def test_results_beside_a_slicer_segmentation_have_its_name(tmp_path: Path, refused: Refused) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    assert run("infer", scan, "-o", "m.seg.nrrd", "--report", "--preview") == 0
    assert names(tmp_path) == ["a.nii.gz", "m.json", "m.png", "m.seg.nrrd"]
    assert b"Segment1_Name:=left lung\n" in Path("m.seg.nrrd").read_bytes()
    refused.capsys.readouterr()
    refused(["infer", scan, "-o", "n.seg.nrrd", "--format", "nrrd"], "--format nrrd: the output is to be n.seg.nrrd")


def test_a_dicom_segmentation_of_a_dicom_series(tmp_path: Path) -> None:
    import highdicom

    hu = np.full(SHAPE, 40, np.int16)
    hu[3:9, 5:15, 4:12], hu[14:22, 5:15, 4:12] = -800, -1000
    write_series(tmp_path / "ct", hu, Grid.axis_aligned(SHAPE, (2, 2, 5)))
    assert run("infer", "ct") == 0
    for arguments in (["--format", "dcm"], ["--format", "dcm", "--force"], ["-o", "ct/mask.dcm"]):
        assert run("infer", "ct", *arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ct", "ct_lungs.dcm", "ct_lungs.nii.gz"]
    labels, _ = read_labels(tmp_path / "ct_lungs.nii.gz")
    for path in (tmp_path / "ct_lungs.dcm", tmp_path / "ct" / "mask.dcm"):
        segmentation = highdicom.seg.segread(path)
        algorithm = segmentation.SegmentSequence[0].SegmentationAlgorithmIdentificationSequence[0]
        assert algorithm.AlgorithmParameters == f"model name=threshold,model version=1,model sha256={'0' * 64}"
        volume = segmentation.get_volume(combine_segments=True)
        assert [np.count_nonzero(volume.array == n) for n in (1, 2)] == [np.count_nonzero(labels == n) for n in (1, 2)]


def test_a_series_that_no_segmentation_can_be_of_is_refused_before_it_is_segmented(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_series(tmp_path / "ct", two_boxes(), Grid.axis_aligned(SHAPE, (2, 2, 5)), SOPInstanceUID="1.2.3.4")
    monkeypatch.setattr(pipeline, "Segmenter", lambda *_, **__: pytest.fail("loaded for nothing"))
    words = "its slices lack SOPInstanceUIDs of their own, to name them by; choose another format"
    refused(["infer", "ct", "-o", "lungs.dcm"], f"lungs.dcm: a DICOM segmentation of ct: {words}")


def test_masks_of_mha_and_nrrd_are_of_their_kind(tmp_path: Path) -> None:
    import SimpleITK

    for suffix, expected in [("mha", "mha"), ("mhd", "mha"), ("nrrd", "nrrd")]:
        image = SimpleITK.GetImageFromArray(np.full((4, 5, 6), -900, np.int16))
        (tmp_path / suffix).mkdir()
        SimpleITK.WriteImage(image, str(tmp_path / suffix / f"a.{suffix}"))
        assert run("infer", tmp_path / suffix / f"a.{suffix}") == 0
        assert (tmp_path / suffix / f"a_lungs.{expected}").exists()


def test_a_folder_of_scans_keeps_going(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        make_scan(tmp_path / "in" / f"{name}.nii.gz")
    (tmp_path / "in" / "bad.nii.gz").write_text("no scan", encoding="utf-8")
    make_scan(tmp_path / "in" / "fault.nii.gz")
    make_scan(tmp_path / "in" / "memory.nii.gz")
    assert run("infer", tmp_path / "in", "-o", tmp_path / "out", "--report") == 3
    out, err = capsys.readouterr()
    assert [line.split(":")[0] for line in out.splitlines()] == [str(tmp_path / "in" / f"{n}.nii.gz") for n in "ab"]
    errors = [line for line in err.splitlines() if "warning" not in line]
    assert len(errors) == 4
    assert "bad.nii.gz: " in errors[0]
    assert "fault.nii.gz: failed with RuntimeError: shapes do not match" in errors[1]
    assert errors[2].endswith("in/memory.nii.gz: out of memory; crop the scan, or use a larger machine")
    assert errors[3] == "cascadeseg: 3 of 5 scans failed"
    assert names(tmp_path / "out") == ["a_lungs.json", "a_lungs.nii.gz", "b_lungs.json", "b_lungs.nii.gz"]


def test_masks_in_the_folder_are_no_scans(tmp_path: Path) -> None:
    make_scan(tmp_path / "in" / "a.nii.gz")
    assert run("infer", tmp_path / "in") == 0
    assert run("infer", tmp_path / "in", "--force") == 0
    make_scan(tmp_path / "in" / "lungs.nii.gz")
    (tmp_path / "in" / "a.seg.nrrd").touch()
    assert run("infer", tmp_path / "in", "--force") == 0
    assert names(tmp_path / "in") == ["a.nii.gz", "a.seg.nrrd", "a_lungs.nii.gz", "lungs.nii.gz"]


def test_scans_in_subfolders_are_told_and_found_by_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("top", "p1/ct", "p2/ct", "p2/ct_seg"):
        make_scan(tmp_path / "in" / f"{name}.nii.gz")
    assert run("infer", "in", "-o", "in/out", "--quiet") == 0
    words = "2 files in subfolders were passed over; if they are scans, give their folders too, such as in/p1\n"
    assert [line for line in capsys.readouterr().err.splitlines(True) if "warning" not in line] == [
        f"cascadeseg: {words}"
    ]
    assert run("infer", "in", *sorted(Path("in").glob("p*/")), "-o", "in/out", "--resume") == 0
    assert "passed over" not in capsys.readouterr().err
    masks = ["in/out/p1/ct_lungs.nii.gz", "in/out/p2/ct_lungs.nii.gz", "in/out/top_lungs.nii.gz"]
    assert sorted(map(str, Path().rglob("*_lungs*"))) == masks
    assert run("infer", "in", "in/p1", "in/p2", "-o", "in/out", "--resume") == 0
    assert "3 of 3 scans are done already" in capsys.readouterr().out
    assert run("check", "in") == 0
    assert words in capsys.readouterr().err


def test_a_scan_named_twice_is_done_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan = make_scan(tmp_path / "in" / "a.nii.gz")
    assert run("infer", scan, tmp_path / "in", "-o", tmp_path / "out") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_slices_of_a_series_are_that_series_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a shell makes of ``ct/*.dcm``; another series in the folder, a volume and a mask stay scans of their own."""
    folder, grid = tmp_path / "ct", Grid.axis_aligned(SHAPE, (2, 2, 5))
    write_series(folder, two_boxes(), grid)
    slices = sorted(folder.iterdir())
    assert run("check", *slices) == 0
    told = capsys.readouterr()
    line = f"cascadeseg: {slices[0]} and {len(slices) - 1} more are slices of one series, which is one scan\n"
    assert told.err.count(line) == 1
    assert run("infer", *slices, "-o", tmp_path / "one.nii.gz") == 0, "one scan may have one file"
    capsys.readouterr()
    write_series(folder, two_boxes(), grid, name="other{:03d}")
    for name in ("frames.dcm", "frames2.dcm"):
        write_enhanced(folder / name, two_boxes(), grid)
    (folder / "zz.dcm").touch()
    assert run("infer", *sorted(folder.iterdir()), "-o", tmp_path / "out") == 3
    told = capsys.readouterr()
    assert told.err.count("slices of one series, which is one scan") == 2
    made = ["frames2_lungs.nii.gz", "frames_lungs.nii.gz", "other001_lungs.nii.gz", "slice001_lungs.nii.gz"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == made
    assert f"{folder / 'zz.dcm'}: a file " in told.err
    assert "1 of 5 scans failed" in told.err


def test_one_missing_scan_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    assert run("infer", scan, tmp_path / "b.nii.gz") == 3
    err = capsys.readouterr().err
    assert f"cascadeseg: {tmp_path / 'b.nii.gz'}: no such file or folder\n" in err
    assert "cascadeseg: 1 of 2 scans failed\n" in err
    assert (tmp_path / "a_lungs.nii.gz").exists()


def test_a_link_to_itself_is_one_scan_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_scan(tmp_path / "in" / "a.nii.gz")
    for name in ("b.nii.gz", "patient"):
        (tmp_path / "in" / name).symlink_to(name)
    for more in ([], ["--resume"]):
        assert run("infer", "in", "-o", "out", "--csv", "all.csv", *more) == 3
        errors = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
        expected = "cascadeseg: in/{0}: a link to nothing ({0}); expected a file; fetch what it leads to"
        assert errors == [*map(expected.format, ("b.nii.gz", "patient")), "cascadeseg: 2 of 3 scans failed"]


def test_several_scans_that_all_fail_are_exit_code_2(tmp_path: Path) -> None:
    assert run("infer", tmp_path / "a.nii.gz", tmp_path / "b.nii.gz") == 2


def test_the_model_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Counting(ThresholdSegmenter):
        def __init__(self, model: Any = None, **options: Any) -> None:
            loaded.append(model)
            super().__init__(model, **options)

    monkeypatch.setattr(pipeline, "Segmenter", Counting)
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in "abc"]
    assert run("infer", *scans, "--model", "some/model") == 0
    assert loaded == ["some/model"]


def test_a_batch_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scans = [make_scan(tmp_path / "in" / f"{name}.nii.gz") for name in "abc"]
    folder = tmp_path / "out"
    assert run("infer", *scans[:2], "-o", folder, "--report") == 0
    (folder / "b_lungs.json").unlink()  # as if it had been interrupted before its report
    before = (folder / "a_lungs.nii.gz").stat().st_mtime_ns
    capsys.readouterr()
    assert run("infer", tmp_path / "in", "-o", folder, "--report", "--resume") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 3 scans are done already"
    assert [Path(line.split(":")[0]).name for line in lines[1:]] == ["b.nii.gz", "c.nii.gz"]
    assert (folder / "a_lungs.nii.gz").stat().st_mtime_ns == before
    assert names(folder) == [f"{name}_lungs.{kind}" for name in "abc" for kind in ("json", "nii.gz")]
    assert run("infer", tmp_path / "in", "-o", folder, "--report", "--resume") == 0
    assert capsys.readouterr().out == "3 of 3 scans are done already\n"


def test_what_is_done_already_counts_in_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        make_scan(tmp_path / "in" / f"{name}.nii.gz")
    (tmp_path / "in" / "bad.nii.gz").write_text("no scan", encoding="utf-8")
    for _ in range(2):
        assert run("infer", "in", "-o", "out", "--resume") == 3
        assert "cascadeseg: 1 of 3 scans failed\n" in capsys.readouterr().err


KINDS = [
    *(("ct.nii.gz", f"lungs{suffix}") for suffix in MASK_SUFFIXES),
    *(("ct", f"lungs{suffix}") for suffix in LABEL_SUFFIXES),
    *(("ct.nii", "lungs.nii"), ("ct.mha", "lungs.mha"), ("ct.nrrd", "lungs.nrrd"), ("ct.mhd", "lungs.nii.gz")),
]
"""Of scans and their masks; the scan without a suffix is a DICOM folder."""


@pytest.mark.parametrize(("scan", "mask"), KINDS)
def test_resume_takes_no_mask_for_that_of_another_scan(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str], scan: str, mask: str
) -> None:
    first, second = (make_scan_at(Path(patient, scan), z_mm) for patient, z_mm in (("p1", 0), ("p2", 2)))
    assert run("infer", first, "-o", mask, "--resume") == 0
    whole = Path(mask).read_bytes()
    capsys.readouterr()
    assert run("infer", first, "-o", mask, "--resume") == 0
    assert capsys.readouterr().out == "1 of 1 scans are done already\n"
    remedy = "; choose another place with -o, or overwrite with --force\n"
    found = ["series "] * 2
    if not mask.endswith(".dcm"):
        found = [f"24 x 20 x 16 voxels, 0.00 0.00 {z:.2f} to 46.00 38.00 {z + 75:.2f} mm)" for z in (0, 2)]
    words = [f"{mask}: a mask of another scan ({found[0]}", f"; expected one of {second} ({found[1]}", remedy]
    for more in ([], ["--report"]):
        refused(["infer", second, "-o", mask, "--resume", *more], *words)
    assert Path(mask).read_bytes() == whole
    assert run("infer", second, "-o", mask, "--force") == 0


@pytest.mark.parametrize(("scan", "mask"), KINDS)
def test_resume_reads_no_voxels_of_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scan: str, mask: str
) -> None:
    make_scan_at(Path(scan), 0)
    assert run("infer", scan, "-o", mask) == 0
    read_whole = read._read

    def ended_early(path: Path, *arguments: Any, **options: Any) -> None:
        read_whole(path, *arguments, **options)
        pytest.fail(f"{path} was read to its end")

    monkeypatch.setattr(read, "_read", ended_early)
    capsys.readouterr()
    assert run("infer", scan, "-o", mask, "--resume") == 0
    assert capsys.readouterr() == ("1 of 1 scans are done already\n", "")


def test_resume_loads_no_heavy_library_for_what_is_done(tmp_path: Path) -> None:
    assert run("infer", make_scan(tmp_path / "a.nii.gz")) == 0
    heavy = "{'torch', 'monai', 'SimpleITK', 'highdicom'}"
    resume = "main(['infer', 'a.nii.gz', '--resume', '--quiet'])"
    done = python("-c", f"import sys; from cascadeseg.cli import main; print({resume}, {heavy} & set(sys.modules))")
    assert done.stdout == "0 set()\n"


@pytest.mark.parametrize("mask", [f"lungs{suffix}" for suffix in LABEL_SUFFIXES])
def test_resume_keeps_a_mask_that_is_there(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str], mask: str
) -> None:
    make_scan_at(Path("ct"), 0)
    assert run("infer", "ct", "-o", mask) == 0
    before = Path(mask).stat().st_mtime_ns
    capsys.readouterr()
    assert run("infer", "ct", "-o", mask, "--resume", "--report", "r.json", "--csv", "t.csv", "--verbose") == 0
    out = capsys.readouterr().out
    assert f"  kept {mask}\n  wrote r.json\n" in out
    assert Path(mask).stat().st_mtime_ns == before
    edit(Path(mask))
    edited = Path(mask).read_bytes()
    words = f"cascadeseg: {mask}: a mask that was edited, or made otherwise; expected that of now; "
    refused(
        ["infer", "ct", "-o", mask, "--resume", "--preview", "p.png"],
        words,
        "choose another place with -o, or overwrite",
    )
    assert Path(mask).read_bytes() == edited
    assert not Path("p.png").exists()


def test_no_report_is_left_of_a_mask_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    assert run("infer", scan, "--report", "--preview") == 0

    def disk_full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(preview, "preview_png", disk_full)
        assert run("infer", scan, "--report", "--preview", "--force") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert names(tmp_path) == ["a.nii.gz", "a_lungs.nii.gz"]
    assert run("infer", scan, "--report", "--preview", "--resume") == 0
    assert names(tmp_path) == ["a.nii.gz", "a_lungs.json", "a_lungs.nii.gz", "a_lungs.png"]


def test_a_table_that_is_resumed_from_another_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_scan(tmp_path / "p1" / "ct.nii.gz")
    assert run("infer", "p1/ct.nii.gz", "--csv", "all.csv") == 0
    assert run("infer", "p1/ct.nii.gz", "--csv", "all.csv", "--resume") == 0
    assert "another folder" not in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "p1")
    assert run("infer", "ct.nii.gz", "--csv", "../all.csv", "--resume") == 0
    words = (
        "../all.csv: none of its scans is found from here (such as p1/ct.nii.gz); where it was begun in another folder"
    )
    assert words in capsys.readouterr().err


def test_resume_keeps_a_segmentation_that_another_program_encoded(
    refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    make_scan_at(Path("ct"), 0)
    assert run("infer", "ct", "-o", "lungs.dcm") == 0
    capsys.readouterr()
    for name, value in (("PerFrameFunctionalGroupsSequence", None), ("PixelData", bytes(8))):
        other = pydicom.dcmread("lungs.dcm")
        setattr(other, name, value)
        other.save_as("other.dcm")
        before = Path("other.dcm").read_bytes()
        words = "cascadeseg: other.dcm: a mask that was edited, or made otherwise; expected that of now; "
        refused(["infer", "ct", "-o", "other.dcm", "--resume", "--report"], words)
        assert Path("other.dcm").read_bytes() == before


def edit(mask: Path) -> None:
    """Has a mask hold a voxel more or less."""
    if mask.suffix == ".dcm":
        segmentation = pydicom.dcmread(mask)
        segmentation.PixelData = bytes([segmentation.PixelData[0] ^ 1, *segmentation.PixelData[1:]])
        segmentation.save_as(mask)
        return
    image = SimpleITK.ReadImage(str(mask))
    image[0, 0, 0] = 1 - min(image[0, 0, 0], 1)
    SimpleITK.WriteImage(image, str(mask))


@pytest.mark.parametrize("mask", [f"lungs{suffix}" for suffix in LABEL_SUFFIXES])
def test_resume_counts_no_damaged_mask_as_done(tmp_path: Path, refused: Refused, mask: str) -> None:
    make_scan_at(Path("ct"), 0)
    for content in (b"", b"notes on this patient\n" * 50):
        Path(mask).write_bytes(content)
        words = "; expected a mask of ct; delete it, or choose another place with -o\n"
        refused(["infer", "ct", "-o", mask, "--resume"], f"cascadeseg: {mask}: ", words)
        assert Path(mask).read_bytes() == content
    Path(mask).unlink()
    assert run("infer", "ct", "-o", mask, "--resume") == 0


def test_a_mask_of_another_scan_fails_one_scan_of_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("in/a.nii.gz", "in/b.nii.gz", "in/c.nii.gz"):
        make_scan(Path(name))
    assert run("infer", "in/c.nii.gz", make_scan_at(Path("other/a.nii.gz"), 2), "-o", "out") == 0
    whole = Path("out/a_lungs.nii.gz").read_bytes()
    capsys.readouterr()
    assert run("infer", "in", "-o", "out", "--resume") == 3
    out, err = capsys.readouterr()
    assert [line.split(": ")[0] for line in out.splitlines()] == ["1 of 3 scans are done already", "in/b.nii.gz"]
    lines = [line for line in err.splitlines() if "warning" not in line]
    assert lines[0].startswith("cascadeseg: out/a_lungs.nii.gz: a mask of another scan (")
    assert lines[1:] == ["cascadeseg: 1 of 3 scans failed"]
    assert run("infer", "in", "-o", "out", "--resume", "--csv", "all.csv") == 3, "those without a row are done anew"
    errors = {row["scan"]: row["error"].split(" (")[0] for row in table(Path("all.csv"))}
    wrong = "out/a_lungs.nii.gz: a mask of another scan"
    assert errors == {"in/a.nii.gz": wrong, "in/b.nii.gz": "", "in/c.nii.gz": ""}
    assert Path("out/a_lungs.nii.gz").read_bytes() == whole


def test_a_mask_that_another_program_saved_again_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    assert run("infer", scan) == 0
    mask = nibabel.load("a_lungs.nii.gz")
    moved = nibabel.Nifti1Image(mask.get_fdata(), Grid.axis_aligned(SHAPE, (2, 2, 5), (0.05, 0, -0.05)).affine)
    nibabel.save(moved.as_reoriented([[1, 1], [0, -1], [2, 1]]), "a_lungs.nii.gz")
    capsys.readouterr()
    assert run("infer", scan, "--resume") == 0
    assert capsys.readouterr().out == "1 of 1 scans are done already\n"


def test_resume_goes_by_the_volume_and_the_series_that_are_asked_for(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    nibabel.save(nibabel.Nifti1Image(np.stack([two_boxes()] * 2, axis=3), np.eye(4)), "4d.nii.gz")
    make_scan_at(Path("ct/one"), 0)
    fewer = two_boxes()[..., :9]
    write_series(Path("ct/two"), fewer, Grid.axis_aligned(fewer.shape, (2, 2, 5)), series_uid="1.2.9")
    for scan, mask, which in (("4d.nii.gz", "4d.mha", ["--volume", "1"]), ("ct", "ct.nrrd", ["--series", "1.2.9"])):
        for _ in range(2):
            assert run("infer", scan, "-o", mask, "--resume", *which) == 0
        assert capsys.readouterr().out.endswith("1 of 1 scans are done already\n")
    refused(["infer", "4d.nii.gz", "-o", "4d.mha", "--resume"], "4d.nii.gz: 4 dimensions", "choose one with --volume N")
    refused(["infer", "ct", "-o", "ct.nrrd", "--resume"], "ct.nrrd: a mask of another scan (24 x 20 x 9 voxels, ")


def test_a_system_that_does_not_tell_its_memory_gets_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = pipeline.Segmenter.segment
    nowhere = {"peak_memory_mb": float("nan")}
    monkeypatch.setattr(pipeline.Segmenter, "segment", lambda *a, **k: replace(whole(*a, **k), **nowhere))
    assert run("infer", make_scan(tmp_path / "a.nii.gz"), "--report", "--csv", "all.csv") == 0
    assert json.loads(Path("a_lungs.json").read_text(encoding="utf-8"))["peak_memory_mb"] is None
    assert table(Path("all.csv"))[0]["peak_memory_mb"] == ""
    assert "nan" not in capsys.readouterr().out


def test_every_key_of_reports_and_tables_is_on_its_page(tmp_path: Path) -> None:
    assert run("infer", make_scan(tmp_path / "a.nii.gz"), "--report", "--csv", "all.csv") == 0
    report = json.loads(Path("a_lungs.json").read_text(encoding="utf-8"))
    parts = [report, report["both_lungs"], *report["lungs"], report["scan"], report["outputs"], report["model"]]
    parts += [lung[part] or {} for lung in report["lungs"] for part in ("signs", "density")]
    keys = {key for part in parts for key in part} | {sign.name for sign in fields(Signs)}
    keys |= {*table(Path("all.csv"))[0], *(column.key for column in tables.COLUMNS)}
    page = (Path(cli.__file__).parents[1] / "docs" / "outputs.md").read_text(encoding="utf-8")
    assert keys - set(re.findall(r"`(\w+)`", page)) == set()


def test_rows_of_masks_that_are_replaced_go_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in "ab"]
    assert run("infer", *scans, "--csv", "t.csv") == 0
    Path("t.csv").write_text(Path("t.csv").read_text(encoding="utf-8").replace("12.8", "99.9"), encoding="utf-8")
    with monkeypatch.context() as held:
        held.setattr(atomic, "replace_text", held_by_another)
        assert run("infer", *scans, "--csv", "t.csv", "--force") == 2
    assert not Path("t.csv").exists()
    assert run("infer", *scans, "--csv", "t.csv", "--resume") == 0
    assert [row["right_volume_ml"] for row in table(Path("t.csv"))] == ["12.8", "12.8"]


def test_scans_that_failed_are_told_by_the_exit_code_beside_a_table_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in ("a", "fault")]
    monkeypatch.setattr(atomic, "replace_text", held_by_another)
    assert run("infer", *scans, "--csv", "t.csv") == 3


def test_a_table_that_cannot_be_replaced_is_told_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    assert run("infer", scan, "--csv", "t.csv") == 0
    refused.capsys.readouterr()
    before = Path("t.csv").read_bytes()

    unlink = Path.unlink

    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.name == "t.csv":
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", busy)
    refused(["infer", scan, "--csv", "t.csv", "--force"], "t.csv: cannot be replaced (Permission denied)")
    assert Path("t.csv").read_bytes() == before


def test_a_table_of_fewer_columns_goes_on(tmp_path: Path) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in "ab"]
    assert run("infer", scans[0], "--csv", "t.csv") == 0
    kept = ("scan", "mask", "verdict", "right_volume_ml", "error")
    (row,) = table(Path("t.csv"))
    lines = [",".join(kept), ",".join(row[name] for name in kept), ""]
    Path("t.csv").write_text("\n".join(lines), encoding="utf-8")
    assert run("infer", *scans, "--csv", "t.csv", "--resume") == 0
    assert [row["both_mass_g"] for row in table(Path("t.csv"))] == ["", "1.92"]


def held_by_another(path: Path, text: str) -> None:
    raise OutputError(path, "cannot be written (in use by another program)")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("held", [("a",), ("a", "b", "z")])
def test_a_table_that_another_program_holds_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], held: tuple[str, ...]
) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in ("a", "b", "z")]
    write, tried = atomic.replace_text, []

    def shared(path: Path, text: str) -> None:
        last = text.splitlines()[-1].split(",")[0]
        tried.append(Path(last).name[0])
        if tried[-1] in held:
            raise OutputError(path, "cannot be written (in use by another program)")
        write(path, text)

    monkeypatch.setattr(atomic, "replace_text", shared)
    code = run("infer", *scans, "--csv", "t.csv")
    told = [line for line in capsys.readouterr().err.splitlines() if "border of the scan" not in line]
    first = "cascadeseg: t.csv: cannot be written (in use by another program)"
    assert tried == ["a", "b", "z"]
    assert all((tmp_path / f"{name}_lungs.nii.gz").exists() for name in "abz")
    assert told[0] == f"{first}; the scans go on, and after each it is tried again"
    if held == ("a",):
        assert (code, len(told), len(table(Path("t.csv")))) == (0, 1, 3)
        return
    assert (code, told[1:]) == (2, [f"{first}; rows are missing in it; run again with --resume"])
    assert not Path("t.csv").exists()
    monkeypatch.setattr(atomic, "replace_text", write)
    assert run("infer", *scans, "--csv", "t.csv", "--resume") == 0
    assert len(table(Path("t.csv"))) == 3


def test_the_table_of_a_batch(tmp_path: Path) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in ("a", "fault", "z")]
    arguments = ["infer", *scans, tmp_path / "none.nii.gz", "--csv", "all.csv"]
    assert run(*arguments) == 3
    rows = {Path(row["scan"]).name: row for row in table(tmp_path / "all.csv")}
    assert rows.keys() == {"a.nii.gz", "fault.nii.gz", "z.nii.gz", "none.nii.gz"}
    good = rows["a.nii.gz"]
    assert good["mask"] == str(tmp_path / "a_lungs.nii.gz")
    assert float(good["right_volume_ml"]) == pytest.approx(8 * 10 * 8 * 0.02)
    assert [good[f"{side}_laa950_percent"] for side in ("both", "right", "left")] == ["57.14", "100.0", "0.0"]
    assert float(good["both_volume_ml"]) == float(good["right_volume_ml"]) + float(good["left_volume_ml"])
    assert float(good["left_volume_ml"]) == pytest.approx(6 * 10 * 8 * 0.02)
    assert (good["verdict"], good["left_touches"], good["error"]) == ("ok", "superior", "")
    assert "failed with RuntimeError" in rows["fault.nii.gz"]["error"]
    assert "no such file" in rows["none.nii.gz"]["error"]
    assert rows["none.nii.gz"]["verdict"] == ""


def test_the_table_has_the_order_of_the_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes are done in any order."""
    one_by_one = batch.segment_all

    def backwards(jobs: Any, options: argparse.Namespace) -> Iterator[Any]:
        yield from one_by_one(jobs[::-1], options)

    monkeypatch.setattr(batch, "segment_all", backwards)
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in ("z", "a", "fault")]
    assert run("infer", *scans[:2], "--csv", "all.csv") == 0
    assert [Path(row["scan"]).name for row in table(tmp_path / "all.csv")] == ["z.nii.gz", "a.nii.gz"]
    make_scan(tmp_path / "more.nii.gz")
    assert run("infer", *scans, tmp_path / "more.nii.gz", "none", "--csv", "all.csv", "--resume") == 3
    names = ["z.nii.gz", "a.nii.gz", "none", "fault.nii.gz", "more.nii.gz"]
    assert [Path(row["scan"]).name for row in table(tmp_path / "all.csv")] == names


@pytest.mark.parametrize("while_it", ["plans", "segments"])
def test_runs_at_the_same_time_share_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_it: str) -> None:
    one_by_one, plan = batch.segment_all, outputs.plan
    one, other, before = (make_scan(tmp_path / f"{name}.nii.gz") for name in ("one", "other", "before"))
    later = tmp_path / "later.nii.gz"
    assert run("infer", before, later, "--csv", "all.csv") == 3

    def the_others() -> None:
        monkeypatch.setattr(batch, "segment_all", one_by_one)
        monkeypatch.setattr(outputs, "plan", plan)
        assert run("infer", other, make_scan(later), "--csv", "all.csv", "--resume") == 0

    def slowly_segmented(jobs: Any, options: argparse.Namespace) -> Iterator[Any]:
        for row in one_by_one(jobs, options):
            the_others()
            yield row

    def slowly_planned(*arguments: Any, **named: Any) -> Any:
        the_others()
        return plan(*arguments, **named)

    if while_it == "plans":
        monkeypatch.setattr(outputs, "plan", slowly_planned)
    else:
        monkeypatch.setattr(batch, "segment_all", slowly_segmented)
    assert run("infer", one, "--csv", "all.csv", "--resume") == 0
    rows = {Path(row["scan"]): row["verdict"] for row in table(tmp_path / "all.csv")}
    assert rows == dict.fromkeys([before, later, one, other], "ok")


def test_the_table_goes_on_with_its_batch(tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in ("a", "z")]
    assert run("infer", scans[0], tmp_path / "later.nii.gz", "--csv", "all.csv") == 3
    capsys.readouterr()
    refused(["infer", scans[1], "--csv", "all.csv"], "all.csv: exists; overwrite with --force, go on with --resume")
    make_scan(tmp_path / "later.nii.gz")
    assert run("infer", *scans, tmp_path / "later.nii.gz", "--csv", "all.csv", "--resume") == 0
    rows = {Path(row["scan"]).name: row for row in table(tmp_path / "all.csv")}
    assert [row["verdict"] for row in rows.values()] == ["ok"] * 3
    capsys.readouterr()
    (tmp_path / "other.csv").write_text("name,age\nx,3\n", encoding="utf-8")
    make_scan(tmp_path / "new.nii.gz")
    refused(["infer", "new.nii.gz", "--csv", "other.csv", "--resume"], "other.csv: not a table that infer wrote")
    refused(["infer", "new.nii.gz", "--csv", "no/t.csv"], "t.csv: the folder no does not exist")
    refused(["infer", "new.nii.gz", "-o", "masks/", "--csv", "no/t.csv"], "t.csv: the folder no does not exist")
    assert not (tmp_path / "masks").exists(), "refused before any folder is made"
    refused(
        ["infer", "z.nii.gz", "--force", "--csv", "new.nii.gz"], "--csv new.nii.gz: the table's name; expected a name"
    )


def test_a_scan_is_done_by_whatever_path_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "z"):
        make_scan(tmp_path / "in" / f"{name}.nii.gz")
    assert run("infer", "in", "-o", "out", "--csv", "all.csv") == 0
    whole = (tmp_path / "all.csv").read_text(encoding="utf-8")
    capsys.readouterr()
    assert run("infer", tmp_path / "in", "-o", "out", "--csv", "all.csv", "--resume") == 0
    assert capsys.readouterr().out == "2 of 2 scans are done already\n"
    assert (tmp_path / "all.csv").read_text(encoding="utf-8") == whole


@pytest.mark.parametrize("more", [",looked at", None], ids=["longer", "shorter"])
def test_a_table_with_a_row_of_another_length_is_refused(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str], more: str | None
) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    assert run("infer", scan, "--csv", "all.csv") == 0
    head, first = (tmp_path / "all.csv").read_text(encoding="utf-8").splitlines()
    (tmp_path / "all.csv").write_text(f"{head}\n{first + more if more else first[:-1]}\n", encoding="utf-8")
    capsys.readouterr()
    refused(["infer", scan, "--csv", "all.csv", "--resume"], "all.csv: not a table that infer wrote; choose another")


def test_a_mask_in_two_files_overwrites_neither(tmp_path: Path, refused: Refused) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    (tmp_path / "m.zraw").write_bytes(b"of another scan")
    refused(["infer", scan, "-o", "m.mhd"], "m.zraw: exists; overwrite with --force")
    assert (tmp_path / "m.zraw").read_bytes() == b"of another scan"
    assert run("infer", scan, "-o", "m.mhd", "--force") == 0
    assert run("infer", scan, "-o", "m.mhd", "--resume") == 0


@pytest.mark.parametrize("closed", ["2>&-", "1>&-", "2> >(true)", "> >(true)"])
def test_whoever_reads_may_go_away(tmp_path: Path, closed: str) -> None:
    for name in ("a", "b"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        make_scan(tmp_path / "in" / f"{name}.nii.gz")
    command = f"{sys.executable} -m cascadeseg check in/ in/none.nii.gz in/no.nii.gz {closed}; echo $? > code"
    subprocess.run(["bash", "-c", command], check=True, timeout=120)
    assert (tmp_path / "code").read_text(encoding="utf-8") == "3\n"


def test_the_table_may_lie_in_the_folder_that_is_made_for_the_masks(tmp_path: Path) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in ("a", "z")]
    assert run("infer", *scans, "-o", "new/masks", "--csv", "new/masks/all.csv") == 0
    assert names(tmp_path / "new" / "masks") == ["a_lungs.nii.gz", "all.csv", "z_lungs.nii.gz"]
    assert run("infer", scans[0], "-o", "one/", "--csv", tmp_path / "one" / "t.csv") == 0
    assert names(tmp_path / "one") == ["a_lungs.nii.gz", "t.csv"]


def test_a_scan_without_its_row_is_not_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its mask may have been written just before the batch was interrupted."""
    arguments = ["infer", *(make_scan(tmp_path / f"{name}.nii.gz") for name in ("a", "interrupt")), "--csv", "all.csv"]
    assert run(*arguments) == 130
    assert (tmp_path / "a_lungs.nii.gz").exists()
    make_scan(tmp_path / "b.nii.gz")
    arguments[2] = tmp_path / "b.nii.gz"
    assert run(*arguments, "--resume") == 0
    assert [Path(row["scan"]).name for row in table(tmp_path / "all.csv")] == ["a.nii.gz", "b.nii.gz"]
    capsys.readouterr()
    assert run(*arguments, "--resume") == 0
    assert capsys.readouterr().out == "2 of 2 scans are done already\n"


def test_several_scans_at_once(tmp_path: Path) -> None:
    """In processes, so with the networks themselves, which find no lung in boxes of air."""
    for name in "abc":
        make_scan(tmp_path / "in" / f"{name}.nii.gz")
    (tmp_path / "in" / "bad.nii.gz").write_text("no scan", encoding="utf-8")
    done = python(
        "-m", "cascadeseg", "infer", "in", "-o", "out", "--jobs", "2", "--max-memory", "4", "--csv", "all.csv"
    )
    assert done.returncode == 3, done.stderr
    assert sorted(Path(line.split(":")[0]).name for line in done.stdout.splitlines()) == [f"{n}.nii.gz" for n in "abc"]
    errors = [line for line in done.stderr.splitlines() if "warning" not in line]
    assert "bad.nii.gz: " in errors[0]
    assert errors[1:] == ["cascadeseg: 1 of 4 scans failed"]
    assert names(tmp_path / "out") == [f"{name}_lungs.nii.gz" for name in "abc"]
    assert sorted(bool(row["error"]) for row in table(tmp_path / "all.csv")) == [False] * 3 + [True]


@pytest.mark.parametrize(("set_to", "stdout"), [("PYTHONIOENCODING=ascii", ">said"), ("", ">&-")])
def test_processes_survive_odd_terminals_too(tmp_path: Path, set_to: str, stdout: str) -> None:
    for name in ("Lungenflügel", "肺"):
        make_scan(tmp_path / "in" / f"{name}.nii.gz")
    command = f"{set_to} {sys.executable} -m cascadeseg infer in -o out --jobs 2 --verbose {stdout}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "out") == ["Lungenflügel_lungs.nii.gz", "肺_lungs.nii.gz"]


def test_what_no_scan_would_survive_ends_all_processes(tmp_path: Path) -> None:
    scans = [str(make_scan(tmp_path / f"{name}.nii.gz")) for name in "abc"]
    done = python("-m", "cascadeseg", "infer", *scans, "--jobs", "2", "--model", "no/such")
    assert done.returncode == 2
    assert done.stderr.startswith("cascadeseg: no/such: no such folder; expected a model folder")
    assert len(done.stderr.splitlines()) == 1
    assert names(tmp_path) == ["a.nii.gz", "b.nii.gz", "c.nii.gz"]


def children(process: subprocess.Popen[str]) -> list[int]:
    """The processes that work for one."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = [int(pid) for pid in path.read_text(encoding="utf-8").split()]
    return [pid for pid in found if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")]


def started(*arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A batch of two scans at once, and its two processes."""
    command = [sys.executable, "-m", "cascadeseg", "infer", *arguments, "--jobs", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cascadeseg.__file__).parent.parent)}
    process = subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )
    while len(workers := children(process)) < 2 and process.poll() is None:
        time.sleep(0.01)
    return process, workers


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has asked for a signal: Python does as it starts."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_a_process_that_is_killed_costs_one_scan(tmp_path: Path) -> None:
    scans = [str(make_scan(tmp_path / f"{name}.nii.gz")) for name in "abc"]
    process, workers = started(*scans)
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert sum("its process was ended, maybe for its memory; use fewer --jobs" in e for e in errors.splitlines()) == 1
    assert "cascadeseg: 1 of 3 scans failed" in errors
    assert len(list(tmp_path.glob("*_lungs.nii.gz"))) == 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_outlives_an_interrupted_batch(tmp_path: Path, how: str) -> None:
    scans = [str(make_scan(tmp_path / f"{number}.nii.gz")) for number in range(40)]
    process, _ = started(*scans)
    time.sleep(0.3)
    process.send_signal(signal.Signals[how])
    _, errors = process.communicate(timeout=60)  # which would go on as long as a child held its streams
    assert process.returncode == (-signal.SIGKILL if how == "SIGKILL" else 130)
    assert how == "SIGKILL" or "cascadeseg: interrupted" in errors.splitlines()
    assert len(list(tmp_path.glob("*_lungs.nii.gz"))) < 40
    assert not list(tmp_path.glob(".cascadeseg-*"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_ctrl_c_while_processes_are_starting_is_one_line(tmp_path: Path) -> None:
    scans = [str(make_scan(tmp_path / f"{name}.nii.gz")) for name in "ab"]
    process, workers = started(*scans)
    while not all(catches(pid, signal.SIGINT) for pid in workers):
        time.sleep(0.002)
    for pid in (*workers, process.pid):  # as a terminal tells them all
        os.kill(pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "cascadeseg: interrupted\n")


def test_a_process_that_does_not_hear_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    monkeypatch.setattr(batch, "PATIENCE_S", 0.1)

    class Deaf:
        terminate, kill = process.terminate, process.kill

        def join(self, seconds: float = 60) -> None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)

    ours, _ = Pipe()
    batch._end({ours: (Deaf(), None)})  # type: ignore[dict-item]
    assert process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform == "win32", reason="signals end a process there")
def test_an_interrupted_process_is_not_disturbed_again(tmp_path: Path) -> None:
    code = """import argparse, os, signal
from multiprocessing import Pipe
from cascadeseg import batch
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
def ahead():
    try:
        yield
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
def rows(*_):
    for _ in ahead():
        yield os.kill(os.getpid(), signal.SIGINT)
batch._one_by_one, batch.Loader = rows, argparse
batch.Loader.of = lambda options: None
ours, theirs = Pipe()
ours.send("a job")
batch._serve(theirs, argparse.Namespace(), 1)"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------- infer, refused


def test_mistakes_in_the_call_are_one_line(tmp_path: Path, refused: Refused) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    other = make_scan(tmp_path / "b.nii.gz")
    refused([], "cascadeseg: command line: ", "COMMAND", "see cascadeseg --help")
    refused(["infr"], "invalid choice: 'infr'", "infer")
    refused(["infer"], "cascadeseg: infer: the following arguments are required: SCAN; see cascadeseg infer --help")
    refused(["infer", scan, "--prewiew"], "infer: unrecognized arguments: --prewiew; see cascadeseg infer --help")
    refused(["infer", scan, "--prev"], "infer: unrecognized arguments: --prev; see cascadeseg infer --help")
    refused(["--frob", "infer", scan], "command line: unrecognized arguments: --frob; see cascadeseg --help")
    refused(["infer", scan, "--device", "gpu"], "--device: gpu; expected auto, cpu, cuda, cuda:N or mps")
    refused(["infer", scan, "--device", "cuda:7"], "--device: cuda:7, but this machine has no cuda device")
    refused(["infer", scan, "--model", "broken"], "broken: no readable model.json")
    refused(["infer", scan, "--format", "png"], "invalid choice: 'png'")
    refused(["infer", scan, "--volume", "first"], "invalid int value: 'first'")
    refused(["infer", scan, "--quiet", "--verbose"], "not allowed with")
    refused(["infer", scan, other, "--report", "r.json"], "--report r.json: one file for several scans")
    refused(["infer", scan, other, "--preview", "p.png"], "--preview p.png: one file for several scans")
    refused(["infer", scan, other, "-o", "m.nii.gz"], "m.nii.gz: one file for several scans; expected a folder")
    refused(["infer", ".", "-o", "m.nii.gz"], "m.nii.gz: one file for several scans; expected a folder")
    refused(["infer", scan, "--report", other], "expected a name that ends in .json; give the scans before --report")
    refused(["infer", scan, "--preview", "p.jpg"], "a name that ends in .png")
    for option in ("--report", "--preview", "--csv"):
        refused(["infer", option, scan], f"{option} {scan}: ", f"; give the scans before {option}")
        refused(["infer", option, "."], f"{option} .: ", f"; give the scans before {option}")


def test_a_limit_of_the_gpu_is_refused_where_none_is_used(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in "ab"]
    assert run("infer", *scans, "--max-vram", "1", "--device", "cuda", "-o", "masks") == 0
    refused.capsys.readouterr()
    monkeypatch.setattr(pipeline, "Segmenter", Segmenter)
    words = "--max-vram: a limit for a GPU, on cpu; expected a cuda device"
    refused(["infer", *scans, "--max-vram", "0.1", "--device", "cpu"], words)


def nifti(path: str, array: Any, change: Callable[[Any], None] = lambda header: None) -> None:
    """A NIfTI file with a header that may be wrong."""
    image = nibabel.Nifti1Image(array, np.diag([2.0, 2.0, 5.0, 1.0]))
    change(image.header)
    image.to_filename(path)


def damage(path: str, header: dict[int, bytes]) -> None:
    """Overwrites bytes of an uncompressed NIfTI file."""
    content = bytearray(Path(path).read_bytes())
    for at, data in header.items():
        content[at : at + len(data)] = data
    Path(path).write_bytes(content)


def test_bad_scans_are_one_line(tmp_path: Path, refused: Refused) -> None:
    refused(["infer", "nothing.nii.gz"], "nothing.nii.gz: no such file or folder")
    Path("text.nii.gz").write_text("hello", encoding="utf-8")
    refused(["infer", "text.nii.gz"], "text.nii.gz: ")
    Path("nothing.nii.gz").write_bytes(b"")
    refused(["infer", "nothing.nii.gz"], "nothing.nii.gz: ")
    scan = make_scan(tmp_path / "cut.nii.gz")
    scan.write_bytes(scan.read_bytes()[:-40])
    refused(["infer", scan], "cut.nii.gz: ")
    nifti("4d.nii.gz", np.zeros((4, 4, 4, 2), np.int16))
    refused(["infer", "4d.nii.gz"], "4d.nii.gz: 4 dimensions", "choose one with --volume N")
    refused(["infer", "4d.nii.gz", "--volume", "2"], "4d.nii.gz: ", "0 to 1")
    nifti("rgb.nii.gz", np.zeros((4, 4, 4), [("R", "u1"), ("G", "u1"), ("B", "u1")]))
    refused(["infer", "rgb.nii.gz"], "rgb.nii.gz: ")
    nifti("flat.nii.gz", np.zeros((16, 16), np.int16))
    refused(["infer", "flat.nii.gz"], "flat.nii.gz: ", "3D")
    nifti("voxel.nii.gz", np.zeros((1, 1, 1), np.int16))
    refused(["infer", "voxel.nii.gz"], "voxel.nii.gz: a volume of 1 x 1 x 1 voxels")
    refused(["infer", scan, "--series", "1.2.3"], "cut.nii.gz: not DICOM", "leave out --series")


def test_bad_headers_are_one_line(refused: Refused) -> None:
    def unplaced(header: Any) -> None:
        header.set_sform(None, 0)
        header.set_qform(None, 0)

    pixdim, dim = 76, 40
    for name, at, data in [
        ("zero.nii", pixdim + 4, np.float32([0, 2, 5]).tobytes()),
        ("nan.nii", pixdim + 4, np.float32([np.nan, 2, 5]).tobytes()),
        ("promise.nii", dim + 2, np.int16([30000, 30000, 30000]).tobytes()),
    ]:
        nifti(name, np.zeros((4, 5, 6), np.int16), unplaced)
        damage(name, {at: data})
        refused(["infer", name], f"{name}: ")


def test_bad_folders_are_one_line(refused: Refused) -> None:
    Path("empty").mkdir()
    refused(["infer", "empty"], "empty: no scan in this folder")
    Path("letters").mkdir()
    Path("letters/a.txt").write_text("hello", encoding="utf-8")
    refused(["infer", "letters"], "letters: no scan in this folder")


def test_odd_scans_are_done_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    block = np.full(SHAPE, 40.0, np.float32)
    block[3:9, 5:15, 4:12] = block[14:22, 5:15, 4:12] = -1000
    holes, padded = block.copy(), block.copy()
    holes[0, :3] = np.nan
    padded[:2] = -3024
    scans = {
        "nan": holes,
        "padding": padded,
        "offset": block + 1024,
        "unit": block / 1040 + 0.96,
        "none": block * 0 + 40,
    }
    for name, voxels in scans.items():
        nifti(f"{name}.nii.gz", voxels)
        assert run("infer", f"{name}.nii.gz", "--report") == 0
        err = capsys.readouterr().err
        warnings = json.loads(Path(f"{name}_lungs.json").read_text(encoding="utf-8"))["warnings"]
        assert warnings
        for warning in warnings:
            assert f"cascadeseg: {name}.nii.gz: warning: {warning}\n" in err


def test_outputs_are_refused_before_any_work(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "Segmenter", None)  # whoever loads it fails
    scan = make_scan(tmp_path / "a.nii.gz")
    (tmp_path / "a_lungs.nii.gz").write_bytes(b"mine")
    refused(["infer", scan], "a_lungs.nii.gz: exists; overwrite with --force")
    (tmp_path / "out.json").write_bytes(b"mine")
    refused(["infer", scan, "-o", "m.nii.gz", "--report", "out.json"], "out.json: exists; overwrite with --force")
    refused(["infer", scan, "-o", "no/such/m.nii.gz"], "m.nii.gz: the folder no/such does not exist")
    refused(["infer", scan, "-o", "a.nii.gz/m.nii.gz"], "m.nii.gz: the folder a.nii.gz is not a folder")
    refused(["infer", scan, "-o", "m.txt"], "m.txt: unknown suffix '.txt'; expected a name that ends in .nii.gz")
    refused(["infer", scan, "-o", "m.nii.gz", "--format", "mha"], "--format mha: the output is to be m.nii.gz")
    refused(["infer", scan, "-o", scan, "--force"], "a.nii.gz: the scan itself; expected another name")
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "alias.nii.gz").symlink_to(scan)
    for same in ("link/a.nii.gz", f"{tmp_path}/../{tmp_path.name}/a.nii.gz"):
        refused(["infer", scan, "-o", same, "--force"], "a.nii.gz: the scan itself; expected another name")
    refused(["infer", "alias.nii.gz", "-o", scan, "--force"], "a.nii.gz: the scan itself; expected another name")
    Path("A.nii.gz").hardlink_to(scan)  # a name of the same file, as in capitals on a Mac
    refused(["infer", scan, "-o", "A.nii.gz", "--force"], "A.nii.gz: the scan itself; expected another name")
    Path("A.nii.gz").unlink()
    refused(["infer", scan, "a_lungs.nii.gz", "--force"], "a_lungs.nii.gz: the result of", "and a scan as well; leave")
    refused(["infer", ""], "'': an empty name; expected a scan or a folder of scans")
    refused(["infer", scan, "-o", ""], "infer: argument -o/--output: an empty name; see what the shell put in")
    refused(["infer", scan, "--model", ""], "infer: argument --model: an empty name")
    refused(["infer", scan, "--csv", ""], "--csv '': the table's name; expected a name that ends in .csv")
    refused(["train", "--stage", "1", "--output", ""], "train: argument -o/--output: an empty name")
    refused(["infer", scan, "-o", "out.json/"], "out.json: a file; expected a folder")
    refused(["infer", scan, "-o", "m.nii.gz", "--report", "no/r.json"], "r.json: the folder no does not exist")
    refused(
        ["infer", scan, "--format", "dcm"], "a_lungs.dcm: a DICOM segmentation, and its scan is not DICOM; expected"
    )
    write_series(tmp_path / "ct", np.full(SHAPE, 40, np.int16), Grid.axis_aligned(SHAPE, (2, 2, 5)))
    refused(["infer", "ct", "-o", "ct/slice001.dcm", "--force"], "slice001.dcm: a file that is no DICOM segmentation")
    twin = make_scan(tmp_path / "a.nii")
    refused(["infer", scan, twin, "-o", "out", "--format", "nrrd"], "a_lungs.nrrd: the result of", "one scan for each")


def test_header_and_voxels_of_a_pair_are_one_scan(tmp_path: Path) -> None:
    """As `infer pairs/*` names them."""
    (tmp_path / "pairs").mkdir()
    nibabel.save(nibabel.Nifti1Pair(two_boxes(), np.diag([2.0, 2.0, 5.0, 1.0])), tmp_path / "pairs" / "p.img")
    for which in (["p.hdr", "p.img"], ["p.img", "p.hdr"], ["p.img"]):
        assert run("infer", *(tmp_path / "pairs" / name for name in which), "-o", "out/", "--force") == 0
        assert names(tmp_path / "out") == ["p_lungs.nii.gz"]


def test_scans_of_one_name_get_the_folders_they_lie_in(tmp_path: Path) -> None:
    for patient in ("p1", "p2"):
        make_scan(tmp_path / "in" / patient / "ct.nii.gz")
    make_scan(tmp_path / "in" / "p2" / "other.nii.gz")
    for number, scans in enumerate((["in/p1", "in/p2"], ["in/p1/ct.nii.gz", tmp_path / "in/p2/ct.nii.gz"])):
        assert run("infer", *scans, "-o", f"out{number}") == 0
        assert (tmp_path / f"out{number}" / "p1" / "ct_lungs.nii.gz").exists()
        assert (tmp_path / f"out{number}" / "p2" / "ct_lungs.nii.gz").exists()
    assert (tmp_path / "out0" / "other_lungs.nii.gz").exists()


def test_scans_of_one_name_stay_in_the_output_folder_however_their_paths_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = (make_scan(tmp_path / folder / "ct.nii.gz") for folder in ("p1", "new/p2"))
    beside = first.with_name("ct_lungs.nii.gz")
    beside.write_text("drawn by hand", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "new")
    assert run("infer", os.path.relpath(first), "p2/ct.nii.gz", "-o", "../masks", "--force") == 0
    assert names(tmp_path / "masks") == ["new/p2/ct_lungs.nii.gz", "p1/ct_lungs.nii.gz"]
    assert beside.read_text(encoding="utf-8") == "drawn by hand"


def test_scans_of_one_name_on_several_drives_are_refused_in_one_line(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_windows(paths: Sequence[Path]) -> str:
        raise ValueError("Paths don't have the same drive")

    scans = [make_scan(tmp_path / patient / "ct.nii.gz") for patient in ("p1", "p2")]
    monkeypatch.setattr(os.path, "commonpath", of_windows)
    mask = Path("out", "ct_lungs.nii.gz")
    refused(["infer", *scans, "-o", "out"], f"{mask}: the result of {scans[0]} and of {scans[1]}; expected one scan")


def test_a_drive_that_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(OutputError, match=f"^runs: there is no {re.escape(Path.cwd().anchor)}; choose another folder"):
        check_folder(Path("runs"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path, refused: Refused) -> None:
    scan = make_scan(tmp_path / "locked" / "a.nii.gz")
    scan.parent.chmod(0o555)
    refused(["infer", scan], "a_lungs.nii.gz: cannot be written", "choose another folder")


def test_the_first_mask_survives_a_failed_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    assert run("infer", scan) == 0
    mask = (tmp_path / "a_lungs.nii.gz").read_bytes()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    assert run("infer", scan, "--force") == 130
    assert (tmp_path / "a_lungs.nii.gz").read_bytes() == mask
    assert names(tmp_path) == ["a.nii.gz", "a_lungs.nii.gz"]


def test_ctrl_c_is_130_and_leaves_nothing(tmp_path: Path, refused: Refused) -> None:
    refused(["infer", make_scan(tmp_path / "interrupt.nii.gz")], "cascadeseg: interrupted", code=130)


def test_sigterm_is_as_ctrl_c_also_if_it_comes_twice(tmp_path: Path) -> None:
    make_scan(tmp_path / "a.nii.gz")
    code = """import os, signal
from cascadeseg import batch, cli
def segment(*_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
batch._segment_one = segment
raise SystemExit(cli.main(["infer", "a.nii.gz"]))"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (130, "cascadeseg: interrupted\n")
    assert names(tmp_path) == ["a.nii.gz"]


def test_sigterm_is_left_to_who_calls_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    read, seen = batch.read, []

    def listening(*arguments: Any) -> Scan:
        seen.append(signal.getsignal(signal.SIGTERM))
        return read(*arguments)

    monkeypatch.setattr(batch, "read", listening)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run("check", scan) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGTERM) == before


def test_ctrl_c_ends_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in ("a", "interrupt", "z")]
    assert run("infer", *scans) == 130
    assert (tmp_path / "a_lungs.nii.gz").exists()
    assert not (tmp_path / "z_lungs.nii.gz").exists()
    assert "cascadeseg: interrupted\n" in capsys.readouterr().err


def test_verbose_shows_where_an_error_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("infer", make_scan(tmp_path / "fault.nii.gz"), "--verbose") == 2
    assert "Traceback" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ check, evaluate


def test_check_describes_a_scan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    assert run("check", scan) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{scan}: usable")
    assert "24 x 20 x 16 voxels of 2 x 2 x 5 mm, RAS" in out
    assert "int16 values, -1,000 to 40 HU" in out
    assert "infer takes at most 1,000 MB of memory" in out
    assert err == ""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1e30, "float32 values, -1,000 to 1e+30 HU\n"),
        (np.nan, "float32 values, none of them a number\n"),
    ],
)
def test_check_tells_values_that_are_no_hu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, words: str
) -> None:
    voxels = np.full(SHAPE, value, np.float32)
    if np.isfinite(value):
        voxels[2:] = -1000
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([2, 2, 5, 1])), tmp_path / "a.nii.gz")
    assert run("check", tmp_path / "a.nii.gz") == 0
    assert words in capsys.readouterr().out


def test_check_of_another_model_or_device(refused: Refused) -> None:
    scan = make_scan(Path("a.nii.gz"))
    refused(["check", scan, "--model", "broken"], "broken: no readable model.json")
    refused(["check", scan, "--device", "cuda:7"], "--device: cuda:7, but this machine has no cuda device")
    refused(["check", scan, "--device", "gpu"], "--device: gpu; expected auto, cpu, cuda, cuda:N or mps")


def test_check_refuses_what_infer_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.nii.gz").write_text("hello", encoding="utf-8")
    assert run("check", tmp_path / "bad.nii.gz") == 2
    assert run("check", tmp_path / "bad.nii.gz", make_scan(tmp_path / "good.nii.gz")) == 3
    assert "good.nii.gz: usable" in capsys.readouterr().out


def test_check_goes_on_after_a_fault_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scans = [make_scan(tmp_path / f"{name}.nii.gz") for name in ("fault", "good")]
    read = batch.read

    def faulty(path: Path, *rest: Any) -> Scan:
        if path.name == "fault.nii.gz":
            raise ZeroDivisionError("by none")
        return read(path, *rest)

    monkeypatch.setattr(batch, "read", faulty)
    assert run("check", *scans) == 3
    out, err = capsys.readouterr()
    assert "good.nii.gz: usable" in out
    assert "fault.nii.gz: failed with ZeroDivisionError: by none; this is a fault of cascadeseg" in err


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    scan = make_scan(tmp_path / "x.nii.gz").rename(tmp_path / os.fsdecode(b"Mu\xf1oz.nii.gz"))
    other = make_scan(tmp_path / "z.nii.gz")
    assert run("infer", scan, other, "--report", "--preview", "--csv", "t.csv") == 0
    table = (tmp_path / "t.csv").read_text(encoding="utf-8")
    assert "Mu\\udcf1oz.nii.gz" in table
    mask = tmp_path / os.fsdecode(b"Mu\xf1oz_lungs.nii.gz")
    assert run("evaluate", mask, mask, "--json", "e.json", "--csv", "e.csv") == 0


def test_evaluate_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    run("infer", scan, "--quiet")
    mask = tmp_path / "a_lungs.nii.gz"
    capsys.readouterr()
    assert run("evaluate", mask, mask, "--json", tmp_path / "s.json", "--csv", tmp_path / "s.csv") == 0
    out = capsys.readouterr().out
    assert "worst  both    1.0000" in out
    assert json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["cases"][0]["lung_left"]["dice"] == 1
    assert (tmp_path / "s.csv").read_text(encoding="utf-8").splitlines()[1].startswith("a,lung_right,1,1,1,0,0,12.8,")


def test_evaluate_overwrites_no_table_unasked(tmp_path: Path, refused: Refused) -> None:
    mask = tmp_path / "a_lungs.nii.gz"
    run("infer", make_scan(tmp_path / "a.nii.gz"), "--quiet", "--report", "--csv", "lungs.csv")
    refused.capsys.readouterr()
    before = Path("a_lungs.json").read_bytes(), Path("lungs.csv").read_bytes()
    both = ["evaluate", mask, mask, "--json", "a_lungs.json", "--csv", "lungs.csv"]
    refused(both, "a_lungs.json: exists; overwrite with --force, or choose another name")
    refused([*both[:3], *both[5:]], "lungs.csv: exists; overwrite with --force")
    assert before == (Path("a_lungs.json").read_bytes(), Path("lungs.csv").read_bytes())
    assert run(*both, "--force") == 0
    assert Path("lungs.csv").read_text(encoding="utf-8").startswith("case,lung,dice")


def test_evaluate_two_folders_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("p1_0000", "p2_0000"):
        run("infer", make_scan(tmp_path / "in" / f"{name}.nii.gz"), "-o", tmp_path / "out", "--quiet")
    (tmp_path / "ref").mkdir()
    for name in ("p1", "p2", "p3"):
        (tmp_path / "ref" / f"{name}.nii.gz").write_bytes((tmp_path / "out" / "p1_0000_lungs.nii.gz").read_bytes())
    capsys.readouterr()
    assert run("evaluate", tmp_path / "out", tmp_path / "ref") == 3
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines() if "right" in line] == ["p1", "p2"]
    assert "p3.nii.gz: no prediction of this name" in err
    assert "1 of 3 scans failed" in err
    for name in ("p2", "p3"):
        (tmp_path / "ref" / f"{name}.nii.gz").unlink()
    assert run("evaluate", tmp_path / "out", tmp_path / "ref") == 0
    assert "p2_0000_lungs.nii.gz: not scored: no reference of this name in" in capsys.readouterr().err
    for name in ("p2.nii.gz", "p1_mask.nii.gz"):
        shutil.copy(tmp_path / "ref" / "p1.nii.gz", tmp_path / "ref" / name)
    (tmp_path / "ref" / "p1.nii.gz").unlink()
    assert run("evaluate", tmp_path / "out", tmp_path / "ref") == 0
    told = "where p2.nii.gz counts as a scan, as p1_mask.nii.gz is called a mask\n"
    assert capsys.readouterr().err.endswith(told)


def test_evaluate_pairs_names_that_end_as_channels_do_and_endings_in_capitals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = tmp_path / "a_lungs.nii.gz"
    run("infer", make_scan(tmp_path / "a.nii.gz"), "--quiet")
    for name in ("masks/c_0000_0000_lungs", "masks/c_0001_0000_lungs", "masks/d_lungs", "masks/c_lungs"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.nii.gz").write_bytes(mask.read_bytes())
    for name in ("ref/c_0000_mask", "ref/c_0001_mask", "ref/d_Mask", "ref/c_mask"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.nii.gz").write_bytes(mask.read_bytes())
    capsys.readouterr()
    assert run("evaluate", "masks", "ref") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.splitlines() if "right" in line] == ["c_0000", "c_0001", "c", "d"]


def test_evaluate_takes_slicer_segmentations_of_our_labels(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = make_scan(tmp_path / "ref" / "a.nii.gz")
    mask, reference = Path("masks/a_lungs.seg.nrrd"), Path("ref/a.seg.nrrd")
    run("infer", scan, "-o", "masks/", "--format", "seg.nrrd", "--quiet")
    run("infer", scan, "-o", "plain/", "--quiet")
    Path("plain/a_lungs.nii.gz").rename("plain/a.nii.gz")
    reference.write_bytes(mask.read_bytes())
    for predictions in ("masks", "plain"):
        capsys.readouterr()
        assert run("evaluate", predictions, "ref") == 0
        out, err = capsys.readouterr()
        assert (err, [line.split()[0] for line in out.splitlines() if "right" in line]) == ("", ["a"])
    meaning = "expected 0 background, 1 right lung, 2 left lung"
    for name in ("Lung, left", "both lungs, right and left", "left_lung", "LungLeft"):
        reference.write_bytes(mask.read_bytes().replace(b"_Name:=right lung", f"_Name:={name}".encode()))
        refused(["evaluate", mask, reference], f"ref/a.seg.nrrd: label 1 is its segment '{name}'; {meaning}")
        refused(["evaluate", reference, mask], f"ref/a.seg.nrrd: label 1 is its segment '{name}'; {meaning}")
    reference.write_bytes(mask.read_bytes().replace(b"_Name:=right lung", b"_Name:=Segment_1"))
    assert run("evaluate", mask, reference) == 0


def cut_as_slicer_does(mask: Path, cut: Path, low: tuple[int, int, int], high: tuple[int, int, int]) -> None:
    """Writes the part of a mask between two corners, with the pairs that name its segments."""
    image = SimpleITK.ReadImage(str(mask))
    part = image[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
    for key in image.GetMetaDataKeys():
        part.SetMetaData(key, image.GetMetaData(key))
    cut.parent.mkdir(exist_ok=True)
    SimpleITK.WriteImage(part, str(cut))


def test_evaluate_and_resume_take_slicer_segmentations_cut_to_what_they_fill(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    mask, cut, other = Path("a_lungs.seg.nrrd"), Path("s/a_lungs.seg.nrrd"), Path("t/a.seg.nrrd")
    run("infer", scan, "--format", "seg.nrrd", "--quiet")
    run("infer", scan, "--quiet")
    labels = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(mask))).T
    low, high = np.argwhere(labels).min(axis=0).tolist(), (np.argwhere(labels).max(axis=0) + 1).tolist()
    assert min(low) > 0, "something is cut off"
    cut_as_slicer_does(mask, cut, low, high)
    cut_as_slicer_does(mask, other, (0, 0, 0), high)
    for pair in ((cut, "a_lungs.nii.gz"), ("a_lungs.nii.gz", cut), (cut, other), (other, cut), (cut, mask)):
        capsys.readouterr()
        assert run("evaluate", *pair) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [row[2] for row in rows if row[1:2] in (["right"], ["left"])] == ["1.0000"] * 2
    assert run("infer", scan, "-o", cut, "--resume") == 0
    assert capsys.readouterr().out.endswith("1 of 1 scans are done already\n")
    # What is cut is refused of other formats, and of a segmentation that lies elsewhere.
    Path("cut").mkdir()
    cut_as_slicer_does(mask, Path("cut/a_lungs.nrrd"), low, high)
    refused(["evaluate", "cut/a_lungs.nrrd", mask], "cut/a_lungs.nrrd: ", "not on the grid of a_lungs.seg.nrrd")
    refused(["infer", scan, "-o", "cut/a_lungs.nrrd", "--resume"], "cut/a_lungs.nrrd: a mask of another scan (")
    far = SimpleITK.ReadImage(str(cut))
    far.SetOrigin([mm + 200 for mm in far.GetOrigin()])
    SimpleITK.WriteImage(far, "cut/far.seg.nrrd")
    refused(["evaluate", "cut/far.seg.nrrd", mask], "cut/far.seg.nrrd: ", "not on the grid of a_lungs.seg.nrrd")
    refused(["infer", scan, "-o", "cut/far.seg.nrrd", "--resume"], "cut/far.seg.nrrd: a mask of another scan (")


def test_evaluate_takes_dicom_segmentations_cut_to_their_frames(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("ct/a", "ct/b"):
        write_series(tmp_path / folder, two_boxes(), Grid(SHAPE, affine_of(rotation(12, -7, 20))))
        run("infer", folder, "-o", "seg/", "--format", "dcm", "--quiet")
        run("infer", folder, "-o", "plain/", "--quiet")
    mask, plain = Path("seg/a_lungs.dcm"), Path("plain/a_lungs.nii.gz")
    assert read_labels(mask)[0].shape != SHAPE, "no frames above and below the lungs"
    Path("any name").write_bytes(mask.read_bytes())

    def scored(*pair: Path | str) -> list[list[str]]:
        capsys.readouterr()
        assert run("evaluate", *pair) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return [[row[0], row[2]] for row in map(str.split, out.splitlines()) if row[1:2] in (["right"], ["left"])]

    for pair in ((mask, plain), (plain, mask), (mask, mask), ("any name", plain)):
        assert [dice for _, dice in scored(*pair)] == ["1.0000"] * 2
    both = [["a", "1.0000"]] * 2 + [["b", "1.0000"]] * 2
    assert scored("seg", "plain") == scored("plain", "seg") == both
    shutil.copy(plain, "seg")  # of one case in two formats one is enough
    assert scored("seg", "plain") == both
    refused(["evaluate", "seg", "ct/a"], "ct/a: no mask in this folder; expected files that end in", ".seg.nrrd .dcm")
    refused(["evaluate", "ct/a/slice001.dcm", plain], "ct/a/slice001.dcm: DICOM; expected a label map in one of")
    make_scan(tmp_path / "other.nii.gz")
    run("infer", "other.nii.gz", "--quiet")
    capsys.readouterr()
    refused(["evaluate", mask, "other_lungs.nii.gz"], "seg/a_lungs.dcm: 24 x 20 x 8 voxels, not on the grid of other_l")


def test_evaluate_hides_no_case_without_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("infer", make_scan(tmp_path / "in" / "a.nii.gz"), "-o", tmp_path / "out", "--quiet")
    (tmp_path / "out" / "b_lungs.nii.gz").write_text("no mask", encoding="utf-8")
    (tmp_path / "ref").mkdir()
    for name in "abc":
        (tmp_path / "ref" / f"{name}.nii.gz").write_bytes((tmp_path / "out" / "a_lungs.nii.gz").read_bytes())
    capsys.readouterr()
    assert run("evaluate", "out", "ref", "--json", "s.json", "--csv", "s.csv") == 3
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "scored: 1 of 3 cases; 1 without a prediction, 1 failed"
    scores = json.loads(Path("s.json").read_text(encoding="utf-8"))
    assert (scores["scored"], scores["total"], scores["missing"]) == (1, 3, ["c"])
    assert [case["case"] for case in scores["failed"]] == ["b"]
    assert scores["failed"][0]["error"].startswith("out/b_lungs.nii.gz: ")
    errors = {row["case"]: row["error"] for row in table(Path("s.csv"))}
    assert errors["c"] == "ref/c.nii.gz: no prediction of this name in out"
    assert errors["b"] == scores["failed"][0]["error"]
    assert all(f"cascadeseg: {errors[name]}\n" in err for name in "bc")


def test_evaluate_tells_scans_references_and_predictions_in_one_folder_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("infer", make_scan(tmp_path / "a.nii.gz"), "--quiet")
    labels = nibabel.load(tmp_path / "a_lungs.nii.gz")
    nibabel.save(nibabel.Nifti1Image(np.zeros(SHAPE, np.uint8), labels.affine), tmp_path / "a_ref.nii.gz")
    capsys.readouterr()
    assert run("evaluate", tmp_path, tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[-6:-4] == ["13", "0"], "ml of the prediction, of the truth"
    assert run("evaluate", tmp_path / "a_ref.nii.gz", tmp_path / "a_lungs.nii.gz") == 0
    (tmp_path / "a_seg.mha").write_text("", encoding="utf-8")
    assert run("evaluate", tmp_path, tmp_path) == 2
    assert "a_seg.mha: the same case as a_ref.nii.gz by its name" in capsys.readouterr().err


def test_evaluate_refuses_in_one_line(tmp_path: Path, refused: Refused) -> None:
    scan = make_scan(tmp_path / "a.nii.gz")
    run("infer", scan, "--quiet")
    mask = tmp_path / "a_lungs.nii.gz"
    (tmp_path / "empty").mkdir()
    (tmp_path / "masks").mkdir()
    other = tmp_path / "masks" / "b.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.uint8), np.eye(4)), other)
    refused.capsys.readouterr()
    refused(["evaluate", "no.nii.gz", mask], "no.nii.gz: no such file or folder")
    refused(["evaluate", mask, "masks"], "a file, and masks a folder; expected two files or two folders")
    refused(["evaluate", "empty", "masks"], "empty: no mask in this folder")
    for name in ("lungs.dcm", "lungs"):
        Path(name).write_bytes(bytes(128) + b"DICM")
        refused(["evaluate", name, mask], f"{name}: DICOM; expected a label map in one of .nii.gz")
    refused(["evaluate", "no.dcm", mask], "no.dcm: no such file or folder")
    nifti("4d.nii.gz", np.zeros((4, 4, 4, 2), np.uint8))
    for pair in (["4d.nii.gz", mask], [mask, "4d.nii.gz"]):
        refused(["evaluate", *pair], "4d.nii.gz: 4 dimensions (4, 4, 4, 2); ", "or save it as a 3D file")
    refused(["evaluate", mask, other], "a_lungs.nii.gz: 24 x 20 x 16 voxels, not on the grid of")
    refused(["evaluate", mask, scan], "a.nii.gz: label -1000; expected 0 background, 1 right lung, 2 left lung")
    refused(["evaluate", mask, mask, "--csv", "no/s.csv"], "the folder no does not exist")
    refused(["evaluate", mask, mask, "--csv", mask], "a_lungs.nii.gz: the table's name; expected a name that ends in")
    refused(["evaluate", mask, mask, "--json", "s.csv"], "--json s.csv: the table's name; expected a name that ends in")


# --------------------------------------------------------------------------------------------------- synth, train


def test_synth_refuses_in_one_line(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    refused(["synth", "out", "--spacing", "1", "2"], "--spacing: 2 numbers; expected one or three, in mm")
    refused(["synth", "out", "--spacing", "0"], "0 is no number above zero")
    refused(["synth", "out", "--spacing", "1", "1", "1000"], "--spacing: 1000 mm; expected 0.01 to 50 mm, as scans")
    refused(["synth", "file/out"], "file/out: cannot be made (Not a directory)")
    refused(["synth", "out", "--preset", "old"], "--preset: old; expected one of default, healthy")
    refused(["synth", "out", "--count", "-1"], "-1 is no number above zero")
    refused(["synth", "out", "--count", "many"], "invalid int value: 'many'")
    refused(["synth", "file"], "file: a file; expected a folder")


def test_synth_writes_scans_and_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("synth", "out", "--count", "1", "--seed", "7", "--spacing", "10", "--preset", "healthy") == 0
    assert capsys.readouterr().out == "out: 1 synthetic scan with its labels\n"
    (scan,) = (tmp_path / "out" / "imagesTr").iterdir()
    (labels,) = (tmp_path / "out" / "labelsTr").iterdir()
    assert read_labels(labels)[1].matches(cascadeseg.read_scan(scan).grid)
    assert read_labels(labels)[1].spacing_mm == pytest.approx((10, 10, 10))
    assert run("synth", "out", "--seed", "7", "--spacing", "4", "--preset", "emphysema") == 2
    assert capsys.readouterr().err == (
        'cascadeseg: out: synthetic scans of other settings (preset was "healthy", spacing_mm was [10.0, 10.0, 10.0]); '
        "expected the same settings; choose another folder\n"
    )


def test_train_refuses_in_one_line(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("stage = ", encoding="utf-8")
    refused(["train"], "required: --stage")
    refused(["train", "--stage", "3"], "invalid choice: 3")
    refused(["train", "--stage", "1", "--config", "none.toml"], "none.toml: no such file")
    refused(["train", "--stage", "1", "--config", "bad.toml"], "bad.toml: not a TOML file")
    refused(["train", "--stage", "1", "--set", "optimisation.stepz=3"], "did you mean 'steps'?")
    refused(["train", "--stage", "2", "--preset", "quick"], "--preset: quick; expected one of gpu, smoke")
    for options in ([], ["--resume"]):
        refused(["train", "--stage", "1", "-o", "bad.toml", *options], "bad.toml: a file; expected a folder; choose an")
    refused(["train", "--stage", "1", "-o", "bad.toml/run"], "bad.toml: a file; expected a folder; choose an")
    assert (tmp_path / "bad.toml").read_text(encoding="utf-8") == "stage = "


def trained(recipe: Any, output: Path, step: int | None = None) -> Path:
    """The model folder of a run, by default a finished one, as far as the closing line needs it."""
    from cascadeseg.network import Model, UNet, UNetConfig, View, save_model, stage_of

    step = recipe.optimisation.steps if step is None else step
    stage = stage_of(View(8.0), UNet(UNetConfig(1, 3, widths=(4, 8))))
    save_model(Model(stage, None, notes={f"stage{recipe.stage}_steps": step}), output / "model")
    return output / "model"


@pytest.mark.parametrize(
    ("arguments", "step", "code", "said"),
    [
        (
            ["--stage", "1", "--preset", "smoke", "--data", "my scans", "-o", "one"],
            None,
            0,
            "one/model: the trained locator; next is its refiner: cascadeseg train --stage 2 --preset smoke "
            "--data 'my scans' --set locator=one/model\n",
        ),
        (
            ["--stage", "2", "--set", "locator=one/model"],
            None,
            0,
            "runs/stage2/model: the trained model; use it with cascadeseg infer SCAN --model runs/stage2/model\n",
        ),
        (
            ["--stage", "2", "-o", "two"],
            None,
            0,
            "two/model: the trained refiner, behind the shipped locator; use it with cascadeseg infer SCAN "
            "--model two/model\n",
        ),
        (
            ["--stage", "1", "--preset", "smoke", "-o", "one", "--time-limit", "1"],
            3,
            4,
            "one/model: not trained yet, stopped after step 3 of 900; go on with cascadeseg train --stage 1 -o one "
            "--resume\n",
        ),
    ],
)
def test_train_says_what_it_ends_with_and_what_is_next(
    arguments: list[str],
    step: int | None,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from cascadeseg.training import loop

    monkeypatch.setattr(loop, "train", lambda recipe, output, **options: trained(recipe, output, step))
    assert run("train", *arguments) == code
    assert capsys.readouterr().out == said


def test_train_hands_the_recipe_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from cascadeseg.training import loop

    seen: dict[str, Any] = {}

    def fake(config: Any, output: Path, **options: Any) -> Path:
        seen.update(config=config, output=output, **options)
        return trained(config, output)

    monkeypatch.setattr(loop, "train", fake)
    several = ("--set", "optimisation.steps=7", "name=x y", "--set", "locator=runs/one/model")
    assert run("train", "--stage", "2", "--data", 'a "b"', *several, "--resume") == 0
    assert (seen["config"].stage, seen["config"].data.source, seen["config"].optimisation.steps) == (2, 'a "b"', 7)
    assert (seen["config"].name, seen["config"].locator) == ("x y", "runs/one/model")
    assert (seen["output"], seen["resume"], seen["device"]) == (Path("runs/stage2"), True, "auto")
    assert "runs/stage2/model" in capsys.readouterr().out
    assert run("train", "--stage", "1", "-o", "elsewhere") == 0
    assert (seen["output"], seen["resume"]) == (Path("elsewhere"), False)


def test_a_run_goes_on_by_its_own_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cascadeseg import config
    from cascadeseg.training import loop

    seen: list[Any] = []

    def fake(recipe: Any, output: Path, **options: Any) -> Path:
        seen.append(recipe)
        output.mkdir(exist_ok=True)
        (output / "config.toml").write_text(config.dump(recipe), encoding="utf-8")
        return trained(recipe, output)

    monkeypatch.setattr(loop, "train", fake)
    assert run("train", "--stage", "1", "-o", "mine", "--set", "optimisation.steps=7") == 0
    assert run("train", "--stage", "1", "-o", "mine", "--resume") == 0
    assert seen[0] == seen[1]
    assert run("train", "--stage", "2", "-o", "mine", "--resume") == 2
    assert "a recipe for stage 1; expected one for --stage 2" in capsys.readouterr().err
    assert run("train", "--stage", "1", "-o", "mine") == 0
    assert seen[2] != seen[0]


# ------------------------------------------------------------------------------------------------------------ export


def test_export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    from cascadeseg.cascade import export

    def exported(model: Any, progress: Callable[[str, float], None]) -> list[export.Exported]:
        progress("locator", 0.1)
        return [export.Exported(name, b"x" * 1_240_000, {}, 6e-6) for name in ("locator", "refiner")]

    monkeypatch.setattr(export, "exported", exported)
    monkeypatch.setattr(export, "LIBRARIES", ())
    assert run("export", "new/networks") == 0
    assert names(Path("new")) == ["networks/cascade.json", "networks/locator.onnx", "networks/refiner.onnx"]
    assert capsys.readouterr().out.splitlines() == [
        "new/networks/locator.onnx: 1.24 MB, as torch to 6e-06",
        "new/networks/refiner.onnx: 1.24 MB, as torch to 6e-06",
        "new/networks/cascade.json: what a program has to know of them",
    ]
    refused(["export", "new/networks"], "new/networks/locator.onnx: exists; overwrite with --force, or choose another")
    Path("own").mkdir()
    Path("own/refiner.onnx").write_bytes(b"mine")
    refused(["export", "own"], "own/refiner.onnx: exists; overwrite with --force, or choose another folder")
    Path("new/networks/refiner.onnx").unlink()
    Path("new/networks/refiner.onnx").mkdir()
    refused(["export", "new/networks", "--force"], "new/networks/refiner.onnx: a folder; expected the name of a file")
    Path("new/networks/refiner.onnx").rmdir()
    assert run("export", "new/networks", "--force", "--quiet") == 0
    assert capsys.readouterr().out == ""
    refused(["export", "other", "--model", "nowhere"], "nowhere: no such folder; expected a model folder")
    refused(["export", "new/networks/locator.onnx"], "locator.onnx: a file; expected a folder; choose another name")
    monkeypatch.setattr(export, "exported", lambda *_: [][0])
    with pytest.raises(IndexError):
        run("export", "failed")
    assert not Path("failed").exists()


# ---------------------------------------------------------------------------------------------------- whole process


def test_as_a_process() -> None:
    done = python("-m", "cascadeseg", "infer", "no.nii.gz")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cascadeseg: no.nii.gz: no such file or folder\n"
