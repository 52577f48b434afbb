"""Damaged files: every one is a miss, is set aside, and never gives a wrong byte."""

import os
import random
import shutil
import stat

import pytest
from disk_parts import closed_later

from kvoffload import open_backend
from kvoffload.backends.disk.chunk_file import PAGE, ChunkFiles
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import namespace_digest, pack_header
from kvoffload.testing import payload_of
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.file_faults import flip, overwrite

pytestmark = pytest.mark.usefixtures("as_files")

SIZE = 16 * 1024


@pytest.fixture(params=["plain", "encrypted"])
def store(tmp_path, request):
    keys = {"encryption": request.getfixturevalue("encryption")}
    backend = open_store(tmp_path, **keys if request.param == "encrypted" else {})
    return backend, tmp_path


def open_store(tmp_path, namespace="one", **settings):
    options = {"root": str(tmp_path / "kv"), "capacity": "64MiB", **settings}
    return closed_later(open_backend("disk", options, namespace))


def files_of(root, namespace="one"):
    folder = root / "kv" / namespace_digest(namespace).hex()
    return {path.name: path for path in folder.glob("??/*")}


DAMAGE = {
    "magic": lambda path: overwrite(path, 0, b"X"),
    "header": lambda path: flip(path, 300),
    "version": lambda path: overwrite(path, 8, b"\x07"),
    "payload": lambda path: flip(path, PAGE + 5000),
    "size": lambda path: os.truncate(path, PAGE + SIZE - 1),
    "short": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, PAGE + SIZE + 1),
    "zeros": lambda path: overwrite(path, PAGE * 2, bytes(PAGE)),
    "hole": lambda path: (os.truncate(path, 0), os.truncate(path, PAGE + SIZE)),
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_damaged_file_is_a_miss_and_is_set_aside(store, kind):
    backend, root = store
    good, bad = keys_of(2)
    await backend.write([good, bad], filled([good, bad], SIZE))
    DAMAGE[kind](files_of(root)[bad.hex()])
    assert await backend.read([bad, good], slots(2, SIZE)) == [False, True]
    assert backend.holds(bad) is False
    assert await backend.contains([bad]) == [False]
    assert bad.hex() not in files_of(root)
    (kept,) = (root / "kv" / ".quarantine").iterdir()
    assert kept.name.endswith(bad.hex())
    counts = backend.counters()
    assert counts["corrupt"] == 1
    assert sum(count for reason, count in counts.items() if reason.startswith("corrupt_")) == 1
    assert [(r.key, r.reason) for r in backend.take_removals()] == [(bad, "corrupt")]
    assert await backend.write([bad], filled([bad], SIZE)) == [True]
    assert await backend.read([bad], slots(1, SIZE)) == [True]


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
async def test_what_is_no_file_is_a_miss_once_and_gives_way_to_a_store(tmp_path, io):
    backend, root = open_store(tmp_path, io=io), tmp_path
    keys = keys_of(4)
    await backend.write(keys, filled(keys, SIZE))
    files = files_of(root)
    strange = link, folder, pipe, socket_path = [files[key.hex()] for key in keys]
    shutil.copy(link, root / "elsewhere")
    for path in strange:
        path.unlink()
    link.symlink_to(root / "elsewhere")
    folder.mkdir()
    os.mkfifo(pipe)
    os.mknod(socket_path, stat.S_IFSOCK | 0o600)
    assert await backend.read(keys, slots(4, SIZE)) == [False] * 4
    counts = backend.counters()
    reasons = ("corrupt", "corrupt_link", "corrupt_folder", "corrupt_special")
    assert [counts.get(reason) for reason in reasons] == [4, 1, 1, 2]
    assert await backend.write(keys, filled(keys, SIZE)) == [True] * 4
    assert await backend.read(keys, slots(4, SIZE)) == [True] * 4
    assert all(path.is_file() and not path.is_symlink() for path in strange)


async def test_a_chunk_that_somebody_removed_is_stored_again(store):
    backend, root = store
    keys = keys_of(2)
    assert await backend.write(keys, filled(keys, SIZE)) == [True] * 2
    files_of(root)[keys[0].hex()].unlink()
    assert await backend.write(keys, filled(keys, SIZE)) == [True] * 2
    assert sorted(files_of(root)) == sorted(key.hex() for key in keys)
    assert await backend.read(keys, slots(2, SIZE)) == [True] * 2


async def test_quarantine_is_bounded_and_counted_in_the_capacity(tmp_path):
    backend = open_store(tmp_path, quarantine=2, io="buffered")
    keys = keys_of(6)
    await backend.write(keys, filled(keys, SIZE))
    for key, path in files_of(tmp_path).items():
        assert key
        flip(path, PAGE)
    assert await backend.read(keys, slots(6, SIZE)) == [False] * 6
    kept = list((tmp_path / "kv" / ".quarantine").iterdir())
    assert len(kept) == 2
    assert backend.usage().resident_bytes == sum(path.stat().st_blocks * 512 for path in kept)


async def test_a_damaged_chunk_of_the_longest_key_is_set_aside_like_any_other(tmp_path):
    backend = open_store(tmp_path)
    key = bytes([7]) * 120
    await backend.write([key], filled([key], SIZE))
    flip(files_of(tmp_path)[key.hex()], PAGE)
    assert await backend.read([key], slots(1, SIZE)) == [False]
    assert len(list((tmp_path / "kv" / ".quarantine").iterdir())) == 1


async def test_a_file_in_a_folder_that_is_not_its_own_is_no_chunk(store):
    backend, root = store
    keys = keys_of(2)
    await backend.write(keys[:1], filled(keys[:1], SIZE))
    path = files_of(root)[keys[0].hex()]
    wrong = path.parent.parent / ("00" if path.parent.name != "00" else "01")
    wrong.mkdir(exist_ok=True)
    shutil.copy(path, wrong / keys[1].hex())
    Scanner(backend._store).scan(full=True)
    assert [backend.holds(key) for key in keys] == [True, False]


async def test_quarantine_of_none_removes(tmp_path):
    backend = open_store(tmp_path, quarantine=0)
    keys = keys_of(1)
    await backend.write(keys, filled(keys, SIZE))
    flip(files_of(tmp_path)[keys[0].hex()], PAGE)
    assert await backend.read(keys, slots(1, SIZE)) == [False]
    assert backend.usage().resident_bytes == 0
    assert not list((tmp_path / "kv" / ".quarantine").iterdir())


def test_a_hundred_thousand_mutated_files_are_noticed(ram_path):
    """Bits, bursts, truncation, extension, zero pages, foreign headers; on real files."""
    rng = random.Random(3)
    size = 8192
    one, two = keys_of(2)
    namespace = namespace_digest("one")
    path = str(ram_path / "chunk")
    files = ChunkFiles(Vfs(), namespace, direct=False, room=None, durable=False)
    (slot,) = slots(1, size)
    assert files.write(path, one, filled([one], size)[0]).reason is None
    whole = (ram_path / "chunk").read_bytes()
    payload = payload_of(one, size)
    foreign = pack_header(two, namespace, payload, header_bytes=PAGE)
    stranger = pack_header(one, namespace_digest("two"), payload, header_bytes=PAGE)
    fd = os.open(path, os.O_RDWR)
    false_alarms = 0
    for turn in range(100_000):
        kind = rng.random()
        if kind < 0.5:
            at = rng.randrange(len(whole))
            change = bytes([whole[at] ^ 1 << rng.randrange(8)])
        elif kind < 0.8:
            at = rng.randrange(len(whole))
            change = rng.randbytes(rng.randrange(1, min(4096, len(whole) - at) + 1))
        elif kind < 0.9:
            at = rng.randrange(len(whole) // 512) * 512
            change = bytes(512)
        else:
            at, change = 0, rng.choice((foreign, stranger))
        if rng.random() < 0.1:
            at, change = 0, b""
            os.ftruncate(
                fd, rng.choice((rng.randrange(len(whole)), len(whole) + rng.randrange(1, 9000)))
            )
        os.pwrite(fd, change, at)
        changed = not change or whole[at : at + len(change)] != change
        assert (files.read(path, one, slot).reason is not None) == changed
        os.ftruncate(fd, len(whole))
        if change:
            os.pwrite(fd, whole[at : at + len(change)], at)
        else:
            os.pwrite(fd, whole, 0)
        if turn % 50 == 0:
            false_alarms += files.read(path, one, slot).reason is not None
            assert bytes(slot) == payload
    os.close(fd)
    assert false_alarms == 0
