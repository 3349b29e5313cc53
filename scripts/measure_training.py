"""What each memory trick of training saves, and costs: one stage-2 step on a whole single-lung crop.

    python scripts/measure_training.py                     # on a GPU where there is one, else on the processor
    python scripts/measure_training.py --rows plain all    # some rows only

Every row is a process of its own, so that peaks do not mix: one step to warm up, then the measured ones. On CUDA the
peak is what torch allocated; on a processor what the process's resident memory grew by at its largest. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

SHAPE = (160, 224, 320)
RECIPE = Path(__file__).parent.parent / "configs" / "stage2.toml"


@dataclass(frozen=True)
class Tricks:
    """What a row switches on; all off is the plain step in float32.

    Attributes:
        batch: crops of a step.
        micro_batch: crops that go through together.
    """

    inplace: bool = False
    channels_last: bool = False
    amp: bool = False
    checkpointing: bool = False
    optimiser: str = "adamw"
    batch: int = 1
    micro_batch: int = 1


ALL = Tricks(inplace=True, channels_last=True, amp=True, checkpointing=True)
ROWS = {
    "plain": ("plain float32, AdamW", Tricks()),
    "inplace": ("in-place activations", Tricks(inplace=True)),
    "channels_last": ("channels-last", Tricks(channels_last=True)),
    "amp": ("AMP (bf16)", Tricks(amp=True)),
    "checkpointing": ("checkpointing", Tricks(checkpointing=True)),
    "adafactor": ("Adafactor", Tricks(optimiser="adafactor")),
    "sgd": ("SGD", Tricks(optimiser="sgd")),
    "shipped": ("in-place, channels-last, AMP", replace(ALL, checkpointing=False)),
    "all": ("in-place, channels-last, AMP, checkpointing", ALL),
    "all_adafactor": ("the same with Adafactor", replace(ALL, optimiser="adafactor")),
    "two_at_once": ("all, two crops at once", replace(ALL, batch=2, micro_batch=2)),
    "two_accumulated": ("all, two crops accumulated", replace(ALL, batch=2)),
}


def main() -> None:
    """Measures every row in a new process and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--steps", type=int, default=2, help="measured ones; 0: memory alone")
    parser.add_argument("--shape", type=int, nargs=3, default=SHAPE)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(Tricks(**json.loads(options.one)), options.shape, options.steps, options.device)))
        return
    print("| | peak memory, GB | seconds a step | device |\n|---|---|---|---|", flush=True)
    for row in options.rows:
        title, tricks = ROWS[row]
        print(f"| {title} | {_cells(tricks, options)} |", flush=True)


def _cells(tricks: Tricks, options: argparse.Namespace) -> str:
    command = [sys.executable, __file__, "--one", json.dumps(asdict(tricks)), "--steps", str(options.steps)]
    command += ["--device", options.device, "--shape", *map(str, options.shape)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1][:80] if done.stderr.strip() else 'killed'} | | "
    found = json.loads(done.stdout.splitlines()[-1])
    return f"{found['peak_gb']:.2f} | {found['seconds']:.2f} | {found['device']}"


def measured(tricks: Tricks, shape: tuple[int, ...], steps: int, device: str) -> dict[str, object]:
    """Peak memory and median time of a step."""
    import torch

    from cascadeseg.cascade.pipeline import peak_memory_mb
    from cascadeseg.network.engine import find_device

    place = find_device(device)
    on_gpu = place.type == "cuda"
    step = _step_of(tricks, shape, place)
    before = peak_memory_mb()
    seconds = []
    for number in range(steps + 1):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        if number:
            seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else (peak_memory_mb() - before) / 2**10
    name = torch.cuda.get_device_name(place) if on_gpu else f"processor, {torch.get_num_threads()} threads"
    return {"peak_gb": peak, "seconds": statistics.median(seconds) if seconds else math.nan, "device": name}


def _step_of(tricks, shape, place):  # type: ignore[no-untyped-def]
    """A function that takes one optimiser step over random crops."""
    import torch

    from cascadeseg import config
    from cascadeseg.network import UNet
    from cascadeseg.training.config import OptimisationConfig, TrainingConfig
    from cascadeseg.training.loss import supervised_loss
    from cascadeseg.training.optimiser import optimiser_of

    torch.manual_seed(0)
    network = UNet(config.load(RECIPE, TrainingConfig).unet, checkpoint_blocks=tricks.checkpointing).to(place).train()
    layout = torch.channels_last_3d if tricks.channels_last else torch.contiguous_format
    network = network.to(memory_format=layout)
    for module in network.modules():
        if isinstance(module, torch.nn.ReLU):
            module.inplace = tricks.inplace
    optimiser = optimiser_of(network, OptimisationConfig(optimiser=tricks.optimiser))

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        for _ in range(tricks.batch // tricks.micro_batch):
            image = torch.rand((tricks.micro_batch, 2, *shape), device=place).contiguous(memory_format=layout)
            labels = (image[:, 0] > 0.5).to(torch.uint8)
            with torch.autocast(place.type, torch.bfloat16, enabled=tricks.amp):
                logits = network(image)
            loss, _ = supervised_loss(logits, labels)
            (loss * tricks.micro_batch / tricks.batch).backward()
        optimiser.step()

    return step


if __name__ == "__main__":
    main()
