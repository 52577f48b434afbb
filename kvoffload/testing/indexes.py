"""Conformance tests of local indexes: what they answer, and the changes that they list."""

import asyncio
from collections.abc import Callable

import pytest

from kvoffload.backends.base import LocalIndex
from kvoffload.testing.harness import OpensBackends, filled, keys_of, on_a_loop, slots


class IndexSuite(OpensBackends):
    """A part of :class:`~kvoffload.testing.backends.BackendSuite`."""

    @on_a_loop
    async def test_presence_agrees_and_forgets(self) -> None:
        """Where there is an index, a forgotten key is absent until it is written again."""
        backend, keys = await self.opened(), keys_of(3)
        if not isinstance(backend, LocalIndex):
            pytest.skip("has no index")
        await backend.write(keys, filled(keys))
        assert [backend.holds(key) for key in keys] == [True] * 3
        assert backend.holds(keys_of(1, "never stored")[0]) is False
        backend.forget(keys[:1])
        assert backend.holds(keys[0]) is False
        await backend.write(keys[:1], filled(keys[:1]))
        assert backend.holds(keys[0]) is True
        assert await backend.read(keys[:1], slots(1)) == [True]

    @on_a_loop
    async def test_changes_follow_what_holds_answers(self) -> None:
        """Where changes are listed, a copy made of them agrees with ``holds`` after each call."""
        backend, keys = await self.opened(), keys_of(6)
        if not isinstance(backend, LocalIndex):
            pytest.skip("has no index")
        copy: set[bytes] = set()

        def agrees() -> bool:
            followed(backend, copy)
            return copy == {key for key in keys if backend.holds(key)}

        await backend.write(keys[:3], filled(keys[:3]))
        assert await eventually(lambda: agrees() and backend.is_complete)
        assert copy == set(keys[:3])
        await backend.write(keys[3:], filled(keys[3:]))
        backend.forget(keys[:1])
        await backend.remove(keys[1:2])
        assert agrees()
        assert copy == set(keys[2:])
        await backend.write(keys[:1], filled(keys[:1]))
        await backend.remove(keys[4:5])
        await backend.write(keys[4:5], filled(keys[4:5]))
        changes = backend.take_changes(100)
        assert {key for key, _ in changes} >= {keys[0]}
        assert len(dict(changes)) == len(changes), "a key was returned twice"
        assert changes == [(key, backend.holds(key)) for key, _ in changes]
        assert backend.take_changes(100) == []
        await backend.close()
        assert agrees()

    @on_a_loop
    async def test_changes_follow_evictions(self) -> None:
        """Where changes are listed, the chunks that a full store evicts are among them."""
        backend = self.open_small("suite")
        await self.closed_later(backend)
        if not isinstance(backend, LocalIndex):
            pytest.skip("has no index")
        copy: set[bytes] = set()
        stored: list[bytes] = []
        for turn in range(12):
            keys = keys_of(8, f"turn{turn}")
            await backend.write(keys, filled(keys))
            stored += keys
            followed(backend, copy)

        def agrees() -> bool:
            followed(backend, copy)
            return copy == {key for key in stored if backend.holds(key)}

        assert await eventually(agrees)
        assert 0 < len(copy) < len(stored)


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Wait until it is true; return whether it became so."""
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return condition()


def followed(index: LocalIndex, copy: set[bytes]) -> None:
    """Bring a copy of an index up to date, a few changes at a time."""
    while changes := index.take_changes(5):
        for key, present in changes:
            (copy.add if present else copy.discard)(key)
