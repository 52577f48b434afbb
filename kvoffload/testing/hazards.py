"""Conformance tests of hazards: a blocked event loop, a damaged chunk, a full store."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvoffload.backends.base import Answers, Backend, Observable, ReadsEach, Removal
from kvoffload.testing.harness import (
    CHUNK_BYTES,
    OpensBackends,
    filled,
    keys_of,
    on_a_loop,
    slots,
    wrong_bytes,
)

MOST_BLOCKED_S = 0.05
"""A call that blocks the event loop this long delays all requests of the engine."""
BUSY_S = 30.0
"""A busy machine may stop the loop in some tries; a blocking backend stops it in each."""
SETTLED_S = 5.0
"""Removals are reported, and damaged chunks replaced, within this time."""


class HazardSuite(OpensBackends):
    """A part of :class:`~kvoffload.testing.backends.BackendSuite`."""

    @on_a_loop
    async def test_no_call_blocks_the_loop(self) -> None:
        """In the best of some tries, every call leaves the event loop its turns."""
        backend = await self.opened()
        shortest: dict[str, float] = {}
        end_s = time.monotonic() + BUSY_S
        while time.monotonic() < end_s:
            keys = keys_of(16, f"{end_s - time.monotonic()}")
            for verb, call in _calls(backend, keys).items():
                blocked_s = await _longest_stop_s(call)
                shortest[verb] = min(blocked_s, shortest.get(verb, blocked_s))
            if max(shortest.values()) < MOST_BLOCKED_S:
                return
        blocking = {verb: round(s, 3) for verb, s in shortest.items() if s >= MOST_BLOCKED_S}
        assert not blocking, f"calls block the event loop, for so many seconds: {blocking}"

    @on_a_loop
    async def test_a_damaged_chunk_is_a_miss_and_can_come_back(self) -> None:
        """No way of reading answers True for a damaged chunk."""
        backend = await self.opened()
        for read in _readers(backend):
            keys, into = keys_of(3, f"{read}"), slots(3)
            arrived: list[int] = []
            assert await backend.write(keys, filled(keys)) == [True] * 3
            self.damage(backend, keys[1])
            answers = [bool(answer) for answer in await read(keys, into, arrived.append)]
            assert answers == [True, False, True]
            assert 1 not in arrived, "a chunk was reported before its bytes were verified"
            assert wrong_bytes(keys, into, [True, False, True]) == []
            end_s = time.monotonic() + SETTLED_S
            # A store may remove the damaged chunk later, and with it one written meanwhile.
            while not all(await backend.read(keys, into)):
                assert time.monotonic() < end_s, "a damaged chunk cannot be written again"
                await backend.write(keys[1:2], filled(keys[1:2]))
            assert wrong_bytes(keys, into) == []

    @on_a_loop
    async def test_a_full_store_keeps_its_capacity_and_says_what_left(self) -> None:
        """Old chunks leave or new ones are refused; a chunk answered with True can be read."""
        whole = await self.opened()
        if not isinstance(whole, Observable) or whole.usage().capacity_bytes is None:
            return  # its server sets the limit, and evicts
        backend, keys = await self.closed_later(self.open_small("full")), keys_of(96)
        answers: list[bool] = []
        assert isinstance(backend, Observable)
        for key in keys:
            answers.extend(map(bool, await backend.write([key], filled([key]))))
            resident_bytes, capacity_bytes, *_ = backend.usage()
            assert capacity_bytes is not None
            assert (resident_bytes or 0) <= capacity_bytes
            into = slots(1)
            read = await backend.read([key], into)
            assert not answers[-1] or read == [True], "a chunk said to be stored is missing"
            assert wrong_bytes([key], into, read) == []
        assert any(answers), "not one of 96 chunks was stored"
        assert sum(await backend.contains(keys)) * CHUNK_BYTES <= (capacity_bytes or 0)
        stored = [key for key, is_stored in zip(keys, answers, strict=True) if is_stored]
        await _all_removals_are_told(backend, stored)


async def _all_removals_are_told(backend: Any, stored: Sequence[bytes]) -> None:
    """Each chunk that left is reported once, with a reason, and no other."""
    told: list[Removal] = []

    async def gone() -> set[bytes]:
        there = await backend.contains(stored)
        return {key for key, is_there in zip(stored, there, strict=True) if not is_there}

    end_s = time.monotonic() + SETTLED_S
    while True:
        # Chunks may leave at any time: a missing one is reported from now on, and stays missing.
        before = await gone()
        told += backend.take_removals()
        names = [removal.key for removal in told]
        quiet, wrong = before - set(names), set(names) - await gone()
        if not quiet or time.monotonic() > end_s:
            break
        await asyncio.sleep(0.01)
    again = {removal.key for removal in backend.take_removals()} & set(names)
    assert not again, f"{len(again)} removals were reported more than once"
    assert len(names) == len(set(names)), "a removal was reported more than once"
    assert not quiet, f"{len(quiet)} of {len(stored)} chunks left without a word"
    assert not wrong, f"{len(wrong)} chunks were reported as removed and are there, or never were"
    assert all(removal.reason for removal in told)


def _calls(backend: Backend, keys: Sequence[bytes]) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return every call of a backend, in an order in which each has work."""
    memory, into = filled(keys), slots(len(keys))
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "write": lambda: backend.write(keys, memory),
        "contains": lambda: backend.contains(keys),
        "read": lambda: backend.read(keys, into),
    }
    if isinstance(backend, ReadsEach):
        calls["read_each"] = lambda: backend.read_each(keys, into, lambda i: None)
    calls["remove"] = lambda: backend.remove(keys)
    return calls


def _readers(backend: Backend) -> list[Callable[..., Awaitable[Answers]]]:
    """Return both ways of reading, with one signature."""
    ways: list[Callable[..., Awaitable[Answers]]] = [
        lambda keys, into, arrived: backend.read(keys, into)
    ]
    if isinstance(backend, ReadsEach):
        ways.append(backend.read_each)
    return ways


async def _longest_stop_s(call: Callable[[], Awaitable[Any]]) -> float:
    """Return the longest time for which a call blocked the event loop."""
    longest_s = 0.0
    # The task makes the call, because a plain function may block before it returns its coroutine.
    task = asyncio.ensure_future(_made(call))
    while not task.done():
        begun = time.perf_counter()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.perf_counter() - begun)
    await task
    return longest_s


async def _made(call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()
