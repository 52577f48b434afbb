"""The housekeeping thread of one disk backend: scans, eviction, expiry, snapshots."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvoffload.backends.disk.quarantine import QUARANTINE_S
from kvoffload.backends.disk.scanner import Scanner
from kvoffload.backends.disk.space import Reservation
from kvoffload.backends.disk.store import DiskStore
from kvoffload.backends.log_rate import LASTING_S, Throttle
from kvoffload.config import human_bytes
from kvoffload.identity import short

log = logging.getLogger(__name__)

_TICK_S = 1.0
_RETRY_S = 5.0
"""Between full scans that fail, or of which none is exact because other processes always write."""
_ALONE_SCAN_S = 60.0
"""Between scans of the only process: nothing but a person with a shell changes files."""
_SNAPSHOT_S = 60.0
_RECOUNT_S = 600.0
"""Between full scans. Crashes can leave the quota too high by what was in flight, and some file
systems allocate after a write."""
_REST, _WANTED_REST, _RECOUNT_REST = 20, 3, 100
"""Pauses after a scan are at least so many times its length: while stores lack victims, shorter."""
_EXPIRY_SHARE = 0.01
"""An expired chunk stays for this part of the time to live at most, within the next limits."""
_LEAST_EXPIRY_S, _MOST_EXPIRY_S = 1.0, 60.0


class Housekeeper:
    """Does in the background what no caller should wait for."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._unused = deque[Reservation]()
        """Room to release that no store used."""
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._failures = Throttle(log, LASTING_S)
        self._scanner = Scanner(store, self._stop.is_set)
        self._is_exact = store.ready.is_set()
        """Whether the quota agreed with the folders at the last full scan."""
        self._has_order = store.ready.is_set()
        """Whether the index has an order, which access times must not replace."""
        now = time.monotonic()
        self._scan_at = now + _TICK_S
        self._wanted_scan_at = 0.0
        """The earliest scan for want of victims."""
        self._recount_at = now + _RECOUNT_S
        self._is_recount = False
        self._save_at = now + _SNAPSHOT_S
        self._expire_at = 0.0
        self._saved_changes = store.root.quota.changes
        self._repairs = 0
        self._others = 0
        """Other writers at the last tick."""
        self._thread = threading.Thread(target=self._run, name="kvoffload-disk", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Evict if need be: a chunk was written."""
        self._wake.set()

    def release(self, reservation: Reservation) -> None:
        """Release room that no store used."""
        self._unused.append(reservation)
        self._wake.set()

    def stop(self) -> None:
        """Let the thread end soon, and with it the right to evict."""
        self._stop.set()
        self._wake.set()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def close(self, timeout_s: float) -> bool:
        """Stop the thread and save the snapshot; return False if the thread is stuck."""
        self.stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._release_unused()
        self._store.record_use()
        self._scanner.save_snapshot()
        return True

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            # Held on, it would keep every other store of the root from evicting.
            self._store.space.end_evicting()

    def _serve(self) -> None:
        self._guarded(self._store.root.clean_up)
        if not self._store.ready.is_set():
            self._guarded(self._scanner.load_snapshot)
            self._guarded(self._first_scan)
            self._store.ready.set()
            self._guarded(self._say_whose)
        next_tick = 0.0
        while not self._stop.is_set():
            self._guarded(self._release_unused)
            self._guarded(self._evict)
            if (now := time.monotonic()) >= next_tick:
                next_tick = now + _TICK_S
                self._guarded(self._tick)
            wake_at = next_tick
            if self._store.space.lacks_victims.is_set():
                if time.monotonic() >= self._wanted_scan_at:
                    self._guarded(self._find_victims)
                    continue
                wake_at = min(wake_at, self._wanted_scan_at)
            self._wake.wait(max(0.0, wake_at - time.monotonic()))
            self._wake.clear()

    def _guarded(self, step: Callable[[], object]) -> None:
        """Run one step; an error in it must not end the thread that keeps the folder bounded."""
        try:
            step()
        except Exception as error:
            self._store.count("housekeeping_failed")
            text, is_own = "disk %s: housekeeping failed: %s", not isinstance(error, OSError)
            kind = type(error).__name__, getattr(error, "errno", None)
            self._failures.warning(text, self._store.path, error, kind=kind, traceback=is_own)

    def _first_scan(self) -> None:
        self._is_exact = self._scanner.scan(full=True, by_age=True)
        self._has_order = True

    def _say_whose(self) -> None:
        """Log what the root holds that this engine does not use, as after an upgrade."""
        if self._store.root.evictor.held and len(self._store.namespaces) == 1:
            return
        own_bytes = self._store.index.own_bytes()
        other_bytes = self._store.root.quota.resident_bytes - own_bytes
        if other_bytes > 0:
            log.info(
                "disk: %s holds %s of this namespace, %s, and %s of other ones, which leave when "
                "room is needed; kvoffload inspect lists them",
                self._store.path,
                human_bytes(own_bytes),
                short(self._store.namespace),
                human_bytes(other_bytes),
            )

    def _release_unused(self) -> None:
        while self._unused:
            self._unused.popleft().close()

    def _evict(self) -> None:
        root, space = self._store.root, self._store.space
        if root.evictor.held and root.quota.resident_bytes > root.limits.high_bytes:
            # One by one: a store that finds room need not wait for the whole eviction.
            while root.quota.resident_bytes > root.limits.low_bytes:
                if self._stop.is_set() or not space.evict_one():
                    break

    def _find_victims(self) -> None:
        """Scan at once: other processes may have stored chunks that this one can evict."""
        self._store.space.lacks_victims.clear()
        self._take_over()
        if self._store.root.evictor.held:
            self._scan()
            if not self._store.index.has_victims:
                # No chunk could leave: the quota is wrong, or files cannot be removed.
                self._is_exact = False
                self._scan()

    def _tick(self) -> None:
        store, root = self._store, self._store.root
        store.files.forget_shards()
        root.maintain()
        if root.repairs != self._repairs:
            # Index and quota still count what was removed.
            self._repairs = root.repairs
            self._recount_now()
        self._take_over()
        root.clean_up()
        store.segments.clean_up()
        if root.other_writers != self._others:
            # Alone, the next scan may be a minute away; and what the last of them stored is there.
            self._others, self._scan_at = root.other_writers, 0.0
        store.record_use()
        if root.quota.refresh() is None and root.evictor.held:
            self._recount_now()  # damaged: it refuses all stores until a full scan
        self._store.space.keep_free(self._stop.is_set)
        now = time.monotonic()
        if now >= self._recount_at and self._is_exact:
            self._recount_now()
            self._is_recount = True
        if now >= self._scan_at:
            self._scan()
        if now >= self._expire_at:
            self._expire_at = now + self.expiry_period_s()
            self.expire()
        if now >= self._save_at and root.quota.changes != self._saved_changes:
            self._saved_changes = root.quota.changes
            self._save_at = now + _SNAPSHOT_S
            self._scanner.save_snapshot()

    def _take_over(self) -> None:
        """Evict from now on, if no other process does."""
        evictor = self._store.root.evictor
        if not evictor.held and evictor.take():
            # The last evictor ended: its figure may be off, and its index is gone.
            self._has_order = False
            self._recount_now()

    def _recount_now(self) -> None:
        self._is_exact = False
        self._scan_at = 0.0

    def _scan(self) -> None:
        began, is_full, root = time.monotonic(), not self._is_exact, self._store.root
        self._scan_at = self._wanted_scan_at = began + _RETRY_S  # if the scan fails
        is_exact = self._scanner.scan(full=is_full, by_age=not self._has_order)
        self._has_order = True
        now = time.monotonic()
        took = now - began
        if is_full:
            self._recount_at = now + max(_RECOUNT_S, took * _RECOUNT_REST)
        # Under constant writes no count is exact: accept one within the limits.
        self._is_exact = self._is_exact or is_exact or self._is_recount
        self._is_recount = False
        if not is_full and self._scanner.vanished and root.evictor.held:
            # A person removed files, and the quota still counts them.
            self._is_exact = False
            pause_s = _TICK_S
        elif not self._is_exact:
            pause_s = _RETRY_S if is_full else _TICK_S
        else:
            pause_s = _TICK_S if root.other_writers else _ALONE_SCAN_S
        self._scan_at = now + max(pause_s, took * _REST)
        self._wanted_scan_at = now + took * _WANTED_REST

    def expire(self) -> None:
        """Remove expired chunks if this process evicts; forget the times of removed ones."""
        store = self._store
        overdue = store.uses.overdue()
        store.index.note(overdue)
        for name in overdue:
            if self._stop.is_set():
                return
            if name not in store.index and not store.index.is_hidden(name):
                store.uses.forget(name)
            elif store.root.evictor.held and not store.is_fresh(name):
                store.discard(name, "expired")
        if store.root.evictor.held:
            store.trim_quarantine()

    def expiry_period_s(self) -> float:
        """Return how long to wait between searches for expired chunks."""
        ttl_s = self._store.root.limits.ttl_s or QUARANTINE_S
        return min(_MOST_EXPIRY_S, max(_LEAST_EXPIRY_S, ttl_s * _EXPIRY_SHARE))
