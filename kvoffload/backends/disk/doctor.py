"""Examines whether a folder is fit to be a tier, for ``kvoffload doctor ROOT``.

The examination changes, evicts and repairs nothing. It measures throughput in a store of its own,
in a sub-folder that it removes afterwards.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvoffload.backends.admin import Finding, answered, first_of, hung, throughput
from kvoffload.backends.blocking_pool import run_once
from kvoffload.backends.disk import limits as disk_limits
from kvoffload.backends.disk import locks
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.disk.limits import SETTINGS, Limits
from kvoffload.backends.disk.options import DiskOptions
from kvoffload.backends.disk.paths import SCRATCH
from kvoffload.backends.disk.root_checks import (
    check_fresh_or_root,
    refuse_exposed,
    refuse_unsafe,
    refuse_unsafe_inside,
    remedy_of,
)
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.key_files import without
from kvoffload.config import convert, human_bytes
from kvoffload.errors import ConfigError
from kvoffload.registry import open_backend

_SCRATCH_BYTES = 64 << 20
"""Twice the stored bytes, so that the measurement evicts nothing."""
_TAKEOVER_S = 3.0
"""Longer than a process takes to notice that the evicting process has ended."""
_ENGINE_SETTINGS = (
    "io", "durability", "read_threads", "write_threads", "stall_s", "trust_parent_folders",
    "encryption",
)  # fmt: skip
"""Settings of an engine that the measured store uses as well."""
_SHARED = (
    "nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "fuse", "wekafs", "beegfs", "9p",
)  # fmt: skip
_IN_MEMORY = ("tmpfs", "ramfs")
_OCTAL = re.compile(r"\\([0-7]{3})")
"""A blank in a path, or another character, as the kernel's table of mounts has it."""
_IF_FAILED = "see the log for the reason"
_IF_SLOW = "recomputation may be faster than this device"


async def diagnose(root: str, settings: Mapping[str, Any]) -> list[Finding]:
    """Examine a folder for an engine with these settings; ConfigError: none would use it."""
    findings: list[Finding] = []
    root = absolute(root)
    options = convert({**without(settings), "root": root}, DiskOptions)
    try:
        used, counted_bytes, fault = await answered(root, _opened, root, options)
        if counted_bytes is None:  # of many chunks it takes long
            counted_bytes = await run_once(_counted, root)
        found = _examined, root, options, settings, used, counted_bytes, fault
        findings, free_bytes = await answered(root, *found)
        if free_bytes >= _SCRATCH_BYTES:
            return findings + await answered(root, _measured, root, settings)
        findings += await answered(root, _usable, root)
    except TimeoutError as error:
        return [*findings, hung(error)]
    remedy = f"measuring needs {human_bytes(_SCRATCH_BYTES)} above min_free"
    space = next(each for each in findings if each.check == "space")
    verdict = "warning" if space.verdict == "ok" else space.verdict
    return [*findings, Finding("throughput", verdict, "not measured: no room", remedy)]


def _opened(root: str, options: DiskOptions) -> tuple[bool, int | None, str | None]:
    """Check a folder; return whether it is a root, and what its ledger says or lacks."""
    vfs = Vfs()
    used = check_fresh_or_root(vfs, root)
    refuse_unsafe(root, vfs.lstat(root))
    if not options.trust_parent_folders:
        refuse_exposed(vfs, root)
    if not used:
        return False, 0, None
    with contextlib.closing(DiskInspector(root)) as found:
        return True, *found.ledger()


def _counted(root: str) -> int:
    with contextlib.closing(DiskInspector(root)) as found:
        return sum(chunk.allocated_bytes for chunk in found.chunks())


def _examined(
    root: str,
    options: DiskOptions,
    settings: Mapping[str, Any],
    used: bool,
    counted_bytes: int,
    fault: str | None,
) -> tuple[list[Finding], int]:
    """Examine a folder without measuring; return also the bytes free above the minimum."""
    vfs = Vfs()
    limits, agreed = _limits(vfs, root, options, settings, used=used)
    space, free_bytes = _space(vfs, root, agreed, counted_bytes)
    ledger = first_of(
        "ledger",
        (not used, "ok", "none yet", ""),
        (fault, "warning", f"{fault}",
         "an engine counts all files and corrects it; until then it stores nothing"),
        (True, "ok", "in order", ""),
    )  # fmt: skip
    rights, sharing = _rights(vfs, root), _sharing(root, used=used)
    return [_medium(root), rights, limits, ledger, space, sharing], free_bytes


def absolute(root: str) -> str:
    """Return the path of a root as doctor shows it."""
    return os.path.abspath(os.path.expanduser(root))


def file_system_of(root: str) -> tuple[str, str, bool]:
    """Return where a folder's file system is mounted, its type, and whether hosts can share it.

    The type is the kernel's name for it.
    """
    path, best, kind = os.path.realpath(root), "", "unknown"
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts,
    ):
        for line in mounts:
            _, where, found, *_ = line.split()
            where = _OCTAL.sub(lambda digits: chr(int(digits[1], 8)), where)
            inside = path == where or path.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best):
                best, kind = where, found
    return best, kind, kind.split(".")[0] in _SHARED


def _medium(root: str) -> Finding:
    """Check the file system, by its type."""
    _, kind, is_shared = file_system_of(root)
    return first_of(
        "file system",
        (is_shared, "warning", f"{kind}: locks and sizes may be unreliable",
         "use a local disk; hosts share chunks by a tier of type folder, redis or object"),
        (kind in _IN_MEMORY, "warning", f"{kind}: gone with the next boot",
         "it suits several engines that share it; one engine alone uses cpu_bytes better"),
        (True, "ok", kind, ""),
    )  # fmt: skip


def _rights(vfs: Vfs, root: str) -> Finding:
    """Check which users could replace chunks; the root itself was checked before."""
    mode = f"mode {stat.S_IMODE(vfs.lstat(root).st_mode):04o}"
    inside, above = (refusal(check, vfs, root) for check in (refuse_unsafe_inside, refuse_exposed))
    return first_of(
        "rights",
        (inside, "failed", inside, "until then engines that use it refuse it"),
        (above, "warning", f"{mode}; {above}",
         "nothing where no untrusted process runs, as in a pod: trust_parent_folders is set"),
        (True, "ok", f"{mode}; only user {os.geteuid()} and root may replace the folder", ""),
    )  # fmt: skip


def refusal(check: Callable[[Vfs, str], None], vfs: Vfs, root: str) -> str:
    """Return why a check refuses a root; empty if it does not."""
    try:
        check(vfs, root)
    except ConfigError as error:
        return str(error)
    return ""


def _limits(
    vfs: Vfs, root: str, options: DiskOptions, given: Mapping[str, Any], *, used: bool
) -> tuple[Finding, Limits | None]:
    """Return the limits that an engine would use; None: unknown, a root of an older version."""
    recorded, fault, has_capacity = None, "", "capacity" in given
    try:
        recorded = disk_limits.read(vfs, root)
    except ValueError as error:
        fault = str(error)
    limits = options.limits() if has_capacity or not used else None
    if recorded is not None:  # settings that are not given are as recorded
        wanted = msgspec.structs.asdict(options.limits())
        chosen = {field: wanted[field] for name, field, _ in SETTINGS if name in given}
        limits = msgspec.structs.replace(recorded, **chosen)
    found = first_of(
        "limits",
        (fault, "warning", f"the limits recorded in the folder cannot be used: {fault}",
         "an engine replaces the file when it opens the folder alone"),
        (limits is None, "ok", "none recorded, as older versions leave it",
         "give the capacity that engines will have: -o capacity=..."),
        (recorded is None, "ok",
         f"{_shown(limits)} ({'given' if has_capacity else 'the default'})", ""),
        (limits == recorded, "ok", f"{_shown(limits)} (recorded in the folder)", ""),
        (True, "ok",
         f"{_shown(limits)} asked about; recorded in the folder: {_shown(recorded)}", ""),
    )  # fmt: skip
    return found, limits


def _shown(limits: Limits | None) -> str:
    if limits is None:
        return ""
    capacity, free = human_bytes(limits.capacity_bytes), human_bytes(limits.min_free_bytes)
    return f"capacity {capacity}, min_free {free}"


def _space(vfs: Vfs, root: str, limits: Limits | None, used: int) -> tuple[Finding, int]:
    """Check whether the capacity fits the device; return also the bytes free for measuring."""
    space = vfs.statvfs(root)
    free, size = (blocks * space.f_frsize for blocks in (space.f_bavail, space.f_blocks))
    detail = f"{human_bytes(free)} free, {human_bytes(used)} used, capacity "
    if limits is None:
        return Finding("space", "ok", detail + "unknown"), free
    capacity = limits.capacity_bytes
    detail += human_bytes(capacity)
    spare = free - limits.min_free_bytes
    room, leaving = human_bytes(spare + used), human_bytes(limits.evicted_bytes(used))
    found = first_of(
        "space",
        (size <= limits.min_free_bytes, "failed", detail,
         f"lower min_free, now {human_bytes(limits.min_free_bytes)}: "
         f"the file system has {human_bytes(size)} in all"),
        (spare + used <= 0, "failed", detail,
         "make space: other files have taken all but min_free"),
        (used > capacity, "warning", detail,
         f"raise capacity: an engine opened with this one evicts {leaving}"),
        (spare + used < capacity, "warning", detail, f"lower capacity to {room}, or make space"),
        (True, "ok", detail, ""),
    )  # fmt: skip
    return found, spare


def _sharing(root: str, *, used: bool) -> Finding:
    if not used:
        return Finding("sharing", "ok", "0 processes have it open")
    with contextlib.closing(DiskInspector(root)) as found:
        count, until_s = found.processes(), time.monotonic() + _TAKEOVER_S
        detail = f"{count} process has it open" if count == 1 else f"{count} processes have it open"
        while not found.has_owner() and found.processes():
            if time.monotonic() > until_s:
                remedy = "see whether a stopped process still holds .owner"
                return Finding("sharing", "warning", f"{detail}, but none may evict", remedy)
            time.sleep(0.1)  # the evicting process may just have ended
        return Finding("sharing", "ok", detail)


def _usable(root: str) -> list[Finding]:
    """Check whether a folder can be made in a root, as each engine that opens it makes one."""
    scratch = _scratch(root)
    try:
        os.mkdir(scratch, 0o700)
        os.rmdir(scratch)
    except OSError as error:
        return [Finding("usable", "failed", str(error), remedy_of(error))]
    return []


def _scratch(root: str) -> str:
    return f"{root}/{SCRATCH}{os.getpid()}-{secrets.token_hex(4)}"


def _measured(root: str, given: Mapping[str, Any]) -> list[Finding]:
    """Measure I/O mode, form of small chunks and speed of a store in a sub-folder."""
    scratch = _scratch(root)
    try:
        return asyncio.run(_measured_in(scratch, root, given))
    except ConfigError as error:
        return [Finding("throughput", "failed", str(error), "see what the error says")]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


async def _measured_in(scratch: str, root: str, given: Mapping[str, Any]) -> list[Finding]:
    has_older = False
    with contextlib.suppress(FileNotFoundError):  # a new root
        has_older = locks.has_older(Vfs(), root)
    settings = {name: given[name] for name in _ENGINE_SETTINGS if name in given}
    settings |= {"root": scratch, "capacity": _SCRATCH_BYTES, "min_free": 0}
    backend = open_backend("disk", settings, "kvoffload-doctor")
    try:
        measured = await throughput(backend, [], _IF_FAILED, _IF_SLOW)
    finally:
        await backend.close()
    why_files = getattr(backend, "why_no_slots", "unknown")
    mode, reason = getattr(backend, "io_mode", "unknown"), getattr(backend, "io_reason", None)
    room = getattr(backend, "room", None)
    return [
        first_of(
            "io",
            (reason, "warning", f"{mode}: direct I/O does not work here ({reason})",
             "nothing, if the page cache may be used; otherwise another file system"),
            (room, "ok", f"{mode}: loads take what the page cache has; {room}", ""),
            (True, "ok", mode, ""),
        ),
        first_of(
            "small chunks",
            (why_files, "warning",
             f"a file each: parts of a file cannot be freed here ({why_files})",
             "nothing, if chunks have more than 1 MiB; otherwise another file system"),
            (has_older, "warning", "a file each, while an engine of an older version has it open",
             "stop that engine: it neither counts nor evicts chunks in slots"),
            (True, "ok", "in slots of segments: parts of a file can be freed here", ""),
        ),
        *measured,
    ]  # fmt: skip
