"""Seeded request workloads, for what no trace at hand shows: agents, RAG, scans, changing load.

Every workload is a pure function of its settings: the same name and seed give the same requests on
every machine. They are caricatures: each keeps the one property of a load that stresses eviction,
and none is fitted to any trace.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import NamedTuple

import msgspec

from kvoffload.config import convert
from kvoffload.errors import ConfigError, check_setting

Request = tuple[int, ...]
"""Block ids of one prompt, head first; equal ids mean equal prefixes."""


class SyntheticOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may follow the name: ``agent:seed=1,requests=5000``."""

    seed: int = 0
    requests: int = 6000
    """How many requests to make."""

    def __post_init__(self) -> None:
        check_setting(self, "requests", self.requests >= 1, "must be at least 1")


class _Turn(NamedTuple):
    """The next request of one session."""

    due: float
    order: int
    prompt: Request
    turns_left: int


class _Blocks:
    """Hands out block ids: fresh ones, and the same one for the same content after a prefix."""

    def __init__(self) -> None:
        self._next = count()
        self._chained: dict[tuple[int, int], int] = {}

    def fresh(self, number: float) -> Request:
        return tuple(next(self._next) for _ in range(max(1, round(number))))

    def chain(self, prefix: Request, contents: Iterable[int]) -> Request:
        ids = list(prefix)
        for content in contents:
            parent = (ids[-1] if ids else -1, content)
            if parent not in self._chained:
                self._chained[parent] = next(self._next)
            ids.append(self._chained[parent])
        return tuple(ids)


def _sessions(
    blocks: _Blocks,
    opening: Callable[[], Request],
    turns: Callable[[], float],
    grows: Callable[[], float],
    pause: Callable[[], float],
    arrives: Callable[[], float],
) -> Iterator[tuple[float, Request]]:
    """Interleave growing conversations; a pause lies between two turns of each. Endless."""
    order = count()
    waiting: list[_Turn] = []
    arrival = 0.0
    while True:
        if not waiting or arrival <= waiting[0].due:
            first = opening() + blocks.fresh(grows())
            heapq.heappush(waiting, _Turn(arrival, next(order), first, max(1, round(turns()))))
            arrival += arrives()
        turn = heapq.heappop(waiting)
        yield turn.due, turn.prompt
        if turn.turns_left > 1:
            longer = turn.prompt + blocks.fresh(grows())
            due = turn.due + pause()
            heapq.heappush(waiting, _Turn(due, next(order), longer, turn.turns_left - 1))


def _zipf(rng: random.Random, number: int, skew: float) -> Callable[[], int]:
    """Return a draw of 0 … number-1 in which rank k has weight 1/(k+1)^skew."""
    cumulative: list[float] = []
    total = 0.0
    for rank in range(number):
        total += (rank + 1) ** -skew
        cumulative.append(total)
    population = range(number)
    return lambda: rng.choices(population, cum_weights=cumulative)[0]


def _chat(rng: random.Random, blocks: _Blocks) -> Iterator[tuple[float, Request]]:
    """People: one short system prompt, few turns, minutes of thought, long opening prompts."""
    system = blocks.fresh(1)
    return _sessions(
        blocks,
        opening=lambda: system + blocks.fresh(rng.lognormvariate(1.5, 1.0)),
        turns=lambda: rng.expovariate(1 / 3),
        grows=lambda: rng.lognormvariate(0.7, 0.8),
        pause=lambda: rng.lognormvariate(4.5, 1.2),
        arrives=lambda: rng.expovariate(1.0),
    )


def _agent(rng: random.Random, blocks: _Blocks) -> Iterator[tuple[float, Request]]:
    """Tool loops: long shared prompts, dozens of turns, short pauses, now and then a long one."""
    prompts = [blocks.fresh(rng.uniform(8, 24)) for _ in range(6)]
    which = _zipf(rng, len(prompts), 0.8)
    return _sessions(
        blocks,
        opening=lambda: prompts[which()],
        turns=lambda: rng.expovariate(1 / 15),
        grows=lambda: rng.lognormvariate(0.4, 0.8),
        pause=lambda: rng.expovariate(1 / 5) if rng.random() < 0.9 else rng.expovariate(1 / 300),
        arrives=lambda: rng.expovariate(1 / 8),
    )


def _shared(rng: random.Random, blocks: _Blocks) -> Iterator[tuple[float, Request]]:
    """Many applications on one engine: a popular or rare system prompt each, then one question."""
    prompts = [blocks.fresh(rng.lognormvariate(2.2, 0.7)) for _ in range(400)]
    which = _zipf(rng, len(prompts), 0.9)
    return _sessions(
        blocks,
        opening=lambda: prompts[which()],
        turns=lambda: 1,
        grows=lambda: rng.lognormvariate(1.0, 0.8),
        pause=lambda: 0.0,
        arrives=lambda: 1.0,
    )


def _rag(rng: random.Random, blocks: _Blocks) -> Iterator[tuple[float, Request]]:
    """Retrieved documents in order of relevance: reuse only where the leading documents agree."""
    sizes = [max(1, round(rng.lognormvariate(1.2, 0.6))) for _ in range(3000)]
    which = _zipf(rng, len(sizes), 1.0)
    system = blocks.fresh(2)

    def opening() -> Request:
        prompt = system
        for document in dict.fromkeys(which() for _ in range(4)):
            prompt = blocks.chain(prompt, range(document * 1000, document * 1000 + sizes[document]))
        return prompt

    return _sessions(
        blocks,
        opening=opening,
        turns=lambda: 1 if rng.random() < 0.7 else 2,
        grows=lambda: 1,
        pause=lambda: rng.lognormvariate(3.0, 0.8),
        arrives=lambda: 1.0,
    )


def _scan(rng: random.Random, blocks: _Blocks) -> Iterator[tuple[float, Request]]:
    """Mix chat with batch jobs that read long documents once, in bursts."""
    chat = _chat(rng, blocks)
    while True:
        for _ in range(rng.randrange(50, 400)):
            yield next(chat)
        for _ in range(rng.randrange(5, 60)):
            yield 0.0, blocks.fresh(rng.uniform(20, 80))


def _loop(rng: random.Random, blocks: _Blocks) -> Iterator[tuple[float, Request]]:
    """Mix chat with an evaluation set sent repeatedly, each prompt a few times at once."""
    chat = _chat(rng, blocks)
    prompts = [blocks.fresh(rng.lognormvariate(2.0, 0.6)) for _ in range(300)]
    while True:
        for prompt in prompts:
            for _ in range(rng.randrange(1, 4)):
                yield 0.0, prompt + blocks.fresh(1)
            yield next(chat)


def _drift(rng: random.Random, blocks: _Blocks) -> Iterator[tuple[float, Request]]:
    """A load that changes its nature every few hundred requests, and comes back."""
    phases = [make(rng, blocks) for make in (_agent, _scan, _rag, _chat, _shared)]
    while True:
        for phase in phases:
            for _ in range(rng.randrange(200, 900)):
                yield next(phase)


def _tenants(rng: random.Random, blocks: _Blocks) -> Iterator[tuple[float, Request]]:
    """Many customers, each with its prompt and conversations; a few make most of the load."""
    prompts = [blocks.fresh(rng.lognormvariate(1.8, 0.8)) for _ in range(250)]
    which = _zipf(rng, len(prompts), 1.1)
    return _sessions(
        blocks,
        opening=lambda: prompts[which()] + blocks.fresh(rng.lognormvariate(0.8, 0.8)),
        turns=lambda: rng.expovariate(1 / 4),
        grows=lambda: rng.lognormvariate(0.5, 0.7),
        pause=lambda: rng.lognormvariate(4.0, 1.0),
        arrives=lambda: rng.expovariate(1.0),
    )


def _rollout(rng: random.Random, blocks: _Blocks) -> Iterator[tuple[float, Request]]:
    """Reinforcement learning: eight attempts a task, a few turns each; tasks return by epoch."""
    tasks = [blocks.fresh(rng.lognormvariate(1.8, 0.5)) for _ in range(120)]
    while True:
        rng.shuffle(tasks)
        for start in range(0, len(tasks), 4):
            attempts = [task for task in tasks[start : start + 4] for _ in range(8)]
            for _ in range(rng.randrange(1, 5)):
                rng.shuffle(attempts)
                yield from ((0.0, attempt) for attempt in attempts)
                attempts = [a + blocks.fresh(rng.lognormvariate(0.6, 0.6)) for a in attempts]


WORKLOADS: dict[str, Callable[[random.Random, _Blocks], Iterator[tuple[float, Request]]]] = {
    "agent": _agent,
    "chat": _chat,
    "drift": _drift,
    "loop": _loop,
    "rag": _rag,
    "rollout": _rollout,
    "scan": _scan,
    "shared": _shared,
    "tenants": _tenants,
}
"""Name → the workload; its docstring says what it keeps of the real thing."""


def _workload(name: str) -> Callable[[random.Random, _Blocks], Iterator[tuple[float, Request]]]:
    if name not in WORKLOADS:
        raise ConfigError("synthetic", name, f"known workloads: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def parse(text: str) -> tuple[str, SyntheticOptions]:
    """Read ``NAME[:key=value,...]``.

    Raises:
        ConfigError: no such workload, unknown key, or a value that is not a whole number.
    """
    name, _, rest = text.partition(":")
    _workload(name)
    values: dict[str, int] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        try:
            values[key] = int(value)
        except ValueError:
            raise ConfigError(f"synthetic.{key}", value, "must be a whole number") from None
    return name, convert(values, SyntheticOptions, "synthetic.")


def timed(name: str, options: SyntheticOptions | None = None) -> Iterator[tuple[float, Request]]:
    """Make the requests of a workload, each after its time in seconds; no time is before the last.

    Raises:
        ConfigError: no such workload.
    """
    options = options or SyntheticOptions()
    endless = _workload(name)(random.Random(f"{name}:{options.seed}"), _Blocks())
    now = 0.0
    for _ in range(options.requests):
        due, request = next(endless)
        now = max(now, due)
        yield now, request
