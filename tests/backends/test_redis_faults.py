"""Redis killed, paused, full, refusing, moved and cut off: misses, right bytes, and back again.

Whatever happens to the server, no call raises, none hangs, no byte is wrong, connections stay few,
and once the server is well again, so is the cache. Times are the backend's own business here: the
figures are in docs/redis.md, measured by ``benchmarks/redis_faults.py``.
"""

import asyncio
import random
import subprocess
import threading

import pytest

from kvoffload import open_backend
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, payload_of, slots
from kvoffload.testing.proxy import (
    Bandwidth,
    Corrupt,
    CutAfter,
    FaultProxy,
    Garbage,
    HalfCloseAfter,
    HangAfter,
    Latency,
)
from kvoffload.testing.redis_server import BINARY, MISSING, RedisServer, free_port
from kvoffload.transfer.ioloop import IOLoop

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)
LIMIT_S = 20.0
"""No call may take so long, whatever happens; far above every deadline involved."""


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path / "redis", "--enable-debug-command", "local")
    yield server
    server.stop()


class Engine:
    """Stores and loads as an engine does, and checks every byte that comes back."""

    def __init__(self, url, **options):
        quick = {"timeout_s": 0.3, "connect_timeout_s": 0.3, "lookup_timeout_s": 2.0}
        options = {"connections": 2} | quick | options
        self.backend = open_backend("redis", {"url": url, **options}, "faults")
        self.keys = keys_of(8, "faults")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await asyncio.wait_for(self.backend.close(), LIMIT_S)

    async def store(self, keys=None):
        keys = self.keys if keys is None else keys
        return await asyncio.wait_for(self.backend.write(keys, filled(keys)), LIMIT_S)

    async def load(self, keys=None):
        keys = self.keys if keys is None else keys
        into = slots(len(keys))
        good = await asyncio.wait_for(self.backend.read(keys, into), LIMIT_S)
        for key, slot, ok in zip(keys, into, good, strict=True):
            assert not ok or bytes(slot) == payload_of(key, CHUNK_BYTES)
        assert self.count("connections") <= 3
        return good

    async def hits(self):
        return all(await self.load())

    async def back(self):
        """Wait until chunks can be stored and loaded again."""
        await until(self.whole)

    async def whole(self):
        return all(await self.store()) and await self.hits()

    async def shut_out(self):
        """Use the server until the breaker opens."""

        async def opened():
            await self.load()
            return self.open

        await until(opened)

    @property
    def open(self):
        return self.count("breakers_open") > 0

    def count(self, name):
        return self.backend.counters().get(name, 0)


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not await condition():  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.02)


async def test_killed_it_is_left_alone_and_found_again(server):
    async with Engine(server.url) as engine:
        await engine.back()
        server.kill()
        await engine.shut_out()
        assert await engine.load() == [False] * 8
        assert await engine.store() == [False] * 8
        assert await engine.backend.contains(engine.keys) == [False] * 8
        assert engine.backend.holds(engine.keys[0]) is False
        connects = engine.count("connect_failed")
        await engine.load()
        assert engine.count("connect_failed") == connects  # open means: not even tried
        server.start()
        await engine.back()


async def test_never_there_at_all_it_is_a_miss():
    async with Engine(f"redis://127.0.0.1:{free_port()}") as engine:
        assert await engine.load() == [False] * 8
        assert await engine.store() == [False] * 8


async def test_restarted_empty_old_verdicts_are_dropped(server):
    async with Engine(server.url, present_s=3600.0) as engine:
        await engine.store()
        assert engine.backend.holds(engine.keys[0]) is True
        server.kill()
        server.start()

        async def noticed():
            await engine.backend.contains(engine.keys)
            return engine.backend.holds(engine.keys[0]) is not True

        await until(noticed)
        assert not any(await engine.load())
        await engine.back()


async def test_paused_it_is_left_alone_and_found_again(server):
    async with Engine(server.url) as engine:
        await engine.back()
        server.pause()
        try:
            await engine.shut_out()
            assert await engine.load() == [False] * 8
        finally:
            server.resume()
        await until(engine.hits)  # nothing was lost meanwhile


@pytest.mark.chaos
async def test_paused_for_half_a_minute(server):
    async with Engine(server.url) as engine:
        await engine.back()
        server.pause()
        try:
            for _ in range(300):
                await engine.load()
                await asyncio.sleep(0.1)
        finally:
            server.resume()
        await until(engine.hits)


async def test_a_short_client_pause_costs_nothing_but_time(server):
    async with Engine(server.url, timeout_s=5.0) as engine:
        await engine.back()
        server.cli("client", "pause", "200", "all")
        assert await engine.hits()


async def test_a_long_client_pause_is_an_outage(server):
    async with Engine(server.url) as engine:
        await engine.back()
        server.cli("client", "pause", "1500", "all")
        await engine.shut_out()
        await until(engine.hits)


async def test_loading_its_snapshot_it_is_not_used_before_it_is_done(tmp_path):
    """The moment in which a client that trusts the order of replies mixes up two keys."""
    server = RedisServer(tmp_path / "redis", "--enable-debug-command", "local")
    try:
        async with Engine(server.url) as engine:
            await engine.store()
            server.cli("debug", "populate", "3000", "x", "1000")
            server.cli("save")
            server.kill()
            server = RedisServer(
                tmp_path / "redis", "--key-load-delay", "700",  # microseconds a key
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


async def test_full_it_refuses_stores_and_still_serves_loads(server):
    async with Engine(server.url) as engine:
        await engine.back()
        used = server.cli("info", "memory").split("used_memory:")[1].split()[0]
        server.cli("config", "set", "maxmemory", used)
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


async def test_made_a_replica_it_is_left_alone_until_it_is_a_master_again(server, tmp_path):
    other = RedisServer(tmp_path / "other")
    try:
        async with Engine(server.url) as engine:
            await engine.back()
            server.cli("replicaof", "127.0.0.1", str(other.port))
            await engine.shut_out()
            server.cli("replicaof", "no", "one")
            await engine.back()
    finally:
        other.stop()


async def test_with_another_password_it_is_left_alone_until_it_is_right_again(server):
    async with Engine(server.url) as engine:
        await engine.back()
        server.cli("config", "set", "requirepass", "changed")
        server.cli("-a", "changed", "--no-auth-warning", "client", "kill", "type", "normal")
        await engine.shut_out()
        server.cli("-a", "changed", "--no-auth-warning", "config", "set", "requirepass", "")
        await until(engine.hits)


async def test_a_right_taken_away_is_an_outage(server):
    server.cli("acl", "setuser", "kv", "reset", "on", ">p", "~kvoffload:*", "+@all")
    async with Engine(f"redis://kv:p@127.0.0.1:{server.port}") as engine:
        await engine.back()
        server.cli("acl", "setuser", "kv", "-getex")
        await engine.shut_out()
        server.cli("acl", "setuser", "kv", "+getex")
        await until(engine.hits)


async def test_flushed_in_the_middle_of_loads_what_is_gone_is_a_miss(server):
    async with Engine(server.url) as engine:
        keys = keys_of(48, "flush")
        for _ in range(3):
            assert all(await engine.store(keys))
            loads = asyncio.gather(*(engine.load(keys) for _ in range(4)))
            await asyncio.to_thread(server.cli, "flushall", "async")
            await loads
            assert not any(await engine.load(keys))
        assert not engine.open


async def test_clients_killed_all_the_time(server):
    """Connections die under every call; what is loaded is right, and the end is good."""
    async with Engine(server.url) as engine:
        await engine.store()
        for _ in range(10):
            calls = asyncio.gather(engine.load(), engine.store(), engine.load())
            await asyncio.to_thread(server.cli, "client", "kill", "type", "normal")
            await calls
        await engine.back()


async def test_lookups_on_the_engines_thread_end_by_themselves_while_the_server_is_paused(server):
    """As an engine runs it: the loop on a thread of its own, questions on this one."""
    io = IOLoop()
    backend = open_backend("redis", {"url": server.url, "timeout_s": 0.3}, "faults")
    backend.bind(io.loop)
    keys = keys_of(20, "faults")
    try:
        assert all(io.call(backend.write(keys[:10], filled(keys[:10])), LIMIT_S))
        assert await answers(backend, keys) == [True] * 10 + [False] * 10
        server.pause()
        unknown = keys_of(50, "unknown")
        assert await answers(backend, unknown) == [False] * 50
        server.resume()

        async def known_again():
            return await answers(backend, keys) == [True] * 10 + [False] * 10

        await until(known_again)
    finally:
        io.call(backend.close(), LIMIT_S)
        io.close()


async def answers(backend, keys):
    """Ask like a scheduler: again each step until there is an answer for every key."""
    found = {}

    async def all_answered():
        for key in keys:
            if found.get(key) is None:
                found[key] = backend.holds(key)
        return None not in found.values()

    await until(all_answered)
    return [found[key] for key in keys]


FAULTS = {
    "latency": Latency(0.02, jitter_s=0.02),
    "bandwidth": Bandwidth(20 << 20),
    "cut_at_once": CutAfter(0),
    "cut_in_a_chunk": CutAfter(100_000),
    "half_closed": HalfCloseAfter(100_000),
    "hang_at_once": HangAfter(0),
    "hang_in_a_chunk": HangAfter(100_000),
    "garbage": Garbage(),
    "garbage_in_a_chunk": Garbage(100_000),
}
HARMLESS = {"latency", "bandwidth"}


async def survives(server, name, way):
    """Use a server through one fault, on a proxy of its own, and again without it."""
    # What is only slow must succeed, on a busy machine too: there no deadline is in its way.
    patient = {"timeout_s": LIMIT_S / 2} if name in HARMLESS else {}
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with Engine(f"redis://127.0.0.1:{proxy.port}", **patient) as engine:
            await engine.back()
            setattr(proxy, way, [FAULTS[name]])
            stored = await engine.store(keys_of(8, f"new {name}"))
            loaded = await engine.load()
            assert name not in HARMLESS or (all(stored) and all(loaded)), name
            await engine.load()
            setattr(proxy, way, [])
            await engine.back()


@pytest.mark.parametrize("way", ["to_client", "to_server"])
async def test_faults_on_the_wire(server, way):
    async with asyncio.TaskGroup() as group:  # they mostly wait: side by side
        for name in FAULTS:
            group.create_task(survives(server, name, way), name=name)


async def test_too_slow_for_lookups_it_is_left_alone_until_it_is_quick_again(server):
    """It answers everything, but every request in the engine would wait for it in vain."""
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        options = {"timeout_s": 5.0, "connect_timeout_s": 5.0, "lookup_timeout_s": 0.1}
        async with Engine(f"redis://127.0.0.1:{proxy.port}", **options) as engine:
            await engine.back()
            proxy.to_client = [Latency(0.2)]

            async def opened():
                await engine.backend.contains(engine.keys)
                return engine.open

            await until(opened)
            proxy.to_client = []
            await until(engine.hits)


async def test_one_changed_byte_anywhere_is_a_miss_or_harmless(server):
    """Positions all over a batch of replies and of requests: header, payload, length, line end."""
    choose = random.Random(0)
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with Engine(f"redis://127.0.0.1:{proxy.port}", connections=1) as engine:
            await engine.back()
            reply = CHUNK_BYTES + 256 + 10
            spots = [0, 1, 5, 7, 8, 9, 10, 30, 200, 263, 264, 300, reply - 2, reply - 1, reply]
            spots += [choose.randrange(8 * reply) for _ in range(20)]
            for at in spots:
                for way in ("to_client", "to_server"):
                    setattr(proxy, way, [Corrupt(at, mask=1 << choose.randrange(8))])
                    await engine.load()
                    await engine.store()
                    setattr(proxy, way, [])
            await engine.back()
    stored = set(server.cli("keys", "*").splitlines())
    async with Engine(server.url) as engine:  # what a damaged request stored is found out later
        await engine.load()
    assert stored


@pytest.mark.parametrize("name", ["latency", "cut_in_a_chunk", "garbage_in_a_chunk"])
async def test_a_cancelled_call_leaves_the_memory_alone_on_a_bad_line(server, name):
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with Engine(f"redis://127.0.0.1:{proxy.port}") as engine:
            await engine.back()
            proxy.to_client = [FAULTS[name]]
            for pause in (0, 0.001, 0.01, 0.03):
                memory = [bytearray(CHUNK_BYTES) for _ in engine.keys]
                into = [memoryview(block) for block in memory]
                task = asyncio.ensure_future(engine.backend.read(engine.keys, into))
                await asyncio.sleep(pause)
                task.cancel()
                await asyncio.wait([task])
                for slot in into:
                    slot[:] = b"\xaa" * CHUNK_BYTES
                await asyncio.sleep(0.05)
                assert all(bytes(slot) == b"\xaa" * CHUNK_BYTES for slot in into)
                for slot, block in zip(into, memory, strict=True):
                    slot.release()
                    block.clear()  # BufferError if anything still has a hold on it


async def test_memory_of_the_caller_is_not_held_after_a_call(server):
    """Views of a slab can be released at once, also after failures."""
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with Engine(f"redis://127.0.0.1:{proxy.port}") as engine:
            await engine.back()
            for fault in ([], [CutAfter(100_000)], [HangAfter(1000)], [Garbage(50_000)]):
                proxy.to_client = fault
                memory = [bytearray(CHUNK_BYTES) for _ in engine.keys]
                views = [memoryview(block) for block in memory]
                await asyncio.wait_for(engine.backend.read(engine.keys, views), LIMIT_S)
                await asyncio.wait_for(engine.backend.write(keys_of(8, str(fault)), views), LIMIT_S)
                for view in views:
                    view.release()
                for block in memory:
                    block.clear()  # BufferError if anything still has a hold on it


async def test_a_server_that_answers_anything_but_redis(tmp_path):
    """Something else listens on the port: it talks first, echoes, or says nothing."""
    talk = {
        "ssh": b"SSH-2.0-OpenSSH_9\r\n",
        "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
        "mute": b"",
    }
    for greeting in talk.values():

        async def serve(reader, writer, greeting=greeting):
            writer.write(greeting)
            while data := await reader.read(1000):
                writer.write(data)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as other:
            port = other.sockets[0].getsockname()[1]
            async with Engine(f"redis://127.0.0.1:{port}") as engine:
                assert await engine.load() == [False] * 8
                assert await engine.store() == [False] * 8


async def test_connections_and_threads_do_not_grow_with_failures(server):
    before = threading.active_count()
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with Engine(f"redis://127.0.0.1:{proxy.port}") as engine:
            for _ in range(20):
                proxy.to_client = [CutAfter(50_000)]
                await asyncio.gather(*(engine.load() for _ in range(4)), engine.store())
                proxy.to_client = []
                await engine.load()
            assert engine.count("connections") <= 3
    assert threading.active_count() <= before + 1


async def test_sentinels_lead_to_the_new_master_after_a_failover(tmp_path):
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
        async with Engine(f"redis+sentinel://{hosts}/kv", connect_timeout_s=1.0) as engine:
            await engine.back()
            await until(lambda: asyncio.to_thread(linked, replica, sentinels))
            master.kill()

            async def failed_over():
                return all(await engine.store(keys_of(4, "after")))

            await until(failed_over)
            assert "role:master" in replica.cli("info", "replication")
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
