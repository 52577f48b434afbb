"""Findings of ``doctor FOLDER`` on media, space, sharing and speeds, by stand-ins."""

import asyncio
import os
import subprocess
import threading
import time
import zlib
from types import SimpleNamespace

import pytest
from disk_commands import SIZE, open_disk

from kvoffload.backends import admin
from kvoffload.backends.admin import MEASURED_CHUNKS, measure
from kvoffload.backends.disk import chunk_file, doctor
from kvoffload.backends.disk.backend import DiskBackend
from kvoffload.backends.disk.doctor import diagnose
from kvoffload.backends.disk.paths import LEDGER, SCRATCH
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.errors import ConfigError
from kvoffload.testing.backends import filled, keys_of
from tests.support.older_engine import older_engine
from tests.support.small_disk import small_disk

MIB = 1 << 20


async def found(root, **settings):
    return {finding.check: finding for finding in await diagnose(str(root), settings)}


async def speeds(root):
    findings = await diagnose(str(root), {})
    return [finding for finding in findings if finding.check == "throughput"]


@pytest.fixture
def unmeasured(monkeypatch):
    """Measure no throughput."""

    def nothing(root, given):
        return []

    monkeypatch.setattr(doctor, "_measured", nothing)


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """Return a file in place of the kernel's table of mounts."""
    table = tmp_path / "mounts"
    real = open

    def read(path, *args, **kwargs):
        return real(table if path == "/proc/self/mounts" else path, *args, **kwargs)

    monkeypatch.setattr(doctor, "open", read, raising=False)
    return table


# ---- what is measured ----------------------------------------------------------------------------


async def test_what_is_measured_are_chunks_that_no_file_system_can_compress():
    written = []

    class Noting(MemoryBackend):
        async def write(self, keys, chunks):
            written.extend(map(bytes, chunks))
            return await super().write(keys, chunks)

    backend = Noting(MemoryOptions(), "n")
    assert [failed for failed, _ in await measure(backend)] == [0, 0]
    assert len(set(written)) == len(written) == MEASURED_CHUNKS
    assert all(len(zlib.compress(chunk, 1)) > 0.99 * len(chunk) for chunk in written)


# ---- the medium ----------------------------------------------------------------------------------


def file_system_of(path):
    return doctor._medium(path).detail.split(":")[0]


def test_the_file_system_of_a_path_is_that_of_the_longest_mount_it_is_in(mounts):
    mounts.write_text(
        "dev / ext4 rw 0 0\n"
        "dev /data xfs rw 0 0\n"
        "dev /data/deep btrfs rw 0 0\n"
        "dev /data/deep zfs rw 0 0\n"  # mounted over the one before
        "dev /da nfs rw 0 0\n"
        "dev /my\\040disk\\134 nfs4 rw 0 0\n"  # as the kernel writes a blank and a backslash
    )
    for path, kind in (
        ("/data", "xfs"),
        ("/data/kv", "xfs"),
        ("/data/deep/kv", "zfs"),
        ("/data/deeper", "xfs"),
        ("/database", "ext4"),
        ("/my disk\\/kv", "nfs4"),
        ("/", "ext4"),
    ):
        assert file_system_of(path) == kind, path
    mounts.write_text("dev /data xfs rw 0 0\n")
    assert file_system_of("/elsewhere") == "unknown"
    mounts.unlink()
    assert file_system_of("/data") == "unknown"


@pytest.mark.parametrize(
    ("kind", "verdict", "detail", "remedy"),
    [
        ("ext4", "ok", "ext4", ""),
        ("nfs4", "warning", "locks and sizes may be unreliable", "folder, redis or object"),
        ("fuse.sshfs", "warning", "fuse.sshfs", "folder, redis or object"),
        ("fuseblk", "ok", "fuseblk", ""),
        ("tmpfs", "warning", "gone with the next boot", "cpu_bytes"),
        ("ramfs", "warning", "gone with the next boot", "cpu_bytes"),
    ],
)
def test_media_that_are_shared_or_memory_are_warned_about(
    tmp_path, mounts, kind, verdict, detail, remedy
):
    mounts.write_text(f"dev / {kind} rw 0 0\n")
    finding = doctor._medium(str(tmp_path))
    assert finding.check == "file system"
    assert finding.verdict == verdict
    assert detail in finding.detail
    assert remedy in finding.remedy
    assert bool(remedy) == bool(finding.remedy)


@pytest.mark.parametrize(("files", "told"), [(3, "(a0, a1, a2)"), (4, "(a0, a1, a2, ...)")])
async def test_three_foreign_files_are_named_and_more_are_hinted_at(tmp_path, files, told):
    for name in ("lost+found", f"{SCRATCH}1-ab"):
        (tmp_path / name).mkdir()
    for i in range(files):
        (tmp_path / f"a{i}").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        await found(tmp_path)
    assert told in caught.value.remedy


# ---- space ---------------------------------------------------------------------------------------


def with_free(monkeypatch, free_bytes, size=1 << 40):
    space = SimpleNamespace(f_bavail=free_bytes // 4096, f_blocks=size // 4096, f_frsize=4096)
    monkeypatch.setattr(Vfs, "statvfs", lambda self, path: space)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("free", "verdict", "remedy"),
    [
        (100 * MIB, "failed", "make space"),
        (100 * MIB + 4096, "warning", "lower capacity to 4.0 KiB"),
        (164 * MIB - 4096, "warning", "lower capacity to 64.0 MiB"),
        (164 * MIB, "ok", ""),
    ],
)
async def test_space_is_what_is_free_above_the_minimum(
    tmp_path, monkeypatch, free, verdict, remedy
):
    with_free(monkeypatch, free)
    space = (await found(tmp_path, capacity=64 * MIB, min_free=100 * MIB))["space"]
    assert space.verdict == verdict
    assert space.remedy.startswith(remedy)
    assert bool(remedy) == bool(space.remedy)
    assert space.detail.endswith(" free, 0 B used, capacity 64.0 MiB")


@pytest.mark.usefixtures("unmeasured")
async def test_a_file_system_below_min_free_is_told_apart_from_a_full_one(tmp_path, monkeypatch):
    with_free(monkeypatch, 8 * MIB, size=8 * MIB)
    space = (await found(tmp_path, capacity=6 * MIB, min_free=100 * MIB))["space"]
    assert space.verdict == "failed"
    assert space.remedy == "lower min_free, now 100.0 MiB: the file system has 8.0 MiB in all"


@pytest.mark.usefixtures("unmeasured")
async def test_bytes_of_the_store_itself_count_as_space_and_an_excess_is_reported(
    tmp_path, monkeypatch
):
    backend = open_disk(tmp_path, "llama")
    await backend.write(keys_of(16), filled(keys_of(16), SIZE))  # 512 KiB with their headers
    await backend.close()
    with_free(monkeypatch, 200 * MIB)
    room = {"min_free": 100 * MIB, "high_watermark": 1.0, "low_watermark": 0.5}
    space = (await found(tmp_path, capacity=512 << 10, **room))["space"]
    assert (space.verdict, space.remedy) == ("ok", "")
    assert "200.0 MiB free, 512.0 KiB used" in space.detail
    space = (await found(tmp_path, capacity=(512 << 10) - 1, **room))["space"]
    assert space.verdict == "warning"
    assert "evicts 256.0 KiB" in space.remedy
    space = (await found(tmp_path, capacity=100 * MIB + (512 << 10), **room))["space"]
    assert space.verdict == "ok"
    (tmp_path / LEDGER).unlink()
    findings = await found(tmp_path, capacity=64 * MIB, **room)
    assert findings["ledger"].detail == "missing"
    assert "512.0 KiB used" in findings["space"].detail


@pytest.mark.parametrize(
    ("free", "capacity", "throughput"),
    [(64 * MIB, MIB, "measured"), (64 * MIB - 4096, MIB, "warning"), (0, MIB, "failed")],
)
async def test_doctor_measures_speed_if_there_is_room(
    tmp_path, monkeypatch, free, capacity, throughput
):
    def measured(root, given):
        return [doctor.Finding("throughput", "measured", "")]

    monkeypatch.setattr(doctor, "_measured", measured)
    with_free(monkeypatch, free)
    finding = (await found(tmp_path, capacity=capacity, min_free=0))["throughput"]
    assert finding.verdict == throughput
    assert ("64.0 MiB above min_free" in finding.remedy) == (throughput != "measured")


def test_a_root_that_cannot_be_written_fails_also_where_nothing_is_measured(tmp_path):
    with small_disk(tmp_path, "size=4m,mode=0700") as is_small:
        if not is_small:
            pytest.skip("needs root")
        assert "usable" not in asyncio.run(found(tmp_path))
        assert list(tmp_path.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        findings = asyncio.run(found(tmp_path))
        assert findings["throughput"].detail == "not measured: no room"
        assert findings["usable"].verdict == "failed"
        assert findings["usable"].detail.startswith("[Errno 30] Read-only file system")
        assert findings["usable"].remedy == "mount it for writing"


# ---- sharing and limits --------------------------------------------------------------------------


@pytest.mark.usefixtures("unmeasured")
async def test_processes_are_counted_and_one_of_them_must_evict(tmp_path, monkeypatch):
    assert (await found(tmp_path))["sharing"].detail == "0 processes have it open"
    monkeypatch.setattr(doctor, "_TAKEOVER_S", 0.3)
    one, two = open_disk(tmp_path, "one"), open_disk(tmp_path, "two")
    sharing = (await found(tmp_path))["sharing"]
    assert (sharing.verdict, sharing.detail) == ("ok", "2 processes have it open")
    await two.close()
    monkeypatch.setattr(doctor.DiskInspector, "has_owner", lambda self: False)
    began = time.monotonic()
    sharing = (await found(tmp_path))["sharing"]
    assert time.monotonic() - began >= 0.3
    assert sharing.verdict == "warning"
    assert sharing.detail == "1 process has it open, but none may evict"
    assert ".owner" in sharing.remedy
    await one.close()
    sharing = (await found(tmp_path))["sharing"]
    assert (sharing.verdict, sharing.detail) == ("ok", "0 processes have it open")


@pytest.mark.usefixtures("unmeasured")
async def test_limits_say_where_they_come_from(tmp_path):
    limits = (await found(tmp_path))["limits"]
    assert (limits.verdict, limits.detail) == (
        "ok",
        "capacity 10.0 GiB, min_free 1.0 GiB (the default)",
    )
    limits = (await found(tmp_path, capacity="4MiB"))["limits"]
    assert limits.detail == "capacity 4.0 MiB, min_free 1.0 GiB (given)"
    await open_disk(tmp_path, "llama").close()
    recorded = "capacity 64.0 MiB, min_free 1.0 GiB"
    for settings in ({}, {"capacity": "64MiB"}):
        limits = (await found(tmp_path, **settings))["limits"]
        assert limits.detail == f"{recorded} (recorded in the folder)"
    limits = (await found(tmp_path, min_free="2GiB"))["limits"]
    assert limits.detail == (
        f"capacity 64.0 MiB, min_free 2.0 GiB asked about; recorded in the folder: {recorded}"
    )
    (tmp_path / ".bounds.json").write_text("[]")
    findings = await found(tmp_path)
    assert findings["limits"].verdict == "warning"
    assert "capacity unknown" in findings["space"].detail
    findings = await found(tmp_path, capacity="4MiB")
    assert "capacity 4.0 MiB" in findings["space"].detail


# ---- measuring -----------------------------------------------------------------------------------


async def test_a_store_that_cannot_be_opened_for_measuring_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_file, "probe_direct", lambda vfs, path: "io_EINVAL")
    findings = await found(tmp_path, io="direct")
    assert findings["throughput"].verdict == "failed"
    assert "does not work at this root (io_EINVAL)" in findings["throughput"].detail
    assert list(tmp_path.iterdir()) == []


async def test_a_medium_without_direct_io_is_reported_and_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(chunk_file, "probe_direct", lambda vfs, path: "io_EINVAL")
    findings = await found(tmp_path)
    assert findings["io"].verdict == "warning"
    assert findings["io"].detail == "buffered: direct I/O does not work here (io_EINVAL)"
    assert findings["throughput"].detail.startswith("load: ")
    assert (await found(tmp_path, io="buffered"))["io"] == ("io", "ok", "buffered", "")


async def test_doctor_says_which_way_chunks_take_and_why(tmp_path, kernel_files):
    finding = (await found(tmp_path))["io"]
    if "does not work" in finding.detail:
        pytest.skip("no direct I/O here")
    free = "stores go through the page cache: the machine has 10.0 GiB of 16.0 GiB available"
    assert finding == ("io", "ok", f"auto: loads take what the page cache has; {free}", "")
    kernel_files.available(1 << 30)
    few = "the machine has 1.0 GiB of 16.0 GiB available, which is too little"
    detail = (await found(tmp_path))["io"].detail
    assert detail == f"auto: loads take what the page cache has; stores go directly: {few}"
    assert (await found(tmp_path, io="direct"))["io"] == ("io", "ok", "direct", "")


async def test_the_form_of_small_chunks_is_named_and_why(tmp_path, monkeypatch):
    finding = (await found(tmp_path))["small chunks"]
    assert (finding.verdict, finding.remedy) == ("ok", "")
    assert finding.detail == "in slots of segments: parts of a file can be freed here"
    await open_disk(tmp_path, "llama").close()
    with older_engine(tmp_path):
        finding = (await found(tmp_path))["small chunks"]
    assert finding.verdict == "warning"
    assert "older version has it open" in finding.detail
    probe = "kvoffload.backends.disk.store.probe_holes"
    monkeypatch.setattr(probe, lambda vfs, scratch: "their room stays")
    finding = (await found(tmp_path))["small chunks"]
    assert finding.verdict == "warning"
    assert finding.detail.startswith("a file each: parts of a file cannot be freed here (their")


@pytest.mark.parametrize(("seconds", "verdict"), [(0.1, "ok"), (0.2, "warning")])
async def test_speeds_below_that_of_computing_are_warned_about(
    tmp_path, monkeypatch, seconds, verdict
):
    """Doctor moves 32 MiB; in a fifth of a second that is slower than 200 MB/s."""
    clock = iter([0.0, 0.01, 0.0, seconds])
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(clock))
    stored, loaded = await speeds(tmp_path)
    assert (stored.verdict, loaded.verdict) == ("ok", verdict)
    assert stored.detail == "store: 3.1 GiB/s with chunks of 2.0 MiB"
    rate = {0.1: "320.0 MiB/s", 0.2: "160.0 MiB/s"}[seconds]
    assert loaded.detail == f"load: {rate} with chunks of 2.0 MiB"
    assert ("faster than this device" in loaded.remedy) == (verdict == "warning")


@pytest.mark.parametrize("call", ["write", "read"])
async def test_a_chunk_refused_while_measuring_is_a_failure(tmp_path, monkeypatch, call):
    async def refused(self, keys, memory):
        return [True] * (len(keys) - 1) + [False]

    monkeypatch.setattr(DiskBackend, call, refused)
    finding = next(each for each in await speeds(tmp_path) if each.verdict == "failed")
    what = {"write": "store", "read": "load"}[call]
    assert finding.detail.startswith(f"1 of {MEASURED_CHUNKS} chunks failed; {what}: ")
    assert finding.remedy == "see the log for the reason"
    assert not list(tmp_path.glob(f"{SCRATCH}*"))


@pytest.mark.parametrize("call", ["mkdir", "rmdir"])
async def test_a_device_whose_calls_hang_is_a_finding(tmp_path, monkeypatch, call):
    """A frozen file system, say: it reads, and each change waits. The runbook asks doctor then."""
    returned, was_asked, real = threading.Event(), threading.Event(), getattr(os, call)

    def hang(path, *args, **kwargs):
        if SCRATCH in str(path):
            was_asked.set()
            returned.wait()
        return real(path, *args, **kwargs)

    monkeypatch.setattr(admin, "HUNG_S", 3.0)
    monkeypatch.setattr(os, call, hang)
    try:
        async with asyncio.timeout(60):
            findings = await found(tmp_path, min_free=0)
            assert await asyncio.to_thread(was_asked.wait, 60)
    finally:
        returned.set()
    assert findings["space"].verdict == "ok"
    assert findings["reachable"].verdict == "failed"
    assert f"{tmp_path} has not answered" in findings["reachable"].detail
    assert "kernel's log" in findings["reachable"].remedy
