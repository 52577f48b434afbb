"""What the connector costs where nothing can be reused.

Two engines differ by more than that: the place of an engine's weights in memory decides its speed.
So one engine is compared with itself. Its connector is removed from both of its processes, so that
all code runs as without a connector, and put back.

A machine's speed changes, too, from one second to the next. What is compared must be close by:

* To the first token: four requests make a pair, *without, with, with, without* and then *with,
  without, without, with*. So an even drift hits both sides alike.
* Between tokens: the connector is in every other two steps of one request, in the same order of
  fours. It does the work of all steps in the half it is in, so that half costs more than it would.

The noise is of the same times, divided so that each side has as many with as without: there a cost
would show on both.
"""

import itertools
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.harness import Row, row
from benchmarks.vllm_parts.engine import Engine, prompt

CALM_S = 0.25
"""After a request: what it still stores is stored."""
PROMPT, ANSWER = 512, 129
SHORT_ANSWER = 6
"""After a first token that is timed: a prompt's blocks are stored in the steps that follow it."""
FOURS, REQUESTS = 24, 30

REQUEST_ORDERS = ((False, True, True, False), (True, False, False, True))
STEP_ORDER = (True, True, False, False, False, False, True, True)
"""In vLLM a block has 32 tokens here: each begins with a step that the connector is in."""
STEPS_MIXED = (True, False, True, False, False, True, False, True)


class Pair(NamedTuple):
    """Seconds of two sides that are compared."""

    one: float
    other: float


class Cost(NamedTuple):
    """What one engine was seen to take."""

    first_token: list[Pair]
    """With the connector, and without."""
    first_token_noise: list[Pair]
    per_token: list[Pair]
    per_token_noise: list[Pair]
    threads: list[Pair]
    """Of each request: CPU time of our threads, and the time between its tokens, all of them."""


def nothing_yet() -> Cost:
    """Make an empty record."""
    return Cost([], [], [], [], [])


def measure_first_tokens(engine: Engine, rng: random.Random, found: Cost, fours: int) -> None:
    """Serve so many fours of requests, after one that is not counted."""
    engine.serve(prompt(rng, PROMPT), 2, CALM_S)
    for order in itertools.islice(itertools.cycle(REQUEST_ORDERS), fours):
        seconds = []
        for with_connector in order:
            engine.ask("switch", on=with_connector)
            seconds.append(engine.serve(prompt(rng, PROMPT), SHORT_ANSWER, CALM_S)[0])
        found.first_token.append(_divided(seconds, order))
        found.first_token_noise.append(_divided(seconds, (True, False)))
    engine.ask("switch", on=True)


def measure_tokens(engine: Engine, rng: random.Random, found: Cost, requests: int) -> None:
    """Serve so many requests, each with the connector in half of its steps."""
    for _ in range(requests):
        before_s = engine.ask("our_cpu")
        steps = engine.decode(prompt(rng, PROMPT), ANSWER, STEP_ORDER, CALM_S)
        found.per_token.append(_divided(steps, STEP_ORDER))
        found.per_token_noise.append(_divided(steps, STEPS_MIXED))
        found.threads.append(Pair(engine.ask("our_cpu") - before_s, sum(steps)))


def _divided(seconds: Sequence[float], order: Sequence[bool]) -> Pair:
    one = sum(itertools.compress(seconds, itertools.cycle(order)))
    return Pair(one, sum(seconds) - one)


def rows(name: str, found: Cost) -> list[Row]:
    """Put figures of an engine into rows."""
    first_s = statistics.median(pair.other for pair in found.first_token) / 2
    token_s = statistics.median(pair.other for pair in found.per_token) / ((ANSWER - 1) / 2)
    threads_s = statistics.median(pair.one for pair in found.threads)
    part = statistics.median(pair.one / pair.other for pair in found.threads)
    return [
        _ratio(f"TTFT with nothing to reuse, {name}", found.first_token, first_s),
        _ratio(f"noise of it, {name}", found.first_token_noise),
        _ratio(f"inter-token latency with nothing to reuse, {name}", found.per_token, token_s),
        _ratio(f"noise of it, {name}", found.per_token_noise),
        row(
            f"CPU time of our threads for a request, {name} ({part:.2%} of its decoding)",
            threads_s * 1000,
            "ms",
        ),
    ]


def _ratio(case: str, pairs: Sequence[Pair], without_s: float | None = None) -> Row:
    ratios = [pair.one / pair.other for pair in pairs]
    low, high = interval_of_median(ratios)
    more = "" if without_s is None else f"; without {without_s * 1000:.1f} ms"
    return row(
        f"{case} ({len(ratios)} pairs, 95 % interval {low:.4f} to {high:.4f}{more})",
        statistics.median(ratios),
        "×",
        1.02,
        "at most 2 % more than without",
    )


def interval_of_median(values: Sequence[float], resamples: int = 4000) -> tuple[float, float]:
    """Return the 95 % interval of a median, by drawing samples from the values again."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples)
    )
    return medians[resamples * 25 // 1000], medians[resamples * 975 // 1000]
