"""Values that another version of kvoffload stored: misses, which stay until they are replaced."""

import pytest
import redis
from disk_commands import answered, kvoffload

from kvoffload.backends.header import COMPACT_BYTES
from kvoffload.backends.redis import backend as redis_backend
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.other_version import OTHERS, VERSION, resealed
from tests.support.redis_engine import until
from tests.support.redis_server import BINARY, MISSING

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


def change(server, key, offset=VERSION, value=2, edit=lambda content: content):
    """Make a value one of another version; return its name and content."""
    with redis.Redis(port=server.port) as client:
        (name,) = client.keys(f"kvoffload:*{key.hex()}*")
        content = edit(resealed(client.get(name), COMPACT_BYTES, offset, value))
        client.set(name, content, keepttl=True)
    return name, content


def value_of(server, name):
    with redis.Redis(port=server.port) as client:
        return client.get(name)


async def settle(backend):
    """Wait for the second look at damaged values."""
    await until(lambda: not backend._suspects)


@OTHERS
async def test_a_value_of_another_version_is_a_miss_stays_and_gives_way_to_a_store(
    empty, offset, value, opened
):
    backend = opened(empty)
    good, other = keys_of(2)
    assert all(await backend.write([good, other], filled([good, other])))
    name, content = change(empty, other, offset, value)
    assert await backend.contains([other, good]) == [True, True]
    assert await backend.read([other, good], slots(2)) == [False, True]
    await settle(backend)
    assert value_of(empty, name) == content
    assert await backend.contains([other, good]) == [False, True]
    counts = backend.counters()
    assert counts["read_other_version"] == 1
    assert not [name for name in counts if "corrupt" in name]
    assert await backend.write([other], filled([other])) == [True]
    assert await backend.contains([other]) == [True]
    assert await backend.read([other], slots(1)) == [True]


@pytest.mark.parametrize("edit", [lambda content: content + b"more", lambda content: content[:300]])
async def test_a_value_of_another_version_may_have_another_length(empty, edit, opened):
    backend = opened(empty)
    keys = keys_of(3)
    assert all(await backend.write(keys, filled(keys)))
    name, content = change(empty, keys[1], edit=edit)
    assert await backend.read(keys, slots(3)) == [True, False, True]
    await settle(backend)
    assert value_of(empty, name) == content
    assert backend.counters()["read_other_version"] == 1


async def test_an_authenticated_value_of_another_version_stays_too(empty, key_file, opened):
    pytest.importorskip("blake3")
    backend = opened(empty, secret_file=key_file())
    keys = keys_of(1)
    assert all(await backend.write(keys, filled(keys)))
    name, content = change(empty, keys[0])
    assert await backend.read(keys, slots(1)) == [False]
    await settle(backend)
    assert value_of(empty, name) == content
    assert backend.counters()["read_other_version"] == 1


async def test_the_keys_remembered_are_bounded(empty, monkeypatch, opened):
    monkeypatch.setattr(redis_backend, "_MAX_PASSED_OVER", 2)
    backend = opened(empty)
    keys = keys_of(3)
    assert all(await backend.write(keys, filled(keys)))
    for key in keys:
        change(empty, key)
        assert await backend.read([key], slots(1)) == [False]
    assert await backend.contains(keys) == [True, False, False]


async def test_verify_and_its_repair_leave_them_and_count_them(empty, opened):
    backend = opened(empty)
    keys = keys_of(2)
    assert all(await backend.write(keys, filled(keys)))
    await backend.close()
    name, content = change(empty, keys[0])
    found = answered("verify", empty.url, "--repair")
    assert (found["damaged"], found["other_versions"]) == ([], 1)
    assert value_of(empty, name) == content
    assert "1 chunk of another version" in kvoffload("verify", empty.url).stdout
