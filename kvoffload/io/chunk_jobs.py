"""Loads and stores as an I/O server carries them out: calls of a store on slots of the slab."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from itertools import chain
from typing import Any, TypeVar

from kvoffload.backends.base import WriteResult, reason_of
from kvoffload.backends.blocking_pool import undisturbed
from kvoffload.io.loans import AT_ONCE, Lends, Loans
from kvoffload.io.open_stores import OpenStore, call_for, text_of
from kvoffload.io.protocol import HAD, Answered, Arrived, Load, Store, ToClient

_A = TypeVar("_A", bound=Sequence[Any])

Moved = Callable[[Load | Store, Sequence[int], float], None]

KEYS_PER_CALL = 8
"""Chunks in one read call of a store that does not report each chunk as it arrives."""
ARRIVALS_S = 0.002
"""Time between two messages of arrivals: each message wakes a thread of the engine's process."""


class ChunkJobs:
    """The jobs of one session; used on its event loop.

    Args:
        memory: the slab.
        send: sends a message to the engine.
        before_answer: called with a job's order and store just before its answer is sent.
        moved: called with each job, its verdicts, and the seconds that it took.
    """

    def __init__(
        self,
        memory: memoryview,
        send: Callable[[ToClient], None],
        before_answer: Callable[[Load | Store, OpenStore, Sequence[int]], None],
        moved: Moved | None = None,
    ) -> None:
        self.slot_bytes = 0
        """Bytes of a slot; set before the first job."""
        self._memory = memory
        self._send = send
        self._before_answer, self._moved = before_answer, moved
        self._loop = asyncio.get_running_loop()
        self.calls: dict[int, list[asyncio.Task[str]]] = {}
        """Job in flight → its calls."""
        self.loans = Loans(send)
        """Chunks that the engine reads in the server's memory."""
        self._arrived: deque[tuple[int, bytearray, int]] = deque()
        """Chunks that have arrived: the job, its verdicts, and the place in it."""
        self._is_looking = False
        """Whether the loop looks soon for what has arrived."""
        self._untold: dict[int, list[int]] = {}
        """Job → chunks that the engine is told of next."""

    def begin(
        self, order: Load | Store, store: OpenStore | None
    ) -> Coroutine[Any, Any, None] | None:
        """Begin a job; return what waits for its end and answers it, or None: it has an answer."""
        ok, begun_s = bytearray(len(order.keys)), self._loop.time()
        if isinstance(order, Load) and self._are_lent(order, store, ok):
            self._end(order, ok, "", begun_s)
            return None
        calls: list[Coroutine[Any, Any, str]] = []
        if store is not None and isinstance(order, Store):
            calls.append(self._write(order, store, ok))
        elif store is not None and isinstance(order, Load) and ok:
            limit = KEYS_PER_CALL if store.reads_each is None else len(ok)
            for start in range(0, len(ok), limit):
                part = range(start, min(start + limit, len(ok)))
                calls.append(self._read(order, store, ok, part))
        may_store = isinstance(order, Store) or (store is not None and store.copies)
        name = order.tier if may_store else ""
        self.calls[order.job] = [self._loop.create_task(call, name=name) for call in calls]
        return self._answer(order, store, ok, begun_s)

    def _are_lent(self, order: Load, store: OpenStore | None, ok: bytearray) -> bool:
        """Lend what can be lent at once; return whether that is all of a load."""
        num_sizes = len(ok) if isinstance(order.sizes, int) else len(order.sizes)
        lends = self._lender(order, store)
        if lends is None or not 0 < len(ok) == num_sizes <= AT_ONCE:
            return False
        return not self.loans.lend_verified(order, lends, ok, range(len(ok)))

    def _lender(self, order: Load, store: OpenStore | None) -> Lends | None:
        """Return what may lend chunks of a load."""
        may_lend = order.may_lend and self.loans.may_begin
        return store.lends if may_lend and store is not None else None

    def cancel(self, job: int) -> None:
        """Cancel the calls of a job; it is answered when they have ended."""
        for task in self.calls.get(job, ()):
            task.cancel()

    def cancel_all(self) -> "list[asyncio.Task[str]]":
        """Cancel all calls; return them. The name of one that may store is its tier."""
        calls = list(chain.from_iterable(self.calls.values()))
        for call in calls:
            call.cancel()
        return calls

    async def _answer(
        self, order: Load | Store, store: OpenStore | None, ok: bytearray, begun_s: float
    ) -> None:
        """Wait until nothing touches a job's slots any more; then answer it."""
        calls = self.calls[order.job]
        for call in calls:  # also when the loop ends, and cancels all its tasks
            await undisturbed(call)
        del self.calls[order.job]
        self._untold.pop(order.job, None)
        reasons = ["cancelled" if call.cancelled() else call.result() for call in calls]
        reason = next((why for why in reasons if why), "" if store else "no_store")
        if store is not None:
            self._before_answer(order, store, ok)
        self._end(order, ok, reason, begun_s)

    def _end(self, order: Load | Store, ok: bytearray, reason: str, begun_s: float) -> None:
        seconds = self._loop.time() - begun_s
        if self._moved is not None:
            self._moved(order, ok, seconds)
        self._send(Answered(order.job, bytes(ok), reason, seconds))

    async def _read(self, order: Load, store: OpenStore, ok: bytearray, part: Sequence[int]) -> str:
        """Lend a part of a load, or read it into its slots; return why chunks are missing."""

        def arrived(i: int) -> None:
            self._note_arrival(order.job, ok, part[i])

        try:
            if (lends := self._lender(order, store)) is not None:
                await self.loans.lend(order, lends, ok)
                if not (part := [i for i in part if not ok[i]]):
                    return ""
            keys = [order.keys[i] for i in part]
            views = self._views(order, part)
            if (reads_each := store.reads_each) is not None:
                tenants = [order.tenants[i] for i in part] if order.tenants else ()
                answers = await call_for(tenants, reads_each.read_each, keys, views, arrived)
            else:
                answers = await store.backend.read(keys, views)
            same_length(answers, keys)
            self._count_arrivals()
            for i, fine in enumerate(answers):
                if fine and not ok[part[i]]:
                    arrived(i)
            return reason_of(answers)
        except Exception as error:
            text = "%s: read of %d chunks failed: %s"
            store.failures.warning(text, store.name, len(part), text_of(error))
            return "error"
        finally:  # a load that its deadline cuts off has what arrived
            self._count_arrivals()

    async def _write(self, order: Store, store: OpenStore, ok: bytearray) -> str:
        """Write chunks from their slots; return why some were not stored."""
        keys = order.keys
        try:
            views = self._views(order, range(len(keys)))
            answers = await call_for(order.tenants, store.backend.write, keys, views)
            same_length(answers, keys)
            ok[:] = bytes(HAD if a is WriteResult.PRESENT else bool(a) for a in answers)
        except Exception as error:
            text = "%s: write of %d chunks failed: %s"
            store.failures.warning(text, store.name, len(keys), text_of(error))
            return "error"
        return "" if all(ok) else "refused"

    def _views(self, order: Load | Store, part: Sequence[int]) -> list[memoryview]:
        views = []
        for i, size in zip(part, order.sizes_of(part), strict=True):
            start = order.slots[i] * self.slot_bytes
            is_slot = start >= 0 and size >= 0  # or it would count from the end of the memory
            views.append(self._memory[start : start + size] if is_slot else self._memory[:0])
            if isinstance(order, Store) and len(views[-1]) != size:  # a slice is only shorter
                raise ValueError(f"slot {order.slots[i]} has no {size} bytes")
        return views

    def _note_arrival(self, job: int, ok: bytearray, i: int) -> None:
        """Note that a chunk of a load has arrived; from any thread, returns at once.

        The first one wakes the loop. While more come, the loop looks for them every ``ARRIVALS_S``:
        each wake-up would take two system calls, and the GIL from the threads that load.
        """
        self._arrived.append((job, ok, i))
        if not self._is_looking:
            self._is_looking = True
            # A closed loop refuses: the job was answered at shutdown.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell_arrivals)

    def _count_arrivals(self) -> None:
        """Count the chunks that have arrived as good."""
        while self._arrived:
            job, ok, i = self._arrived.popleft()
            if not ok[i]:
                ok[i] = 1
                if job in self.calls:
                    self._untold.setdefault(job, []).append(i)

    def _tell_arrivals(self) -> None:
        """Tell the engine of what has arrived, and look again soon."""
        self._count_arrivals()
        if not self._untold:
            # A chunk that is noted before this line is seen below, a later one causes a call.
            self._is_looking = False
            if not self._arrived:
                return
            self._is_looking = True
            self._count_arrivals()
        for job, numbers in self._untold.items():
            self._send(Arrived(job, numbers))
        self._untold.clear()
        self._loop.call_later(ARRIVALS_S, self._tell_arrivals)


def same_length(answers: _A, keys: Sequence[bytes]) -> _A:
    """Return a store's answers; raise ValueError if they are not one for each key, in order."""
    if isinstance(answers, (Mapping, Set)) or len(answers) != len(keys):
        found = f"{type(answers).__name__} of {len(answers)}"
        raise ValueError(f"not a list of {len(keys)} answers, one for each key: {found}")
    return answers
