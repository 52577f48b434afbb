"""The engine's side of the I/O server: jobs, presence, and the server's death.

One thread, ``kvoffload-io-client``, waits without the GIL, and calls the listeners of jobs. Other
threads only send, which never waits; without a server they call the listener.
"""

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.identity import short
from kvoffload.io.backoff import Backoff
from kvoffload.io.deadlines import (
    IDLE_TICK_S,
    PATIENT_S,
    TICK_S,
    IOJob,
    IOJobs,
    Listener,
)
from kvoffload.io.forms import Form, Peer
from kvoffload.io.lent_memory import LentMemory
from kvoffload.io.link import Link
from kvoffload.io.protocol import (
    Alive,
    Answered,
    Arrived,
    Ask,
    Await,
    Borrow,
    Cancel,
    Ending,
    Expect,
    Forget,
    Lent,
    Load,
    Located,
    Logged,
    MessageReader,
    Open,
    Opened,
    Passed,
    Refused,
    Release,
    Remove,
    Store,
    frame,
)
from kvoffload.io.reads_in_place import ReadsInPlace
from kvoffload.io.remote_tier import RemoteTier
from kvoffload.metrics.names import IO_LOOP_DELAY, IO_RESTARTS, NAMESPACE
from kvoffload.metrics.samples import Durations, Sample
from kvoffload.policies.told_return import LatestReturns, ToldReturn

log = logging.getLogger(__name__)

SILENT_S = 10.0
"""How long a server may be silent, with a cancelled job or stores to open, before it is killed."""
KILLED_S = 1.0
"""How long a killed server may take to end before it is abandoned."""
MEET_S = 5.0
"""How long the start waits for a server that need not be there."""
OPEN_S = 60.0
"""How long opening all stores may take."""


class IOClient:
    """Starts a server and speaks with it; its maker closes it.

    Args:
        start: starts a server of the wanted form.
        opening: what to open.
        load_timeout_s: how long a load may go on; see :mod:`kvoffload.io.deadlines`.
        store_timeout_s: how long a store may take.
        needs_server: whether there must be a server at the start. If not, all is a miss until one
            is there, as after the death of a server.

    Raises:
        ConfigError: the stores cannot be opened.
        OSError: the server cannot be started, or ended before it said anything.
    """

    def __init__(
        self,
        start: Form,
        opening: Open,
        load_timeout_s: float,
        store_timeout_s: float,
        *,
        needs_server: bool = True,
    ) -> None:
        self.died = 0
        """Servers that ended by themselves; a socket that was closed without a word is none."""
        self.loop_delays = Durations()
        """By how much the server's event loop was late."""
        self._start, self.opening = start, opening
        """What stores are open with, or are being opened with."""
        self._load_timeout_s, self._store_timeout_s = load_timeout_s, store_timeout_s
        self._link = Link()
        self.tiers = {
            tier.name: RemoteTier(tier.name, opening.lookup_timeout_s, self._link.wake)
            for tier in opening.tiers
        }
        """What is known of each tier, by its name."""
        self.in_place = ReadsInPlace(self._link)
        """Where the engine finds chunks that it reads itself, and what it has read."""
        self._numbers = itertools.count(1)
        self._awaited: dict[int, list[bytes]] = {}
        """Request in the engine's queue → chunks that it needs; guarded by the link's lock."""
        self._untold: set[int] = set()
        """Those of which a clogged link could not tell; guarded by it, too."""
        self._returns = LatestReturns()
        """When sessions need their chunks again, for stores that open; guarded by it as well."""
        self._jobs = IOJobs(self._link.lock, self._cancel, self._moved)
        self._is_opening = self._is_starting = True
        """Whether stores are yet to open; whether one's constructor may keep the server silent."""
        self._needs_server = needs_server
        self._without: set[str] = set()
        """Tiers that the start goes on without: no setting is to blame that they are not open."""
        self._is_started = not needs_server
        """Whether the stores were open once: then a server that dies is started again."""
        self._peer: Peer | None = None
        self._borrows = False
        """Whether each server is asked for its memory; guarded by the link's lock."""
        self._memory: LentMemory | None = None
        """The present server's; guarded by the link's lock."""
        self._why_down = ""
        """Why no server could be started: it is logged once."""
        self._severity = logging.ERROR
        """Of a line that there is no server: less if the last one that spoke said that it ends."""
        self._was_missed = False
        """Whether a line has said that there is no server, and none yet that there is one."""
        self._is_heard = False
        """Whether the present server has said anything."""
        self._settled = threading.Condition()
        """Notified when :attr:`_is_settled` may have become true."""
        self._refusal: ConfigError | OSError | None = None
        self._remains: list[str] = []
        """What could not be removed from stores that have opened."""
        # When the server last said anything, and when it was asked to open other stores.
        self._heard_s = self._asked_s = time.monotonic()
        self._backoff = Backoff()
        self._close_by_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="kvoffload-io-client", daemon=True)
        try:
            (self._connect if needs_server else self._try_to_connect)()
            self._thread.start()
        except BaseException:
            self._link.close()
            raise
        try:
            if needs_server:
                self._await_stores(OPEN_S)
            else:
                self._meet_server()
        except BaseException:
            self.close(KILLED_S)
            raise

    # ---- on any thread ----

    def begin(
        self,
        order: Load | Store,
        listener: Listener,
        *,
        needs_slots: bool = False,
        moved_s: float = 0.0,
    ) -> None:
        """Begin to read chunks into slots, or to write them from there; never waits.

        The listener of a load that may lend is lent chunks that are in a server's memory: their
        slots stay as they are.

        Args:
            order: its number is given here.
            listener: is told of the chunks, and of the end.
            needs_slots: whether more is to be read into the slots after it.
            moved_s: when its time began; 0: it begins now.

        Raises:
            KeyError: there is no such tier.
        """
        tier, timeout_s = self.tiers[order.tier], self._store_timeout_s
        order.job = next(self._numbers)
        if isinstance(order, Load):
            timeout_s = self._load_timeout_s
            order.may_lend = order.may_lend and self._memory is not None
        elif tier.unsent:  # forgotten after the store, a key would be lost
            self._send_forgotten(tier)
        data, link, now_s = frame(order), self._link, time.monotonic()
        listener.moved_s = moved_s or now_s
        with link.lock:  # a server that dies either takes this job with it, or is known to be dead
            if is_up := link.is_up:
                job = IOJob(order, listener, timeout_s, now_s, needs_slots)
                self._jobs.unanswered[order.job] = job
            link.push(data)
        if is_up and listener.moved_s + timeout_s < now_s + PATIENT_S:
            link.wake()
        if not is_up:
            listener.ended(bytes(len(order.keys)), "io_died", True, 0.0)

    def borrow(self) -> None:
        """Ask this server and each later one for its memory, for loads that may borrow."""
        with self._link.lock:  # a server that is started again is asked by this call, or at once
            self._borrows = True
            self._link.push(frame(Borrow()))

    def remove(self, tier: str, keys: Sequence[bytes]) -> None:
        """Begin removing chunks from a store; nothing tells when that is done."""
        self._link.send(frame(Remove(tier, list(keys))))

    def awaits(self, requests: list[tuple[int, list[bytes]]]) -> None:
        """Tell the stores which chunks requests in the engine's queue need.

        Args:
            requests: each by its number; without chunks, it waits no more.
        """
        link = self._link
        with link.lock:  # a server that is started again is told either by this call, or of it
            for number, keys in requests:
                self._awaited.pop(number, None)
                if keys:
                    self._awaited[number] = keys
            if link.is_clogged:  # then only what makes the stores' work less
                self._untold.update(number for number, keys in requests if keys)
                requests = [request for request in requests if not request[1]]
            elif self._untold:
                late = {number: self._awaited.get(number, []) for number in self._untold}
                requests = list((late | dict(requests)).items())
                self._untold = set()
            if requests:
                link.push(_of_queue(requests))

    def expects(self, returns: list[ToldReturn]) -> None:
        """Tell the stores when sessions need their chunks again; a hint, which may be dropped."""
        with self._link.lock:  # a store that opens is told either by this call, or of it
            self._returns.note(returns)
            if not self._link.is_clogged:
                self._link.push(frame(Expect(returns)))

    def _send_forgotten(self, tier: RemoteTier) -> None:
        with self._link.lock:  # no other thread has taken keys that it has yet to send
            if keys := tier.take_forgotten():
                self._link.push(frame(Forget(tier.name, keys)))

    def samples(self) -> Iterator[Sample]:
        """Yield what the server and its stores measure, on any thread."""
        yield NAMESPACE, (short(self.opening.namespace),), 1
        yield IO_RESTARTS, (), self.died
        yield IO_LOOP_DELAY, (), self.loop_delays
        for tier in self.tiers.values():
            yield from tier.samples()

    # ---- on the engine's thread, at start, resets and the end ----

    @property
    def server(self) -> str:
        """The server's form, and the id of its process."""
        return str(self._peer or "no server")

    def renew(
        self,
        namespace: str,
        facts: dict[str, str],
        forgotten: Sequence[str],
        timeout_s: float | None = OPEN_S,
        tier: str = "",
    ) -> None:
        """Open all stores again; see :class:`kvoffload.io.protocol.Open`. Until then all is a miss.

        Args:
            namespace: of the stores from now on.
            facts: what the namespace is a digest of.
            forgotten: namespaces whose chunks are removed.
            timeout_s: how long to wait until they are open. None: not at all; see :attr:`outcome`.
            tier: from which they are removed; "" for all.

        Raises:
            ConfigError: they cannot be opened yet; the server goes on trying.
            OSError: something of the wanted namespace could not be removed, and is served.
        """
        with self._link.lock:  # orders with a higher number are carried out on the new stores
            wanted = namespace, facts, forgotten, tier
            self.opening = self.opening.renewed(next(self._numbers), *wanted)
            self._refusal = None
            self._asked_s = time.monotonic()
            self._reset_tiers()
            self._link.push(frame(self.opening))
        self._link.wake()
        if timeout_s is not None:
            self._await_stores(timeout_s)

    @property
    def outcome(self) -> str | None:
        """What is wrong with the stores wanted last, "" for nothing; None while that is open."""
        if not self._is_settled:  # read first: a refusal is set before that
            return None
        return str(self._refusal or ("" if self._are_stores_open else "the engine ends"))

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer all jobs, end the server within this time, and join the thread. Idempotent."""
        if self._close_by_s is None:
            self._close_by_s = time.monotonic() + timeout_s
            self._tell_waiting()
            self._link.wake()
            self._thread.join()
            self._link.close()
            for tier in self.tiers.values():  # nothing of it can be loaded any more
                tier.reset()
                tier.refused()

    def _meet_server(self) -> None:
        """Wait for a server that is there, but not long; raises the refusal of one that refuses."""
        with self._settled:
            self._settled.wait_for(lambda: self._is_settled or not self._link.is_up, MEET_S)
        if isinstance(self._refusal, ConfigError):
            raise self._refusal

    def _await_stores(self, timeout_s: float) -> None:
        with self._settled:
            is_settled = self._settled.wait_for(lambda: self._is_settled, timeout_s)
        if self._refusal is not None:
            raise self._refusal
        if not (self._is_started or self._is_heard):
            what = "ended" if is_settled else f"was silent for {timeout_s:g} s"
            raise OSError(f"{self.server} {what} before it said anything; its output says more")
        if not self._are_stores_open:
            what = "ended before it had opened" if is_settled else f"took {timeout_s:g} s to open"
            raise ConfigError("io", self.server, f"{what} the tiers; its log says more")
        self._is_started, self._without = True, set()

    @property
    def _are_stores_open(self) -> bool:
        if self._is_opening and not self._without:
            return False
        return all(tier.is_met or name in self._without for name, tier in self.tiers.items())

    @property
    def _is_settled(self) -> bool:
        """Whether the stores are open or refused, or the client or its first server has ended."""
        has_ended = self._close_by_s is not None or not (self._is_started or self._link.is_up)
        return has_ended or self._refusal is not None or self._are_stores_open

    def _reset_tiers(self) -> None:
        """Let no tier have anything until the server says that its stores are open."""
        self._is_opening, self._remains = True, []
        for tier in self.tiers.values():
            tier.reset()

    # ---- the client's thread ----

    def _run(self) -> None:
        reader, jobs = MessageReader(to_server=False), self._jobs
        while self._close_by_s is None or not self._is_closed():
            is_up, is_closing = self._link.is_up, self._close_by_s is not None
            is_busy = jobs.unanswered or jobs.late or is_closing or not is_up
            try:
                data, is_woken = self._link.receive(TICK_S if is_busy else IDLE_TICK_S)
                for message in reader.feed(data or b""):
                    self._take(message)
                if is_woken:
                    self._ask()
            except Exception:
                log.exception("%s cannot be understood", self.server)
                data = b""
            if data == b"":
                self._lost()
                reader = MessageReader(to_server=False)
            self._look(time.monotonic())

    def _take(self, message: Any) -> None:
        if not self._is_heard:
            self._is_heard, self._severity = True, logging.ERROR
        self._heard_s = time.monotonic()
        match message:
            case Arrived():
                if job := self._jobs.arriving(message.job, message.numbers):
                    job.listener.arrived(message.numbers)
            case Lent():
                self._borrow(message)
            case Answered():
                self._jobs.answered(message)
            case Located():
                self.in_place.answered(message)
            case Passed():
                if self._memory is None and self._peer is not None:
                    self._memory = self._peer.lent_memory()
            case Opened() | Refused():
                with self._link.lock:  # a renewal comes before it or after it
                    if message.number == self.opening.number:
                        self._settle(message)
            case Alive():
                self.loop_delays.add(message.late_s)
            case Ending():
                self._severity = logging.WARNING
            case Logged():
                logging.getLogger(message.name).log(message.level, "%s", message.text)
            case _:
                tier = self.tiers[message.tier]
                if tier.is_open:  # or it is said of a store that is closed
                    was_met = tier.is_met
                    tier.take(message)
                    if not was_met:
                        self._tell_waiting()

    def _cancel(self, number: int) -> None:
        self._link.send(frame(Cancel(number)))

    def _moved(self, order: Load | Store, answer: Answered) -> None:
        self.tiers[order.tier].moved(order, answer, order.job > self.opening.number)

    def _borrow(self, message: Lent) -> None:
        if (memory := self._memory) is None:
            raise ValueError("a loan of a server without memory")

        def release() -> None:
            with self._link.lock:  # another server has other loans of these numbers
                if self._memory is memory:
                    self._link.push(frame(Release(message.loan)))

        job = self._jobs.unanswered.get(message.job)
        if job and not (isinstance(job.order, Load) and job.order.may_lend):
            raise ValueError("a loan that was not asked for: its slots would have other bytes")
        self._jobs.arriving(message.job, message.numbers)
        loan = memory.borrow(message.numbers, message.starts, release)
        if job:
            job.listener.lent(loan)
        else:  # it was answered meanwhile
            loan.end()

    def _tell_waiting(self) -> None:
        with self._settled:
            self._settled.notify_all()

    def _settle(self, message: Opened | Refused) -> None:
        self._is_starting = isinstance(message, Opened) and not message.tiers
        if isinstance(message, Opened):
            for opened in message.tiers:
                tier = self.tiers[opened.name]
                tier.opened(opened.has_index, opened.is_shared, opened.in_place)
                self.opening.opened(opened.name)
            if message.tiers and (returns := self._returns.to_come()):
                self._link.push(frame(Expect(returns)))
            self._remains += message.remains
            is_opening = not all(tier.is_open for tier in self.tiers.values())
            if self._was_missed and not is_opening:
                log.warning("%s is there, and its tiers are open", self.server)
                self._was_missed = False
            if not is_opening:
                self._refusal = OSError("; ".join(self._remains)) if self._remains else None
            # Last: a renewal that waits ends once it reads this.
            self._is_opening = is_opening
            if message.remains:
                log.error("chunks that were to be removed remain: %s", message.remains)
        else:
            for tier in self.tiers.values():
                if not tier.is_open:
                    tier.refused()
            refusal = ConfigError(message.field, message.value, message.remedy)
            if without := None if self._is_started else message.without:
                log.error("the engine starts without the tier %s: %s", without.name, refusal)
                tier = self.tiers[without.name]
                tier.is_listed, tier.is_shared = without.has_index, without.is_shared
                self._without.add(without.name)  # last, as above
            else:
                if self._is_started:
                    log.error("a tier cannot be opened again yet: %s", refusal)
                self._refusal = refusal  # last, as above
        self._tell_waiting()

    def _ask(self) -> None:
        for tier in self.tiers.values():
            self._send_forgotten(tier)
            questions = tier.take_questions()
            if questions and not self._link.is_clogged:  # unasked, they are misses in time
                self._link.send(frame(Ask(tier.name, questions)))

    # ---- the server's death and end ----

    def _look(self, now_s: float) -> None:
        """Look at deadlines; kill a server that is silent, start one that died."""
        since_s = self._jobs.look(now_s) or (self._asked_s if self._is_opening else None)
        if not self._link.is_up:
            if self._close_by_s is None:
                self._restart()
            return
        # A server that starts, on a busy machine or a slow disk, would be as late the next time.
        silent_s = OPEN_S if self._is_starting else SILENT_S
        is_silent = since_s is not None and now_s >= max(since_s, self._heard_s) + silent_s
        if is_silent and self._peer is not None:
            what = "it is killed" if self._peer.kill() else "it cannot be ended"
            log.error("%s has been silent for %g s; %s", self._peer, silent_s, what)
            self._heard_s = now_s

    def _lost(self) -> None:
        """Answer all jobs: the server is gone, or will be. Its slots are free once it has ended."""
        with self._link.lock:
            self._link.detach()
            jobs = self._jobs.lose()
            memory, self._memory = self._memory, None
        self.in_place.lose()
        if memory is not None:
            memory.leave()
        is_closing = self._close_by_s is not None
        if not is_closing:
            self._reset_tiers()  # first: an answered job must not be followed by an old hit
        for job in jobs:
            job.fail("shutdown" if is_closing else "io_died")
        if self._peer is not None:
            self._peer.kill()  # also at the end: a process would go on until its calls have ended
        if is_closing:
            return
        self._tell_waiting()
        if not self._is_started:
            return
        self.died += self._is_heard or self._needs_server
        what = "died" if self._severity == logging.ERROR else "was told to end, and ended"
        if self._is_heard or not self._was_missed:  # a listener that dies takes a last connection
            text = "%s %s with %d jobs; all is a miss until it is started again"
            log.log(self._severity, text, self.server, what, len(jobs))
        self._was_missed = True
        self._backoff.died()

    def _restart(self) -> None:
        """Start a server again, once the last one has ended and the backoff is over."""
        if not self._is_started or not self._has_ended:
            return
        self._jobs.release()
        if self._backoff.is_over:
            self._try_to_connect()

    @property
    def _has_ended(self) -> bool:
        """Whether no server uses any slot any more."""
        return self._peer is None or self._peer.wait(0)

    def _try_to_connect(self) -> None:
        try:
            self._connect()
        except Exception as error:  # no descriptors, no memory, no threads; no server of the host
            if str(error) != self._why_down:
                self._why_down, self._was_missed = str(error), True
                text = "there is no I/O server, and all is a miss until there is: %s"
                log.log(self._severity, text, error)
            for tier in self.tiers.values():
                tier.refused()
            self._backoff.failed()

    def _connect(self) -> None:
        self._peer, self._is_starting, self._is_heard = self._start(), True, False
        self._heard_s, self._why_down = time.monotonic(), ""
        self._backoff.started()
        with self._link.lock:  # a renewal either changes what is sent here, or comes after it
            self._link.attach(self._peer.sock)
            self._link.push(frame(self.opening))
            self._untold = set()
            if self._borrows:
                self._link.push(frame(Borrow()))
            if self._awaited:
                self._link.push(_of_queue(self._awaited.items()))

    def _is_closed(self) -> bool:
        """Go on with closing, which was asked for; return whether it is done."""
        left_s = (self._close_by_s or 0.0) - time.monotonic()
        if self._link.is_up:
            self._link.end_sending()
        elif self._has_ended:
            self._jobs.release()
            return True
        if left_s < 0 and self._peer is not None:
            self._peer.kill()
        if left_s >= -KILLED_S:
            return False
        log.warning("%s still hung at shutdown; it is abandoned", self.server)
        self._lost()
        return True


def _of_queue(requests: Iterable[tuple[int, list[bytes]]]) -> bytes:
    """Return what tells of requests: a message for each, as a server refuses a long one."""
    return b"".join(frame(Await(*request)) for request in requests)
