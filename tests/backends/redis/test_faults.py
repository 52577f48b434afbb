"""Redis killed, paused, full, refusing and moved: misses, right bytes, and back again.

Whatever happens to the server, no call raises, none hangs, no byte is wrong, connections stay few,
and once the server is well again, so is the cache. Times are the backend's own business here: the
figures are in docs/benchmarks/redis.md, measured by ``benchmarks/redis_faults.py``.
"""

import asyncio
import subprocess

import pytest

from kvoffload.testing.backends import keys_of
from tests.support.redis_engine import PATIENT, RedisEngine, until
from tests.support.redis_server import BINARY, MISSING, RedisServer
from tests.support.server_faults import killed, paused, restarted_empty

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path / "redis", "--enable-debug-command", "local")
    yield server
    server.stop()


@pytest.mark.parametrize("fault", [killed, paused])
async def test_ill_it_is_left_alone_and_found_again(server, fault):
    async with RedisEngine(server.url) as engine:
        await engine.back()
        with fault(server):
            await engine.shut_out()
            assert await engine.load() == [False] * 8
            assert await engine.store() == [False] * 8
            assert await engine.backend.contains(engine.keys) == [False] * 8
            connects = engine.count("connect_failed")
            await engine.load()
            assert engine.count("connect_failed") == connects  # open means: not even tried
        if fault is paused:
            await until(engine.hits)  # nothing was lost meanwhile
        await engine.back()


async def test_restarted_empty_it_has_nothing(server):
    async with RedisEngine(server.url, **PATIENT) as engine:
        await engine.store()
        assert await engine.backend.contains(engine.keys) == [True] * 8
        with restarted_empty(server):
            assert await engine.backend.contains(engine.keys) == [False] * 8
            assert not any(await engine.load())
        await engine.back()


async def test_restarted_and_used_again_the_facts_are_back(server):
    async with RedisEngine(server.url) as engine:
        with killed(server):
            await engine.backend.describe({"model": "llama"})
        await engine.back()
        await until(lambda: "llama" in server.cli("get", "kvoffload:faults:facts"))


async def test_connections_closed_for_idleness_lose_no_lookup(server):
    async with RedisEngine(server.url, **PATIENT) as engine:
        await engine.store()
        server.cli("client", "kill", "type", "normal")
        await until(lambda: engine.count("connections") == 0)
        assert await engine.backend.contains(engine.keys) == [True] * 8
        assert await engine.hits()


@pytest.mark.chaos
async def test_paused_for_half_a_minute(server):
    async with RedisEngine(server.url) as engine:
        await engine.back()
        with paused(server):
            for _ in range(300):
                await engine.load()
                await asyncio.sleep(0.1)
        await until(engine.hits)


async def test_a_short_client_pause_costs_nothing_but_time(server):
    async with RedisEngine(server.url, **PATIENT) as engine:
        await engine.back()
        server.cli("client", "pause", "200", "all")
        assert await engine.hits()


async def test_a_long_client_pause_is_an_outage(server):
    async with RedisEngine(server.url) as engine:
        await engine.back()
        server.cli("client", "pause", "2500", "all")
        await engine.shut_out()
        await until(engine.hits)


async def test_loading_its_snapshot_it_is_not_used_before_it_is_done(tmp_path):
    """A client that trusts the order of replies would mix up two keys here."""
    server = RedisServer(tmp_path / "redis", "--enable-debug-command", "local")
    try:
        async with RedisEngine(server.url) as engine:
            await engine.store()
            server.cli("debug", "populate", "1500", "x", "1000")
            server.cli("save")
            server.kill()
            server = RedisServer(
                tmp_path / "redis", "--key-load-delay", "1400",  # microseconds a key
                "--loading-process-events-interval-bytes", "1024", port=server.port,
            )  # fmt: skip
            assert "LOADING" in server.cli("ping")
            while "PONG" not in server.cli("ping"):
                await engine.load()
                await asyncio.sleep(0.05)
            assert engine.count("connect_failed") > 0
            await until(engine.hits)
    finally:
        server.stop()


async def test_full_it_refuses_stores_and_says_so_once_and_still_serves_loads(server, caplog):
    async with RedisEngine(server.url, **PATIENT) as engine:
        await engine.back()
        server.cli("config", "set", "maxmemory", "1")
        more = keys_of(8, "more")
        assert await engine.store(more) == [False] * 8
        assert await engine.hits()
        assert engine.count("refused_oom") > 0
        assert await engine.store(more) == [False] * 8
        assert engine.count("write_full") > 0  # not even sent
        assert not engine.open
        server.cli("config", "set", "maxmemory", "0")

        async def stored():
            return all(await engine.store(more))

        await until(stored)
    told = [line for line in caplog.messages if "no stores: OOM" in line]
    assert len(told) == 1
    assert "; set maxmemory-policy to allkeys-lru" in told[0]


async def test_made_a_replica_it_is_left_alone_until_it_is_a_master_again(server, tmp_path):
    other = RedisServer(tmp_path / "other")
    try:
        async with RedisEngine(server.url) as engine:
            await engine.back()
            server.cli("replicaof", "127.0.0.1", str(other.port))
            await engine.shut_out()
            server.cli("replicaof", "no", "one")
            await engine.back()
    finally:
        other.stop()


async def test_with_another_password_it_is_left_alone_until_it_is_right_again(server):
    async with RedisEngine(server.url) as engine:
        await engine.back()
        server.cli("config", "set", "requirepass", "changed")
        server.cli("-a", "changed", "--no-auth-warning", "client", "kill", "type", "normal")
        await engine.shut_out()
        server.cli("-a", "changed", "--no-auth-warning", "config", "set", "requirepass", "")
        await until(engine.hits)


async def test_a_right_taken_away_is_an_outage(server, login):
    server.cli("acl", "setuser", "kv", "reset", "on", ">p", "~kvoffload:*", "+@all")
    async with RedisEngine(server.url, **login("kv", "p")) as engine:
        await engine.back()
        server.cli("acl", "setuser", "kv", "-getex")
        await engine.shut_out()
        server.cli("acl", "setuser", "kv", "+getex")
        await until(engine.hits)


async def test_flushed_in_the_middle_of_loads_what_is_gone_is_a_miss(server):
    async with RedisEngine(server.url, **PATIENT) as engine:
        keys = keys_of(48, "flush")
        for _ in range(3):
            assert all(await engine.store(keys))
            loads = asyncio.gather(*(engine.load(keys) for _ in range(4)))
            await asyncio.to_thread(server.cli, "flushall", "async")
            await loads
            assert not any(await engine.load(keys))
        assert not engine.open


async def test_clients_killed_all_the_time(server):
    """Connections die under every call; loaded bytes are right, and the backend recovers."""
    async with RedisEngine(server.url) as engine:
        await engine.store()
        for _ in range(10):
            calls = asyncio.gather(engine.load(), engine.store(), engine.load())
            await asyncio.to_thread(server.cli, "client", "kill", "type", "normal")
            await calls
        await engine.back()


async def test_sentinels_lead_to_the_new_master_after_a_failover(tmp_path, caplog):
    master = RedisServer(tmp_path / "master")
    replica = RedisServer(tmp_path / "replica", "--replicaof", "127.0.0.1", str(master.port))
    watch = (
        f"sentinel monitor kv 127.0.0.1 {master.port} 2",
        "sentinel down-after-milliseconds kv 500",
        "sentinel failover-timeout kv 3000",
    )
    sentinels = [RedisServer(tmp_path / f"sentinel{i}", sentinel=watch) for i in range(3)]
    servers = [master, replica, *sentinels]
    try:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        async with RedisEngine(f"redis+sentinel://{hosts}/kv", **PATIENT) as engine:
            await engine.back()
            await until(lambda: asyncio.to_thread(linked, replica, sentinels))
            master.kill()

            async def failed_over():
                return all(await engine.store(keys_of(4, "after")))

            await until(failed_over)
            assert "role:master" in replica.cli("info", "replication")
            old, new = (f"127.0.0.1:{server.port}" for server in (master, replica))
            assert f"redis: the store has left {old}; it is at {new}" in caplog.text
            await engine.back()
            sentinels[0].kill()
            servers.remove(sentinels[0])
            assert await engine.hits()
    finally:
        for server in servers:
            server.stop()


def linked(replica, sentinels):
    """Whether a failover could succeed: the replica is in step, and known, as are the Sentinels."""
    try:
        return "master_link_status:up" in replica.cli("info", "replication") and all(
            "slaves=1,sentinels=3" in sentinel.cli("info", "sentinel") for sentinel in sentinels
        )
    except subprocess.CalledProcessError:
        return False
