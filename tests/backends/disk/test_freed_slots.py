"""Slots that a thread frees while another one tidies their segment, removes it or takes it over."""

import threading

from disk_parts import ON_DISK, SIZE, chunk_bytes, full, load, open_disk, stored, until, write

from kvoffload.backends.disk.index import name_of
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.testing.backends import filled, keys_of
from tests.support.vfs import HookedVfs, kind_of


class Beside(HookedVfs):
    """Before the blocks of a slot are freed, another thread does something, once.

    It is done with that, or has written into a slot, before the call goes on.
    """

    def __init__(self):
        super().__init__()
        self.act, self.thread, self.is_far = None, None, threading.Event()

    def around(self, call, path, perform):
        if call == "punch" and self.act is not None:
            act, self.act = self.act, None
            self.thread = threading.Thread(target=lambda: (act(), self.is_far.set()))
            self.thread.start()
            assert self.is_far.wait(60)
        answer = perform()
        if call == "pwritev" and kind_of(path) == "slots" and self.thread is not None:
            self.is_far.set()
        return answer


SEGMENTS = {"form": "segments", "policy": "lru", **full(64)}


def open_segments(root, namespace="disk", **settings):
    return open_disk(root, namespace, **SEGMENTS | settings)


async def are_right(backend, keys):
    return list(map(bool, await load(backend, keys)))


async def test_a_segment_that_is_emptied_during_a_clean_up_costs_one_eviction(tmp_path):
    old, new, vfs = keys_of(1, "old"), keys_of(3, "new"), Beside()
    await stored(tmp_path, old, "old", **SEGMENTS)
    backend = open_segments(tmp_path, "new", vfs=vfs, **full(3))
    vfs.act = backend._store.segments.clean_up
    for key in new:
        assert await write(backend, [key]) == [True]
    assert vfs.act is None
    assert backend.counters() == {"evicted": 1}
    assert await are_right(backend, new) == [True] * 3
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 3 * ON_DISK
    assert not any(name in backend._store.segments for name in (name_of(1, key) for key in old))
    backend._store.segments.clean_up()
    assert len([*tmp_path.glob("*/segments/*.table")]) == 1


async def test_a_slot_is_not_used_again_before_the_thread_that_frees_it_is_done(tmp_path):
    """The store takes over a segment in which another thread is removing a chunk."""
    old, new, vfs = keys_of(3, "old"), keys_of(4, "new"), Beside()
    await stored(tmp_path, old, **SEGMENTS)
    backend = open_segments(tmp_path, vfs=vfs)
    chunk = filled(new[:1], SIZE)[0]
    told = []
    vfs.act = lambda: told.append(backend.store(new[0], chunk))
    await backend.remove(old[:1])
    vfs.thread.join(60)
    assert told == [True]
    assert await are_right(backend, [*old, new[0]]) == [False, True, True, True]
    assert await write(backend, new[1:]) == [True] * 3  # one of them in the slot that is free
    assert await are_right(backend, [*old[1:], *new]) == [True] * 6
    assert set(backend.counters()) == {"read_missing", "removed"}
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 6 * ON_DISK
    (table,) = tmp_path.glob("*/segments/*.table")
    assert table.stat().st_size == 64 * (1 + 6)


async def test_a_segment_that_another_process_removes_meanwhile_gives_its_room_back(tmp_path):
    old, vfs = keys_of(1, "old"), Beside()
    await stored(tmp_path, old, **SEGMENTS)
    evicting = open_segments(tmp_path, "other")
    backend = open_segments(tmp_path, vfs=vfs)

    def remove_segment():
        evicting._store.segments.clean_up()
        backend._store.segments.refresh(0)
        scan.start()
        scan.join(0.2)  # it may wait until the removal is known

    scan = threading.Thread(target=Scanner(backend._store)._drop_vanished, args=(None, set()))
    vfs.act = remove_segment
    await backend.remove(old)
    scan.join(60)
    assert [*tmp_path.glob("*/segments/*")] == []
    assert backend.counters() == {"removed": 1}
    assert backend._store.root.quota.refresh() == 0
    assert not len(backend._store.index)
    assert name_of(0, old[0]) not in backend._store.segments


async def test_a_slot_that_a_process_frees_during_a_start_is_not_used_yet(tmp_path):
    """A process that starts takes over a segment while the one that evicts frees a slot of it."""
    old, new, vfs = keys_of(3, "old"), keys_of(3, "new"), Beside()
    await stored(tmp_path, old, **SEGMENTS)
    evicting, backend = open_segments(tmp_path, vfs=vfs), open_segments(tmp_path)
    chunks = filled(new, SIZE)
    vfs.act = lambda: backend.store(new[0], chunks[0])
    await evicting.remove(old[:1])
    assert await are_right(backend, [*old, new[0]]) == [False, True, True, True]
    backend._store.segments.refresh(0)
    assert await write(backend, new[1:]) == [True] * 2  # one of them in the slot that is free
    (table,) = tmp_path.glob("*/segments/*.table")
    assert table.stat().st_size == 64 * (1 + 5)
    assert backend._store.root.quota.refresh() == chunk_bytes(tmp_path) == 5 * ON_DISK


async def test_while_others_run_what_a_dead_process_was_writing_is_freed_later(
    tmp_path, monkeypatch
):
    evicting, backend = open_segments(tmp_path, "other"), open_segments(tmp_path)
    old, new = keys_of(3, "old"), keys_of(2, "new")
    assert await write(backend, old) == [True] * 3
    monkeypatch.setattr(evicting._store.segments, "clean_up", lambda: None)  # it may come later
    segment, slot = backend._store.segments.find(name_of(0, old[1]))
    assert segment.claim(slot, old[1])
    await backend.close()
    backend = open_segments(tmp_path)
    assert await write(backend, new[:1]) == [True]
    backend._store.segments.clean_up()
    assert chunk_bytes(tmp_path) == 4 * ON_DISK
    monkeypatch.setattr("kvoffload.backends.disk.segments._ABANDONED_S", 0)
    backend._store.segments.clean_up()
    assert chunk_bytes(tmp_path) == 3 * ON_DISK
    assert await write(backend, new[1:]) == [True]
    assert await are_right(backend, [*old, *new]) == [True, False, True, True, True]
    (table,) = tmp_path.glob("*/segments/*.table")
    assert table.stat().st_size == 64 * (1 + 4)
    assert await until(lambda: Scanner(evicting._store).scan(full=True))
    assert backend._store.root.quota.refresh() == chunk_bytes(tmp_path) == 4 * ON_DISK
