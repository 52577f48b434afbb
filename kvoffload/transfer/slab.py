"""The slab: host memory in which each chunk lies contiguously, in a *slot*.

One chunk = one memoryview = one file = one Redis value. A slot is named by the row it begins in.
Where all chunks are of one size, that is its only row. Where KV cache groups have chunks of several
sizes, rows are as small as needed to build any of them, and a slot is some consecutive rows.
"""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError

HostBytes = npt.NDArray[np.int8]


class Slab:
    """One anonymous mapping of exactly ``num_slots * slot_bytes`` bytes; owns the memory.

    Made on the engine's thread at start; slots may then be used from any thread, each by one
    transfer at a time: the manager sees to that.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        check_host_memory(num_slots * slot_bytes)
        self._map = mmap.mmap(-1, num_slots * slot_bytes)
        self._flat: HostBytes = np.frombuffer(self._map, np.int8)
        self.rows: HostBytes = self._flat.reshape(num_slots, slot_bytes)
        self._bytes = memoryview(self._map)

    def slot(self, slot: int, length: int) -> memoryview:
        """Return the first ``length`` bytes of a slot: writable, page-aligned, not a copy."""
        start = slot * self.slot_bytes
        return self._bytes[start : start + length]

    def array(self, slot: int, length: int) -> HostBytes:
        """Return the first ``length`` bytes of a slot as an array, not a copy."""
        start = slot * self.slot_bytes
        return self._flat[start : start + length]


def check_host_memory(wanted: int, field: str = "cpu_bytes") -> None:
    """Refuse more memory than the machine, or the container, has left.

    Raises:
        ConfigError: before anything is allocated.
    """
    available = available_host_bytes()
    if available is not None and wanted > available:
        raise ConfigError(
            field,
            human_bytes(wanted),
            f"only {human_bytes(available)} of host memory are available; ask for less",
        )


def available_host_bytes() -> int | None:
    """Bytes of memory this process may still take: the machine's, or less in a container."""
    limits = [_meminfo_available(), _cgroup_headroom()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _cgroup_headroom() -> int | None:
    """Return limit minus use of the tightest memory cgroup around this process."""
    headroom: int | None = None
    for limit_file, used_file in _cgroup_files():
        try:
            limit, used = limit_file.read_text().strip(), used_file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 1 << 60:  # "max", or version 1's huge default
            left = max(0, int(limit) - int(used))
            headroom = left if headroom is None else min(headroom, left)
    return headroom


def _cgroup_files() -> list[tuple[Path, Path]]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        # A limit anywhere above counts too.
        for level in (folder, *folder.parents):
            if level.is_relative_to(base):
                files.append((level / names[0], level / names[1]))
    return files
