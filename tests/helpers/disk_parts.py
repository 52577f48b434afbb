"""The disk backend with chunks of 60 KiB, and steps that its tests share."""

import asyncio
import contextlib
import os
import shutil

from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled

SIZE = 60 * 1024
ON_DISK = 64 * 1024


def open_disk(root, namespace="disk", vfs=None, **settings):
    settings = {"capacity": ByteSize(64 << 20), "min_free": ByteSize(0), **settings}
    backend = DiskBackend(DiskOptions(root=str(root), **settings), namespace, vfs=vfs)
    assert backend.wait_ready(60)
    return backend


def remove_at_once(folder):
    """Remove a folder whose users may make files in it at any moment."""
    gone = folder.with_name(f"{folder.name}-gone")
    folder.rename(gone)
    shutil.rmtree(gone)


def chunk_bytes(root):
    return sum(path.lstat().st_blocks * 512 for path in root.glob("*/??/*"))


async def write(backend, keys):
    return await backend.write(keys, filled(keys, SIZE))


async def until(condition, timeout_s=30.0):
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return True
        await asyncio.sleep(0.02)
    return condition()


def allocated(root):
    """Return the bytes that the files of a root take up."""
    total = 0
    for folder, _, files in os.walk(root):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(f"{folder}/{file}").st_blocks * 512
    return total
