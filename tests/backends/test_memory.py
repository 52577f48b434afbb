"""The memory backend."""

from kvoffload import open_backend
from kvoffload.testing import BackendSuite
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, slots


class TestMemory(BackendSuite):
    def open(self, namespace):
        return open_backend("memory", {"capacity": "64MiB"}, namespace)

    def open_small(self, namespace):
        return open_backend("memory", {"capacity": 16 * CHUNK_BYTES}, namespace)

    test_a_damaged_chunk_is_a_miss_and_can_come_back = None  # no medium that could damage it


async def test_the_chunk_used_longest_ago_leaves_first():
    backend = open_backend("memory", {"capacity": 3 * CHUNK_BYTES}, "ns")
    keys = keys_of(4)
    await backend.write(keys[:3], filled(keys[:3]))
    await backend.read(keys[:1], slots(1))
    await backend.write(keys[3:], filled(keys[3:]))
    assert [backend.holds(key) for key in keys] == [True, False, True, True]
    assert [(removal.key, removal.reason) for removal in backend.take_removals()] == [
        (keys[1], "evicted")
    ]
    assert backend.take_removals() == []
    assert backend.usage().resident_bytes == 3 * CHUNK_BYTES


async def test_a_chunk_larger_than_the_store_is_refused_and_evicts_nothing():
    backend = open_backend("memory", {"capacity": CHUNK_BYTES}, "ns")
    small, large = keys_of(2)
    assert await backend.write([small], filled([small])) == [True]
    assert await backend.write([large], filled([large], 2 * CHUNK_BYTES)) == [False]
    assert backend.holds(small)
    assert backend.counters()["refused_size"] == 1
