"""Finds for an operator which tier has how much of a prompt, a few chunks in a step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvoffload.control import HOST, Found, GroupFound, Held
from kvoffload.messages import OffloadKey
from kvoffload.offload.manager import CPU, Tier

PORTION = 128
"""Chunks that are looked up in a step."""
Explain = Callable[[Sequence[OffloadKey]], list[str]]
"""Says where chunks are, or why they are nowhere."""
Holds = Callable[[Sequence[OffloadKey]], list[bool | None]]
"""Says which chunks a tier has; None for a bounded time."""


@dataclass(frozen=True)
class KeyedGroup:
    """The chunks of a prompt in one KV cache group."""

    keys: Sequence[OffloadKey]
    chunk_tokens: int
    reads_all: bool


def tiers_of(explain: Explain, tiers: Iterable[Tier], *, has_host: bool) -> dict[str, Holds]:
    """Return how to ask host memory, if chunks stay there, and each tier."""

    def on_host(keys: Sequence[OffloadKey]) -> list[bool | None]:
        return [place == CPU for place in explain(keys)]

    def on(tier: Tier) -> Holds:
        return lambda keys: list(map(tier.holds, keys))

    host = {HOST: on_host} if has_host else {}
    return {**host, **{tier.name: on(tier) for tier in tiers}}


def look_up(
    num_tokens: int,
    groups: Sequence[KeyedGroup],
    tiers: Mapping[str, Holds],
    explain: Explain,
) -> Iterator[Found | None]:
    """Look up all chunks of a prompt, and yield None after each portion of them.

    Args:
        num_tokens: of the prompt.
        groups: its chunks.
        tiers: nearest first.
        explain: the manager's.
    """
    found = Found(num_tokens, [])
    for group in groups:
        here: dict[str, list[bool]] = {name: [] for name in tiers}
        for start in range(0, len(group.keys), PORTION):
            part = group.keys[start : start + PORTION]
            while True:
                answers = {name: holds(part) for name, holds in tiers.items()}
                yield None
                if not any(None in of_tier for of_tier in answers.values()):
                    break
            for name, of_tier in answers.items():
                here[name] += map(bool, of_tier)
        found.groups.append(_of_group(group, here, explain))
    yield found


def _of_group(
    group: KeyedGroup,
    here: Mapping[str, Sequence[bool]],
    explain: Explain,
) -> GroupFound:
    count = len(group.keys)
    anywhere = [any(of_chunk) for of_chunk in zip(*here.values(), strict=True)]
    found = GroupFound(group.chunk_tokens, count, group.reads_all)
    found.tiers = {name: _held(present) for name, present in here.items()}
    found.any = _held(anywhere)
    if found.any.leading < count:
        (found.missing,) = explain([group.keys[found.any.leading]])
    return found


def _held(present: Sequence[bool]) -> Held:
    leading = present.index(False) if False in present else len(present)
    return Held(leading, sum(present))
