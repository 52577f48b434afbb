"""Redis behind a faulty network: late, cut, changed, hung, garbled; misses, then recovery."""

import asyncio
import contextlib
import random

import pytest

from kvoffload.testing.backends import CHUNK_BYTES, keys_of
from tests.support.proxy import (
    Bandwidth,
    Corrupt,
    CutAfter,
    FaultProxy,
    Garbage,
    HalfCloseAfter,
    HangAfter,
    Latency,
)
from tests.support.redis_engine import LIMIT_S, RedisEngine, until
from tests.support.redis_server import BINARY, MISSING

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)


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
    """Use a server through a proxy with one fault, and again without the fault."""
    # What is only slow must succeed, on a busy machine too: there no deadline is in its way.
    patient = {"timeout_s": LIMIT_S / 2} if name in HARMLESS else {}
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with RedisEngine(f"redis://127.0.0.1:{proxy.port}", **patient) as engine:
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


@pytest.mark.parametrize("hung", ["loads", "stores"])
async def test_what_hangs_while_all_else_is_answered_is_an_outage(server, hung):
    """A network that passes only small packets: a PING does not satisfy the probe."""
    way = {"loads": "to_client", "stores": "to_server"}[hung]
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with RedisEngine(f"redis://127.0.0.1:{proxy.port}") as engine:
            await engine.back()
            setattr(proxy, way, [HangAfter(20_000)])
            tried = 0
            while not engine.open:
                assert all(await engine.backend.contains(engine.keys))
                new = keys_of(1, f"other {tried}")
                if hung == "loads":
                    assert await engine.store(new) == [True]
                    await engine.load(engine.keys[:1])
                else:
                    assert await engine.load(engine.keys[:1]) == [True]
                    await engine.store(new)
                tried += 1
            assert tried <= 3
            await until(lambda: engine.count("probes") >= 2)
            assert engine.count("breaker_closed") == 0
            setattr(proxy, way, [])
            await until(engine.hits)


async def test_too_slow_for_lookups_it_is_left_alone_until_it_is_quick_again(server):
    """The server answers everything, but too late for the engine."""
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        options = {"timeout_s": 5.0, "connect_timeout_s": 5.0, "lookup_timeout_s": 0.1}
        async with RedisEngine(f"redis://127.0.0.1:{proxy.port}", **options) as engine:
            await engine.back()
            proxy.to_client = [Latency(0.2)]

            async def opened():
                await engine.backend.contains(engine.keys)
                return engine.open

            await until(opened)
            proxy.to_client = []
            await until(engine.hits)


async def test_lookups_that_nobody_waits_for_any_more_open_the_breaker_too(server):
    """The I/O server ends a lookup at the engine's deadline, which may be the shorter one."""
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        options = {"timeout_s": 5.0, "connect_timeout_s": 5.0, "lookup_timeout_s": 0.1}
        async with RedisEngine(f"redis://127.0.0.1:{proxy.port}", **options) as engine:
            await engine.back()

            async def found():  # on the connection of lookups, so that there is one
                return all(await engine.backend.contains(engine.keys))

            await until(found)
            proxy.to_client = [Latency(0.2)]

            async def opened():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(engine.backend.contains(engine.keys), 0.05)
                return engine.open

            await until(opened)
            assert engine.count("lookup_late")
            assert await engine.backend.contains(engine.keys) == [False] * 8


async def test_one_changed_byte_anywhere_is_a_miss_or_harmless(server):
    """Positions in a batch of replies and requests: header, payload, length, line end."""
    choose = random.Random(0)
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with RedisEngine(f"redis://127.0.0.1:{proxy.port}", connections=1) as engine:
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
    async with RedisEngine(
        server.url
    ) as engine:  # what a damaged request stored is found out later
        await engine.load()
    assert stored


@pytest.mark.parametrize("at", [2, 100, 5000], ids=["length", "header", "payload"])
async def test_a_good_value_damaged_on_its_way_stays_on_the_server(server, at):
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with RedisEngine(f"redis://127.0.0.1:{proxy.port}", connections=1) as engine:
            await engine.back()
            proxy.to_client = [Corrupt(at)]
            assert not all(await engine.load())
            proxy.to_client = []
            await until(engine.hits)  # and nothing was stored again
            assert engine.count("corrupt_removed") == 0


@pytest.mark.parametrize("name", ["latency", "cut_in_a_chunk", "garbage_in_a_chunk"])
async def test_a_cancelled_call_leaves_the_memory_alone_on_a_bad_line(server, name):
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with RedisEngine(f"redis://127.0.0.1:{proxy.port}") as engine:
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
    """The caller can release views of a slab at once, also after failures."""
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        async with RedisEngine(f"redis://127.0.0.1:{proxy.port}") as engine:
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
    """Another program listens on the port: it talks first, echoes, or stays silent."""
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
            async with RedisEngine(f"redis://127.0.0.1:{port}") as engine:
                assert await engine.load() == [False] * 8
                assert await engine.store() == [False] * 8
