"""Host memory that processes share: whether there is enough, and a file of it without a name.

It needs no numpy, which a server of the host does without.
"""

import contextlib
import fcntl
import logging
import mmap
import os
from pathlib import Path

from kvoffload.config import human_bytes
from kvoffload.errors import ConfigError
from kvoffload.memory_limits import available_host_bytes

log = logging.getLogger(__name__)

_SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def page_rounded(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def create_shared_memory(num_bytes: int, setting: str = "cpu_bytes") -> int:
    """Make memory that several processes can map, and return its descriptor.

    It has no name in any file system. Other processes get the descriptor by inheritance or over a
    socket. The memory ends with the last of them. Its size is sealed: no process can shrink it.

    Args:
        num_bytes: rounded up to whole pages.
        setting: the setting that an error names.

    Raises:
        ConfigError: there is not that much memory.
        OSError: this system has no memory files, or forbids them.
    """
    check_host_memory(num_bytes, setting)
    if not hasattr(os, "memfd_create"):
        raise OSError("memory files need Linux")
    fd = os.memfd_create("kvoffload-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, page_rounded(num_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    explain_huge_pages()
    return fd


def explain_huge_pages() -> None:
    """Log how to allow huge pages for shared memory, where it gets none."""
    with contextlib.suppress(OSError):
        if "[never]" in (allowed := _SHARED_HUGE_PAGES.read_text()) or "[deny]" in allowed:
            text = "host memory gets no huge pages, and copies take longer; to allow them: %s"
            log.info(text, f"echo advise > {_SHARED_HUGE_PAGES}")


def check_host_memory(wanted: int, field: str) -> None:
    """Refuse more memory than the machine or the container has left.

    Raises:
        ConfigError: before any allocation.
    """
    available = available_host_bytes()
    if available is not None and wanted > available:
        raise ConfigError(
            field,
            human_bytes(wanted),
            f"only {human_bytes(available)} of host memory are available; ask for less",
        )
