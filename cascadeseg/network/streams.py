"""A UNet's finest levels as streams along z: nothing is computed twice, and only their skips stay in memory.

The finest levels hold most of a forward pass's memory. Here they work on a few slices at a time, one piece after the
other: each 3x3x3 convolution remembers the last two slices that it saw, so that the pieces together equal the whole.
Slabs that overlap would compute up to half of these levels twice.

In here tensors are (1, C, Z, Y, X), and the network is transposed: a few slices then lie in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from cascadeseg.geometry import Shape
from cascadeseg.memory import give_back_freed_memory
from cascadeseg.network.blocks import BottleneckBlock, ResidualBlock, space_to_depth
from cascadeseg.network.slabs import Finish, Image
from cascadeseg.network.unet import UNet, UNetConfig

Slices = Callable[[slice], Tensor]
"""A range of slices to (1, C, z, Y, X)."""
PIECE_VOXELS = 500_000
"""Voxels of the image that are in work at any one time, about: fewer take less memory and more time."""
FINISHED_VOXELS = 100_000
"""Voxels whose logits are in memory at any one time, about: they fit a processor's cache."""
STREAMED_LEVELS = 2
NARROWER = 16
"""Samples of a coarser level hold more: 8 of the finer level's, and twice their channels."""
THINNEST_PIECE = 8
"""Samples along z; of thinner pieces too much would be remembered slices."""
ROOMY_MB = 1000.0
"""What a smaller process freed it may keep between levels: to give it back and fetch it again takes time."""
FLAT = (0, 1, 1)
"""Padding of convolutions whose neighbours along z are there."""


def streamed_levels(config: UNetConfig) -> int:
    """How many levels are streams; none where InstanceNorm has to see all voxels at once."""
    return min(STREAMED_LEVELS, len(config.widths) - 1) if config.norm == "batch" else 0


def in_streams(network: UNet, image: Image, finish: Finish) -> Tensor:
    """Runs a network over an image, its finest levels as streams.

    Args:
        network: folded, transposed (`UNet.transpose`); it computes where its weights are, in their precision.
        image: (C, X, Y, Z), every axis a multiple of the network's stride, on any device.
        finish: done to each piece of logits.

    Returns:
        (any, X, Y, Z): what ``finish`` makes of the logits.
    """
    weights = next(network.parameters())

    def slices(z: slice) -> Tensor:
        return image[..., z].transpose(1, 3)[None].to(weights)

    _, nx, ny, nz = image.shape
    return _streamed(network, 0, slices, (nz, ny, nx), finish)[0].transpose(1, 3)


def finished(network: UNet, features: Tensor, finish: Finish) -> Tensor:
    """The finest level's features, (1, C, z, y, x), to what ``finish`` makes of the logits: (1, any, Z, Y, X)."""
    whole = _Whole(features.shape[2] * cell_of(network.config, 0), channels_last=False)
    _finish(network, features, finish, whole)
    return whole.tensor


def _streamed(network: UNet, level: int, x: Slices, shape: Shape, finish: Finish) -> Tensor:
    """From the input of a level down and up again, to its features; from the image to what ``finish`` makes of logits.

    Args:
        network: see `in_streams`.
        level: where to start.
        x: gives slices of the input.
        shape: (Z, Y, X) of the input.
        finish: see `in_streams`.

    Returns:
        (1, any, Z, Y, X).
    """
    if level == streamed_levels(network.config):
        return network.beneath(level, _channels_last(x(slice(0, shape[0]))))
    skip, lower = _descended(network, level, x, shape)
    give_back_freed_memory(above_mb=ROOMY_MB)
    lower = _streamed(network, level + 1, _slices_of(lower), _shape_of(lower), finish)
    give_back_freed_memory(above_mb=ROOMY_MB)
    return _ascended(network, level, lower, skip, finish)


def _descended(network: UNet, level: int, x: Slices, shape: Shape) -> tuple[Tensor, Tensor]:
    """A level's skip, and the input of the next one."""
    cell = cell_of(network.config, level)
    window = _Window() if level == 0 else None
    blocks = [_Block(block) for block in network.encoder[level].children()]
    pairs = _Pairs()
    skip, lower = _Whole(shape[0] // cell), _Whole(shape[0] // cell // 2)
    for z, last in _pieces(shape, network, level, cell):
        piece = x(z)
        piece = _channels_last(space_to_depth(piece) if cell == 2 else piece)
        if window:
            piece = network.stem(window(piece, last), relu=True, padding=FLAT)
        for block in blocks:
            piece = block(piece, last)
        skip.add(piece)
        lower.add(network.down[level](pairs(piece), relu=True))
    return skip.tensor, lower.tensor


def _ascended(network: UNet, level: int, lower: Tensor, skip: Tensor, finish: Finish) -> Tensor:
    """A level's features on the way up; of level 0 what ``finish`` makes of the logits."""
    blocks = [_Block(block) for block in network.decoder[level].children()]
    whole = _Whole(skip.shape[2] * cell_of(network.config, level), channels_last=level > 0)
    for z, last in _pieces(_shape_of(skip), network, level, 1):
        half = slice(z.start // 2, z.stop // 2)
        piece = network.joined(level, _channels_last(lower[:, :, half]), skip[:, :, z])
        for block in blocks:
            piece = block(piece, last)
        if level == 0:
            _finish(network, piece, finish, whole)
        else:
            whole.add(piece)
    return whole.tensor


def _finish(network: UNet, features: Tensor, finish: Finish, whole: _Whole) -> None:
    """Adds what ``finish`` makes of the logits, few at a time: they take more memory than the features."""
    _, _, _, ny, nx = features.shape
    slices = max(1, FINISHED_VOXELS // (nx * ny * cell_of(network.config, 0) ** 3))
    for part in torch.split(features, slices, dim=2):
        whole.add(finish(network.headed(part)[0].float())[None])


def _pieces(shape: Shape, network: UNet, level: int, cell: int) -> Iterator[tuple[slice, bool]]:
    """Ranges of slices of a level's input, ``cell`` of them to a sample; and whether it is the last.

    The first is thick enough for all convolutions to give something.
    """
    depth, ny, nx = shape
    samples = PIECE_VOXELS // NARROWER**level // cell_of(network.config, level) ** 3 // (nx * ny // cell**2)
    lag = network.config.convolutions + (level == 0)
    length = cell * 2 * -(-max(THINNEST_PIECE, lag + 2, samples) // 2)
    for start in range(0, depth, length):
        yield slice(start, min(start + length, depth)), start + length >= depth


def cell_of(config: UNetConfig, level: int) -> int:
    """Input samples of a level's own samples, along each axis."""
    return config.cell if level == 0 else 1


def _slices_of(x: Tensor) -> Slices:
    return lambda z: x[:, :, z]


def _shape_of(x: Tensor) -> Shape:
    depth, ny, nx = x.shape[2:]
    return depth, ny, nx


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def _joined(parts: list[Tensor]) -> Tensor:
    """A copy of slices one after the other; one part without slices, and torch would not put the channels last."""
    return torch.cat([part for part in parts if part.shape[2]], dim=2)


class _Window:
    """What a 3x3x3 convolution sees: what it gives, unpadded along z, lags a slice behind what it gets."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        edge = torch.zeros_like(x[:, :, :1])
        x = _joined([edge if self.seen is None else self.seen, x, *([edge] if last else [])])
        self.seen = x[:, :, -2:].clone()
        return x


class _Block:
    """A block of either kind; its input waits until the convolutions have caught up with it."""

    def __init__(self, block: nn.Module) -> None:
        if not isinstance(block, ResidualBlock | BottleneckBlock):
            raise TypeError(f"no stream of {type(block).__name__}")
        self.block = block
        self.windows = [_Window(), _Window()]
        self.waiting: Tensor | None = None

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        first, second = self.windows
        block = self.block
        result: Tensor
        if isinstance(block, ResidualBlock):
            y = second(block.first(first(x, last), relu=True, padding=FLAT), last)
            result = block.second(y, plus=self._caught_up(x, y.shape[2] - 2), relu=True, padding=FLAT)
        else:
            y = block.middle(first(block.reduce(x, relu=True), last), relu=True, padding=FLAT)
            result = block.expand(y, plus=self._caught_up(x, y.shape[2]), relu=True)
        return result

    def _caught_up(self, x: Tensor, depth: int) -> Tensor:
        """As many slices of the block's input, from where it has been used up."""
        late = 0 if self.waiting is None else self.waiting.shape[2]
        waited = [] if self.waiting is None else [self.waiting]
        self.waiting = x[:, :, depth - late :].clone()
        return _joined([*waited, x[:, :, : depth - late]])


class _Pairs:
    """Slices two by two, as a convolution of stride 2 takes them; an odd one waits."""

    def __init__(self) -> None:
        self.waiting: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.waiting is not None:
            x = _joined([self.waiting, x])
        even = x.shape[2] // 2 * 2
        self.waiting = x[:, :, even:].clone()
        return x[:, :, :even]


class _Whole:
    """What a stream gives, put together; features keep their channels last, as the next piece of work wants them."""

    def __init__(self, depth: int, channels_last: bool = True) -> None:
        self.depth, self.channels_last, self.filled = depth, channels_last, 0

    def add(self, piece: Tensor) -> None:
        """The next slices, (1, C, z, Y, X)."""
        one, channels, thickness, ny, nx = piece.shape
        if not self.filled:
            shape = (one, channels, self.depth, ny, nx)
            order = torch.channels_last_3d if self.channels_last else torch.contiguous_format
            self.tensor = torch.empty(shape, dtype=piece.dtype, device=piece.device, memory_format=order)
        self.tensor[:, :, self.filled : self.filled + thickness] = piece
        self.filled += thickness
