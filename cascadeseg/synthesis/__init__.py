"""Synthetic chest CT: a procedural anatomy with its pathology, scanned, and its labels. Deterministic by seed."""

from cascadeseg.synthesis.config import PRESETS, SynthesisConfig
from cascadeseg.synthesis.dataset import SyntheticDataset, write_dataset
from cascadeseg.synthesis.patient import Patient, sample_patient
from cascadeseg.synthesis.render import Phantom, render
from cascadeseg.synthesis.tissue import Tissue

__all__ = [
    "PRESETS",
    "Patient",
    "Phantom",
    "SynthesisConfig",
    "SyntheticDataset",
    "Tissue",
    "render",
    "sample_patient",
    "write_dataset",
]
