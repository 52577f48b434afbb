"""Removing whole namespaces while other processes may still be using them."""

import threading
from collections.abc import Iterable

from kvoffload.backends.disk.index import name_of
from kvoffload.backends.disk.paths import SHARDS, key_of, remove_namespace
from kvoffload.backends.disk.store import DiskStore

_STEP = 64
_PAUSE_S = 0.001
"""After every step: a device and an interpreter with better things to do get to do them."""


def purge(keeper: DiskStore, namespaces: Iterable[str], stopping: threading.Event) -> int:
    """Remove all chunks of these namespace folders and then the folders; return how many chunks.

    File by file, each booked in the ledger, so that whoever counts meanwhile counts right. A folder
    into which somebody goes on storing stays, with what it holds then.
    """
    removed = 0
    namespaces = list(namespaces)
    keeper.follow(namespaces)
    for namespace in filter(keeper.namespaces.__contains__, namespaces):
        number = keeper.namespaces.index(namespace)
        for shard in SHARDS:
            try:
                names = keeper.vfs.listdir(f"{keeper.root}/{namespace}/{shard}")
            except OSError:
                continue
            for key in filter(None, map(key_of, names)):
                if stopping.is_set():
                    return removed
                removed += keeper.discard(name_of(number, key), "purged")
                if removed % _STEP == 0:
                    stopping.wait(_PAUSE_S)
        remove_namespace(keeper.vfs, f"{keeper.root}/{namespace}")
    return removed
