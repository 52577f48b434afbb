"""Parts of the conformance suites of backends: payloads, memory, an event loop for each test."""

import asyncio
import contextlib
import functools
import hashlib
import mmap
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvoffload.backends.base import Answers, Backend

CHUNK_BYTES = 64 * 1024
LONG_S = 60.0

S = TypeVar("S", bound="OpensBackends")


def payload_of(key: bytes, size: int) -> bytes:
    """Return the bytes every test stores under ``key``."""
    seed = hashlib.sha256(key).digest()
    return (seed * (size // len(seed) + 1))[:size]


def keys_of(count: int, salt: str = "") -> list[bytes]:
    """Return distinct keys as long as offload keys: 32 bytes of hash, 4 of group."""
    return [hashlib.sha256(f"{salt}{i}".encode()).digest() + bytes(4) for i in range(count)]


def slots(count: int, size: int = CHUNK_BYTES) -> list[memoryview]:
    """Return writable page-aligned memory, as host slots are."""
    slab = memoryview(mmap.mmap(-1, max(1, count) * size))
    return [slab[i * size : (i + 1) * size] for i in range(count)]


def filled(keys: Sequence[bytes], size: int = CHUNK_BYTES) -> list[memoryview]:
    """Return slots with the payload of each key."""
    memory = slots(len(keys), size)
    for key, slot in zip(keys, memory, strict=True):
        slot[:] = payload_of(key, size)
    return memory


def wrong_bytes(
    keys: Sequence[bytes], memory: Sequence[memoryview], good: Answers | None = None
) -> list[str]:
    """Return the first wrong byte of each slot without the payload of its key."""
    found = []
    for i, (key, slot) in enumerate(zip(keys, memory, strict=True)):
        held, meant = bytes(slot), payload_of(key, slot.nbytes)
        if held != meant and (good is None or good[i]):
            at = next(n for n in range(len(held)) if held[n] != meant[n])
            found.append(f"chunk {i}: byte {at} is {held[at]:#04x}, not {meant[at]:#04x}")
    return found


def on_a_loop(test: Callable[[S], Coroutine[Any, Any, None]]) -> Callable[[S], None]:
    """Make a coroutine test an ordinary one, with a deadline; close the opened backends."""

    @functools.wraps(test)
    def run(self: S) -> None:
        async def whole() -> None:
            try:
                await asyncio.wait_for(test(self), LONG_S)
            finally:
                for backend in self._opened:
                    await backend.close()

        asyncio.run(whole())

    return run


class OpensBackends:
    """The methods that a suite needs of its author."""

    folder: Path
    """An empty folder for this test."""
    _opened: list[Backend]

    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self._opened = []

    def open(self, namespace: str) -> Backend:
        """Open the backend under test; room for at least 64 chunks of 64 KiB."""
        raise NotImplementedError("define open(self, namespace), which opens your backend")

    def open_small(self, namespace: str) -> Backend:
        """Open the backend with room for 4 to 32 chunks of 64 KiB, if it has a capacity."""
        pytest.skip("unproven: nothing shows a full store within its capacity; override open_small")

    def damage(self, backend: Backend, key: bytes) -> None:
        """Change one byte of the stored chunk without the backend, as a bad disk does."""
        pytest.skip("unproven: nothing shows that a read verifies its bytes; override damage")

    async def ready(self, backend: Backend) -> None:
        """Wait until a backend just opened knows its chunks; override if it takes time."""

    async def opened(self, namespace: str = "suite") -> Backend:
        """Open a backend and wait until it answers; it is closed after the test."""
        return await self.closed_later(self.open(namespace))

    async def closed_later(self, backend: Backend) -> Backend:
        """Return a backend once it answers; it is closed after the test."""
        self._opened.append(backend)
        await self.ready(backend)
        return backend


async def settled(task: Awaitable[Any]) -> None:
    """Wait for a cancelled task, which may have finished first."""
    with contextlib.suppress(asyncio.CancelledError):
        await task
