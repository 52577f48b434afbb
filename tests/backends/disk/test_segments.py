"""Small chunks in slots of segments: what files do by their names, and what only slots can meet."""

import errno
import os
import sys
import time

import pytest
from disk_parts import (
    ON_DISK,
    SIZE,
    allocated,
    chunk_bytes,
    flip_chunk,
    full,
    load,
    open_disk,
    stored,
    table_of,
    until,
    write,
    write_each,
)

from kvoffload.backends.admin import Check, Garbage
from kvoffload.backends.base import ReadResult, WriteResult
from kvoffload.backends.disk import admin
from kvoffload.backends.disk.index import name_of
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.disk.paths import QUARANTINE
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.backends.disk.segment import Segment
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.disk_chunks import stored_in
from tests.support.file_faults import overwrite
from tests.support.older_engine import older_engine
from tests.support.small_disk import disk_in_a_file
from tests.support.vfs import BesideVfs, FailingVfs, kind_of

STATE_AT = 16
"""In an entry of 64 bytes; the first entry is behind a head of 64."""


def open_segments(root, namespace="disk", **settings):
    return open_disk(root, namespace, form="segments", **settings)


def tables(root):
    return sorted(root.glob("*/segments/*.table"))


def slot_blocks(root):
    """Return the bytes that the file system gave to slots."""
    return sum(path.stat().st_blocks * 512 for path in root.glob("*/segments/*.slots"))


def files(root):
    return {path.name for path in root.glob("*/??/*")}


async def test_chunks_of_both_forms_are_hits_and_leave_in_one_order(tmp_path):
    old, new = keys_of(4, "old"), keys_of(4, "new")
    await stored(tmp_path, old, **full(6), policy="lru")
    backend = open_segments(tmp_path, **full(6), policy="lru")
    assert all(await write_each(backend, new))
    assert (await load(backend, old)).count(True) == len(files(tmp_path)) == 2
    assert await load(backend, new) == [True] * 4
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 6 * ON_DISK
    assert slot_blocks(tmp_path) == 4 * ON_DISK
    await backend.close()
    backend = open_disk(tmp_path, **full(6), policy="lru")  # and back
    assert await write(backend, keys_of(1, "last")) == [True]
    assert (await load(backend, [*old, *new])).count(True) == 5
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 6 * ON_DISK


async def test_an_evicted_chunk_is_overwritten_in_its_slot(tmp_path):
    backend = open_segments(tmp_path, **full(4))
    assert all(await write_each(backend, keys_of(12)))
    assert backend.counters() == {"evicted": 8, "overwritten": 8}
    assert slot_blocks(tmp_path) == chunk_bytes(tmp_path) == 4 * ON_DISK
    await backend.remove(keys_of(12))
    assert slot_blocks(tmp_path) == backend.usage().resident_bytes == 0
    await backend.close()
    assert tables(tmp_path) == []


async def test_xfs_gives_slots_no_more_room_than_is_counted(tmp_path):
    """A file that grows by writing gets as much again as it has, and 8 GiB at most."""
    with disk_in_a_file(tmp_path, "xfs", 512 << 20) as where:
        backend = open_segments(where / "kv", io="buffered")
        assert all(await write_each(backend, keys_of(24)))
        assert slot_blocks(where / "kv") == backend.usage().resident_bytes == 24 * ON_DISK
        await backend.close()


async def test_a_file_of_slots_is_long_enough_before_it_is_written(tmp_path):
    keys, vfs = keys_of(3), FailingVfs(1, errno.EFBIG, when=lambda call, path: call == "set_length")
    backend = open_segments(tmp_path, vfs=vfs)
    assert await write_each(backend, keys) == [False, True, True]
    assert (await load(backend, keys)) == [False, True, True]
    (table,) = tables(tmp_path)
    assert (table.with_suffix(".slots").stat().st_size, vfs.calls) == (2 * ON_DISK, 2)
    await backend.close()


async def test_what_has_no_slot_has_a_file(tmp_path):
    backend = open_segments(tmp_path)
    sizes = [(1 << 20) + 1, *(4096 * i for i in range(1, 18))]
    keys = keys_of(len(sizes))
    for key, size in zip(keys, sizes, strict=True):
        assert await backend.write([key], filled([key], size)) == [True]
    long_key = bytes(range(48))
    assert await write(backend, [long_key]) == [True]
    assert files(tmp_path) == {keys[0].hex(), keys[-1].hex(), long_key.hex()}
    assert len(tables(tmp_path)) == 16
    for key, size in zip(keys, sizes, strict=True):
        assert await backend.read([key], slots(1, size)) == [True]


async def test_the_longest_chunk_that_has_a_slot_replaces_what_was_a_file(tmp_path):
    size, keys = 1 << 20, keys_of(3)
    old = open_disk(tmp_path, form="files")
    assert await old.write(keys[:2], filled(keys[:2], size)) == [True] * 2
    await old.close()
    backend = open_segments(tmp_path)
    await backend.remove(keys[1:2])
    assert await backend.write(keys, filled(keys, size)) == [WriteResult.PRESENT, True, True]
    assert files(tmp_path) == {keys[0].hex()}
    assert slot_blocks(tmp_path) == 2 * (size + 4096)
    into = slots(3, size)
    assert await backend.read(keys, into) == [True] * 3
    assert into == filled(keys, size)


async def test_chunks_without_a_byte_are_found_by_another_process(tmp_path):
    """A pool of an engine may have no memory of its own."""
    one, keys = open_segments(tmp_path), keys_of(2)
    assert await one.write(keys, [memoryview(b"")] * 2) == [True, True]
    two = open_segments(tmp_path)
    assert await two.contains(keys) == [True, True]
    assert await two.read(keys, [memoryview(bytearray())] * 2) == [True, True]


async def test_a_file_system_that_frees_no_part_of_a_file_gets_files(tmp_path, caplog):
    vfs = FailingVfs(1, errno.EOPNOTSUPP, sticky=True, when=lambda call, path: call == "punch")
    with caplog.at_level("INFO", "kvoffload"):
        backend = open_segments(tmp_path, vfs=vfs)
    assert "parts of a file cannot be freed" in caplog.text
    assert await write(backend, keys_of(1)) == [True]
    assert len(files(tmp_path)) == 1


async def test_a_file_system_that_only_writes_zeros_gets_files(tmp_path, caplog):
    vfs = Vfs()
    vfs.punch = lambda fd, offset, length: os.pwrite(fd, bytes(length), offset)
    with caplog.at_level("INFO", "kvoffload"):
        backend = open_segments(tmp_path, vfs=vfs)
    assert "parts of a file cannot be freed (their room stays)" in caplog.text
    assert await write(backend, keys_of(1)) == [True]
    await backend.remove(keys_of(1))
    assert allocated(tmp_path) < ON_DISK


async def test_a_process_takes_over_a_segment_that_no_process_has_locked(tmp_path):
    one, two = open_segments(tmp_path), open_segments(tmp_path)
    assert await write(one, keys_of(3, "one")) == [True] * 3
    assert await write(two, keys_of(3, "two")) == [True] * 3
    assert len(tables(tmp_path)) == 2
    for backend in (one, two):
        await backend.close()
    backend = open_segments(tmp_path)
    every = [*keys_of(3, "one"), *keys_of(3, "two"), *keys_of(3, "more")]
    assert await write(backend, every[6:]) == [True] * 3
    assert len(tables(tmp_path)) == 2
    assert await load(backend, every) == [True] * 9
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 9 * ON_DISK


async def test_a_restart_reads_and_counts_slots_without_numpy(tmp_path, monkeypatch):
    """To import it takes a tenth of a second and 20 MB in each I/O process."""
    keys = keys_of(3)
    await stored(tmp_path, keys, form="segments")
    monkeypatch.setitem(sys.modules, "numpy", None)
    backend = open_segments(tmp_path)
    assert await load(backend, keys) == [True] * 3
    assert [each.chunks for each in backend._store.segments.held()] == [3]


async def test_the_slots_of_another_process_are_freed_and_used_again(tmp_path):
    evicting, other = (open_segments(tmp_path, name, **full(4)) for name in "ab")
    assert await write(other, keys_of(4)) == [True] * 4
    assert await until(lambda: evicting._store.root.other_writers == 1)
    new = keys_of(2, "new")
    assert await until(lambda: evicting._store.index.has_victims)
    assert await write(evicting, new) == [True] * 2
    assert (await load(other, keys_of(4))).count(True) == 2
    assert not any(reason.startswith("corrupt") for reason in other.counters())
    assert slot_blocks(tmp_path) == 4 * ON_DISK
    await evicting.remove(new)
    assert await until(lambda: chunk_bytes(tmp_path) == 2 * ON_DISK)
    assert await write(other, keys_of(2, "more")) == [True] * 2
    assert await load(other, keys_of(2, "more")) == [True] * 2
    assert slot_blocks(tmp_path) == evicting._store.root.quota.refresh() == 4 * ON_DISK


def set_state(path, slot, state):
    overwrite(path, 64 + 64 * slot + STATE_AT, bytes([state]))


async def test_what_a_dead_process_was_writing_is_freed(tmp_path):
    keys = keys_of(4)
    await stored(tmp_path, keys, form="segments")
    set_state(*tables(tmp_path), slot=1, state=255)
    backend = open_segments(tmp_path)
    assert (await load(backend, keys)).count(True) == 3
    assert slot_blocks(tmp_path) == backend.usage().resident_bytes == 3 * ON_DISK


async def test_a_slot_that_cannot_be_freed_stays_counted_until_it_is(tmp_path):
    def is_broken(call, path):
        return call == "punch" or (call == "pwritev" and kind_of(path) == "slots")

    vfs = FailingVfs(0, errno.EIO, sticky=True, when=is_broken)
    backend = open_segments(tmp_path, vfs=vfs)
    one, two, three = keys_of(3)
    assert await write(backend, [one]) == [True]
    vfs.nth = 1
    assert await write(backend, [two]) == [False]
    await backend.remove([one])
    assert backend.counters()["undeletable"] == 1
    assert backend._store.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK
    assert not backend._housekeeper._scanner.scan(full=True)  # not exact: it found one chunk
    assert backend._store.root.quota.refresh() == 2 * ON_DISK
    vfs.heal()
    assert await until(lambda: backend._store.root.quota.refresh() == ON_DISK)
    assert await write(backend, [three]) == [True]
    assert await load(backend, [one, two, three]) == [True, False, True]
    assert slot_blocks(tmp_path) == chunk_bytes(tmp_path) == 2 * ON_DISK


DAMAGE = {
    "header": (lambda t, s, k: flip_chunk(s.parents[2], k, 300), "corrupt_header"),
    "magic": (lambda t, s, k: flip_chunk(s.parents[2], k, 0), "corrupt_magic"),
    "payload": (lambda t, s, k: flip_chunk(s.parents[2], k, -9), "corrupt_payload"),
    "slots cut": (lambda t, s, k: os.truncate(s, ON_DISK - 4096), "corrupt_short"),
    "slots gone": (lambda t, s, k: os.truncate(s, 0), "read_missing"),
    "entry's key": (lambda t, s, k: overwrite(t, 64 + 20, b"\0\1\2\3"), "read_missing"),
    "entry's length": (lambda t, s, k: set_state(t, 0, 100), "read_missing"),
    "two entries exchanged": (lambda t, s, k: exchange(t), "corrupt_key"),
    "table cut": (lambda t, s, k: os.truncate(t, 64), "read_missing"),
    "table's head": (lambda t, s, k: overwrite(t, 13, b"\xff"), "corrupt_header"),
    "table gone": (lambda t, s, k: t.unlink(), "read_missing"),
}


def exchange(table):
    content = table.read_bytes()
    table.write_bytes(content[:64] + content[128:192] + content[64:128] + content[192:])


@pytest.mark.parametrize("kind", DAMAGE)
async def test_damage_of_any_kind_is_a_miss_and_can_be_stored_again(tmp_path, kind):
    backend = open_segments(tmp_path)
    keys = keys_of(2)
    assert all(await write_each(backend, keys))
    await backend.close()
    (table,) = tables(tmp_path)
    damage, reason = DAMAGE[kind]
    damage(table, table.with_suffix(".slots"), keys[0])
    backend = open_segments(tmp_path)
    assert not (await load(backend, keys))[0]
    assert backend.counters()[reason] >= 1
    assert await write(backend, keys) == [True] * 2
    assert await load(backend, keys) == [True] * 2
    await backend.close()
    backend = open_segments(tmp_path)
    assert await load(backend, keys) == [True] * 2
    set_aside = sum(path.stat().st_blocks * 512 for path in (tmp_path / QUARANTINE).iterdir())
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) + set_aside


async def test_the_log_names_the_slot_of_a_damaged_chunk_and_where_it_went(tmp_path, caplog):
    backend, keys = open_segments(tmp_path), keys_of(2)
    assert all(await write_each(backend, keys))
    (table,) = tables(tmp_path)
    slot = table_of(table)[keys[1]] // ON_DISK
    flip_chunk(tmp_path, keys[1], -9)
    assert await load(backend, keys) == [True, False]
    (kept,) = (tmp_path / QUARANTINE).iterdir()
    place = f"{table.with_suffix('.slots')}#{slot}"
    assert f"disk: {place} failed verification: corrupt_payload; it is now {kept}" in caplog.text


@pytest.mark.parametrize("by_next_process", [False, True])
async def test_a_chunk_whose_bytes_were_lost_gives_its_room_back_at_its_first_load(
    tmp_path, by_next_process
):
    backend = open_segments(tmp_path)
    keys = keys_of(3)
    assert all(await write(backend, keys))
    if by_next_process:
        await backend.close()
    (lost,) = (chunk for chunk in stored_in(tmp_path) if chunk.key == keys[1])
    lost.wipe()  # as a power loss leaves it
    if by_next_process:
        backend = open_segments(tmp_path)
    assert await load(backend, keys) == [True, False, True]
    assert not backend.holds(keys[1])
    assert backend._store.root.quota.refresh() == chunk_bytes(tmp_path) == 2 * ON_DISK
    assert slot_blocks(tmp_path) == 2 * ON_DISK
    assert await write(backend, keys) == [True] * 3
    assert await load(backend, keys) == [True] * 3


async def test_a_use_counts_in_the_next_process_and_an_unused_chunk_expires(tmp_path):
    one, two = keys_of(2)
    await stored(tmp_path, [one, two], form="segments", ttl_s=60)
    (table,) = tables(tmp_path)
    for slot in range(2):
        overwrite(table, 64 + 64 * slot, (time.time_ns() - int(59e9)).to_bytes(8, "little"))
    backend = open_segments(tmp_path, ttl_s=60)
    assert await load(backend, [one]) == [True]
    backend._store.record_use()
    assert await until(lambda: not backend.holds(two))
    assert await until(lambda: backend.counters().get("expired") == 1)
    assert await load(backend, [one, two]) == [True, False]
    assert slot_blocks(tmp_path) == ON_DISK


async def test_commands_see_verify_and_remove_chunks_in_slots(tmp_path):
    for name, count in (("a", 3), ("b", 2)):
        await stored(tmp_path, keys_of(count, name), name, form="segments")
    flip_chunk(tmp_path, keys_of(3, "a")[1], -1)
    found = DiskInspector(str(tmp_path))
    survey = admin.survey(found)
    assert sorted(each.chunks for each in survey.held) == [2, 3]
    assert survey.figures["allocated_bytes"] == 5 * ON_DISK
    verified = admin.verify(found, Check(repair=True))
    assert [(each["reason"], each["removed"]) for each in verified.figures["damaged"]] == [
        ("corrupt_payload", True)
    ]
    assert list(found.strays()) == []
    collected = admin.collect(found, Garbage(namespace="b"))
    assert collected.figures["removed"] == 2
    assert found.ledger() == (2 * ON_DISK, None)
    assert len(found.namespaces()) == 1
    found.close()
    backend = open_segments(tmp_path, "a")
    assert await load(backend, keys_of(3, "a")) == [True, False, True]
    assert slot_blocks(tmp_path) == backend.usage().resident_bytes == 2 * ON_DISK


async def test_a_purged_namespace_leaves_no_segment(tmp_path):
    await stored(tmp_path, keys_of(3), "old", form="segments")
    backend = open_segments(tmp_path, "new")
    assert all(await write(backend, keys_of(2)))
    assert await backend.purge(["old"]) == 3
    assert len([path for path in tmp_path.iterdir() if len(path.name) == 64]) == 1
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 2 * ON_DISK
    assert allocated(tmp_path) < 3 * ON_DISK


async def test_a_removed_root_is_an_empty_root(tmp_path):
    backend = open_segments(tmp_path / "kv")
    keys = keys_of(3)
    assert all(await write(backend, keys))
    (tmp_path / "kv").rename(tmp_path / "gone")
    assert await until(lambda: backend.counters().get("remade") == 1)
    assert await until(lambda: not any(map(backend.holds, keys)))
    assert await backend.read(keys, slots(3, SIZE)) == [ReadResult.MISSING] * 3
    assert await write(backend, keys) == [True] * 3
    assert len(tables(tmp_path / "kv")) == 1
    assert await load(backend, keys) == [True] * 3


async def test_a_slot_that_another_process_is_freeing_is_not_used_yet(tmp_path):
    vfs = BesideVfs()
    evicting, other = open_segments(tmp_path, vfs=vfs), open_segments(tmp_path)
    old, (new, later) = keys_of(3), keys_of(2, "new")

    def store_meanwhile():
        other._store.segments.refresh(0)
        assert other.store(new, *filled([new], SIZE))

    assert await write(other, old) == [True] * 3
    evicting._store.segments.refresh(0)
    vfs.on("punch:slots:before", store_meanwhile)
    await evicting.remove(old[1:2])
    assert not vfs.acts
    assert await load(other, [*old, new]) == [True, False, True, True]
    other._store.segments.refresh(0)
    assert await write(other, [later]) == [True]  # in the slot that is free now
    assert slot_blocks(tmp_path) == chunk_bytes(tmp_path) == 4 * ON_DISK
    assert tables(tmp_path)[0].stat().st_size == 64 + 4 * 64


async def test_a_slot_that_a_process_died_freeing_is_used_again(tmp_path, monkeypatch):
    vfs = BesideVfs()
    evicting, other = open_segments(tmp_path, vfs=vfs), open_segments(tmp_path)
    one, two = keys_of(2)

    def die():
        raise KeyboardInterrupt

    assert await write(other, [one]) == [True]
    evicting._store.segments.refresh(0)
    segment, slot = evicting._store.segments.find(name_of(0, one))
    vfs.on("punch:slots:before", die)
    with pytest.raises(KeyboardInterrupt):
        evicting._store.segments.free(segment, slot)
    monkeypatch.setattr("kvoffload.backends.disk.segments._ABANDONED_S", 0)
    assert await until(lambda: chunk_bytes(tmp_path) == 0)
    assert await write(other, [two]) == [True]
    assert tables(tmp_path)[0].stat().st_size == 64 + 64


async def test_a_segment_removed_meanwhile_is_not_taken_over(tmp_path, monkeypatch):
    await stored(tmp_path, keys_of(1), form="segments")
    backend, keys = open_segments(tmp_path), keys_of(2, "new")
    (table,) = tables(tmp_path)
    lock = Segment.lock

    def removed_before(segment):
        table.unlink(missing_ok=True)  # by the process that had it locked until now
        return lock(segment)

    monkeypatch.setattr(Segment, "lock", removed_before)
    assert all(await write_each(backend, keys))
    assert set(table_of(*tables(tmp_path))) == set(keys)


async def test_a_late_reader_of_a_removed_segment_leaves_no_file(tmp_path):
    one, two = open_segments(tmp_path), open_segments(tmp_path)
    assert await write(one, keys_of(1)) == [True]
    two._store.segments.refresh(0)
    await one.remove(keys_of(1))
    await one.close()
    assert await load(two, keys_of(1)) == [False]
    assert list(tmp_path.glob("*/segments/*")) == []


STRANGE = {
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("elsewhere"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", STRANGE)
async def test_something_else_in_place_of_a_table_stops_no_store(tmp_path, kind):
    await stored(tmp_path, keys_of(1), form="segments")
    STRANGE[kind](tables(tmp_path)[0].with_name("0" * 16 + ".table"))
    backend, new = open_segments(tmp_path), keys_of(2, "new")
    assert await write(backend, new) == [True] * 2
    assert backend._housekeeper._scanner.scan(full=True)
    assert await load(backend, [*keys_of(1), *new]) == [True] * 3
    assert backend.counters() == {"corrupt_header": 1}


async def test_a_table_that_cannot_be_read_stops_no_store(tmp_path):
    await stored(tmp_path, keys_of(1), form="segments")
    old = str(tables(tmp_path)[0])

    def is_old(call, path):
        return call == "preadv" and path.endswith(old.rpartition("/")[2])

    vfs = FailingVfs(1, errno.EIO, sticky=True, when=is_old)
    backend = open_segments(tmp_path, vfs=vfs)
    assert await write(backend, keys_of(2, "new")) == [True] * 2
    assert await load(backend, keys_of(2, "new")) == [True] * 2


async def test_a_table_grows_while_it_is_listed(tmp_path):
    backend = open_segments(tmp_path)
    assert await write(backend, keys_of(2)) == [True] * 2
    listing = backend._store.segments.listing()
    next(listing)
    assert await write(backend, keys_of(2, "new")) == [True] * 2
    assert len(list(listing)) == 1
    assert backend.counters() == {}


async def test_while_an_older_version_has_the_root_open_small_chunks_are_files(tmp_path, caplog):
    old, new, later = (keys_of(2, name) for name in ("old", "new", "later"))
    backend = open_segments(tmp_path)
    assert await write(backend, old) == [True] * 2
    with older_engine(tmp_path):
        assert await until(lambda: backend._store.root.has_older_writers)
        assert "an older version has it open" in caplog.text
        other = open_segments(tmp_path)
        assert await write(other, new[:1]) == await write(backend, new[1:]) == [True]
        assert await other.read([*old, *new], slots(4, SIZE)) == [True] * 4
        await other.close()
    assert files(tmp_path) == {key.hex() for key in new}
    assert await until(lambda: not backend._store.root.has_older_writers)
    assert await write(backend, later) == [True] * 2
    assert files(tmp_path) == {key.hex() for key in new}
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 6 * ON_DISK


async def test_a_chunk_that_two_processes_stored_is_found_again_when_one_copy_leaves(tmp_path):
    one, two = open_segments(tmp_path), open_segments(tmp_path)
    (key,) = keys_of(1)
    for backend, own in ((one, keys_of(1, "one")), (two, keys_of(1, "two"))):
        assert await write(backend, own) == [True]
        backend._housekeeper.stop()
        backend._housekeeper.wait()
    for backend in (one, two):
        assert await write(backend, [key]) == [True]
    assert chunk_bytes(tmp_path) == 4 * ON_DISK
    one._store.segments.refresh(0)
    await one.remove([key])
    assert chunk_bytes(tmp_path) == 3 * ON_DISK
    assert not one.holds(key)
    Scanner(one._store).scan(full=True)
    assert one.holds(key)
    assert await load(one, [key]) == [True]


async def test_a_start_has_the_order_of_the_uses_in_all_segments(tmp_path):
    one, two = (open_segments(tmp_path, policy="lru") for _ in range(2))
    keys = keys_of(6)
    for i, key in enumerate(keys):
        assert await write((one, two)[i % 2], [key]) == [True]
    for backend in (one, two):
        await backend.close()
    for i, key in enumerate(keys):
        (table,) = [path for path in tables(tmp_path) if key in table_of(path)]
        at = 64 + table_of(table)[key] // ON_DISK * 64
        overwrite(table, at, (time.time_ns() - (6 - i) % 4 * 10**9).to_bytes(8, "little"))
    backend = open_segments(tmp_path, policy="lru")
    in_order = sorted(keys, key=lambda key: -((6 - keys.index(key)) % 4))
    uses = [backend._store.used_ns(name_of(0, key)) for key in in_order]
    assert uses == sorted(uses)
    assert [name[2:] for name in backend._store.index.victims(6)] == in_order
