"""The one thread in the background: tells what this process stored, and evicts if it is its turn.

It makes blocking calls. On a mount that hangs it hangs too, alone. Another process then
evicts, and this one stores no more than its limit.
"""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from kvoffload.backends.disk.root_checks import remedy_of
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.folder import clock
from kvoffload.backends.folder.evictor import DEAD_S, Evictor
from kvoffload.backends.folder.known import KnownChunks
from kvoffload.backends.folder.options import FolderOptions
from kvoffload.backends.folder.places import LEASE
from kvoffload.backends.folder.records import HostRecord, LeaseRecord, Records, is_out_of_space
from kvoffload.backends.folder.room import Room
from kvoffload.backends.folder.shared_root import Root
from kvoffload.backends.log_rate import Throttle

log = logging.getLogger(__name__)

TURN_S = 1.0
"""Time between two turns, unless stores wait for one."""
LEASE_S = 15.0
"""A lease that is older, by the server's clock, is free to take."""
_RENEW_S = LEASE_S / 3
_ASKED_FOR_S = 1.0
"""How long after it raised a limit the process that evicts makes turns without being woken."""
_PAUSE_S, _LONG_PAUSE_S = 0.02, 0.2
"""The least time between two turns of the process that evicts. Other ones pause so long for
each process that uses the root, up to the second."""
_LOOK_S = 5.0
"""Time between two looks whether the root is still the same."""
_TIMES_S = 0.2
"""How long one turn renews the times of files: a slow mount must not make it late."""
SAY_AGAIN_S = 600.0
"""Time between two lines of the log about a failure that lasts."""


class Housekeeper:
    """Runs turns until it is closed.

    Args:
        vfs: makes the system calls.
        root: opened.
        records: of it.
        options: of the tier.
        known: learns of another store, and tells whose times are due.
        path_of: returns the path of a chunk.
        evicted: called with folder and key of each chunk that this process evicts.
        count: increments a counter.
    """

    def __init__(
        self,
        vfs: Vfs,
        root: Root,
        records: Records,
        options: FolderOptions,
        known: KnownChunks,
        path_of: Callable[[bytes], str],
        evicted: Callable[[str, bytes], None],
        count: Callable[[str], None],
    ) -> None:
        self._root, self._records, self._token = root, records, records.token
        self._capacity_bytes = capacity_bytes = int(options.capacity)
        self._known, self._path_of = known, path_of
        self._count = count
        self._wake = threading.Event()
        self._is_closing = False
        self.room = Room(self._wake.set)
        self._evictor = Evictor(
            vfs, root.path, records, capacity_bytes, evicted, self.room, options.tenant_share
        )
        self._is_full = False
        self._looked_s = time.monotonic()
        self._told: HostRecord | None = None
        self._told_s = 0.0
        self._read_s = clock.now_s()
        """When the lease was last known."""
        self._written: LeaseRecord | None = None
        self._written_s = 0.0
        self.is_evictor = False
        """Whether it is this process's turn to evict."""
        self.num_hosts = 1
        """Processes that the evictor counts."""
        self.is_gone = False
        """Whether the root was not there at the last look."""
        self._warnings = Throttle(log, SAY_AGAIN_S)
        self.capacity_bytes = capacity_bytes
        """That of the process that evicts, as far as this one knows."""
        self._is_opening = True
        self._turn()  # so that stores find room at once
        self._is_opening = False
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name="kvoffload-folder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end soon, without waiting for it."""
        self._is_closing = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_closing:
            is_asked = time.monotonic() - self._evictor.raised_s < _ASKED_FOR_S
            pause_s = min(_PAUSE_S * self.num_hosts, _LONG_PAUSE_S)
            self._wake.wait(pause_s if self.is_evictor and is_asked else TURN_S)
            self._wake.clear()
            if not self._is_closing:
                self._turn()
                time.sleep(_PAUSE_S if self.is_evictor else pause_s)
        self._leave()

    def _turn(self) -> None:
        try:
            self._look_at_root()
            if self._told is None:
                self._tell()  # sets the clock, before an age is read
            self._use_lease()
            self._tell()
            if self.is_evictor:
                self._evict()
            self._renew_times()
        except Exception as error:  # without its thread this process would soon store nothing
            self._failed(error)

    # ---- this process's own record ---------------------------------------------------------

    def _tell(self) -> None:
        """Write this process's record if it changed, or if it gets old."""
        room, began_s = self.room, clock.now_s()
        record = HostRecord(
            host=socket.gethostname(),
            pid=os.getpid(),
            stored_bytes=room.stored_bytes,
            limit_bytes=room.limit_bytes,
            largest_bytes=room.largest_bytes,
            out_of_space=room.out_of_space,
            is_closed=self._is_closing,
        )
        if record == self._told and began_s - self._told_s < _RENEW_S:
            return
        try:
            self._write_own(record)
        except OSError as error:
            if not is_out_of_space(error):
                raise
            self._is_full = True
        else:
            self._told, self._told_s = record, began_s
            room.told(began_s, DEAD_S)

    def _write_own(self, record: HostRecord) -> None:
        try:
            self._records.host(record)
        except FileNotFoundError as error:
            self._records.host(record)  # which fails again if the root is gone
            self._say(
                error, "%s: another process took this one for dead, and removed its record, which "
                "is written again: the mount hung here for %g s, or this process was stopped; see "
                "whether its server and the network are well",
                self._root.path, DEAD_S,
            )  # fmt: skip

    def _follow(self, lease: LeaseRecord | None) -> None:
        """Take in what the evictor has counted, and the limit that it set."""
        if lease is None:
            return
        limit = lease.limits.get(self._token, lease.newcomer_bytes)
        self.room.limit(limit, lease.counted.get(self._token, 0), lease.resident_bytes)
        self.num_hosts = max(1, len(lease.limits))
        if lease.capacity_bytes not in (self._capacity_bytes, self.capacity_bytes):
            self._say(
                None, "%s: capacity = %d is not used, %s evicts by %d; give all hosts the same",
                self._root.path, self._capacity_bytes, lease.host, lease.capacity_bytes,
            )  # fmt: skip
        self.capacity_bytes = lease.capacity_bytes

    # ---- the lease -------------------------------------------------------------------------

    def _use_lease(self) -> None:
        """Find out from the lease whether it is this process's turn, and what it may store."""
        began_s = clock.now_s()
        try:
            lease, age_s = self._records.lease()
        except OSError as error:
            self.is_evictor = False
            if self._is_late:
                self.room.give_up()
            self._count("lease_unusable")
            if error.errno != errno.ESTALE or self._is_late:  # once it was only replaced just then
                self._say(
                    error, "%s/%s cannot be used (%s): until then this process evicts nothing, and "
                    "%g s later it stores nothing; %s",
                    self._root.path, LEASE, error.strerror, LEASE_S, remedy_of(error),
                )  # fmt: skip
            return
        self._read_s = began_s
        self._take_or_lose(lease, age_s)
        if not self.is_evictor:
            self._follow(lease)

    def _take_or_lose(self, lease: LeaseRecord | None, age_s: float | None) -> None:
        """Become the evictor if there is none; be it no more if another one took over."""
        holder = None if lease is None else lease.holder
        is_free = age_s is None or age_s > LEASE_S or holder in ("", self._token)
        if self.is_evictor:
            self.is_evictor = lease is None or is_free
            if lease is None:
                self._written = None  # it is gone, or damaged: it is written again
        elif is_free:
            # A lease as this process wrote it last: it was not read for a moment, and was not lost.
            if lease is None or lease != self._written:
                self._evictor.begin(lease, is_new=self._root.is_new and age_s is None)
                self._written = None
            self.is_evictor, self.capacity_bytes = True, self._capacity_bytes

    def _evict(self) -> None:
        if self._is_opening and self._evictor.resident_bytes is None:
            return  # a scan may take minutes: the thread makes it
        self._evictor.turn(self._records.hosts(), is_full=self._is_full)
        self._is_full = False
        if self._is_late:
            self._use_lease()
            if not self.is_evictor:
                return
        self._publish(self._token)
        if self._is_late:  # it may have replaced what another process has counted
            self._evictor.begin(None, is_new=False)
        if (resident := self._evictor.resident_bytes) is not None:
            counted, limits = self._evictor.counted, self._evictor.limits
            self.room.limit(limits.get(self._token, 0), counted.get(self._token, 0), resident)
            self.num_hosts = len(limits)

    @property
    def _is_late(self) -> bool:
        """Whether a call hung for so long that another process may evict by now."""
        return clock.now_s() - self._read_s > LEASE_S

    def _publish(self, holder: str) -> None:
        """Write the lease if it changed, or if it gets old."""
        lease = LeaseRecord(
            holder=holder,
            host=socket.gethostname(),
            capacity_bytes=self._capacity_bytes,
            resident_bytes=self._evictor.resident_bytes,
            unsure_bytes=self._evictor.unsure_bytes,
            newcomer_bytes=self._evictor.newcomer_bytes,
            counted=dict(self._evictor.counted),
            limits=dict(self._evictor.limits),
        )
        if lease == self._written and clock.now_s() - self._written_s < _RENEW_S:
            return
        try:
            self._records.write_lease(lease)
        except OSError as error:
            if not is_out_of_space(error):
                raise
            self._is_full = True
        else:
            self._written, self._written_s = lease, clock.now_s()

    # ---- the rest --------------------------------------------------------------------------

    def _look_at_root(self) -> None:
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s, was_gone = time.monotonic(), self.is_gone
        try:
            is_other = self._root.look_again()
        except OSError:
            self.is_gone = True
            raise
        self.is_gone = False
        if was_gone:
            log.warning("folder %s: it is there again", self._root.path)
        if is_other:
            log.warning("folder %s: another store has this name now", self._root.path)
            self._count("another_store")
            self._known.clear()
            self.room.restart()
            self.is_evictor, self._told, self._written = False, None, None

    def _renew_times(self) -> None:
        """Tell of uses by the files' times, as the server sets them."""
        until_s = time.monotonic() + _TIMES_S
        while time.monotonic() < until_s and (key := self._known.take_due()) is not None:
            try:
                os.utime(self._path_of(key), follow_symlinks=False)
                self._count("time_renewed")
            except FileNotFoundError:
                self._known.forget(key)

    def _leave(self) -> None:
        """Say that this process stores no more, and that another one may evict."""
        try:
            self._tell()
            if self.is_evictor:
                self._evictor.turn(self._records.hosts())
                self._publish("")
        except OSError as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._count("housekeeping_failed")
        remedy = remedy_of(error) if isinstance(error, OSError) else "report it"
        self._say(error, "%s: housekeeping failed: %s; %s", self._root.path, error, remedy)

    def _say(self, error: Exception | None, text: str, *values: object) -> None:
        """Log what may last: one line for each kind in :data:`SAY_AGAIN_S`."""
        kind = text, getattr(error, "errno", None)
        self._warnings.warning(f"folder {text}", *values, kind=kind)
