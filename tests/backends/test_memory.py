"""The memory backend."""

import subprocess
import sys

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


WITHOUT_MEMORY = """
import asyncio, resource
from kvoffload import open_backend
from kvoffload.testing.backends import filled, keys_of, slots
from kvoffload.testing.harness import wrong_bytes

async def main():
    backend, keys = open_backend("memory", {"capacity": "1GiB"}, "n"), keys_of(3)
    memory, into = filled(keys, 16 << 20), slots(3, 16 << 20)
    assert await backend.write(keys[:1], memory[:1]) == [True]
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 20), before[1]))
    stored, loaded = await backend.write(keys[1:], memory[1:]), await backend.read(keys, into)
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert not wrong_bytes(keys, into, loaded)
    print(stored, [bool(each) for each in loaded], backend.counters())
    assert await backend.write(keys, memory) == [True] * 3
    assert all(await backend.read(keys, into)) and not wrong_bytes(keys, into)
    await backend.close()

asyncio.run(main())
"""


def test_a_store_without_memory_is_a_refusal_that_one_line_tells():
    words = [sys.executable, "-c", WITHOUT_MEMORY]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == "[False, False] [True, False, False] {'write_failed': 2, 'read_missing': 2}\n"
    )
    assert done.stderr == "MemoryBackend: a write failed: MemoryError()\n"
