"""One trace, several policies and sizes: the numbers behind a table or a plot."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.registry import POLICIES, load
from kvoffload.replay.simulate import Hits, Level, Progress, belady, infinite, replay_levels
from kvoffload.replay.trace import Trace

BELADY = "belady"
INFINITE = "infinite"
Stack = Mapping[str, int]
"""Names and capacities of tiers, nearest first; a single store has no name."""


@dataclass(frozen=True)
class Row:
    """One replay."""

    policy: str
    """A policy's name, ``belady`` (the bound) or ``infinite`` (a store that holds everything)."""
    capacity: int | None
    """In blocks of the whole trace; None for the infinite store."""
    hits: Hits
    seconds: float
    levels: dict[str, float] = field(default_factory=dict)
    """Of a replay of several tiers: the share of all blocks that came from each."""

    def plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "policy": self.policy,
            "capacity_blocks": self.capacity,
            "prefix_hit_rate": round(self.hits.prefix_rate, 6),
            "block_hit_rate": round(self.hits.block_rate, 6),
            "seconds": round(self.seconds, 3),
        }
        return plain | ({"tiers": self.levels} if self.levels else {})


def parse_count(text: str, name: str, what: str = "blocks") -> int:
    """Read a number of blocks, or of something else: ``300``, ``10k``, ``1.5m``.

    Raises:
        ConfigError: not such a number, or less than one.
    """
    factor = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    try:
        count = round(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ConfigError(name, text, f"must be a number of {what}, such as 300, 10k or 1.5m")
    return count


def parse_counts(text: str, name: str, what: str = "blocks") -> list[int]:
    """Read numbers by commas, each once.

    Raises:
        ConfigError: one is no such number, or less than one.
    """
    return list(dict.fromkeys(parse_count(part, name, what) for part in text.split(",") if part))


def parse_tiers(text: str) -> dict[str, int]:
    """Read ``cpu=10k,disk=100k``, nearest tier first.

    Raises:
        ConfigError: a tier without a size, or named twice.
    """
    tiers: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name or name in tiers:
            raise ConfigError("tiers", text, "must be name=size,...; each name once")
        tiers[name] = parse_count(size, f"tiers.{name}")
    return tiers


def default_sizes(trace: Trace) -> list[int]:
    """Sizes worth a look: from a hundredth of the distinct blocks to all of them."""
    whole = trace.distinct / trace.sample
    return sorted({max(1, round(whole * share)) for share in (0.01, 0.03, 0.1, 0.3, 1)})


def _scaled(capacity: int, trace: Trace) -> int:
    """Return the most blocks of a trace, or of its sample, that are held of a capacity.

    Policies have tables for all of them.
    """
    return max(1, min(round(capacity * trace.sample), trace.distinct))


def study(
    trace: Trace,
    policies: Iterable[str],
    stacks: Sequence[Stack],
    progress: Progress | None = None,
) -> list[Row]:
    """Replay every policy on every stack, then Belady's bound, then the infinite store.

    The bound is that of one store as large as all tiers of a stack together: they hold no more.

    Args:
        trace: what to replay.
        policies: names in the ``kvoffload.policies`` entry-point group.
        stacks: tiers that have the same policy.
        progress: told of blocks used, of :func:`total_work` in all.

    Raises:
        ConfigError: no such policy.
    """
    names = list(dict.fromkeys(policies))
    for name in names:
        load(POLICIES, name, "policies")  # told now, not after minutes of replaying
    rows = [study_one(trace, name, stack, progress) for name in names for stack in stacks]
    bounds = [_bound(trace, sum(stack.values()), progress) for stack in stacks]
    return [*rows, *bounds, _everything(trace)]


def study_one(trace: Trace, policy: str, stack: Stack, progress: Progress | None = None) -> Row:
    """Replay one policy on one stack.

    Raises:
        ConfigError: no such policy.
    """
    start, make = perf_counter(), load(POLICIES, policy, "policy")
    sized = {name: _scaled(size, trace) for name, size in stack.items()}
    levels = [Level(name, capacity, make(capacity)) for name, capacity in sized.items()]
    hits = replay_levels(trace.requests, levels, progress, trace.weights)
    shares = {each.name: round(each.prefix / hits.accesses, 6) for each in levels if each.name}
    return Row(policy, sum(stack.values()), hits, perf_counter() - start, shares)


def total_work(trace: Trace, policies: int, stacks: int) -> int:
    """Blocks that a study will use."""
    return trace.accesses * (policies + 1) * stacks


def _bound(trace: Trace, size: int, progress: Progress | None) -> Row:
    start = perf_counter()
    hits = belady(trace.requests, _scaled(size, trace), progress, trace.weights)
    return Row(BELADY, size, hits, perf_counter() - start)


def _everything(trace: Trace) -> Row:
    start = perf_counter()
    hits = infinite(trace.requests, trace.weights)
    return Row(INFINITE, None, hits, perf_counter() - start)
