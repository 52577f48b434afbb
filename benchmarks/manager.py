"""The offloading manager against vLLM's ``CPUOffloadingManager``, LRU and ARC, in the same run.

``kvoffload bench manager``. Batches of 2,048 chunks over a capacity of 100,000, full; then at
2 million. Where vLLM cannot be imported its rows are missing, which a line on standard error says;
run it with an environment that has both. At 100,000 the peers take turns. Each row is the best of
several rounds, and every key is a new object, as it is when an engine computes it. Takes 2 minutes
and 3 GB of memory.

The last rows look up a prompt on a tier, as the scheduler half of vLLM does.

A cycle is what the connectors do for a request. They count its use, store or load its chunks,
answer the transfer, and end the request. vLLM's managers get the calls of its scheduler.
"""

import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Row, report, row, timed
from benchmarks.vllm_parts.tier_lookup import tier_rows
from kvoffload.config import WAITING_SHARE
from kvoffload.messages import OffloadKey, make_offload_key
from kvoffload.offload.base import ReqContext
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.offload.waiting import PORTION
from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy

CAPACITY = 100_000
BATCH = 2048
ROUNDS = 6
TURN = 4
"""Batches a side has in a turn. With one, each would find the caches full of the other's data."""
PINNED = 20_000
LARGE = 2_000_000
QUEUED = 2000
"""Chunks of a prompt in the queue."""
CYCLES = (
    (
        "store cycle with eviction",
        ("begin, store", "prepare_store", "complete_store", "end, store"),
    ),
    ("load cycle", ("begin, load", "prepare_load", "complete_load", "end, load")),
    ("lookup of a hit", ("lookup",)),
)


class Side:
    """One manager of ours, driven as the connectors drive it."""

    def __init__(self, name: str, manager: Any) -> None:
        self.name = name
        self.manager = manager
        self._count = 0
        self.best: dict[str, float] = {}

    def context(self, keys: Sequence[OffloadKey] = ()) -> Any:
        """Make the context of a new request with these chunks."""
        self._count += 1
        return ReqContext(f"r{self._count}")

    def begin(self, keys: Sequence[OffloadKey], context: Any) -> None:
        """Tell the manager of a request before room is made for it."""
        self.manager.touch(keys, context)

    def prepare(self, what: str, keys: Sequence[OffloadKey], context: Any) -> Any:
        """Begin a load or a store; return its job."""
        if what == "load":
            return self.manager.begin_load(keys, context)
        return self.manager.prepare_store(keys, context).job

    def complete(self, what: str, job: Any, ok: Sequence[bool]) -> None:
        """Answer a job, with a result for each chunk."""
        self.manager.complete(job, ok)

    def end(self, keys: Sequence[OffloadKey], context: Any) -> None:
        """Tell the manager that a request ended."""
        self.manager.retire(keys, context)

    def time(self, verb: str, count: int, call: Callable[[], object]) -> None:
        """Keep the best time of a verb, in seconds a chunk."""
        took = timed(call) / count
        self.best[verb] = min(self.best.get(verb, took), took)

    def us(self, verbs: Sequence[str]) -> float:
        """Return the best times of verbs, one after the other, in microseconds a chunk."""
        return sum(self.best[verb] for verb in verbs) * 1e6

    def look_up(self, keys: Sequence[OffloadKey]) -> Callable[[], object]:
        """Look up chunks in the cheapest way this manager has."""
        context = self.context()
        if isinstance(self.manager, TieredOffloadingManager):
            return lambda: self.manager.lookup_prefix(keys, context)
        return lambda: [self.manager.lookup(key, context) for key in keys]

    def has(self, key: OffloadKey) -> bool:
        """Whether a chunk is there and ready."""
        answer = self.manager.lookup(key, self.context())
        return answer is True or getattr(answer, "name", "") == "HIT"

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store the chunks of a request and drop what is told of it."""
        self._request("store", keys)
        list(self.manager.take_events())

    def load(self, keys: Sequence[OffloadKey]) -> None:
        """Load the chunks of a request."""
        self._request("load", keys)

    def _request(self, what: str, keys: Sequence[OffloadKey]) -> None:
        context, ok = self.context(keys), (True,) * len(keys)
        count = len(keys)
        jobs: list[Any] = []
        self.time(f"begin, {what}", count, lambda: self.begin(keys, context))
        self.time(f"prepare_{what}", count, lambda: jobs.append(self.prepare(what, keys, context)))
        self.time(f"complete_{what}", count, lambda: self.complete(what, jobs[0], ok))
        self.time(f"end, {what}", count, lambda: self.end(keys, context))


class VllmSide(Side):
    """One manager of vLLM's, driven as its scheduler drives it."""

    def context(self, keys: Sequence[OffloadKey] = ()) -> Any:
        """Make the context of a new request; its scheduler notes where each chunk ends."""
        from vllm.v1.kv_offload.base import ReqContext as VllmContext

        self._count += 1
        context = VllmContext(f"r{self._count}")
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (i + 1))
        return context

    def begin(self, keys: Sequence[OffloadKey], context: Any) -> None:
        """Tell the manager of a request."""
        self.manager.on_new_request(context)

    def prepare(self, what: str, keys: Sequence[OffloadKey], context: Any) -> Any:
        """Begin a load or a store; its scheduler answers with the chunks as a set."""
        getattr(self.manager, f"prepare_{what}")(keys, context)
        return set(keys), context

    def complete(self, what: str, job: Any, ok: Sequence[bool]) -> None:
        """Answer a load or a store."""
        getattr(self.manager, f"complete_{what}")(*job)

    def end(self, keys: Sequence[OffloadKey], context: Any) -> None:
        """Tell the manager that a request ended."""
        self.manager.on_request_finished(context)


Maker = Callable[[int], Side]
"""Makes a side with a manager of so many chunks."""


def makers() -> dict[str, Maker]:
    """Ours, and vLLM's where it is installed."""
    found: dict[str, Maker] = {
        "ours, LRU": lambda capacity: ours(capacity, "ours, LRU", LRUPolicy),
        "ours, ARC": lambda capacity: ours(capacity, "ours, ARC", ARCPolicy),
        "ours, handicap": lambda capacity: ours(capacity, "ours, handicap", HandicapPolicy),
    }
    try:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    except ImportError as error:
        print(f"manager: no rows against vLLM, which cannot be imported: {error}", file=sys.stderr)
        return found

    def peer(policy: str) -> Maker:
        return lambda capacity: VllmSide(
            f"vLLM, {policy.upper()}", CPUOffloadingManager(capacity, policy, enable_events=True)
        )

    return found | {"vLLM, LRU": peer("lru"), "vLLM, ARC": peer("arc")}


def ours(capacity: int, name: str, policy: type) -> Side:
    """Make a side of ours with host memory alone."""
    return Side(name, TieredOffloadingManager(HostCache(capacity, policy(capacity))))


def stored(side: Side, first: int, end: int) -> int:
    """Store new chunks in batches, up to one of this number; return the number after the last."""
    while first < end:
        side.store(new_keys(first, BATCH))
        first += BATCH
    return first


def new_keys(first: int, count: int) -> list[OffloadKey]:
    """Make keys with 32-byte hashes."""
    return [make_offload_key(i.to_bytes(8, "big") * 4, 0) for i in range(first, first + count)]


def run() -> dict[str, Any]:
    """Measure cycles, pins, memory and growth."""
    made = makers()
    measured = [make(CAPACITY) for make in made.values()]
    _cycles(measured)
    rows = _cycle_rows(measured)
    del measured
    rows += [_pinned_row(make(CAPACITY)) for make in made.values()]
    rows += [row for make in made.values() for row in _entry_rows(make)]
    rows += _growth_rows(made)
    rows += _queue_rows()
    rows += tier_rows()
    return report("manager", rows)


def _cycles(measured: Sequence[Side]) -> None:
    for side in measured:
        first = stored(side, 0, CAPACITY + BATCH)
        side.best.clear()  # of a store that was not full
    for _ in range(ROUNDS):
        for side in measured:
            for batch in range(TURN):
                _one_round(side, first + batch * BATCH)
        first += TURN * BATCH


def _one_round(side: Side, first: int) -> None:
    side.store(new_keys(first, BATCH))
    again = new_keys(first, BATCH)
    side.time("lookup", BATCH, side.look_up(again))
    side.time("lookup, miss", BATCH, side.look_up(new_keys(1 << 40, BATCH)[:1] * BATCH))
    side.load(again)


def _cycle_rows(measured: Sequence[Side]) -> list[Row]:
    cases = dict(CYCLES) | {verb: (verb,) for _, verbs in CYCLES[:2] for verb in verbs}
    mine = [side for side in measured if side.name.startswith("ours")]
    peers = [side for side in measured if side not in mine]
    rows = []
    for case, verbs in cases.items():
        for side in mine:
            title, value = f"{case}; {side.name}", side.us(verbs)
            if not peers:
                rows.append(row(title, value, "us/chunk"))
            rows += [row(title, value, "us/chunk", peer.us(verbs), peer.name) for peer in peers]
    return rows


def _pinned_row(side: Side) -> Row:
    """Store one chunk at a time with the oldest chunks pinned, and with none pinned."""
    stored(side, 0, CAPACITY)
    oldest = [
        key for key in new_keys(0, PINNED + BATCH) if side.manager.lookup(key, side.context())
    ]
    free_s = _one_by_one(side, 1 << 32)
    pinned = [key for key in oldest if side.has(key)][:PINNED]
    context = side.context()
    side.manager.prepare_load(pinned, context)
    pinned_s = _one_by_one(side, 1 << 33)
    side.manager.complete_load(pinned, context)
    case = f"one-chunk store with {len(pinned)} oldest pinned; {side.name}"
    return row(case, pinned_s * 1e6, "us", free_s * 1e6, "none pinned")


def _queue_rows() -> list[Row]:
    """Queue prompts of which host memory keeps as much as it may; and serve the queue."""
    host = HostCache(CAPACITY, HandicapPolicy(CAPACITY))
    manager = TieredOffloadingManager(host, waiting_share=WAITING_SHARE)
    side, prompts = Side("ours, handicap", manager), range(CAPACITY // QUEUED)
    for number in prompts:
        side.store(new_keys(number * QUEUED, QUEUED))
    queued, served, loading, idle = list[float](), list[float](), list[float](), list[float]()
    for number in prompts:
        keys, context = new_keys(number * QUEUED, QUEUED), ReqContext(f"queued {number}")
        queued.append(_took_s(lambda: manager.request_queued(lambda: keys, context)))  # noqa: B023
        served += [_took_s(manager.serve_queue) for _ in range(QUEUED // PORTION + 1)]
    for number in prompts:
        keys, context = new_keys(number * QUEUED, QUEUED), ReqContext(f"queued {number}")
        job = manager.begin_load(keys, context) if number % 2 else None
        took = idle if job is None else loading
        took.append(_took_s(lambda: manager.request_admitted(context)))  # noqa: B023
        if job is not None:
            manager.complete(job, [True] * len(job.keys))
        served += [_took_s(manager.serve_queue) for _ in range(QUEUED // PORTION)]
    title = f"a queue of prompts of {QUEUED:,} chunks; {side.name}"
    rows = [row(f"serve_queue, the longest, {title}", max(served) * 1e6, "us")]
    for case, took in (
        ("request_queued", queued),
        ("serve_queue", served),
        ("request_admitted, loading", loading),
        ("request_admitted", idle),
    ):
        rows.append(row(f"{case}, {title}", statistics.median(took) * 1e6, "us", 200, "goal"))
    return rows


def _took_s(call: Callable[[], object]) -> float:
    """Return the processor time of a call: of some microseconds, on a machine with other work."""
    started = time.thread_time()
    call()
    return time.thread_time() - started


def _one_by_one(side: Side, first: int) -> float:
    times = []
    for i in range(300):
        keys, context = new_keys(first + i, 1), side.context()
        started = time.perf_counter()
        side.manager.prepare_store(keys, context)
        side.manager.complete_store(keys, context)
        times.append(time.perf_counter() - started)
        list(side.manager.take_events())
    return statistics.median(times)


def _entry_rows(make: Maker) -> list[Row]:
    """Count bytes when the store has just become full, and when it has turned over twice."""
    gc.collect()
    tracemalloc.start()
    side = make(CAPACITY)
    rows = []
    first = 0
    for state, turns in (("just filled", 1), ("turned over twice", 3)):
        first = stored(side, first, turns * CAPACITY)
        used, _ = tracemalloc.get_traced_memory()
        case = f"memory of an entry with its key, {state}; {side.name}"
        rows.append(row(case, used / CAPACITY, "bytes", 250, "goal"))
    tracemalloc.stop()
    return rows


def _growth_rows(made: dict[str, Maker]) -> list[Row]:
    """Compare cycles at 2 million entries with those at 100,000, and with vLLM's."""
    took = {
        name: {size: _grown(make, size) for size in (CAPACITY, LARGE)}
        for name, make in made.items()
    }
    peers = [name for name in made if name.startswith("vLLM")]
    rows = []
    for case, _ in CYCLES:
        for name in made:
            title, value = f"{case} at {LARGE:,} entries; {name}", took[name][LARGE][case]
            small = took[name][CAPACITY][case]
            rows.append(row(title, value, "us/chunk", small, f"at {CAPACITY:,}"))
            rows += [
                row(title, value, "us/chunk", took[peer][LARGE][case], peer)
                for peer in (peers if name not in peers else ())
            ]
    small, large = _dict_get(CAPACITY), _dict_get(LARGE)
    title = f"dict.get at {LARGE:,} entries; a bare dict"
    rows.append(row(title, large * 1e6, "us/chunk", small * 1e6, f"at {CAPACITY:,}"))
    return rows


def _grown(make: Maker, capacity: int) -> dict[str, float]:
    """Return the best time of each cycle of a manager that is full, in microseconds a chunk."""
    side = make(capacity)
    first = stored(side, 0, capacity)
    side.best.clear()
    for _ in range(ROUNDS * TURN):
        _one_round(side, first)
        first += BATCH
    return {case: side.us(verbs) for case, verbs in CYCLES}


def _dict_get(entries: int) -> float:
    """Return the seconds a bare ``dict`` takes for a key: what the processor's caches cost."""
    table = {key: i for i, key in enumerate(new_keys(0, entries))}
    best = float("inf")
    for first in range(0, entries - BATCH, entries // 24):
        keys = new_keys(first, BATCH)
        best = min(best, timed(lambda: list(map(table.get, keys))) / BATCH)  # noqa: B023
    return best
