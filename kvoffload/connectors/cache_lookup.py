"""Finds for an operator which tier has how much of a prompt, a few chunks in a step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvoffload.control import HOST, Found, GroupFound, Held
from kvoffload.messages import OffloadKey
from kvoffload.offload.base import Manager
from kvoffload.offload.manager import CPU

PORTION = 128
"""Chunks that are looked up in a step."""


@dataclass(frozen=True)
class KeyedGroup:
    """The chunks of a prompt in one KV cache group."""

    keys: Sequence[OffloadKey]
    chunk_tokens: int
    reads_all: bool


def look_up(
    num_tokens: int, groups: Sequence[KeyedGroup], manager: Manager, *, has_host: bool
) -> Iterator[Found | None]:
    """Look up all chunks of a prompt, and yield None after each portion of them.

    Args:
        num_tokens: of the prompt.
        groups: its chunks.
        manager: knows where they are.
        has_host: whether chunks stay in host memory.
    """
    found, tiers = Found(num_tokens, []), manager.tiers
    for group in groups:
        names = [*([HOST] if has_host else []), *(tier.name for tier in tiers)]
        here: dict[str, list[bool]] = {name: [] for name in names}
        for start in range(0, len(group.keys), PORTION):
            part, is_pending = group.keys[start : start + PORTION], True
            while is_pending:  # a tier leaves no answer open for longer than a bounded time
                places = manager.explain(part)
                answers = {tier.name: list(map(tier.holds, part)) for tier in tiers}
                yield None
                is_pending = any(None in of_tier for of_tier in answers.values())
            for name, of_tier in answers.items():
                here[name] += map(bool, of_tier)
            if has_host:
                here[HOST] += (place == CPU for place in places)
        found.groups.append(_of_group(group, here, manager))
    yield found


def _of_group(
    group: KeyedGroup, here: Mapping[str, Sequence[bool]], manager: Manager
) -> GroupFound:
    count = len(group.keys)
    anywhere = [any(of_chunk) for of_chunk in zip(*here.values(), strict=True)]
    found = GroupFound(group.chunk_tokens, count, group.reads_all)
    found.tiers = {name: _held(present) for name, present in here.items()}
    found.any = _held(anywhere)
    if found.any.leading < count:
        (found.missing,) = manager.explain([group.keys[found.any.leading]])
    return found


def _held(present: Sequence[bool]) -> Held:
    leading = present.index(False) if False in present else len(present)
    return Held(leading, sum(present))
