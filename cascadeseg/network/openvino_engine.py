"""Another engine for processors: the same network as an OpenVINO graph.

The graph is built layer by layer from the folded network, which takes a few milliseconds. OpenVINO's own converter was
weighed: it traces the module, needs a fixed shape to do it well, and its telemetry wants the internet, which `infer`
never touches. It is not even imported: see `_without_converter`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cascadeseg.network.blocks import BottleneckBlock, ConvNorm, ResidualBlock
from cascadeseg.network.engine import DTYPES, Precision, fast_precision, padded_to
from cascadeseg.network.levels import Finish, Image, in_levels, streamed_levels, unchanged
from cascadeseg.network.model import Stage
from cascadeseg.network.unet import UNet

_CONVERTER = "openvino.tools.ovc"


def _without_converter() -> tuple[Any, Any]:
    """OpenVINO and its operators, imported without the converter that `import openvino` brings along if it can.

    Importing the converter reports it to Intel: a thread forks the process, whatever its other threads are doing, the
    child calls an internet address, and the process cannot end before the child has given up. It also costs most
    of the import's time.
    """
    ours = "openvino" not in sys.modules and _CONVERTER not in sys.modules
    if ours:
        sys.modules[_CONVERTER] = None  # type: ignore[assignment]  # how Python marks what cannot be imported
    try:
        return import_module("openvino"), import_module("openvino.opset13")
    finally:
        if ours:
            del sys.modules[_CONVERTER]  # who wants it can still have it


if TYPE_CHECKING:
    import openvino
    from openvino import opset13 as op
else:
    openvino, op = _without_converter()

Node = Any
_HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
_BUSY = Lock()
"""Held while a compiled model works: none may give memory back meanwhile, and each takes all processors anyway."""


class OpenVinoEngine:
    """A stage's network on a processor; same use and same results as `engine.Engine`, to its precision."""

    work_bytes = 115.0
    library_mb = 220.0
    shareable = False
    streamed = True

    def __init__(self, stage: Stage, precision: Precision = "auto") -> None:
        self.stage = stage
        self.device = torch.device("cpu")
        self.precision = fast_precision(self.device) if precision == "auto" else precision
        network = stage.network()
        network.fold()
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": _HINTS[self.precision],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,  # several processes would otherwise share one core
        }
        self._parts = _OpenVinoParts(network, settings, self.precision)

    def __call__(self, image: Image, finish: Finish = unchanged) -> Tensor:
        """Logits of an image of any size: (C, X, Y, Z) float32 to (out_channels, X, Y, Z) float32, or ``finish``ed."""
        padded, (nx, ny, nz) = padded_to(image, self.stage.unet.stride)
        if self._parts.levels:
            logits = in_levels(self._parts, padded, finish)
        else:
            logits = finish(self._parts.beneath(padded[..., :]))
        return logits[:, :nx, :ny, :nz]


class _OpenVinoParts:
    """A network as graphs: one for each streamed level down and up, and one for all beneath (`levels.Parts`)."""

    def __init__(self, network: UNet, settings: dict[str, Any], precision: str) -> None:
        self.config = network.config
        self.dtype = DTYPES[precision]
        self.levels = streamed_levels(network.config)
        core = openvino.Core()

        def compiled(model: openvino.Model) -> Any:
            return core.compile_model(model, "CPU", settings)

        self._down = [compiled(_descending(network, level)) for level in range(self.levels)]
        self._beneath = compiled(_beneath(network, self.levels) if self.levels else graph_of(network))
        self._up = [compiled(_ascending(network, level)) for level in range(self.levels)]

    def descend(self, level: int, x: Tensor) -> tuple[Tensor, Tensor]:
        skip, lower = _infer(self._down[level], x)
        return skip, lower

    def beneath(self, x: Tensor) -> Tensor:
        return _infer(self._beneath, x)[0]

    def ascend(self, level: int, lower: Tensor, skip: Tensor) -> Tensor:
        return _infer(self._up[level], lower, skip)[0]


def _infer(compiled: Any, *inputs: Tensor) -> list[Tensor]:
    """(C, X, Y, Z) each to (K, X, Y, Z) float32 each."""
    # A request of its own each time: kept, it would hold on to the memory of the largest one.
    with _BUSY:
        request = compiled.create_infer_request()
        request.infer([x[None].float().contiguous().numpy() for x in inputs], share_inputs=True)
        outputs = [torch.from_numpy(request.get_output_tensor(n).data.copy())[0] for n in range(len(compiled.outputs))]
        del request
        compiled.release_memory()  # of the activations, which the other parts could not use
    return outputs


def graph_of(network: UNet) -> openvino.Model:
    """A folded `UNet` as an OpenVINO graph of (1, C, X, Y, Z) to (1, K, X, Y, Z), any multiple of its stride."""
    image = _features(network.config.in_channels)
    x = _stemmed(network, image)
    return openvino.Model([_headed(network, _levels_from(network, 0, x))], [image])


def _descending(network: UNet, level: int) -> openvino.Model:
    """`UNet.descend`, of level 0 from the image."""
    x = _features(network.config.in_channels if level == 0 else network.config.widths[level])
    skip = _through(network.encoder[level], _stemmed(network, x) if level == 0 else x)
    return openvino.Model([skip, _active(network.down[level], skip)], [x])


def _beneath(network: UNet, level: int) -> openvino.Model:
    """`UNet.beneath`."""
    x = _features(network.config.widths[level])
    return openvino.Model([_levels_from(network, level, x)], [x])


def _ascending(network: UNet, level: int) -> openvino.Model:
    """`UNet.ascend`, of level 0 to the logits."""
    lower, skip = (_features(network.config.widths[n]) for n in (level + 1, level))
    x = _ascended(network, level, lower, skip)
    return openvino.Model([_headed(network, x) if level == 0 else x], [lower, skip])


def _features(channels: int) -> Node:
    return op.parameter([1, channels, -1, -1, -1], np.float32)


def _stemmed(network: UNet, image: Node) -> Node:
    cells = network.config.stem == "space_to_depth"
    return _active(network.stem, op.space_to_depth(image, "depth_first", 2) if cells else image)


def _headed(network: UNet, x: Node) -> Node:
    logits = _convolved(network.head, x)
    return op.depth_to_space(logits, "depth_first", 2) if network.config.stem == "space_to_depth" else logits


def _levels_from(network: UNet, level: int, x: Node) -> Node:
    x = _through(network.encoder[level], x)
    if level == len(network.down):
        return x
    return _ascended(network, level, _levels_from(network, level + 1, _active(network.down[level], x)), x)


def _ascended(network: UNet, level: int, lower: Node, skip: Node) -> Node:
    x = op.relu(op.add(_doubled(_normed(network.up[level], lower)), skip))
    return _through(network.decoder[level], x)


def _through(blocks: nn.Module, x: Node) -> Node:
    for block in blocks.children():
        if isinstance(block, ResidualBlock):
            y = _normed(block.second, _active(block.first, x))
        elif isinstance(block, BottleneckBlock):
            y = _normed(block.expand, _active(block.middle, _active(block.reduce, x)))
        else:
            raise TypeError(f"no OpenVINO graph for {type(block).__name__}")
        x = op.relu(op.add(y, x))
    return x


def _active(layer: nn.Module, x: Node) -> Node:
    return op.relu(_normed(layer, x))


def _normed(layer: nn.Module, x: Node) -> Node:
    if not isinstance(layer, ConvNorm):
        raise TypeError(f"no OpenVINO graph for {type(layer).__name__}")
    y = _convolved(layer.convolution, x)
    return _instance_normed(layer.norm, y) if isinstance(layer.norm, nn.InstanceNorm3d) else y


def _instance_normed(norm: nn.InstanceNorm3d, x: Node) -> Node:
    y = op.mvn(x, op.constant(np.array([2, 3, 4])), True, norm.eps, "INSIDE_SQRT")
    return op.add(op.multiply(y, _channelwise(norm.weight)), _channelwise(norm.bias))


def _convolved(convolution: nn.Conv3d, x: Node) -> Node:
    padding = list(convolution.padding)
    weight = op.constant(convolution.weight.detach().numpy())
    y = op.convolution(x, weight, list(convolution.stride), padding, padding, [1, 1, 1])
    return y if convolution.bias is None else op.add(y, _channelwise(convolution.bias))


def _channelwise(values: Tensor) -> Node:
    return op.constant(values.detach().numpy().reshape(1, -1, 1, 1, 1))


def _doubled(x: Node) -> Node:
    """Twice the resolution, nearest neighbour."""
    scales, axes = op.constant(np.full(3, 2, np.float32)), op.constant(np.array([2, 3, 4]))
    return op.interpolate(
        x, scales, "nearest", "scales", axes=axes, coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
