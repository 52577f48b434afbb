"""The namespaces of a root, as its manifests describe them: how full, how lately used."""

import heapq
import stat
import time
from collections.abc import Callable
from itertools import islice

from kvoffload.backends.base import Described
from kvoffload.backends.disk import manifest
from kvoffload.backends.disk.descriptors import Descriptors
from kvoffload.backends.disk.paths import SHARDS, is_namespace
from kvoffload.backends.disk.segment import segments_in
from kvoffload.backends.disk.store import DiskStore
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import walk

MOST_FOLDERS = 10_000
"""Folders whose times are read."""
MOST_DESCRIBED = 256
"""Folders whose manifests are read: those last used."""
LONGEST_S = 2.0
_SAMPLE = 64
"""Chunks that are measured of a namespace; more shards than have so many are not listed."""


def described(store: DiskStore, is_stopping: Callable[[], bool]) -> list[Described]:
    """Describe namespaces, the last used first: the own one alone if it has chunks.

    Args:
        store: has the root open.
        is_stopping: whether to return early, with what is known by then.
    """
    vfs, own = store.vfs, store.folder(0)
    until_s = time.monotonic() + LONGEST_S
    found = [Described(store.namespace, {}, *_measure(vfs, own), used_s=0.0)]
    if found[0].chunks:
        return found
    now_s = time.time()
    for mtime_s, folder in _last_used(vfs, store.path):
        if is_stopping() or time.monotonic() > until_s:
            break
        path = f"{store.path}/{folder}"
        if path != own:
            told = manifest.read(vfs, path)
            name, facts = manifest.name_in(told, folder), manifest.facts_in(told)
            found.append(Described(name, facts, *_measure(vfs, path), used_s=now_s - mtime_s))
    return found


def _last_used(vfs: Vfs, root: str) -> list[tuple[float, str]]:
    """Return the folders that engines touched last: one that runs touches its own now and then."""
    touched = []
    for folder in islice(filter(is_namespace, vfs.listdir(root)), MOST_FOLDERS):
        try:
            facts = vfs.lstat(f"{root}/{folder}")
        except OSError:  # gone meanwhile
            continue
        if stat.S_ISDIR(facts.st_mode):
            touched.append((facts.st_mtime, folder))
    return heapq.nlargest(MOST_DESCRIBED, touched)


def _measure(vfs: Vfs, folder: str) -> tuple[int, int]:
    """Estimate chunks and bytes of a namespace from its first shards; exact for a small one."""
    chunks = num_bytes = 0
    share = 1.0
    for shard in walk(vfs, folder):
        chunks += len(shard.chunks)
        num_bytes += sum(facts.st_blocks * 512 for _, facts in shard.chunks)
        if chunks >= _SAMPLE:
            share = len(SHARDS) / (1 + SHARDS.index(shard.name))
            break
    slots = [(each.num_used, each.slot_bytes) for each in segments_in(Descriptors(vfs), folder)]
    chunks = round(chunks * share) + sum(used for used, _ in slots)
    return chunks, round(num_bytes * share) + sum(used * size for used, size in slots)
