"""Stores that the first version wrote are served: three chunks on disk, one value in Redis.

``tests/data/first_version`` was written by the code of that version, on Linux.
"""

import base64
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import redis
from disk_parts import closed_later

from kvoffload import open_backend
from tests.support.file_faults import flip
from tests.support.redis_server import BINARY, MISSING, RedisServer

DATA = Path(__file__).parents[1] / "data" / "first_version"
NAMESPACE = "first version"
KEYS = [hashlib.sha256(b"key %d" % i).digest() + bytes(4) for i in range(3)]


def chunk(i):
    return b"".join(hashlib.sha256(b"%d %d" % (i, j)).digest() for j in range(64))


async def read(backend, keys):
    """Return the chunks of a backend, or None where it has none."""
    into = [bytearray(len(chunk(0))) for _ in keys]
    found = await backend.read(keys, [memoryview(row) for row in into])
    return [bytes(row) if hit else None for row, hit in zip(into, found, strict=True)]


@pytest.fixture
def root(tmp_path):
    """A copy with the modes that the first version gave its files."""
    copied = tmp_path / "kv"
    shutil.copytree(DATA / "disk", copied)
    for path in [copied, *copied.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    return copied


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
@pytest.mark.parametrize("has_snapshot", [True, False])
async def test_a_folder_is_served(root, io, has_snapshot):
    if not has_snapshot:
        (snapshot,) = root.glob("*/snapshot")
        snapshot.unlink()
    settings = {"root": str(root), "capacity": "1GiB", "min_free": 0, "io": io}
    backend = closed_later(open_backend("disk", settings, NAMESPACE))
    assert backend.wait_ready(60)
    assert await backend.contains(KEYS) == [True] * 3
    assert await read(backend, KEYS) == [chunk(i) for i in range(3)]
    assert await backend.write([b"another"], [memoryview(chunk(9))]) == [True]


async def test_a_damaged_chunk_of_it_is_a_miss(root):
    (path,) = root.glob(f"*/??/{KEYS[1].hex()}")
    flip(path, -1)
    settings = {"root": str(root), "capacity": "1GiB", "min_free": 0}
    backend = closed_later(open_backend("disk", settings, NAMESPACE))
    assert await read(backend, KEYS) == [chunk(0), None, chunk(2)]


@pytest.mark.skipif(BINARY is None, reason=MISSING)
async def test_a_redis_value_is_served(tmp_path):
    server = RedisServer(tmp_path)
    try:
        with redis.Redis(port=int(server.url.rpartition(":")[2].partition("/")[0])) as client:
            for name, value in json.loads((DATA / "redis.json").read_text()).items():
                client.set(base64.b64decode(name), base64.b64decode(value))
        settings = {"url": server.url, "timeout_s": 5.0, "connect_timeout_s": 5.0}
        backend = closed_later(open_backend("redis", settings, NAMESPACE))
        assert await read(backend, KEYS) == [chunk(0), None, None]
    finally:
        server.stop()
