"""Small records under a root: limits, snapshots of the index, and the quarantine."""

import errno
import os
import time
from types import SimpleNamespace

import msgspec
import pytest
from disk_parts import open_disk

from kvoffload.backends.disk import snapshot
from kvoffload.backends.disk import vfs as disk_vfs
from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.limits import Limits, read, save
from kvoffload.backends.disk.paths import BOUNDS, QUARANTINE
from kvoffload.backends.disk.quarantine import Quarantine
from kvoffload.backends.disk.space import _MAX_SPARED as MAX_SPARED
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import checksum
from kvoffload.config import ByteSize
from kvoffload.errors import ConfigError
from kvoffload.testing.backends import filled, keys_of
from tests.support.vfs import FailingVfs

pytestmark = pytest.mark.usefixtures("as_files")


class Nothing(Vfs):
    """A disk that neither reads nor writes a byte, and reports no error."""

    def preadv(self, fd, buffers, offset):
        return 0

    def pwritev(self, fd, buffers, offset):
        return 0


# ---- quarantine ----------------------------------------------------------------------------------


def limits(**wanted):
    some = {"min_free_bytes": 0, "high_watermark": 0.9, "low_watermark": 0.5}
    return Limits(**{**some, "capacity_bytes": 1 << 40, "quarantine_files": 4, **wanted})


def quarantine(root, limits):
    return Quarantine(SimpleNamespace(vfs=Vfs(), path=str(root), limits=limits))


def quarantined(root, number, size=4096):
    folder = root / QUARANTINE
    folder.mkdir()
    for i in range(number):
        (folder / f"{i}-aa").write_bytes(bytes(size))
    return folder


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ({}, ["2-aa", "3-aa", "4-aa", "5-aa"]),
        ({"quarantine_files": 1}, ["5-aa"]),
        ({"quarantine_files": 0}, []),
        ({"capacity_bytes": 3 * 16 * 4096}, ["3-aa", "4-aa", "5-aa"]),
        ({"capacity_bytes": 3 * 16 * 4096 - 1}, ["4-aa", "5-aa"]),
    ],
)
def test_the_quarantine_keeps_the_newest_files_within_number_and_bytes(tmp_path, wanted, kept):
    folder = quarantined(tmp_path, 6)
    removed = [path for path, _ in quarantine(tmp_path, limits(**wanted)).surplus()]
    left = sorted(f"{folder}/{name}" for name in os.listdir(folder))
    assert sorted(set(left) - set(removed)) == [f"{folder}/{name}" for name in kept]


@pytest.mark.parametrize(
    ("ttl_s", "age_s", "kept"),
    [(None, 6 * 86400, 2), (None, 8 * 86400, 0), (60.0, 50, 2), (60.0, 70, 0), (1e8, 8 * 86400, 0)],
)
def test_the_quarantine_keeps_files_for_a_week_or_as_long_as_chunks(
    tmp_path, monkeypatch, ttl_s, age_s, kept
):
    quarantined(tmp_path, 2)
    now_ns = time.time_ns() + int(age_s * 1e9)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    assert len(quarantine(tmp_path, limits(ttl_s=ttl_s)).surplus()) == 2 - kept


def test_a_quarantine_that_cannot_be_listed_is_logged(tmp_path, caplog):
    assert quarantine(tmp_path, limits()).surplus() == []
    (record,) = caplog.records
    assert QUARANTINE in record.getMessage()


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "setting", "good", "bad"),
    [
        ("capacity_bytes", "capacity", [1, 2**63 - 1], [0, -1, 2**63]),
        ("min_free_bytes", "min_free", [0, 2**63 - 1], [-1, 2**63]),
        ("high_watermark", "high_watermark", [0.5, 1.0], [0.0, 1.01]),
        ("low_watermark", "low_watermark", [0.01, 0.9], [0.0, 0.91]),
        ("quarantine_files", "quarantine", [0, 1], [-1]),
        ("ttl_s", "ttl_s", [None, 1.0, 315_360_000.0], [0.99, 315_360_001.0]),
        ("version", "version", [1], [0, 2]),
    ],
)
def test_limits_refuse_impossible_values(field, setting, good, bad):
    for value in good:
        assert getattr(limits(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            limits(**{field: value})
        assert caught.value.field == setting


def test_bytes_above_the_high_watermark_are_evicted_down_to_the_low_one():
    bounds = limits(capacity_bytes=1000)
    assert (bounds.high_bytes, bounds.low_bytes) == (900, 500)
    assert [bounds.evicted_bytes(size) for size in (0, 500, 900, 901)] == [0, 0, 0, 401]


@pytest.mark.parametrize("call", ["open", "pwritev", "rename"])
def test_limits_that_cannot_be_recorded_leave_the_old_ones_and_no_file(tmp_path, call):
    old, new = limits(capacity_bytes=1), limits(capacity_bytes=2)
    root, unfinished = str(tmp_path), f"{tmp_path}/unfinished"
    save(Vfs(), root, unfinished, old)
    failing = FailingVfs(1, errno.ENOSPC, when=lambda c, p: c == call)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        save(failing, root, unfinished, new)
    with pytest.raises(OSError, match="short write"):
        save(Nothing(), root, unfinished, new)
    assert os.listdir(tmp_path) == [BOUNDS]
    assert read(Vfs(), root) == old
    descriptors = len(os.listdir("/proc/self/fd"))
    save(Vfs(), root, unfinished, new)
    assert read(Vfs(), root) == new
    assert len(os.listdir("/proc/self/fd")) == descriptors


# ---- snapshots -----------------------------------------------------------------------------------


def saved(path, sizes, vfs=None):
    snapshot.save(vfs or Vfs(), f"{path}/snapshot", f"{path}/unfinished", sizes)
    return snapshot.load(vfs or Vfs(), f"{path}/snapshot")


def test_a_snapshot_has_a_fixed_layout(tmp_path):
    sizes = [(b"aa", 4096), (b"bb", 8192), (b"c", 1 << 40), (b"dd", 1)]
    assert saved(tmp_path, sizes) == sizes
    body = msgspec.msgpack.encode(sizes)
    assert (tmp_path / "snapshot").read_bytes() == b"KVOSNAP2" + checksum(body) + body
    assert os.listdir(tmp_path) == ["snapshot"]


def test_an_empty_snapshot_and_a_missing_one_have_no_chunks(tmp_path):
    assert snapshot.load(Vfs(), f"{tmp_path}/snapshot") == []
    assert saved(tmp_path, []) == []
    assert (tmp_path / "snapshot").stat().st_size == 25


def test_a_sealed_snapshot_of_another_shape_has_no_chunks(tmp_path):
    whole = msgspec.msgpack.encode([(b"aa", 4096)])
    for body in (whole[:-1], whole + b"x", msgspec.msgpack.encode([(b"aa", "4096")]), b""):
        (tmp_path / "snapshot").write_bytes(b"KVOSNAP2" + checksum(body) + body)
        assert snapshot.load(Vfs(), f"{tmp_path}/snapshot") == [], body
    (tmp_path / "snapshot").write_bytes(b"KVOSNAP1" + checksum(whole) + whole)
    assert snapshot.load(Vfs(), f"{tmp_path}/snapshot") == []


def test_loading_a_snapshot_skips_keys_and_sizes_that_no_chunk_has(tmp_path):
    longest = bytes([7]) * 120
    odd = [(longest + b"x", 2), (b"", 3), (b"k", -1)]
    assert saved(tmp_path, [(longest, 1), *odd, (b"l", 0)]) == [(longest, 1), (b"l", 0)]


def test_a_snapshot_is_written_and_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_vfs, "_PIECE_BYTES", 100)
    sizes = [(key, 4096) for key in keys_of(50)]
    assert saved(tmp_path, sizes) == sizes
    short = FailingVfs(1, None, sticky=True, when=lambda c, p: c in ("preadv", "pwritev"))
    assert saved(tmp_path, sizes, short) == sizes


def test_a_snapshot_with_another_beginning_or_another_checksum_has_no_chunks(tmp_path):
    sizes = [(b"aa", 4096)]
    assert saved(tmp_path, sizes) == sizes
    whole = (tmp_path / "snapshot").read_bytes()
    for at in (0, 7, 8, 23, 24, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        (tmp_path / "snapshot").write_bytes(damaged)
        assert snapshot.load(Vfs(), f"{tmp_path}/snapshot") == [], at
    for size in (0, 23):
        (tmp_path / "snapshot").write_bytes(whole[:size])
        assert snapshot.load(Vfs(), f"{tmp_path}/snapshot") == []


def test_a_disk_that_moves_nothing_ends_neither_in_a_snapshot_nor_in_a_loop(tmp_path):
    sizes = [(b"aa", 4096)]
    assert saved(tmp_path, sizes) == sizes
    assert snapshot.load(Nothing(), f"{tmp_path}/snapshot") == []
    with pytest.raises(OSError, match="short write"):
        saved(tmp_path, [(b"new", 1)], Nothing())
    assert snapshot.load(Vfs(), f"{tmp_path}/snapshot") == sizes
    assert os.listdir(tmp_path) == ["snapshot"]


def test_snapshots_leave_no_descriptor_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        saved(tmp_path, [(b"aa", 4096)])
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("call", ["pwritev", "rename"])
def test_a_snapshot_that_cannot_be_written_leaves_the_old_one(tmp_path, call):
    sizes = [(b"old", 1)]
    assert saved(tmp_path, sizes) == sizes
    failing = FailingVfs(1, errno.ENOSPC, when=lambda c, p: c == call)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        saved(tmp_path, [(b"new", 2)], failing)
    assert snapshot.load(Vfs(), f"{tmp_path}/snapshot") == sizes
    assert os.listdir(tmp_path) == ["snapshot"]


class ReplacedAfterOpen(Vfs):
    """A root that another user's folder replaced between its check and its opening."""

    def fstat(self, fd):
        found = list(super().fstat(fd))
        found[4] = os.getuid() + 1  # st_uid
        return os.stat_result(found)


def test_a_root_that_is_replaced_while_it_is_opened_leaves_no_descriptor(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    options = DiskOptions(root=str(tmp_path / "kv"), capacity=ByteSize(1 << 20))
    for _ in range(8):
        with pytest.raises(ConfigError, match="root"):
            DiskBackend(options, "n", vfs=ReplacedAfterOpen())
    assert len(set(os.listdir("/proc/self/fd")) - before) < 8


async def test_a_victim_is_found_although_other_processes_used_all_chunks_lately(tmp_path):
    backend = open_disk(tmp_path, io="buffered")
    keys = keys_of(2 * MAX_SPARED)
    assert all(await backend.write(keys, filled(keys, 64)))
    store = backend._store
    store.root.other_writers = 1
    store.space.oldest_use_ns = 0  # all uses are in the younger half
    assert store.space._victim() is not None
