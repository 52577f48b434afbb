"""Is this folder fit to be a tier? What ``kvoffload doctor ROOT`` looks into.

A root is looked at from outside: nothing in it is changed, evicted or repaired. Throughput is
measured in a store of its own, in a sub-folder that is removed afterwards.
"""

import contextlib
import mmap
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvoffload.backends.admin import Finding
from kvoffload.backends.base import Backend
from kvoffload.backends.blocking_pool import run_once
from kvoffload.backends.disk import limits as disk_bounds
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.disk.limits import SETTINGS, Limits
from kvoffload.backends.disk.options import DiskOptions
from kvoffload.backends.disk.paths import QUARANTINE, SCRATCH, WRITERS
from kvoffload.backends.disk.permissions import refuse_exposed, refuse_unsafe
from kvoffload.backends.disk.root_checks import check_fresh_or_root
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.config import convert, human_bytes
from kvoffload.errors import ConfigError
from kvoffload.registry import open_backend

_CHUNKS, _CHUNK_BYTES = 16, 2 << 20
_SCRATCH_BYTES = 64 << 20
"""Twice what is stored while measuring: nothing of it is evicted meanwhile."""
_SLOW_BYTES_PER_S = 200e6
_TAKEOVER_S = 3.0
"""Longer than a process takes to notice that the one that evicts has ended."""
KEPT = ("io", "durability", "read_threads", "write_threads", "stall_s", "trust_parent_folders")
"""Settings of an engine that also hold for the store in which throughput is measured."""
_SHARED = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "fuse")
_IN_MEMORY = ("tmpfs", "ramfs")


class _Patient(NamedTuple):
    """The folder that is examined."""

    root: str
    vfs: Vfs
    survey: DiskInspector | None
    """None: the folder is empty, no engine has used it."""
    options: DiskOptions
    given: Mapping[str, Any]
    """The settings that were given, of all options."""


async def diagnose(root: str, settings: Mapping[str, Any]) -> list[Finding]:
    """Examine a folder, for an engine with these settings.

    Raises:
        ConfigError: a setting is wrong, or the folder is none that an engine would use.
    """
    return await _examine(await run_once(_admit, root, settings))


def _admit(root: str, settings: Mapping[str, Any]) -> _Patient:
    if "root" in settings:
        raise ConfigError("root", settings["root"], "the folder is given already")
    options = convert({**settings, "root": root}, DiskOptions)
    vfs, root = Vfs(), os.path.abspath(os.path.expanduser(options.root))
    used = check_fresh_or_root(vfs, root)
    refuse_unsafe(root, vfs.lstat(root))
    if not options.trust_parent_folders:
        refuse_exposed(vfs, root)
    return _Patient(root, vfs, DiskInspector(root, vfs) if used else None, options, settings)


async def _examine(patient: _Patient) -> list[Finding]:
    limits, bounds = _limits(patient)
    findings = [_medium(patient.root), await run_once(_rights, patient), limits]
    findings.append(await run_once(_ledger, patient))
    space, free = await run_once(_space, patient, bounds)
    findings += [space, await run_once(_sharing, patient)]
    if free < _SCRATCH_BYTES:
        remedy = f"measuring needs {human_bytes(_SCRATCH_BYTES)} above min_free"
        verdict = "warning" if space.verdict == "ok" else space.verdict
        return [*findings, Finding("throughput", verdict, "not measured: no room", remedy)]
    return findings + await _measured(patient)


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


def _rights(patient: _Patient) -> Finding:
    """Who could replace what is stored; the root itself was looked at before anything else."""
    vfs, root = patient.vfs, patient.root
    mode = f"mode {stat.S_IMODE(vfs.lstat(root).st_mode):04o}"
    inner = [WRITERS, QUARANTINE, *patient.survey.namespaces()] if patient.survey else []
    try:
        for name in inner:
            with contextlib.suppress(FileNotFoundError):
                refuse_unsafe(f"{root}/{name}", vfs.lstat(f"{root}/{name}"))
    except ConfigError as error:
        return Finding("rights", "failed", str(error), "until then engines that use it refuse it")
    try:
        refuse_exposed(vfs, root)
    except ConfigError as error:
        remedy = "nothing where no untrusted process runs, as in a pod: trust_parent_folders is set"
        return Finding("rights", "warning", f"{mode}; {error}", remedy)
    detail = f"{mode}; only user {os.geteuid()} and root may replace the folder"
    return Finding("rights", "ok", detail)


def _limits(patient: _Patient) -> tuple[Finding, Limits | None]:
    """The limits an engine would go by; None of an older version's root: nobody knows."""
    options, given = patient.options, patient.given
    wanted = options.bounds()
    try:
        recorded = disk_bounds.read(patient.vfs, patient.root)
    except ValueError as error:
        remedy = "an engine replaces the file when it opens the folder alone"
        detail = f"the limits recorded in the folder cannot be used: {error}"
        return Finding("limits", "warning", detail, remedy), wanted if "capacity" in given else None
    if recorded is None:
        if patient.survey is None or "capacity" in given:
            origin = "given" if "capacity" in given else "the default"
            return Finding("limits", "ok", f"{_shown(wanted)} ({origin})"), wanted
        remedy = "give the capacity that engines will have: -o capacity=..."
        return Finding("limits", "ok", "none recorded, as older versions leave it", remedy), None
    # What is not given is as recorded; what is given is what somebody asks about.
    chosen = {field: getattr(wanted, field) for name, field, _ in SETTINGS if name in given}
    bounds = msgspec.structs.replace(recorded, **chosen)
    if bounds == recorded:
        return Finding("limits", "ok", f"{_shown(recorded)} (recorded in the folder)"), recorded
    detail = f"{_shown(bounds)} asked about; recorded in the folder: {_shown(recorded)}"
    return Finding("limits", "ok", detail), bounds


def _shown(bounds: Limits) -> str:
    capacity, free = human_bytes(bounds.capacity_bytes), human_bytes(bounds.min_free_bytes)
    return f"capacity {capacity}, min_free {free}"


def _ledger(patient: _Patient) -> Finding:
    survey = patient.survey
    fault = survey.ledger_fault() if survey is not None else None
    if fault is None:
        return Finding("ledger", "ok", "none yet" if survey is None else "in order")
    remedy = "an engine counts everything and sets it right; until then it stores nothing"
    return Finding("ledger", "warning", fault, remedy)


def _used_bytes(survey: DiskInspector | None) -> int:
    if survey is None:
        return 0
    booked = survey.booked_bytes()
    return sum(c.allocated_bytes for c in survey.chunks()) if booked is None else booked


def _space(patient: _Patient, bounds: Limits | None) -> tuple[Finding, int]:
    """Whether the capacity fits the device; and the bytes that may be used for measuring."""
    space = patient.vfs.statvfs(patient.root)
    free, used = space.f_bavail * space.f_frsize, _used_bytes(patient.survey)
    detail = f"{human_bytes(free)} free, {human_bytes(used)} used, capacity "
    if bounds is None:
        return Finding("space", "ok", detail + "unknown"), free
    detail += human_bytes(bounds.capacity_bytes)
    room, spare = free + used - bounds.min_free_bytes, free - bounds.min_free_bytes
    if room <= 0:
        remedy = "make space: others have taken all but min_free"
        return Finding("space", "failed", detail, remedy), spare
    if used > bounds.capacity_bytes:
        leaving = human_bytes(bounds.evicted_bytes(used))
        remedy = f"raise capacity: an engine opened with this one evicts {leaving}"
        return Finding("space", "warning", detail, remedy), spare
    if room < bounds.capacity_bytes:
        remedy = f"lower capacity to {human_bytes(room)}, or make space"
        return Finding("space", "warning", detail, remedy), spare
    return Finding("space", "ok", detail), spare


def _sharing(patient: _Patient) -> Finding:
    survey = patient.survey
    count = survey.processes() if survey is not None else 0
    detail = "1 process has it open" if count == 1 else f"{count} processes have it open"
    if survey is None or not count:
        return Finding("sharing", "ok", detail)
    until = time.monotonic() + _TAKEOVER_S
    while not (owned := survey.has_owner()) and survey.processes() and time.monotonic() < until:
        time.sleep(0.1)  # the one that evicted may just have ended
    if owned or not survey.processes():
        return Finding("sharing", "ok", detail)
    remedy = "see whether a stopped process still holds .owner"
    return Finding("sharing", "warning", f"{detail}, but none may evict", remedy)


async def _measured(patient: _Patient) -> list[Finding]:
    """I/O mode and speed, of a store in a sub-folder."""
    scratch = f"{patient.root}/{SCRATCH}{os.getpid()}-{secrets.token_hex(4)}"
    settings = {name: patient.given[name] for name in KEPT if name in patient.given}
    settings |= {"root": scratch, "capacity": _SCRATCH_BYTES, "min_free": 0}
    try:
        backend = await run_once(open_backend, "disk", settings, "kvoffload-doctor")
    except ConfigError as error:
        _remove(scratch)
        return [Finding("throughput", "failed", str(error), "see what the error says")]
    try:
        mode = _io(getattr(backend, "io_mode", "unknown"), getattr(backend, "io_reason", None))
        return [mode, await _throughput(backend)]
    finally:
        await backend.close()
        _remove(scratch)


def _remove(scratch: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(scratch)


def _io(mode: str, reason: str | None) -> Finding:
    if reason is None:
        return Finding("io", "ok", mode)
    remedy = "nothing, if the page cache may be used; otherwise another file system"
    return Finding("io", "warning", f"{mode}: direct I/O does not work here ({reason})", remedy)


async def _throughput(backend: Backend) -> Finding:
    """Store and load some chunks."""
    keys = [secrets.token_bytes(36) for _ in range(_CHUNKS)]
    memory = memoryview(mmap.mmap(-1, _CHUNK_BYTES * _CHUNKS))
    memory[:_CHUNK_BYTES] = secrets.token_bytes(_CHUNK_BYTES)
    slots = [memory[i * _CHUNK_BYTES : (i + 1) * _CHUNK_BYTES] for i in range(_CHUNKS)]
    rates = []
    for call in (backend.write, backend.read):
        began = time.perf_counter()
        if not all(await call(keys, slots)):
            remedy = "see the log for the reason"
            return Finding("throughput", "failed", "a chunk was refused or missed", remedy)
        rates.append(_CHUNKS * _CHUNK_BYTES / (time.perf_counter() - began))
    stored, loaded = (f"{human_bytes(rate)}/s" for rate in rates)
    slow = min(rates) < _SLOW_BYTES_PER_S
    remedy = "computing anew may be faster than this device" if slow else ""
    detail = f"stores {stored}, loads {loaded}, 2 MiB chunks"
    return Finding("throughput", "warning" if slow else "ok", detail, remedy)
