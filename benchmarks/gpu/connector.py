"""A connector's whole path, during a model's steps: a disk or host memory to the GPU."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing

from benchmarks.engine_step import CASES, PROMPTS, Case, Loads
from benchmarks.gpu import sizes, steps
from benchmarks.gpu.ours import parts, times
from benchmarks.harness import Row, quantile, row

SOURCES = {"the disk": {}, "host memory": {"prompts_in_memory": PROMPTS + 1}}


def connector() -> Iterator[Row]:
    """Loads without end in the default form: their rate, a model's steps, and calls in a step."""
    step = steps.decode_like()
    times(step, 5)
    for case in CASES[: sizes.CONNECTOR_CASES]:
        for source, how in SOURCES.items():
            with (
                tempfile.TemporaryDirectory(prefix="kvoffload-bench-") as root,
                closing(Loads(f"{root}/kv", case, "process", "cuda", **how)) as loads,
            ):
                yield from _beside(step, case, source, loads)


def _beside(step: Callable[[], None], case: Case, source: str, loads: Loads) -> Iterator[Row]:
    alone: list[float] = []
    meanwhile: list[float] = []
    calls: list[float] = []
    rates = []

    def with_loads() -> None:
        calls.extend(times(loads.step, 1))
        step()

    for _ in range(2):  # in turns, so that a clock that changes hits both alike
        alone += times(step, sizes.STEPS["decode-like step"])
        loads.begin()
        meanwhile += times(with_loads, sizes.STEPS["decode-like step"])
        loads.rest()
        rates.append(loads.rate() / 1e9)
    name = f"loads of {case.label} from {source}"
    if not max(rates):
        raise RuntimeError(f"{name}: nothing was loaded")
    yield row(f"connector, {name}", min(rates), "GB/s")
    for part, value, limit in parts(meanwhile, alone):
        yield row(f"a step and the connector {part}, {name}", value, "ms", limit, "alone")
    yield row(f"the connector's calls in a step, {name}, p50", quantile(calls, 0.5) * 1e3, "ms")
