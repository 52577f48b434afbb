"""The slab: host memory in which each chunk is contiguous, in a *slot*.

One chunk = one memoryview = one file = one Redis value. The number of a slot is that of its first
row. If all chunks have one size, a slot is one row. If KV cache groups have chunks of several
sizes, a slot is several consecutive rows.
"""

import ctypes
import logging
import mmap
import os
import platform

import numpy as np
import numpy.typing as npt

from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError
from kvoffload.io.lent_memory import ADVICE, NO_FORK, advise
from kvoffload.transfer.shared_memory import check_host_memory, page_rounded

log = logging.getLogger(__name__)

HostBytes = npt.NDArray[np.int8]
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MPOL_PREFERRED = 1
_MADV_POPULATE_WRITE = 23
"""Python's mmap does not name it; Linux has it since 5.14."""


class Slab:
    """One mapping of ``num_slots * slot_bytes`` bytes, rounded up to pages.

    Any thread may use a slot; the manager gives a slot to one transfer at a time. The copier
    lets the kernel allocate the memory, in the background; for a GPU,
    :class:`kvoffload.transfer.cuda.pinning.Pinning` pins it, too.

    Args:
        num_slots: rows.
        slot_bytes: bytes of a row.
        fd: a memory file from :mod:`kvoffload.transfer.shared_memory` to map instead of private
            memory, so that several processes of this host use one slab. The caller keeps the
            descriptor.
        setting: the setting that an error names.

    Raises:
        ConfigError: there is not that much memory.
        ValueError: the memory file is of another size.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, fd: int | None = None, setting: str = "cpu_bytes"
    ) -> None:
        self.name = setting
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_bytes = num_slots * slot_bytes
        if fd is None:
            check_host_memory(self.num_bytes, setting)
            try:
                self._map = mmap.mmap(-1, self.num_bytes, flags=_PRIVATE)
            except OSError as error:  # a limit of this process (RLIMIT_AS), or strict overcommit
                remedy = f"the system refuses so much memory ({error.strerror}); ask for less"
                raise ConfigError(setting, human_bytes(self.num_bytes), remedy) from error
        else:
            if (size := os.fstat(fd).st_size) != page_rounded(self.num_bytes):
                raise ValueError(
                    f"fd: a memory file of {size} bytes, {num_slots} slots of {slot_bytes} bytes "
                    f"take {page_rounded(self.num_bytes)}"
                )
            self._map = mmap.mmap(fd, self.num_bytes)
        self.flat: HostBytes = np.frombuffer(self._map, np.int8)
        """All bytes, not a copy."""
        self.rows: HostBytes = self.flat.reshape(num_slots, slot_bytes)
        self.address = int(self.flat.ctypes.data)
        self._bytes = memoryview(self._map)
        # Huge pages mean fewer page faults, and fewer page table entries for processor and GPU. A
        # core file must neither contain clients' data nor be as large as the slab.
        for advice in ADVICE:
            advise(self.address, self.num_bytes, advice)

    def slot(self, slot: int, length: int) -> memoryview:
        """Return the first ``length`` bytes of a slot: writable, page-aligned, not a copy."""
        start = slot * self.slot_bytes
        return self._bytes[start : start + length]

    def keep_from_forks(self) -> None:
        """Leave this memory out of children forked from now on; called before it is pinned.

        After a fork, copy-on-write would give us a new page while the GPU uses the old one.
        """
        advise(self.address, self.num_bytes, NO_FORK)

    def populate(self, start: int, length: int) -> bool:
        """Allocate the pages of this range now and keep their bytes; False if the kernel cannot.

        The kernel writes hundreds of MiB for it. ctypes releases the GIL meanwhile, which the
        mapping's own ``madvise`` holds.
        """
        return advise(self.address + start, length, _MADV_POPULATE_WRITE)

    def prefer_node(self, node: int) -> None:
        """Ask the kernel to put untouched pages on a NUMA node; no effect on other systems."""
        if _MBIND is None:
            return
        width = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (node // width + 1))()
        mask[node // width] = 1 << (node % width)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.syscall(
            ctypes.c_long(_MBIND),
            ctypes.c_void_p(self.address),
            ctypes.c_ulong(self.num_bytes),
            ctypes.c_long(_MPOL_PREFERRED),
            mask,
            ctypes.c_ulong(len(mask) * width + 1),
            ctypes.c_ulong(0),
        )
        if failed:
            errno = ctypes.get_errno()
            log.info("host memory is not bound to NUMA node %d: errno %d", node, errno)
