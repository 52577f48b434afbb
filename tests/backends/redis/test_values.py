"""What the backend keeps on a server: names, life spans, seals; any other value is a miss."""

import asyncio

import pytest

from kvoffload.backends.base import WriteResult
from kvoffload.backends.redis import node
from kvoffload.backends.redis.sealer import Sealer
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, slots
from tests.support.redis_engine import until
from tests.support.redis_server import BINARY, MISSING

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


async def test_every_name_has_our_prefix_and_a_life_span(empty, opened):
    backend = opened(empty, "model/a:{b}*", ttl_s=100.0)
    await backend.describe({"model": "m"})
    keys = keys_of(3)
    await backend.write(keys, filled(keys))
    names = empty.cli("keys", "*").splitlines()
    assert len(names) == 4
    assert all(name.startswith("kvoffload:model%2Fa%3A%7Bb%7D%2A:") for name in names)
    assert all(90 < int(empty.cli("ttl", name)) <= 100 for name in names)


async def test_reading_and_storing_again_prolong_a_chunks_life(empty, opened):
    backend = opened(empty, ttl_s=100.0)
    keys = keys_of(2)
    await backend.write(keys, filled(keys))
    names = empty.cli("keys", "*").splitlines()
    for name in names:
        empty.cli("pexpire", name, "5000")
    await backend.read(keys[:1], slots(1))
    assert sorted(int(empty.cli("ttl", name)) > 50 for name in names) == [False, True]
    assert set(await backend.write(keys, filled(keys))) == {WriteResult.PRESENT}
    assert all(int(empty.cli("ttl", name)) > 50 for name in names)
    assert backend.counters()["write_present"] == 2  # and nothing was sent again


@pytest.fixture(params=["plain", "encrypted"])
def sealed(request, encryption):
    """The setting of a tier whose values are plain, or encrypted."""
    return {"encryption": encryption} if request.param == "encrypted" else {}


def set_to(server, name, value):
    """Replace a chunk by another value, around the backend."""
    import redis

    with redis.Redis(port=server.port) as client:
        client.set(name, value)


def tamper(server, change):
    """Change the value of the only key by a function of its bytes, around the backend."""
    import redis

    with redis.Redis(port=server.port) as client:
        (name,) = client.keys("kvoffload:*")
        client.set(name, change(bytearray(client.get(name))))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("payload", lambda v: v[:-1] + bytes([v[-1] ^ 1])),
        ("header", lambda v: bytes([v[0] ^ 0x80]) + v[1:]),
        ("size", lambda v: v[:-1]),
        ("size", lambda v: v + b"x"),
        ("size", lambda v: b""),
        ("payload", lambda v: v[:300] + bytes(len(v) - 300)),
    ],
)
async def test_a_damaged_value_is_a_miss_is_removed_and_can_be_stored_again(
    empty, what, change, sealed, opened
):
    backend = opened(empty, **sealed)
    keys = keys_of(1)
    await backend.write(keys, filled(keys))
    tamper(empty, change)
    assert await backend.read(keys, slots(1)) == [False], what
    await until(lambda: empty.cli("dbsize") == "0")
    assert await backend.write(keys, filled(keys)) == [True]
    assert await backend.read(keys, slots(1)) == [True]
    assert backend.usage().gauges["breakers_open"] == 0


async def test_a_value_under_another_key_is_a_miss(empty, sealed, opened):
    backend = opened(empty, **sealed)
    a, b = keys_of(2)
    await backend.write([a], filled([a]))
    (name,) = empty.cli("keys", "*").splitlines()
    empty.cli("copy", name, name.replace(a.hex(), b.hex()))
    assert await backend.contains([b]) == [True]
    assert await backend.read([a, b], slots(2)) == [True, False]
    assert backend.counters()["read_corrupt_key"] == 1


async def test_a_check_that_fails_is_a_miss_counted_and_logged(empty, monkeypatch, caplog, opened):
    def no_memory(*_):
        raise MemoryError("no room for a check")

    backend = opened(empty)
    good, bad = keys_of(2)
    assert await backend.write([good], filled([good])) == [True]
    monkeypatch.setattr(Sealer, "seal", no_memory)
    monkeypatch.setattr(Sealer, "broken", no_memory)
    assert await backend.write([bad], filled([bad])) == [False]
    assert await backend.read([good], slots(1)) == [False]
    counted = backend.counters()
    assert [counted["write_failed"], counted["read_failed"]] == [1, 1]
    assert "no room for a check" in caplog.text


@pytest.fixture
def with_secret(empty, opened, tmp_path):
    """Opens a tier with a secret of its own."""

    def opened_with(name):
        (tmp_path / name).write_text(name * 4 + "0123456789abcdef" * 2)
        return opened(empty, secret_file=str(tmp_path / name))

    return opened_with


async def test_engines_with_different_secrets_keep_out_of_each_others_way(empty, with_secret):
    """As while a secret is changed on one engine after the other."""
    old, new = with_secret("old"), with_secret("new")
    keys = keys_of(8)
    assert all(await old.write(keys, filled(keys)))
    assert not any(await new.contains(keys))
    assert not any(await new.read(keys, slots(8)))
    assert all(await new.write(keys, filled(keys)))
    assert all(await new.read(keys, slots(8)))
    assert all(await old.read(keys, slots(8)))
    assert empty.cli("dbsize") == "16"


async def test_values_of_someone_without_the_secret_are_misses(empty, with_secret):
    """Every field and checksum is right, but the author did not have the secret."""
    attacker, victim = with_secret("theirs"), with_secret("mine")
    keys = keys_of(1)
    await victim.write(keys, filled(keys))
    (name,) = empty.cli("keys", "*").splitlines()
    await attacker.write(keys, filled(keys))
    (forged,) = set(empty.cli("keys", "*").splitlines()) - {name}
    assert await attacker.read(keys, slots(1)) == [True]
    empty.cli("copy", forged, name, "replace")
    assert await victim.read(keys, slots(1)) == [False]
    assert victim.counters()["read_corrupt_mac"] == 1


async def test_a_key_of_another_type_is_a_miss(empty, opened):
    backend = opened(empty)
    keys = keys_of(2)
    await backend.write(keys, filled(keys))
    name = next(n for n in empty.cli("keys", "*").splitlines() if keys[0].hex() in n)
    empty.cli("del", name)
    empty.cli("rpush", name, "x")
    assert await backend.read(keys, slots(2)) == [False, True]
    await until(lambda: name not in empty.cli("keys", "*"))
    assert await backend.contains(keys) == [False, True]
    assert await backend.write(keys, filled(keys)) == [True, True]
    assert await backend.read(keys, slots(2)) == [True, True]
    assert backend.counters()["read_corrupt_type"] == 1


@pytest.mark.parametrize(
    ("value", "misses"),
    [("", 1), ("short", 1), ("x" * 3 * CHUNK_BYTES, 24)],
    ids=["empty", "short", "far too long"],
)
async def test_a_value_of_a_wrong_size_costs_no_other_chunk(empty, value, misses, opened):
    """At most the next requests on the connection are misses, once."""
    backend = opened(empty, connections=1)
    keys = keys_of(24)
    await backend.write(keys, filled(keys))
    name = next(n for n in empty.cli("keys", "*").splitlines() if keys[5].hex() in n)
    set_to(empty, name, value)
    assert (await backend.read(keys, slots(24))).count(False) <= misses
    await until(lambda: empty.cli("exists", name) == "0")
    assert empty.cli("dbsize") == "23"
    assert (await backend.read(keys, slots(24))).count(False) == 1
    assert backend.counters()["read_corrupt_size"] == 1
    assert backend.usage().gauges["breakers_open"] == 0


async def test_usage_follows_the_server_without_a_new_connection(empty, monkeypatch, opened):
    monkeypatch.setattr(node, "INFO_EVERY_S", 0.05)
    backend = opened(empty)
    await backend.contains(keys_of(1))
    before = backend.usage()
    set_to(empty, "foreign", "x" * 2_000_000)
    limit = int(empty.cli("info", "memory").partition("used_memory:")[2].split()[0])
    empty.cli("config", "set", "maxmemory-policy", "allkeys-lru")
    empty.cli("config", "set", "maxmemory", str(limit - 1_000_000))

    async def is_told():
        while (usage := backend.usage()).capacity_bytes is None or not usage.gauges[
            "server_evictions"
        ]:
            empty.cli("set", "another", "y")
            await asyncio.sleep(0.02)
        return usage

    try:
        told = await asyncio.wait_for(is_told(), 10)
    finally:
        empty.cli("config", "set", "maxmemory", "0")
    assert before.resident_bytes > 0
    assert before.capacity_bytes is None
    assert before.gauges["server_evictions"] == 0
    assert told.capacity_bytes == limit - 1_000_000
    assert told.gauges["server_evictions"] == 1
    assert backend.counters()["connected"] == 1


async def test_a_server_that_stops_answering_is_noticed_while_nothing_is_asked(
    empty, monkeypatch, opened
):
    monkeypatch.setattr(node, "INFO_EVERY_S", 0.05)
    backend = opened(empty, timeout_s=0.2, connect_timeout_s=0.2)
    await backend.contains(keys_of(1))
    empty.pause()
    try:
        async with asyncio.timeout(20):
            await until(lambda: backend.usage().gauges["breakers_open"] > 0)
    finally:
        empty.resume()


async def facts_are_there(server):
    await until(lambda: "llama" in server.cli("get", "kvoffload:n:facts"))


async def test_facts_are_back_soon_after_a_flush(empty, opened):
    backend = opened(empty)
    await backend.describe({"model": "llama"})
    await facts_are_there(empty)
    empty.cli("flushall")
    keys = keys_of(2)
    await backend.write(keys, filled(keys))
    await facts_are_there(empty)


async def test_loads_alone_keep_the_facts_alive(empty, opened):
    backend = opened(empty, ttl_s=100.0)
    keys = keys_of(2)
    await backend.describe({"model": "llama"})
    await backend.write(keys, filled(keys))
    await facts_are_there(empty)
    await until(lambda: int(empty.cli("pttl", "kvoffload:n:facts")) <= 99_000)
    await backend.read(keys, slots(2))
    await until(lambda: int(empty.cli("pttl", "kvoffload:n:facts")) >= 99_000)
