"""vLLM with kvoffload and without: what it costs, and what it saves. CPU, one session.

vLLM must be in this environment or in ``.venv-vllm``, where ``make demo-vllm`` installs it. It
computes on the same cores in all measurements, because its CPU backend changes cores when it has a
connector. The weights lie in huge pages.
"""

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, out_of_page_cache, report, row
from benchmarks.vllm_parts import cost
from benchmarks.vllm_parts.engine import SHAPE, Engine, make_model, prompt, settings

PREFIX, PREFIXES = 4000, 3
LOOKUP_CHUNKS = 2000
CALM_S = 1.25
"""After a prefix: what it stores is stored."""


def run() -> dict[str, Any]:
    """Measure everything; about a quarter of an hour on two cores."""
    rng = random.Random(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", SHAPE)
        for what, extra in settings(folder).items():
            with Engine(model, extra) as engine:
                found = cost.nothing_yet()
                cost.measure_first_tokens(engine, rng, found, cost.FOURS)
                cost.measure_tokens(engine, rng, found, cost.REQUESTS)
                rows += cost.rows(what, found)
        rows += savings(model, folder, rng)
        with Engine(
            make_model(folder / "tiny"), {"cpu_bytes": "256MiB", "blocks_per_chunk": 1}
        ) as engine:
            rows.append(scheduler_call(engine))
    return report("vllm", rows)


def savings(model: str, folder: Path, rng: random.Random) -> list[Row]:
    """Time the first token after a long prefix: computed, from host memory, from disk."""
    extra = settings(folder)["host memory and disk"]
    prefixes = [prompt(rng, PREFIX) for _ in range(PREFIXES)]
    with Engine(model, extra) as engine:
        engine.ask("switch", on=False)
        computed = [after_prefix(engine, prefix, rng) for prefix in prefixes]
        engine.ask("switch", on=True)
        for prefix in prefixes:
            after_prefix(engine, prefix, rng)
        host = [after_prefix(engine, prefix, rng) for prefix in prefixes]
    out_of_page_cache(folder / "kv")
    with Engine(model, extra) as engine:
        engine.serve(prompt(rng, 64), 4, CALM_S)
        disk = [after_prefix(engine, prefix, rng) for prefix in prefixes]
    limit = statistics.median(computed)
    found: list[Row] = []
    for name, seconds in (("host memory", host), ("disk, new process", disk)):
        median = statistics.median(seconds)
        case = f"TTFT, {PREFIX}-token prefix from {name} ({limit / median:.1f}× faster)"
        found.append(row(case, median, "s", limit, "computing it"))
    return found


def after_prefix(engine: Engine, prefix: list[int], rng: random.Random) -> float:
    """Return the time, in seconds, to the first token after a prefix and a new question."""
    engine.ask("reset")
    return engine.serve([*prefix, *prompt(rng, 16)], 2, CALM_S)[0]


def scheduler_call(engine: Engine) -> Row:
    """Time the scheduler half's answer for a long prompt."""
    engine.serve([2] * 64, 2, CALM_S)  # the scheduler has no host memory before the first step
    found = engine.ask("lookup", chunks=LOOKUP_CHUNKS, rounds=50)
    case = f"scheduler call, prompt of {LOOKUP_CHUNKS} chunks in host memory"
    return row(case, float(found["median_s"]) * 1000, "ms", 1.0, "1 ms")


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
