"""Lookups of a prompt whose chunks are on a tier, by the number of ranks; needs no vLLM."""

import tempfile
import time
from collections.abc import Callable

from benchmarks.harness import Row, row
from kvoffload.connectors.vllm.tier_index import TierIndex
from kvoffload.connectors.vllm.worker_presence import WorkerPresence
from kvoffload.messages import OffloadKey, make_offload_key
from kvoffload.offload.base import ReqContext
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy
from kvoffload.registry import open_backend
from kvoffload.transfer.slab import Slab
from tests.support.io_rig import client_over

CHUNKS = 8_000
INDEXED = 200_000
"""Chunks in the index."""
ROUNDS = 10
GOAL_MS = 2.0
GOAL_US = 5.0


def tier_rows() -> list[Row]:
    """Measure the scheduler's lookup with 1 and 8 ranks, and a worker's step without changes."""
    return [*(_lookup_row(ranks) for ranks in (1, 8)), _idle_row()]


def _keys(count: int) -> list[OffloadKey]:
    """Make keys that are new objects, as an engine's are."""
    return [make_offload_key(i.to_bytes(8, "big") * 4, 0) for i in range(count)]


def _lookup_row(num_ranks: int) -> Row:
    index = TierIndex(range(num_ranks), 0.25)
    for rank in range(num_ranks):
        index.apply(rank, _keys(INDEXED), [])
        index.completed(rank)
    host = HostCache(2 * CHUNKS, LRUPolicy(2 * CHUNKS))
    manager = TieredOffloadingManager(host, [Tier("disk", index)])

    def look_up() -> float:
        keys, context = _keys(CHUNKS), ReqContext("r")
        started = time.perf_counter()
        found = manager.lookup_prefix(keys, context)
        took = time.perf_counter() - started
        if found != (CHUNKS, False):
            raise RuntimeError(f"a lookup found {found}")
        return took

    case = f"lookup of {CHUNKS:,} chunks on a tier; {num_ranks} ranks"
    return row(case, _best(look_up) * 1e3, "ms", GOAL_MS, "goal")


def _idle_row() -> Row:
    with tempfile.TemporaryDirectory() as folder:
        options = {"root": f"{folder}/kv", "min_free": 0}
        client = client_over({"disk": open_backend("disk", options, "bench")}, Slab(1, 4096))
        presence = WorkerPresence(0, client.tiers)

        def step() -> float:
            started = time.perf_counter()
            for _ in range(1000):
                presence.take_parts()
                presence.take_answers()
            return (time.perf_counter() - started) / 1000

        best = _best(step)
        client.close()
    return row("a worker's step in which no store changed", best * 1e6, "us", GOAL_US, "goal")


def _best(measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(ROUNDS))
