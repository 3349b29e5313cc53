from __future__ import annotations

from pathlib import Path

import pytest

from cascadeseg.training.cache import CaseStore
from cascadeseg.training.data import patients_of
from tests.training.toy import stage1, toy_dataset


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Three toy chests in nnU-Net's raw layout."""
    return toy_dataset(tmp_path_factory.mktemp("data") / "Dataset001_Toy")


@pytest.fixture(scope="session")
def cache(folder, tmp_path_factory) -> str:
    """Them prepared for stage 1, so that runs need no workers."""
    root = tmp_path_factory.mktemp("cache")
    config = stage1(folder)
    training, held_out = patients_of(config, root / "split.json")
    patients = [*training, *held_out]  # each as both, so that any split of them is prepared
    store = CaseStore(root, config, [(patient, kind) for patient in patients for kind in ("cases", "whole")])
    for patient in patients:
        store.names(patient)
        store.whole(patient)
    store.close()
    return str(root)
