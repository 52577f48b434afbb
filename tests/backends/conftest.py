"""Folders, keys, and a real S3 server for the tests of a session."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import disk_parts
import pytest

from tests.support.moto import moto_server

SECRET = "0123456789abcdef" * 4


@pytest.fixture
def key_file(tmp_path):
    """Writes a file of keys, which only its owner reads unless a mode is given."""

    def write(*keys, mode=0o600, name="keys"):
        path = tmp_path / name
        path.write_text("".join(f"{key}\n" for key in keys or (SECRET,)))
        path.chmod(mode)
        return str(path)

    return write


@pytest.fixture
def encryption(key_file):
    """The setting of a tier that encrypts."""
    return {"key_file": key_file()}


@pytest.fixture(autouse=True)
async def _closed():
    """Close the disks and folders that a test has opened, also where it failed."""
    disk_parts.OPENED.clear()
    yield
    for backend in reversed(disk_parts.OPENED):
        await backend.close()
    disk_parts.OPENED.clear()


@pytest.fixture
def as_files(monkeypatch):
    """Small chunks are files, as where no part of a file can be freed."""
    probe = "kvoffload.backends.disk.store.probe_holes"
    monkeypatch.setattr(probe, lambda vfs, scratch: "a test wants files")


@pytest.fixture(params=["files", "segments"])
def form(request, monkeypatch):
    """The form of the chunks that `disk_parts.open_disk` stores: a test runs with each."""
    monkeypatch.setitem(disk_parts.DEFAULTS, "form", request.param)
    return request.param


@pytest.fixture
def clock(monkeypatch):
    """Seconds by which the clock of uses is ahead, in a list."""
    ahead_s = [0.0]
    monkeypatch.setattr(
        "kvoffload.backends.disk.expiry.now_ns", lambda: time.time_ns() + int(ahead_s[0] * 1e9)
    )
    return ahead_s


@pytest.fixture
def engine(new_kv_caches, new_request):
    """Makes engines over tiers; they are closed after the test."""
    from tests.support.small_engine import SmallEngine  # it imports torch

    made = []

    def make(*backends, seed=1, **settings):
        made.append(SmallEngine(new_kv_caches(seed=seed), new_request, *backends, **settings))
        return made[-1]

    yield make
    for each in made:
        each.check()
        each.connector.close()


@pytest.fixture(scope="session")
def s3():
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object has it")
    pytest.importorskip("moto", reason="moto is not installed: the extra dev has it")
    with moto_server() as server:
        yield server


@pytest.fixture
def ram_path(tmp_path):
    """An empty folder in memory if possible: campaigns need the system calls, not the disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = tempfile.mkdtemp(prefix="kvoffload-test-", dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
