"""A disk of each host's own before a store that hosts share, as an engine uses them together."""

import shutil

import pytest

from kvoffload.offload.base import ChunksStored
from tests.support.redis_server import BINARY, MISSING, RedisServer


@pytest.fixture(params=["folder", "object", "redis"])
def shared(request, tmp_path):
    """The settings of an empty store that hosts share."""
    if request.param == "folder":
        yield {"type": "folder", "root": str(tmp_path / "share"), "capacity": "64MiB"}
    elif request.param == "object":
        yield {"type": "object", **request.getfixturevalue("s3").options()}
    elif BINARY is None:
        pytest.skip(MISSING)
    else:
        server = RedisServer(tmp_path / "redis")
        yield {"type": "redis", "url": server.url}
        server.stop()


MEMORY = {"cpu_bytes": 20 * 4096, "staging_bytes": 0, "io": "thread"}
"""Host memory for two prompts."""


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_host_that_lost_its_disk_loads_from_the_shared_store_and_fills_the_disk_again(
    engine, shared, is_encrypted, encryption, tmp_path, until
):
    keys = {"encryption": encryption} if is_encrypted else {}
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    disk, shared = disk | keys, shared | keys
    first = engine(disk, shared, **MEMORY)
    first.store("prompt")
    assert first.connector.flush(20)
    events = [each for each in first.connector.take_events() if isinstance(each, ChunksStored)]
    assert {each.medium for each in events} == {"CPU", "DISK", shared["type"].upper()}
    first.connector.close()
    shutil.rmtree(tmp_path / "kv")

    second = engine(disk, shared, seed=2, **MEMORY)
    second.truth = first.truth
    second.await_hits("prompt")  # a lookup may be late on a busy machine
    assert second.connector.flush(20)
    stats = second.connector.stats()
    assert stats["load_chunks"][shared["type"]] == 10
    assert stats["tier_up"][shared["type"]] == 1
    until(lambda: second.connector.stats()["tier_gauges"]["disk"]["chunks"] == 10)
    second.connector.close()

    third = engine(disk, seed=3, **MEMORY)  # whose shared store is gone
    third.truth = first.truth
    third.await_hits("prompt")
    assert third.connector.stats()["load_chunks"]["disk"] == 10
