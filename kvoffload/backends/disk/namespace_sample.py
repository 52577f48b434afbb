"""The namespaces of a root, as its manifests describe them: how full, how lately used."""

import heapq
import stat
import time
from collections.abc import Callable, Iterator
from itertools import islice

from kvoffload.backends.base import MOST_DESCRIBED, Described
from kvoffload.backends.disk import manifest
from kvoffload.backends.disk.descriptors import Descriptors
from kvoffload.backends.disk.paths import SHARDS, is_namespace
from kvoffload.backends.disk.segment import segments_in
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.disk.walker import walk
from kvoffload.backends.header import namespace_digest

MOST_FOLDERS = 10_000
"""Folders whose times are read."""
LONGEST_S = 2.0
_SAMPLE = 64
"""Chunks that are measured of a namespace; more shards than have so many are not listed."""


def described(
    vfs: Vfs,
    root: str,
    namespace: str,
    is_stopping: Callable[[], bool],
    *,
    is_mounted: bool = False,
) -> list[Described]:
    """Describe namespaces, the last used first: the own one alone if it has chunks.

    Args:
        vfs: makes the system calls.
        root: where they are.
        namespace: the own one.
        is_stopping: whether to return early, with what is known by then.
        is_mounted: whether looks are slow, and times of folders tell nothing: the order is any.
    """
    own = namespace_digest(namespace).hex()
    until_s = time.monotonic() + LONGEST_S
    found = [Described(namespace, {}, *_measure(vfs, f"{root}/{own}", is_mounted), used_s=0.0)]
    if found[0].chunks:
        return found
    now_s, folders = time.time(), _folders(vfs, root)
    some = islice(folders, MOST_DESCRIBED)
    for mtime_s, folder in some if is_mounted else heapq.nlargest(MOST_DESCRIBED, folders):
        if is_stopping() or time.monotonic() > until_s:
            break
        if folder != own:
            path, used_s = f"{root}/{folder}", None if is_mounted else now_s - mtime_s
            told = manifest.read(vfs, path)
            name, facts = manifest.name_in(told, folder), manifest.facts_in(told)
            found.append(Described(name, facts, *_measure(vfs, path, is_mounted), used_s))
    return found


def _folders(vfs: Vfs, root: str) -> Iterator[tuple[float, str]]:
    """Yield folders, and when each was touched: an engine that runs touches its own at times."""
    for folder in islice(filter(is_namespace, vfs.listdir(root)), MOST_FOLDERS):
        try:
            facts = vfs.lstat(f"{root}/{folder}")
        except OSError:  # gone meanwhile
            continue
        if stat.S_ISDIR(facts.st_mode):
            yield facts.st_mtime, folder


def _measure(vfs: Vfs, folder: str, is_mounted: bool) -> tuple[int, int]:
    """Estimate chunks and bytes of a namespace from its first shards; exact for a small one.

    A mount need not tell how many blocks a file has.
    """
    chunks = num_bytes = 0
    share = 1.0
    for shard in walk(vfs, folder):
        chunks += len(shard.chunks)
        sizes = (each.st_size if is_mounted else each.st_blocks * 512 for _, each in shard.chunks)
        num_bytes += sum(sizes)
        if chunks >= _SAMPLE:
            share = len(SHARDS) / (1 + SHARDS.index(shard.name))
            break
    slots = [(each.num_used, each.slot_bytes) for each in segments_in(Descriptors(vfs), folder)]
    chunks = round(chunks * share) + sum(used for used, _ in slots)
    return chunks, round(num_bytes * share) + sum(used * size for used, size in slots)
