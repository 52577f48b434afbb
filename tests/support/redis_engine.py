"""An engine's use of a Redis tier: for tests in which something is wrong with the server.

Payloads are a function of the key, and every byte that is loaded is checked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvoffload import open_backend
from kvoffload.backends.base import Observable
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, payload_of, slots

PATIENT = {"timeout_s": 5.0, "connect_timeout_s": 5.0, "lookup_timeout_s": 5.0}
"""Options of a backend that must lose nothing although the machine is busy."""
LIMIT_S = 60.0
"""No call may take so long, whatever happens; far above every deadline involved."""


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Wait until ``condition`` says so, which may be a coroutine; for what happens elsewhere.

    Raises:
        TimeoutError: it did not in :data:`LIMIT_S`.
    """
    async with asyncio.timeout(LIMIT_S):
        while True:
            said = condition()
            if await said if isinstance(said, Awaitable) else said:
                return
            await asyncio.sleep(0.02)


async def store(
    url: str, namespace: str, count: int, facts: Mapping[str, str] | None = None, **options: Any
) -> None:
    """Store so many chunks, and the facts of their namespace, as an engine that then ends."""
    backend = open_backend("redis", {"url": url, **PATIENT, **options}, namespace)
    if facts:
        await backend.describe(facts)
    keys = keys_of(count, namespace)
    assert all(await backend.write(keys, filled(keys)))
    await backend.close()


class RedisEngine:
    """Stores and loads as an engine does; a wrong byte or a connection too many is an error.

    Args:
        url: of the tier.
        servers: how many there are to be connected to.
        options: of the backend; deadlines are short by default.
    """

    def __init__(self, url: str, servers: int = 1, **options: Any) -> None:
        quick = {"timeout_s": 0.3, "connect_timeout_s": 0.3, "lookup_timeout_s": 2.0}
        options = {"connections": 2} | quick | options
        self.backend = open_backend("redis", {"url": url, **options}, "faults")
        self.keys = keys_of(8, "faults")
        self._max_connections = servers * (options["connections"] + 1)

    async def __aenter__(self) -> "RedisEngine":
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.wait_for(self.backend.close(), LIMIT_S)

    async def store(self, keys: Sequence[bytes] | None = None) -> list[bool]:
        """Store chunks; says which are there now."""
        keys = self.keys if keys is None else keys
        return await asyncio.wait_for(self.backend.write(keys, filled(keys)), LIMIT_S)

    async def load(self, keys: Sequence[bytes] | None = None) -> list[bool]:
        """Load chunks; says which came, after a look at all their bytes."""
        keys = self.keys if keys is None else keys
        into = slots(len(keys))
        good = await asyncio.wait_for(self.backend.read(keys, into), LIMIT_S)
        for key, slot, ok in zip(keys, into, good, strict=True):
            if ok and bytes(slot) != payload_of(key, CHUNK_BYTES):
                raise AssertionError(f"wrong bytes for {key.hex()}")
        if self.count("connections") > self._max_connections:
            raise AssertionError(f"{self.count('connections')} connections")
        return good

    async def hits(self) -> bool:
        """Whether all chunks come."""
        return all(await self.load())

    async def back(self) -> None:
        """Wait until chunks can be stored and loaded again."""
        await until(self._whole)

    async def shut_out(self) -> None:
        """Use the server until the breaker opens."""

        async def opened() -> bool:
            await self.load()
            return self.open

        await until(opened)

    @property
    def open(self) -> bool:
        """Whether the server is being left alone."""
        return self.count("breakers_open") > 0

    def count(self, name: str) -> int:
        """One of the backend's counters or gauges."""
        if not isinstance(self.backend, Observable):
            raise TypeError(f"{self.backend!r} counts nothing")
        return {**self.backend.counters(), **self.backend.usage().gauges}.get(name, 0)

    async def _whole(self) -> bool:
        return all(await self.store()) and await self.hits()
