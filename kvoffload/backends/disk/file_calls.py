"""Calls of the kernel that Python lacks: what the kernel has in memory, writeback, holes."""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import termios

_CACHESTAT = 451
"""Number of the system call on all processors, since Linux 6.5."""
_OPENAT2 = 437
"""Likewise, since Linux 5.6."""
# RESOLVE_*, the last since Linux 5.12
_NO_MOUNTS, _NO_SYMLINKS, _BENEATH, _CACHED = 0x01, 0x04, 0x08, 0x20
_AT_CWD = -100
_EMPTY_PATH, _DONT_SYNC = 0x1000, 0x4000  # AT_*
_INODE = 0x100  # STATX_INO
_HEAD_BYTES = 64 << 10
"""The kernel counts page by page, 78 µs for 2 MiB, and drops the pages of a file in their order."""
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_PROT_READ, _MAP_SHARED = 1, 1
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_quick = ctypes.PyDLL(None, use_errno=True)
"""The same, for calls so short that giving the GIL away would cost more."""
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


_Pages = ctypes.c_uint64 * 5
"""What cachestat(2) tells: pages that are cached, dirty, in writeback, and evicted ones."""
_range = struct.Struct("QQ").pack
"""What it asks: offset and length."""
_how = struct.Struct("QQQ").pack
"""What openat2(2) takes: flags, mode and RESOLVE_*."""
_FACTS = struct.Struct("32xQ96xII112x")
"""What statx(2) tells: the inode, and both numbers of its device."""


def open_cached(name: bytes, flags: int, folder_fd: int | None = None) -> int:
    """Open a file whose names the kernel has in memory; does no I/O.

    Args:
        name: a whole path. With a folder, a path in it without any symbolic link or mount. The
            server of another file system might hang in this call, which keeps the GIL.
        flags: of open(2).
        folder_fd: of an open folder.

    Raises:
        BlockingIOError: the kernel would have to ask the file system.
        OSError: there is no such file, or the kernel has no such call.
    """
    if not hasattr(os, "RWF_NOWAIT"):  # only Linux has it, and the number means another call
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    resolve = _CACHED if folder_fd is None else _CACHED | _BENEATH | _NO_SYMLINKS | _NO_MOUNTS
    how = _how(flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0, resolve)
    at = _AT_CWD if folder_fd is None else folder_fd
    if (fd := _quick.syscall(_OPENAT2, at, name, how, len(how))) < 0:
        raise _error()
    return int(fd)


def known_identity(fd: int) -> tuple[int, int]:
    """Return device and inode of an open file, without a question to its server.

    Raises:
        OSError: the kernel does not tell.
    """
    facts = (ctypes.c_ubyte * _FACTS.size)()
    if not hasattr(_libc, "statx"):  # only Linux has it
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    if _libc.statx(fd, b"", _EMPTY_PATH | _DONT_SYNC, _INODE, facts):
        raise _error()
    inode, *device = _FACTS.unpack(facts)
    return os.makedev(*device), inode


def is_cached(fd: int, length: int, offset: int = 0) -> bool:
    """Return whether the page cache has the head of a part of a file; starts no read.

    Raises:
        OSError: the kernel does not tell.
    """
    pages, length = _Pages(), min(length, _HEAD_BYTES)
    if _quick.syscall(_CACHESTAT, fd, _range(offset, length), pages, 0) == 0:
        return bool(pages[0] * mmap.PAGESIZE >= length)
    return _is_mapped(fd, length, offset)  # an older kernel, or a container that forbids the call


def _is_mapped(fd: int, length: int, offset: int) -> bool:
    """Ask mincore(2), which tells of a mapping what is in memory."""
    address = _libc.mmap(None, length, _PROT_READ, _MAP_SHARED, fd, offset)
    if address == _FAILED:
        raise _error()
    try:
        states = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), states):
            raise _error()
        return not bytes(states).strip(b"\1")
    finally:
        _libc.munmap(address, length)


def bypass(fd: int) -> None:
    """Do the further I/O of an open file directly; raises OSError."""
    if _quick.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT):
        raise _error()


def known_bytes(fd: int) -> int:
    """Return the length of an open file as the kernel knows it, without a question to its server.

    Of a longer file than 2 GiB it is another number. -1: the kernel does not tell.
    """
    length = ctypes.c_int(-1)
    _quick.ioctl(fd, ctypes.c_ulong(termios.FIONREAD), ctypes.byref(length))
    return length.value


def start_writeback(fd: int) -> None:
    """Begin to write a file's changed pages, so that they do not gather; raises OSError."""
    whole = ctypes.c_int64(0), ctypes.c_int64(0)
    if _libc.sync_file_range(fd, *whole, ctypes.c_uint(_WRITE)):
        raise _error()


def punch(fd: int, offset: int, length: int) -> None:
    """Free the blocks of a part of a file, which then reads as zeros; raises OSError."""
    if not hasattr(_libc, "fallocate"):  # only Linux has it
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    place = ctypes.c_int64(offset), ctypes.c_int64(length)
    if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, *place):
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
