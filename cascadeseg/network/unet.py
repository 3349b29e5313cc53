"""The UNet of both stages, described by one small config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from cascadeseg.network.blocks import (
    BottleneckBlock,
    ConvNorm,
    Norm,
    ResidualBlock,
    checkpointed,
    depth_to_space,
    in_one_pass,
    space_to_depth,
)


@dataclass(frozen=True)
class UNetConfig:
    """What a UNet is made of.

    Attributes:
        in_channels: channels of the input image.
        out_channels: channels of the logits.
        widths: channels of each level, finest first; each level halves the resolution of the one before.
        blocks: blocks of each level on the way down and on the way up.
        block: two 3x3x3 convolutions, or 1-3-1 with a bottleneck.
        bottleneck_ratio: channels of a level divided by those inside its bottleneck.
        norm: BatchNorm (folded into the convolutions for inference: several times faster on a CPU) or InstanceNorm.
        stem: the finest level works on the voxels (``"convolution"``) or on cells of 2x2x2 voxels laid into channels
            (``"space_to_depth"``: the first halving at no loss, without narrow full-resolution layers, which cost
            most of a slim UNet's time and memory).
        deep_supervision: while training, `UNet.forward` returns the logits of the coarser levels as well.
    """

    in_channels: int = 1
    out_channels: int = 1
    widths: tuple[int, ...] = (32, 64, 128)
    blocks: int = 1
    block: Literal["residual", "bottleneck"] = "residual"
    bottleneck_ratio: int = 2
    norm: Norm = "batch"
    stem: Literal["convolution", "space_to_depth"] = "space_to_depth"
    deep_supervision: bool = False

    @property
    def cell(self) -> int:
        """Voxels of a sample of the finest level, along each axis."""
        return 2 if self.stem == "space_to_depth" else 1

    @property
    def convolutions(self) -> int:
        """3x3x3 convolutions of a level on its way down, or up, one after the other."""
        return self.blocks * (2 if self.block == "residual" else 1)

    @property
    def stride(self) -> int:
        """The input's shape must be a multiple of this on every axis."""
        return int(self.cell * 2 ** (len(self.widths) - 1))

    @property
    def reach(self) -> int:
        """How many voxels away an input can matter to a logit (under BatchNorm; InstanceNorm sees everything)."""
        cells = [self.cell << level for level in range(len(self.widths))]
        encoder, decoder = sum(cells), sum(cells[:-1])
        # The stem's kernel, the blocks' kernels, and that a coarse cell is seen by all finer ones in it.
        return self.cell + self.convolutions * (encoder + decoder) + cells[-1]

    @property
    def context(self) -> int:
        """What a tile must see on both sides to equal the whole: `reach`, rounded up to a multiple of the stride."""
        return -(-self.reach // self.stride) * self.stride


class UNet(nn.Module):
    """A slim residual 3D UNet (Çiçek 2016, doi 10.1007/978-3-319-46723-8_49) with added skips.

    Skips are added, not concatenated, and widths change in 1x1x1 convolutions before upsampling, so that no layer is
    wider than its level. Upsampling is nearest-neighbour: exact on every device, and smoothed by the block after it.
    """

    def __init__(self, config: UNetConfig, *, checkpoint_blocks: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = checkpoint_blocks
        self.one_pass = False
        widths, voxels = config.widths, config.cell**3
        self.stem = ConvNorm(config.in_channels * voxels, widths[0], 3, config.norm)
        self.down = nn.ModuleList(ConvNorm(a, b, 2, config.norm, stride=2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(ConvNorm(b, a, 1, config.norm) for a, b in pairwise(widths))
        self.encoder = nn.ModuleList(_blocks(width, config) for width in widths)
        self.decoder = nn.ModuleList(_blocks(width, config) for width in widths[:-1])
        self.head = nn.Conv3d(widths[0], config.out_channels * voxels, 1)
        coarser = widths[1:] if config.deep_supervision else ()
        self.side_heads = nn.ModuleList(nn.Conv3d(width, config.out_channels, 1) for width in coarser)

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        """Logits of an image.

        Args:
            image: (B, in_channels, X, Y, Z), every axis a multiple of ``config.stride``.

        Returns:
            (B, out_channels, X, Y, Z) logits; while training with deep supervision a list, finest first, the others at
            the resolution of their level.
        """
        *coarser, x = self._upwards(0, self.stemmed(image))
        logits = self.headed(x)
        if not (self.training and self.config.deep_supervision):
            return logits
        return [logits, *(head(features) for head, features in zip(self.side_heads, reversed(coarser), strict=True))]

    def features(self, image: Tensor) -> Tensor:
        """The finest level's features, of which `headed` makes the logits."""
        return self.beneath(0, self.stemmed(image))

    def stemmed(self, image: Tensor) -> Tensor:
        """The finest level's input."""
        x = space_to_depth(image) if self.config.stem == "space_to_depth" else image
        stemmed: Tensor = self.stem(x, relu=True)
        return stemmed

    def descend(self, level: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """A level on the way down: its skip, and the next level's input."""
        skip = self._through(self.encoder[level], x)
        return skip, self.down[level](skip, relu=True)

    def beneath(self, level: int, x: Tensor) -> Tensor:
        """From the input of a level down to the coarsest and up to that level's features."""
        for features in self._upwards(level, x):
            x = features
        return x

    def ascend(self, level: int, lower: Tensor, skip: Tensor) -> Tensor:
        """A level on the way up, from the features of the next coarser one."""
        return self._through(self.decoder[level], self.joined(level, lower, skip))

    def joined(self, level: int, lower: Tensor, skip: Tensor) -> Tensor:
        """A level's input on the way up."""
        return F.relu_(F.interpolate(self.up[level](lower), scale_factor=2.0).add_(skip))

    def headed(self, x: Tensor) -> Tensor:
        """Logits from the finest level's features."""
        head = self.head
        logits: Tensor = in_one_pass(head, x, head.padding) if self.one_pass else head(x)
        return depth_to_space(logits) if self.config.stem == "space_to_depth" else logits

    def fold(self, one_pass: bool = False) -> None:
        """Folds every BatchNorm into its convolution; for inference only. See `ConvNorm.fold`."""
        self.eval()
        self.one_pass = one_pass
        for module in self.modules():
            if isinstance(module, ConvNorm):
                module.fold(one_pass)

    def transpose(self) -> None:
        """Makes it the same network for images whose axes come the other way round: (B, in_channels, Z, Y, X).

        So slices lie one behind the other in memory, and a few of them can be taken without a copy (`streams`).
        """
        for module in self.modules():
            if isinstance(module, nn.Conv3d):
                module.weight.data = module.weight.data.transpose(2, 4).contiguous()
        if self.config.stem == "space_to_depth":
            stem, head = self.stem.convolution, self.head
            stem.weight.data = _cells_transposed(stem.weight.data, dim=1)
            head.weight.data = _cells_transposed(head.weight.data, dim=0)
            if head.bias is not None:
                head.bias.data = _cells_transposed(head.bias.data, dim=0)

    def _upwards(self, level: int, x: Tensor) -> Iterator[Tensor]:
        """From the input of a level down to the coarsest, then up: the features of each level, coarsest first.

        No skip stays in memory for longer than it is needed.
        """
        skips: list[Tensor] = []
        for here in range(level, len(self.down)):
            skip, x = self.descend(here, x)
            skips.append(skip)
        x = self._through(self.encoder[-1], x)
        yield x
        for here in reversed(range(level, len(self.up))):
            x = self.ascend(here, x, skips.pop())
            yield x

    def _through(self, blocks: nn.Module, x: Tensor) -> Tensor:
        for block in blocks.children():
            x = checkpointed(block, x) if self.checkpoint_blocks and self.training else block(x)
        return x


def _blocks(width: int, config: UNetConfig) -> nn.Sequential:
    def block() -> nn.Module:
        if config.block == "residual":
            return ResidualBlock(width, config.norm)
        return BottleneckBlock(width, config.norm, config.bottleneck_ratio)

    return nn.Sequential(*(block() for _ in range(config.blocks)))


def _cells_transposed(weights: Tensor, dim: int) -> Tensor:
    """Channels made of 2x2x2 cells (`space_to_depth`), for cells whose axes come the other way round."""
    before, after = weights.shape[:dim], weights.shape[dim + 1 :]
    return weights.reshape(*before, -1, 2, 2, 2, *after).transpose(dim + 1, dim + 3).reshape(weights.shape)
