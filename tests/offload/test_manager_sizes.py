"""Host memory shared by chunks of several sizes."""

from math import gcd

import pytest
from kvoffload_policies.lru2 import LRU2Policy
from manager_parts import figures

from kvoffload.connectors.builder import make_host_cache
from kvoffload.errors import ConfigError
from kvoffload.offload.base import make_offload_key
from kvoffload.offload.extents import ExtentCache
from kvoffload.offload.geometry import HostGeometry
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy
from tests.support.manager_check import check

KIB = 1024


def keys(group, prompt, count):
    return [make_offload_key(f"{prompt} {i}".encode().ljust(32), group) for i in range(count)]


def new_manager(total_kib, *chunk_kib):
    geometry = HostGeometry.plan(total_kib * KIB, [size * KIB for size in chunk_kib])
    return TieredOffloadingManager(ExtentCache(geometry, LRUPolicy))


def put(manager, wanted):
    output = manager.prepare_store(wanted)
    if output is None:
        return 0
    manager.complete_store(output.keys_to_store)
    check(manager)
    return len(output.keys_to_store)


def resident_kib(manager, group, size_kib):
    ready = dict(manager._host.ready())
    return sum(key[-4:] == group.to_bytes(4, "big") for key in ready) * size_kib


def test_a_group_that_is_never_stored_counts_as_the_smallest_size():
    geometry = HostGeometry.plan(100 * KIB, [8 * KIB, 16 * KIB, 0])
    assert (geometry.row_bytes, geometry.num_rows) == (8 * KIB, 12)
    assert geometry.rows_of_group == (1, 2, 1)


def test_any_one_size_may_take_nearly_all_memory():
    for group, size in ((0, 4), (1, 36)):
        manager = new_manager(8192, 4, 36)
        for i in range(50):
            put(manager, keys(group, i, 8192 // size // 25))
        assert resident_kib(manager, group, size) > 0.95 * 8192


def test_memory_follows_demand_from_one_size_to_the_other():
    manager = new_manager(4096, 4, 20)
    for i in range(30):
        put(manager, keys(0, f"small {i}", 100))
    assert resident_kib(manager, 0, 4) > 3800
    for i in range(60):
        put(manager, keys(1, f"large {i}", 20))
    assert resident_kib(manager, 1, 20) > 3300
    for i in range(60):
        put(manager, keys(0, f"small again {i}", 100))
    assert resident_kib(manager, 0, 4) > 3300


def test_sizes_in_equal_demand_by_bytes_share_equally():
    manager = new_manager(4096, 4, 20)
    for i in range(100):
        put(manager, keys(0, f"s{i}", 50))
        put(manager, keys(1, f"l{i}", 10))
    assert resident_kib(manager, 0, 4) == pytest.approx(2048, rel=0.15)
    assert resident_kib(manager, 1, 20) == pytest.approx(2048, rel=0.15)


@pytest.mark.parametrize("first_row", [0, 1, 100])
def test_sizes_in_equal_demand_do_not_take_extents_from_each_other_for_ever(first_row):
    geometry = HostGeometry.plan(1000 * KIB, [4 * KIB, 20 * KIB])
    manager = TieredOffloadingManager(ExtentCache(geometry, LRUPolicy, first_row))
    sizes = manager._host._sizes
    shares = []
    for i in range(300):
        for group, count in ((0, 5), (1, 1)):
            put(manager, keys(group, f"{i}", count))
            shares.append(tuple(size.num_extents for size in sizes))
    assert len(set(shares[300:])) == 1


def test_a_new_size_takes_most_from_the_size_that_has_most():
    manager = new_manager(4096, 4, 20, 36)
    for i in range(40):
        put(manager, keys(0, f"a{i}", 200))
    for i in range(10):
        put(manager, keys(1, f"b{i}", 10))
    before = [resident_kib(manager, group, size) for group, size in ((0, 4), (1, 20))]
    for i in range(10):
        put(manager, keys(2, f"c{i}", 5))
    after = [resident_kib(manager, group, size) for group, size in ((0, 4), (1, 20))]
    assert before[0] > before[1]
    assert before[0] - after[0] > 800
    assert before[1] - after[1] < 300


def test_a_pinned_chunk_keeps_its_extent():
    manager = new_manager(240, 4, 20)
    small = keys(0, "a", 60)
    stored = put(manager, small)
    manager.prepare_load(small[:stored])
    assert put(manager, keys(1, "b", 3)) == 0  # every extent has a chunk that is loaded
    assert manager.figures.not_stored["cpu", "no_room"] > 0
    manager.complete_load(small[:stored])
    assert put(manager, keys(1, "b", 3)) == 3
    assert manager.lookup_prefix(keys(1, "b", 3)) == (3, False)
    check(manager)


def test_a_store_of_both_sizes_is_cut_at_the_tail_of_what_was_given():
    manager = new_manager(120, 4, 20)
    small, large = keys(0, "a", 12), keys(1, "a", 12)
    mixed = [key for pair in zip(small, large, strict=True) for key in pair]
    output = manager.prepare_store(mixed)
    assert output.keys_to_store == tuple(mixed[: len(output.keys_to_store)])
    assert 0 < len(output.keys_to_store) < len(mixed)
    manager.complete_store(output.keys_to_store)
    check(manager)


def test_room_made_for_one_size_is_not_taken_for_another_of_the_same_store():
    manager = new_manager(4000, 4, 20)
    for i in range(40):
        mixed = [k for pair in zip(keys(0, i, 80), keys(1, i, 80), strict=True) for k in pair]
        assert put(manager, mixed) == len(mixed)


def test_figures_in_bytes_never_mix_what_is_resident_with_what_is_on_its_way():
    manager = new_manager(4096, 4, 20)
    put(manager, keys(1, "a", 3))
    manager.prepare_store(keys(0, "b", 2))
    told = figures(manager)
    assert (told["resident_bytes"]["cpu"], told["inflight_bytes"]["cpu"]) == (60 * KIB, 8 * KIB)
    assert told["capacity_bytes"]["cpu"] == 4096 * KIB
    manager.complete_store(keys(0, "b", 2), success=False)
    assert figures(manager)["inflight_bytes"]["cpu"] == 0


def test_too_little_memory_for_one_chunk_of_each_size_is_refused():
    with pytest.raises(ConfigError, match="cpu_bytes"):
        HostGeometry.plan(39 * KIB, [4 * KIB, 20 * KIB])


def test_room_is_for_the_chunks_of_all_sizes_together():
    manager = new_manager(1024, 4, 36)
    small, large = keys(0, "p", 200), keys(1, "p", 20)
    assert manager.has_room(small)
    assert manager.has_room(large)
    assert not manager.has_room([*small, *large])
    assert manager.has_room([*small[:80], *large[:10]])


def test_what_is_to_be_loaded_makes_no_room_for_the_rest_of_it():
    for manager in (
        TieredOffloadingManager(HostCache(4, LRUPolicy(4))),
        new_manager(256, 4, 36),
    ):
        prompt = keys(0, "p", 100)
        here = put(manager, prompt[:4])
        assert manager.has_room(prompt[:here])
        assert not manager.has_room(prompt)
        while manager.has_room(prompt[: here + 1]):
            here += 1
        others = keys(0, "q", here)
        assert manager.has_room(others)  # what is idle may go
        manager.prepare_load(prompt[:1])
        assert not manager.has_room(others)
        assert manager.has_room(others[1:])
        manager.complete_load(prompt[:1])


def test_rows_that_something_may_still_write_into_are_never_given_out():
    geometry = HostGeometry.plan(4096 * KIB, [4 * KIB, 36 * KIB])
    host = ExtentCache(geometry, LRUPolicy, first_row=10)
    manager = TieredOffloadingManager(host)
    for i in range(30):
        put(manager, keys(i % 2, i, 40))
    taken = [slot for _, slot in host.ready()]
    assert min(taken) >= 10
    assert sum(host.bytes_of(key) for key, _ in host.ready()) > 0.9 * (4096 - 40) * KIB


def test_where_no_whole_extent_may_be_used_nothing_is_stored():
    geometry = HostGeometry.plan(11 * KIB, [3 * KIB, 2 * KIB])
    host = ExtentCache(geometry, LRU2Policy, first_row=geometry.num_rows - 1)
    assert put(TieredOffloadingManager(host), keys(0, "a", 1)) == 0


KINDS = {
    # 36 layers of 8 heads of 64: windows and full attention in turn
    "gpt-oss": [18 * 32, 18 * 32],
    # 62 layers of 16 heads of 128: 10 of full attention, 52 of windows in groups of 10
    "Gemma": [10 * 128] * 6 + [2 * 128],
    # wide groups of latent caches, and narrow ones of the index that selects tokens
    "GLM": [3584, 64],
}


@pytest.mark.parametrize("kind", KINDS)
def test_hybrids_use_the_host_memory_that_they_are_given(kind):
    """Each prompt stores one chunk of each group for each position."""
    chunk_kib, total_kib = KINDS[kind], 512 << 10
    used = {}
    for slots in ("of sizes", "of one size"):
        sizes = chunk_kib if slots == "of sizes" else [max(chunk_kib)]
        rows = total_kib * KIB // (max(sizes) if len(set(sizes)) == 1 else gcd(*sizes)) // KIB
        host = make_host_cache("lru", rows, total_kib * KIB // rows, [s * KIB for s in sizes])
        manager = TieredOffloadingManager(host)
        for i in range(4 * total_kib // sum(chunk_kib) // 8):
            for group in range(len(chunk_kib)):
                put(manager, keys(group, i, 8))
        groups = [int.from_bytes(key[-4:], "big") for key, _ in host.ready()]
        used[slots] = sum(map(chunk_kib.__getitem__, groups)) / total_kib
    print(f"{kind}: {chunk_kib} KiB a chunk; of host memory hold bytes of the KV cache: {used}")
    assert used["of sizes"] > 0.9
    assert used["of sizes"] >= used["of one size"]
