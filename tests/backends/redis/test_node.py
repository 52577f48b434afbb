"""The state of a node over many connections: old failures and finished tasks are dropped."""

import asyncio

import pytest
import redis

from kvoffload import open_backend
from kvoffload.backends.redis.circuit_breaker import CircuitBreaker
from kvoffload.testing.backends import keys_of
from tests.support.redis_engine import until
from tests.support.redis_server import BINARY, MISSING, RedisServer

pytestmark = pytest.mark.skipif(BINARY is None, reason=MISSING)
RECONNECTS = 12


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
async def backend(server):
    options = {"url": server.url, "connect_timeout_s": 5.0, "lookup_timeout_s": 5.0}
    backend = open_backend("redis", options, "node")
    await backend.contains(keys_of(1))
    yield backend
    await backend.close()


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


async def test_tasks_that_connected_are_forgotten(server, backend):
    with redis.Redis(port=server.port) as admin:
        for _ in range(RECONNECTS):
            admin.client_kill_filter(_type="normal", skipme=True)
            await until(lambda: disconnected(backend))
            assert await ask(backend) == 0
    assert backend.counters()["connected"] > RECONNECTS
    assert len(node_of(backend).close()) < 3


async def test_a_probe_whose_connection_closes_at_once_leaves_one_probe(
    server, backend, monkeypatch
):
    monkeypatch.setattr(CircuitBreaker, "probe_in", lambda self: 0.01)
    node = node_of(backend)
    real, running, counts = node._open_and_probe, [], []

    async def open_and_probe():
        running.append(True)
        counts.append(len(running))
        try:
            connection = await real()
            await asyncio.sleep(0.05)
        finally:
            running.pop()
        if len(closed_at_once) < 3:
            closed_at_once.append(connection)
            connection.abort("closed")
        return connection

    closed_at_once = []
    monkeypatch.setattr(node, "_open_and_probe", open_and_probe)
    server.kill()
    while not node.is_open:
        await ask(backend)
    server.start()

    async def back():
        return len(closed_at_once) == 3 and not node.is_open

    await until(back)
    assert set(counts) == {1}
    assert (await backend.contains(keys_of(1)), backend.usage().gauges["connections"]) == (
        [False],
        1,
    )


async def disconnected(backend):
    return backend.usage().gauges["connections"] == 0
