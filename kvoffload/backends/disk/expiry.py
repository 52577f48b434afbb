"""Chunks leave when nothing has used them for ``ttl_s``; damaged files after a week at most."""

from collections.abc import Callable

from kvoffload.backends.disk.index import Name
from kvoffload.backends.disk.quarantine import QUARANTINE_S, trim
from kvoffload.backends.disk.store import DiskStore

_SHARE = 0.01
"""Of the time to live: how late an expired chunk may leave..."""
_LEAST_S, _MOST_S = 1.0, 60.0
"""...within these limits."""


def is_fresh(keeper: DiskStore, name: Name) -> bool:
    """Whether a chunk has not expired; asks the file where this process knows of no late use."""
    if keeper.uses.is_fresh(name):
        return True
    try:
        keeper.uses.seen([(name, keeper.vfs.lstat(keeper.path(name)).st_atime_ns)])
    except OSError:
        return False
    return keeper.uses.is_fresh(name)


def expire(keeper: DiskStore, stopping: Callable[[], bool]) -> None:
    """Remove what has expired, if this is the process that evicts; forget what is gone."""
    for name in keeper.uses.overdue():
        if stopping():
            return
        if name not in keeper.index and not keeper.index.hides(name):
            keeper.uses.forget(name)
        elif keeper.ownership.held and not is_fresh(keeper, name):
            keeper.discard(name, "expired")
    if keeper.ownership.held:
        trim(keeper.vfs, keeper.root, keeper.bounds, keeper.unlink)


def pause_s(keeper: DiskStore) -> float:
    """How long until the next look for what has expired."""
    ttl_s = keeper.bounds.ttl_s or QUARANTINE_S
    return min(_MOST_S, max(_LEAST_S, ttl_s * _SHARE))
