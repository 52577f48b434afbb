"""Failures without an OSError: threads that do not start, policies that raise, cancelled loads."""

import asyncio
import contextlib
import logging
import os
import threading
import time

import pytest
from disk_parts import SIZE, chunk_bytes, full, let_calls_hang_after, open_disk, until, write

from kvoffload.backends.disk import housekeeper as disk_housekeeper
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.housekeeper import Housekeeper
from kvoffload.backends.disk.paths import WRITERS
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.testing.backends import keys_of, slots
from tests.support.vfs import StuckVfs

pytestmark = pytest.mark.usefixtures("as_files")


def assert_exact(backend, root):
    assert backend._store.space.in_flight_bytes == 0
    assert backend._store.root.quota.refresh() == chunk_bytes(root)


# ---- a device that hangs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "counter", "threads"),
    [("preadv", "read_stalled", "read_threads"), ("pwritev", "write_stalled", "write_threads")],
)
async def test_what_a_dead_device_refuses_is_counted_and_said_once(
    tmp_path, caplog, call, counter, threads
):
    stuck = []
    vfs = StuckVfs(lambda name, path: name == call and bool(stuck) and ".ledger" not in path)
    backend = open_disk(tmp_path, vfs=vfs, io="buffered", stall_s=60.0, **{threads: 1})
    keys, new = keys_of(6), keys_of(6, "new")
    assert await write(backend, keys) == [True] * 6

    async def work():
        if call == "preadv":
            return await backend.read(keys, slots(6, SIZE))
        return await write(backend, new)

    def warnings():
        return [r for r in caplog.records if "every thread" in r.getMessage()]

    async def stall():
        """Six are refused, twice, while one is stuck that had five behind it."""
        before = backend.counters().get(counter, 0)
        stuck.append(True)
        let_calls_hang_after(backend, 0.5)
        first = asyncio.ensure_future(work())
        try:
            pool = backend._ThreadPoolBackend__pools["read" if call == "preadv" else "write"]
            assert await until(pool.stalled)
            for _ in range(2):
                assert await asyncio.wait_for(work(), 10) == [False] * 6
            assert await until(lambda: backend.counters()[counter] == before + 17)
        finally:
            stuck.clear()
            vfs.release()
        let_calls_hang_after(backend, 60.0)
        assert await first == [True] + [False] * 5
        assert backend.counters()[counter] == before + 17
        vfs.hold()

    with caplog.at_level(logging.WARNING):
        for stalls in (1, 2):
            await stall()
            assert len(warnings()) == stalls
            assert await work() == [True] * 6
            await backend.remove(new)
    assert str(tmp_path) in warnings()[0].getMessage()


# ---- errors that are no OSError ------------------------------------------------------------------


def failing(monkeypatch, owner, method, times=3, error=RuntimeError):
    """Make a method raise the next few times, after which it works again."""
    real = getattr(owner, method)
    left = [times]

    def attempt(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise error(f"{method} does not work")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, method, attempt)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("where", ["policy", "header", "name", "stat"])
async def test_a_store_in_which_something_raises_is_a_refusal_and_leaves_no_bytes(
    tmp_path, monkeypatch, caplog, where, error
):
    backend = open_disk(tmp_path, io="buffered")
    keys = keys_of(4)
    assert await write(backend, keys[:1]) == [True]
    owner, method = {
        "policy": (HandicapPolicy, "add"),
        "header": (backend._store.files.chunks, "pages"),
        "name": (backend._store.root.writer, "temporary"),
        "stat": (backend._store.files, "allocated_bytes"),
    }[where]
    failing(monkeypatch, owner, method, error=error)
    for key in keys[1:]:
        assert await write(backend, [key]) == [False]
    assert backend.counters() == {"write_failed": 3}
    assert f"{method} does not work" in caplog.text
    assert_exact(backend, tmp_path)
    assert not any(map(backend.holds, keys[1:]))
    assert os.listdir(backend._store.root.writer.folder) == ["lock"]
    assert await write(backend, keys) == [True] * 4
    assert await backend.read(keys, slots(4, SIZE)) == [True] * 4
    assert_exact(backend, tmp_path)


async def test_a_policy_that_names_no_victim_but_raises_refuses_the_store(tmp_path, monkeypatch):
    backend = open_disk(tmp_path, **full(2))
    keys = keys_of(4)
    assert await write(backend, keys[:2]) == [True] * 2
    failing(monkeypatch, HandicapPolicy, "victims")
    assert [(await write(backend, [keys[2]]))[0] for _ in range(3)] == [False] * 3
    assert backend.counters() == {"write_failed": 3}
    assert_exact(backend, tmp_path)
    assert await write(backend, [keys[2]]) == [True]
    assert_exact(backend, tmp_path)


async def test_a_load_in_which_something_raises_is_a_miss(tmp_path, monkeypatch, caplog):
    backend = open_disk(tmp_path, io="buffered", read_threads=1)
    keys = keys_of(3)
    assert await write(backend, keys) == [True] * 3
    failing(monkeypatch, backend._store.files.chunks, "pages", times=1, error=MemoryError)
    assert await backend.read(keys, slots(3, SIZE)) == [False, True, True]
    assert backend.counters() == {"read_failed": 1}
    assert "pages does not work" in caplog.text


async def test_room_that_no_store_used_is_free_again_though_no_thread_starts(tmp_path, monkeypatch):
    def refuses(thread):
        raise RuntimeError("can't start new thread")

    backend = open_disk(tmp_path, write_threads=1)
    for key in keys_of(2):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuses)
            assert await write(backend, [key] * 4) == [True] * 4
        if key == keys_of(1)[0]:
            assert await until(lambda: backend._store.space.in_flight_bytes == 0)
            assert_exact(backend, tmp_path)
    await backend.close()
    assert backend._store.space.in_flight_bytes == 0


# ---- an open that fails --------------------------------------------------------------------------


def open_files():
    """Return the descriptors of this process with their targets."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


@pytest.mark.parametrize(
    "part", ["kvoffload-DiskBackend-load_1", "kvoffload-DiskBackend-store_0", "kvoffload-disk"]
)
def test_an_open_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, part):
    real = threading.Thread.start

    def start(thread):
        if thread.name == part:
            raise RuntimeError("can't start new thread")
        real(thread)

    options = DiskOptions(root=str(tmp_path), min_free=ByteSize(0), read_threads=2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        threads, descriptors = set(threading.enumerate()), open_files()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                DiskBackend(options, "ns")
            # Sets, not counts: threads of an earlier test may end meanwhile.
            assert set(threading.enumerate()) <= threads
            assert open_files() <= descriptors
            assert os.listdir(tmp_path / WRITERS) == []
    backend = DiskBackend(options, "ns")
    assert backend._store.root.evictor.held
    asyncio.run(backend.close())


@pytest.mark.parametrize("field", ["read_threads", "write_threads"])
@pytest.mark.parametrize("threads", [0, 257, 10**9])
def test_more_threads_than_make_sense_are_refused(tmp_path, field, threads):
    with pytest.raises(ConfigError) as caught:
        DiskOptions(root=str(tmp_path), **{field: threads})
    assert caught.value.field == field


# ---- a cancelled load, an evictor that does not know the chunks of other processes ---------------


async def test_chunks_read_before_a_load_was_cut_off_count_as_used(tmp_path):
    keys = keys_of(4)
    vfs = StuckVfs(lambda name, path: name == "preadv" and path.endswith(keys[2].hex()))
    backend = open_disk(tmp_path, vfs=vfs, io="direct", read_threads=1, **full(4))
    assert [(await write(backend, [key]))[0] for key in keys] == [True] * 4
    loading = asyncio.ensure_future(backend.read(keys, slots(4, SIZE)))
    assert await until(lambda: vfs.stuck)
    loading.cancel()
    await asyncio.sleep(0.02)
    vfs.release()
    with pytest.raises(asyncio.CancelledError):
        await loading
    # Without the load the first would leave; the last was not begun and is the oldest now.
    assert await write(backend, keys_of(1, "new")) == [True]
    assert [backend.holds(key) for key in keys] == [True, True, True, False]


async def test_an_owner_without_victims_looks_at_once_for_what_others_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_housekeeper, "_TICK_S", 3600.0)
    owner, other = open_disk(tmp_path, "one", **full(6)), open_disk(tmp_path, "two", **full(6))
    assert await write(other, keys_of(6, "two")) == [True] * 6
    looks = []
    real = Housekeeper._scan
    monkeypatch.setattr(
        Housekeeper, "_scan", lambda self: (looks.append(time.monotonic()), real(self))
    )
    refused = 0
    while await write(owner, keys_of(1, "one")) != [True]:
        refused += 1
        assert refused < 500, owner.counters()
        await asyncio.sleep(0.02)
    assert owner.counters()["evicted"] >= 1
    assert len(looks) <= refused
