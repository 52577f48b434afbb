"""The folder backend with the chunks of ``disk_parts``, and steps that its tests share."""

import asyncio
import contextlib

from disk_parts import SIZE, closed_later

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder.backend import FolderBackend, FolderOptions
from kvoffload.backends.folder.evictor import Evictor
from kvoffload.backends.folder.records import HostRecord, Records
from kvoffload.backends.folder.room import Room
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled


def open_folder(root, namespace="folder", vfs=None, **settings):
    settings = {"capacity": ByteSize(64 << 20), "trust_parent_folders": True, **settings}
    options = FolderOptions(root=str(root), **settings)
    return closed_later(FolderBackend(options, namespace, vfs=vfs))


def new_evictor(root, vfs=None, *, capacity=1 << 30, evicted=lambda *names: None, share=1.0):
    """Return an evictor whose process stores nothing."""
    vfs, root = vfs or Vfs(), str(root)
    records, room = Records(vfs, root, "test"), Room(lambda: None)
    return Evictor(vfs, root, records, capacity, evicted, room, share)


async def store(backend, keys, tenant=b""):
    return await backend.write(keys, filled(keys, SIZE), [tenant] * len(keys) if tenant else ())


async def stored(root, keys, **settings):
    """Store chunks by a process that then ends."""
    backend = open_folder(root, **settings)
    assert await store_at_last(backend, keys)
    await backend.close()


def host_record(**told):
    """Return the record of a process that has stored nothing, but for what is told of it."""
    nothing = dict.fromkeys(("stored_bytes", "limit_bytes", "largest_bytes", "out_of_space"), 0)
    return HostRecord(**{"host": "h", "pid": 1, **nothing, **told})


async def store_at_last(backend, keys, tenant=b""):
    """Store chunks as soon as there is room for all."""
    for _ in range(300):
        if all(await store(backend, keys, tenant)):
            return True
        await asyncio.sleep(0.02)
    return False


def path_of(root, key):
    (path,) = root.rglob(f"??/{key.hex()}")
    return path


def stored_bytes(root):
    """Return the bytes of all chunks, and of those being written."""
    total = 0
    for path in root.glob("*/??/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_size
    return total
