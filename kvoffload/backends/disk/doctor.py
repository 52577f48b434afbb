"""Examines whether a folder is fit to be a tier, for ``kvoffload doctor ROOT``.

The examination changes, evicts and repairs nothing. It measures throughput in a store of its own,
in a sub-folder that it removes afterwards.
"""

import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvoffload.backends.admin import SLOW_BYTES_PER_S, Finding, Verdict, measure
from kvoffload.backends.base import Backend
from kvoffload.backends.blocking_pool import run_once
from kvoffload.backends.disk import limits as disk_limits
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.disk.limits import SETTINGS, Limits
from kvoffload.backends.disk.options import DiskOptions
from kvoffload.backends.disk.paths import SCRATCH
from kvoffload.backends.disk.root_checks import (
    check_fresh_or_root,
    refuse_exposed,
    refuse_unsafe,
    refuse_unsafe_inside,
)
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.config import convert, human_bytes
from kvoffload.errors import ConfigError
from kvoffload.registry import open_backend

_SCRATCH_BYTES = 64 << 20
"""Twice the stored bytes, so that the measurement evicts nothing."""
_TAKEOVER_S = 3.0
"""Longer than a process takes to notice that the evicting process has ended."""
_ENGINE_SETTINGS = (
    "io", "durability", "read_threads", "write_threads", "stall_s", "trust_parent_folders",
)  # fmt: skip
"""Settings of an engine that the measured store uses as well."""
_SHARED = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "fuse")
_IN_MEMORY = ("tmpfs", "ramfs")


class _Examined(NamedTuple):
    """The folder to examine."""

    root: str
    vfs: Vfs
    inspector: DiskInspector | None
    """None: the folder is empty; no engine has used it."""
    options: DiskOptions
    given: Mapping[str, Any]
    """The settings that differ from the defaults."""


async def diagnose(root: str, settings: Mapping[str, Any]) -> list[Finding]:
    """Examine a folder for an engine with these settings; ConfigError: none would use it."""
    examined = await run_once(_open, root, settings)
    try:
        return await _findings(examined)
    finally:
        if examined.inspector is not None:
            examined.inspector.close()


async def _findings(examined: _Examined) -> list[Finding]:
    finding, limits = _limits(examined)
    findings = [_medium(examined.root), await run_once(_rights, examined), finding]
    findings.append(await run_once(_ledger, examined))
    space, free = await run_once(_space, examined, limits)
    findings += [space, await run_once(_sharing, examined)]
    if free < _SCRATCH_BYTES:
        remedy = f"measuring needs {human_bytes(_SCRATCH_BYTES)} above min_free"
        verdict = "warning" if space.verdict == "ok" else space.verdict
        return [*findings, Finding("throughput", verdict, "not measured: no room", remedy)]
    return findings + await _measured(examined)


def _open(root: str, settings: Mapping[str, Any]) -> _Examined:
    options = convert({**settings, "root": root}, DiskOptions)
    vfs, root = Vfs(), os.path.abspath(os.path.expanduser(options.root))
    used = check_fresh_or_root(vfs, root)
    refuse_unsafe(root, vfs.lstat(root))
    if not options.trust_parent_folders:
        refuse_exposed(vfs, root)
    return _Examined(root, vfs, DiskInspector(root, vfs) if used else None, options, settings)


def _medium(root: str) -> Finding:
    """Check the file system, by the kernel's name for its type."""
    path, best, kind = os.path.realpath(root), "", "unknown"
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts,
    ):
        for line in mounts:
            _, where, found, *_ = line.split()
            inside = path == where or path.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best):
                best, kind = where, found
    detail, remedy = kind, ""
    if kind.split(".")[0] in _SHARED:
        detail = f"{kind}: locks and sizes may be unreliable"
        remedy = "use a local disk; hosts that share chunks do so through Redis"
    elif kind in _IN_MEMORY:
        detail = f"{kind}: gone with the next boot"
        remedy = "give the memory to cpu_bytes instead, or use a disk"
    return Finding("file system", "warning" if remedy else "ok", detail, remedy)


def _rights(examined: _Examined) -> Finding:
    """Check which users could replace chunks; the root itself was checked before."""
    vfs, root = examined.vfs, examined.root
    mode = f"mode {stat.S_IMODE(vfs.lstat(root).st_mode):04o}"
    try:
        refuse_unsafe_inside(vfs, root)
    except ConfigError as error:
        return Finding("rights", "failed", str(error), "until then engines that use it refuse it")
    try:
        refuse_exposed(vfs, root)
    except ConfigError as error:
        remedy = "nothing where no untrusted process runs, as in a pod: trust_parent_folders is set"
        return Finding("rights", "warning", f"{mode}; {error}", remedy)
    detail = f"{mode}; only user {os.geteuid()} and root may replace the folder"
    return Finding("rights", "ok", detail)


def _limits(examined: _Examined) -> tuple[Finding, Limits | None]:
    """Return the limits that an engine would use; None: unknown, a root of an older version."""
    options, given = examined.options, examined.given
    wanted = options.limits()
    try:
        recorded = disk_limits.read(examined.vfs, examined.root)
    except ValueError as error:
        remedy = "an engine replaces the file when it opens the folder alone"
        detail = f"the limits recorded in the folder cannot be used: {error}"
        return Finding("limits", "warning", detail, remedy), wanted if "capacity" in given else None
    if recorded is None:
        if examined.inspector is None or "capacity" in given:
            origin = "given" if "capacity" in given else "the default"
            return Finding("limits", "ok", f"{_shown(wanted)} ({origin})"), wanted
        remedy = "give the capacity that engines will have: -o capacity=..."
        return Finding("limits", "ok", "none recorded, as older versions leave it", remedy), None
    # Settings that are not given are as recorded.
    chosen = {field: getattr(wanted, field) for name, field, _ in SETTINGS if name in given}
    limits = msgspec.structs.replace(recorded, **chosen)
    if limits == recorded:
        return Finding("limits", "ok", f"{_shown(recorded)} (recorded in the folder)"), recorded
    detail = f"{_shown(limits)} asked about; recorded in the folder: {_shown(recorded)}"
    return Finding("limits", "ok", detail), limits


def _shown(limits: Limits) -> str:
    capacity, free = human_bytes(limits.capacity_bytes), human_bytes(limits.min_free_bytes)
    return f"capacity {capacity}, min_free {free}"


def _ledger(examined: _Examined) -> Finding:
    if examined.inspector is None:
        return Finding("ledger", "ok", "none yet")
    _, fault = examined.inspector.ledger()
    if fault is None:
        return Finding("ledger", "ok", "in order")
    remedy = "an engine counts all files and corrects it; until then it stores nothing"
    return Finding("ledger", "warning", fault, remedy)


def _used_bytes(inspector: DiskInspector | None) -> int:
    if inspector is None:
        return 0
    booked, _ = inspector.ledger()
    return sum(c.allocated_bytes for c in inspector.chunks()) if booked is None else booked


def _space(examined: _Examined, limits: Limits | None) -> tuple[Finding, int]:
    """Check whether the capacity fits the device; return also the bytes free for measuring."""
    space = examined.vfs.statvfs(examined.root)
    free, used = space.f_bavail * space.f_frsize, _used_bytes(examined.inspector)
    detail = f"{human_bytes(free)} free, {human_bytes(used)} used, capacity "
    if limits is None:
        return Finding("space", "ok", detail + "unknown"), free
    detail += human_bytes(limits.capacity_bytes)
    room, spare = free + used - limits.min_free_bytes, free - limits.min_free_bytes
    verdict: Verdict = "ok"
    remedy = ""
    if room <= 0:
        verdict, remedy = "failed", "make space: other files have taken all but min_free"
    elif used > limits.capacity_bytes:
        leaving = human_bytes(limits.evicted_bytes(used))
        verdict = "warning"
        remedy = f"raise capacity: an engine opened with this one evicts {leaving}"
    elif room < limits.capacity_bytes:
        verdict, remedy = "warning", f"lower capacity to {human_bytes(room)}, or make space"
    return Finding("space", verdict, detail, remedy), spare


def _sharing(examined: _Examined) -> Finding:
    inspector = examined.inspector
    count = 0 if inspector is None else inspector.processes()
    detail = "1 process has it open" if count == 1 else f"{count} processes have it open"
    if inspector is None:
        return Finding("sharing", "ok", detail)
    until = time.monotonic() + _TAKEOVER_S
    while not inspector.has_owner() and inspector.processes():
        if time.monotonic() > until:
            remedy = "see whether a stopped process still holds .owner"
            return Finding("sharing", "warning", f"{detail}, but none may evict", remedy)
        time.sleep(0.1)  # the evicting process may just have ended
    return Finding("sharing", "ok", detail)


async def _measured(examined: _Examined) -> list[Finding]:
    """Measure I/O mode and speed of a store in a sub-folder."""
    scratch = f"{examined.root}/{SCRATCH}{os.getpid()}-{secrets.token_hex(4)}"
    settings = {name: examined.given[name] for name in _ENGINE_SETTINGS if name in examined.given}
    settings |= {"root": scratch, "capacity": _SCRATCH_BYTES, "min_free": 0}
    try:
        backend = await run_once(open_backend, "disk", settings, "kvoffload-doctor")
    except ConfigError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        return [Finding("throughput", "failed", str(error), "see what the error says")]
    try:
        mode, reason = getattr(backend, "io_mode", "unknown"), getattr(backend, "io_reason", None)
        io = Finding("io", "ok", mode)
        if reason is not None:
            remedy = "nothing, if the page cache may be used; otherwise another file system"
            detail = f"{mode}: direct I/O does not work here ({reason})"
            io = Finding("io", "warning", detail, remedy)
        return [io, await _throughput(backend)]
    finally:
        await backend.close()
        shutil.rmtree(scratch, ignore_errors=True)


async def _throughput(backend: Backend) -> Finding:
    (refused, stored_per_s), (missed, loaded_per_s) = await measure(backend)
    if refused or missed:
        remedy = "see the log for the reason"
        return Finding("throughput", "failed", "a chunk was refused or missed", remedy)
    slow = min(stored_per_s, loaded_per_s) < SLOW_BYTES_PER_S
    remedy = "recomputation may be faster than this device" if slow else ""
    rates = f"stores {human_bytes(stored_per_s)}/s, loads {human_bytes(loaded_per_s)}/s"
    return Finding("throughput", "warning" if slow else "ok", f"{rates}, 2 MiB chunks", remedy)
