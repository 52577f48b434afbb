"""What a step costs the hooks of a connector's halves; no model computes.

    python -m benchmarks.vllm_parts.step_cost        with the Python that has vLLM; half a minute

Each case runs with our connector and with vLLM's own, whose copies torch does. The connectors take
turns, and the best of their rounds counts. A case of nothing to do, or of waiting, is the median of
its steps. Other cases add up all steps from the requests to the end of their transfers.
"""

import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, report, row
from benchmarks.vllm_parts.engine import PEER, make_model, ours, theirs
from benchmarks.vllm_parts.halves import BLOCK, Halves

SIDES = ("scheduler", "worker")
STEPS = 12
"""Of a block's steps those that begin and end no block."""
ROUNDS = 5
CHUNKS = (16, 400)
HOST_BYTES = 256 << 20
Cost = dict[str, float]
"""Microseconds by side, and functions called by ``calls`` and side."""


def run() -> dict[str, Any]:
    """Measure every case with both connectors."""
    found: dict[tuple[str, str], list[Cost]] = {}
    sys.path.insert(0, str(PEER))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = make_model(folder / "model")
        disk = {"type": "disk", "root": str(folder / "kv"), "min_free": 0}
        host = {"cpu_bytes": HOST_BYTES, "blocks_per_chunk": 1, "weights_id": "random"}
        connectors = {
            "ours": ours(host),
            "ours with disk": ours({**host, "backends": [disk]}),
            "vLLM's": theirs(HOST_BYTES),
        }
        rigs = {
            who: stack.enter_context(_rig(model, transfer)) for who, transfer in connectors.items()
        }
        for _ in range(ROUNDS):
            for who, rig in rigs.items():
                for case, measure in _cases().items():
                    found.setdefault((case, who), []).append(measure(rig))
    return report("vllm_steps", [_row(*key, costs) for key, costs in sorted(found.items())])


@contextlib.contextmanager
def _rig(model: str, transfer: dict[str, Any]) -> Iterator[Halves]:
    with Halves(model, transfer) as rig:
        rig.quiet()
        yield rig


def _cases() -> dict[str, Callable[[Halves], Cost]]:
    cases: dict[str, Callable[[Halves], Cost]] = {
        f"nothing to do, {count} requests decode": partial(_idle, count=count) for count in (1, 256)
    }
    for chunks in CHUNKS:
        cases[f"store of {chunks} chunks"] = partial(_store, chunks=chunks)
        cases[f"load of {chunks} chunks"] = partial(_load, chunks=chunks)
    cases["16 stores of 2 chunks in one step"] = partial(_store, chunks=2, count=16)
    cases[f"a request of {CHUNKS[-1]} chunks waits for room"] = _waiting
    return cases


_rng = random.Random(1)


def _prompt(chunks: int) -> list[int]:
    return _rng.choices(range(3, 512), k=chunks * BLOCK + 1)


def _idle(rig: Halves, count: int) -> Cost:
    for _ in range(count):
        rig.add(_prompt(1), 3 * BLOCK)
    for _ in range(BLOCK):
        rig.step()
        time.sleep(0.002)
    cost = _steps(rig)
    rig.meter.is_counting = True
    rig.step()
    calls = rig.meter.take()[1]
    rig.meter.is_counting = False
    rig.quiet()
    return {**cost, **{f"calls {side}": calls[side] for side in SIDES}}


def _steps(rig: Halves) -> Cost:
    """Return the medians of some steps."""
    rig.meter.take()
    times = []
    for _ in range(STEPS):
        rig.step()
        times.append(rig.meter.take()[0])
    return {side: statistics.median(step[side] for step in times) * 1e6 for side in SIDES}


def _over(rig: Halves, prompts: list[list[int]]) -> Cost:
    """Add up the steps from requests to the end of their transfers."""
    rig.meter.take()
    for prompt in prompts:
        rig.add(prompt, 4)
    while rig.scheduler.has_requests():
        rig.step()
        time.sleep(0.001)
    seconds = rig.meter.take()[0]
    return {side: seconds[side] * 1e6 for side in SIDES}


def _store(rig: Halves, chunks: int, count: int = 1) -> Cost:
    return _over(rig, [_prompt(chunks) for _ in range(count)])


def _stored(rig: Halves, chunks: int) -> list[int]:
    """Store a prompt, wait until all is quiet, and forget its blocks; return the prompt."""
    _over(rig, [prompt := _prompt(chunks)])
    rig.quiet()
    rig.scheduler.reset_prefix_cache()
    return prompt


def _load(rig: Halves, chunks: int) -> Cost:
    return _over(rig, [_stored(rig, chunks)])


def _waiting(rig: Halves) -> Cost:
    """A step while a request waits whose chunks are all in host memory, but for blocks."""
    chunks = CHUNKS[-1]
    prompt = _stored(rig, chunks)
    pool = rig.scheduler.kv_cache_manager.block_pool
    spared = pool.get_new_blocks(pool.get_num_free_blocks() - chunks // 2)
    rig.add(prompt, 2)
    for _ in range(3):
        rig.step()
    cost = _steps(rig)
    pool.free_blocks(spared)
    rig.quiet()
    return cost


def _row(case: str, who: str, costs: list[Cost]) -> Row:
    best = {key: min(cost[key] for cost in costs) for key in costs[0]}
    calls = ""
    if "calls scheduler" in best:
        calls = f"; {best['calls scheduler']:.0f} and {best['calls worker']:.0f} calls"
    name = f"{case}, {who}: scheduler {best['scheduler']:.0f}, worker {best['worker']:.0f}{calls}"
    return row(name, best["scheduler"] + best["worker"], "us")


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
