from __future__ import annotations

import pytest
import torch


@pytest.fixture
def torch_threads():
    """Sets how many threads torch has, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
