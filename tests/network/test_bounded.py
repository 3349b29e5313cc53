from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cascadeseg.network import Engine, UNet, UNetConfig, View, bounded, load_model, shipped_model, stage_of
from cascadeseg.network.bounded import BoundedEngine, pass_mb
from cascadeseg.network.engine import fast_precision, padded_to
from cascadeseg.network.slabs import Layers
from cascadeseg.network.streams import FINISHED_VOXELS

CPU = torch.device("cpu")
SMALL = UNetConfig(2, 1, widths=(4, 8, 16), block="bottleneck")


def stage(config: UNetConfig = SMALL):
    torch.manual_seed(0)
    network = UNet(config)
    network.train()
    for _ in range(3):
        network(torch.randn(1, config.in_channels, 16, 16, 24))
    return stage_of(View(1.0, prior=config.in_channels == 2), network.eval())


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, block="residual", blocks=2), replace(SMALL, stem="convolution")]
)
def test_reach_is_as_far_as_an_input_matters(config):
    network = stage(config).network().double().eval()
    depth, middle = 2 * config.context + config.stride, config.context
    image = torch.randn(1, 2, 16, 16, depth, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(network(image)[..., middle].sum(), image)[0]
    seen = torch.nonzero(gradient.abs().amax(dim=(0, 1, 2, 3))).flatten()
    assert int((seen - middle).abs().max()) <= config.reach


def test_tiles_equal_the_whole():
    engine = BoundedEngine(stage(), CPU, "fp32")
    image = torch.randn(2, 20, 17, 190)
    whole = engine(image)
    engine.largest_tile = 20 * 17 * (2 * SMALL.context + 24)
    assert engine.tile_length(image.shape) == 24
    assert torch.allclose(engine(image), whole, atol=1e-5)
    assert torch.equal(engine(Layers((2, 20, 17, 190), lambda z: image[..., z])), engine(image))


@pytest.mark.parametrize(
    "config",
    [SMALL, replace(SMALL, blocks=3), replace(SMALL, block="residual", blocks=2), replace(SMALL, stem="convolution")],
)
def test_levels_in_streams_equal_the_whole(monkeypatch, config):
    monkeypatch.setattr("cascadeseg.network.streams.PIECE_VOXELS", 1)
    monkeypatch.setattr("cascadeseg.network.streams.THINNEST_PIECE", 1)
    image = torch.randn(2, 17, 20, 90)
    engine = Engine(stage(config), CPU, "fp32")
    network = engine.stage.network().eval()
    with torch.inference_mode():
        whole = network(padded_to(image, config.stride)[0][None])[0, :, :17, :20, :90]
    assert torch.allclose(engine(image), whole, atol=1e-4)
    assert torch.allclose(engine(image, torch.sigmoid), whole.sigmoid(), atol=1e-4)
    made = Layers((2, 17, 20, 90), lambda z: image[..., z])
    assert torch.equal(engine(made), engine(image))


def test_streams_stay_on_their_device():
    engine = Engine(stage(), torch.device("meta"), "fp32")  # which refuses to be mixed with others, as a GPU does
    assert not engine.streamed
    image = torch.empty(2, 17, 20, 90, device="meta")
    whole = engine(image)
    engine.streamed = True
    made = Layers((2, 17, 20, 90), lambda z: image[..., z])
    for streamed in (engine(image), engine(made, torch.sigmoid)):
        assert (streamed.device, streamed.shape, streamed.dtype) == (whole.device, whole.shape, whole.dtype)


@pytest.mark.parametrize(
    ("precision", "streamed"),
    [
        ("fp32", True),
        ("fp32", False),
        pytest.param(
            *("bf16", False),
            marks=pytest.mark.skipif(
                fast_precision(CPU) != "bf16",
                reason="a processor that multiplies no bfloat16 does it in float32 copies",
            ),
        ),
    ],
)
@pytest.mark.parametrize("name", ["locator", "refiner"])
@pytest.mark.parametrize("shape", [(160, 144, 64), (96, 96, 224)])
def test_a_plan_has_room_for_all_tensors_of_a_pass(name, shape, precision, streamed):
    """However many classes a network tells apart: what is kept of them are halves, of one lung or both."""
    engine = Engine(getattr(load_model(shipped_model()), name), CPU, precision)
    engine.streamed = streamed
    image = Layers((2, *shape), lambda z: torch.zeros(2, *shape[:2], z.stop - z.start))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        engine(image, lambda logits: logits.softmax(dim=0)[:2].half())
    changes = [event.nbytes() for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak_mb = float(np.cumsum(changes).max()) / 1e6
    planned_mb = pass_mb(engine, prod(shape), shape[0] * shape[1])
    assert peak_mb <= planned_mb < 5 * peak_mb


@pytest.mark.parametrize("streamed", [True, False])
def test_logits_are_made_and_finished_few_at_a_time(streamed):
    """In float32, of all classes, they would take more memory than all else in a pass."""
    engine = Engine(load_model(shipped_model()).locator, CPU, "fp32")
    engine.streamed = streamed
    made, headed = [], engine._network.headed
    engine._network.headed = lambda features: made.append(headed(features)) or made[-1]
    engine(torch.zeros(2, 160, 144, 64), lambda logits: logits[:1])
    assert sum(logits.shape[2] for logits in made) == 64
    assert max(logits[0, 0].numel() for logits in made) <= FINISHED_VOXELS


class Starved:
    """An engine that has no memory for images longer than ``longest`` slices."""

    shareable = False
    streamed = True

    def __init__(self, longest: int, error: Exception) -> None:
        self.stage, self.device, self.precision = stage(), CPU, "fp32"
        self.longest, self.error, self.seen = longest, error, []

    def __call__(self, image, finish):
        self.seen.append(image.shape[3])
        if image.shape[3] > self.longest:
            raise self.error
        return finish(image[:1])


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_memory_that_runs_out_leads_to_smaller_tiles(error):
    engine = BoundedEngine(stage(), CPU, "fp32")
    engine._engine = Starved(150, error)
    image = torch.randn(2, 8, 8, 256)
    assert torch.equal(engine(image), image[:1])
    assert engine.notes[-1] == "cpu ran out of memory; went on with stage of 1 mm in tiles of 64 slices"


def test_the_next_image_of_a_scan_begins_with_the_tiles_that_the_last_one_ended_with():
    engine = BoundedEngine(stage(), CPU, "fp32")
    engine._engine = starved = Starved(150, MemoryError())
    engine(torch.randn(2, 8, 8, 256))
    assert len(engine.notes) == 2, "tiles of 128 slices, then of 64"
    starved.seen = []
    image, wider = torch.randn(2, 8, 8, 240), torch.randn(2, 8, 10, 240)
    assert torch.equal(engine(image), image[:1])
    assert engine.tile_length(wider.shape) < engine.tile_length(image.shape) == 64
    assert torch.equal(engine(wider), wider[:1])
    assert max(starved.seen) <= 150, "no image ran into the limit again"
    assert len(engine.notes) == 2
    following = engine.for_one_scan(streamed=True)
    assert following.tile_length((2, 8, 8, 256)) == 256


def test_another_engine_begins_with_the_tiles_of_the_plan(monkeypatch):
    engine, _ = starved_on_a_gpu("bf16")
    instead = Starved(256, MemoryError())
    monkeypatch.setattr(bounded, "Engine", lambda *_: instead)
    engine.largest_tile = 16 * 16 * (2 * SMALL.context + 24)
    image = torch.empty(2, 16, 16, 190, device="meta")
    engine(image)
    assert engine.notes[-1].endswith("the processor")
    assert max(instead.seen) == 2 * SMALL.context + 24
    assert engine.tile_length(image.shape) == 24


def test_a_gpu_whose_memory_runs_out_goes_on_a_few_slices_at_a_time():
    engine = BoundedEngine(stage(), CPU, "fp32")
    starved = Starved(100, torch.OutOfMemoryError("CUDA out of memory"))
    starved.device, starved.streamed = torch.device("meta"), False
    engine._engine = starved
    image = torch.randn(2, 8, 8, 256)
    assert torch.equal(engine(image), image[:1])
    assert starved.streamed
    assert starved.seen[:2] == [256, 256]
    assert engine.notes[0] == "meta ran out of memory; went on with stage of 1 mm a few slices at a time"


def test_other_errors_are_not_taken_for_memory():
    engine = BoundedEngine(stage(), CPU, "fp32")
    engine._engine = Starved(0, RuntimeError("a fault of our own"))
    with pytest.raises(RuntimeError, match="a fault of our own"):
        engine(torch.randn(2, 8, 8, 8))


@pytest.mark.parametrize(
    "said",
    [
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.",
        "MPS backend out of memory (MPS allocated: 5.56 GB, max allowed: 6.80 GB). Tried to allocate 768.00 MB",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_memory_that_runs_out_is_known_by_what_libraries_say(said):
    engine = BoundedEngine(stage(), CPU, "fp32")
    engine._engine = Starved(150, RuntimeError(said))
    assert engine(torch.randn(2, 8, 8, 256)).shape == (1, 8, 8, 256)
    assert engine.notes


def test_memory_of_mps_is_given_back_before_another_try(monkeypatch):
    given_back = []
    monkeypatch.setattr("torch.mps.empty_cache", lambda: given_back.append(True))
    engine, starved = starved_on_a_gpu("fp16")
    engine.device, starved.longest = torch.device("mps"), 150
    engine(torch.empty(2, 8, 8, 256, device="meta"))
    assert given_back


def test_memory_too_small_for_anything_is_said():
    engine = BoundedEngine(stage(), CPU, "fp32")
    engine._engine = Starved(0, MemoryError("no"))
    with pytest.raises(MemoryError):
        engine(torch.randn(2, 8, 8, 256))


class ZerosFromMeta(TorchDispatchMode):
    """What lies on the meta device, which stands for a GPU, can be moved to the processor; it holds zeros."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.to.device and args[0].is_meta and args[1] == CPU:
            args = (torch.zeros(args[0].shape, dtype=args[0].dtype), *args[1:])
        return func(*args, **kwargs or {})


def starved_on_a_gpu(precision: str) -> tuple[BoundedEngine, Starved]:
    engine = BoundedEngine(stage(), CPU, "fp32")
    starved = Starved(0, torch.OutOfMemoryError("CUDA out of memory"))
    engine.device = starved.device = torch.device("meta")
    starved.precision = precision
    engine._engine = starved
    return engine, starved


@pytest.mark.parametrize("streamed", [True, False])
def test_the_gpus_ladder_ends_on_the_processor(streamed):
    engine, starved = starved_on_a_gpu("bf16")
    starved.streamed = streamed
    image = Layers((2, 17, 16, 16), lambda z: torch.empty(2, 17, 16, z.stop - z.start, device="meta"))
    with ZerosFromMeta():
        logits, again = engine(image), engine(image[..., :])
    assert torch.equal(logits, Engine(engine.stage, CPU)(torch.zeros(2, 17, 16, 16)))
    assert torch.equal(logits, again)
    assert engine.notes[-1].endswith("went on with the processor")
    assert len(engine.notes) == 1 + (not streamed)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_next_scan_begins_with_the_engine_that_was_chosen(precision):
    engine, starved = starved_on_a_gpu(precision)
    image = torch.empty(2, 16, 16, 16, device="meta")
    with ZerosFromMeta():
        engine(image)
    assert engine.notes
    starved.longest, starved.seen = 100, []
    following = engine.for_one_scan(streamed=False)
    assert not following.notes
    assert not following.streamed
    assert following(image).device == starved.device
    assert starved.seen == [16]


def test_scans_at_the_same_time_share_the_network_and_nothing_else():
    engine = BoundedEngine(stage(), CPU, "fp32")
    starved = Starved(100, torch.OutOfMemoryError("CUDA out of memory"))
    starved.device, starved.streamed = torch.device("meta"), False
    engine._engine = starved
    large, small = engine.for_one_scan(streamed=False, largest_tile=1e9), engine.for_one_scan(streamed=False)
    large(torch.randn(2, 8, 8, 256))
    assert [len(one.notes) > 0 for one in (engine, large, small)] == [False, True, False]
    assert [one.streamed for one in (engine, large, small)] == [False, True, False]
    assert [one.largest_tile for one in (engine, large, small)] == [np.inf, 1e9, np.inf]


def test_a_network_is_in_memory_once():
    engine = BoundedEngine(stage(), CPU, "fp32")
    assert engine.for_one_scan(streamed=True)._engine._network is engine._engine._network
