"""Looking at the folders: what is there, what others wrote, what has vanished."""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator

from kvoffload.backends.disk.index import Name, name_of, split_name
from kvoffload.backends.disk.locks import temporary_bytes
from kvoffload.backends.disk.paths import (
    QUARANTINE,
    SHARDS,
    SNAPSHOT,
    is_namespace,
    key_of,
    remove_namespace,
    shard_of,
)
from kvoffload.backends.disk.root import ABANDONED_S
from kvoffload.backends.disk.snapshot import load, save
from kvoffload.backends.disk.store import DiskStore

log = logging.getLogger(__name__)

_UNBEGUN = 16
"""Chunks that a writer may have reserved at a time; more than its usual threads."""
_CLOCK_STEP_NS = 1_000_000_000
"""More than any file system's resolution of modification times."""


class Scanner:
    """Keeps a keeper's index in agreement with the folders. Used by the housekeeping thread."""

    def __init__(self, keeper: DiskStore, stopping: Callable[[], bool] = lambda: False) -> None:
        self._keeper = keeper
        self._stopping = stopping
        self._mtimes: dict[tuple[int, str], int] = {}
        self.vanished = 0
        """How many chunks the last look missed that were known."""
        self._complete = True
        """Whether the look under way has seen everything so far."""

    def recall(self) -> None:
        """Believe the snapshot, until a look at the folders."""
        path = f"{self._keeper.folder(0)}/{SNAPSHOT}"
        sizes = load(self._keeper.vfs, path)
        self._keeper.index.found((name_of(0, key), allocated) for key, allocated in sizes)

    def remember(self) -> None:
        """Write the snapshot for the next start."""
        keeper = self._keeper
        everything = keeper.index.sizes()
        split = ((*split_name(name), allocated) for name, allocated in everything)
        sizes = [(key, allocated) for number, key, allocated in split if number == 0]
        try:
            unfinished = keeper.writer.temporary(booked=False)
            save(keeper.vfs, f"{keeper.folder(0)}/{SNAPSHOT}", unfinished, sizes)
        except OSError as error:
            keeper.count("snapshot_failed")
            log.warning("disk %s: no snapshot: %s", keeper.root, error)

    def look(self, *, full: bool, afresh: bool = False) -> bool:
        """Compare the index with the folders.

        A full look takes in every file with its size and age. The owner's also sets the ledger
        right; False says that others were writing meanwhile and it has to be repeated for that.
        ``afresh``: the index has no order worth keeping; take the ages of the files for it.
        """
        self._keeper.index.watch(True)
        try:
            return self._look(full=full, afresh=afresh)
        finally:
            self._keeper.index.watch(False)

    def _look(self, *, full: bool, afresh: bool) -> bool:
        keeper = self._keeper
        self._complete = True
        self.vanished = 0
        if keeper.ownership.held:
            self._follow_all()
        moving_bytes = self._moving_bytes() if full else 0
        undisturbed = keeper.ledger.changes if keeper.ledger.refresh() is not None else None
        found: list[tuple[int, Name, int]] = []
        looked_at: set[tuple[int, str]] = set()
        present: set[Name] = set()
        for number, shard, files in self._listings(full=full):
            looked_at.add((number, shard))
            present.update(name for _, name, _ in files)
            found += files if full else [file for file in files if file[1] not in keeper.index]
        if self._stopping():
            return False
        found.sort()
        keeper.uses.seen((name, used_ns) for used_ns, name, _ in found)
        keeper.index.found(
            (name, allocated) for _, name, allocated in found if afresh or name not in keeper.index
        )
        if full:
            keeper.index.measured((name, allocated) for _, name, allocated in found)
        self._forget_vanished(None if full else looked_at, present)
        if not (full and keeper.ownership.held):
            return True
        keeper.horizon_ns = found[0][0] if found else time.time_ns()
        self._remove_abandoned({split_name(name)[0] for _, name, _ in found})
        left = keeper.index.has_left
        chunk_bytes = sum(allocated for _, name, allocated in found if not left(name))
        # A look may have seen nothing, and a chunk may have been stored since.
        largest = max((allocated for _, _, allocated in found), default=0)
        largest = max(largest, keeper.largest_bytes)
        return self._settle(chunk_bytes, moving_bytes, undisturbed, largest)

    def _remove_abandoned(self, in_use: set[int]) -> None:
        """Remove folders of namespaces long empty, which nobody alive has touched either."""
        keeper = self._keeper
        for number in range(1, len(keeper.namespaces)):
            with contextlib.suppress(OSError):
                folder = keeper.folder(number)
                age_s = time.time() - keeper.vfs.lstat(folder).st_mtime
                if number not in in_use and age_s > ABANDONED_S:
                    remove_namespace(keeper.vfs, folder)

    def _settle(
        self, chunk_bytes: int, moving_bytes: int, undisturbed: int | None, largest: int
    ) -> bool:
        """Set the ledger right: exactly if nothing moved during the look, else within limits.

        What was seen and did not leave is there. What was not seen is at most one chunk for each
        change of the ledger since, and what writers have reserved and not begun to write.
        """
        keeper = self._keeper
        folder = f"{keeper.root}/{QUARANTINE}"
        total = chunk_bytes
        try:
            for file in keeper.vfs.listdir(folder):
                total += keeper.vfs.lstat(f"{folder}/{file}").st_blocks * 512
        except OSError as error:
            self._missed(error)
        still = self._complete and not moving_bytes and undisturbed is not None
        if still and keeper.ledger.settle(total, undisturbed, lambda: not self._moving_bytes()):
            return True
        resident = keeper.ledger.refresh()
        if resident is None and self._complete:
            keeper.ledger.settle(total + moving_bytes)
        elif resident is not None and resident < total:
            keeper.ledger.give_back(resident - total)
        elif resident is not None and undisturbed is not None and self._complete and largest:
            unseen = keeper.ledger.changes - undisturbed + _UNBEGUN * (keeper.others + 1)
            if (excess := resident - total - moving_bytes - unseen * largest) > 0:
                keeper.ledger.give_back(excess)
        return False

    def _moving_bytes(self) -> int:
        """Bytes of files on their way in or out, here and in other processes."""
        keeper = self._keeper
        try:
            others = temporary_bytes(keeper.vfs, keeper.root, keeper.writer.token)
        except OSError as error:
            self._missed(error)
            others = 0
        return keeper.bytes_under_way + others

    def _follow_all(self) -> None:
        """The owner evicts in every namespace, so it has to know them all."""
        keeper = self._keeper
        try:
            keeper.follow(filter(is_namespace, keeper.vfs.listdir(keeper.root)))
        except OSError as error:
            self._missed(error)

    def _missed(self, error: OSError) -> None:
        """Note that something may be there that this look did not see."""
        if not isinstance(error, FileNotFoundError):
            self._complete = False
            self._keeper.count("look_failed")
            log.warning("disk: %s", error)

    def _listings(self, *, full: bool) -> Iterator[tuple[int, str, list[tuple[int, Name, int]]]]:
        """Files of each shard folder: last use, name, bytes; unchanged folders only if full."""
        vfs = self._keeper.vfs
        for number in range(len(self._keeper.namespaces)):
            prefix = name_of(number, b"")
            there = self._is_there(number)
            for shard in SHARDS:
                if self._stopping():
                    return
                if not there:
                    if self._mtimes.pop((number, shard), None) is not None:
                        yield number, shard, []
                    continue
                folder = f"{self._keeper.folder(number)}/{shard}"
                try:
                    facts = vfs.lstat(folder)
                    if not stat.S_ISDIR(facts.st_mode):
                        yield number, shard, []  # it gives way at its next use
                        continue
                    mtime_ns = facts.st_mtime_ns
                    if not full and self._mtimes.get((number, shard)) == mtime_ns:
                        continue
                    listed = vfs.listfacts(folder)
                except FileNotFoundError:
                    self._mtimes.pop((number, shard), None)
                    yield number, shard, []  # never made, or somebody removed it
                    continue
                except OSError as error:
                    self._missed(error)
                    continue
                # Within one step of the clock a folder may change again and look the same.
                settled = time.time_ns() - mtime_ns > _CLOCK_STEP_NS
                self._mtimes[number, shard] = mtime_ns if settled else -1
                files = [
                    (facts.st_atime_ns, prefix + key, facts.st_blocks * 512)
                    for name, facts in listed
                    if (key := key_of(name)) is not None and shard_of(key) == shard
                ]
                yield number, shard, files

    def _is_there(self, number: int) -> bool:
        """Whether a namespace has a folder still: removed ones keep their numbers."""
        try:
            return stat.S_ISDIR(self._keeper.vfs.lstat(self._keeper.folder(number)).st_mode)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _forget_vanished(self, shards: set[tuple[int, str]] | None, present: set[Name]) -> None:
        """Drop names whose file is gone, in these shards (None: in all)."""
        keeper = self._keeper
        for name, _ in keeper.index.sizes() if shards is None or shards else ():
            if name in present:
                continue
            path = keeper.path(name)
            place = split_name(name)[0], os.path.basename(os.path.dirname(path))
            if shards is not None and place not in shards:
                continue
            try:
                keeper.vfs.lstat(path)  # it may have been published since the folder was listed
            except FileNotFoundError:
                keeper.left(name, "vanished")
                self.vanished += 1
            except OSError:
                continue
