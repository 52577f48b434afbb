"""Without what only Linux has: buffered I/O works, and what cannot work says so.

The names that macOS lacks are taken out of ``os`` and its neighbours before anything is imported,
in the process and in its children.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload import open_backend
from kvoffload.errors import ConfigError

ROOT = Path(__file__).parents[1]
WITHOUT_LINUX = """
import fcntl, mmap, os, resource, socket
for module, names in {
    os: "O_DIRECT O_NOATIME O_PATH O_TMPFILE copy_file_range eventfd fdatasync memfd_create "
        "pidfd_open posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity splice",
    fcntl: "F_ADD_SEALS F_OFD_SETLK F_SETPIPE_SZ F_SEAL_GROW F_SEAL_SHRINK",
    mmap: "MADV_HUGEPAGE MADV_POPULATE_WRITE MAP_POPULATE MAP_NORESERVE",
    resource: "prlimit",
    socket: "TCP_KEEPIDLE TCP_QUICKACK TCP_USER_TIMEOUT",
}.items():
    for name in names.split():
        vars(module).pop(name, None)
"""


@pytest.fixture
def run(tmp_path):
    """Run a program as on another system; returns its exit code and all it printed."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    assert run("-c", "import os; print(hasattr(os, 'O_DIRECT'))") == (0, "False\n")
    return run


def test_the_quickstart_runs(run):
    code, printed = run(str(ROOT / "examples/quickstart.py"))
    assert code == 0, printed
    assert "restored bytes are identical: True" in printed


def test_chunks_are_stored_examined_and_verified(run, tmp_path):
    store = """if True:
        import asyncio
        from kvoffload import open_backend

        async def main():
            backend = open_backend("disk", {"root": "kv", "min_free": 0}, namespace="n")
            chunk, into = memoryview(bytes(range(256)) * 64), memoryview(bytearray(1 << 14))
            assert await backend.write([b"key"], [chunk]) == [True]
            assert await backend.read([b"key"], [into]) == [True]
            assert into == chunk
            await backend.close()

        asyncio.run(main())"""
    code, printed = run("-c", store)
    assert (code, "using the page cache" in printed) == (0, True), printed
    command = "import sys; from kvoffload.cli.main import main; main()"
    code, printed = run("-c", command, "verify", "kv")
    assert (code, "1 chunk," in printed, "0 damaged" in printed) == (0, True, True), printed
    code, printed = run("-c", command, "inspect", "kv")
    assert code == 0, printed


def test_direct_io_is_refused_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "O_DIRECT")

    async def direct():
        backend = open_backend("disk", {"root": str(tmp_path / "kv"), "io": "direct"}, "n")
        await backend.close()

    with pytest.raises(ConfigError, match=r"io = 'direct'.*ENOTSUP"):
        asyncio.run(direct())


def test_a_thread_serves_the_tiers_and_one_sentence_says_why(run):
    connect = """if True:
        import torch
        from kvoffload import LocalConnector
        from kvoffload.messages import CanonicalKVCacheRef as Ref
        from kvoffload.messages import CanonicalKVCaches, CanonicalKVCacheTensor

        tensor = CanonicalKVCacheTensor(torch.zeros((8, 64), dtype=torch.int8), 64)
        caches = CanonicalKVCaches((tensor,), ((Ref(0, 64),),))
        config = {"cpu_bytes": "64KiB", "backends": [{"type": "memory"}]}
        connector = LocalConnector(config, caches, block_size=4, facts={"model": "m"})
        print(connector.stats()["io_server"])
        connector.close()"""
    code, printed = run("-c", connect)
    assert code == 0, printed
    assert "no I/O process can be started: memory files need Linux." in printed
    assert "the I/O thread" in printed
