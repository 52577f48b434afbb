"""The stores of a closed loop: the real manager, with or without help, and one that knows all."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from kvoffload.config import RETURN_HINTS, WAITING_SHARE
from kvoffload.messages import OffloadKey
from kvoffload.offload.base import ReqContext
from kvoffload.offload.hints import PARAM
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.registry import POLICIES, load
from kvoffload.replay.requests import Keys

STEPS = 8
"""Calls for the queue between two events: an engine takes more steps in that time."""


@dataclass(eq=False)
class Asked:
    """A request of a session, from its arrival on."""

    session: str
    keys: Sequence[OffloadKey]
    following: Sequence[OffloadKey]
    """The prompt of the session's next request; empty: the session ends."""
    pause_s: float
    """Time from the first token to that request; infinite if there is none."""
    arrived_s: float = 0.0


class ManagerStore:
    """The real manager of host memory, called as a connector calls it.

    Args:
        policy: its name.
        slots: chunks that fit.
        keeps: whether chunks of waiting requests stay.
        tells: whether each request says exactly when its session returns.
        now_s: the clock of the loop.
    """

    def __init__(
        self, policy: str, slots: int, *, keeps: bool, tells: bool, now_s: Callable[[], float]
    ) -> None:
        host = HostCache(slots, load(POLICIES, policy, "policy")(slots))
        host.now_s = now_s
        share = WAITING_SHARE if keeps else 0.0
        self._manager = TieredOffloadingManager(
            host, client_hints=RETURN_HINTS, waiting_share=share
        )
        self._tells = tells

    def _context(self, asked: Asked) -> ReqContext:
        hints: dict[str, object] = {}
        if self._tells:
            never = asked.pause_s == inf
            hints = {"returns": "never"} if never else {"returns_in_s": asked.pause_s}
            hints["session"] = asked.session
        return ReqContext(asked.session, {PARAM: hints} if hints else None)

    def arrived(self, asked: Asked) -> None:
        """Note a request that waits from now on."""
        self._manager.request_queued(lambda: asked.keys, ReqContext(asked.session))
        self._take_steps()

    def _take_steps(self) -> None:
        for _ in range(STEPS):
            self._manager.serve_queue()

    def serve(self, asked: Asked) -> int:
        """Load and store for a request whose turn it is; return the chunks loaded."""
        manager, keys, context = self._manager, list(asked.keys), self._context(asked)
        manager.touch(keys, context)
        found = manager.lookup_prefix(keys, context)[0]
        if found:
            job = manager.begin_load(keys[:found], context)
            manager.request_admitted(context)
            manager.complete(job, [True] * len(job.keys))
        else:
            manager.request_admitted(context)
        stored = manager.prepare_store(keys, context)
        if stored is not None and stored.job is not None:
            manager.complete(stored.job, [True] * len(stored.job.keys))
        return found

    def ended(self, asked: Asked) -> None:
        """Note that a request has its first token."""
        self._manager.retire(list(asked.keys), self._context(asked))
        self._take_steps()


class Oracle:
    """Knows what each session asks for next and when; keeps what is asked for first.

    Chunks that a session needs last leave first, tail first. A bound for what keeping and exact
    returns can reach, as far as prompts of sessions that have not begun are not known.
    """

    def __init__(self, slots: int, now_s: Callable[[], float]) -> None:
        self._slots = slots
        self._now_s = now_s
        self._held: set[OffloadKey] = set()
        self._next: dict[str, tuple[float, Sequence[OffloadKey]]] = {}
        """Session → when it asks, and its prompt then; waiting ones in the order of arrival."""

    def arrived(self, asked: Asked) -> None:
        self._next[asked.session] = (asked.arrived_s, asked.keys)

    def serve(self, asked: Asked) -> int:
        found = next((i for i, k in enumerate(asked.keys) if k not in self._held), len(asked.keys))
        self._held.update(asked.keys)
        self._next.pop(asked.session, None)
        return found

    def ended(self, asked: Asked) -> None:
        if asked.following:
            self._next[asked.session] = (self._now_s() + asked.pause_s, asked.following)
        self._trim(asked)

    def _trim(self, asked: Asked) -> None:
        """Evict what is over the capacity; only the request just served can have brought it."""
        excess = len(self._held) - self._slots
        if excess <= 0:
            return
        coming = sorted(self._next.values(), key=lambda each: -each[0])
        wanted = Counter(key for _, keys in coming for key in keys if key in self._held)
        unwanted = [key for key in self._held if key not in wanted]
        self._held.difference_update(unwanted)
        excess -= len(unwanted)
        for _, keys in coming:
            for key in reversed(keys):
                if key not in self._held:
                    continue
                wanted[key] -= 1
                if not wanted[key] and excess > 0:
                    self._held.remove(key)
                    excess -= 1
            if excess <= 0:
                return


Store = ManagerStore | Oracle
"""Host memory in a closed loop."""


def chunks_of(keys: Keys) -> list[OffloadKey]:
    """Return a trace's blocks as keys of chunks of one group."""
    return [OffloadKey(key + bytes(4)) for key in keys]
