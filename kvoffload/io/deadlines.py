"""The jobs of an I/O client and their deadlines: each job is answered exactly once.

A load may take any time while chunks arrive. Until its first chunk, those of loads that began
before it from the same tier count: a store reads one load after the other. A store may take a fixed
time. A job that is late is cancelled, and answered as unsettled if that does not end it within
``CANCEL_GRACE_S``. A load of which all chunks have arrived is not cancelled, and answered soon.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvoffload.backends.log_rate import Throttle
from kvoffload.io.lent_memory import Loan
from kvoffload.io.protocol import Answered, Load, Store

log = logging.getLogger(__name__)

TICK_S, IDLE_TICK_S = 0.02, 0.25
"""Time between two looks at deadlines while jobs run, and while none does."""
PATIENT_S = IDLE_TICK_S + TICK_S
"""A look comes in time for a deadline so far away; waking its thread takes the engine 0.2 ms."""
ARRIVED_S = 0.5
"""How long a server may use the slots of a load of which all chunks have arrived: the server of a
host stores them nearer. A request waits for that, and need not where a disk is slow. Most copies
end by then, so that the next load does not lack these slots."""
CANCEL_GRACE_S = 0.02
"""How long a cancelled job may take to release its slots before it is answered as unsettled."""


class Listener(Protocol):
    """What a job tells. Nothing here waits or raises.

    The client's thread calls it. While the server is down, ``ended`` is called by the thread that
    submits the job, before that call returns.
    """

    moved_s: float = 0.0
    """When the job's time began: at its begin, or with the last chunk that it, or a load that it
    waits for, got since. The client sets it until the answer."""

    def arrived(self, numbers: Sequence[int]) -> None:
        """Take in that these chunks of a load are verified in their slots.

        By default it is of no use before the end.
        """
        return

    def lent(self, loan: Loan) -> None:
        """Take in verified chunks in the server's memory, of a load that may borrow.

        End the loan once they are copied, whatever happens.
        """
        loan.end()

    def ended(self, ok: bytes, reason: str, settled: bool, io_time_s: float) -> None:
        """Take in the one answer; if it is not settled, the server may still use the slots."""
        ...

    def released(self) -> None:
        """Take in that the slots of a job answered as unsettled are free."""
        ...


@dataclass(eq=False)
class IOJob:
    """A load or store that a server carries out."""

    order: Load | Store
    listener: Listener
    timeout_s: float
    """How long it may go on after :attr:`Listener.moved_s`."""
    begun_s: float
    needs_slots: bool = False
    """Whether more is to be read into its slots: then an answer before they are free is of no use.
    """
    ok: bytearray = field(init=False)
    """Which of its chunks have arrived."""
    cancelled_s: float = 0.0

    def __post_init__(self) -> None:
        self.ok = bytearray(len(self.order.keys))

    def failed(self, reason: str) -> Answered:
        """Return the answer that no chunk, but for those that arrived, succeeded."""
        io_time_s = time.monotonic() - self.begun_s
        return Answered(self.order.job, bytes(self.ok), reason, io_time_s)

    def fail(self, reason: str) -> None:
        """Give that answer, unsettled."""
        answer = self.failed(reason)
        self.listener.ended(answer.ok, reason, False, answer.io_time_s)


class IOJobs:
    """The jobs in flight; all methods run on the client's thread.

    Args:
        lock: held by those who add jobs.
        cancel: asks the server to end a job.
        moved: called with what a job has moved, just before it is answered.
    """

    def __init__(
        self,
        lock: threading.Lock,
        cancel: Callable[[int], None],
        moved: Callable[[Load | Store, Answered], None],
    ) -> None:
        self._lock = lock
        self._cancel = cancel
        self._moved = moved
        self.unanswered: dict[int, IOJob] = {}
        """Those without an answer; any thread adds one."""
        self.late: dict[int, IOJob] = {}
        """Answered jobs whose slots the server may still use, in the order of their answers."""
        self._warnings = Throttle(log)

    def arriving(self, number: int, chunks: Sequence[int]) -> IOJob | None:
        """Take in that these chunks of a load arrived; None: it is answered."""
        if job := self.unanswered.get(number):
            for i in chunks:
                job.ok[i] = 1
            self._has_moved(job)
        return job

    def answered(self, message: Answered) -> None:
        """Take in an answer, unless the job was answered before.

        Raises:
            ValueError: it is no answer to this job; the job still has none.
        """
        if late := self.late.pop(message.job, None):
            late.listener.released()
        if job := self.unanswered.get(message.job):
            if len(message.ok) != len(job.order.keys):
                raise ValueError(f"{len(message.ok)} answers for {len(job.order.keys)} chunks")
            if isinstance(job.order, Load) and any(message.ok):
                self._has_moved(job)
            if job.cancelled_s and not all(message.ok):
                message.reason = "deadline"
            self._moved(job.order, message)
            del self.unanswered[message.job]
            job.listener.ended(message.ok, message.reason, True, message.io_time_s)

    def _has_moved(self, job: IOJob) -> None:
        """Defer the deadlines of a load whose chunk arrived, and of loads that wait behind it."""
        now_s, order = time.monotonic(), job.order
        job.listener.moved_s = now_s
        if all(job.ok) and not job.needs_slots:
            job.timeout_s = min(ARRIVED_S, job.timeout_s)
        with self._lock:
            jobs = list(self.unanswered.values())
        for other in jobs:
            theirs = other.order
            is_behind = isinstance(theirs, Load) and theirs.job > order.job
            if is_behind and theirs.tier == order.tier and not any(other.ok):
                other.listener.moved_s = now_s

    def look(self, now_s: float) -> float | None:
        """Cancel the jobs that are late; answer those that were cancelled and do not end.

        Returns:
            When the oldest job was cancelled whose slots are not released; None if none was.
        """
        with self._lock:
            jobs = list(self.unanswered.items())
        for number, job in jobs:
            if job.cancelled_s:
                if now_s >= job.cancelled_s + CANCEL_GRACE_S:
                    self._leave(number, "deadline")
            elif now_s < job.listener.moved_s + job.timeout_s:
                continue
            elif all(job.ok):  # what the server stores nearer goes on
                self._leave(number, "")
            else:
                job.cancelled_s = now_s
                self._cancel(number)
                self._warnings.warning(
                    "tier %s: a %s of %d chunks is given up after %.1f s; 'kvoffload doctor' "
                    "measures the store", job.order.tier, type(job.order).__name__.lower(),
                    len(job.order.keys), now_s - job.begun_s,
                )  # fmt: skip
        return next((job.cancelled_s for job in self.late.values() if job.cancelled_s), None)

    def _leave(self, number: int, reason: str) -> None:
        """Answer a job whose slots the server may still use."""
        job = self.late[number] = self.unanswered.pop(number)
        self._moved(job.order, job.failed(reason))
        job.fail(reason)

    def lose(self) -> list[IOJob]:
        """Count all jobs as late, and return those that are not answered."""
        lost, self.unanswered = self.unanswered, {}
        self.late.update(lost)
        return list(lost.values())

    def release(self) -> None:
        """Release all slots: the server that used them has ended."""
        late, self.late = self.late, {}
        for job in late.values():
            job.listener.released()
