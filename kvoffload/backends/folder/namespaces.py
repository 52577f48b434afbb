"""The namespaces of a root: described from samples, and purged."""

import contextlib
import stat
import time
from collections.abc import Callable, Sequence
from itertools import islice

from kvoffload.backends.base import Described
from kvoffload.backends.disk import manifest
from kvoffload.backends.disk.paths import SHARDS, is_namespace
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import remove_namespace, walk
from kvoffload.backends.header import namespace_digest

_MOST_FOLDERS = 256
_LONGEST_S = 2.0
_ENOUGH = 64
"""Chunks of a namespace that are looked at; more shards than have so many are not listed."""


def described(
    vfs: Vfs, root: str, namespace: str, is_stopping: Callable[[], bool]
) -> list[Described]:
    """Describe namespaces from a few of their shards: the own one alone if it has chunks."""
    own = namespace_digest(namespace).hex()
    found = [Described(namespace, {}, *_measured(vfs, f"{root}/{own}"), used_s=0.0)]
    if found[0].chunks:
        return found
    until_s = time.monotonic() + _LONGEST_S
    for folder in islice(filter(is_namespace, vfs.listdir(root)), _MOST_FOLDERS):
        if is_stopping() or time.monotonic() > until_s:
            break
        path = f"{root}/{folder}"
        if folder != own and stat.S_ISDIR(vfs.lstat(path).st_mode):
            told = manifest.read(vfs, path)
            name, facts = manifest.name_in(told, folder), manifest.facts_in(told)
            found.append(Described(name, facts, *_measured(vfs, path)))
    return found


def purge(
    vfs: Vfs, root: str, folders: Sequence[str], own: str, is_stopping: Callable[[], bool]
) -> int:
    """Remove all chunks of namespace folders, and the folders but for the own one.

    Returns:
        How many were removed. The evictor finds the bytes free at its next scan.
    """
    removed = 0
    for folder in folders:
        for shard in walk(vfs, f"{root}/{folder}"):
            for key, _ in shard.chunks:
                if is_stopping():
                    return removed
                with contextlib.suppress(OSError):
                    vfs.unlink(f"{shard.path}/{key.hex()}")
                    removed += 1
        if folder != own:
            remove_namespace(vfs, f"{root}/{folder}")
    return removed


def _measured(vfs: Vfs, folder: str) -> tuple[int, int]:
    """Estimate chunks and bytes of a namespace from its first shards; exact for a small one."""
    chunks = num_bytes = 0
    for shard in walk(vfs, folder):
        chunks += len(shard.chunks)
        num_bytes += sum(facts.st_size for _, facts in shard.chunks)
        if chunks >= _ENOUGH:
            share = (1 + SHARDS.index(shard.name)) / len(SHARDS)
            return round(chunks / share), round(num_bytes / share)
    return chunks, num_bytes
