"""Capacity, free space, full and read-only disks, files that cannot be removed."""

import asyncio
import errno
import os
import threading

import pytest
from disk_parts import ON_DISK, SIZE, allocated, chunk_bytes, full, open_disk, until, write_each

from kvoffload import open_backend
from kvoffload.backends.disk.backend import DiskOptions
from kvoffload.backends.header import namespace_digest
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.testing.backends import filled, keys_of, slots
from tests.support.small_disk import disk_in_a_file, run_as_root
from tests.support.small_disk import small_disk as mounted_small
from tests.support.vfs import FailingVfs, HookedVfs

pytestmark = pytest.mark.usefixtures("as_files")


@pytest.mark.parametrize("policy_fails", [False, True])
async def test_the_background_goes_on_evicting_after_a_store_had_to(
    tmp_path, monkeypatch, policy_fails
):
    settings = {"high_watermark": 1.0, "low_watermark": 1.0}
    backend = open_disk(tmp_path, capacity=ByteSize(4 * ON_DISK), **settings)
    assert await write_each(backend, keys_of(6)) == [True] * 6
    if policy_fails:
        with monkeypatch.context() as broken:
            broken.setattr(HandicapPolicy, "victims", None)
            assert await write_each(backend, keys_of(1, "more")) == [False]
    store = backend._store
    assert store.space._waiting == 0
    for left in (3, 2):
        assert store.space.evict_one()  # as the housekeeping thread does above the high watermark
        assert chunk_bytes(tmp_path) == store.root.quota.refresh() == left * ON_DISK


async def test_the_tail_of_a_prefix_leaves_before_its_head(tmp_path):
    backend = open_disk(tmp_path, **full(4))
    keys = keys_of(5)
    await backend.write(keys[:4], filled(keys[:4], SIZE))
    assert await backend.read(keys[:4], slots(4, SIZE)) == [True] * 4
    await write_each(backend, keys[4:])
    assert [backend.holds(key) for key in keys] == [True, True, True, False, True]


class PausedVfs(HookedVfs):
    """Lets no file change while :meth:`allocated` counts: none is counted twice, or too late."""

    def __init__(self):
        super().__init__()
        self._changing = threading.RLock()

    def around(self, call, path, perform):
        if call == "flock":
            return perform()  # may wait for another thread
        with self._changing:
            return perform()

    def allocated(self, root):
        with self._changing:
            return allocated(root)


async def test_many_writers_never_pass_the_capacity(tmp_path):
    capacity = 12 * ON_DISK
    settings = {"high_watermark": 1.0, "low_watermark": 1.0, "write_threads": 3}
    vfs = PausedVfs()
    backend = open_disk(tmp_path, vfs=vfs, capacity=ByteSize(capacity), **settings)
    peak = 0
    for turn in range(12):
        writing = asyncio.ensure_future(
            backend.write(keys_of(16, f"{turn}"), filled(keys_of(16, f"{turn}"), SIZE))
        )
        while not writing.done():
            peak = max(peak, vfs.allocated(tmp_path))
            await asyncio.sleep(0.0005)
        assert all(await writing), backend.counters()
    assert peak <= capacity + 3 * ON_DISK
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) <= capacity


async def test_the_background_evicts_between_the_watermarks(tmp_path):
    marks = {"capacity": ByteSize(20 * ON_DISK), "high_watermark": 0.8, "low_watermark": 0.5}
    open_disk(tmp_path, **marks)  # it evicts
    other = open_disk(tmp_path, **marks)
    assert await write_each(other, keys_of(17)) == [True] * 17
    assert await until(lambda: chunk_bytes(tmp_path) <= 10 * ON_DISK)
    assert chunk_bytes(tmp_path) == 10 * ON_DISK


async def test_the_stores_of_the_evicting_process_stay_at_the_high_watermark(tmp_path):
    marks = {"capacity": ByteSize(20 * ON_DISK), "high_watermark": 0.8, "low_watermark": 0.5}
    backend = open_disk(tmp_path, **marks)
    assert await write_each(backend, keys_of(25)) == [True] * 25
    await asyncio.sleep(0.1)
    assert chunk_bytes(tmp_path) == backend.usage().resident_bytes == 16 * ON_DISK
    assert backend.counters() == {"evicted": 9, "overwritten": 9}


async def test_the_space_of_others_is_left_alone(tmp_path):
    backend = open_disk(tmp_path, min_free=ByteSize(1 << 60))
    assert await write_each(backend, keys_of(2)) == [False, False]
    assert backend.counters()["refused_min_free"] == 2
    assert chunk_bytes(tmp_path) == 0


@pytest.fixture
def small_disk(tmp_path, request):
    """A file system of four mebibytes; more mount options as parameter."""
    limits = ",".join(["size=4m", "mode=0700", *filter(None, [getattr(request, "param", "")])])
    where = tmp_path / "small"
    where.mkdir()
    with mounted_small(where, limits) as is_small:
        if not is_small:
            pytest.skip("mounting a small tmpfs needs root")
        yield where


async def test_a_disk_smaller_than_the_capacity_is_kept_from_running_full(small_disk):
    keys = keys_of(80)
    backend = open_disk(small_disk / "kv", io="buffered")
    assert all(await write_each(backend, keys))
    assert backend.counters().keys() == {"evicted"}
    assert await backend.read(keys[-30:], slots(30, SIZE)) == [True] * 30
    assert backend.usage().resident_bytes == chunk_bytes(small_disk / "kv")


@pytest.mark.parametrize("small_disk", ["nr_inodes=120"], indirect=True)
async def test_on_a_full_disk_reads_go_on_and_writes_resume_with_space(small_disk):
    """No file can be made any more, which free bytes do not show."""
    others = [small_disk / f"other{i}" for i in range(60)]
    for other in others:
        other.write_text("")
    keys = keys_of(60)
    backend = open_disk(small_disk / "kv", io="buffered")
    written = await write_each(backend, keys)
    assert True in written
    assert not written[-1]
    assert backend.counters()["write_io_ENOSPC"] >= 1
    assert backend.counters()["refused_full"] >= 1
    kept = [key for key, good in zip(keys, written, strict=True) if good]
    assert await backend.read(kept, slots(len(kept), SIZE)) == [True] * len(kept)
    assert backend.usage().resident_bytes == chunk_bytes(small_disk / "kv")
    for other in others:
        other.unlink()
    for _ in range(400):
        if (await write_each(backend, keys_of(1, "later")))[0]:
            break
        await asyncio.sleep(0.01)
    assert await backend.read(keys_of(1, "later"), slots(1, SIZE)) == [True]


async def test_a_disk_gone_read_only_still_serves(tmp_path):
    """As file systems do after an error, with files open for writing."""
    changing = ("rename", "take", "unlink", "mkdir", "rmdir", "pwritev", "utime", "fsync")

    def changes(call, path):
        return call in changing or (call == "open" and not os.path.lexists(path))

    keys = keys_of(4)
    vfs = FailingVfs(0, errno.EROFS, sticky=True, when=changes)
    backend = open_disk(tmp_path, vfs=vfs, io="buffered")
    await write_each(backend, keys)
    vfs.nth = 1
    assert await backend.read(keys, slots(4, SIZE)) == [True] * 4
    assert await write_each(backend, keys_of(2, "more")) == [False, False]
    await backend.remove(keys[:1])
    assert backend.counters()["undeletable"] == 1
    assert await backend.read(keys, slots(4, SIZE)) == [True] * 4
    vfs.heal()


async def test_a_file_that_cannot_be_removed_does_not_stop_eviction(tmp_path):
    keys = keys_of(8)
    vfs = FailingVfs(
        1,
        errno.EACCES,
        sticky=True,
        when=lambda c, p: c in ("unlink", "take") and keys[0].hex() in p,
    )
    backend = open_disk(tmp_path, vfs=vfs, **full(4))
    assert await write_each(backend, keys) == [True] * 8
    assert [backend.holds(key) for key in keys] == [True] + [False] * 4 + [True] * 3
    assert backend.counters()["undeletable"] == 1
    assert backend.usage().resident_bytes == chunk_bytes(tmp_path) == 4 * ON_DISK


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("root", ""),
        ("root", "kv\0x"),
        ("root", "kv\ud800"),
        ("root", "x" * 5000),
        ("capacity", 0),
        ("capacity", "999999999999TiB"),
        ("capacity", "9" * 5000),
        ("capacity", "9" * 500 + ".5"),
        ("min_free", 10**20),
        ("io", "fast"),
        ("durability", "maybe"),
        ("policy", "random"),
        ("low_watermark", 0.99),
        ("read_threads", 0),
        ("stall_s", 0.0),
        ("quarantine", -1),
        *(("tenant_share", share) for share in (0, -1, 1.5, float("nan"))),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(tmp_path, field, value):
    with pytest.raises(ConfigError) as caught:
        open_backend("disk", {"root": str(tmp_path / "kv"), field: value}, "ns")
    assert caught.value.field == field
    assert caught.value.remedy
    assert not (tmp_path / "kv").exists()


def test_sizes_that_no_file_system_has_are_refused_however_they_are_given(tmp_path):
    for field in ("capacity", "min_free"):
        for size in (-1, 1 << 63, 10**20):
            with pytest.raises(ConfigError, match="below 8 EiB") as caught:
                DiskOptions(root=str(tmp_path), **{field: size})
            assert (caught.value.field, caught.value.value) == (field, size)


def _refused(root):
    with pytest.raises(ConfigError) as caught:
        open_backend("disk", {"root": str(root)}, "ns")
    return str(caught.value)


def test_roots_that_others_could_tamper_with_are_refused(tmp_path):
    real = tmp_path / "real"
    real.mkdir(0o700)
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "file").write_text("")
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    for name in ("link", "file", "public", "file/below"):
        with pytest.raises(ConfigError) as caught:
            open_backend("disk", {"root": str(tmp_path / name)}, "ns")
        assert caught.value.field == "root"
    assert f"give a sub-folder such as {public}/kv" in _refused(public)
    inside = real / namespace_digest("ns").hex()
    inside.symlink_to(tmp_path / "public")
    with pytest.raises(ConfigError, match="symbolic link"):
        open_backend("disk", {"root": str(real)}, "ns")
    inside.unlink()
    if os.geteuid() == 0:
        os.chown(real, 12345, 12345)
        with pytest.raises(ConfigError, match="belongs to user 12345"):
            open_backend("disk", {"root": str(real)}, "ns")


async def test_folders_and_files_are_for_the_owner_alone(tmp_path):
    backend = open_disk(tmp_path / "kv")
    await write_each(backend, keys_of(2))
    await backend.describe({"model": "m"})
    await backend.close()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    for folder, folders, files in os.walk(tmp_path / "kv"):
        for name in folders:
            assert os.lstat(f"{folder}/{name}").st_mode & 0o777 == 0o700
        for name in files:
            assert os.lstat(f"{folder}/{name}").st_mode & 0o777 == 0o600


@pytest.fixture
def ext4(tmp_path):
    with disk_in_a_file(tmp_path, "ext4", 32 << 20) as where:
        yield where


async def test_a_file_system_that_the_kernel_made_read_only_still_serves(ext4):
    """As it does after an error, with files open for writing; the next mount is in order again."""
    keys = keys_of(4)
    backend = open_disk(ext4 / "kv", io="buffered")
    assert all(await write_each(backend, keys))
    run_as_root("sync", "-f", str(ext4))
    run_as_root("mount", "-o", "remount,abort", str(ext4))
    with pytest.raises(OSError, match="Read-only"):
        (ext4 / "new").touch()
    assert await backend.read(keys, slots(4, SIZE)) == [True] * 4
    assert await write_each(backend, keys_of(2, "more")) == [False, False]
    await backend.remove(keys[:1])
    assert backend.counters()["undeletable"] == 1
    assert await backend.read(keys, slots(4, SIZE)) == [True] * 4
    await backend.close()
    run_as_root("umount", str(ext4))
    run_as_root("mount", "-o", "loop", str(ext4.parent / "image"), str(ext4))
    backend = open_disk(ext4 / "kv", io="buffered")
    assert await backend.read(keys, slots(4, SIZE)) == [True] * 4
    assert await write_each(backend, keys_of(2, "more")) == [True, True]
    assert backend.usage().resident_bytes == chunk_bytes(ext4 / "kv") == 6 * ON_DISK
