"""What each memory trick of training saves, and costs: one stage-2 step on a whole single-lung crop.

    python scripts/measure_training.py                     # on a GPU where there is one, else on the processor
    python scripts/measure_training.py --write docs/training.md
    python scripts/measure_training.py --rows plain all --shape 64 64 64

Every row is a process of its own, so that peaks do not mix: one step to warm up, then the measured ones. On CUDA the
peak is what torch allocated; on a processor what the process's resident memory grew by at its largest. Prints a
Markdown table; with ``--write`` it also replaces the one of the same kind of device in a page.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

SHAPE = (160, 224, 320)
RECIPE = Path(__file__).parent.parent / "configs" / "stage2.toml"


@dataclass(frozen=True)
class Tricks:
    """What a row switches on; all off is the plain step in float32.

    Attributes:
        batch: crops of a step.
        micro_batch: crops that go through together.
    """

    channels_last: bool = False
    amp: bool = False
    checkpointing: bool = False
    optimiser: Literal["adamw", "sgd", "adafactor"] = "adamw"
    batch: int = 1
    micro_batch: int = 1


PLAIN = Tricks()
SHIPPED = Tricks(channels_last=True, amp=True)
ALL = replace(SHIPPED, checkpointing=True)
ROWS = {
    "plain": ("plain: float32, AdamW", PLAIN),
    "channels_last": ("channels-last", Tricks(channels_last=True)),
    "amp": ("AMP (bf16)", Tricks(amp=True)),
    "checkpointing": ("checkpointing", Tricks(checkpointing=True)),
    "sgd": ("SGD", Tricks(optimiser="sgd")),
    "adafactor": ("Adafactor", Tricks(optimiser="adafactor")),
    "shipped": ("channels-last, AMP (the shipped recipe)", SHIPPED),
    "all": ("the same with checkpointing", ALL),
    "all_adafactor": ("the same with checkpointing and Adafactor", replace(ALL, optimiser="adafactor")),
    "two_at_once": ("two crops at once, plain", replace(PLAIN, batch=2, micro_batch=2)),
    "two_accumulated": ("two crops accumulated, plain", replace(PLAIN, batch=2)),
    "all_two_at_once": ("two crops at once, all but Adafactor", replace(ALL, batch=2, micro_batch=2)),
    "all_two_accumulated": ("two crops accumulated, all but Adafactor", replace(ALL, batch=2)),
}
COLUMNS = ("", "peak memory, GB", "of the plain step", "seconds a step")


def main() -> None:
    """Measures every row in a new process and prints the table."""
    options = _options()
    if options.one:
        print(json.dumps(measured(Tricks(**json.loads(options.one)), options.shape, options.steps, options.device)))
        return
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    print(*lines, sep="\n", flush=True)
    plain_gb, devices = math.nan, set()
    for row in options.rows:
        title, tricks = ROWS[row]
        found = _in_new_process(tricks, options)
        if row == "plain":
            plain_gb = found.get("peak_gb", math.nan)
        devices |= {found["device"]} if "device" in found else set()
        lines.append(f"| {title} | {_cells(found, plain_gb)} |")
        print(lines[-1], flush=True)
    shape = " x ".join(map(str, options.shape))
    lines += ["", f"{shape} voxels, {' and '.join(sorted(devices)) or 'nothing measured'}."]
    print(*lines[-2:], sep="\n")
    if options.write and devices:
        _write(options.write, "processor" if any("processor" in name for name in devices) else "cuda", lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=2, help="measured ones; 0: memory alone")
    parser.add_argument("--shape", type=int, nargs=3, default=SHAPE)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table in this Markdown page")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_new_process(tricks: Tricks, options: argparse.Namespace) -> dict[str, Any]:
    """What a row's process measured, or ``failed``: why there is nothing."""
    command = [sys.executable, __file__, "--one", json.dumps(asdict(tricks)), "--steps", str(options.steps)]
    command += ["--device", options.device, "--shape", *map(str, options.shape)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return {"failed": said[-1][:80] if said else "killed: out of memory?"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _cells(found: dict[str, Any], plain_gb: float) -> str:
    if "failed" in found:
        return f"{found['failed']} | | "
    share = "" if math.isnan(plain_gb) else f"{found['peak_gb'] / plain_gb:.0%}"
    seconds = "" if math.isnan(found["seconds"]) else f"{found['seconds']:.2f}"
    return f"{found['peak_gb']:.2f} | {share} | {seconds}"


def _write(page: Path, kind: str, lines: list[str]) -> None:
    """Puts the table between the page's marks of its kind of device."""
    begin, end = f"<!-- memory on {kind} -->", f"<!-- end of memory on {kind} -->"
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        sys.exit(f"{page}: expected a place for the table between {begin} and {end}")
    table = "\n".join([begin, "", *lines, "", end])
    page.write_text(re.sub(f"{begin}.*?{end}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


def measured(tricks: Tricks, shape: tuple[int, ...], steps: int, device: str) -> dict[str, object]:
    """Peak memory and median time of a step."""
    import torch

    from cascadeseg.memory import keep_freed_memory, peak_memory_mb
    from cascadeseg.network.engine import find_device

    keep_freed_memory()
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
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else (peak_memory_mb() - before) / 1e3
    name = torch.cuda.get_device_name(place) if on_gpu else f"processor, {torch.get_num_threads()} threads"
    return {"peak_gb": peak, "seconds": statistics.median(seconds) if seconds else math.nan, "device": name}


def _step_of(tricks: Tricks, shape: tuple[int, ...], place: torch.device) -> Callable[[], None]:
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
    network = network.to(memory_format=layout)  # type: ignore[call-overload]
    optimiser = optimiser_of(network, OptimisationConfig(optimiser=tricks.optimiser))

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        for _ in range(tricks.batch // tricks.micro_batch):
            image = torch.rand((tricks.micro_batch, 2, *shape), device=place).contiguous(memory_format=layout)
            labels = (image[:, 0] > 0.5).to(torch.uint8)
            with torch.autocast(place.type, torch.bfloat16, enabled=tricks.amp):
                logits = network(image)
            loss, _ = supervised_loss(logits, labels)
            torch.autograd.backward(loss * tricks.micro_batch / tricks.batch)
        optimiser.step()

    return step


if __name__ == "__main__":
    main()
