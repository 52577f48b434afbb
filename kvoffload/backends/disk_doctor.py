"""Is this folder fit to be a tier? What ``kvoffload doctor ROOT`` looks into."""

import mmap
import os
import secrets
import time

from kvoffload.backends.base import Backend
from kvoffload.backends.disk_keeper import Keeper
from kvoffload.backends.offloop import once
from kvoffload.backends.upkeep import Finding
from kvoffload.config import human_bytes

_CHUNKS, _CHUNK_BYTES = 16, 2 << 20
_SLOW_BYTES_PER_S = 200e6
_SHARED = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "fuse")
_IN_MEMORY = ("tmpfs", "ramfs")


async def diagnose(
    backend: Backend, keeper: Keeper, io: str, io_reason: str | None
) -> list[Finding]:
    """Examine a root that has just been opened."""
    findings = [_medium(keeper.root), _io(io, io_reason)]
    findings += [await once(_space, keeper), _sharing(keeper)]
    findings.append(await _throughput(backend))
    return findings


def file_system_of(path: str) -> str:
    """The type of the file system a path is on, as the kernel calls it."""
    best, kind = "", "unknown"
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                _, where, found, *_ = line.split()
                inside = path == where or path.startswith(where.rstrip("/") + "/")
                if inside and len(where) >= len(best):
                    best, kind = where, found
    except OSError:
        pass
    return kind


def _medium(root: str) -> Finding:
    kind = file_system_of(os.path.realpath(root))
    if kind.split(".")[0] in _SHARED:
        remedy = "use a local disk; hosts that share chunks do so through Redis"
        return Finding(
            "file system", "warning", f"{kind}: locks and sizes may be unreliable", remedy
        )
    if kind in _IN_MEMORY:
        remedy = "give the memory to cpu_bytes instead, or use a disk"
        return Finding("file system", "warning", f"{kind}: gone with the next boot", remedy)
    return Finding("file system", "ok", kind)


def _io(mode: str, reason: str | None) -> Finding:
    if reason is None:
        return Finding("io", "ok", mode)
    remedy = "nothing, if the page cache may be used; otherwise another file system"
    return Finding("io", "warning", f"{mode}: direct I/O does not work here ({reason})", remedy)


def _space(keeper: Keeper) -> Finding:
    space = keeper.vfs.statvfs(keeper.root)
    free = space.f_bavail * space.f_frsize
    bounds, resident = keeper.bounds, keeper.ledger.resident_bytes
    room = free + resident - bounds.min_free_bytes
    detail = (
        f"{human_bytes(free)} free, {human_bytes(resident)} used, "
        f"capacity {human_bytes(bounds.capacity_bytes)}"
    )
    if room < bounds.capacity_bytes:
        remedy = f"lower capacity to {human_bytes(max(0, room))}, or make space"
        return Finding("space", "warning" if room > 0 else "failed", detail, remedy)
    return Finding("space", "ok", detail)


def _sharing(keeper: Keeper) -> Finding:
    others = f"{keeper.others} other processes use it"
    if keeper.ownership.held or keeper.others:
        return Finding("sharing", "ok", others)
    remedy = "see whether a stopped process still holds .owner"
    return Finding("sharing", "warning", f"{others}, but none may evict", remedy)


async def _throughput(backend: Backend) -> Finding:
    """Store, load and remove some chunks."""
    keys = [secrets.token_bytes(36) for _ in range(_CHUNKS)]
    memory = memoryview(mmap.mmap(-1, _CHUNK_BYTES * _CHUNKS))
    memory[:_CHUNK_BYTES] = secrets.token_bytes(_CHUNK_BYTES)
    slots = [memory[i * _CHUNK_BYTES : (i + 1) * _CHUNK_BYTES] for i in range(_CHUNKS)]
    rates = []
    try:
        for call in (backend.write, backend.read):
            began = time.perf_counter()
            if not all(await call(keys, slots)):
                remedy = "see the log for the reason"
                return Finding("throughput", "failed", "a chunk was refused or missed", remedy)
            rates.append(_CHUNKS * _CHUNK_BYTES / (time.perf_counter() - began))
    finally:
        await backend.remove(keys)
    stored, loaded = (f"{human_bytes(rate)}/s" for rate in rates)
    slow = min(rates) < _SLOW_BYTES_PER_S
    remedy = "computing anew may be faster than this device" if slow else ""
    detail = f"stores {stored}, loads {loaded}, 2 MiB chunks"
    return Finding("throughput", "warning" if slow else "ok", detail, remedy)
