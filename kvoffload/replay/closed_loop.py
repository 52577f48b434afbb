"""Sessions that wait for answers: what a policy does to the queue, and the queue to the policy.

In a replay requests come when they came. In a closed loop a session asks again some time after its
last answer, so a slow engine is asked less. A number of sessions is alive at once. Each asks, waits
in one queue, first come, first served, has its first token, pauses, and asks again. When a session
ends, another one begins. The engine computes the missing part of one prompt at a time, at a fixed
rate. Loads take no time, and there is no cache in GPU memory.
"""

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.replay.loop_stores import Asked, ManagerStore, Oracle, Store, chunks_of
from kvoffload.replay.sessions import gaps_of, sessions_of
from kvoffload.replay.trace import Trace

WARM_UP = 0.25
"""The part of the time before anything is counted."""
ORACLE = "oracle"
HELPED = {"": (False, False), "waiting": (True, False), "told": (False, True), "both": (True, True)}
"""What a policy is helped with: whether chunks of waiting requests stay, and whether each request
says when its session returns."""


@dataclass(frozen=True)
class Loop:
    """A load and an engine."""

    sessions: int
    """Alive at once."""
    slots: int
    """Chunks in host memory."""
    prefill: float
    """Tokens a second that the engine computes."""
    block_tokens: int
    """Tokens in a block of the trace."""
    seconds: float = 3600.0
    """Simulated, of which the first quarter is not counted."""
    seed: int = 0
    """Of the order of the sessions, and of their beginnings."""


@dataclass
class Served:
    """What a loop counted after its warm-up."""

    blocks: int = 0
    hits: int = 0
    seconds: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    """Of each request: the time from its arrival to its first token."""

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def per_hour(self) -> float:
        return 3600 * len(self.waits_s) / self.seconds if self.seconds else 0.0

    @property
    def mean_s(self) -> float:
        return fmean(self.waits_s) if self.waits_s else 0.0

    def plain(self) -> dict[str, Any]:
        return {
            "prefix_hit_rate": round(self.hit_rate, 6),
            "requests_per_hour": round(self.per_hour, 1),
            "mean_time_to_first_token_s": round(self.mean_s, 3),
        }


def of_policy(trace: Trace, loop: Loop, policy: str, helped: str) -> Served:
    """Run a loop over the real manager with a policy, helped as one of :data:`HELPED` says.

    Raises:
        ConfigError: the trace has no times, or there is no such policy.
    """
    clock = [0.0]
    keeps, tells = HELPED[helped]
    slots = min(loop.slots, trace.distinct)  # there are tables for all of them
    store = ManagerStore(policy, slots, keeps=keeps, tells=tells, now_s=lambda: clock[0])
    return run(trace, loop, store, clock)


def of_oracle(trace: Trace, loop: Loop) -> Served:
    """Run a loop over a store that knows the sessions.

    Raises:
        ConfigError: the trace has no times.
    """
    clock = [0.0]
    return run(trace, loop, Oracle(loop.slots, lambda: clock[0]), clock)


def run(trace: Trace, loop: Loop, store: Store, clock: list[float]) -> Served:
    """Run a loop over one store.

    Args:
        trace: its sessions are taken in a random order, each once.
        loop: the load and the engine.
        store: host memory, new.
        clock: what the store reads; one number, set here.

    Raises:
        ConfigError: the trace has no times, or ends before anything is counted.
    """
    if trace.requests.times[-1] <= 0:
        raise ConfigError("trace", trace.name, "has no times: a closed loop needs the pauses")
    rng = random.Random(loop.seed)
    more = _asked(trace, rng)
    arrivals: list[tuple[float, int, Iterator[Asked]]] = []
    order = count()
    warm_up_s = loop.seconds * WARM_UP
    for _ in range(loop.sessions):
        begin_s = rng.uniform(0, warm_up_s / 2)
        heapq.heappush(arrivals, (begin_s, next(order), next(more, iter(()))))
    served = Served()
    queue: deque[tuple[Asked, Iterator[Asked]]] = deque()
    free_s = 0.0
    while arrivals or queue:
        if arrivals and (not queue or arrivals[0][0] <= free_s):
            time_s, _, session = heapq.heappop(arrivals)
            asked = next(session, None)
            if asked is None:  # the session has ended: another one begins
                session = next(more, iter(()))
                asked = next(session, None)
            if asked is None:
                break  # no further session: fewer would be alive from now on
            clock[0] = asked.arrived_s = time_s
            store.arrived(asked)
            queue.append((asked, session))
            free_s = max(free_s, time_s) if len(queue) == 1 else free_s
            continue
        asked, session = queue.popleft()
        clock[0] = free_s
        found = store.serve(asked)
        # The last token is computed at least.
        missing = max(1, (len(asked.keys) - found) * loop.block_tokens)
        free_s += missing / loop.prefill
        clock[0] = free_s
        store.ended(asked)
        if free_s >= loop.seconds:
            break
        if free_s >= warm_up_s:
            served.blocks += len(asked.keys)
            served.hits += found
            served.waits_s.append(free_s - asked.arrived_s)
        pause_s = asked.pause_s if asked.following else 0.0
        heapq.heappush(arrivals, (free_s + pause_s, next(order), session))
    served.seconds = max(0.0, free_s - warm_up_s)
    if not served.waits_s:
        raise ConfigError(
            "trace",
            trace.name,
            f"too short: its sessions ended in the {warm_up_s:g} s "
            "that are not counted; a longer one, fewer sessions, or fewer --minutes",
        )
    return served


def _asked(trace: Trace, rng: random.Random) -> Iterator[Iterator[Asked]]:
    """Yield the sessions in a random order, each as its requests."""
    sessions = sessions_of(trace.requests)
    gaps = gaps_of(trace.requests, sessions)
    names = list(range(len(sessions)))
    rng.shuffle(names)
    for name in names:
        yield _session(trace, str(name), sessions[name], gaps)


def _session(
    trace: Trace, name: str, numbers: Sequence[int], gaps: Sequence[float]
) -> Iterator[Asked]:
    for at, number in enumerate(numbers):
        following = trace.requests[numbers[at + 1]] if at + 1 < len(numbers) else ()
        keys = chunks_of(trace.requests[number])
        yield Asked(name, keys, chunks_of(following), gaps[number])
