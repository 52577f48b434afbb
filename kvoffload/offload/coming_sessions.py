"""Sessions that said when they return: their chunks come from the tiers shortly before.

A session queues as its next request would, in time for its chunks to be read, and behind all
requests. It leaves the queue when a request of it begins, or when it is late. So the queue decides
what is kept and read for it. All sessions there have at most ``hint_share`` of host memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

from kvoffload.messages import OffloadKey
from kvoffload.metrics.names import RETURN_CHUNKS
from kvoffload.metrics.samples import Registry
from kvoffload.offload.base import ReqContext
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.waiting import Place, WaitingQueue

MOST_SESSIONS, MOST_CHUNKS = 1 << 13, 1 << 16
"""Of all that are awaited; a session beyond loads when it returns."""
FURTHEST_S = 86400.0
"""A session that returns later is not awaited: its chunks would take the room of sooner ones."""
MARGIN = 2.0
"""A read begins so many times earlier than it takes by the tiers' measured speed."""
LEAST_LEAD_S = 1.0
LATE_S = 5.0
"""A session that has not come so long after its time leaves the queue."""


class ComingSessions:
    """Puts sessions into the queue before their time.

    Args:
        queue: of requests.
        host: host memory, whose clock counts.
        read_s: returns how long reading chunks takes.
        figures: counts the chunks of sessions.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        host: HostCache,
        read_s: Callable[[Sequence[OffloadKey]], float],
        figures: Registry,
    ) -> None:
        self._queue = queue
        self._host = host
        self._read_s = read_s
        self._counts = figures.counter(RETURN_CHUNKS, "told", "kept", "lost", "overdue")
        self.times: list[tuple[float, int, bytes]] = []
        """A heap: when something is to be done for the session with this number and name."""
        self._sessions: dict[bytes, tuple[int, float, Sequence[OffloadKey], bytes]] = {}
        """By name: a number, the time of the return, the chunks, and the tenant."""
        self._num_chunks = 0
        self._number = 0
        self._queued: dict[int, int] = {}
        """Session in the queue, by number → what it may have of host memory."""
        self._queued_bytes = 0

    def expect(self, name: bytes, keys: Sequence[OffloadKey], in_s: float, tenant: bytes) -> None:
        """Await a session of a tenant; what was said of it before is void."""
        self.forget(name)
        if in_s > FURTHEST_S or len(self._sessions) >= MOST_SESSIONS:
            return
        if self._num_chunks + len(keys) > MOST_CHUNKS:
            return
        self._number += 1
        self._num_chunks += len(keys)
        self._counts["told"] += len(keys)
        due_s = self._host.now_s() + in_s
        self._sessions[name] = self._number, due_s, keys, tenant
        begins_s = due_s - max(LEAST_LEAD_S, MARGIN * self._read_s(keys))
        heappush(self.times, (begins_s, self._number, name))
        if len(self.times) > 2 * len(self._sessions) + 64:
            valid = {number for number, *_ in self._sessions.values()}
            self.times[:] = sorted(entry for entry in self.times if entry[1] in valid)

    def forget(self, name: bytes) -> None:
        """Await a session no more."""
        if (session := self._sessions.pop(name, None)) is not None:
            number, _, keys, _ = session
            self._num_chunks -= len(keys)
            if num_bytes := self._queued.pop(number, 0):
                self._queued_bytes -= num_bytes
                self._queue.leave(_request_id(number))

    def told(self, name: bytes, keys: Sequence[OffloadKey]) -> dict[bytes, Sequence[OffloadKey]]:
        """Return the awaited sessions, with their chunks, that a request may be of.

        Args:
            name: of the request's session.
            keys: its chunks: the last one of an earlier prompt names a session without a name.
        """
        names = {name, *self._sessions.keys() & set(keys)} if self._sessions else ()
        return {each: self._sessions[each][2] for each in names if each in self._sessions}

    def began(self, name: bytes, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Note a request as the return of its sessions; return what these had told."""
        came = self.told(name, keys)
        for session, told in came.items():
            num_kept = sum(map(self._host.is_ready, told))
            self._counts["kept"] += num_kept
            self._counts["lost"] += len(told) - num_kept
            self.forget(session)
        return [key for told in came.values() for key in told]

    def serve(self) -> None:
        """Do what is due."""
        host, now_s = self._host, self._host.now_s()
        while self.times and self.times[0][0] <= now_s:
            _, number, name = heappop(self.times)
            known, due_s, keys, tenant = self._sessions.get(name, (0, 0.0, (), b""))
            if known != number:
                continue  # it has begun, or said something else
            if now_s >= due_s + LATE_S:
                self._counts["overdue"] += len(keys)
                self.forget(name)
                continue
            heappush(self.times, (due_s + LATE_S, number, name))
            most_bytes = int(host.hint_share * host.capacity_bytes) - self._queued_bytes
            if fitting := keys[: host.fitting(keys, most_bytes)]:
                self._queued[number] = num_bytes = host.bytes_of_all(fitting)
                self._queued_bytes += num_bytes
                context = ReqContext(_request_id(number), tenant=tenant)
                self._queue.add(partial(tuple, fitting), context, Place.AWAITED)


def _request_id(number: int) -> str:
    return f"return {number}"
