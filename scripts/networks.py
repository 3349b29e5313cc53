"""What the networks cost: layer by layer (torchinfo), or variants of them against the stopwatch.

    python scripts/networks.py [--model DIR] [--stage 1|2] [--shape X Y Z] [--depth N]
    python scripts/networks.py --variants [--stage 1|2] [--shape X Y Z] [--engine torch] [--runs 5] [--json FILE]

Variants change one thing each of the shipped networks: width, depth, bottleneck, norm, stem, deep supervision. Each
runs in a process of its own, with weights of chance, on one image of typical shape; what is told is the median of the
runs after the first, and how much the process's peak memory grew by all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cascadeseg.network import Stage, UNet, UNetConfig, load_model, stage_of

Shape = tuple[int, int, int]
SHAPES: dict[int, Shape] = {1: (176, 176, 176), 2: (176, 240, 304)}
"""A chest at 2 mm, and one lung at 1 mm."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; default: the shipped one")
    parser.add_argument("--stage", type=int, choices=(1, 2), help="default: both")
    parser.add_argument("--shape", type=int, nargs=3, help="of the image; default: a typical one")
    parser.add_argument("--depth", type=int, default=2, help="how deep to look into blocks; default 2")
    parser.add_argument("--variants", action="store_true", help="time variants instead")
    parser.add_argument("--engine", default="auto", help="auto, torch or openvino; variants only")
    parser.add_argument("--device", default="cpu", help="variants only; default cpu")
    parser.add_argument("--threads", type=int, default=0, help="variants only; default: torch's own")
    parser.add_argument("--runs", type=int, default=5, help="variants only; default 5")
    parser.add_argument("--json", type=Path, help="variants only: also write the rows here")
    options = parser.parse_args()
    model = load_model(options.model)
    rows: list[dict[str, Any]] = []
    for number, stage in ((1, model.locator), (2, model.refiner)):
        if stage is None or options.stage not in (None, number):
            continue
        shape = tuple(options.shape or SHAPES[number])
        if options.variants:
            rows += timed_variants(number, stage, shape, options)
        else:
            print(f"\nStage {number}: {stage.unet}")
            print(described(stage, shape, options.depth))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def described(stage: Stage, shape: tuple[int, ...], depth: int) -> str:
    """The table of one network for an image (X, Y, Z), a multiple of its stride."""
    from torchinfo import summary

    network = stage.network().eval()
    columns = ("output_size", "num_params", "mult_adds")
    return str(summary(network, (1, stage.unet.in_channels, *shape), depth=depth, col_names=columns, verbose=0))


def variants(base: UNetConfig) -> dict[str, UNetConfig]:
    """Networks that differ from one in one thing each, by what differs."""
    half, more = (tuple(int(factor * width) for width in base.widths) for factor in (0.5, 1.5))
    full_resolution = (max(8, base.widths[0] // 4), *(width // 2 for width in base.widths))
    other: Literal["residual", "bottleneck"] = "residual" if base.block == "bottleneck" else "bottleneck"
    named = {
        "as shipped": base,
        "half the width": replace(base, widths=half),
        "1.5 times the width": replace(base, widths=more),
        "a level less": replace(base, widths=base.widths[:-1]),
        "a level more": replace(base, widths=(*base.widths, 2 * base.widths[-1])),
        "a block more": replace(base, blocks=base.blocks + 1),
        f"{other} blocks": replace(base, block=other),
        "instance norm": replace(base, norm="instance"),
        "voxel stem, a level more": replace(base, stem="convolution", widths=full_resolution),
        "deep supervision (training only)": replace(base, deep_supervision=True),
    }
    if base.block == "bottleneck":
        named["bottleneck ratio 4"] = replace(base, bottleneck_ratio=4)
    return named


def timed_variants(
    number: int, stage: Stage, shape: tuple[int, ...], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Prints the table of one stage's variants as they are timed; returns its rows."""
    print(f"\nStage {number}, {' x '.join(map(str, shape))} voxels\n")
    print("| network | parameters, millions | median s | peak memory, MB | engine |\n|---|---|---|---|---|", flush=True)
    rows = []
    for name, unet in variants(stage.unet).items():
        # A new process for each: peak memory cannot be set back.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(timed, (replace(stage, unet=unet, weights={}), shape, options))
        rows.append({"stage": number, "network": name, "shape": shape, **row})
        seconds = f"{row['seconds']:.3f}"
        print(
            f"| {name} | {row['parameters'] / 1e6:.2f} | {seconds} | {row['peak_mb']:.0f} | {row['engine']} |",
            flush=True,
        )
    return rows


def timed(stage: Stage, shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and memory of one network's forward pass. Runs in a process of its own."""
    import torch

    from cascadeseg.cascade.pipeline import peak_memory_mb
    from cascadeseg.network.bounded import open_engine

    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    torch.manual_seed(0)
    network = UNet(stage.unet)
    engine = open_engine(stage_of(stage.view, network), device, kind=options.engine)
    image = torch.rand((stage.unet.in_channels, *shape), device=device)
    before, seconds = peak_memory_mb(), []
    for _ in range(options.runs + 1):
        began = time.perf_counter()
        engine(image)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    on_gpu = torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else 0.0
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "seconds": statistics.median(seconds[1:]),
        "peak_mb": on_gpu or peak_memory_mb() - before,
        "engine": f"{type(engine).__name__} {engine.precision}",
    }


if __name__ == "__main__":
    main()
