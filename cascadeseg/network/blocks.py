"""The building blocks of both UNets.

MONAI's blocks were weighed: importing them costs seconds at start-up, their order of normalisation and activation
cannot be folded for inference, and none is checkpointed. What is needed here is four small modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint

Norm = Literal["batch", "instance"]


class ConvNorm(nn.Module):
    """A convolution (no bias), its normalisation and what follows; in evaluation a BatchNorm can be folded into it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, norm: Norm, stride: int = 1) -> None:
        super().__init__()
        padding = (kernel - stride + 1) // 2
        self.convolution = nn.Conv3d(inputs, outputs, kernel, stride, padding, bias=False)
        self.one_pass = False
        self.norm: nn.Module
        if norm == "batch":
            # Patches are few and large, so statistics move slowly.
            self.norm = nn.BatchNorm3d(outputs, momentum=0.05)
        else:
            self.norm = nn.InstanceNorm3d(outputs, affine=True)

    def fold(self, one_pass: bool = False) -> None:
        """Folds a BatchNorm in evaluation mode into the convolution's weights and bias.

        Args:
            one_pass: from then on sum and ReLU are done in the convolution's own pass; see `has_one_pass`.
        """
        if isinstance(self.norm, nn.BatchNorm3d):
            self.convolution = fuse_conv_bn_eval(self.convolution, self.norm)
            self.norm = nn.Identity()
            self.one_pass = one_pass

    def forward(self, x: Tensor, *, plus: Tensor | None = None, relu: bool = False, padding: Any = None) -> Tensor:
        """(B, inputs, X, Y, Z) to (B, outputs, X / stride, ...).

        Args:
            x: (B, inputs, X, Y, Z).
            plus: added to the result, of the same shape; in one pass it is overwritten.
            relu: negative values become zero.
            padding: of the axes, where it is not the layer's own.
        """
        convolution = self.convolution
        padding = convolution.padding if padding is None else padding
        if self.one_pass and (plus is None or (relu and _channels_last(x) and _channels_last(plus))):
            return in_one_pass(convolution, x, padding, plus=plus, relu=relu)
        y = self.norm(_convolved(convolution, x, padding))
        if plus is not None:
            y = y + plus
        result: Tensor = F.relu_(y) if relu else y
        return result


def _convolved(convolution: nn.Conv3d, x: Tensor, padding: Any) -> Tensor:
    """A convolution whose gradients can be trusted.

    Where the first axis has two voxels and is padded, oneDNN's bfloat16 gradient of the weights has in it what happened
    to lie in memory (torch 2.13, a processor with AVX-512; seen as NaN in the coarsest level of narrow patches). With
    the zeros put there beforehand it has not.
    """
    if torch.is_grad_enabled() and x.shape[2] == 2 and padding[0]:
        x, padding = F.pad(x, (0, 0, 0, 0, padding[0], padding[0])), (0, *padding[1:])
    return F.conv3d(x, convolution.weight, convolution.bias, convolution.stride, padding)


def _channels_last(x: Tensor) -> bool:
    """As oneDNN's sums want it, and not by chance, as a single channel or a single voxel lies both ways."""
    return x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()


def in_one_pass(
    convolution: nn.Conv3d, x: Tensor, padding: Any, *, plus: Tensor | None = None, relu: bool = False
) -> Tensor:
    """A convolution, or the ReLU of it, or of it and something added, in whose place: by oneDNN while it writes.

    Bare convolutions, too, as with a single thread torch takes a slower way through those of 1x1x1, after which the
    channels are not last in memory any more, and all that follows is slower as well.
    """
    how = (convolution.weight, convolution.bias, padding, convolution.stride, convolution.dilation, convolution.groups)
    operations: Any = torch.ops.mkldnn
    result: Tensor
    if plus is None:
        result = operations._convolution_pointwise(x, *how, "relu" if relu else "none", [], None)
    else:
        result = operations._convolution_pointwise_.binary(plus, x, *how, "add", 1.0, "relu", [], None)
    return result


@cache
def has_one_pass(dtype: torch.dtype) -> bool:
    """Whether this machine's torch has oneDNN's convolution with sum and ReLU, and it does what it should.

    It is what torch's compiler makes of such layers, and no public function: so it is tried out, and nothing but speed
    depends on it. By itself torch writes the result, reads it for the sum, and reads and writes it for the ReLU; on a
    CPU these passes take as long as slim convolutions.
    """
    with torch.random.fork_rng(devices=[]):  # whoever draws numbers gets the same with and without this
        layer = nn.Conv3d(16, 16, 1).to(dtype).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    x = torch.linspace(-1, 1, 16 * 27).to(dtype).reshape(1, 3, 3, 3, 16).permute(0, 4, 1, 2, 3)
    try:
        with torch.inference_mode():
            wanted = [layer(x), F.relu(layer(x)), F.relu(layer(x) + x)]
            given = [in_one_pass(layer, x, (0, 0, 0), relu=relu) for relu in (False, True)]
            given.append(in_one_pass(layer, x, (0, 0, 0), plus=x.clone(), relu=True))
    except (AttributeError, RuntimeError):
        return False
    return all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in zip(wanted, given, strict=True))


class ResidualBlock(nn.Module):
    """Two 3x3x3 convolutions and the identity (He 2016, doi 10.1109/CVPR.2016.90)."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.first = ConvNorm(channels, channels, 3, norm)
        self.second = ConvNorm(channels, channels, 3, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, X, Y, Z) to the same shape."""
        result: Tensor = self.second(self.first(x, relu=True), plus=x, relu=True)
        return result


class BottleneckBlock(nn.Module):
    """1x1x1 down to a fraction of the channels, 3x3x3 there, 1x1x1 back up, and the identity (He 2016)."""

    def __init__(self, channels: int, norm: Norm, ratio: int) -> None:
        super().__init__()
        narrow = max(1, channels // ratio)
        self.reduce = ConvNorm(channels, narrow, 1, norm)
        self.middle = ConvNorm(narrow, narrow, 3, norm)
        self.expand = ConvNorm(narrow, channels, 1, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, X, Y, Z) to the same shape."""
        y = self.middle(self.reduce(x, relu=True), relu=True)
        result: Tensor = self.expand(y, plus=x, relu=True)
        return result


def space_to_depth(x: Tensor) -> Tensor:
    """(B, C, X, Y, Z) to (B, 8 C, X/2, Y/2, Z/2): every 2x2x2 cell becomes channels, last in memory (lossless)."""
    # A reshape to cells with a permutation says the same, and takes a processor five to ten times as long.
    corners = product(x.unbind(1), (0, 1), (0, 1), (0, 1))
    return torch.stack([channel[:, i::2, j::2, k::2] for channel, i, j, k in corners], dim=-1).permute(0, 4, 1, 2, 3)


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
