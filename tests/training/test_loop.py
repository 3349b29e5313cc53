from __future__ import annotations

import errno
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from cascadeseg import config as configs
from cascadeseg.cascade.pipeline import Segmenter
from cascadeseg.cli import main
from cascadeseg.errors import ConfigError, DeviceError, ModelError, OutputError, ScanError
from cascadeseg.formats import read_labels
from cascadeseg.labels import LUNGS
from cascadeseg.network import UNet, UNetConfig, View, load_model
from cascadeseg.training import loop, prefetch, step, validation
from cascadeseg.training.cache import CaseStore
from cascadeseg.training.config import LabelNames, TrainingConfig
from cascadeseg.training.log import Log
from cascadeseg.training.loop import train
from cascadeseg.training.state import Relief, averaged, update_average
from tests.cascade.chest import chest, chest_grid, dice, truth
from tests.test_cli import children
from tests.training.toy import NOTHING_RANDOM, stage1, stage2, with_data

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def recipe(folder, cache):
    """A stage-1 recipe whose cases are prepared."""
    return lambda **numbers: with_data(stage1(folder, **numbers), cache=cache)


def run(config, output, **options) -> Path:
    return train(config, output, device="cpu", quiet=True, **options)


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()


def test_both_stages_train_on_a_folder_and_infer_takes_the_model(folder, tmp_path):
    # At 12 mm, with a reach of the whole chest: at 8 mm so short a training failed with one to two seeds of four.
    learning = {"steps": 150, "patch": (32, 32, 32), "learning_rate": 1e-2, "ema": 0.9, "validate_every": 150}
    unet = UNetConfig(1, 3, widths=(8, 16, 24, 32))
    first = run(replace(stage1(folder, **learning), view=View(12.0), unet=unet), tmp_path / "one")
    unet = UNetConfig(2, 1, widths=(8, 16), block="bottleneck")
    second = run(replace(stage2(folder, first, **learning), view=View(6.0, prior=True), unet=unet), tmp_path / "two")
    scan = chest(chest_grid((4.0, 4.0, 5.0)))
    labels = Segmenter(second, device="cpu").segment(scan).labels
    assert min(dice(labels, truth(scan.grid), lung.value) for lung in LUNGS) > 0.85
    notes = {"stage1_steps": 150, "stage1_data": str(folder), "stage2_steps": 150, "stage2_data": str(folder)}
    assert load_model(second).notes == notes
    last = lines(tmp_path / "two")[-1]
    assert last["step"] == 150
    assert min(last["validation_dice_right"], last["validation_dice_left"]) > 0.8
    assert last["validation_nsd_left"] > 0.3
    assert "validation_hd95_right" in last
    files = {path.name for path in (tmp_path / "two").iterdir()}
    expected = {"config.toml", "environment.json", "split.json", "metrics.jsonl", "checkpoint.pt", "best", "model"}
    assert files == expected | {"samples", "cases"}
    assert (tmp_path / "two" / "samples" / "step_000150.png").read_bytes()[:4] == b"\x89PNG"


def test_a_patient_that_the_cascade_refuses_counts_as_missed_and_training_goes_on(
    folder, tmp_path, monkeypatch, capsys
):
    def refuses(self, scan):
        raise ScanError(scan.source, "a left lung of 21 litres", "10 litres at most", "correct the spacing")

    locator = run(stage1(folder, steps=1), tmp_path / "one")
    monkeypatch.setattr(Segmenter, "segment", refuses)
    train(stage2(folder, locator, steps=3), tmp_path / "two", device="cpu")
    assert lines(tmp_path / "two")[-1]["validation_dice"] == 0
    assert re.search(r"validation counts as missed: .*a left lung of 21 litres", capsys.readouterr().err)


@pytest.mark.slow
def test_the_smoke_recipes_need_no_data_and_end_in_a_model_that_infer_uses(tmp_path, monkeypatch):
    """The commands of docs/training.md, as printed there."""
    monkeypatch.chdir(tmp_path)
    for stage in ("1", "2"):
        assert main(["train", "--preset", "smoke", "--stage", stage, "--device", "cpu"]) == 0
        found = [line["validation_dice"] for line in lines(Path(f"runs/stage{stage}")) if "validation_dice" in line]
        assert found[-1] > 0.9
    assert main(["synth", "patients", "--seed", "77", "--preset", "healthy", "--spacing", "2"]) == 0
    (scan,), (reference,) = (list(Path("patients", kind).iterdir()) for kind in ("imagesTr", "labelsTr"))
    assert main(["infer", str(scan), "--model", "runs/stage2/model", "-o", "mask.nii.gz", "--quiet"]) == 0
    mine, truth_there = (read_labels(path)[0] for path in (Path("mask.nii.gz"), reference))
    assert min(dice(mine, truth_there, lung.value) for lung in LUNGS) > 0.9


def test_it_overfits_one_case(folder, tmp_path):
    numbers = {
        "steps": 110,
        "precision": "fp32",
        "patch": (48, 48, 48),
        "learning_rate": 2e-2,
        "validate_every": 199,
        "save_every": 199,
    }
    config = with_data(stage1(folder, **numbers), folds=2, fold=0, validation=0)
    unet = UNetConfig(1, 3, widths=(8, 16, 24))
    run(replace(config, view=View(8.0), unet=unet, augmentation=NOTHING_RANDOM), tmp_path)
    losses = [line["loss"] for line in lines(tmp_path)]
    assert losses[-1] < 0.1 * losses[0]


def test_a_resumed_run_equals_an_uninterrupted_one(recipe, tmp_path):
    whole = run(recipe(), tmp_path / "whole")
    parts = tmp_path / "parts"
    run(recipe(), parts, stop_after=3)
    with pytest.raises(ConfigError, match="a run that has begun; expected a new folder; add --resume"):
        run(recipe(), parts)
    resumed = run(recipe(), parts, resume=True)
    assert weights(whole) == weights(resumed)
    states = [torch.load(path / "checkpoint.pt", weights_only=True) for path in (tmp_path / "whole", parts)]
    for a, b in zip(*(torch.utils._pytree.tree_leaves(state) for state in states), strict=True):
        assert (a is None and b is None) or torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_a_damaged_checkpoint_is_refused_and_what_is_there_stays(recipe, tmp_path):
    run(recipe(), tmp_path, stop_after=2)
    checkpoint = tmp_path / "checkpoint.pt"
    whole = checkpoint.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1000]):
        checkpoint.write_bytes(content)
        with pytest.raises(ModelError, match=r"checkpoint.pt: a damaged checkpoint \(.+\); copy it again, or begin"):
            run(recipe(), tmp_path, resume=True)
        assert checkpoint.read_bytes() == content
    checkpoint.write_bytes(whole)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n" + (tmp_path / "metrics.jsonl").read_bytes())
    run(recipe(), tmp_path, resume=True)
    assert lines(tmp_path)[-1]["step"] == recipe().optimisation.steps


def test_the_date_and_time_may_be_the_seed(recipe, tmp_path):
    run(recipe(steps=1, seed=202611262245123), tmp_path)
    assert lines(tmp_path)[-1]["step"] == 1


def test_resuming_with_another_recipe_is_refused(recipe, tmp_path):
    run(recipe(), tmp_path, stop_after=2)
    with pytest.raises(ConfigError, match=r"another recipe.*\(optimisation.learning_rate was 0.002\)"):
        run(recipe(learning_rate=1.0), tmp_path, resume=True)


def test_a_run_out_of_time_is_saved(recipe, tmp_path, capsys):
    train(recipe(), tmp_path, device="cpu", time_limit_s=0.0)
    assert "stopped after step 0 of 6, which is saved; go on with --resume" in capsys.readouterr().err
    assert load_model(tmp_path / "model").notes["stage1_steps"] == 0
    run(recipe(), tmp_path, resume=True)
    assert lines(tmp_path)[-1]["step"] == 6


def test_a_model_whose_writer_was_killed_is_written_anew_from_the_checkpoint(recipe, tmp_path, monkeypatch):
    """Also of a finished run, from which the script that trains the shipped model goes on without more ado."""
    monkeypatch.syspath_prepend(SCRIPTS)
    train_shipped = importlib.import_module("train_shipped")
    model = run(recipe(), tmp_path)
    assert train_shipped.steps_done(tmp_path, 1) == 6
    whole, description = weights(model), (model / "model.json").read_text(encoding="utf-8")
    (model / "model.json").write_text(description.replace(load_model(model).sha256, "0" * 64), encoding="utf-8")
    assert train_shipped.steps_done(tmp_path, 1) == 0
    run(recipe(), tmp_path, resume=True)
    assert (train_shipped.steps_done(tmp_path, 1), weights(model)) == (6, whole)
    (tmp_path / "checkpoint.pt").unlink()
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no readable model\.safetensors"):  # hours are not begun anew unasked
        train_shipped.steps_done(tmp_path, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_under_way(recipe, tmp_path, monkeypatch, number):
    real = loop.take_step

    def interrupted(trainer):
        if trainer.state.step == 3:
            os.kill(os.getpid(), number)
        return real(trainer)

    monkeypatch.setattr(loop, "take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(recipe(save_every=100), tmp_path)
    assert 3 <= torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] <= 4
    monkeypatch.undo()
    run(recipe(save_every=100), tmp_path, resume=True)
    assert load_model(tmp_path / "model").notes["stage1_steps"] == 6


def test_the_second_signal_interrupts_at_once_unless_it_is_the_first_sent_twice(monkeypatch):
    stop = prefetch.Stop()
    with stop.listening():
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert stop.interrupted
        monkeypatch.setattr(prefetch, "SAME_SIGNAL_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_run_says_whether_it_begins_or_goes_on(recipe, tmp_path, capsys):
    train(recipe(), tmp_path, device="cpu", resume=True, stop_after=3)
    assert f"kept in {tmp_path}; begins with the first step" in capsys.readouterr().err
    train(recipe(), tmp_path, device="cpu", resume=True)
    assert f"kept in {tmp_path}; goes on after step 3" in capsys.readouterr().err


def test_a_step_that_cannot_be_made_leaves_a_checkpoint_of_the_steps_before_it(recipe, tmp_path, monkeypatch):
    """As when a worker was killed: one line, and nothing of the half step is kept, BatchNorm's part included."""
    real, calls = step.supervised_loss, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 2 * 2 + 2:  # BatchNorm still learns from patches, which it does to half of the steps
            raise ConfigError("data.workers", "a worker was killed", "", "lower it")
        return real(*arguments)

    config = recipe(batch=2, save_every=100, validate_every=100)
    whole = run(config, tmp_path / "whole")
    monkeypatch.setattr(step, "supervised_loss", failing)
    with pytest.raises(ConfigError) as caught:
        run(config, tmp_path / "parts")
    remedy = "lower it; step 2 of 6 is saved: mend this, and go on with --resume"
    assert str(caught.value) == f"data.workers: a worker was killed; {remedy}"
    assert torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["step"] == 2
    assert weights(run(config, tmp_path / "parts", resume=True)) == weights(whole)


def test_what_fails_before_the_first_step_leaves_no_run_behind(recipe, tmp_path, monkeypatch):
    error = ConfigError("data", "no such patient")
    monkeypatch.setattr(CaseStore, "names", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(ConfigError, match=r"^data: no such patient$"):
        run(recipe(), tmp_path)
    monkeypatch.undo()
    run(recipe(), tmp_path, stop_after=1)


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(recipe, tmp_path, small_files, capsys):
    config = recipe(save_every=100, validate_every=100)
    run(config, tmp_path, stop_after=2)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "recipe.toml").write_text(configs.dump(config), encoding="utf-8")
    command = ["train", "--stage", "1", "--config", str(tmp_path / "recipe.toml"), "--device", "cpu", "--quiet"]
    with small_files(len(before) // 2):
        assert main([*command, "--output", str(tmp_path), "--resume"]) == 2
    found = f"{tmp_path / 'checkpoint.pt'}: cannot be written (File too large)"
    remedy = "the last checkpoint is kept: mend this, and go on with --resume"
    assert capsys.readouterr().err == f"cascadeseg: {found}; {remedy}\n"
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    run(config, tmp_path, resume=True)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 6


def test_a_log_that_cannot_be_written_ends_the_run_with_its_steps_saved(recipe, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(Log, "note", full)
    words = r"^metrics.jsonl: No space left on device; step 3 of 6 is saved: mend this, and go on with --resume$"
    with pytest.raises(OutputError, match=words):
        run(recipe(save_every=100), tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 3


KILLED = """
import os, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from cascadeseg import config
from cascadeseg.evaluation import preview
from cascadeseg.training.config import TrainingConfig
from cascadeseg.training.loop import train
recipe = config.load(Path(sys.argv[1]), TrainingConfig)
sys.stdout.write("ready\\n"); sys.stdout.flush()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            train(recipe, Path(sys.argv[2]), resume=True, device="cpu", quiet=True)
        finally:
            os._exit(0)
    time.sleep(float(line))
    os.kill(child, 9)
    os.waitpid(child, 0)
    sys.stdout.write("killed\\n"); sys.stdout.flush()
"""


def test_a_run_killed_at_twenty_moments_resumes_to_the_same_bits(recipe, tmp_path, torch_threads):
    config = recipe(steps=40, save_every=1, validate_every=20)
    torch_threads(1)
    began = time.perf_counter()
    whole = run(config, tmp_path / "whole")
    lasted = time.perf_counter() - began
    (tmp_path / "recipe.toml").write_text(configs.dump(config), encoding="utf-8")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "recipe.toml"), str(tmp_path / "killed")]
    chance = random.Random(0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as parent:
        assert parent.stdout.readline() == "ready\n"
        for _ in range(20):
            parent.stdin.write(f"{chance.uniform(0.05, min(0.4, 0.5 * lasted))}\n")
            assert parent.stdout.readline() == "killed\n"
        parent.stdin.close()
    resumed = run(config, tmp_path / "killed", resume=True)
    assert weights(resumed) == weights(whole)
    assert [line["step"] for line in lines(tmp_path / "killed")][-1] == 40


@pytest.mark.parametrize("batch", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_two_processes_give_what_one_gives_and_none_waits_for_the_other(recipe, tmp_path, batch):
    """The second process has fewer patches than the first; of one patch a step, none."""
    config = recipe(steps=3, batch=batch, validate_every=3)
    config = replace(config, unet=replace(config.unet, norm="instance"))
    alone = run(config, tmp_path / "alone")
    (tmp_path / "recipe.toml").write_text(configs.dump(config), encoding="utf-8")
    together = tmp_path / "together"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29653"),
        *("-m", "cascadeseg", "train", "--stage", "1", "--config", str(tmp_path / "recipe.toml"), "--quiet"),
        *("--output", str(together), "--device", "cpu", "--devices", "2"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    assert done.stdout.count("the trained locator") == 1
    one, two = load_model(alone).locator.weights, load_model(together / "model").locator.weights
    for name in one:
        assert torch.allclose(one[name].float(), two[name].float(), atol=2e-3), name
    assert lines(together)[-1]["validation_dice"] == pytest.approx(
        lines(tmp_path / "alone")[-1]["validation_dice"], 0.02
    )


def two_processes(recipe: TrainingConfig, folder: Path) -> tuple[list[str], Path]:
    """The command of a run by two processes, and its folder."""
    (folder / "recipe.toml").write_text(configs.dump(recipe), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "cascadeseg", "train", "--stage", "1", "--config", str(folder / "recipe.toml")),
        *("--quiet", "--output", str(folder / "together"), "--device", "cpu", "--devices", "2"),
    ]
    return command, folder / "together"


def ended(run: subprocess.Popen) -> tuple[int, list[str]]:
    """The exit code of a run that is to end by itself, and its lines of errors."""
    try:
        _, said = run.communicate(timeout=90)
    finally:
        run.kill()
    return run.returncode, [line for line in said.splitlines() if line.startswith("cascadeseg: ") or "Error" in line]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_a_killed_worker_ends_all_processes(tmp_path):
    """One of the two waits for the case that the other's worker was killed over."""
    numbers = {"steps": 60, "batch": 2, "validate_every": 99, "save_every": 1}
    config = with_data(stage1("synthetic", **numbers), cases=60, initial=2, steps_per_case=1, validation=0, workers=1)
    command, folder = two_processes(config, tmp_path)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        while not (folder / "checkpoint.pt").exists():
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.1)
        for worker in children(running):
            os.kill(worker, signal.SIGKILL)
        code, said = ended(running)
    assert code == 2
    assert any("a process that prepares cases ran out of memory or was killed" in line for line in said)
    assert any("is saved" in line for line in said)


def test_what_only_the_first_process_cannot_write_ends_all_in_one_line_each(recipe, tmp_path, small_files):
    command, _ = two_processes(recipe(steps=40, batch=2, validate_every=99, save_every=2), tmp_path)
    with small_files(20_000), subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        code, said = ended(running)
    assert code == 2
    assert len(said) == 2
    assert "checkpoint.pt: cannot be written (File too large)" in " ".join(said)
    assert "another process of this run failed" in " ".join(said)


def test_a_folder_in_which_another_run_is_at_work_is_refused(recipe, tmp_path, monkeypatch):
    real, tried = step.supervised_loss, []

    def meanwhile(*arguments):
        if not tried:
            tried.append("another")
            with pytest.raises(ConfigError, match=f"{tmp_path}: another run is at work in it; wait for its end"):
                run(recipe(steps=2), tmp_path)
        return real(*arguments)

    monkeypatch.setattr(step, "supervised_loss", meanwhile)
    whole = run(recipe(), tmp_path)
    assert tried
    assert lines(tmp_path)[-1]["step"] == recipe().optimisation.steps
    assert run(recipe(), tmp_path, resume=True) == whole


def test_a_run_without_time_to_look_at_its_data_says_so_and_leaves_nothing(recipe, tmp_path, monkeypatch, capsys):
    def slow(*_, stopped, **__):
        time.sleep(0.2)
        stopped()

    monkeypatch.setattr(loop, "Data", slow)
    (tmp_path / "recipe.toml").write_text(configs.dump(recipe()), encoding="utf-8")
    command = ["train", "--stage", "1", "--config", str(tmp_path / "recipe.toml"), "--output", str(tmp_path / "run")]
    assert main([*command, "--device", "cpu", "--time-limit", "0.001"]) == 4
    assert "stopped before the first step; the same command begins anew" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("patch", [(4, 4, 4), (8, 4, 4)])
def test_patches_of_one_voxel_at_the_bottom_train(recipe, tmp_path, patch):
    for fixed_size in (False, True):
        config = recipe(patch=patch, fixed_size=fixed_size, fixed_norm=1.0)
        assert config.unet.norm == "batch"
        run(config, tmp_path / str(fixed_size))
        assert lines(tmp_path / str(fixed_size))[-1]["step"] == config.optimisation.steps


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_accumulation_equals_the_large_batch(recipe, tmp_path, micro_batch):
    # Hardly any rate: in the second step weights that differ by rounding may take a voxel across a ReLU's kink.
    config = recipe(steps=2, batch=6, micro_batch=6, validate_every=99, patch=(24, 24, 24), learning_rate=1e-9)
    config = replace(config, unet=replace(config.unet, norm="instance"))
    run(config, tmp_path / "large")
    smaller = replace(config, optimisation=replace(config.optimisation, micro_batch=micro_batch))
    run(smaller, tmp_path / "small")
    large, small = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["optimiser"]["state"]
        for name in ("large", "small")
    )
    for key in large:  # Adam's first moment: the gradients themselves, up to a factor
        scale = large[key]["exp_avg"].abs().max()
        assert torch.allclose(large[key]["exp_avg"], small[key]["exp_avg"], rtol=1e-4, atol=1e-5 * float(scale)), key


def test_a_loss_that_is_not_finite_is_skipped_counted_and_told(recipe, tmp_path, monkeypatch, capsys):
    real = step.supervised_loss
    calls = []

    def sometimes_nan(logits, labels):
        calls.append(1)
        loss, score = real(logits, labels)
        return (loss * float("nan") if len(calls) == 2 else loss), score

    monkeypatch.setattr(step, "supervised_loss", sometimes_nan)
    train(recipe(), tmp_path, device="cpu")
    assert "step 2: loss or gradient not finite; the step is skipped (1 so far)" in capsys.readouterr().err
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["skipped"] == 1
    model = load_model(tmp_path / "model").locator
    assert all(torch.isfinite(tensor).all() for tensor in model.weights.values())


def test_a_number_that_is_not_finite_is_null_in_the_lines_of_a_run(tmp_path):
    log = Log(tmp_path, 0, 10, validated=0, title="", first=True, quiet=True, board=False)
    log.note(10, {"loss": float("nan"), "dice": 0.5})
    log.close()
    assert lines(tmp_path) == [{"step": 10, "loss": None, "dice": 0.5}]


def test_a_validation_that_comes_again_stands_once_in_the_lines_of_a_run(tmp_path):
    """One killed between a checkpoint and the next validates again what it validated after that checkpoint."""
    values = [(10, {"loss": 0.5}), (10, {"validation_dice": 0.8}), (20, {"loss": 0.4}), (20, {"validation_dice": 0.9})]
    log = Log(tmp_path, 0, 30, validated=0, title="", first=True, quiet=True, board=False)
    for number, what in [*values, (25, {"loss": 0.3})]:
        log.note(number, what)
    log.close()
    Log(tmp_path, 20, 30, validated=10, title="", first=True, quiet=True, board=False).close()
    assert lines(tmp_path) == [{"step": number, **what} for number, what in values[:-1]]


def test_a_run_without_a_finite_loss_gives_up(recipe, tmp_path, monkeypatch):
    real = step.supervised_loss
    monkeypatch.setattr(step, "supervised_loss", lambda *a: (real(*a)[0] * float("inf"), real(*a)[1]))
    with pytest.raises(ConfigError, match=r"no finite loss in 3 steps in a row.*lower optimisation.learning_rate"):
        run(recipe(skip_at_most=2, validate_every=99), tmp_path)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")],
)
def test_a_device_out_of_memory_is_met_step_by_step(recipe, tmp_path, monkeypatch, capsys, error):
    real = UNet.forward

    def hungry(self, image):
        if self.training and (image[0, 0].numel() > 32 * 32 * 16 or not self.checkpoint_blocks):
            raise error
        return real(self, image)

    monkeypatch.setattr(UNet, "forward", hungry)
    train(recipe(), tmp_path, device="cpu")
    said = capsys.readouterr().err
    assert "step 1: out of the device's memory; activations are recomputed from now on" in said
    assert "step 1: out of the device's memory; patches of at most 16 x 32 x 32 from now on" in said
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["relief"] == {
        "checkpoint_blocks": True,
        "halvings": 1,
    }
    monkeypatch.setattr(UNet, "forward", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(DeviceError, match="out of memory even with patches of"):
        run(recipe(validate_every=99), tmp_path / "hopeless")


def test_the_ladder_ends():
    config = stage1("none", patch=(64, 96, 64))
    relief, rungs = Relief(), []
    while (relief := relief.more(config)) is not None:
        rungs.append((relief.checkpoint_blocks, relief.patch(config)))
    assert rungs[:3] == [(True, (64, 96, 64)), (True, (64, 48, 64)), (True, (32, 48, 64))]
    assert max(rungs[-1][1]) <= 16


@pytest.mark.parametrize(
    "change",
    [
        {"optimiser": "sgd", "schedule": "poly", "tensorboard": True},
        {"optimiser": "adafactor"},
        {"precision": "bf16", "deterministic": True},
    ],
)
def test_every_key_of_the_loop_trains_and_resumes(recipe, tmp_path, change):
    config = recipe(**change, checkpoint_blocks=True, channels_last=False, fixed_size=True, batch=2, micro_batch=2)
    config = replace(config, unet=replace(config.unet, deep_supervision=True))
    run(config, tmp_path, stop_after=2)
    run(config, tmp_path, resume=True)
    assert lines(tmp_path)[-1]["step"] == 6
    if find_spec("tensorboard") is not None:
        assert (tmp_path / "tensorboard").exists() == config.optimisation.tensorboard
    torch.use_deterministic_algorithms(False)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_trains_and_resumes_on_a_gpu(recipe, tmp_path, precision):
    numbers = {"steps": 20, "validate_every": 20, "fixed_size": True, "cudnn_benchmark": True, "batch": 2}
    config = recipe(**numbers, precision=precision, checkpoint_blocks=True)
    train(config, tmp_path, device="cuda", quiet=True, stop_after=10)
    model = load_model(train(config, tmp_path, device="cuda", quiet=True, resume=True)).locator
    assert all(torch.isfinite(tensor).all() for tensor in model.weights.values())
    steps = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == [10, 20]
    assert all(line["gpu_peak_gb"] > 0 for line in steps)


def test_cudnn_searches_no_algorithms_for_the_shapes_of_validation(recipe, tmp_path, monkeypatch):
    cudnn, real, seen = torch.backends.cudnn, validation._segmenter, []

    def noting(*arguments):
        segment = real(*arguments)
        return lambda scan: (seen.append((cudnn.enabled, cudnn.benchmark)), segment(scan))[1]

    monkeypatch.setattr(validation, "_segmenter", noting)
    try:
        run(recipe(cudnn_benchmark=True, fixed_size=True), tmp_path)
        assert set(seen) == {(True, False)}
        assert cudnn.benchmark
    finally:
        cudnn.benchmark = False


def test_fp16_without_cuda_is_refused(recipe, tmp_path):
    with pytest.raises(ConfigError, match="fp16 on cpu; expected a CUDA device"):
        run(recipe(precision="fp16"), tmp_path)
    assert not tmp_path.joinpath("checkpoint.pt").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"patch": (30, 32, 32)}, "optimisation.patch.*multiples of 4"),
        ({"batch": 0}, "optimisation.batch: 0; expected 1 or more"),
        ({"batch": 5000}, "optimisation.batch: 5000; expected 4096 at most"),
        ({"validate_every": 0}, "optimisation.validate_every: 0; expected 1 or more"),
    ],
)
def test_numbers_that_cannot_be_are_refused(recipe, tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        run(recipe(**change), tmp_path)


@pytest.mark.parametrize("key", ["view.low_hu", "view.tissue_high_hu"])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_window_without_an_end_is_refused(tmp_path, key, value):
    recipe = Path(loop.__file__).parents[1] / "configs" / "stage1.toml"
    with pytest.raises(ConfigError, match=rf"--set {key}={value}.*: .*{value}; expected a finite number"):
        configs.load(recipe, TrainingConfig, [f"{key}={value}"])


def test_a_window_that_is_upside_down_is_refused(recipe, tmp_path):
    plain = recipe()
    with pytest.raises(ConfigError, match=r"view.high_hu: -2000.0; expected above view.low_hu, -\d+.0"):
        run(replace(plain, view=replace(plain.view, high_hu=-2000.0)), tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("data.workers", "-1", "0 or more"),
        ("data.box_jitter_mm", "-2.0", "0 or more"),
        ("optimisation.prefetch", "-1", "0 or more"),
        ("optimisation.ema", "1.0", "0 or more and below 1"),
        ("optimisation.ema", "-0.1", "0 or more and below 1"),
        ("optimisation.steps", "0", "1 or more"),
        ("optimisation.patch", "[96, 96, -32]", "1 or more"),
        ("optimisation.learning_rate", "0.0", "above 0"),
        ("optimisation.learning_rate", "nan", "above 0"),
        ("view.spacing_mm", "0.0", "above 0"),
        ("view.scale_hu", "-1000.0", "above 0"),
        ("unet.widths", "[]", "1 or more"),
        ("augmentation.scale", "-0.1", "0 or more"),
        ("augmentation.noise_hu", "inf", "0 or more"),
        *((f"augmentation.{key}", "1.5", "0 to 1") for key in ("warp", "mirror", "blur", "low_resolution", "prior")),
        ("augmentation.window", "-0.5", "0 to 1"),
    ],
)
def test_a_recipe_with_a_number_that_cannot_be_is_refused_when_it_is_read(tmp_path, key, value, expected):
    section, _, name = key.partition(".")
    plain = (Path(__file__).parents[2] / "configs" / "stage1-smoke.toml").read_text(encoding="utf-8")
    plain = re.sub(rf"^{name} = .*\n", "", plain, flags=re.MULTILINE)
    kept = plain if f"[{section}]" in plain else f"{plain}[{section}]"
    path = tmp_path / "recipe.toml"
    path.write_text(kept.replace(f"[{section}]", f"[{section}]\n{name} = {value}"), encoding="utf-8")
    for source, override, where in (
        (path, [], f"{path}: {key}"),
        ({"stage": 1, "view": {"spacing_mm": 4.0}, "unet": {}}, [f"{key}={value}"], f"--set {key}={value}"),
    ):
        with pytest.raises(ConfigError) as caught:
            configs.load(source, TrainingConfig, override)
        assert str(caught.value) == f"{where}: {value}; expected {expected}"


def test_every_number_of_a_recipe_has_its_limits():
    of_any_sign = {"seed"}
    limited = {key for _, keys in TrainingConfig.LIMITS.values() for key in keys.split()}
    recipe = stage1("none")
    numbers = {
        f"{section.name}.{key.name}"
        for section in fields(recipe)
        if is_dataclass(getattr(recipe, section.name))
        for key in fields(getattr(recipe, section.name))
        if key.type.removesuffix("]").removeprefix("tuple[").split(",")[0] in ("int", "float")
        and key.name not in of_any_sign
    }
    assert limited == numbers
    configs.check_limits(recipe)


def test_a_network_that_does_not_fit_its_stage_is_refused(recipe, tmp_path):
    config = recipe()
    with pytest.raises(ConfigError, match="unet: 1 channels in and 1 out; expected 1 in and 3 out"):
        run(replace(config, unet=replace(config.unet, out_channels=1)), tmp_path)
    beside = with_data(config, labels=LabelNames(beside=(("stomach",),)))
    with pytest.raises(ConfigError, match="unet: 1 channels in and 3 out; expected 1 in and 4 out"):
        run(beside, tmp_path)
    with pytest.raises(ConfigError, match=r"data.labels.beside: 1 groups; expected none: stage 2"):
        run(replace(beside, stage=2), tmp_path)


def test_a_locator_that_is_not_there_is_told_before_anything_starts(folder, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        run(stage2(folder, tmp_path / "nowhere"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_our_own_recipes_can_begin_and_the_shipped_weights_fit_the_default_ones(path, tmp_path):
    config = replace(configs.load(path, TrainingConfig), locator="")
    loop._check(config, tmp_path, resume=False)
    assert f"stage{config.stage}" == path.stem.partition("-")[0]
    if "-" not in path.stem:
        shipped = load_model()
        stage = shipped.locator if config.stage == 1 else shipped.refiner
        network = UNet(config.unet).eval()
        loop._initialise(network, replace(config, init="shipped"))  # refuses another view or other widths
        image = torch.rand(1, config.unet.in_channels, 32, 32, 32)
        with torch.no_grad():
            theirs = stage.network().eval()(image)
            mine = network(image)[:, : theirs.shape[1]]
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_a_run_says_how_long_it_waited_and_what_to_do_about_it(recipe, tmp_path, capsys):
    train(recipe(), tmp_path / "run", device="cpu")
    said = capsys.readouterr().err
    assert "stage 1 on cpu (fp32): 2 patients to train on, 1 to validate with" in said
    assert "patients ready: 2 of 2" in said
    assert re.search(r"6 of 6 steps; \d+\.\d% of their time waiting for data", said)
    starved = Log(tmp_path, 0, 1, validated=0, title="", first=True, quiet=False, board=False)
    starved.step(1, {"loss": 1.0}, waited_s=1000.0, patches=1)
    starved.close()
    assert "raise data.steps_per_case or data.workers" in capsys.readouterr().err


@pytest.mark.parametrize(("threads", "processors"), [(1, 4), (1, 1), (2, 4)])
def test_a_single_thread_of_several_processors_is_told(
    recipe, tmp_path, capsys, monkeypatch, torch_threads, threads, processors
):
    torch_threads(threads)
    monkeypatch.setattr(loop, "processors", lambda: processors)
    train(recipe(steps=1), tmp_path / "run", device="cpu")
    told = "warning: torch uses 1 of 4 processors, which trains far slower; unset OMP_NUM_THREADS, or set it to 4"
    assert (told in capsys.readouterr().err) == ((threads, processors) == (1, 4))


def test_a_disk_too_small_for_the_patients_to_come_is_told_while_there_is_time(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(CaseStore, "room_gb", lambda store: (31.0, 12.5))
    train(recipe(steps=1), tmp_path / "run", device="cpu")
    said = capsys.readouterr().err
    assert re.search(r"warning: the patients to come will take about 31.0 GB of .*, where 12.5 GB are free; name", said)


def test_curves_without_matplotlib_say_in_one_line_what_to_install(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "curves.py"
    hidden = "import runpy, sys; sys.modules['matplotlib'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", hidden, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = "curves.py: it draws with matplotlib, which is not installed; pip install '.[docs]'\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, loop.COMPILERS)), reason="torch.compile needs a C++ compiler")
def test_a_compiled_network_learns_the_same(recipe, tmp_path):
    numbers = {"steps": 2, "fixed_size": True, "validate_every": 99}
    plain, compiled = (
        torch.load(run(recipe(**numbers, compile=compile_it), tmp_path / str(compile_it)).parent / "checkpoint.pt")
        for compile_it in (False, True)
    )
    for name, weight in plain["network"].items():
        assert torch.allclose(weight.float(), compiled["network"][name].float(), atol=2e-3), name


def test_without_a_compiler_a_compiled_run_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"optimisation.compile: no C\+\+ compiler"):
        run(recipe(compile=True), tmp_path)


def test_training_goes_on_from_other_weights(recipe, tmp_path):
    first = run(recipe(), tmp_path / "first")
    tuned = replace(recipe(steps=1, learning_rate=1e-12), init=str(first))
    second = run(tuned, tmp_path / "second")
    a, b = load_model(first).locator.weights, load_model(second).locator.weights
    assert all(torch.equal(a[name], b[name]) for name in a if a[name].ndim == 5)
    other = replace(tuned, unet=UNetConfig(1, 3, widths=(4, 8)))
    network = (
        r"init: weights of another network \(unet.widths was \[8, 16\]\); expected the recipe's; change \[unet\], or"
    )
    with pytest.raises(ConfigError, match=network):
        run(other, tmp_path / "third")
    deeper = replace(tuned, unet=replace(tuned.unet, blocks=2))
    with pytest.raises(ConfigError, match=r"init: weights of another network \(unet.blocks was 1\)"):
        loop._begun(deeper, None)
    finer = replace(tuned, view=replace(tuned.view, spacing_mm=4.0))
    view = (
        r"init: weights of another view \(view.spacing_mm was 6.0\); expected the recipe's; change \[view\], or leave"
    )
    with pytest.raises(ConfigError, match=view):
        loop._begun(finer, None)


def test_batchnorm_takes_over_the_averaged_statistics_and_keeps_them(recipe, tmp_path):
    def statistics(part):
        state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)[part]
        return [value for name, value in state.items() if "running" in name]

    def same(a, b):
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    run(recipe(fixed_norm=0.5), tmp_path, stop_after=3)
    own, averaged_ones = statistics("network"), statistics("average")
    assert not same(own, averaged_ones)
    for _ in range(2):
        run(recipe(fixed_norm=0.5), tmp_path, resume=True, stop_after=1)
        assert same(statistics("network"), averaged_ones)


def test_the_average_follows_quickly_at_first():
    torch.manual_seed(0)
    network = UNet(UNetConfig(1, 1, widths=(4, 8)))
    average = averaged(network)
    for parameter in network.parameters():
        parameter.data += 1
    update_average(average, network, decay=0.998, step=0)
    moved = [
        float((a - b + 1).mean().detach()) for a, b in zip(average.parameters(), network.parameters(), strict=True)
    ]
    assert np.allclose(moved, 0.9, atol=1e-5)
