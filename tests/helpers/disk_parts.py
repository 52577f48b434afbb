"""The disk backend with chunks of 60 KiB, and steps that its tests share."""

import asyncio
import contextlib
import os
import shutil

from msgspec.structs import replace

from kvoffload.backends.disk.backend import DiskBackend, DiskOptions
from kvoffload.backends.disk.index import name_of
from kvoffload.config import ByteSize
from kvoffload.testing.backends import filled, slots, wrong_bytes
from tests.support.disk_chunks import stored_in

SIZE = 60 * 1024
ON_DISK = 64 * 1024


DEFAULTS = {"capacity": ByteSize(64 << 20), "min_free": ByteSize(0), "form": "files"}


def full(chunks):
    """Settings with which a store is full with so many chunks."""
    return {"capacity": ByteSize(chunks * ON_DISK), "high_watermark": 1.0, "low_watermark": 1.0}


OPENED = []
"""Backends that a test has opened; those of tests of backends are closed after it."""


def closed_later(backend):
    OPENED.append(backend)
    return backend


def open_disk(root, namespace="disk", vfs=None, *, ready=True, **settings):
    settings = DEFAULTS | settings
    form = settings.pop("form")
    backend = closed_later(DiskBackend(DiskOptions(root=str(root), **settings), namespace, vfs=vfs))
    if form == "files":
        in_form(backend, form)
    assert not ready or backend.wait_ready(60)
    return backend


def in_form(backend, form):
    """Let a backend store small chunks in slots, or as files as if no part of one can be freed."""
    backend._store.why_no_slots = "a test wants files" if form == "files" else None
    return backend


def let_calls_hang_after(backend, stall_s):
    """Let an open store be so patient from now on: a busy machine may be slow before."""
    backend.options = replace(backend.options, stall_s=stall_s)
    for pool in backend._ThreadPoolBackend__pools.values():
        pool.stall_s = stall_s


def remove_at_once(folder):
    """Remove a folder whose users may make files in it at any moment."""
    gone = folder.with_name(f"{folder.name}-gone")
    folder.rename(gone)
    shutil.rmtree(gone)


def chunk_bytes(root):
    """Return the bytes of chunks: of their files, and of the slots that are in use."""
    total = 0
    for path in root.glob("*/??/*"):
        with contextlib.suppress(FileNotFoundError):  # evicted since it was listed
            total += path.lstat().st_blocks * 512
    for path in root.glob("*/segments/*.table"):
        with contextlib.suppress(FileNotFoundError):
            content = path.read_bytes()
            whole = len(content) - len(content) % 64  # a torn write ends in a part of an entry
            states = content[64 + 16 : whole : 64]
            total += (len(states) - states.count(0)) * int.from_bytes(content[12:20], "little")
    return total


def table_of(path):
    """Return where each key of a segment's table is: its slot's offset in the other file."""
    content = path.read_bytes()
    slot_bytes = int.from_bytes(content[12:20], "little")
    entries = (content[at : at + 64] for at in range(64, len(content), 64))
    return {e[17 : 17 + e[16]]: i * slot_bytes for i, e in enumerate(entries) if 0 < e[16] < 48}


def flip_chunk(root, key, at):
    """Change a byte of a chunk in a slot: of its header, or from its end if negative."""
    (chunk,) = (chunk for chunk in stored_in(root) if chunk.key == key)
    chunk.flip(at)


async def write(backend, keys):
    return await backend.write(keys, filled(keys, SIZE))


async def write_each(backend, keys):
    """Store one chunk after the other, by a call each."""
    return [(await write(backend, [key]))[0] for key in keys]


async def stored(root, keys, namespace="disk", **settings):
    """Store chunks by a process that then ends."""
    backend = open_disk(root, namespace, **settings)
    assert await write(backend, keys) == [True] * len(keys)
    await backend.close()


async def load(backend, keys, size=SIZE):
    """Return the answers of a read; hits alone are told of, once each, and have their bytes."""
    into, arrived = slots(len(keys), size), []
    answers = await backend.read_each(keys, into, arrived.append)
    assert wrong_bytes(keys, into, answers) == []
    assert sorted(arrived) == [i for i, good in enumerate(answers) if good]
    return answers


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


def let_policy_refuse(backend, key, monkeypatch):
    """Let the policy of an open store raise when it is to take in this chunk."""
    order, refused = backend._store.index._order, name_of(0, key)
    add = order.add

    def raising(names):
        if refused in names:
            raise RuntimeError("a test")
        add(names)

    monkeypatch.setattr(order, "add", raising)
