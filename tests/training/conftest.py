from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from cascadeseg.training.cache import CaseStore
from cascadeseg.training.data import patients_of
from tests.training.toy import stage1, toy_dataset


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Three toy chests in nnU-Net's raw layout."""
    return toy_dataset(tmp_path_factory.mktemp("data") / "Dataset001_Toy")


@pytest.fixture
def small_files() -> Callable[[int], AbstractContextManager[None]]:
    """A block in which no file of this process grows beyond a size: to whoever writes it that is a full disk."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


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
