"""The housekeeping thread of one disk backend: first look, eviction, polling, snapshots."""

import logging
import threading
import time
from collections.abc import Callable

from kvoffload.backends.disk.expiry import expire, pause_s
from kvoffload.backends.disk.locks import clean_up
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.backends.disk.store import DiskStore

log = logging.getLogger(__name__)

_TICK_S = 1.0
_ALONE_LOOK_S = 60.0
"""Between looks when no other process writes: only people with a shell change anything then."""
_SNAPSHOT_S = 60.0
_RECOUNT_S = 600.0
"""Between counts of everything. Whoever is killed, or stores what another evicts in the same
microseconds, leaves the shared figure a chunk off; some file systems allocate after the write."""
_RECOUNT_SHARE = 0.01
_LOOK_SHARE = 0.05
"""Looking at the folders takes at most this part of the thread's time..."""
_WANTED_LOOK_SHARE = 0.25
"""...and this part while stores are refused for want of something to evict."""


class Housekeeper:
    """Does in the background whatever no caller should wait for."""

    def __init__(self, keeper: DiskStore) -> None:
        self._keeper = keeper
        self._stop = threading.Event()
        self._scanner = Scanner(keeper, self._stop.is_set)
        self._wake = threading.Event()
        self._settled = keeper.ready.is_set()
        """Whether the ledger agrees with the folders, as of the last full look."""
        self._in_order = keeper.ready.is_set()
        """Whether the index has an order of its own, which access times are not to replace."""
        self._pause_s = _TICK_S
        self._look_at = time.monotonic() + _TICK_S
        self._recount_at = time.monotonic() + _RECOUNT_S
        self._recounting = False
        self._may_look_at = 0.0
        """Not even for want of victims before this."""
        self._save_at = time.monotonic() + _SNAPSHOT_S
        self._expire_at = 0.0
        self._saved_changes = keeper.ledger.changes
        self._remakes = 0
        self._thread = threading.Thread(target=self._run, name="kvoffload-disk", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something was written: there may be something to evict."""
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        """Stop the thread, write down what a next start can use; False: it is stuck."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._keeper.record_use()
        self._scanner.remember()
        return True

    def _run(self) -> None:
        self._guarded(self._clean)
        if not self._keeper.ready.is_set():
            self._guarded(self._scanner.recall)
            self._guarded(self._first_look)
            self._keeper.ready.set()
        next_tick = 0.0
        while not self._stop.is_set():
            self._guarded(self._evict)
            if (now := time.monotonic()) >= next_tick:
                next_tick = now + _TICK_S
                self._guarded(self._tick)
            wake_at = next_tick
            if self._keeper.lacks_victims.is_set():
                if time.monotonic() >= self._may_look_at:
                    self._guarded(self._find_victims)
                    continue
                wake_at = min(wake_at, self._may_look_at)
            self._wake.wait(max(0.0, wake_at - time.monotonic()))
            self._wake.clear()

    def _guarded(self, step: Callable[[], object]) -> None:
        """Run one step; a bug in it must not end the thread that keeps the folder bounded."""
        try:
            step()
        except OSError as error:
            self._keeper.count("housekeeping_failed")
            log.warning("disk %s: housekeeping failed: %s", self._keeper.root, error)
        except Exception:
            self._keeper.count("housekeeping_failed")
            log.exception("disk %s: housekeeping failed", self._keeper.root)

    def _first_look(self) -> None:
        self._settled = self._scanner.look(full=True, afresh=True)
        self._in_order = True

    def _evict(self) -> None:
        keeper = self._keeper
        if keeper.ownership.held and keeper.ledger.resident_bytes > keeper.bounds.high_bytes:
            # One by one, so that stores for which there is room need not wait for all.
            while keeper.ledger.resident_bytes > keeper.bounds.low_bytes:
                if self._stop.is_set() or not keeper.evict_one():
                    break

    def _find_victims(self) -> None:
        """Look now: what is stored fast by others is not to wait for a look that comes in time."""
        self._keeper.lacks_victims.clear()
        if self._keeper.ownership.held:
            self._look()
            if not self._keeper.index.has_victims:
                # Nothing is there that could leave: the figure is wrong, or nothing can be removed.
                self._settled = False
                self._look()

    def _tick(self) -> None:
        keeper = self._keeper
        keeper.shards.forget()
        keeper.hold.keep()
        if keeper.hold.remakes != self._remakes:
            # By whoever noticed first. Index and ledger still tell of what was removed.
            self._remakes = keeper.hold.remakes
            self._settled = False
            self._look_at = 0.0
        self._clean()
        keeper.record_use()
        if keeper.ledger.refresh() is None and keeper.ownership.held:
            # Damaged: writes are refused until a look at everything has set it right.
            self._settled = False
            self._look_at = 0.0
        if not keeper.ownership.held and keeper.ownership.take():
            # The last owner died or closed: its figures may be off and its index is gone.
            self._settled = self._in_order = False
            self._look_at = 0.0
        now = time.monotonic()
        if now >= self._recount_at and self._settled:
            self._settled, self._recounting = False, True
            self._look_at = 0.0
        if now >= self._look_at:
            self._look()
        if now >= self._expire_at:
            self._expire_at = now + pause_s(keeper)
            expire(keeper, self._stop.is_set)
        if now >= self._save_at and keeper.ledger.changes != self._saved_changes:
            self._saved_changes = keeper.ledger.changes
            self._save_at = now + _SNAPSHOT_S
            self._scanner.remember()

    def _look(self) -> None:
        began, full = time.monotonic(), not self._settled
        settled = self._scanner.look(full=full, afresh=not self._in_order)
        self._in_order = True
        took = time.monotonic() - began
        if full:
            self._recount_at = time.monotonic() + max(_RECOUNT_S, took / _RECOUNT_SHARE)
        # Where somebody always writes no count is exact: one within limits will do until the next.
        settled, self._recounting = settled or self._recounting, False
        if settled or self._settled:
            self._pause_s = _TICK_S
        else:
            self._pause_s = min(_ALONE_LOOK_S, self._pause_s * 2)
        self._settled = self._settled or settled
        if not full and self._scanner.vanished and self._keeper.ownership.held:
            # Nobody else evicts: a person removed files, and the figure still counts them.
            self._settled = False
        alone = self._settled and not self._keeper.others
        pause_s = _ALONE_LOOK_S if alone else max(self._pause_s, took / _LOOK_SHARE)
        self._look_at = time.monotonic() + pause_s
        self._may_look_at = time.monotonic() + took / _WANTED_LOOK_SHARE

    def _clean(self) -> None:
        """Remove what dead writers left, and see how many live."""
        keeper = self._keeper
        keeper.others, freed = clean_up(keeper.vfs, keeper.root, keeper.writer.token)
        if freed:
            keeper.ledger.give_back(freed)
