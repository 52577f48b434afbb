"""A root that was filled under one eviction policy serves under another, and back again."""

import pytest
from disk_parts import ON_DISK, SIZE, open_disk, write, write_each

from kvoffload.backends.disk.backend import DiskOptions
from kvoffload.config import ByteSize, parse_config
from kvoffload.testing.backends import keys_of, slots

CHUNKS = 8


def small(root, policy):
    settings = {} if policy is None else {"policy": policy}
    return open_disk(root, capacity=ByteSize(CHUNKS * ON_DISK), high_watermark=1.0, **settings)


@pytest.mark.parametrize(
    ("first", "second"), [("lru", None), ("lru", "handicap"), ("arc", None), (None, "lru")]
)
async def test_a_root_filled_under_another_policy_keeps_its_chunks_and_their_order(
    tmp_path, first, second
):
    old, new = keys_of(CHUNKS), keys_of(CHUNKS, "new")
    backend = small(tmp_path, first)
    assert all(await write_each(backend, old))
    assert await backend.read(old[:2], slots(2, SIZE)) == [True] * 2  # used last
    await backend.close()
    for policy in (second, first):
        backend = small(tmp_path, policy)
        assert [backend.holds(key) for key in old] == [True] * CHUNKS
        for key in [*old[2:], *old[:2]]:
            assert await backend.read([key], slots(1, SIZE)) == [True]
        await backend.close()
    backend = small(tmp_path, second)
    gone = []
    for key in new[:6]:
        assert await write(backend, [key]) == [True]
        gone += [name for name in old if name not in gone and not backend.holds(name)]
    assert gone == old[2:], "what was read longest ago leaves first"
    await backend.close()


def test_disk_and_host_memory_have_one_default():
    assert DiskOptions(root="/kv").policy == parse_config({"cpu_bytes": 1}).policy == "handicap"
