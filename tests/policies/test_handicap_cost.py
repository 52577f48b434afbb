"""What the handicap policy costs a store: steps of the interpreter and bytes for each chunk."""

import tracemalloc

import pytest
from opcodes import count_opcodes

from kvoffload.messages import make_offload_key
from kvoffload.offload.host_cache import HostCache
from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.ordered_queue import OrderedQueue, compact

ENTRIES = 50_000


def request(first, count):
    """Return the chunks of a prompt, its tail first."""
    ends = range(first + count, first, -1)
    return [make_offload_key(i.to_bytes(32, "big"), 0) for i in ends]


def cycles(policy, keys, entries):
    """List the calls for a request that stores its chunks, and for one that loads them."""
    yield "begin, store", lambda: policy.touch(keys)
    yield "evict", lambda: policy.victims(max(0, len(policy) + len(keys) - entries))
    yield "complete_store", lambda: policy.add(keys)
    yield "end, store", lambda: (policy.remove(keys), policy.add(keys))
    yield "begin, load", lambda: policy.touch(keys)
    yield "prepare_load", lambda: policy.remove(keys)
    yield "complete_load", lambda: policy.add(keys)
    yield "end, load", lambda: (policy.remove(keys), policy.add(keys))


def test_a_chunk_costs_few_steps_of_the_interpreter_and_none_where_it_is_unknown():
    policy = HandicapPolicy(ENTRIES)
    for first in range(0, 2 * ENTRIES, 1000):
        for _, call in cycles(policy, request(first, 1000), ENTRIES):
            call()
    took = []
    for count in (200, 1200):
        keys = request(10**6 + count, count)
        took.append({name: count_opcodes(call) for name, call in cycles(policy, keys, ENTRIES)})
    less, more = took
    a_chunk = {name: (more[name] - less[name]) / 1000 for name in more}
    assert a_chunk["begin, store"] < 0.1
    assert a_chunk["evict"] < 55
    assert a_chunk["complete_store"] < 90
    assert a_chunk["begin, load"] < 75
    for name in ("end, store", "prepare_load", "complete_load", "end, load"):
        assert a_chunk[name] < 55, name
    assert sum(a_chunk.values()) < 300


@pytest.mark.parametrize(
    ("policy", "most"), [(LRUPolicy, 215), (ARCPolicy, 245), (HandicapPolicy, 275)]
)
def test_a_store_that_turned_over_takes_few_bytes_for_each_chunk(policy, most):
    tracemalloc.start()
    try:
        host = HostCache(ENTRIES, policy(ENTRIES))
        for first in range(0, 4 * ENTRIES, 1000):
            keys = request(first, 1000)
            slots, _ = host.reserve(keys)
            host.make_evictable(keys, slots)
            host.put_in_order(keys)
        del keys, slots
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used / ENTRIES < most


def test_a_table_with_too_much_room_is_rebuilt_in_place_and_in_order():
    queue = OrderedQueue(10_000)
    table = queue.keys
    queue.put(request(0, 10_000))
    roomy = dict(table)
    for key in request(0, 10_000)[:-100]:
        del roomy[key]
    there, size = list(roomy.items()), roomy.__sizeof__()
    compact(roomy)
    assert list(roomy.items()) == there
    assert roomy.__sizeof__() < size / 20
    assert queue.pop(9_900) == request(0, 10_000)[:-100]
    assert queue.pop(200) == request(0, 10_000)[-100:]
    assert queue.keys is table
