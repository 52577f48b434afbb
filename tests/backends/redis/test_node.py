"""The state of a node over many connections, and the end of its calls from outside."""

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from kvoffload.backends.base import ReadResult
from kvoffload.backends.redis.circuit_breaker import CircuitBreaker
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, slots
from tests.support.redis_engine import until
from tests.support.redis_server import BINARY, MISSING

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)
RECONNECTS = 12


@pytest.fixture
async def backend(server, opened):
    backend = opened(server, "node", timeout_s=0.5)
    await backend.contains(keys_of(1))
    return backend


def node_of(backend):
    (node,) = backend._topology.nodes()
    return node


async def ask(backend):
    """One lookup; returns how many attempts to connect failed meanwhile."""
    before = backend.counters().get("connect_failed", 0)
    await backend.contains(keys_of(1))
    return backend.counters().get("connect_failed", 0) - before


async def test_failed_connects_hours_apart_do_not_open_the_breaker(server, backend):
    now_s = 0.0
    node = node_of(backend)
    node.breaker = CircuitBreaker(patience_s=60.0, clock=lambda: now_s)
    for _ in range(2):
        server.kill()
        await until(lambda: disconnected(backend))
        assert await ask(backend) == 1
        assert not node.is_open
        server.start()
        assert await ask(backend) == 0
        assert backend.usage().gauges["connections"] > 0
        now_s += 3600.0


async def test_threads_and_connections_do_not_grow_with_reconnects(server, backend):
    threads = threading.active_count()
    with redis.Redis(port=server.port) as admin:
        for _ in range(RECONNECTS):
            admin.client_kill_filter(_type="normal", skipme=True)
            await until(lambda: disconnected(backend))
            assert await ask(backend) == 0
    assert backend.counters()["connected"] > RECONNECTS
    assert backend.usage().gauges["connections"] == 1
    assert threading.active_count() <= threads


async def test_a_probe_whose_connection_closes_at_once_leaves_one_probe(
    server, backend, monkeypatch
):
    monkeypatch.setattr(CircuitBreaker, "probe_in", lambda self: 0.01)
    node = node_of(backend)
    real, running, counts, closed_at_once = node._open, [], [], []

    def open_and_close(connection):
        if not node.is_open:
            return real(connection)
        running.append(True)
        counts.append(len(running))
        try:
            real(connection)
            time.sleep(0.05)
        finally:
            running.pop()
        if len(closed_at_once) < 3:
            closed_at_once.append(connection)
            connection.abort("closed")

    monkeypatch.setattr(node, "_open", open_and_close)
    server.kill()
    while not node.is_open:
        await ask(backend)
    server.start()
    await until(lambda: len(closed_at_once) == 3 and not node.is_open)
    assert set(counts) == {1}
    assert (await backend.contains(keys_of(1)), backend.usage().gauges["connections"]) == (
        [False],
        1,
    )


async def test_a_server_that_no_thread_can_probe_is_used_again_once_it_is_back(
    server, backend, monkeypatch
):
    node, start = node_of(backend), threading.Thread.start

    def refuses(thread):
        if thread.name == "kvoffload-redis-probe":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    server.kill()
    while not backend.counters().get("breaker_opened"):
        await ask(backend)
    server.start()
    keys = keys_of(1)
    assert await backend.write(keys, filled(keys)) == [True]
    assert await backend.contains(keys) == [True]
    assert not node.is_open


async def test_a_probe_goes_on_although_the_system_has_no_more_threads(
    server, backend, monkeypatch
):
    """A failed probe wakes the thread that asks who has which keys, which never ran before."""
    monkeypatch.setattr(CircuitBreaker, "probe_in", lambda self: 0.01)
    start = threading.Thread.start

    def refuses(thread):
        if thread.name == "kvoffload-redis-slots":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    server.kill()
    await until(lambda: disconnected(backend))  # one that was just used is trusted
    while not backend.counters().get("breaker_opened"):
        assert await ask(backend) == 1
    probes = backend.counters().get("probes", 0)
    await until(lambda: backend.counters().get("probes", 0) > probes + 1)
    server.start()

    async def back():
        return await backend.contains(keys_of(1)) == [False] and not node_of(backend).is_open

    await until(back)
    assert backend.counters().get("read_failed") is None


async def test_a_near_server_that_was_slow_to_greet_is_near_once_it_answers(backend):
    node = node_of(backend)
    node._round_trip_s = 1.0
    far = node.at_once(CHUNK_BYTES)
    for _ in range(100):
        node.command(b"PING")
    assert node.at_once(CHUNK_BYTES) < far


async def test_a_connection_is_counted_while_a_request_takes_it(backend):
    """Else two requests have one connection, and each reads replies to the other's command."""
    node, stop = node_of(backend), threading.Event()

    def ask():
        while not stop.is_set():
            node.command(b"PING")

    pauses = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask) for _ in range(3)]
            counts = {node.num_connections for _ in range(40_000)}
            stop.set()
            for each in asking:
                each.result()
    finally:
        sys.setswitchinterval(pauses)
    assert max(counts) == 1


async def test_a_lookup_at_the_end_of_a_probe_uses_its_connection(server, backend, monkeypatch):
    monkeypatch.setattr(CircuitBreaker, "probe_in", lambda self: 0.01)
    node = node_of(backend)
    real, replies = node._count, []

    def count(word):
        if word == "breaker_closed":
            replies.append(node.command(b"PING"))
        real(word)

    monkeypatch.setattr(node, "_count", count)
    server.kill()
    while not node.is_open:
        await ask(backend)
    server.start()
    await until(lambda: bool(replies))
    node._probing.join()
    assert backend.usage().gauges["connections"] == 1


async def test_a_cancelled_load_returns_long_before_its_deadline(server, opened):
    """The thread is in a system call of the kernel's, with a minute to go."""
    backend = opened(server, "node", timeout_s=120.0)
    keys, memory = keys_of(8), [bytearray(CHUNK_BYTES) for _ in range(8)]
    views = [memoryview(block) for block in memory]
    assert all(await backend.write(keys, filled(keys)))
    server.pause()
    try:
        for call in (backend.read, backend.write):
            began = time.monotonic()
            some = keys if call == backend.read else keys_of(8, "new")
            task = asyncio.ensure_future(call(some, views))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert time.monotonic() - began < 30
    finally:
        server.resume()
    for view, block in zip(views, memory, strict=True):
        view.release()
        block.clear()  # BufferError if anything still has a hold on it
    await until(lambda: hits(backend, keys))
    assert backend.usage().gauges["breakers_open"] == 0


async def test_a_close_ends_calls_at_once(server, opened):
    backend = opened(server, "node", timeout_s=120.0)
    keys = keys_of(8)
    assert all(await backend.write(keys, filled(keys)))
    server.pause()
    try:
        began = time.monotonic()
        calls = asyncio.gather(
            backend.read(keys, slots(8)), backend.write(keys_of(8, "new"), filled(keys))
        )
        await asyncio.sleep(0.3)
        await backend.close()
        assert [list(map(bool, answers)) for answers in await calls] == [[False] * 8] * 2
        assert time.monotonic() - began < 30
    finally:
        server.resume()


async def hits(backend, keys):
    return all(await backend.read(keys, slots(len(keys))))


def disconnected(backend):
    return backend.usage().gauges["connections"] == 0


async def test_a_damaged_value_is_looked_at_again_though_no_thread_could_once(
    server, backend, monkeypatch
):
    keys, start = keys_of(1), threading.Thread.start
    assert await backend.write(keys, filled(keys)) == [True]
    with redis.Redis(port=server.port) as admin:
        (name,) = (name for name in admin.scan_iter() if not name.endswith(b":facts"))
        admin.setrange(name, 300, b"damage")

    def refuses(thread):
        if thread.name == "kvoffload-once":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        assert await backend.read(keys, slots(1)) == [ReadResult.CORRUPT]
    assert await backend.read(keys, slots(1)) == [ReadResult.CORRUPT]

    async def removed():
        return await backend.contains(keys) == [False]

    await until(removed)
