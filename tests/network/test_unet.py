from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from cascadeseg.errors import DeviceError, ModelError, OutputError
from cascadeseg.network import (
    Engine,
    Model,
    UNet,
    UNetConfig,
    View,
    blocks,
    find_device,
    in_slabs,
    load_model,
    save_model,
    stage_of,
)
from cascadeseg.network.blocks import depth_to_space, has_one_pass, space_to_depth
from cascadeseg.network.engine import fast_precision, padded_to

CPU = torch.device("cpu")
SMALL = UNetConfig(2, 1, widths=(4, 8, 16), block="bottleneck")
CONFIGS = [
    SMALL,
    replace(SMALL, block="residual", stem="convolution", out_channels=3, blocks=2),
    replace(SMALL, norm="instance", bottleneck_ratio=4),
]


def trained(config: UNetConfig) -> UNet:
    """A network whose statistics are not those of the start."""
    torch.manual_seed(0)
    network = UNet(config)
    network.train()
    for _ in range(3):
        network(torch.randn(1, config.in_channels, 16, 16, 24))
    return network.eval()


@pytest.mark.parametrize("config", CONFIGS)
def test_logits_have_the_images_shape(config):
    logits = trained(config)(torch.randn(2, config.in_channels, 16, 24, 8))
    assert logits.shape == (2, config.out_channels, 16, 24, 8)


def test_space_to_depth_is_undone_exactly():
    x = torch.randn(2, 3, 4, 6, 8)
    assert space_to_depth(x).shape == (2, 24, 2, 3, 4)
    assert torch.equal(depth_to_space(space_to_depth(x)), x)


@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 4, 4), (3, 2, 2)])
def test_gradients_in_bf16_are_those_in_fp32_however_small_the_image(shape):
    torch.manual_seed(0)
    layer = blocks.ConvNorm(64, 64, 3, "batch").eval()
    image = torch.randn(1, 64, *shape)

    def gradient(bf16: bool) -> torch.Tensor:
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            result = layer(image)
        result.float().square().sum().backward()
        return layer.convolution.weight.grad.clone()

    wanted = gradient(bf16=False)
    for _ in range(20):
        freed = [torch.full((size,), float("nan")) for size in (10_000, 100_000, 64 * 64 * 27 // 2)]
        del freed  # what is allocated next may lie there
        assert (gradient(bf16=True) - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("config", CONFIGS)
def test_folding_the_norms_changes_nothing(config):
    network, image = trained(config), torch.randn(1, 2, 16, 16, 16)
    before = network(image)
    network.fold()
    assert torch.allclose(network(image), before, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS[:2])
@pytest.mark.parametrize("size", [8, 16])
@torch.inference_mode()
def test_sums_and_relu_in_the_convolutions_pass_change_nothing(config, size):
    if not has_one_pass(torch.float32):
        pytest.skip("no oneDNN")
    network = trained(config).to(memory_format=torch.channels_last_3d)
    image = torch.randn(1, 2, size, size, size).contiguous(memory_format=torch.channels_last_3d)
    before = network(image.clone())
    network.fold(one_pass=True)
    assert torch.allclose(network(image), before, atol=1e-4)


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, block="residual", blocks=2)])
def test_every_convolution_of_an_engine_is_onednns(monkeypatch, config):
    if not has_one_pass(torch.float32):
        pytest.skip("no oneDNN")
    engine = Engine(stage_of(View(1.0, prior=True), trained(config)), CPU, "fp32")
    image = torch.randn(2, 16, 24, 200)
    before = engine(image)
    monkeypatch.setattr(torch.nn.functional, "conv3d", not_there)
    assert torch.equal(engine(image), before)


@pytest.mark.parametrize("config", CONFIGS)
@torch.inference_mode()
def test_a_transposed_network_does_the_same_to_transposed_images(config):
    network, image = trained(config), torch.randn(2, 2, 8, 16, 24)
    before = network(image)
    network.transpose()
    assert not torch.allclose(network(image), before, atol=1e-2)
    assert torch.allclose(network(image.transpose(2, 4)).transpose(2, 4), before, atol=1e-4)


def test_trying_it_out_leaves_random_numbers_alone():
    state = torch.get_rng_state()
    has_one_pass.__wrapped__(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def not_there(*_: object, **__: object) -> NoReturn:
    raise AttributeError("no _convolution_pointwise")


def test_without_onednns_operations_torchs_own_are_used(monkeypatch):
    stage, image = stage_of(View(1.0), trained(replace(SMALL, in_channels=1))), torch.randn(1, 16, 16, 16)
    before = Engine(stage, CPU, "fp32")(image)
    monkeypatch.setattr(blocks, "in_one_pass", not_there)
    has_one_pass.cache_clear()
    try:
        assert not has_one_pass(torch.float32)
        assert torch.allclose(Engine(stage, CPU, "fp32")(image), before, atol=1e-4)
    finally:
        has_one_pass.cache_clear()


@pytest.mark.parametrize("config", CONFIGS)
def test_checkpointing_gives_the_same_gradients_and_statistics(config):
    image = torch.randn(2, 2, 16, 16, 16)
    networks = []
    for checkpoint_blocks in (False, True):
        torch.manual_seed(1)
        network = UNet(config, checkpoint_blocks=checkpoint_blocks).train()
        for _ in range(2):
            network(image).square().mean().backward()
        networks.append(network)
    plain, saving = networks
    for (name, a), (_, b) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7), name
    for (name, a), (_, b) in zip(plain.named_buffers(), saving.named_buffers(), strict=True):
        assert torch.equal(a, b), name


def test_deep_supervision_returns_every_level_while_training_only():
    network = UNet(replace(SMALL, deep_supervision=True))
    image = torch.randn(1, 2, 16, 16, 16)
    assert [tuple(logits.shape[2:]) for logits in network.train()(image)] == [(16,) * 3, (4,) * 3, (2,) * 3]
    assert network.eval()(image).shape == (1, 1, 16, 16, 16)


@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 16, 23)])
def test_an_engine_takes_any_size(shape):
    engine = Engine(stage_of(View(1.0, prior=True), trained(SMALL)), CPU, "fp32")
    assert engine(torch.randn(2, *shape)).shape == (1, *shape)


@pytest.mark.parametrize("config", CONFIGS)
@torch.inference_mode()
def test_an_engine_gives_its_networks_logits(config):
    network, image = trained(config), torch.randn(2, 16, 24, 40)
    before = network(image[None])[0]
    assert torch.allclose(Engine(stage_of(View(1.0, prior=True), network), CPU, "fp32")(image), before, atol=1e-4)


def test_padding_is_zeros_at_the_far_ends():
    image = torch.ones(1, 3, 4, 5)
    padded, shape = padded_to(image, 4)
    assert shape == (3, 4, 5)
    assert padded.shape == (1, 4, 4, 8)
    assert padded.sum() == image.sum()
    assert torch.equal(padded[:, :3, :4, :5], image)


def test_bfloat16_agrees_with_float32():
    stage = stage_of(View(1.0, prior=True), trained(SMALL))
    image = torch.randn(2, 24, 24, 24)
    full, half = (Engine(stage, CPU, precision)(image) for precision in ("fp32", "bf16"))
    assert float((full - half).norm() / full.norm()) < 0.05


def test_slabs_with_enough_context_equal_the_whole():
    config = UNetConfig(1, 2, widths=(4, 8))
    engine = Engine(stage_of(View(1.0), trained(config)), CPU, "fp32")
    image = torch.randn(1, 8, 8, 200)
    assert torch.allclose(in_slabs(engine, image, length=32, context=40), engine(image), atol=1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_agrees_with_the_cpu():
    stage = stage_of(View(1.0, prior=True), trained(SMALL))
    image = torch.randn(2, 24, 24, 24)
    cpu, cuda = Engine(stage, CPU, "fp32")(image), Engine(stage, torch.device("cuda"))(image).cpu()
    assert float((cpu - cuda).norm() / cpu.norm()) < 0.05


def model() -> Model:
    return Model(
        stage_of(View(2.0), trained(replace(SMALL, in_channels=1))),
        stage_of(View(1.0, prior=True), trained(SMALL)),
        "toy",
        "3",
    )


def test_a_model_is_the_same_after_writing_and_reading(tmp_path):
    saved = model()
    save_model(saved, tmp_path / "m", half=False)
    read = load_model(tmp_path / "m")
    assert (read.name, read.version, len(read.sha256)) == ("toy", "3", 64)
    assert (read.locator.view, read.locator.unet) == (saved.locator.view, saved.locator.unet)
    image = torch.randn(1, 2, 16, 16, 16)
    assert torch.equal(read.refiner.network().eval()(image), saved.refiner.network().eval()(image))


def test_an_empty_name_is_no_model_folder():
    with pytest.raises(ModelError, match="'': an empty name; expected a model folder, or None for the shipped model"):
        load_model("")


def test_a_model_without_second_stage_is_kept_as_such(tmp_path):
    save_model(replace(model(), refiner=None), tmp_path)
    assert load_model(tmp_path).refiner is None


def test_what_is_no_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(ModelError, match=r"no model.json in it; expected a model folder"):
        load_model(tmp_path)
    save_model(model(), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ModelError, match=r"model.safetensors: SHA-256 .* damaged or was exchanged"):
        load_model(tmp_path)
    (tmp_path / "model.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not a model description"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (["sha256"], None, r"model\.json: no sha256 that can be read; expected the JSON .*; install or copy"),
        (["version"], 3, r"model\.json: no version that can be read"),
        (["stages"], [], r"model\.json: no stages that can be read"),
        (["labels"], None, r"model\.json: no labels that can be read"),
        (["labels", "lung_left"], 1, r'model\.json: a model of the labels .*"lung_left": 1}; expected .*: 2}; train'),
        (["stages", "refiner", "unet", "block"], None, "weights do not fit; expected the one .*; install"),
        (["stages", "refiner", "unet", "widths"], [4, 8, 24], r"model\.json: a network that its weights do not fit"),
        (["stages", "refiner", "view", "prior"], None, "the refiner sees 1 channels and takes 2"),
        (["stages", "locator"], 1, r"does not hold together \(.*\); expected the model\.json that was written"),
        (["stages", "refiner", "unet", "blocks"], "1", r"hold together \(config: blocks: .1.; expected a whole number"),
        (["stages", "refiner", "unet", "widths"], [], r"hold together \(the refiner has a spacing, a scale, blocks or"),
        (
            ["stages", "locator", "view", "spacing_mm"],
            "2",
            r"hold together \(config: spacing_mm: .2.; expected a number",
        ),
        (["stages", "locator", "view", "spacing_mm"], 0, r"hold together \(the locator has a spacing, a scale, blocks"),
        (["notes"], [], r"model\.json: no notes that can be read"),
    ],
)
def test_a_description_that_lacks_or_changes_something_is_refused_in_one_line(tmp_path, keys, value, words):
    save_model(model(), tmp_path)
    description = table = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    del description["description_sha256"]  # as those were written that knew none
    for key in keys[:-1]:
        table = table[key]
    if value is None:
        del table[keys[-1]]
    else:
        table[keys[-1]] = value
    (tmp_path / "model.json").write_text(json.dumps(description), encoding="utf-8")
    with pytest.raises(ModelError, match=words) as refused:
        load_model(tmp_path).refiner.network()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu", "auto, cpu, cuda, cuda:N or mps"),
        ("cuda:99", "but this machine has"),
        ("xpu", "auto, cpu, cuda"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name, words):
    with pytest.raises(DeviceError, match=words):
        find_device(name)


def test_each_gpu_has_its_own_fast_precision(monkeypatch):
    capability = {torch.device("cuda:0"): (8, 0), torch.device("cuda:1"): (7, 5)}
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)  # the first one's
    monkeypatch.setattr("torch.cuda.get_device_capability", capability.get)
    assert [fast_precision(device) for device in capability] == ["bf16", "fp16"]


@pytest.mark.parametrize(
    ("flags", "inference", "training"),
    [
        ("GenuineIntel avx512_bf16 amx_bf16", "bf16", "bf16"),
        ("GenuineIntel avx512_bf16", "fp32", "bf16"),
        ("AuthenticAMD avx512_bf16", "bf16", "bf16"),
        ("AuthenticAMD avx2", "fp32", "fp32"),
        ("", "fp32", "fp32"),
    ],
)
def test_each_processor_has_its_own_fast_precision(monkeypatch, flags, inference, training):
    monkeypatch.setattr("cascadeseg.network.engine._cpu_flags", lambda: flags)
    assert fast_precision(torch.device("cpu")) == inference
    assert fast_precision(torch.device("cpu"), training=True) == training


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["stages", "refiner", "view", "spacing_mm"], 1.5),
        (["stages", "locator", "view", "high_hu"], 400.0),
        (["version"], "4"),
        (["description_sha256"], "0" * 64),
    ],
)
def test_a_description_that_was_changed_after_it_was_written_is_refused(tmp_path, keys, value):
    """What a network sees is not in its weights, and no other hash tells that it was changed."""
    save_model(model(), tmp_path)
    description = table = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    for key in keys[:-1]:
        table = table[key]
    table[keys[-1]] = value
    (tmp_path / "model.json").write_text(json.dumps(description), encoding="utf-8")
    words = r"model\.json: a description that was changed .*; expected the one that was written with .*; install"
    with pytest.raises(ModelError, match=words) as refused:
        load_model(tmp_path)
    assert "\n" not in str(refused.value)


def test_notes_and_the_layout_of_a_description_may_change(tmp_path):
    save_model(model(), tmp_path)
    description = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    description = dict(sorted((description | {"notes": {"calibrated": "later"}}).items()))
    (tmp_path / "model.json").write_text(json.dumps(description, indent=7), encoding="utf-8")
    assert load_model(tmp_path).notes == {"calibrated": "later"}


@pytest.fixture
def torn(tmp_path, monkeypatch):
    """A model folder whose writer was killed between the two renames."""
    save_model(model(), tmp_path)
    rename = Path.replace

    def killed(part, target):
        if target.name == "model.json":
            raise KeyboardInterrupt
        return rename(part, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_model(replace(model(), refiner=None), tmp_path)
    return tmp_path


def test_a_model_whose_writer_was_killed_says_what_to_do(torn):
    words = r"model\.safetensors: SHA-256 .* or a training was killed while it wrote both: go on with that training, or"
    with pytest.raises(ModelError, match=words):
        load_model(torn)
    save_model(model(), torn)
    assert load_model(torn).refiner is not None


def test_a_disk_that_is_full_before_the_description_is_written_leaves_the_model_that_was_there(tmp_path, monkeypatch):
    before = replace(model(), name="before")
    save_model(before, tmp_path)
    write = Path.write_text

    def full(path, *more, **options):
        if path.name == "model.json":
            raise OSError(28, "No space left on device")
        return write(path, *more, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OutputError, match=r"model\.json: cannot be written \(No space left on device\)"):
        save_model(replace(model(), refiner=None), tmp_path)
    assert load_model(tmp_path).name == "before"
    assert len(list(tmp_path.iterdir())) == 2
