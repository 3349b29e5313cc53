"""The building blocks of both UNets.

MONAI's blocks were weighed: importing them costs seconds at start-up, their order of normalisation and activation
cannot be folded for inference, and none is checkpointed. What is needed here is four small modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint

Norm = Literal["batch", "instance"]


class ConvNorm(nn.Module):
    """A convolution (no bias) and its normalisation; in evaluation a BatchNorm can be folded into the convolution."""

    def __init__(self, inputs: int, outputs: int, kernel: int, norm: Norm, stride: int = 1) -> None:
        super().__init__()
        padding = (kernel - stride + 1) // 2
        self.convolution = nn.Conv3d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm: nn.Module
        if norm == "batch":
            # Patches are few and large, so statistics move slowly.
            self.norm = nn.BatchNorm3d(outputs, momentum=0.05)
        else:
            self.norm = nn.InstanceNorm3d(outputs, affine=True)

    def fold(self) -> None:
        """Folds a BatchNorm in evaluation mode into the convolution's weights and bias."""
        if isinstance(self.norm, nn.BatchNorm3d):
            self.convolution = fuse_conv_bn_eval(self.convolution, self.norm)
            self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, X, Y, Z) to (B, outputs, X / stride, ...)."""
        result: Tensor = self.norm(self.convolution(x))
        return result


class ResidualBlock(nn.Module):
    """Two 3x3x3 convolutions and the identity (He 2016, doi 10.1109/CVPR.2016.90)."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.first = ConvNorm(channels, channels, 3, norm)
        self.second = ConvNorm(channels, channels, 3, norm)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, X, Y, Z) to the same shape."""
        y = self.second(self.activation(self.first(x)))
        result: Tensor = self.activation(y + x)
        return result


class BottleneckBlock(nn.Module):
    """1x1x1 down to a fraction of the channels, 3x3x3 there, 1x1x1 back up, and the identity (He 2016)."""

    def __init__(self, channels: int, norm: Norm, ratio: int) -> None:
        super().__init__()
        narrow = max(1, channels // ratio)
        self.reduce = ConvNorm(channels, narrow, 1, norm)
        self.middle = ConvNorm(narrow, narrow, 3, norm)
        self.expand = ConvNorm(narrow, channels, 1, norm)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, X, Y, Z) to the same shape."""
        y = self.activation(self.reduce(x))
        y = self.activation(self.middle(y))
        result: Tensor = self.activation(self.expand(y) + x)
        return result


def space_to_depth(x: Tensor) -> Tensor:
    """(B, C, X, Y, Z) to (B, 8 C, X/2, Y/2, Z/2): every 2x2x2 cell becomes channels (lossless)."""
    b, c, nx, ny, nz = x.shape
    cells = x.reshape(b, c, nx // 2, 2, ny // 2, 2, nz // 2, 2)
    return cells.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(b, 8 * c, nx // 2, ny // 2, nz // 2)


def depth_to_space(x: Tensor) -> Tensor:
    """(B, 8 C, X, Y, Z) to (B, C, 2 X, 2 Y, 2 Z): the inverse of `space_to_depth`."""
    b, c, nx, ny, nz = x.shape
    cells = x.reshape(b, c // 8, 2, 2, 2, nx, ny, nz)
    return cells.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, c // 8, 2 * nx, 2 * ny, 2 * nz)


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    """Runs a block without keeping its activations; the backward pass computes them again.

    The second pass sees the same batch, so BatchNorm's running statistics are held still there: training with and
    without checkpointing gives the same gradients and the same statistics.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _held_statistics(block)

    result: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return result


@contextmanager
def _held_statistics(block: nn.Module) -> Iterator[None]:
    norms = [m for m in block.modules() if isinstance(m, nn.BatchNorm3d)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = torch.zeros_like(norm.num_batches_tracked)
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = count
