from __future__ import annotations

import pytest
import torch

from cascadeseg.machine import processors

MOST_PROCESSES = 8
"""Of ``-n auto``; each takes about a gigabyte."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return min(processors(), MOST_PROCESSES)


@pytest.fixture
def torch_threads():
    """Sets how many threads torch has, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
