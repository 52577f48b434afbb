"""The index and the times of use of one process: names, sizes, orders, expiry."""

import pytest

from kvoffload.backends.disk.expiry import UseTimes
from kvoffload.backends.disk.index import Index, name_of, split_name
from kvoffload.policies.lru import LRUPolicy

A, B, C, D = (name_of(0, letter) for letter in (b"a", b"b", b"c", b"d"))


@pytest.fixture
def index():
    return Index(LRUPolicy, 1000)


def test_a_name_is_a_namespace_number_and_a_key():
    for number in (0, 1, 255, 256, 65535):
        for key in (b"k", bytes(range(120))):
            assert split_name(name_of(number, key)) == (number, key)
    assert name_of(258, b"k") == b"\1\2k"


def test_names_are_known_with_their_sizes_from_the_least_recent_on(index):
    assert (len(index), index.has_victims, index.victims(1)) == (0, False, ())
    index.found([(A, 10), (B, 20)])
    index.add([C], 30)
    assert len(index) == 3
    assert all(name in index for name in (A, B, C))
    assert D not in index
    assert [index.size(name) for name in (A, B, C, D)] == [10, 20, 30, None]
    assert index.sizes() == [(A, 10), (B, 20), (C, 30)]
    index.touch([A, D])
    assert index.sizes() == [(B, 20), (C, 30), (A, 10)]
    assert [*index.victims(3)] == [B, C, A]
    assert not index.has_victims


def test_a_name_that_was_found_again_is_the_most_recent(index):
    index.found([(A, 10), (B, 20)])
    index.found([(A, 11)])
    assert index.sizes() == [(B, 20), (A, 11)]
    assert [*index.victims(2)] == [B, A]


def test_names_stored_together_are_put_in_the_order_given(index):
    for name in (A, B, C):
        index.add([name], 10)
    index.reorder([C, B, A, D])
    assert index.sizes() == [(C, 10), (B, 10), (A, 10)]
    assert D not in index
    assert [*index.victims(3)] == [C, B, A]


def test_a_victim_stays_known_until_it_is_dropped_and_can_be_put_back(index):
    index.found([(A, 10), (B, 20)])
    assert [*index.victims(1)] == [A]
    assert A in index
    index.touch([A])  # a use does not return it to the order
    assert [*index.victims(1)] == [B]
    index.put_back(B)
    index.put_back(A)
    index.put_back(A)
    index.put_back(D)
    assert [*index.victims(3)] == [B, A]
    assert [index.drop(name) for name in (A, A, B, D)] == [True, False, True, False]
    index.put_back(A)
    assert not index.has_victims


def test_a_name_dropped_leaves_no_victim(index):
    index.found([(A, 10), (B, 20)])
    assert index.drop(A)
    assert A not in index
    assert index.size(A) is None
    assert [*index.victims(2)] == [B]


def test_a_hidden_name_takes_up_space_and_only_a_store_shows_it(index):
    index.found([(A, 10)])
    index.hide([A, B])
    assert A not in index
    assert (index.is_hidden(A), index.is_hidden(B)) == (True, False)
    assert (len(index), index.size(A), index.has_victims) == (1, 10, True)
    index.found([(A, 10)])
    assert A not in index
    index.add([A], 12)
    assert A in index
    assert not index.is_hidden(A)
    index.hide([A])
    index.drop(A)
    assert not index.is_hidden(A)


def test_a_scan_does_not_find_a_name_dropped_during_it(index):
    index.found([(A, 10), (B, 20)])
    index.drop(B)
    assert not index.was_dropped(B)
    index.begin_scan()
    index.drop(A)
    assert index.was_dropped(A)
    assert not index.was_dropped(B)
    index.found([(A, 10), (B, 20)])
    assert A not in index
    assert B in index
    index.add([A], 10)  # stored once more during the scan
    assert not index.was_dropped(A)
    index.drop(A)
    index.end_scan()
    assert not index.was_dropped(A)
    index.found([(A, 10)])
    assert A in index


def test_a_measured_size_replaces_the_known_one_and_returns_a_victim_to_the_order(index):
    index.found([(A, 10), (B, 20)])
    assert [*index.victims(1)] == [A]  # but its file could not be removed
    index.found([(A, 15), (C, 30)], again=False, measure=True)
    assert (index.size(A), index.size(C)) == (15, 30)
    assert [*index.victims(3)] == [B, C, A]


@pytest.mark.parametrize(
    ("first", "entries"), [(81920, 10), (8193, 99), (8192, 100), (0, 100), (1 << 20, 1)]
)
def test_a_policy_is_made_for_as_many_chunks_as_fit(first, entries):
    asked = []

    def make(capacity):
        asked.append(capacity)
        return LRUPolicy(capacity)

    index = Index(make, 819200)
    index.add([A], first)
    index.add([B], 1)
    assert asked == [entries]


def test_many_names_are_found_and_measured_whatever_the_slices(index):
    names = [name_of(0, i.to_bytes(4, "big")) for i in range(600)]
    index.found((name, 1) for name in names)
    assert index.sizes() == [(name, 1) for name in names]
    index.found(((name, 2) for name in names), again=False, measure=True)
    assert index.sizes() == [(name, 2) for name in names]


def test_a_policy_that_refuses_a_name_leaves_it_unknown():
    class Refusing(LRUPolicy):
        def add(self, key):
            raise MemoryError

    index = Index(Refusing, 1000)
    with pytest.raises(MemoryError):
        index.add([A], 10)
    assert (A in index, len(index), index.size(A)) == (False, 0, None)


# ---- times of use --------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The time in nanoseconds, in a list."""
    now = [10**18]
    monkeypatch.setattr("kvoffload.backends.disk.expiry.now_ns", lambda: now[0])
    return now


def test_a_chunk_expires_exactly_after_its_time_to_live(clock):
    uses = UseTimes(2.5)
    assert uses.expires
    uses.seen([(A, clock[0])])
    uses.used([B])
    assert uses.take_unwritten() == {B: 10**18}  # a new file has the time of its store
    assert uses.take_unwritten() == {}
    clock[0] += 2_500_000_000 - 1
    assert (uses.is_fresh(A), uses.is_fresh(C), uses.overdue()) == (True, False, [])
    clock[0] += 1
    assert not uses.is_fresh(A)
    assert sorted(uses.overdue()) == [A, B]
    uses.forget(A)
    uses.forget(C)
    assert uses.overdue() == [B]
    uses.used([B])
    assert (uses.is_fresh(B), uses.overdue()) == (True, [])


def test_an_earlier_use_does_not_replace_a_later_one(clock):
    uses = UseTimes(1.0)
    uses.seen([(A, clock[0]), (A, clock[0] - 10**9)])
    assert uses.is_fresh(A)
    uses.seen([(A, clock[0] + 10**9)])
    clock[0] += 1_500_000_000
    assert uses.is_fresh(A)


def test_without_a_time_to_live_all_is_fresh_and_uses_are_written(clock):
    uses = UseTimes(None)
    assert not uses.expires
    uses.seen([(A, clock[0])])
    uses.used([B])
    uses.seen([(C, 0)])
    clock[0] += 10**18
    assert all(map(uses.is_fresh, (A, B, C, D)))
    assert uses.overdue() == []
    uses.forget(A)
    assert uses.take_unwritten() == {B: 10**18}
