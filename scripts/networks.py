"""Parameters, activations and multiply-adds of both networks, layer by layer (torchinfo).

python scripts/networks.py [--model DIR] [--stage 1|2] [--shape X Y Z] [--depth N]
"""

from __future__ import annotations

import argparse

from torchinfo import summary

from cascadeseg.network import Stage, load_model

SHAPES = {1: (176, 176, 176), 2: (176, 240, 304)}
"""A chest at 2 mm, and one lung at 1 mm."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; default: the shipped one")
    parser.add_argument("--stage", type=int, choices=(1, 2), help="default: both")
    parser.add_argument("--shape", type=int, nargs=3, help="of the image; default: a typical one")
    parser.add_argument("--depth", type=int, default=2, help="how deep to look into blocks; default 2")
    options = parser.parse_args()
    model = load_model(options.model)
    for number, stage in ((1, model.locator), (2, model.refiner)):
        if stage is not None and options.stage in (None, number):
            print(f"\nStage {number}: {stage.unet}")
            print(described(stage, tuple(options.shape or SHAPES[number]), options.depth))


def described(stage: Stage, shape: tuple[int, ...], depth: int) -> str:
    """The table of one network for an image (X, Y, Z), a multiple of its stride."""
    network = stage.network().eval()
    columns = ("output_size", "num_params", "mult_adds")
    return str(summary(network, (1, stage.unet.in_channels, *shape), depth=depth, col_names=columns, verbose=0))


if __name__ == "__main__":
    main()
