"""Time between tokens with a connector and without, for ours and for vLLM's own; CPU.

    python -m benchmarks.vllm_parts.paired        about 6 minutes on two idle cores

A tiny model, so that a step takes about 3 ms. Each engine is compared with itself: its connector is
removed and put back (see :mod:`benchmarks.vllm_parts.cost`). Of vLLM's own connector torch does the
copies, because its copies need a GPU.

* Nothing to reuse: one request decodes; the connector is in every other two steps. A connector
  that does nothing shows what vLLM's own side of the hooks costs.
* Under load: a request decodes, and every few steps a prompt arrives. Prompts that are computed and
  stored alternate with prompts that begin with a stored prefix, which is loaded. Without the
  connector the prefix is left out. So both sides compute as many tokens.
"""

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, quantile, report, row
from benchmarks.vllm_parts import cost
from benchmarks.vllm_parts.engine import Engine, idle, make_model, ours, prompt, theirs

REQUESTS = 20
ROUNDS = 12
PREFIX, TAIL = 512, 32
PREFIXES = 8
EVERY = 6
TOKENS = 2 * PREFIXES * EVERY + 1
HOST, SMALL_HOST = 1 << 30, 12 << 20
"""Host memory for all prefixes, and for less than half of them, so that a disk is read."""
CALM_S = 0.3
GOALS = {"host memory": 1.02, "host memory and disk": 1.03}
LOAD_GOAL = 1.10


def run() -> dict[str, Any]:
    """Measure all engines."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "tiny")
        with Engine(model, None, idle()) as engine:
            rows += _nothing_to_reuse(engine, random.Random(1), "no work", min(GOALS.values()))
        for case, transfers in _transfers(folder).items():
            for who, transfer in transfers.items():
                with Engine(model, None, transfer) as engine:
                    rng, both = random.Random(1), f"{case}, {who}"
                    rows += _nothing_to_reuse(engine, rng, both, GOALS[case])
                    rows += _under_load(engine, rng, both)
    return report("vllm_paired", rows)


def _transfers(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    disk = {"type": "disk", "root": str(folder / "ours"), "min_free": 0}
    files = {"type": "fs", "root_dir": str(folder / "theirs")}
    return {
        "host memory": {"ours": ours({"cpu_bytes": HOST}), "vLLM's": theirs(HOST)},
        "host memory and disk": {
            "ours": ours({"cpu_bytes": SMALL_HOST, "backends": [disk]}),
            "vLLM's": theirs(SMALL_HOST, secondary_tiers=[files]),
        },
    }


def _nothing_to_reuse(engine: Engine, rng: random.Random, case: str, goal: float) -> list[Row]:
    found = cost.nothing_yet()
    engine.serve(prompt(rng, PREFIX), 8, CALM_S)
    cost.measure_tokens(engine, rng, found, REQUESTS)
    quiet = [pair.one / pair.other for pair in found.per_token]
    noise = [pair.one / pair.other for pair in found.per_token_noise]
    step_s = statistics.median(pair.other for pair in found.per_token) / ((cost.ANSWER - 1) / 2)
    return [
        _row(f"nothing to reuse, {case} (a step takes {step_s * 1e3:.1f} ms)", quiet, goal),
        _row(f"noise of it, {case}", noise, goal),
    ]


def _under_load(engine: Engine, rng: random.Random, case: str) -> list[Row]:
    prefixes = [prompt(rng, PREFIX) for _ in range(PREFIXES)]
    for prefix in prefixes:
        engine.serve(prefix, 8, CALM_S)
    times: dict[bool, list[float]] = {True: [], False: []}
    found = {True: 0, False: 0}
    for order in itertools.islice(itertools.cycle(cost.REQUEST_ORDERS), ROUNDS // 2):
        for on in order:
            engine.ask("switch", on=True)
            engine.ask("reset")
            engine.ask("switch", on=on)
            arrivals = []
            for prefix in prefixes:
                known = [*prefix, *prompt(rng, TAIL)] if on else prompt(rng, TAIL)
                arrivals += [known, prompt(rng, PREFIX)]
            asked = {"prompt": prompt(rng, PREFIX), "max_tokens": TOKENS, "every": EVERY}
            answer = engine.ask("busy", arrivals=arrivals, **asked)
            times[on] += answer["times"]
            found[on] += sum(answer["found"].values())
            engine.serve(prompt(rng, TAIL), 4, CALM_S)
    engine.ask("switch", on=True)
    with_s, without_s = times[True], times[False]
    p99 = quantile(with_s, 0.99) / quantile(without_s, 0.99)
    middle = quantile(with_s, 0.5) / quantile(without_s, 0.5)
    total = sum(with_s) / sum(without_s)
    part = found[True] / (ROUNDS * len(prefixes) * PREFIX)
    if not found[True] or found[False]:
        raise RuntimeError(f"{case}: tokens found with the connector and without: {found}")
    title = (
        f"p99 under stores and loads, {case} (without {quantile(without_s, 0.99) * 1e3:.1f} ms; "
        f"median {middle:.3f}, sum {total:.3f}; {part:.0%} of prefixes found; "
        f"{len(with_s)} steps each)"
    )
    return [row(title, p99, "×", LOAD_GOAL, "goal")]


def _row(case: str, ratios: Sequence[float], goal: float) -> Row:
    low, high = cost.interval_of_median(ratios)
    name = f"{case}; {len(ratios)} pairs, 95 % interval {low:.4f} to {high:.4f}"
    return row(name, statistics.median(ratios), "×", goal, "goal")


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
