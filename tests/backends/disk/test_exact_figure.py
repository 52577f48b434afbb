"""The shared figure is exact whatever two processes do at the same moment."""

import errno
import threading

import pytest
from disk_parts import ON_DISK, SIZE, chunk_bytes, open_disk

from kvoffload.backends.disk import housekeeper as disk_housekeeper
from kvoffload.backends.disk.index import name_of
from kvoffload.backends.disk.paths import WRITERS
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.testing import payload_of
from kvoffload.testing.backends import keys_of
from tests.support.vfs import BesideVfs, kind_of

REMOVED = {
    "files": ["unlink:chunk:after"],
    "segments": ["punch:slots:after", "pwritev:table:after"],
}
"""A removed chunk is still counted."""
PLACE = {"files": "open:temporary:before", "segments": "pwritev:table:before"}
"""A chunk to store is counted, and has no place yet."""
LOOKED = {"files": "lstat:chunk:after", "segments": "lock_part:table:before"}
"""A process has seen the chunk that it is about to remove or to replace."""


class Beside(BesideVfs):
    """Does something on this thread alone, at one point after the other."""

    def on(self, point, act, *, then=()):
        if then:
            first, *rest = then
            super().on(point, lambda: self.on(first, act, then=rest), threading.get_ident())
        else:
            super().on(point, act, threading.get_ident())


@pytest.fixture
def pair(tmp_path, form, monkeypatch):
    """The stores of the process that evicts, and of another one; neither does housekeeping."""
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 3600.0)
    backends = [open_disk(tmp_path, vfs=Beside()) for _ in range(2)]
    return [backend._store for backend in backends]


def two_stored(evicting, other):
    """Store two chunks in the other process; the one that evicts finds them."""
    keys = keys_of(2)
    for key in keys:
        put(other, key)
    scan(evicting)
    return keys


def put(store, key):
    chunk = memoryview(bytearray(payload_of(key, SIZE)))
    assert store.store(key, chunk)


def scan(store):
    assert store.root.evictor.held
    Scanner(store).scan(full=True)


def test_a_scan_while_another_process_removes_a_chunk(tmp_path, form, pair):
    evicting, other = pair
    for key in keys_of(3):
        put(other, key)
    first, *then = REMOVED[form]
    other.vfs.on(first, lambda: scan(evicting), then=then)
    assert other.discard(name_of(0, keys_of(3)[1]), "removed")
    assert not other.vfs.acts
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK


def test_a_scan_while_another_process_has_reserved(tmp_path, form, pair):
    evicting, other = pair
    one, two = keys_of(2)
    put(other, one)
    other.vfs.on(PLACE[form], lambda: scan(evicting))
    put(other, two)
    assert not other.vfs.acts
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK


def test_a_scan_that_cannot_read_what_another_process_has_reserved(tmp_path, form, pair):
    evicting, other = pair
    one, two = keys_of(2)
    put(other, one)

    def fail():
        evicting.vfs.on("open:lock:before", fail)
        raise OSError(errno.EIO, "not now")

    def look():
        evicting.vfs.on("open:lock:before", fail)
        scan(evicting)
        evicting.vfs.acts.clear()

    other.vfs.on(PLACE[form], look)
    put(other, two)
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK


def test_a_process_that_cannot_tell_what_it_reserves_stores_nothing(tmp_path, form, pair):
    evicting, other = pair
    one, two = keys_of(2)
    put(other, one)
    write = other.vfs.pwritev

    def tear(fd, buffers, offset):
        if kind_of(other.vfs._paths[fd]) != "lock":
            return write(fd, buffers, offset)
        write(fd, [b"".join(buffers)[:3]], offset)
        raise OSError(errno.EIO, "not now")

    other.vfs.pwritev = tear
    other.vfs.on(PLACE[form], lambda: scan(evicting))
    is_stored = other.store(two, memoryview(bytearray(payload_of(two, SIZE))))
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path)
    assert not is_stored
    assert not other.space.in_flight_bytes
    assert other.counters()["write_io_EIO"] == 1


def test_a_process_that_cannot_tell_what_it_removes_removes_nothing(tmp_path, form, pair):
    evicting, other = pair
    for key in keys_of(3):
        put(other, key)

    def fail():
        other.vfs.on("pwritev:lock:before", fail)
        raise OSError(errno.EIO, "not now")

    other.vfs.on("pwritev:lock:before", fail)
    first, *then = REMOVED[form]
    other.vfs.on(first, lambda: scan(evicting), then=then)
    is_removed = other.discard(name_of(0, keys_of(3)[1]), "removed")
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path)
    assert not is_removed
    assert not other.space.in_flight_bytes


def test_a_scan_while_another_process_removes_what_a_dead_one_left(tmp_path, pair):
    evicting, other = pair
    for key in keys_of(2):
        put(other, key)
    dead = tmp_path / WRITERS / "dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "0").write_bytes(bytes(ON_DISK))
    assert other.root.quota.reserve(ON_DISK, 1 << 40)
    other.vfs.on("unlink:temporary:after", lambda: scan(evicting))
    other.root.clean_up()
    evicting.root.clean_up()
    assert not dead.exists()
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK


def test_a_store_that_reserves_as_a_scan_begins_and_ends_before_it(tmp_path, form, pair):
    evicting, other = pair
    one, two = keys_of(2)
    put(other, one)
    has_reserved, has_listed = threading.Event(), threading.Event()

    def store():
        other.vfs.on(PLACE[form], lambda: (has_reserved.set(), has_listed.wait(60)))
        put(other, two)

    storing = threading.Thread(target=store)

    def end():
        has_listed.set()
        storing.join()

    def begin():
        storing.start()
        assert has_reserved.wait(60)
        # Whatever the scan listed, the store ends before the figure is set right.
        evicting.vfs.on("listdir:quarantine:before", end)

    evicting.vfs.on("flock:ledger:before", begin)
    scan(evicting)
    assert not evicting.vfs.acts
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK


def test_the_first_store_of_another_process_as_a_scan_begins(tmp_path, pair):
    evicting, other = pair
    (one,) = keys_of(1)
    evicting.vfs.on("flock:ledger:before", lambda: put(other, one))
    scan(evicting)
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == ON_DISK


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_figure_that_a_scan_cannot_read_for_a_moment_stands(tmp_path, form, pair, failing):
    """A store came and went since the scan listed: to count it out would be a full disk."""
    evicting, other = pair
    one, two = keys_of(2)
    put(other, one)

    def fail(number=failing):
        if number > 1:
            evicting.vfs.on("preadv:ledger:before", lambda: fail(number - 1))
        raise OSError(errno.EIO, "not now")

    def store():
        put(other, two)
        evicting.vfs.on("preadv:ledger:before", fail)

    evicting.vfs.on("listdir:quarantine:before", store)
    scan(evicting)
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK


def test_two_processes_remove_the_same_chunk(tmp_path, form, pair):
    evicting, other = pair
    one, _ = two_stored(evicting, other)
    at = {"files": "unlink:chunk:before", "segments": "lock_part:table:before"}
    other.vfs.on(at[form], lambda: evicting.discard(name_of(0, one), "evicted"))
    other.discard(name_of(0, one), "removed")
    assert not other.vfs.acts
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == ON_DISK


@pytest.mark.parametrize("is_of_other_form", [False, True])
def test_a_chunk_is_replaced_while_another_process_removes_it(
    tmp_path, form, pair, is_of_other_form
):
    evicting, other = pair
    one, _ = two_stored(evicting, other)
    other.index.hide([name_of(0, one)])  # as one of another version: a store replaces it
    if is_of_other_form:
        other.why_no_slots = "slots are for before" if form == "segments" else None
    other.vfs.on(LOOKED[form], lambda: evicting.discard(name_of(0, one), "evicted"))
    put(other, one)
    assert not other.vfs.acts
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK


@pytest.mark.parametrize("form", ["segments"], indirect=True)
@pytest.mark.parametrize("owner", [0, 1])
def test_a_slot_that_a_killed_process_was_freeing_is_counted_until_it_is_free(
    tmp_path, pair, owner, monkeypatch
):
    evicting, killed = pair[0], pair[1 - owner].segments
    one, two = keys_of(2)
    for key in (one, two):
        put(pair[owner], key)
    killed.refresh(0)
    segment, slot = killed.find(name_of(0, one))
    assert segment.claim(slot, one)
    scan(evicting)
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK
    monkeypatch.setattr("kvoffload.backends.disk.segments._ABANDONED_S", 0)
    pair[owner].segments.refresh(0)
    pair[owner].segments.clean_up()
    scan(evicting)
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == ON_DISK


@pytest.mark.parametrize("form", ["segments"], indirect=True)
def test_a_table_does_not_grow_while_another_process_frees_its_slots(tmp_path, pair):
    evicting, other = pair
    other.root.clean_up()
    assert other.root.other_writers == 1
    there = []
    for key in keys_of(400):
        put(other, key)
        there.append(key)
        if len(there) > 8:
            evicting.segments.refresh(0)
            assert evicting.discard(name_of(0, there.pop(0)), "evicted")
    (table,) = tmp_path.glob("*/segments/*.table")
    assert table.stat().st_size <= 64 * (1 + 9 + 64)
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == 8 * ON_DISK


def test_a_chunk_that_leaves_as_a_scan_ends_is_not_counted_again(tmp_path, form, pair, monkeypatch):
    evicting, other = pair
    one, _ = two_stored(evicting, other)
    look = evicting.quarantine.allocated_bytes

    def discard_and_look():
        evicting.discard(name_of(0, one), "removed")
        return look()

    monkeypatch.setattr(evicting.quarantine, "allocated_bytes", discard_and_look)
    scan(evicting)
    assert evicting.root.quota.refresh() == chunk_bytes(tmp_path) == ON_DISK


@pytest.mark.parametrize("form", ["files"], indirect=True)
def test_another_process_stores_larger_chunks_than_a_scan_has_seen(tmp_path, form, pair):
    evicting, other = pair
    two_stored(evicting, other)

    def store_large():
        for key in keys_of(3, "large"):
            assert other.store(key, memoryview(bytearray(payload_of(key, 100 * SIZE))))

    evicting.vfs.on("listdir:quarantine:before", store_large)
    scan(evicting)
    assert not evicting.vfs.acts
    assert evicting.root.quota.refresh() >= chunk_bytes(tmp_path)
