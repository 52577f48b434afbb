"""Files under a root that are no chunks: leftovers of dead processes, and foreign files."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from typing import NamedTuple

from kvoffload.backends.disk import paths
from kvoffload.backends.disk.locks import clean_folder, is_dead
from kvoffload.backends.disk.paths import SCRATCH, WRITERS
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import ignore, names_in, walk

_IN_ROOT = {paths.BOUNDS, paths.LEDGER, paths.OWNER, paths.QUARANTINE, WRITERS, "lost+found"}
_IN_NAMESPACE = {paths.MANIFEST, paths.SNAPSHOT, *paths.SHARDS}
_SCRATCH_S = 600
"""Longer than any run of ``kvoffload doctor``: the process of an older folder died."""


class Leftover(NamedTuple):
    """A folder that a dead process left."""

    path: str
    allocated_bytes: int


def strays(vfs: Vfs, root: str) -> Iterator[str]:
    """Yield the paths of foreign files; skips folders that cannot be listed."""
    for name in names_in(vfs, root):
        folder = f"{root}/{name}"
        if paths.is_namespace(name):
            yield from (f"{folder}/{n}" for n in names_in(vfs, folder) if n not in _IN_NAMESPACE)
            for shard, files in walk(vfs, folder, ignore):
                yield from sorted(f"{shard}/{n}" for n, _ in files if paths.key_of(n) is None)
        elif name not in _IN_ROOT and not name.startswith(SCRATCH):
            yield folder


def leftovers(vfs: Vfs, root: str) -> list[Leftover]:
    """Return the folders of dead writers, and of killed runs of ``kvoffload doctor``."""
    writers = (f"{root}/{WRITERS}/{name}" for name in names_in(vfs, f"{root}/{WRITERS}"))
    dead = [folder for folder in writers if is_dead(vfs, folder)]
    return [Leftover(folder, _allocated(folder)) for folder in [*dead, *_scratch(vfs, root)]]


def remove_leftover(vfs: Vfs, path: str) -> int:
    """Remove a leftover; return the bytes that the quota had counted; raises OSError."""
    if os.path.basename(path).startswith(SCRATCH):
        shutil.rmtree(path)
        return 0
    return clean_folder(vfs, path)


def _scratch(vfs: Vfs, root: str) -> Iterator[str]:
    for name in names_in(vfs, root):
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
