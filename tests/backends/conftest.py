"""Folders for tests of the disk backend."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def ram_path(tmp_path):
    """An empty folder in memory if possible: campaigns need the system calls, not the disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = tempfile.mkdtemp(prefix="kvoffload-test-", dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
