"""Fixtures of the tests of transfers."""

import pytest
import torch

from kvoffload.transfer.cuda import stream_copier


@pytest.fixture
def one_thread(monkeypatch):
    """Nor does the launching thread sleep between two polls: the device runs nothing meanwhile."""
    monkeypatch.setattr(stream_copier, "POLL_S", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
