"""What the kernel tells of memory: how much is left, and how long programs wait for some.

The limits of all cgroups around this process count, in both versions; a page cache counts as used
by the cgroup whose process filled it.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
"""Where the kernel's files are."""
_LIMITS = (
    ("memory.high", "memory.current", "inactive_file"),  # it throttles below the limit proper
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)
"""Limit and use of a cgroup, and the line of its statistics with old contents of files."""
_NO_LIMIT = 1 << 60
"""Version 1 has a number for no limit, which is above this one."""


class Memory(NamedTuple):
    """The memory of the machine, or of a cgroup that has a limit."""

    place: str
    total_bytes: int
    available_bytes: int
    """Old contents of files count: the kernel drops them on demand."""


def memories() -> list[Memory]:
    """Return the memory of the machine and of each cgroup that limits this process."""
    meminfo = ROOT / "proc/meminfo"
    total, available = (_figure(meminfo, name) for name in ("MemTotal:", "MemAvailable:"))
    known = []
    if total is not None and available is not None:
        known.append(Memory("the machine", total * 1024, available * 1024))
    limited = (_limited(place, folder) for place, folder in _cgroups())
    return [*known, *filter(None, limited)]


def available_host_bytes() -> int | None:
    """Return the bytes that this process may still allocate; None: the kernel does not tell."""
    return min((memory.available_bytes for memory in memories()), default=None)


def pressure() -> tuple[str, float] | None:
    """Return where programs wait most for memory, and how much of the last 10 s, in percent.

    None: the kernel does not tell.
    """
    files = [("the machine", ROOT / "proc/pressure/memory")]
    files += [(place, folder / "memory.pressure") for place, folder in _cgroups()]
    told = []
    for place, file in files:
        with contextlib.suppress(OSError, ValueError, IndexError):
            some = file.read_text().split()[1]  # some avg10=0.00 avg60=...
            told.append((place, float(some.removeprefix("avg10="))))
    return max(told, key=lambda each: each[1], default=None)


def _limited(place: str, folder: Path) -> Memory | None:
    """Return the memory of a cgroup; None: it has no limit."""
    for limit_file, used_file, old_files in _LIMITS:
        limit, used = (_figure(folder / file) for file in (limit_file, used_file))
        if limit is not None and used is not None and limit < _NO_LIMIT:
            old = _figure(folder / "memory.stat", old_files) or 0
            return Memory(place, limit, max(0, limit - used + old))
    return None


def _cgroups() -> Iterator[tuple[str, Path]]:
    """Yield name and folder of the memory cgroups around this process, the innermost first."""
    lines = []
    with contextlib.suppress(OSError):
        lines = (ROOT / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            base = ROOT / "sys/fs/cgroup" / ("memory" if controllers else "")
            inner = PurePosixPath(path)
            for each in (inner, *inner.parents):
                yield f"the cgroup {each}", base / str(each).lstrip("/")


def _figure(file: Path, name: str = "") -> int | None:
    """Return the number after a name at the begin of a line; None: there is none, as for "max"."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}\s*(\d+)", file.read_text(), re.MULTILINE):
            return int(found[1])
    return None
