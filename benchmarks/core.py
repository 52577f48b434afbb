"""Hashing and the block manager, against vLLM's in the same process and against plain Python.

``kvoffload bench core``, or ``python -m benchmarks.core`` where the command line is not installed.
The limit of a row is vLLM's time for the same work. Without vLLM, only the rows against plain
Python are measured. The two sides take turns, and each row reports the best of its rounds, so that
a busy machine disturbs both alike. ``ratio`` is how many times faster we are (plain Python: how
close).
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness import Row, report, row, timed
from kvoffload.core import interface
from kvoffload.core.block_pool import BlockPool
from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.manager import KVCacheManager
from kvoffload.core.request import Request

BLOCK = 16
PROMPT = 32 * 1024
BLOCKS = PROMPT // BLOCK
HYBRID: list[int | None] = [None] + [4096] * 5
Round = Callable[[], float]
"""Prepares one round, does the work, and returns the seconds the work alone took."""


def run() -> dict[str, Any]:
    rows = [*_plain_rows(), *_scaling_rows()]
    try:
        vllm = _Vllm()
    except ImportError as error:
        print(f"no comparison with vLLM: {error}", file=sys.stderr)
    else:
        rows += _vllm_rows(vllm)
    return report("core", rows)


def _best(*sides: Round, turns: int = 6, rounds: int = 3) -> list[float]:
    """Let the sides take turns of a few rounds and return each one's best time."""
    best = [float("inf")] * len(sides)
    gc.collect()
    gc.disable()
    try:
        for _ in range(turns):
            for index, side in enumerate(sides):
                best[index] = min(best[index], *(side() for _ in range(rounds)))
    finally:
        gc.enable()
    return best


def _tokens(seed: int, count: int = PROMPT) -> list[int]:
    return random.Random(seed).choices(range(128_000), k=count)


def _groups(interface: Any, windows: list[int | None]) -> list[Any]:
    """Make a group of one layer for each window, with the formats of one of the two sides."""
    import torch

    shape = {"block_size": BLOCK, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    specs = [
        interface.FullAttentionSpec(**shape)
        if window is None
        else interface.SlidingWindowSpec(**shape, sliding_window=window)
        for window in windows
    ]
    return [interface.KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)]


# -- ours ----------------------------------------------------------------------------------------


class _Ours:
    """The same verbs as :class:`_Vllm`, so that every case is written once."""

    def __init__(self) -> None:
        self.hasher = BlockHasher(BLOCK)
        self._count = 0

    def manager(self, blocks: int, windows: list[int | None], events: bool = False) -> Any:
        groups = _groups(interface, windows)
        return KVCacheManager(
            interface.KVCacheConfig(blocks, [], groups),
            max_model_len=10**6,
            enable_kv_cache_events=events,
        )

    def request(self, tokens: list[int]) -> Any:
        self._count += 1
        return Request(f"r{self._count}", HashChain(self.hasher, tokens))

    def lookup(self, manager: Any, request: Any) -> Any:
        return manager.get_computed_blocks(request)

    def append(self, request: Any, token: int) -> None:
        request.chain.append(token)


class _Vllm:
    def __init__(self) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core.kv_cache_manager import KVCacheManager as Manager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request as VllmRequest

        init_none_hash(sha256)
        self._interface, self._manager, self._request = kv_cache_interface, Manager, VllmRequest
        self._params = SamplingParams(max_tokens=100_000)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._count = 0

    def manager(self, blocks: int, windows: list[int | None], events: bool = False) -> Any:
        groups = _groups(self._interface, windows)
        return self._manager(
            self._interface.KVCacheConfig(blocks, [], groups),
            max_model_len=10**6,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_kv_cache_events=events,
        )

    def request(self, tokens: list[int]) -> Any:
        self._count += 1
        return self._request(
            f"r{self._count}", tokens, self._params, None, block_hasher=self._hasher
        )

    def lookup(self, manager: Any, request: Any) -> Any:
        return manager.get_computed_blocks(request)[:2]

    def append(self, request: Any, token: int) -> None:
        request.append_output_token_ids(token)


Side = _Ours | _Vllm


def _admit(side: Side, manager: Any, request: Any) -> None:
    found, count = side.lookup(manager, request)
    done = manager.allocate_slots(
        request,
        len(request.block_hashes) * BLOCK - count,
        num_new_computed_tokens=count,
        new_computed_blocks=found,
    )
    if done is None:
        raise RuntimeError("the benchmark's cache is too small")


# -- cases: each returns a round for one side ----------------------------------------------------


def _hashing(side: Side) -> Round:
    tokens = _tokens(1)
    return lambda: timed(lambda: side.request(tokens))


def _cold(
    side: Side, events: bool, blocks: int = 100_000, windows: list[int | None] | None = None
) -> Round:
    """Admissions into a full cache: every block taken evicts a cached one.

    With ``windows`` the cache is not filled before.
    """
    manager = side.manager(blocks, windows or [None], events)
    seeds = iter(range(10**9))

    def once() -> float:
        request = side.request(_tokens(next(seeds)))
        manager.take_events()
        seconds = timed(lambda: _admit(side, manager, request))
        manager.free(request)
        return seconds

    for _ in range(0 if windows else blocks // BLOCKS + 1):
        once()
    return once


def _cached(side: Side, windows: list[int | None], blocks: int = 100_000) -> Round:
    """Look up a prompt whose blocks are all cached and free."""
    manager = side.manager(blocks, windows)
    tokens = _tokens(1)
    first = side.request(tokens)
    _admit(side, manager, first)
    manager.free(first)

    def once() -> float:
        request = side.request([*tokens, 1])
        seconds = timed(lambda: _admit(side, manager, request))
        manager.free(request)
        return seconds

    return once


def _decode(side: Side, events: bool, steps: int = 512) -> Round:
    """One request that grows token by token: hash, allocate, register."""
    manager = side.manager(100_000, [None], events)
    seeds = iter(range(10**9))

    def once() -> float:
        request = side.request(_tokens(next(seeds), 1024))
        _admit(side, manager, request)
        request.num_computed_tokens = 1024
        tokens = _tokens(next(seeds), steps)

        def work() -> None:
            for token in tokens:
                side.append(request, token)
                manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1

        seconds = timed(work)
        manager.free(request)
        manager.take_events()
        return seconds

    return once


def _refused(side: Side, busy: bool) -> Round:
    """The same cached request asks again, step after step, and there is no room.

    ``busy``: between its tries a running request fills and registers a block.
    """
    manager = side.manager(4000, [None])
    cached = side.request(_tokens(1))
    _admit(side, manager, cached)
    manager.free(cached)
    hog = side.request(_tokens(2, 1800 * BLOCK))
    _admit(side, manager, hog)
    hog.num_computed_tokens = 1800 * BLOCK
    waiting = side.request([*_tokens(1), *_tokens(3, 200 * BLOCK)])

    def attempt() -> None:
        found, count = side.lookup(manager, waiting)
        new = manager.allocate_slots(
            waiting, 200 * BLOCK, num_new_computed_tokens=count, new_computed_blocks=found
        )
        if new is not None:
            raise RuntimeError("the request should have been refused")

    def once() -> float:
        if busy:
            for token in range(BLOCK):
                side.append(hog, token)
            manager.allocate_slots(hog, BLOCK)
            hog.num_computed_tokens += BLOCK
        return timed(attempt)

    return once


# -- rows ----------------------------------------------------------------------------------------


def _vllm_rows(vllm: _Vllm) -> list[Row]:
    ours = _Ours()
    per_block = 1e6 / BLOCKS
    cases: list[tuple[str, Callable[[Side], Round], float, str]] = [
        ("hash a 32k prompt", _hashing, per_block, "µs/block"),
        ("admit a cached 32k prompt", lambda s: _cached(s, [None]), per_block, "µs/block"),
        ("admit a cold 32k prompt", lambda s: _cold(s, False), per_block, "µs/block"),
        ("admit a cold 32k prompt, events", lambda s: _cold(s, True), per_block, "µs/block"),
        ("hybrid 1 full + 5 windows, cached", lambda s: _cached(s, HYBRID), per_block, "µs/block"),
        (
            "hybrid 1 full + 5 windows, cold",
            lambda s: _cold(s, False, windows=HYBRID),
            per_block,
            "µs/block",
        ),
        ("decode step", lambda s: _decode(s, False), 1e6 / 512, "µs"),
        ("decode step, events", lambda s: _decode(s, True), 1e6 / 512, "µs"),
        ("refused admission, nothing changed", lambda s: _refused(s, False), 1e6, "µs"),
        ("refused admission, others decode", lambda s: _refused(s, True), 1e6, "µs"),
    ]
    rows = []
    for case, make, scale, unit in cases:
        mine, theirs = _best(make(ours), make(vllm))
        name = "vLLM, same run"
        rows.append(row(case, mine * scale, unit, theirs * scale, name, is_inverse=True))
    return rows


def _plain_rows() -> list[Row]:
    """Hashing and lookup against the bare calls they cannot do without."""
    tokens = _tokens(1)
    ours = _Ours()
    hashes = ours.request(tokens).block_hashes
    table = dict(zip(hashes, range(BLOCKS), strict=True))

    def bare_hashing() -> None:
        data = array("I", tokens).tobytes()
        parent = bytes(32)
        for i in range(0, len(data), 4 * BLOCK):
            parent = hashlib.sha256(parent + data[i : i + 4 * BLOCK]).digest()

    def bare_lookups() -> None:
        for block_hash in hashes:
            table.get(block_hash)

    rows = []
    for case, round_, bare, name in (
        ("hash a 32k prompt", _hashing(ours), bare_hashing, "bare hashlib"),
        ("admit a cached 32k prompt", _cached(ours, [None]), bare_lookups, "bare dict.get"),
    ):
        mine, least = (1e6 / BLOCKS * s for s in _best(round_, partial(timed, bare)))
        rows.append(row(case, mine, "µs/block", least, name, is_inverse=True))
    return rows


def _scaling_rows() -> list[Row]:
    """Cost per block in large pools against small ones, and bytes of bookkeeping a block."""
    ours = _Ours()
    scale = 1e6 / BLOCKS
    rows = []
    cases: list[tuple[str, Callable[[int], Round]]] = [
        ("admit a cold 32k prompt", lambda n: _cold(ours, False, n)),
        ("admit a cached 32k prompt", lambda n: _cached(ours, [None], n)),
    ]
    for case, make in cases:
        small, large = _best(make(10_000), make(1_000_000))
        title, name = f"{case}, 1,000,000 blocks", "the same with 10,000 blocks"
        rows.append(row(title, large * scale, "µs/block", small * scale, name))
    count = 200_000
    hashes = [i.to_bytes(32, "little") for i in range(count)]
    gc.collect()
    tracemalloc.start()
    pool = BlockPool(count + 1)
    blocks = pool.take(count)
    pool.register(0, blocks, hashes)
    del blocks
    size = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    case = "bookkeeping, the 32 bytes of the hash included"
    rows.append(row(case, size, "bytes/block", 100, "the aim"))
    return rows


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
