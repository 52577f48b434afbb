"""Notes on keys that are not in the order: how many are kept, and which are dropped."""

import pytest

from kvoffload.policies.history import PinnedState, RotatingBloomFilter
from kvoffload.policies.ordered_queue import OrderedQueue


def test_notes_of_pinned_keys_have_some_slack_before_the_oldest_are_dropped():
    pinned = PinnedState(64)
    for i in range(66):
        pinned.keep([b"%d" % i], [i])
    assert len(pinned) == 66
    pinned.keep([b"66"], [66])
    assert list(pinned) == [b"%d" % i for i in range(3, 67)]
    pinned.keep([b"a", b"b"], [1, 2])
    assert len(pinned) == 66
    pinned.keep([b"c"], [3])
    assert list(pinned)[-3:] == [b"a", b"b", b"c"]
    assert len(pinned) == 64
    pinned.drop([b"a", b"c"])
    assert list(pinned)[-2:] == [b"66", b"b"]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 10, 67, 200])
def test_a_batch_of_notes_drops_as_many_as_calls_for_one_key_each(count):
    batch, single = PinnedState(64), PinnedState(64)
    names = [b"%d" % i for i in range(66 + count)]
    batch.keep(names[:66], range(66))
    batch.keep(names[66:], range(count))
    for name, note in zip(names, [*range(66), *range(count)], strict=True):
        single.keep([name], [note])
    assert list(batch.items()) == list(single.items())


def test_a_filter_remembers_between_its_keys_and_twice_as_many():
    seen = RotatingBloomFilter(100)
    for i in range(100):
        seen.note([i * 7919], 3)
    assert all(seen.recall(i * 7919) == 3 for i in range(100))
    for i in range(100, 200):
        seen.note([i * 7919], 1)
    later = [seen.recall(i * 7919) for i in range(200)]
    assert all(later[100:])
    assert sum(later[:100]) < 60
    seen.clear()
    assert not any(seen.recall(i * 7919) for i in range(200))


@pytest.mark.parametrize("keys", [0, 1, 2])
def test_the_smallest_filters_remember_the_last_key(keys):
    seen = RotatingBloomFilter(keys)
    seen.note([7], 2)
    assert seen.recall(7) == 2
    for checksum in range(100, 104):
        seen.note([checksum], 3)
    assert seen.recall(103) == 3
    assert seen.recall(7) == 0


def test_the_oldest_keys_of_a_queue_leave_first_although_others_moved_to_its_end():
    queue = OrderedQueue(4)
    queue.put([b"a", b"b", b"c", b"d"])
    assert queue.pop(1) == [b"a"]
    del queue.keys[b"b"]
    queue.keys[b"b"] = 0
    assert queue.pop(2) == [b"c", b"d"]
    queue.put([b"e"])
    assert queue.pop(5) == [b"b", b"e"]
    assert queue.pop(1) == []
    queue.put([b"%d" % i for i in range(100)])
    assert queue.pop(40) == [b"%d" % i for i in range(40)]
    queue.discard([b"41", b"99"])
    left = [b"%d" % i for i in range(40, 99) if i != 41]
    assert [queue.pop(1)[0] for _ in range(58)] == left
