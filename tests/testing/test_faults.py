"""The fault-injecting wrapper does what its plans say, and nothing without one."""

import asyncio

import pytest

from kvoffload import open_backend
from kvoffload.backends.admin import Purges
from kvoffload.backends.base import LocalIndex, Spares
from kvoffload.testing import BackendSuite, FaultyBackend, Plan
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, payload_of, slots


class TestWithoutAPlan(BackendSuite):
    def open(self, namespace):
        return FaultyBackend(open_backend("memory", {}, namespace))

    def open_small(self, namespace):
        options = {"capacity": 16 * CHUNK_BYTES}
        return FaultyBackend(open_backend("memory", options, namespace))

    test_a_damaged_chunk_is_a_miss_and_can_come_back = None  # the one below verifies nothing


@pytest.fixture
async def store():
    backend = FaultyBackend(open_backend("memory", {}, "ns"))
    keys = keys_of(4)
    await backend.write(keys, filled(keys))
    yield backend, keys
    await backend.close()


async def test_raises_every_second_read(store):
    backend, keys = store
    backend.plans = [Plan("raise", frozenset({"read"}), every=2)]
    assert await backend.read(keys, slots(4)) == [True] * 4
    with pytest.raises(RuntimeError):
        await backend.read(keys, slots(4))
    assert backend.struck == 1


async def test_hangs_until_cancelled_or_released(store):
    backend, keys = store
    backend.plans = [Plan("hang")]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(backend.read(keys, slots(4)), 0.01)
    hanging = asyncio.ensure_future(backend.read(keys, slots(4)))
    await asyncio.sleep(0)
    backend.release()
    assert await hanging == [False] * 4


async def test_flips_one_bit(store):
    backend, keys = store
    backend.plans = [Plan("flip")]
    into = slots(4)
    assert await backend.read(keys, into) == [True] * 4
    assert bytes(into[0]) != payload_of(keys[0], CHUNK_BYTES)


async def test_lies_misses_and_stops_half_way_for_the_keys_named(store):
    backend, keys = store
    absent = keys_of(1, "absent")
    backend.plans = [Plan("lie", keys=frozenset(absent))]
    assert await backend.contains(absent) == [True]
    assert await backend.read(keys, slots(4)) == [True] * 4
    backend.plans = [Plan("miss")]
    assert await backend.contains(keys) == [False] * 4
    backend.plans = [Plan("short")]
    assert await backend.read(keys, slots(4)) == [True, True, False, False]
    backend.plans = []
    assert await backend.contains(keys) == [True] * 4


async def test_passes_optional_protocols_through(store):
    backend, keys = store
    assert isinstance(backend, LocalIndex)
    assert backend.holds(keys[0])
    assert not backend.is_complete
    assert sorted(backend.take_changes(100)) == sorted((key, True) for key in keys)
    assert backend.is_complete


@pytest.mark.parametrize("kind", ["disk", "memory"])
async def test_passes_what_its_inner_backend_has_through_and_nothing_else(kind, tmp_path):
    inner = open_backend(kind, {"root": str(tmp_path)} if kind == "disk" else {}, "ns")
    backend = FaultyBackend(inner)
    for protocol in (Purges, Spares):
        assert isinstance(backend, protocol) == isinstance(inner, protocol)
    await backend.close()
