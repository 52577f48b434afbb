"""Encrypted values: names of their own, and misses for engines that have not the key."""

import asyncio
import json

import pytest
import redis
from disk_commands import answered

from kvoffload import open_backend
from kvoffload.errors import ConfigError
from kvoffload.offload.base import tenant_id
from kvoffload.testing.backends import filled, keys_of, payload_of, slots
from tests.support.redis_server import BINARY, MISSING

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)
OLD, NEW = "0123456789abcdef" * 4, "fedcba9876543210" * 4


@pytest.fixture
def open_redis(empty, opened):
    """Opens a tier that encrypts with the keys of a file, if there is one."""
    return lambda keys: opened(empty, encryption={"key_file": keys}) if keys else opened(empty)


def values(server):
    with redis.Redis(port=server.port) as client:
        return {name.decode(): client.get(name) for name in client.keys("kvoffload:*{*")}


async def test_an_engine_without_the_key_neither_sees_nor_removes_encrypted_values(
    empty, open_redis, key_file
):
    keys, plain, secret = keys_of(2), open_redis(None), open_redis(key_file(OLD))
    assert all(await secret.write(keys, filled(keys)))
    stored = values(empty)
    assert {name.split(":")[2] for name in stored} == {"gcm"}
    assert not any(payload_of(key, 32) in b"".join(stored.values()) for key in keys)
    assert await plain.contains(keys) == [False] * 2
    assert await plain.read(keys, slots(2)) == [False] * 2
    assert all(await plain.write(keys, filled(keys)))
    assert all(await secret.read(keys, slots(2)))
    assert values(empty).items() >= stored.items()


async def test_old_keys_are_read_and_a_lost_one_is_a_miss_that_a_store_replaces(
    open_redis, key_file
):
    keys, old = keys_of(2), open_redis(key_file(OLD))
    assert all(await old.write(keys, filled(keys)))
    rotated = open_redis(key_file(NEW, OLD, name="rotated"))
    assert all(await rotated.read(keys, slots(2)))
    new = open_redis(key_file(NEW, name="new"))
    assert await new.read(keys, slots(2)) == [False] * 2
    assert new.counters()["read_other_key"] == 2
    assert not [name for name in new.counters() if "corrupt" in name]
    assert await new.contains(keys) == [False] * 2
    assert all(await new.write(keys, filled(keys)))
    assert all(await new.read(keys, slots(2)))


async def test_verify_checks_headers_without_the_key_and_values_with_it(
    empty, open_redis, key_file
):
    keys, path = keys_of(3), key_file(OLD)
    assert all(await open_redis(path).write(keys, filled(keys)))
    name, value = next(iter(values(empty).items()))
    with redis.Redis(port=empty.port) as client:
        client.set(name, value[:-1] + bytes([value[-1] ^ 1]), keepttl=True)
    given = ("-o", f"encryption={json.dumps({'key_file': path})}")
    report = await asyncio.to_thread(answered, "verify", empty.url)
    assert (report["chunks"], report["other_keys"], report["damaged"]) == (3, 3, [])
    report = await asyncio.to_thread(answered, "verify", empty.url, *given, code=1)
    assert (report["other_keys"], report["reasons"]) == (0, {"corrupt_payload": 1})


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_the_values_of_one_tenant_are_erased_and_no_other(
    empty, open_redis, key_file, is_encrypted
):
    path = key_file(OLD) if is_encrypted else None
    keys, backend = keys_of(6), open_redis(path)
    tenants = [tenant_id("a"), tenant_id("a"), tenant_id("b"), tenant_id("b"), b"", b""]
    assert all(await backend.write(keys, filled(keys), tenants))
    given = ("-o", f"encryption={json.dumps({'key_file': path})}") if path else ()
    words = ("gc", empty.url, *given, "--tenant", "a")
    dry = await asyncio.to_thread(answered, *words, "--dry-run")
    report = await asyncio.to_thread(answered, *words)
    for each in (dry, report):
        assert (each["removed"], each["unknown"]) == (2, 2)
    assert await backend.contains(keys) == [False] * 2 + [True] * 4
    report = await asyncio.to_thread(answered, "gc", empty.url, "--tenant", "b")
    assert report["removed"] == (0 if is_encrypted else 2)


def test_a_secret_file_beside_the_key_is_refused(key_file):
    path = key_file()
    options = {"url": "redis://h", "secret_file": path, "encryption": {"key_file": path}}
    with pytest.raises(ConfigError, match="leave this out") as caught:
        open_backend("redis", options, "n", "backends[0].")
    assert caught.value.field == "backends[0].secret_file"
