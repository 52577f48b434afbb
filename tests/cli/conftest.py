"""Commands in processes of their own are forks of a Python that has imported them."""

import sys

import disk_commands
import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_commands(python):
    disk_commands.PYTHON[:] = python
    yield
    disk_commands.PYTHON[:] = [sys.executable]


@pytest.fixture
async def root(tmp_path):
    """A folder with the chunks of two namespaces."""
    return await disk_commands.two_namespaces(tmp_path / "kv")
