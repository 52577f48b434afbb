"""Mounts, which need root: of a server that has stopped, of a frozen disk, and of the same."""

import contextlib
import ctypes
import os
import struct
import subprocess

import pytest

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def hung_mount(path):
    """Mount a FUSE file system there, of which nothing is answered but the first word.

    Yields the descriptor from which each call can be read.
    """
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
            yield server
        finally:
            _libc.umount2(os.fsencode(path), 2)  # MNT_DETACH: it waits for nothing
    finally:
        os.close(server)  # calls that wait fail


@contextlib.contextmanager
def bind_mount(path):
    """Mount what is at a place over it."""
    if not _is_done(["mount", "--bind", path, path]):
        pytest.skip("needs root")
    try:
        yield
    finally:
        _is_done(["umount", "-l", path])


@contextlib.contextmanager
def frozen_disk(folder, fill=lambda root: None):
    """Mount a disk of 128 MiB in a folder, fill it and freeze it.

    No signal ends a call that changes it.
    """
    image, where = folder / "image", folder / "disk"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(128 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, where]):
        if not _is_done(command):
            pytest.skip(f"needs root, and what {command[0]} needs")
    try:
        root = where / "kv"
        root.mkdir(mode=0o700)
        fill(root)
        if not _is_done(["fsfreeze", "-f", where]):
            pytest.skip("needs fsfreeze")
        try:
            yield root
        finally:
            _is_done(["fsfreeze", "-u", where])
    finally:
        _is_done(["umount", "-l", where])


def _is_done(command):
    try:
        return not subprocess.run(command, capture_output=True).returncode
    except FileNotFoundError:
        return False
