"""Holes in files: freed room in the middle of one. Python lacks the call."""

import ctypes
import os

_PUNCH_HOLE, _KEEP_SIZE = 2, 1

_libc = ctypes.CDLL(None, use_errno=True)


def punch(fd: int, offset: int, length: int) -> None:
    """Free the blocks of a part of a file, which then reads as zeros; raises OSError."""
    if not hasattr(_libc, "fallocate"):  # only Linux has it
        raise OSError(95, os.strerror(95))
    place = ctypes.c_int64(offset), ctypes.c_int64(length)
    if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, *place):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
