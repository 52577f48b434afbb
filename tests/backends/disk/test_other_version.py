"""Chunks that another version of kvoffload stored: misses, which stay until they are replaced."""

import pytest
from disk_parts import ON_DISK, SIZE, chunk_bytes, full, open_disk, stored, write

from kvoffload.backends.admin import Check
from kvoffload.backends.disk.admin import verify
from kvoffload.backends.disk.chunk_file import PAGE
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.testing.backends import keys_of, slots
from tests.support.other_version import OTHERS, VERSION, resealed

HEADER_BYTES = 10
"""Offset of the field in the header."""


def file_of(root, key):
    (path,) = root.glob(f"*/??/{key.hex()}")
    return path


def change(root, key, offset=VERSION, value=2, more=b""):
    """Make a chunk one of another version; return its file's content."""
    path = file_of(root, key)
    content = resealed(path.read_bytes(), PAGE, offset, value) + more
    path.write_bytes(content)
    return content


@OTHERS
async def test_a_chunk_of_another_version_is_a_miss_stays_and_gives_way_to_a_store(
    tmp_path, offset, value, caplog
):
    backend = open_disk(tmp_path)
    good, other = keys_of(2)
    assert all(await write(backend, [good, other]))
    content = change(tmp_path, other, offset, value)
    assert await backend.read([other, good], slots(2, SIZE)) == [False, True]
    assert backend.counters() == {"read_other_version": 1}
    assert "other_version; engines of two versions use the root: upgrade all" in caplog.text
    assert file_of(tmp_path, other).read_bytes() == content
    assert not list((tmp_path / ".quarantine").iterdir())
    assert not backend.holds(other)
    assert await backend.contains([other, good]) == [False, True]
    assert (other, False) in backend.take_changes(10)
    assert await write(backend, [other]) == [True]
    assert await backend.read([other], slots(1, SIZE)) == [True]
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 2 * ON_DISK


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
async def test_a_chunk_of_another_version_may_have_another_length(tmp_path, io):
    backend = open_disk(tmp_path, io=io)
    keys = keys_of(2)
    assert all(await write(backend, keys))
    change(tmp_path, keys[0], more=b"and more")
    content = file_of(tmp_path, keys[1]).read_bytes()
    file_of(tmp_path, keys[1]).write_bytes(resealed(content, PAGE, VERSION, 2)[: PAGE + 5])
    assert await backend.read(keys, slots(2, SIZE)) == [False] * 2
    assert backend.counters() == {"read_other_version": 2}


async def test_one_that_the_index_does_not_know_is_asked_for_once_and_can_be_evicted(tmp_path):
    backend = open_disk(tmp_path, **full(2))
    old, new, newer = keys_of(3)
    assert await write(backend, [old]) == [True]
    change(tmp_path, old)
    backend._store.index.drop(b"\0\0" + old)  # as if another process had stored it
    assert await backend.contains([old]) == [True]
    assert await backend.read([old], slots(1, SIZE)) == [False]
    assert await backend.contains([old]) == [False]
    assert await write(backend, [new]) == [True]
    assert await write(backend, [newer]) == [True]
    assert not list(tmp_path.glob(f"*/??/{old.hex()}"))
    assert chunk_bytes(tmp_path) == 2 * ON_DISK


async def test_verify_and_its_repair_leave_them_and_count_them(tmp_path):
    sound, other, damaged = keys_of(3)
    await stored(tmp_path, [sound, other, damaged])
    content = change(tmp_path, other)
    path = file_of(tmp_path, damaged)
    path.write_bytes(b"X" + path.read_bytes()[1:])
    report = verify(DiskInspector(str(tmp_path)), Check(repair=True)).figures
    assert (report["reasons"], report["other_versions"]) == ({"corrupt_magic": 1}, 1)
    assert file_of(tmp_path, other).read_bytes() == content
    lines, report, is_sound = verify(DiskInspector(str(tmp_path)), Check(repair=True))
    assert (report["damaged"], report["other_versions"], is_sound) == ([], 1, True)
    assert any("1 chunk of another version" in line for line in lines)


async def test_verify_leaves_one_that_lies_elsewhere_or_is_short(tmp_path):
    """A later version may have other shards, and small chunks behind a small header."""
    moved, small, sound = keys_of(3)
    await stored(tmp_path, [moved, small, sound])
    change(tmp_path, moved)
    header = resealed(file_of(tmp_path, small).read_bytes()[:256], 256, HEADER_BYTES, 256)
    file_of(tmp_path, small).write_bytes(resealed(header, 256, VERSION, 2) + b"payload")
    for path in (file_of(tmp_path, moved), file_of(tmp_path, sound)):
        shard = path.parent.with_name("00" if path.parent.name != "00" else "01")
        shard.mkdir(exist_ok=True)
        path.rename(shard / path.name)
    _, report, is_sound = verify(DiskInspector(str(tmp_path)), Check(repair=True))
    assert (report["reasons"], report["other_versions"]) == ({"corrupt_key": 1}, 2)
    assert not is_sound
    assert len(list(tmp_path.glob("*/??/*"))) == 2
