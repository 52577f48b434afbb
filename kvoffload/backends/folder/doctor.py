"""Examines whether a folder is fit to be shared, for ``kvoffload doctor``.

It changes and evicts nothing. It measures in a root of its own, a sub-folder that it removes.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from typing import Any

from kvoffload.backends.admin import (
    SLOW_BYTES_PER_S,
    Finding,
    answered,
    counted,
    duration,
    first_of,
    hung,
    measure,
)
from kvoffload.backends.disk.doctor import absolute, file_system_of, refusal
from kvoffload.backends.disk.paths import SCRATCH
from kvoffload.backends.disk.root_checks import (
    how_to_make,
    refuse_exposed,
    refuse_unsafe,
    refuse_unsafe_inside,
    remedy_of,
)
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder.inspection import FolderInspector
from kvoffload.backends.folder.options import FolderOptions
from kvoffload.backends.folder.shared_root import check_content
from kvoffload.backends.folder.upkeep import LEASE_S
from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError
from kvoffload.registry import open_backend

OTHER_MOUNT = "other_mount"
"""Option of the command: the same root, as another mount shows it."""
_NO_OTHER = f"not measured; -o {OTHER_MOUNT}=PATH names the root as another mount shows it"
_DEPTHS = (1, 8, 32)
_LONGEST_S = 65.0
"""Longer than any attribute cache of NFS with its default settings."""
_SLOW_TO_SEE_S = 5.0
_SCRATCH_BYTES = 1 << 30


async def diagnose(
    options: FolderOptions, other_mount: str, encryption: Mapping[str, Any]
) -> list[Finding]:
    """Examine a root, also as the other mount shows it if there is one.

    ``encryption`` has the tier's setting of this name, if there is one, for what is measured.

    Raises:
        ConfigError: no engine would use the root, or the other mount does not show it.
    """
    root, other = absolute(options.root), other_mount
    scratch = f"{root}/{SCRATCH}{os.getpid()}-{secrets.token_hex(4)}"
    findings: list[Finding] = []
    try:
        findings += await answered(root, _examined, root, options)
        try:
            await answered(root, os.mkdir, scratch, 0o700)
            findings += await answered(root, _times, scratch)
            if other:
                there = scratch.replace(root, other, 1)
                findings += await answered(other, _seen, scratch, there, extra_s=_LONGEST_S)
            else:
                findings.append(Finding("other host", "ok", _NO_OTHER))
            for depth in _DEPTHS:
                tried = _rate, f"{scratch}/{depth}", depth, options, encryption
                findings.append(await answered(root, *tried))
        finally:
            await answered(root, shutil.rmtree, scratch, True)
    except TimeoutError as error:
        findings.append(hung(error))
    except OSError as error:  # a full or a read-only mount, say
        findings.append(Finding("usable", "failed", str(error), remedy_of(error)))
    return findings


def _examined(root: str, options: FolderOptions) -> list[Finding]:
    """Examine a root without writing."""
    vfs = Vfs()
    try:
        is_root = check_content(vfs, root)
        refuse_unsafe(root, vfs.lstat(root))
    except FileNotFoundError:
        command = f"if {os.path.dirname(root)} is mounted: mkdir -m 700 {root}"
        remedy = f"does not exist; {how_to_make(vfs, root, command)}"
        raise ConfigError("root", root, remedy) from None
    except OSError as error:
        raise ConfigError("root", root, f"cannot be used: {error.strerror}") from error
    if not options.trust_parent_folders:
        refuse_exposed(vfs, root)
    sharing, space = _sharing(root, is_root), _space(vfs, root, options)
    return [_medium(root), _rights(vfs, root), sharing, space]


def _medium(root: str) -> Finding:
    """Check the file system, by its type."""
    best, kind, is_shared = file_system_of(root)
    return first_of(
        "file system",
        (not is_shared, "warning", f"{kind} at {best}: this host's own, as far as the type tells",
         "for one host the disk tier is faster; else see whether the folder is mounted"),
        (True, "ok", f"{kind} at {best}", ""),
    )  # fmt: skip


def _rights(vfs: Vfs, root: str) -> Finding:
    """Check which users could replace chunks; each host must run engines as the same user."""
    facts, inside = vfs.lstat(root), refusal(refuse_unsafe_inside, vfs, root)
    who = f"mode {stat.S_IMODE(facts.st_mode):04o}, of user {facts.st_uid}"
    return first_of(
        "rights",
        (inside, "failed", inside, "until then engines that use it refuse it"),
        (True, "ok", f"{who}, as which the engines of all hosts must run", ""),
    )


def _sharing(root: str, is_root: bool) -> Finding:
    if not is_root:
        return Finding("sharing", "ok", "no engine has used it yet")
    with contextlib.closing(FolderInspector(root)) as found:
        store, hosts, (_, fault) = found.records.store(), found.hosts(), found.ledger()
        names = ", ".join(sorted(set(hosts))) or "no host"
        detail = f"store {store.store[:8] if store else 'unmarked'}, open on {names}"
        return first_of(
            "sharing",
            (hosts and fault, "warning", f"{detail}; {fault}",
             "an engine writes it again; a folder of that name has to be removed by hand"),
            (hosts and not found.has_owner(), "warning", f"{detail}; none may evict",
             f"look again in {LEASE_S:.0f} s, when a lease that nobody renews has ended"),
            (True, "ok", f"{detail}; every host must show this store", ""),
        )  # fmt: skip


def _space(vfs: Vfs, root: str, options: FolderOptions) -> Finding:
    """Check whether the capacity fits the file system."""
    space, capacity = vfs.statvfs(root), int(options.capacity)
    total = space.f_blocks * space.f_frsize
    free = space.f_bavail * space.f_frsize
    detail = f"{human_bytes(free)} of {human_bytes(total)} free, capacity {human_bytes(capacity)}"
    return first_of(
        "space",
        (total and capacity > total, "warning", detail,
         "lower capacity: a full mount evicts, and refuses stores until it has"),
        (True, "ok", detail, ""),
    )  # fmt: skip


# ---- what other hosts see, and when --------------------------------------------------------------


def _times(here: str) -> list[Finding]:
    """Measure a rename, and the server's clock."""
    began_s = time.perf_counter()
    for _ in range(16):
        _put(f"{here}/seen")
    renamed_s = (time.perf_counter() - began_s) / 16
    written_s = os.lstat(f"{here}/seen").st_mtime
    skew_s = written_s - time.time()
    ahead = "ahead of" if skew_s > 0 else "behind"
    return [
        Finding("rename", "ok", f"{renamed_s * 1e3:.1f} ms for a file that replaces another"),
        Finding(
            "clock",
            "ok",
            f"file times are {abs(skew_s):.1f} s {ahead} this host's clock; only file times count",
        ),
    ]


def _seen(here: str, there: str) -> list[Finding]:
    """Measure how long a file stays unseen through another mount, and compare both clocks."""
    for _ in range(3):
        with contextlib.suppress(FileNotFoundError):
            os.lstat(f"{there}/late")  # the other side remembers that it is missing
    _put(f"{here}/late")
    written_s = time.monotonic()
    while not os.path.lexists(f"{there}/late"):
        if time.monotonic() - written_s > _LONGEST_S:
            remedy = "name the same folder of the same server, by another mount"
            detail = f"a new file was not seen there within {duration(_LONGEST_S)}"
            return [Finding("other host", "failed", detail, remedy)]
        time.sleep(0.005)
    seen_s = time.monotonic() - written_s
    _put(f"{there}/back")
    differ_s = os.lstat(f"{there}/back").st_mtime - os.lstat(f"{here}/late").st_mtime - seen_s
    detail = f"a file that was just missing is seen after {seen_s:.2f} s"
    return [
        first_of(
            "other host",
            (seen_s > _SLOW_TO_SEE_S, "warning", detail,
             "until then its chunks are computed again; NFS: mount with lookupcache=positive"),
            (True, "ok", detail, ""),
        ),
        first_of(
            "times",
            (abs(differ_s) > LEASE_S / 3, "warning",
             f"files written by both mounts differ by {abs(differ_s):.1f} s",
             "the clients set file times by their own clocks: keep these together (NTP)"),
            (True, "ok", f"files written by both mounts agree to {abs(differ_s):.1f} s", ""),
        ),
    ]  # fmt: skip


def _put(path: str) -> None:
    """Write a small file and rename it, as records and chunks are."""
    with open(f"{path}.new", "wb") as file:
        file.write(b"kvoffload doctor")
    os.replace(f"{path}.new", path)


# ---- rates ---------------------------------------------------------------------------------------


def _rate(root: str, depth: int, options: FolderOptions, encryption: Mapping[str, Any]) -> Finding:
    """Measure stores and loads with so many chunks at once."""
    settings = {
        "root": root,
        "capacity": _SCRATCH_BYTES,
        "threads": depth,
        "timeout_s": options.timeout_s,
        "trust_parent_folders": True,
        **encryption,
    }
    (refused, stored_per_s), (missed, loaded_per_s) = asyncio.run(_measured(settings, depth))
    rates = stored_per_s, loaded_per_s
    stored, loaded = (f"{human_bytes(rate)}/s" for rate in rates)
    detail = f"{counted(depth, 'chunk')} at once: stores {stored}, loads {loaded}"
    is_deep = depth == _DEPTHS[-1]
    return first_of(
        f"depth {depth}",
        (refused or missed, "failed", "a chunk was refused or missed",
         "see the log for the reason"),
        (is_deep and min(rates) < SLOW_BYTES_PER_S, "warning", detail,
         "recomputation may be faster than this mount"),
        (True, "ok", detail, ""),
    )  # fmt: skip


async def _measured(settings: dict[str, Any], depth: int) -> list[tuple[int, float]]:
    backend = open_backend("folder", settings, "kvoffload-doctor")
    try:
        return await measure(backend, max(8, depth))
    finally:
        await backend.close()
