"""Whatever system call fails, and however often: hit or miss, and the accounting stays right."""

import asyncio
import errno
import mmap
import os
import random
import shutil

import pytest
from disk_parts import chunk_bytes, closed_later, in_form, let_calls_hang_after, load

from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.chunk_file import probe_direct
from kvoffload.backends.disk.paths import WRITERS
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError
from kvoffload.io.open_stores import is_of_device
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.vfs import EVERY_ERROR, FailingVfs, HookedVfs, StuckVfs, kind_of

pytestmark = pytest.mark.usefixtures("as_files")

SIZE = 8192
KEYS = keys_of(7)
OLD = keys_of(3, "old")


def options(root, **settings):
    return DiskOptions(
        root=str(root),
        capacity=ByteSize(5 * 12288),
        min_free=ByteSize(0),
        high_watermark=1.0,
        low_watermark=1.0,
        **{"io": "buffered", **settings},
    )


def opened(root, vfs, **settings):
    return closed_later(DiskBackend(options(root, **settings), "faults", vfs=vfs))


def aside_bytes(root):
    return sum(path.lstat().st_blocks * 512 for path in root.glob(".quarantine/*"))


async def life(root, vfs, form="files", **settings):
    """Open a folder with something in it; store, load, evict, remove, describe, close."""
    try:
        backend = in_form(DiskBackend(options(root, **settings), "faults", vfs=vfs), form)
    except ConfigError:
        return None
    assert await asyncio.to_thread(backend.wait_ready, 60)
    await load(backend, OLD, SIZE)
    for key in KEYS:
        await backend.write([key], filled([key], SIZE))
        assert chunk_bytes(root) <= 5 * 12288
    await load(backend, KEYS, SIZE)
    await backend.contains([*KEYS, *OLD])
    await backend.remove(KEYS[:1])
    await backend.describe({"model": "m"})
    calls = vfs.calls
    vfs.heal()
    await load(backend, [*KEYS, *OLD], SIZE)
    await backend.write(keys_of(1, "x"), filled(keys_of(1, "x"), SIZE))
    booked = backend._store.root.quota.refresh()  # None: damaged, and mended within a second
    assert booked is None or booked >= chunk_bytes(root) + aside_bytes(root)
    await backend.close()
    return calls


@pytest.fixture
async def used(ram_path):
    """A folder that an earlier life left."""
    backend = in_form(DiskBackend(options(ram_path / "old"), "faults"), "files")
    await backend.write(OLD, filled(OLD, SIZE))
    await backend.close()
    return ram_path / "old"


async def attempt(used, nth, error, sticky, form="files", **settings):
    root = used.parent / "now"
    shutil.copytree(used, root)
    try:
        vfs = FailingVfs(nth, error, sticky=sticky)
        await life(root, vfs, form, **settings)
        backend = in_form(DiskBackend(options(root, **settings), "faults"), form)
        assert await asyncio.to_thread(backend.wait_ready, 60)
        await load(backend, [*KEYS, *OLD], SIZE)
        assert backend.usage().resident_bytes == chunk_bytes(root) + aside_bytes(root)
        assert await backend.write(KEYS, filled(KEYS, SIZE)) == [True] * 7
        writers = [name for name in os.listdir(root / WRITERS) if not name.startswith("new-")]
        assert writers == [os.path.basename(backend._store.root.writer.folder)]
        await backend.close()
    finally:
        shutil.rmtree(root)


async def calls_of_a_life(used, **settings):
    shutil.copytree(used, used.parent / "count")
    calls = await life(used.parent / "count", FailingVfs(0, None), **settings)
    shutil.rmtree(used.parent / "count")
    return calls


@pytest.mark.parametrize(
    ("durability", "every", "form"),
    [("fsync", 2, "files"), ("fsync", 3, "segments")],
)
async def test_the_nth_system_call_fails(used, durability, every, form):
    """A life with fsync makes the calls of one without it; `make chaos` has all of both."""
    settings = {"durability": durability, "form": form}
    calls = await calls_of_a_life(used, **settings)
    assert calls > 150
    rng = random.Random(5)
    for nth in range(1, calls + 1, every):
        error = rng.choice(EVERY_ERROR)
        await attempt(used, nth, error, rng.random() < 0.5, **settings)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["files", "segments"])
@pytest.mark.parametrize("durability", ["none", "fsync"])
async def test_every_system_call_fails_in_every_way(used, durability, form):
    settings = {"durability": durability, "form": form}
    calls = await calls_of_a_life(used, **settings)
    for error in EVERY_ERROR:
        for sticky in (False, True):
            for nth in range(1, calls + 1):
                await attempt(used, nth, error, sticky, **settings)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("io", ["buffered", "auto"])
async def test_short_reads_and_writes_are_gone_on_with(tmp_path, call, io):
    vfs = FailingVfs(1, None, sticky=True, when=lambda c, p: c == call and ".ledger" not in p)
    backend = opened(tmp_path, vfs, io=io)
    assert await backend.write(KEYS[:3], filled(KEYS[:3], SIZE)) == [True] * 3
    assert await load(backend, KEYS[:3], SIZE) == [True] * 3


async def test_a_failed_fsync_drops_the_chunk_and_is_not_repeated(tmp_path):
    vfs = FailingVfs(1, 5, sticky=True, when=lambda call, path: call == "fsync")
    vfs.heal()
    backend = opened(tmp_path, vfs, durability="fsync")
    vfs.nth, vfs.calls = 1, 0
    assert await backend.write(KEYS[:1], filled(KEYS[:1], SIZE)) == [False]
    assert vfs.calls == 1
    assert backend.counters() == {"write_io_EIO": 1}
    assert chunk_bytes(tmp_path) == 0
    assert await load(backend, KEYS[:1], SIZE) == [False]
    vfs.heal()
    assert await backend.write(KEYS[:1], filled(KEYS[:1], SIZE)) == [True]


@pytest.mark.parametrize("call", ["preadv", "open"])
async def test_a_device_that_answers_no_more_gives_misses_to_whoever_comes_later(tmp_path, call):
    stuck = []
    vfs = StuckVfs(lambda name, path: name == call and bool(stuck) and path.endswith(stuck[0]))
    backend = opened(tmp_path, vfs, read_threads=2, stall_s=60.0)
    await backend.write(KEYS[:4], filled(KEYS[:4], SIZE))
    stuck.append(KEYS[0].hex())
    let_calls_hang_after(backend, 0.5)
    # Two loads occupy both threads and cannot end: their memory is in the kernel's hands.
    first = [asyncio.ensure_future(load(backend, KEYS[:1], SIZE)) for _ in range(2)]
    try:
        waiting = asyncio.ensure_future(load(backend, KEYS[1:3], SIZE))
        assert await asyncio.wait_for(waiting, 10) == [False, False]
        assert await asyncio.wait_for(load(backend, KEYS[1:3], SIZE), 10) == [False, False]
        first[0].cancel()
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in first)
        let_calls_hang_after(backend, 60.0)
        # Stores have threads of their own.
        assert await backend.write(KEYS[4:5], filled(KEYS[4:5], SIZE)) == [True]
    finally:
        vfs.release()
    assert await first[1] == [True]
    with pytest.raises(asyncio.CancelledError):
        await first[0]
    assert await load(backend, KEYS[:4], SIZE) == [True] * 4


async def test_without_direct_io_the_page_cache_is_used_and_that_is_said(tmp_path):
    def no_direct(call, path):
        return call == "open" and ".writers" in path and not path.endswith(("lock", ".json"))

    vfs = FailingVfs(1, 22, when=no_direct)
    backend = opened(tmp_path, vfs, io="auto")
    assert (backend.io_mode, backend.io_reason) == ("buffered", "io_EINVAL")
    assert await backend.write(KEYS[:1], filled(KEYS[:1], SIZE)) == [True]
    await backend.close()
    with pytest.raises(ConfigError) as caught:
        DiskBackend(options(tmp_path, io="direct"), "probe", vfs=FailingVfs(1, 22, when=no_direct))
    assert caught.value.field == "io"
    assert not os.listdir(tmp_path / WRITERS)


@pytest.mark.parametrize(("error", "is_to_blame"), [(errno.EIO, True), (errno.EINVAL, False)])
async def test_a_device_that_fails_is_to_blame_for_direct_io_and_not_the_setting(
    tmp_path, error, is_to_blame
):
    vfs = FailingVfs(1, error, when=lambda c, p: c == "pwritev" and kind_of(p) == "temporary")
    with pytest.raises(ConfigError, match=errno.errorcode[error]) as caught:
        DiskBackend(options(tmp_path, io="direct"), "probe", vfs=vfs)
    assert is_of_device(caught.value) == is_to_blame


@pytest.mark.parametrize(("error", "reason"), [(22, "io_EINVAL"), (None, "io_short")])
async def test_a_disk_that_writes_directly_but_does_not_read_so_uses_the_page_cache(
    tmp_path, error, reason
):
    if probe_direct(Vfs(), str(tmp_path / "probe")) is not None:
        pytest.skip("no direct I/O here")
    vfs = FailingVfs(1, error, when=lambda c, p: c == "preadv" and kind_of(p) == "temporary")
    backend = opened(tmp_path, vfs, io="auto")
    assert (backend.io_mode, backend.io_reason) == ("buffered", reason)
    assert await backend.write(KEYS[:1], filled(KEYS[:1], SIZE)) == [True]
    assert await load(backend, KEYS[:1], SIZE) == [True]


@pytest.mark.parametrize("turns", [500, pytest.param(6_000, marks=pytest.mark.chaos)])
async def test_neither_memory_nor_descriptors_grow(ram_path, turns):
    """Eighteen operations a turn: stores, hits, misses, evictions, removals."""
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()
    backend = DiskBackend(options(ram_path), "soak")
    figures = []
    into = slots(8, 512)
    for turn in range(turns):
        keys = keys_of(8, f"{turn % 100}")
        await backend.write(keys, filled(keys, 512))
        await backend.read(keys, into)
        await backend.remove(keys[:2])
        backend.take_removals()
        if turn % (turns // 5) == turns // 5 - 1:
            # The least of several: the housekeeper may be listing a folder.
            figures.append((min(process.num_fds() for _ in range(20)), process.memory_info().rss))
    await backend.close()
    assert figures[-1][0] <= figures[0][0]
    assert figures[-1][1] - figures[1][1] < 16 << 20


class FlagsVfs(HookedVfs):
    """Records whether files of chunks are opened for direct I/O."""

    def __init__(self):
        super().__init__()
        self.direct = []

    def open(self, path, flags):
        if kind_of(path) == "chunk" or os.path.basename(path).isdigit():  # not of the manifest
            self.direct.append(bool(flags & os.O_DIRECT))
        return super().open(path, flags)


@pytest.mark.parametrize(
    ("size", "shift", "direct"), [(8192, 0, True), (8192, 512, False), (8000, 0, False)]
)
async def test_whole_pages_of_memory_bypass_the_page_cache_and_other_memory_does_not(
    tmp_path, size, shift, direct
):
    if probe_direct(Vfs(), str(tmp_path / "probe")) is not None:
        pytest.skip("no direct I/O here")
    vfs = FlagsVfs()
    backend = opened(tmp_path / "root", vfs, io="direct")
    assert backend.io_mode == "direct"
    memory = memoryview(mmap.mmap(-1, 4 * 8192))[shift : shift + size]
    vfs.direct.clear()
    assert await backend.write(KEYS[:1], [memory]) == [True]
    assert await backend.read(KEYS[:1], [memory]) == [True]
    assert vfs.direct == [direct, direct]
