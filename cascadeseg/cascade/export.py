"""The networks as ONNX files, for programs without torch: HU in, probabilities and logits out.

What a stage makes of HU (its windows) is part of its graph, so that another program has geometry to do and nothing
else: resampling, boxes, mirrored left crops. The numbers it needs for that are in `DESCRIPTION`, beside the files;
`scripts/onnx_infer.py` is such a program. MONAI's bundles were weighed: what runs them expects one network a bundle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cascadeseg._version import __version__
from cascadeseg.atomic import replace_text, staged
from cascadeseg.cascade.crop import GROWTH_MM, MARGIN_MM, SMALLEST_LUNG_ML
from cascadeseg.cascade.locate import BEYOND_MM
from cascadeseg.cascade.refine import LARGEST_REGROWTH
from cascadeseg.cascade.resample import image_of_hu
from cascadeseg.errors import ModelError, OutputError
from cascadeseg.labels import LUNG_CHANNELS, VALUES
from cascadeseg.network.model import Model, Stage

if TYPE_CHECKING:
    from onnx import ModelProto

DESCRIPTION = "cascade.json"
FILES = ("locator.onnx", "refiner.onnx", DESCRIPTION)
FORMAT = 1
LIBRARIES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 18
"""The one that torch's exporter writes by itself, old enough for every runtime of the last years."""
LARGEST_DIFFERENCE = 1e-2
"""Between the two runtimes, of probabilities and of logits, which are some ten wide."""
TRIED = ((2, 3, 4), (3, 2, 1))
"""Shapes of the images on which they are compared, in strides."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Exported:
    """A stage's network as an ONNX file.

    Attributes:
        name: of the stage.
        content: the file's.
        known: what a program has to know of it, for the description.
        largest_difference: of its output to torch's, on images that both were given.
    """

    name: str
    content: bytes
    known: dict[str, Any]
    largest_difference: float

    @property
    def file(self) -> str:
        return f"{self.name}.onnx"


class LocatorGraph(nn.Module):
    """Stage 1, from HU to probabilities."""

    name = "locator"
    inputs = ("hu",)
    output = "lungs"

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage, self.network = stage, _folded(stage)

    def forward(self, hu: Tensor) -> Tensor:
        """(1, 1, X, Y, Z) HU to (1, 2, X, Y, Z) probabilities of the right and of the left lung."""
        return torch.softmax(self.network(image_of_hu(hu[0], self.stage.view)[None]), dim=1)[:, LUNG_CHANNELS]


class RefinerGraph(nn.Module):
    """Stage 2, from the HU of one lung's crop, left ones mirrored, to logits."""

    name = "refiner"
    output = "logits"

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage, self.network = stage, _folded(stage)
        self.inputs = ("hu", "opinion") if stage.view.prior else ("hu",)

    def forward(self, hu: Tensor, opinion: Tensor | None = None) -> Tensor:
        """(1, 1, X, Y, Z) HU, and where the stage sees it stage 1's opinion, to logits, above 0 inside the lung."""
        image = image_of_hu(hu[0], self.stage.view)[None]
        logits: Tensor = self.network(image if opinion is None else torch.cat([image, opinion], dim=1))
        return logits


Graph = LocatorGraph | RefinerGraph


def _folded(stage: Stage) -> nn.Module:
    network = stage.network()
    network.fold()
    return network


def exported(model: Model, progress: Progress | None = None) -> list[Exported]:
    """A model's networks as ONNX, each of which gives what torch gives; of a locator without a refiner that one alone.

    Args:
        model: what to export.
        progress: called with the step's name and the share of work done, 0 to 1.

    Raises:
        ModelError: what it takes is not installed, or the runtimes do not agree.
    """
    _refuse_without_libraries()
    graphs: list[Graph] = [LocatorGraph(model.locator)]
    graphs += [RefinerGraph(model.refiner)] if model.refiner else []
    done = []
    for number, graph in enumerate(graphs):
        if progress:
            progress(graph.name, (number + 0.1) / len(graphs))
        done.append(_exported(graph.eval(), model))
    return done


def _refuse_without_libraries() -> None:
    """Raises ModelError where one is missing, or is there and cannot be loaded, before anything takes time."""
    lacking = [library for library in LIBRARIES if find_spec(library) is None]
    if lacking:
        raise ModelError("export", f"no {', no '.join(lacking)}", "", "pip install 'cascadeseg[onnx]'")
    for library in LIBRARIES:
        try:
            import_module(library)
        except (ImportError, OSError, AttributeError) as problem:  # a library of the system's, or NumPy of another age
            found = f"{library} is installed and cannot be loaded ({' '.join(str(problem).split())})"
            raise ModelError(
                "export", found, "", f"mend it until python -c 'import {library}' says nothing"
            ) from problem


def write_export(exports: list[Exported], model: Model, folder: Path) -> None:
    """Writes the files into a folder that is there, each whole or not at all, the description last.

    An older description goes first, and a refiner that the model has not, so that what is there is of one model.

    Raises:
        OutputError: they cannot be written.
    """
    try:
        for name in {*FILES} - {one.file for one in exports}:
            (folder / name).unlink(missing_ok=True)
    except OSError as problem:
        raise OutputError(folder, f"cannot be written in ({problem.strerror})") from problem
    for one in exports:
        with staged(folder / one.file) as part:
            part.write_bytes(one.content)
    replace_text(folder / DESCRIPTION, json.dumps(_description(exports, model), indent=2) + "\n")


def _exported(graph: Graph, model: Model) -> Exported:
    proto, known = _onnx_of(graph), _known(graph)
    proto.producer_name, proto.producer_version = "cascadeseg", __version__
    about = {f"model_{key}": value for key, value in _identity(model).items()}
    for key, value in {**about, **{key: json.dumps(value) for key, value in known.items()}}.items():
        proto.metadata_props.add(key=key, value=value)
    content = proto.SerializeToString()
    difference = largest_difference(graph, content)
    if not difference <= LARGEST_DIFFERENCE:
        found = f"{graph.output} of ONNX Runtime that differ by {difference:.2g} from torch's"
        remedy = "try other versions of onnxscript and onnxruntime"
        raise ModelError(f"export of the {graph.name}", found, f"{LARGEST_DIFFERENCE:g} at most", remedy)
    return Exported(graph.name, content, known, difference)


def _onnx_of(graph: Graph) -> ModelProto:
    """The graph for images of any multiple of its stride, without the traces of this machine that torch puts in."""
    stride = graph.stage.unet.stride
    sizes = {axis: stride * torch.export.Dim(name, min=1, max=4096 // stride) for axis, name in enumerate("xyz", 2)}
    examples = _examples(graph, TRIED[0])
    with _quiet():
        program: Any = torch.onnx.export(
            graph,
            examples,
            dynamo=True,
            dynamic_shapes=[sizes] * len(examples),
            input_names=list(graph.inputs),
            output_names=[graph.output],
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    proto: ModelProto = program.model_proto
    del proto.graph.metadata_props[:]
    for node in chain(proto.graph.node, *(function.node for function in proto.functions)):
        del node.metadata_props[:]
        node.doc_string = ""
    for value in chain(proto.graph.input, proto.graph.output, proto.graph.value_info, proto.graph.initializer):
        del value.metadata_props[:]
    return proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on operators of other libraries, and on its own future."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def largest_difference(graph: Graph, content: bytes) -> float:
    """How far what ONNX Runtime makes of some images is from what torch makes of them."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    differences = []
    for strides in TRIED:
        images = _examples(graph, strides)
        with torch.inference_mode():
            wanted = graph(*images)
        (given,) = session.run(None, {name: image.numpy() for name, image in zip(graph.inputs, images, strict=True)})
        differences.append((torch.from_numpy(given) - wanted).abs().max())
    return float(torch.stack(differences).max())  # NaN where one is, as Python's max is not


def _examples(graph: Graph, strides: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Smooth fields of HU from air to bone, and of opinions; the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    shape = tuple(n * graph.stage.unet.stride for n in strides)

    def field(low: float, high: float) -> Tensor:
        noise = torch.rand((1, 1, 8, 8, 8), generator=generator)
        return F.interpolate(noise, shape, mode="trilinear") * (high - low) + low

    return tuple(field(-1, 1) if name == "opinion" else field(-1200, 800) for name in graph.inputs)


def _description(exports: list[Exported], model: Model) -> dict[str, Any]:
    stages = {
        one.name: {
            "file": one.file,
            "sha256": hashlib.sha256(one.content).hexdigest(),
            **one.known,
            "largest_difference": one.largest_difference,
        }
        for one in exports
    }
    return {
        "format": FORMAT,
        "model": _identity(model),
        "labels": VALUES,
        "boxes": {
            "smallest_lung_ml": SMALLEST_LUNG_ML,
            "margin_mm": MARGIN_MM,
            "growth_mm": GROWTH_MM,
            "largest_regrowth": LARGEST_REGROWTH,
        },
        **stages,
        "versions": {"cascadeseg": __version__, "torch": torch.__version__}
        | {library: version(library) for library in LIBRARIES},
    }


def _identity(model: Model) -> dict[str, str]:
    return {"name": model.name, "version": model.version, "sha256": model.sha256}


def _known(graph: Graph) -> dict[str, Any]:
    """What a program has to know of a stage."""
    view, unet = graph.stage.view, graph.stage.unet
    known: dict[str, Any] = {
        "spacing_mm": view.spacing_mm,
        "outside_hu": view.low_hu,
        "highest_hu": view.high_hu,
        "multiple_of": unet.stride,
        "inputs": list(graph.inputs),
        "outputs": [graph.output],
    }
    if unet.norm == "batch":  # with others every voxel sees the whole image
        known["context"] = unet.context
    if isinstance(graph, LocatorGraph):
        return known | {"goes_on_mm": BEYOND_MM}
    if view.prior:
        known["opinion"] = {"spacing_mm": view.prior_spacing_mm, "contrast": view.prior_contrast}
    return known
