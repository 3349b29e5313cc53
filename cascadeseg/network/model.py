"""The *model*: everything inference needs to know, in one value and one folder.

A model folder holds ``model.safetensors`` (the weights of both networks, plain tensors, never pickled) and
``model.json`` (what each network is, what it sees, the SHA-256 of the weights, and that of all it says itself but for
the notes). Training writes it, inference reads it and nothing else, so a network cannot meet the wrong preprocessing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from cascadeseg import config as configs
from cascadeseg.atomic import staged
from cascadeseg.errors import ConfigError, ModelError
from cascadeseg.labels import VALUES
from cascadeseg.network.unet import UNet, UNetConfig

FORMAT = 1
KEYS = {"name": str, "version": str, "sha256": str, "labels": dict, "stages": dict}
"""What every description has beside its format."""
COPY_AGAIN = "install or copy the model again"
OWN_SHA256 = "description_sha256"
"""The key of a description's own hash; those written by versions that knew none lack it."""


@dataclass(frozen=True)
class View:
    """What a stage sees of a scan.

    Attributes:
        spacing_mm: isotropic spacing of its images.
        low_hu: HU that becomes 0 in the image, with everything below it. Air, so that zero padding *is* air.
        high_hu: HU above which everything is alike.
        scale_hu: HU from ``low_hu`` that become 1.
        tissue_low_hu: HU that becomes 0 in a second channel, the same image in a window of soft tissue. In the first
            one fluid, fat, muscle and lung without air all but coincide, in bfloat16 above all, which has steps of
            8 HU there.
        tissue_high_hu: HU that becomes 1 in it; no higher than the other: there is no such channel.
        prior: whether stage 1's opinion (this lung's probability minus the other's) is the last channel.
        prior_spacing_mm: the opinion is seen at this spacing, coarse enough to tell where lung is and not where its
            surface lies, which the image shows better; 0: at stage 1's own.
        prior_contrast: stage 1's probabilities are stretched about one half by this factor before, and cut to 0..1:
            2.5 leaves nothing of the haze below 0.3 that a locator spreads over tissue as dense as sick lung.
    """

    spacing_mm: float
    low_hu: float = -1024.0
    high_hu: float = 600.0
    scale_hu: float = 1000.0
    tissue_low_hu: float = 0.0
    tissue_high_hu: float = 0.0
    prior: bool = False
    prior_spacing_mm: float = 0.0
    prior_contrast: float = 1.0

    @property
    def tissue(self) -> bool:
        """Whether soft tissue has a channel of its own."""
        return self.tissue_high_hu > self.tissue_low_hu

    @property
    def channels(self) -> int:
        return 1 + self.tissue + self.prior


@dataclass(frozen=True)
class Stage:
    """One network of the cascade: what it sees, what it is, and its weights."""

    view: View
    unet: UNetConfig
    weights: Mapping[str, Tensor]

    def network(self) -> UNet:
        """A new network with these weights.

        Raises:
            ModelError: they are another network's.
        """
        unet = UNet(self.unet)
        try:
            unet.load_state_dict({name: tensor.float() for name, tensor in self.weights.items()})
        except RuntimeError as error:  # which names them all, a line each
            found = "a network that its weights do not fit"
            raise ModelError("model.json", found, "the one that was written with them", COPY_AGAIN) from error
        return unet


@dataclass(frozen=True)
class Model:
    """Both stages of the cascade.

    Attributes:
        locator: stage 1: background, right lung, left lung of the whole scan.
        refiner: stage 2: one lung of a crop, left lungs mirrored; None in the result of training stage 1 alone.
        name: what the model is called in reports.
        version: its version.
        sha256: of ``model.safetensors``; empty for a model that was never saved.
        notes: how it was trained, for the reader.
    """

    locator: Stage
    refiner: Stage | None
    name: str = "untitled"
    version: str = "0"
    sha256: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)


def shipped_model() -> Path:
    """The folder of the model inside the package."""
    return Path(str(resources.files("cascadeseg") / "weights"))


def save_model(model: Model, folder: Path, *, half: bool = True) -> None:
    """Writes a model folder: both files whole under other names before either takes its own, the description last.

    So a full disk leaves the model that was there. Who kills the process between the two renames leaves new weights
    with the description of the old ones, which `load_model` refuses.

    Args:
        model: what to write.
        folder: made if missing; its model files are replaced.
        half: store weights as float16 (they are used in float32 or less anyway); normalisation stays float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stages = {"locator": model.locator} | ({"refiner": model.refiner} if model.refiner else {})
    tensors = {
        f"{name}.{key}": (tensor.half() if half and tensor.ndim == 5 else tensor).contiguous().cpu()
        for name, stage in stages.items()
        for key, tensor in stage.weights.items()
    }
    weights = save_tensors(tensors)
    description = {
        "format": FORMAT,
        "name": model.name,
        "version": model.version,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "labels": VALUES,
        "stages": {name: {"view": asdict(stage.view), "unet": asdict(stage.unet)} for name, stage in stages.items()},
    }
    description |= {OWN_SHA256: _own_sha256(description), "notes": dict(model.notes)}
    with staged(folder / "model.json") as part:
        part.with_name("model.safetensors").write_bytes(weights)
        part.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load_model(folder: str | Path | None = None) -> Model:
    """Reads a model folder, or the shipped model.

    Raises:
        ModelError: a file is missing or damaged, the weights are not those that the description names, its labels are
            not ours, or it was changed after it was written.
    """
    if folder == "":  # to Path it is the current folder
        raise ModelError("''", "an empty name", "a model folder, or None for the shipped model")
    folder = shipped_model() if folder is None else Path(folder)
    description = _description(folder)
    try:
        weights = (folder / "model.safetensors").read_bytes()
    except OSError as error:
        raise ModelError(folder, "no readable model.safetensors", "the weights of a model", str(error)) from error
    sha256 = hashlib.sha256(weights).hexdigest()
    if sha256 != description["sha256"]:
        raise ModelError(
            folder / "model.safetensors",
            f"SHA-256 {sha256[:12]}...",
            f"{description['sha256'][:12]}... as model.json says",
            "the file is damaged or was exchanged, or a training was killed while it wrote both: go on with that "
            f"training, or {COPY_AGAIN}",
        )
    try:
        tensors = load_tensors(weights)
        stages = {name: _stage(name, entry, tensors) for name, entry in description["stages"].items()}
        locator = stages["locator"]
    except (AttributeError, ConfigError, KeyError, TypeError, ValueError, SafetensorError) as error:
        found = f"a model description that does not hold together ({error})"
        raise ModelError(folder, found, "the model.json that was written with its weights", COPY_AGAIN) from error
    if description.get(OWN_SHA256, own := _own_sha256(description)) != own:
        found = "a description that was changed after it was written (its notes may be)"
        raise ModelError(folder / "model.json", found, "the one that was written with its weights", COPY_AGAIN)
    return Model(
        locator=locator,
        refiner=stages.get("refiner"),
        name=description["name"],
        version=description["version"],
        sha256=sha256,
        notes=description.get("notes", {}),
    )


def _own_sha256(description: Mapping[str, Any]) -> str:
    """Of all that a description says, the weights' hash included, but for its notes; however its text is laid out."""
    said = {key: value for key, value in description.items() if key not in (OWN_SHA256, "notes")}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _description(folder: Path) -> dict[str, Any]:
    path = folder / "model.json"
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if description["format"] != FORMAT:
            raise ModelError(path, f"model format {description['format']}", f"format {FORMAT}", "update cascadeseg")
    except OSError as error:
        found = "no model.json in it" if folder.exists() else "no such folder"
        raise ModelError(folder, found, "a model folder", "name the `model` folder that training wrote") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(path, f"not a model description ({error})", "the JSON that training wrote") from error
    lacking = [key for key, kind in KEYS.items() if not isinstance(description.get(key), kind)]
    lacking += ["notes"] if not isinstance(description.get("notes", {}), dict) else []
    if lacking:
        raise ModelError(path, f"no {', '.join(lacking)} that can be read", "the JSON that training wrote", COPY_AGAIN)
    if description["labels"] != VALUES:
        found = f"a model of the labels {json.dumps(description['labels'])}"
        raise ModelError(path, found, json.dumps(VALUES), "train both stages anew on these")
    return description


def _stage(name: str, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Stage:
    view, unet = configs.load(entry["view"], View), configs.load(entry["unet"], UNetConfig)
    if not (view.spacing_mm > 0 and view.scale_hu > 0 and unet.blocks > 0 and unet.widths and min(unet.widths) > 0):
        raise ValueError(f"the {name} has a spacing, a scale, blocks or widths of none")
    prefix = f"{name}."
    weights = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    stage = Stage(view, unet, weights)
    if stage.view.channels != stage.unet.in_channels:
        raise ValueError(f"the {name} sees {stage.view.channels} channels and takes {stage.unet.in_channels}")
    return stage


def stage_of(view: View, network: UNet) -> Stage:
    """The stage of a trained network; its weights are copied."""
    weights = {key: tensor.detach().clone() for key, tensor in network.state_dict().items()}
    return Stage(view, network.config, weights)
