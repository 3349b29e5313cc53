"""Whether the body lies as the header says.

A header can be wrong, and then right and left are: slices sorted from the wrong end, an array written with its axes
exchanged or without its directions, a mirror image, feet first called head first. No voxel tells, but the body does:
the heart lies on the left, the spine behind, the liver below. A small network, trained on synthetic patients
(``scripts/train_orientation.py``), sees the chest coarsely in all 48 ways in which three axes can be exchanged and
turned round, and says how upright each of them looks. It never changes a mask: it asks for a look at the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from cascadeseg.cascade.crop import LungBox
from cascadeseg.cascade.resample import resample_scan, windows_of
from cascadeseg.errors import ModelError
from cascadeseg.formats.scan import Scan, sampled_hu
from cascadeseg.geometry import AWAY, TOWARDS, Affine, Box, Grid
from cascadeseg.network.model import View, shipped_model

CUBE = 40
"""Voxels along each side of what the network sees."""
VIEW = View(spacing_mm=8.0, tissue_low_hu=-150.0, tissue_high_hu=350.0)
WIDTHS = (8, 24, 64)
LEAST_ML = 80.0
"""Of lung, to tell anything from."""
DOUBT = 0.01
"""A header of less likelihood is doubted ..."""
DEFINITE = 0.5
"""... where another way has at least this: of what looks like no chest at all nobody can tell how it lies."""
FILE = "orientation.safetensors"
UNLIKE_THE_HEADER = "the body seems to lie otherwise than the header says"
OPPOSITE = str.maketrans(TOWARDS + AWAY, AWAY + TOWARDS)
Turn = tuple[tuple[int, ...], tuple[bool, ...]]
TURNS: tuple[Turn, ...] = tuple(
    (order, flips) for order in permutations(range(3)) for flips in product((False, True), repeat=3)
)
"""All that can be done to three axes: axis ``order[w]`` becomes axis ``w``, reversed where ``flips[w]``. The first
leaves them as they are."""


@dataclass(frozen=True)
class Orientation:
    """How a body lies in its scan.

    Attributes:
        header: where each array axis grows to, as the header has it: ``RAS`` is right, anterior, superior.
        body: the same by what the chest looks like.
        likelihood: of ``body``, among all 48, 0 to 1.
        header_likelihood: of ``header``.
    """

    header: str
    body: str
    likelihood: float
    header_likelihood: float

    @property
    def doubtful(self) -> bool:
        """Whether the header is hardly right, and something else is."""
        return bool(is_doubtful(self.header_likelihood, self.likelihood))

    @property
    def words(self) -> str:
        """What to tell of a doubtful one."""
        sides = dict(zip(self.header, self.body, strict=True))
        right = sides["R"] if "R" in sides else sides["L"].translate(OPPOSITE)
        what = {"R": "", "L": "right and left are exchanged; "}.get(right, "right and left mean nothing; ")
        said, seen = (", ".join(codes) for codes in (self.header, self.body))
        return (
            f"the header says that the axes of the voxels grow towards {said}, the body looks as if they grew "
            f"towards {seen}: if so, {what}correct the header"
        )


def is_doubtful(header: float | Tensor, likeliest: float | Tensor) -> bool | Tensor:
    """Whether a header is doubted, by its own likelihood and by the largest one; of one scan or of many."""
    return (header < DOUBT) & (likeliest >= DEFINITE)


class Uprightness(nn.Module):
    """(B, 2, n, n, n) chests on `CUBE` voxels a side to (B,): how upright each looks, in log-odds of some zero."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = VIEW.channels
        for width in WIDTHS:
            layers += [nn.Conv3d(channels, width, 3, stride=2, padding=1), nn.ReLU()]
            channels = width
        layers += [nn.Conv3d(channels, channels, 3, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(channels * (CUBE // 2 ** len(WIDTHS)) ** 3, 1)

    def forward(self, cubes: Tensor) -> Tensor:
        cubes = cubes.contiguous(memory_format=torch.channels_last_3d)  # twice as fast on a processor
        upright: Tensor = self.head(self.dropout(self.body(cubes).flatten(1)))[:, 0]
        return upright


def turned(cubes: Tensor, turn: Turn) -> Tensor:
    """(..., X, Y, Z) with its last three axes exchanged and reversed."""
    order, flips = turn
    first = cubes.ndim - 3
    cubes = cubes.permute(*range(first), *(first + axis for axis in order))
    return cubes.flip([first + axis for axis in range(3) if flips[axis]])


def chest_cube(scan: Scan, centre_mm: Affine, spacing_mm: float = VIEW.spacing_mm) -> Tensor:
    """(2, n, n, n) what the network sees of a canonical scan: all windowed HU, and those of soft tissue once more.

    Args:
        scan: canonical, `sampled_hu` of a larger one, too.
        centre_mm: of the box around both lungs.
        spacing_mm: other than usual in training, to vary sizes.
    """
    affine = np.eye(4)
    affine[:3, :3] = scan.grid.directions * spacing_mm
    affine[:3, 3] = centre_mm - affine[:3, :3] @ np.full(3, (CUBE - 1) / 2)
    image = resample_scan(scan, Grid((CUBE,) * 3, affine), VIEW, torch.device("cpu"))
    return windows_of(image[None], VIEW)


def orientation_of(scan: Scan, lungs: Sequence[LungBox], grid: Grid) -> Orientation | None:
    """How the body lies in a scan; None where no lung was found.

    Args:
        scan: canonical.
        lungs: boxes around the lungs in it.
        grid: the scan's own, its axes as the file has them.
    """
    if not lungs:
        return None
    around = Box.around([lung.box for lung in lungs])
    centre = lungs[0].grid.world(around.middle)
    hu, sampled = sampled_hu(scan)
    seen = replace(scan, voxels=hu, grid=sampled, slope=1.0, intercept=0.0)
    likelihoods = likelihoods_of(chest_cube(seen, centre), shipped())
    best = int(likelihoods.argmax())
    header = grid.orientation
    return Orientation(header, looked_like(header, TURNS[best]), float(likelihoods[best]), float(likelihoods[0]))


@torch.inference_mode()
def likelihoods_of(cube: Tensor, network: Uprightness) -> Tensor:
    """(2, n, n, n) to (48,): how likely it is that each of `TURNS` makes the chest upright."""
    by_order = [torch.stack([turned(cube, turn) for turn in TURNS[n : n + 8]]) for n in range(0, len(TURNS), 8)]
    return torch.softmax(torch.cat([network(cubes) for cubes in by_order]), dim=0)


def looked_like(header: str, turn: Turn) -> str:
    """The letters of a header's axes where a turn makes the body upright."""
    order, flips = turn
    letters = {TOWARDS[axis]: (TOWARDS, AWAY)[flips[world]][world] for world, axis in enumerate(order)}
    letters |= {here.translate(OPPOSITE): there.translate(OPPOSITE) for here, there in letters.items()}
    return "".join(letters[letter] for letter in header)


@lru_cache(maxsize=1)
def shipped() -> Uprightness:
    """The network in the package, read once.

    Raises:
        ModelError: its file is missing or damaged.
    """
    network, path = Uprightness(), shipped_model() / FILE
    try:
        weights = load_tensors(path.read_bytes())
        network.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    except (OSError, RuntimeError, SafetensorError) as error:
        found = f"weights that cannot be read ({str(error).splitlines()[0]})"
        raise ModelError(path, found, "those that the package came with", "install cascadeseg again") from error
    return network.eval()
