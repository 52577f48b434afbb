"""Every error of the mount, and a mount that hangs: misses with reasons, by a deadline."""

import asyncio
import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from disk_parts import ON_DISK, SIZE, load, until
from folder_parts import host_record, open_folder, path_of, store, stored, stored_bytes

from kvoffload.backends import log_rate
from kvoffload.backends.base import ReadResult
from kvoffload.backends.disk import manifest
from kvoffload.backends.disk.paths import MANIFEST
from kvoffload.backends.folder.mount import Mount
from kvoffload.backends.folder.places import HOSTS, LEASE, STORE
from kvoffload.backends.folder.records import LeaseRecord, Records, StoreRecord
from kvoffload.testing.backends import filled, keys_of, slots, wrong_bytes
from tests.support.other_version import OTHERS, resealed
from tests.support.vfs import FailingVfs, StuckVfs, calls_on, kind_of

A_LEASE = LeaseRecord(
    holder="token", host="h", capacity_bytes=1, resident_bytes=1, newcomer_bytes=1, counted={},
    limits={},
)  # fmt: skip
ERRORS = (errno.ESTALE, errno.EIO, errno.EDQUOT, errno.ENOSPC, errno.EACCES, errno.ENOTCONN)


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("call", "is_own"),
    [("open", True), ("preadv", True), ("open", False), ("fstat", False), ("preadv", False)],
)
async def test_a_load_that_the_mount_fails_is_a_miss_with_a_reason(tmp_path, call, is_own, error):
    vfs, keys = FailingVfs(0, error, sticky=True, when=calls_on("chunk", call)), keys_of(3)
    if not is_own:  # whose files' times this process does not know
        await stored(tmp_path / "share", keys, timeout_s=60.0)
    backend = open_folder(tmp_path / "share", vfs=vfs)
    if is_own:
        assert await store(backend, keys) == [True] * 3
    vfs.nth = vfs.calls + 1
    answers = await load(backend, keys)
    assert [each.value for each in answers] == ["unavailable"] * 3
    assert backend.counters()[f"read_io_{errno.errorcode[error]}"] == 3
    vfs.heal()
    assert await load(backend, keys) == [True] * 3


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "pwritev", "close", "rename"])
async def test_a_store_that_the_mount_fails_leaves_nothing(tmp_path, call, error):
    vfs = FailingVfs(0, error, sticky=True, when=calls_on("chunk", call))
    backend, keys = open_folder(tmp_path / "share", vfs=vfs), keys_of(3)
    vfs.nth = vfs.calls + 1
    assert await store(backend, keys) == [False] * 3
    assert backend.counters()[f"write_io_{errno.errorcode[error]}"] == 3
    vfs.heal()
    assert await backend.contains(keys) == [False] * 3
    assert [path for path in (tmp_path / "share").glob("*/??/*") if path.is_file()] == []
    assert await store(backend, keys) == [True] * 3
    assert backend._housekeeper.room.stored_bytes == 3 * 65536  # what failed is counted no more


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [STORE, LEASE, HOSTS, MANIFEST])
async def test_a_record_that_the_mount_refuses_as_it_is_closed_is_not_published(
    tmp_path, name, error
):
    """NFS and FUSE tell of a full disk so: the file may lack its last bytes."""
    (tmp_path / HOSTS).mkdir()
    vfs, root = FailingVfs(1, error, when=lambda call, path: call == "close"), str(tmp_path)
    records = Records(vfs, root, "token")
    write = {
        STORE: lambda: records.mark(StoreRecord(store="new")),
        LEASE: lambda: records.write_lease(A_LEASE),
        HOSTS: lambda: records.host(host_record()),
        MANIFEST: lambda: manifest.write(vfs, root, "n", {}, lambda: f"{root}/.temporary"),
    }[name]
    with pytest.raises(OSError, match=os.strerror(error)):
        write()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    write()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] != []


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
async def test_a_short_read_or_write_goes_on(tmp_path, call):
    vfs = FailingVfs(1, None, when=calls_on("chunk", call))
    backend, keys = open_folder(tmp_path / "share", vfs=vfs), keys_of(1)
    assert await store(backend, keys) == [True]
    assert await load(backend, keys) == [True]


async def test_a_lookup_that_the_mount_fails_is_a_miss_with_a_reason(tmp_path):
    keys = keys_of(3)
    await stored(tmp_path / "share", keys)
    vfs = FailingVfs(1, errno.ESTALE, sticky=True, when=calls_on("chunk", "lstat"))
    backend = open_folder(tmp_path / "share", vfs=vfs)
    assert await backend.contains(keys) == [False] * 3
    assert backend.counters()["lookup_io_ESTALE"] == 3


async def test_a_close_that_is_cancelled_ends_housekeeping_all_the_same(tmp_path):
    backend = open_folder(tmp_path / "share")
    closing = asyncio.ensure_future(backend.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert await until(lambda: backend._housekeeper.join(0))


async def test_a_hung_mount_is_given_up_by_the_deadline_and_threads_are_bounded(tmp_path, caplog):
    vfs, keys = StuckVfs(lambda call, path: False), keys_of(40)
    await stored(tmp_path / "share", keys, timeout_s=60.0)
    backend = open_folder(tmp_path / "share", vfs=vfs, timeout_s=0.2, threads=4)
    vfs.when = lambda call, path: kind_of(path) == "chunk"
    into = slots(40, SIZE)
    before, begun_s = threading.active_count(), time.monotonic()
    answers = await backend.read(keys, into)
    assert set(answers) == {ReadResult.LATE}
    assert await backend.write(keys_of(9, "new"), filled(keys_of(9, "new"), SIZE)) == [False] * 9
    assert await backend.contains(keys_of(99, "other")) == [False] * 99
    assert time.monotonic() - begun_s < 10
    assert threading.active_count() <= before + 4 + 4  # of them for lookups
    counts = backend.counters()
    assert counts["read_late"] + counts["read_stalled"] == 40
    assert counts["read_late"] <= 8
    assert backend.usage().gauges["up"] == 0
    assert "did not answer" in caplog.text
    for slot in into:
        slot[:] = b"\xaa" * SIZE
    vfs.release()
    assert await until(lambda: backend.usage().gauges["up"] == 1)
    await asyncio.sleep(0.1)
    assert all(bytes(slot) == b"\xaa" * SIZE for slot in into)  # no late call wrote into it
    await backend.close()
    again = open_folder(tmp_path / "share", timeout_s=60.0)
    assert await load(again, keys) == [True] * 40
    assert await again.contains(keys_of(9, "new")) == [False] * 9


async def test_a_store_that_was_given_up_counts_by_whether_its_file_comes(tmp_path):
    vfs = StuckVfs(calls_on("chunk", "rename"))
    backend, keys = open_folder(tmp_path / "share", vfs=vfs, timeout_s=1.0, threads=4), keys_of(9)
    assert await store(backend, keys) == [False] * 9
    assert backend.counters()["write_late"] + backend.counters()["write_stalled"] == 9
    vfs.release()
    assert await until(lambda: stored_bytes(tmp_path / "share") == 4 * ON_DISK)
    room = backend._housekeeper.room
    assert await until(lambda: room.stored_bytes == 4 * ON_DISK), "the capacity counts no such file"


async def test_lookups_wait_for_no_chunk_that_is_moved(tmp_path):
    vfs = StuckVfs(calls_on("chunk", "preadv"))
    backend, keys = open_folder(tmp_path / "share", vfs=vfs, threads=4), keys_of(8)
    await store(backend, keys)
    loading = asyncio.ensure_future(load(backend, keys))
    assert await until(lambda: vfs.stuck == 4)
    assert await asyncio.wait_for(backend.contains(keys_of(40, "other")), 60) == [False] * 40
    vfs.release()
    assert await loading == [True] * 8


async def test_a_call_that_moves_bytes_keeps_the_callers_memory(tmp_path):
    """It ends late, but as it ends its memory is free; the other chunks end by the deadline."""
    keys = keys_of(1)
    await stored(tmp_path / "share", keys, timeout_s=60.0)
    vfs = StuckVfs(calls_on("chunk", "preadv"))
    backend = open_folder(tmp_path / "share", vfs=vfs, timeout_s=0.3, threads=4)
    into = slots(1, SIZE)
    reading = asyncio.ensure_future(backend.read(keys, into))
    assert await until(lambda: vfs.stuck)
    await asyncio.sleep(0.5)
    assert not reading.done()
    reading.cancel()
    await asyncio.sleep(0.1)
    assert not reading.done()
    vfs.release()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert wrong_bytes(keys, into) == []


EXITS = """
import asyncio, sys, threading
sys.path[:0] = ["tests/helpers", "."]
from folder_parts import open_folder, store
from kvoffload.testing.backends import keys_of
from tests.support.vfs import StuckVfs, kind_of

async def main(stuck):
    vfs = StuckVfs(lambda call, path: kind_of(path) in stuck)
    vfs.release()
    backend = open_folder(sys.argv[1], vfs=vfs, timeout_s=0.2, threads=3)
    vfs.hold()
    calls = [asyncio.ensure_future(store(backend, keys_of(4, str(i)))) for i in range(5)]
    await asyncio.sleep(0.1)
    await backend.close()
    await asyncio.gather(*calls)
    print("closed")

asyncio.run(main(sys.argv[2].split(",")))
"""


@pytest.mark.parametrize("times", [1, pytest.param(100, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("stuck", ["chunk", "chunk,root,namespace,shard"])
def test_a_process_with_hung_calls_ends(tmp_path, stuck, times):
    for _ in range(times):
        ended = subprocess.run(
            [sys.executable, "-c", EXITS, str(tmp_path / "share"), stuck],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("corrupt_payload", lambda c: c[:-1] + bytes([c[-1] ^ 1])),
        ("corrupt_header", lambda c: c[:300] + b"\x01" + c[301:]),
        ("corrupt_size", lambda c: c[:-1]),
        ("corrupt_size", lambda c: c + b"\0"),
        ("corrupt_magic", lambda c: b"\0" * len(c)),
        ("corrupt_short", lambda c: c[:100]),
        ("corrupt_short", lambda c: b""),
    ],
)
async def test_a_damaged_file_is_a_miss_and_is_replaced(tmp_path, what, change):
    backend, keys = open_folder(tmp_path / "share"), keys_of(2)
    await store(backend, keys)
    path = path_of(tmp_path, keys[0])
    path.write_bytes(change(path.read_bytes()))
    answers = await load(backend, keys)
    assert [each.value for each in answers] == ["corrupt", "hit"]
    assert backend.counters()[what] == 1
    assert backend.take_removals() == [(keys[0], "corrupt")]
    assert await backend.contains(keys) == [False, True]
    assert await store(backend, keys) == [True] * 2
    assert await load(backend, keys) == [True] * 2


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_folder_a_pipe_or_a_link_under_a_chunks_name_is_a_miss_with_its_reason(
    tmp_path, is_own
):
    keys = keys_of(3)
    if not is_own:
        await stored(tmp_path / "share", keys, timeout_s=60.0)
    backend = open_folder(tmp_path / "share")
    if is_own:
        assert await store(backend, keys) == [True] * 3
    shutil.copy(path_of(tmp_path, keys[2]), tmp_path / "whole")
    link = partial(os.symlink, tmp_path / "whole")
    for key, make in zip(keys, (os.mkdir, os.mkfifo, link), strict=True):
        path = path_of(tmp_path, key)
        path.unlink()
        make(path)
    assert await load(backend, keys) == [ReadResult.CORRUPT] * 3
    reasons = dict.fromkeys(("corrupt_folder", "corrupt_special", "corrupt_link"), 1)
    assert backend.counters().items() >= reasons.items()
    assert await backend.contains(keys) == [False] * 3


async def test_damaged_files_are_removed_at_once_on_a_mount_that_hangs(tmp_path):
    vfs = StuckVfs(calls_on("chunk", "unlink"))
    backend, keys = open_folder(tmp_path / "share", vfs=vfs, timeout_s=60.0, threads=8), keys_of(8)
    assert await store(backend, keys) == [True] * 8
    for key in keys:
        path = path_of(tmp_path, key)
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    loading = asyncio.ensure_future(load(backend, keys))
    assert await until(lambda: vfs.stuck == 8), "a load waits for one after the other"
    vfs.release()
    assert await loading == [False] * 8
    assert {removal.reason for removal in backend.take_removals()} == {"corrupt"}


async def test_files_under_each_others_names_are_misses(tmp_path):
    backend, keys = open_folder(tmp_path / "share"), keys_of(2)
    await store(backend, keys)
    one, two = (path_of(tmp_path, key) for key in keys)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert await load(backend, keys) == [False] * 2
    assert backend.counters()["corrupt_key"] == 2


@OTHERS
async def test_a_chunk_of_another_version_stays_until_it_is_stored_again(tmp_path, offset, value):
    backend, keys = open_folder(tmp_path / "share"), keys_of(1)
    await store(backend, keys)
    path = path_of(tmp_path, keys[0])
    other = resealed(path.read_bytes(), 4096, offset, value)
    path.write_bytes(other)
    assert await load(backend, keys) == [ReadResult.MISSING]
    assert path.read_bytes() == other
    assert backend.counters() == {"other_version": 1}
    assert await backend.contains(keys) == [False]  # else each request would load it in vain
    assert await store(backend, keys) == [True]
    assert await load(backend, keys) == [True]


@pytest.mark.parametrize(
    ("call", "error"),
    [("open", errno.ESTALE), *itertools.product(["fstat", "preadv"], [errno.ESTALE, errno.ENOENT])],
)
def test_a_record_that_is_replaced_while_it_is_read_is_read_again(tmp_path, call, error):
    """GlusterFS and NFS answer so: a name then leads to a file that is gone."""
    (tmp_path / HOSTS).mkdir()
    vfs = FailingVfs(1, error, when=lambda name, path: name == call and path.endswith(LEASE))
    records = Records(vfs, str(tmp_path), "token")
    records.write_lease(A_LEASE)
    assert records.lease()[0] == A_LEASE


class NoMoreThreads:
    """Lets so many threads of the folder backend start, and refuses the rest."""

    def __init__(self, monkeypatch, left):
        self.left, self._start = left, threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self.start(thread))

    def start(self, thread):
        if thread.name.startswith("calls-"):
            if not self.left:
                raise RuntimeError("can't start new thread")
            self.left -= 1
        self._start(thread)


async def test_a_call_that_found_no_thread_is_not_made_later(monkeypatch):
    """Its caller has its memory back, which may have another chunk by then."""
    system, made = NoMoreThreads(monkeypatch, left=0), []
    mount = Mount("calls", threads=2, timeout_s=60.0)
    with pytest.raises(RuntimeError, match="thread"):
        await mount.call(lambda turn: made.append("refused"))
    system.left = 1
    assert await mount.call(lambda turn: made.append("made")) is None
    assert made == ["made"]
    mount.close()


async def test_where_the_system_refuses_further_threads_those_there_are_make_the_calls(monkeypatch):
    NoMoreThreads(monkeypatch, left=1)
    mount = Mount("calls", threads=2, timeout_s=60.0)
    calls = [mount.call(lambda turn, number=i: number) for i in range(4)]
    assert await asyncio.gather(*calls) == [0, 1, 2, 3]
    mount.close()


async def test_a_failure_that_lasts_is_a_line_for_each_reason_in_ten_minutes(
    tmp_path, monkeypatch, caplog
):
    now_s, vfs = [1000.0], FailingVfs(0, errno.EIO, sticky=True, when=calls_on("chunk", "pwritev"))
    monkeypatch.setattr(log_rate, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    backend = open_folder(tmp_path / "share", vfs=vfs)
    vfs.nth = vfs.calls + 1
    for turn in range(100):
        vfs.error = errno.ENOSPC if turn > 80 else errno.EIO
        assert await store(backend, keys_of(1, str(turn))) == [False]
        now_s[0] += 1.5
    told = [each.getMessage() for each in caplog.records]
    assert [each.rpartition(": ")[2] for each in told] == ["io_EIO", "io_ENOSPC"]
    now_s[0] += 600
    assert await store(backend, keys_of(1)) == [False]
    assert caplog.records[-1].getMessage().endswith(": io_ENOSPC (18 more like it before)")


async def test_a_manifest_whose_call_is_cancelled_is_written_with_the_next_store(tmp_path):
    backend = open_folder(tmp_path / "share", threads=1)
    blocked = threading.Event()
    hung = asyncio.ensure_future(backend._mount.call(lambda turn: blocked.wait(60)))
    describing = asyncio.ensure_future(backend.describe({"model": "m"}))
    assert await until(lambda: backend._facts)  # it waits for the thread
    describing.cancel()
    await asyncio.wait([describing])
    blocked.set()
    await hung
    assert await store(backend, keys_of(1)) == [True]
    (path,) = tmp_path.glob("share/*/manifest.json")
    assert json.loads(path.read_text())["facts"] == {"model": "m"}


async def test_a_manifest_that_could_not_be_written_is_written_with_the_next_store(
    tmp_path, caplog
):
    vfs = FailingVfs(1, errno.EIO, when=lambda call, path: path.endswith("manifest.json"))
    backend = open_folder(tmp_path / "share", vfs=vfs)
    await backend.describe({"model": "m"})
    assert list(tmp_path.glob("share/*/manifest.json")) == []
    assert "cannot write a manifest" in caplog.text
    assert await store(backend, keys_of(1)) == [True]
    (path,) = tmp_path.glob("share/*/manifest.json")
    assert json.loads(path.read_bytes())["facts"] == {"model": "m"}
