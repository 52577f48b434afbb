"""A mount whose server has stopped: each call on it waits until the mount is gone; needs root."""

import contextlib
import ctypes
import os
import struct

import pytest

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def hung_mount(path):
    """Mount a FUSE file system there, of which nothing is answered but the first word."""
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    server = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if _libc.mount(b"hung", os.fsencode(path), b"fuse.hung", 0, options):
            pytest.skip(f"cannot mount here: {os.strerror(ctypes.get_errno())}")
        try:
            *_, unique = struct.unpack_from("<IIQ", os.read(server, 1 << 20))
            version = struct.pack("<14I", 7, 31, 1 << 16, 0, 0, 1 << 16, 1, *[0] * 7)
            answer = version + bytes(64 - len(version))
            os.write(server, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
            yield
        finally:
            _libc.umount2(os.fsencode(path), 2)  # MNT_DETACH: it waits for nothing
    finally:
        os.close(server)  # calls that wait fail
