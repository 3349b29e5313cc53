"""Both networks, the model that carries them, and the engine that runs them."""

from cascadeseg.network.engine import Engine, Precision, find_device
from cascadeseg.network.model import Model, Stage, View, load_model, save_model, shipped_model, stage_of
from cascadeseg.network.slabs import in_slabs, slabs_of
from cascadeseg.network.unet import UNet, UNetConfig

__all__ = [
    "Engine",
    "Model",
    "Precision",
    "Stage",
    "UNet",
    "UNetConfig",
    "View",
    "find_device",
    "in_slabs",
    "load_model",
    "save_model",
    "shipped_model",
    "slabs_of",
    "stage_of",
]
