"""Evicts the least recently used files of all hosts, and sets each process a limit.

One process at a time does so. If two do for a moment, chunks leave too early: that costs hits.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping

from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder.order import ByTenant, ByUse, Order
from kvoffload.backends.folder.records import HostRecord, LeaseRecord, Records
from kvoffload.backends.folder.room import Room
from kvoffload.backends.folder.scan import LEFTOVER_S, OldFile, Scan

log = logging.getLogger(__name__)

DEAD_S, SURELY_S = 20.0, 3.0
"""The process of an older record has ended, or hangs, if the record is as old a while later. After
a pause of the server all records look old at first."""
LEAST_FREE, FREED = 0.05, 0.10
"""Shares of the capacity: eviction begins below the first, and ends at the second."""
_NEWCOMER = 0.02
"""Share of the capacity that one process may store before it is counted, at most."""
_OF_A_FULL_MOUNT = 0.03
"""Share of the stored bytes to evict when the mount is full although the capacity is not."""
_FULL_AGAIN_S = 10.0
"""Until then more failures evict nothing, unless that room was used: some servers free it later.
GlusterFS looks each five seconds whether there is any."""
_TURN_S, _BEHIND_S = 1.0, 0.2
"""Time of a turn for eviction, and for a scan that eviction does not wait for yet."""
_SCAN_SHARE = 0.1
"""Scans that nothing waits for take at most this part of the time."""


class Evictor:
    """The evictor's knowledge. Used by one thread.

    Args:
        vfs: makes the system calls.
        root: where.
        records: of the root.
        capacity_bytes: of all files.
        evicted: called with the namespace's folder and the key of each chunk that left.
        room: of this process, whose stores a scan counts once.
        tenant_share: of the capacity, above which a tenant's own chunks leave first.
    """

    def __init__(
        self,
        vfs: Vfs,
        root: str,
        records: Records,
        capacity_bytes: int,
        evicted: Callable[[str, bytes], None],
        room: Room,
        tenant_share: float,
    ) -> None:
        self._vfs = vfs
        self._root = root
        self._records = records
        self._capacity_bytes = capacity_bytes
        self._room = room
        self._of_newcomer = int(capacity_bytes * _NEWCOMER)
        self._evicted = evicted
        self.resident_bytes: int | None = None
        """Bytes of files, as far as their writers have told; None before the first scan."""
        self.counted: dict[str, int] = {}
        """By token: what each process of which there is a record had stored when it was counted."""
        self.limits: dict[str, int] = {}
        """By token: up to which of its stored bytes each process may store."""
        self.newcomer_bytes = 0
        """What a process may store that is not counted yet."""
        self.raised_s = -math.inf
        """When a process last got a higher limit: it may soon wait for the next one."""
        self._out_of_space: dict[str, int] = {}
        self._full_bytes, self._full_again_s = 0, -math.inf
        """Until when failures on a full mount evict no more while fewer bytes are stored."""
        self._alive: dict[str, HostRecord] = {}
        """The records of the last turn, without those of processes that have ended."""
        self._silent_s: dict[str, float] = {}
        """When the record of each silent process was first seen to be too old."""
        self.unsure_bytes = 0
        """What dead processes may have stored and not told, until a scan has counted it."""
        has_shares = tenant_share < 1
        self._oldest: Order = ByTenant(vfs, tenant_share, capacity_bytes) if has_shares else ByUse()
        self._few = 0
        """With so few of them left, a scan for the next ones begins."""
        self._goal_bytes: int | None = None
        """Eviction goes on, over several turns, until no more bytes are left."""
        self._scan: Scan | None = None
        self._scan_due_s, self._scan_again_s = 0.0, math.inf
        self._awaited_scan_due_s = 0.0
        """When the next scan may begin if an eviction has no file left; it takes half of the time
        at most."""
        self._unscanned_bytes = 0
        """What processes have told to have stored since the last scan."""
        self.scans = 0

    def begin(self, lease: LeaseRecord | None, *, is_new: bool) -> None:
        """Take over from the last evictor, as its lease tells; ``is_new``: the root is empty."""
        self._oldest.clear()
        self._scan, self._goal_bytes = None, None
        self._alive = {}
        # What the last evictor saw unfinished is to be seen again when it is old.
        self._scan_due_s = self._awaited_scan_due_s = 0.0
        self._scan_again_s = time.monotonic() + LEFTOVER_S
        if self._oldest.tags is not None:
            self._scan_again_s = 0.0  # whose the files are takes a while to read
        self.resident_bytes, self.counted = 0 if is_new else None, {}
        self.limits, self.unsure_bytes = {}, 0
        self._out_of_space, self._full_bytes = {}, 0
        if lease is not None and lease.resident_bytes is not None:
            self.resident_bytes, self.counted = lease.resident_bytes, dict(lease.counted)
            self.limits, self.unsure_bytes = dict(lease.limits), lease.unsure_bytes

    def turn(self, hosts: Mapping[str, tuple[HostRecord, float]], *, is_full: bool = False) -> None:
        """Count what the processes stored, evict if there is need, and share what is free.

        ``is_full``: the mount is full, although this process could not write that down.
        """
        until_s = time.monotonic() + _TURN_S
        if self.resident_bytes is None:
            self._advance(until_s, may_read=False)
        if self.resident_bytes is None:
            return
        # A listing may miss a record that is replaced just then: so does GlusterFS.
        hosts = {**{token: (host, math.inf) for token, host in self._alive.items()}, **hosts}
        self.resident_bytes = self._count(self.resident_bytes, hosts)
        shares = max(1, len(self._alive))
        largest = max((host.largest_bytes for host, _ in hosts.values()), default=0)
        # Of a few large chunks each host needs one whole, besides what a newcomer may store.
        least = max(int(self._capacity_bytes * LEAST_FREE), shares * largest + self._of_newcomer)
        wanted = max(int(self._capacity_bytes * FREED), least + shares * largest)
        surplus = self._surplus(hosts, is_full=is_full)
        if self._free_bytes < least or surplus:
            if self._goal_bytes is None and self._oldest.tags is not None:
                self._scan_due_s = 0.0  # what does each tenant have by now?
                with contextlib.suppress(OSError):  # what is known has to do
                    self._advance(until_s)
            wanted = min(wanted, self._capacity_bytes // 2)
            self._goal_bytes = min(self._capacity_bytes - wanted, self.resident_bytes - surplus)
        self._evict(until_s)
        is_wanted = self.unsure_bytes > 0 or time.monotonic() > self._scan_again_s
        if self._oldest.tags is not None:  # else many would be unread when an eviction begins
            is_wanted |= self._unscanned_bytes > self._capacity_bytes * LEAST_FREE
        # A slow mount takes seconds to list even a small folder: nothing is evicted meanwhile.
        is_wanted |= not self._oldest and self._free_bytes < self._capacity_bytes // 2
        if self._scan is not None or is_wanted or len(self._oldest) < self._few:
            self._advance(time.monotonic() + _BEHIND_S)
        self._set_limits(shares, largest)

    @property
    def _free_bytes(self) -> int:
        return self._capacity_bytes - (self.resident_bytes or 0)

    def _count(self, resident: int, hosts: Mapping[str, tuple[HostRecord, float]]) -> int:
        """Return the resident bytes with what each process stored since it was counted last.

        A process that died may have stored up to its limit, and told nothing of it. If it
        only hung, its record comes back, with bytes that a scan has counted meanwhile.
        """
        silent = {token for token, (_, age_s) in hosts.items() if age_s > DEAD_S}
        now_s = time.monotonic()
        self._silent_s = {token: self._silent_s.get(token, now_s) for token in silent}
        self._alive, counted = {}, {}
        for token, (host, age_s) in hosts.items():
            # What a process took back, because it could not be written, a scan finds free.
            known = self.counted.get(token, max(0, host.stored_bytes - self._of_newcomer))
            more = max(0, host.stored_bytes - known)
            resident += more
            self._unscanned_bytes += more
            counted[token] = host.stored_bytes
            patience_s = SURELY_S if age_s < math.inf else DEAD_S
            is_dead = token in silent and now_s - self._silent_s[token] > patience_s
            if is_dead and not host.is_closed:
                self.unsure_bytes += self._reserved(token, host)
            if is_dead or host.is_closed:
                self._records.remove_host(token)
            else:
                self._alive[token] = host
        self.counted = counted
        return resident

    def _reserved(self, token: str, host: HostRecord) -> int:
        """Return what a process may store beyond what is counted of it, by any lease it knows."""
        limit = max(self.limits.get(token, 0), host.limit_bytes)
        return max(0, limit - host.stored_bytes)

    def _set_limits(self, shares: int, largest: int) -> None:
        """Give each process a share of what is free and not reserved.

        What is reserved for a process stays so until its record shows that it knows of a lower
        limit. So all that may be stored and all that is stored never exceed the capacity.
        """
        alive = self._alive
        reserved = {token: self._reserved(token, host) for token, host in alive.items()}
        free = max(0, self._free_bytes - self.unsure_bytes)
        self.newcomer_bytes = min(free // (shares + 1), self._of_newcomer)
        share = (free - self.newcomer_bytes) // shares
        free = max(0, free - self.newcomer_bytes - sum(reserved.values()))
        self.limits = {token: self.limits.get(token, 0) for token in reserved}
        enough = max(share * 3 // 4, min(largest, share))
        short = sorted(token for token, left in reserved.items() if left < enough)
        for number, token in enumerate(short):
            more = min(share - reserved[token], free // (len(short) - number))
            free -= more
            if more:
                self.raised_s = time.monotonic()
            self.limits[token] = alive[token].stored_bytes + reserved[token] + more
        if short:  # those with more than a share give up the rest
            for token in (token for token, left in reserved.items() if left > share):
                self.limits[token] = alive[token].stored_bytes + share

    def _surplus(self, hosts: Mapping[str, tuple[HostRecord, float]], *, is_full: bool) -> int:
        """Return what to evict because stores failed on a full mount since the last turn."""
        told = {token: host.out_of_space for token, (host, _) in hosts.items()}
        known, self._out_of_space = self._out_of_space, told
        # Failures of before the first look are no news: the last evictor may have made room.
        is_full = is_full or any(count > known.get(token, count) for token, count in told.items())
        resident, now_s = self.resident_bytes or 0, time.monotonic()
        is_answered = resident < self._full_bytes and now_s < self._full_again_s
        if not is_full or is_answered or self._goal_bytes is not None:
            return 0
        surplus = int(resident * _OF_A_FULL_MOUNT) + 1
        self._full_bytes, self._full_again_s = resident - surplus // 2, now_s + _FULL_AGAIN_S
        return surplus

    # ---- eviction ------------------------------------------------------------------------------

    def _evict(self, until_s: float) -> None:
        """Remove the least recently used files until the goal is reached, or the turn is over."""
        while self._goal_bytes is not None and time.monotonic() < until_s:
            if (self.resident_bytes or 0) <= self._goal_bytes:
                self._goal_bytes = None
            elif (file := self._oldest.take()) is not None:
                self._remove(file)
            elif not self._advance(until_s, may_read=False) or not self._oldest:
                return

    def _remove(self, file: OldFile) -> None:
        """Remove a file, unless it was used or replaced since the scan."""
        path = f"{self._root}/{file.folder}/{file.shard}/{file.key.hex()}"
        try:
            if self._vfs.lstat(path).st_mtime_ns != file.mtime_ns:
                return
            self._vfs.unlink(path)
        except FileNotFoundError:
            pass  # removed by another process; the scan counted it
        else:
            self._evicted(file.folder, file.key)
        self.resident_bytes = max(0, (self.resident_bytes or 0) - file.stored_bytes)
        self._oldest.removed(file)
        if self._scan is not None:
            self._scan.removed(file)

    def _advance(self, until_s: float, *, may_read: bool = True) -> bool:
        """Go on with a scan, or begin one if it is due; return whether one was completed.

        ``may_read``: nothing waits for it, so it may also read whose the files are.
        """
        if self._scan is None:
            if time.monotonic() < (self._scan_due_s if may_read else self._awaited_scan_due_s):
                return False
            order = self._oldest
            self._scan = Scan(self._vfs, self._root, self._records, order.tags, order.above())
            self._scan.counted[self._records.token], self._scan.new = self._room.listed()
            for token, counted in self.counted.items():  # the listing may have missed its record
                self._scan.counted.setdefault(token, max(0, counted - self._of_newcomer))
        scan = self._scan
        try:
            if not scan.advance(until_s, may_read=may_read):
                return False
        except OSError:
            self._scan = None
            raise
        if self.resident_bytes is None:
            self.resident_bytes, self.counted = scan.total_bytes, scan.counted
        else:
            # What other processes stored since the scan began counts twice, or once.
            began = {token: scan.counted.get(token, 0) for token in self.counted}
            since = sum(max(0, now - began[token]) for token, now in self.counted.items())
            self.resident_bytes = scan.total_bytes + since
            self.counted = {token: max(now, began[token]) for token, now in self.counted.items()}
        self._oldest.take_in(scan)
        self._few = len(self._oldest) // 2
        self._scan, self.unsure_bytes, self._unscanned_bytes = None, 0, 0
        now_s = time.monotonic()
        self._scan_again_s = now_s + LEFTOVER_S if scan.num_unfinished else math.inf
        if scan.num_unread:
            self._scan_again_s = now_s
        self._scan_due_s = now_s + scan.listing_s() / _SCAN_SHARE
        self._awaited_scan_due_s = now_s + scan.listing_s()
        self.scans += 1
        return True
