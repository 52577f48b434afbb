"""The engine's side of the I/O server: jobs, deadlines, presence, and the server's death.

One thread, ``kvoffload-io-client``, receives. It waits without the GIL, and calls the listeners of
jobs. Other threads only send, which never waits: what the socket does not take is sent later.
"""

import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvoffload.errors import ConfigError
from kvoffload.io.forms import Form, Peer
from kvoffload.io.protocol import (
    Answered,
    Arrived,
    Ask,
    Cancel,
    Figures,
    Forget,
    Forgotten,
    Frames,
    Load,
    Logged,
    Open,
    Opened,
    Presence,
    Present,
    Refused,
    Remove,
    Removed,
    Renew,
    Store,
    ToServer,
    frame,
)
from kvoffload.io.tier import RemoteTier

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 0.02
"""How long a cancelled job may take to release its slots before it is answered as unsettled."""
TICK_S = 0.02
"""Time between two looks at deadlines while jobs run."""
IDLE_TICK_S = 1.0
SILENT_S = 10.0
"""How long a server may be silent, with a cancelled job, before it is killed."""
OPEN_S = 60.0
"""How long opening all stores may take."""
KILLED_S = 1.0
"""How long a killed server may take to end before it is abandoned."""
BACKOFF_S = (0.1, 5.0)
"""The shortest and the longest time between a server's death and the next one's start."""
STEADY_S = 10.0
"""How long a server must have run for its death to count as a first one."""


class Listener(Protocol):
    """What a job tells; called on the client's thread, and nothing raises."""

    def arrived(self, numbers: Sequence[int]) -> None:
        """Take in that these chunks of a load are verified in their slots."""
        ...

    def ended(self, ok: bytes, reason: str, settled: bool, io_time_s: float) -> None:
        """Take in the one answer; if it is not settled, the server may still use the slots."""
        ...

    def released(self) -> None:
        """Take in that the slots of a job answered as unsettled are free."""
        ...


@dataclass(eq=False)
class _Job:
    order: Load | Store
    listener: Listener
    timeout_s: float
    begun_s: float
    due_s: float
    cancelled_s: float | None = None


class IOClient:
    """Starts a server and speaks with it; its maker closes it.

    Args:
        start: starts a server of the wanted form.
        opening: what to open.
        load_timeout_s: how long a load may go on without a chunk that arrives.
        store_timeout_s: how long a store may take.

    Raises:
        ConfigError: the stores cannot be opened.
        OSError: the server cannot be started.
    """

    def __init__(
        self, start: Form, opening: Open, load_timeout_s: float, store_timeout_s: float
    ) -> None:
        self.counters: Counter[str] = Counter()
        """``io_died``: servers that ended by themselves."""
        self._start = start
        self._opening = opening
        self._load_timeout_s = load_timeout_s
        self._store_timeout_s = store_timeout_s
        self.tiers = {tier.name: self._new_tier(tier.name) for tier in opening.tiers}
        self._lock = threading.Lock()
        """Guards the jobs, the socket and what it has not taken."""
        self._numbers = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._late: dict[int, _Job] = {}
        """Answered jobs whose slots the server may still use."""
        self._out = bytearray()
        self._sock: socket.socket | None = None
        self._peer: Peer
        self._is_opening = True
        """Whether the server has yet to say that the stores are open."""
        self._is_started = False
        """Whether the stores were open once: then a server that dies is started again."""
        self._close_by_s: float | None = None
        self._ready = threading.Event()
        """Set when the stores are open or refused."""
        self._refusal: ConfigError | None = None
        self._heard_s = self._started_s = time.monotonic()
        self._restart_s: float | None = None
        self._is_restarted = False
        """Whether the stores are being opened again after a server's death."""
        self._backoff_s = BACKOFF_S[0]
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvoffload-io-client", daemon=True)
        try:
            self._connect()
            self._thread.start()
        except BaseException:
            os.close(self._wake_fd)
            raise
        try:
            self._await_stores(OPEN_S)
        except BaseException:
            self.close()
            raise

    # ---- on any thread ----

    def load(
        self,
        tier: str,
        keys: Sequence[bytes],
        slots: Sequence[int],
        sizes: int | Sequence[int],
        listener: Listener,
    ) -> None:
        """Begin reading chunks into slots; never waits.

        Raises:
            KeyError: there is no such tier.
        """
        sizes = sizes if isinstance(sizes, int) else list(sizes)
        name = self.tiers[tier].name
        order = Load(next(self._numbers), name, list(keys), list(slots), sizes)
        self._begin(order, listener, self._load_timeout_s)

    def store(
        self,
        tier: str,
        keys: Sequence[bytes],
        slots: Sequence[int],
        sizes: int | Sequence[int],
        listener: Listener,
    ) -> None:
        """Begin writing chunks from slots; never waits.

        Raises:
            KeyError: there is no such tier.
        """
        sizes = sizes if isinstance(sizes, int) else list(sizes)
        name = self.tiers[tier].name
        order = Store(next(self._numbers), name, list(keys), list(slots), sizes)
        self._begin(order, listener, self._store_timeout_s)

    def remove(self, tier: str, keys: Sequence[bytes]) -> None:
        """Begin removing chunks from a store; nothing tells when that is done."""
        self._send(Remove(tier, list(keys)))

    def _begin(self, order: Load | Store, listener: Listener, timeout_s: float) -> None:
        now_s = time.monotonic()
        job = _Job(order, listener, timeout_s, now_s, now_s + timeout_s)
        data = frame(order)
        with self._lock:
            is_first = not self._jobs
            if alive := self._sock is not None:
                self._jobs[order.job] = job
                is_first |= self._push(data)
        if not alive:
            listener.ended(bytes(len(order.keys)), "io_died", True, 0.0)
        elif is_first:
            self._wake()  # its thread must look at deadlines from now on

    def _send(self, message: ToServer) -> None:
        data = frame(message)
        with self._lock:
            must_wake = self._sock is not None and self._push(data)
        if must_wake:
            self._wake()

    def _push(self, data: bytes) -> bool:
        """Send as much as the socket takes; return whether the client's thread must send more."""
        sent = 0
        if not self._out and self._sock is not None:
            # A broken socket is noticed by the client's thread, which then ends all jobs.
            with contextlib.suppress(OSError):
                sent = self._sock.send(data)
        self._out += data[sent:]
        return sent < len(data)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the client is closed
            os.eventfd_write(self._wake_fd, 1)

    # ---- on the engine's thread, at start, resets and the end ----

    @property
    def stats(self) -> dict[str, str | int]:
        """The server's form and counters."""
        return {"server": str(self._peer), **self.counters}

    def renew(
        self,
        namespace: str,
        facts: dict[str, str],
        forgotten: Sequence[str],
        timeout_s: float = OPEN_S,
    ) -> None:
        """Open all stores again under another namespace. No tier has anything until it is open.

        Raises:
            ConfigError: they cannot be opened; there are none then.
        """
        self._is_restarted = False
        self._reset_tiers()
        self._opening = Open(
            self._opening.version,
            self._opening.tiers,
            namespace,
            facts,
            self._opening.chunk_bytes,
            self._opening.slot_bytes,
            self._opening.lookup_timeout_s,
        )
        self._send(Renew(namespace, facts, list(forgotten)))
        self._await_stores(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer all jobs, end the server within this time, and join the thread. Idempotent."""
        if self._close_by_s is None:
            self._close_by_s = time.monotonic() + timeout_s
            self._wake()
            self._thread.join()
            os.close(self._wake_fd)

    def _await_stores(self, timeout_s: float) -> None:
        is_ready = self._ready.wait(timeout_s)
        if self._refusal is not None:
            raise self._refusal
        if not is_ready or self._is_opening:
            what = "ended before it had opened" if is_ready else f"took {timeout_s:g} s to open"
            raise ConfigError("io", str(self._peer), f"{what} the tiers; its log says more")
        self._is_started = True

    def _reset_tiers(self) -> None:
        """Let no tier have anything until the server says that its stores are open."""
        self._ready.clear()
        self._refusal = None
        self._is_opening = True  # first, so that nothing said of the old stores is taken in
        for tier in self.tiers.values():
            tier.reset()

    def _new_tier(self, name: str) -> RemoteTier:
        def forget(keys: Sequence[bytes]) -> None:
            self._send(Forget(name, list(keys)))

        return RemoteTier(name, self._opening.lookup_timeout_s, self._wake, forget)

    # ---- the client's thread ----

    def _run(self) -> None:
        frames = Frames(to_server=False)
        while not self._is_closed():
            try:
                data = self._receive()
                for message in frames.feed(data or b""):
                    self._take(message)
            except Exception:
                log.exception("%s cannot be understood", self._peer)
                data = b""
            if data == b"":
                self._lost()
                frames = Frames(to_server=False)
            self._look(time.monotonic())

    def _receive(self) -> bytes | None:
        """Wait for bytes, a wake-up or the next tick; b"" if the server is gone, None for none."""
        sock, poll = self._sock, select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if sock is not None:
            poll.register(sock, select.POLLIN | (select.POLLOUT if self._out else 0))
        is_idle = not (self._jobs or self._late or sock is None or self._close_by_s)
        ready = dict(poll.poll(1e3 * (IDLE_TICK_S if is_idle else TICK_S)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
            self._ask()
        events = ready.get(sock.fileno(), 0) if sock is not None else 0
        if sock is None or not events:
            return None
        if events & select.POLLOUT:
            with self._lock, contextlib.suppress(OSError):
                del self._out[: sock.send(self._out[: 1 << 18])]
        try:
            return sock.recv(1 << 18)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _is_closed(self) -> bool:
        """Go on with closing, if it was asked for; return whether it is done."""
        if self._close_by_s is None:
            return False
        left_s = self._close_by_s - time.monotonic()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        elif self._peer.wait(0):
            self._end_late()
            return True
        if left_s < 0:
            self._peer.kill()
        if left_s >= -KILLED_S:
            return False
        log.warning("%s still hung at shutdown; it is abandoned", self._peer)
        self._lost()
        return True

    def _take(self, message: Any) -> None:
        self._heard_s = time.monotonic()
        match message:
            case Arrived():
                if job := self._jobs.get(message.job):
                    job.due_s = self._heard_s + job.timeout_s
                    job.listener.arrived(message.numbers)
            case Answered():
                self._answered(message)
            case Opened():
                for opened in message.tiers:
                    self.tiers[opened.name].opened(opened.has_index)
                self._is_opening = False
                self._check_ready()
            case Refused():
                self._refuse(message)
            case Logged():
                logging.getLogger(message.name).log(message.level, "%s", message.text)
            case _ if self._is_opening:
                pass  # said of stores that are closed
            case Presence():
                self.tiers[message.tier].announced(message, lambda: not self._is_opening)
                self._check_ready()
            case Forgotten():
                self.tiers[message.tier].forgotten(message.keys)
            case Present():
                self.tiers[message.tier].answered(message)
            case Removed():
                self.tiers[message.tier].removed(message.removals)
            case Figures():
                self.tiers[message.tier].told(message)

    def _check_ready(self) -> None:
        if all(tier.is_met for tier in self.tiers.values()):
            self._ready.set()

    def _refuse(self, message: Refused) -> None:
        refusal = ConfigError(message.field, message.value, message.remedy)
        for tier in self.tiers.values():
            tier.refused()
        if self._is_restarted:
            log.error("the tiers cannot be opened again: %s", refusal)
            self._peer.kill()  # another one is started later
            return
        self._refusal = refusal
        self._ready.set()

    def _ask(self) -> None:
        for tier in self.tiers.values():
            if questions := tier.take_questions():
                self._send(Ask(tier.name, questions))

    def _answered(self, message: Answered) -> None:
        with self._lock:
            job = self._jobs.pop(message.job, None)
            late = self._late.pop(message.job, None)
        if late is not None:
            late.listener.released()
        if job is None:
            return
        if isinstance(job.order, Store):
            self.tiers[job.order.tier].stored(job.order.keys, message.ok)
        is_late = job.cancelled_s is not None and not all(message.ok)
        reason = "deadline" if is_late else message.reason
        job.listener.ended(message.ok, reason, True, message.io_time_s)

    # ---- deadlines and the server's death ----

    def _look(self, now_s: float) -> None:
        """Cancel what is late, answer what does not end, kill a server that is silent."""
        for number, job in list(self._jobs.items()):
            if job.cancelled_s is None:
                if now_s >= job.due_s:
                    job.cancelled_s = now_s
                    self._send(Cancel(number))
            elif now_s >= job.cancelled_s + CANCEL_GRACE_S:
                with self._lock:
                    self._late[number] = self._jobs.pop(number)
                self._fail(job, "deadline", settled=False)
        if self._sock is None and self._close_by_s is None:
            self._restart(now_s)
        elif self._late and now_s >= self._heard_s + SILENT_S:
            oldest = next(iter(self._late.values()))
            if now_s >= (oldest.cancelled_s or now_s) + SILENT_S:
                log.error("%s has been silent for %g s; it is killed", self._peer, SILENT_S)
                self._heard_s = now_s
                self._peer.kill()

    def _fail(self, job: _Job, reason: str, *, settled: bool) -> None:
        num_chunks = len(job.order.keys)
        io_time_s = time.monotonic() - job.begun_s
        job.listener.ended(bytes(num_chunks), reason, settled, io_time_s)

    def _lost(self) -> None:
        """Answer all jobs: the server is gone, or will be. Its slots are free once it has ended."""
        with self._lock:
            sock, self._sock = self._sock, None
            jobs, self._jobs = self._jobs, {}
            self._out.clear()
            self._late.update(jobs)
        if sock is not None:
            sock.close()
        is_closing = self._close_by_s is not None
        for job in jobs.values():
            self._fail(job, "shutdown" if is_closing else "io_died", settled=False)
        if is_closing:
            return
        self._peer.kill()
        self._reset_tiers()
        if not self._is_started:
            self._ready.set()
            return
        self.counters["io_died"] += 1
        log.error("%s died with %d jobs; it is started again", self._peer, len(jobs))
        now_s = time.monotonic()
        if now_s > self._started_s + STEADY_S:
            self._backoff_s = BACKOFF_S[0]
        self._restart_later(now_s)

    def _restart_later(self, now_s: float) -> None:
        self._restart_s = now_s + self._backoff_s
        self._backoff_s = min(BACKOFF_S[1], 2 * self._backoff_s)

    def _restart(self, now_s: float) -> None:
        """Start a server again, once the last one has ended and some time has passed."""
        if not self._peer.wait(0):
            return
        self._end_late()
        if self._restart_s is None or now_s < self._restart_s:
            return
        self._is_restarted = True
        try:
            self._connect()
        except OSError as error:
            log.error("the I/O server cannot be started again: %s", error)
            self._restart_later(now_s)

    def _end_late(self) -> None:
        """Release the slots of a server that has ended."""
        if self._late and self._peer.wait(0):
            with self._lock:
                late, self._late = self._late, {}
            for job in late.values():
                job.listener.released()

    def _connect(self) -> None:
        self._peer = self._start()
        sock = self._peer.sock
        sock.setblocking(False)
        self._started_s = self._heard_s = time.monotonic()
        with self._lock:  # a renewal meanwhile either changes what is sent here, or comes after it
            self._sock = sock
            self._push(frame(self._opening))
