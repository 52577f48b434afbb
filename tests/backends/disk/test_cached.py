"""``io: "cached"``: loads from the page cache without waiting, or directly; never other bytes."""

import ctypes
import errno
import os
import threading
import time
from collections import Counter

import pytest
from disk_parts import SIZE, open_disk, write

from kvoffload.backends import blocking_pool
from kvoffload.backends.base import ReadResult
from kvoffload.backends.disk import page_cache
from kvoffload.testing import payload_of
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.vfs import EVERY_ERROR, FailingVfs, HookedVfs, kind_of

CALLS = "is_cached", "read_cached", "bypass_cache", "preadv", "start_writeback"


class CountingVfs(HookedVfs):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def around(self, call, path, perform):
        if call in CALLS and kind_of(path) in ("chunk", "temporary"):
            self.calls[call] += 1
        return perform()


@pytest.fixture
def cached(tmp_path):
    vfs = CountingVfs()
    backend = open_disk(tmp_path, vfs=vfs, io="cached")
    if backend.io_mode != "cached":
        pytest.skip("no direct I/O here")
    vfs.calls.clear()
    return backend, vfs.calls


def drop(root):
    """Drop the chunks from the page cache."""
    for path in root.glob("*/??/*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


async def read(backend, keys, size=SIZE):
    into = slots(len(keys), size)
    answers = await backend.read(keys, into)
    for key, slot, good in zip(keys, into, answers, strict=True):
        assert not good or bytes(slot) == payload_of(key, size)
    return answers


async def test_what_was_just_stored_is_loaded_from_the_page_cache(cached):
    backend, calls = cached
    keys = keys_of(4)
    assert await write(backend, keys) == [True] * 4
    assert await read(backend, keys) == [True] * 4
    assert calls == {"start_writeback": 4, "is_cached": 4, "read_cached": 4}
    await backend.close()


async def test_the_rest_is_loaded_directly_and_stays_out_of_the_page_cache(cached, tmp_path):
    backend, calls = cached
    keys = keys_of(4)
    assert await write(backend, keys) == [True] * 4
    drop(tmp_path)
    calls.clear()
    assert await read(backend, keys) == [True] * 4
    assert await read(backend, keys) == [True] * 4
    assert calls == {"is_cached": 8, "bypass_cache": 8, "preadv": 8}
    await backend.close()


async def test_memory_that_direct_io_cannot_use_is_filled_by_way_of_the_page_cache(
    cached, tmp_path
):
    backend, calls = cached
    keys = keys_of(2)
    assert await backend.write(keys, filled(keys, SIZE - 1)) == [True] * 2
    drop(tmp_path)
    calls.clear()
    assert await read(backend, keys, SIZE - 1) == [True] * 2
    assert calls == {"is_cached": 2, "preadv": 2}
    await backend.close()


@pytest.mark.parametrize("call", ["is_cached", "read_cached", "bypass_cache", "start_writeback"])
@pytest.mark.parametrize("error", [*EVERY_ERROR, errno.EAGAIN])
async def test_a_page_cache_that_fails_costs_no_chunk(tmp_path, call, error):
    vfs = FailingVfs(0, error, sticky=True, when=lambda name, path: name == call)
    backend = open_disk(tmp_path, vfs=vfs, io="cached")
    vfs.nth = 1
    keys = keys_of(4)
    assert await write(backend, keys) == [True] * 4
    assert await read(backend, keys) == [True] * 4
    drop(tmp_path)
    assert await read(backend, keys) == [True] * 4
    await backend.close()


@pytest.mark.parametrize("is_cold", [False, True])
async def test_damage_in_the_page_cache_or_on_the_disk_is_found(cached, tmp_path, is_cold):
    backend, _ = cached
    keys = keys_of(1)
    assert await write(backend, keys) == [True]
    (path,) = tmp_path.glob("*/??/*")
    content = bytearray(path.read_bytes())
    content[9000] ^= 1
    path.write_bytes(content)
    if is_cold:
        drop(tmp_path)
    assert [each is ReadResult.CORRUPT for each in await read(backend, keys)] == [True]
    assert backend.counters() == {"corrupt": 1, "corrupt_payload": 1}
    await backend.close()


def test_an_old_kernel_is_asked_by_another_call(tmp_path, monkeypatch):
    def forbidden(*args):
        ctypes.set_errno(errno.ENOSYS)
        return -1

    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE - 100))
    with open(path, "rb") as file:
        by_cachestat = page_cache.is_cached(file.fileno(), SIZE - 100)
        monkeypatch.setattr(page_cache._quick, "syscall", forbidden, raising=False)
        assert page_cache.is_cached(file.fileno(), SIZE - 100) == by_cachestat
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        cold = page_cache.is_cached(file.fileno(), SIZE - 100)
        monkeypatch.undo()
        assert page_cache.is_cached(file.fileno(), SIZE - 100) == cold
    with pytest.raises(OSError, match="Bad file descriptor"):
        page_cache.is_cached(-1, SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        page_cache.start_writeback(-1)


class ThreadsVfs(CountingVfs):
    """Lists the threads that read chunks, out of the page cache and directly."""

    def __init__(self):
        super().__init__()
        self.threads = {"read_cached": [], "preadv": []}

    def around(self, call, path, perform):
        if call in self.threads and kind_of(path) == "chunk":
            self.threads[call].append(threading.get_ident())
            time.sleep(0.002)
        return super().around(call, path, perform)


async def test_one_thread_loads_what_is_cached_and_all_of_them_what_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(blocking_pool, "QUICK_S", 60)
    vfs = ThreadsVfs()
    backend = open_disk(tmp_path, vfs=vfs, io="cached")
    if backend.io_mode != "cached":
        pytest.skip("no direct I/O here")
    keys = keys_of(16)
    assert await write(backend, keys) == [True] * 16
    assert await read(backend, keys) == [True] * 16
    assert len(vfs.threads["read_cached"]) == 16
    assert len(set(vfs.threads["read_cached"])) == 1
    drop(tmp_path)
    assert await read(backend, keys) == [True] * 16
    assert len(set(vfs.threads["preadv"])) > 4
    await backend.close()
