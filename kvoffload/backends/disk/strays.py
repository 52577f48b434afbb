"""What lies under a root and is no chunk: leftovers of dead processes, and files of others."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from typing import NamedTuple

from kvoffload.backends.disk.locks import clean_folder, is_dead
from kvoffload.backends.disk.paths import (
    BOUNDS,
    LEDGER,
    MANIFEST,
    OWNER,
    QUARANTINE,
    SCRATCH,
    SHARDS,
    SNAPSHOT,
    WRITERS,
    is_namespace,
    key_of,
)
from kvoffload.backends.disk.vfs import Vfs

_IN_ROOT = {BOUNDS, LEDGER, OWNER, QUARANTINE, WRITERS, "lost+found"}
_IN_NAMESPACE = {MANIFEST, SNAPSHOT, *SHARDS}
_SCRATCH_S = 600
"""Longer than any examination takes: an older folder of one was left by a process that died."""


class Leftover(NamedTuple):
    """A folder that a dead process left."""

    path: str
    allocated_bytes: int


def strays(vfs: Vfs, root: str) -> Iterator[str]:
    """Paths of what is not the store's; folders that cannot be listed are left out."""
    for name in _names(vfs, root):
        if not is_namespace(name):
            if name not in _IN_ROOT and not name.startswith(SCRATCH):
                yield f"{root}/{name}"
            continue
        for inner in _names(vfs, f"{root}/{name}"):
            path = f"{root}/{name}/{inner}"
            if inner not in _IN_NAMESPACE:
                yield path
            elif inner in SHARDS:
                yield from (f"{path}/{n}" for n in _names(vfs, path) if key_of(n) is None)


def leftovers(vfs: Vfs, root: str) -> list[Leftover]:
    """Folders of writers that are dead, and of examinations that were killed."""
    writers = (f"{root}/{WRITERS}/{name}" for name in _names(vfs, f"{root}/{WRITERS}"))
    dead = [folder for folder in writers if is_dead(vfs, folder)]
    return [Leftover(folder, _allocated(folder)) for folder in [*dead, *_scratch(vfs, root)]]


def remove_leftover(vfs: Vfs, path: str) -> int:
    """Remove one of them; return the bytes that the ledger had counted; raises OSError."""
    if os.path.basename(path).startswith(SCRATCH):
        shutil.rmtree(path)
        return 0
    return clean_folder(vfs, path)


def _scratch(vfs: Vfs, root: str) -> Iterator[str]:
    for name in _names(vfs, root):
        if name.startswith(SCRATCH):
            with contextlib.suppress(OSError):
                if time.time() - vfs.lstat(f"{root}/{name}").st_mtime > _SCRATCH_S:
                    yield f"{root}/{name}"


def _allocated(folder: str) -> int:
    total = 0
    for where, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(f"{where}/{file}").st_blocks * 512
    return total


def _names(vfs: Vfs, folder: str) -> list[str]:
    try:
        return sorted(vfs.listdir(folder))
    except OSError:
        return []
