"""One log line at the start: a store has chunks of this model, but none that mean the same."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import convert

from kvoffload.backends.base import Described
from kvoffload.config import human_bytes
from kvoffload.facts import Difference, differences, escaped, excerpts, model_of
from kvoffload.identity import short
from kvoffload.io.open_stores import OpenStore, text_of
from kvoffload.io.protocol import Open

log = logging.getLogger(__name__)

LONGEST_S = 10.0
"""How long a store may take to describe what it has."""
SHOWN = 5
"""Differences in the line; the rest are counted."""
VALUE_CHARACTERS = 40
_GENERATION = "generation"
"""The fact of a namespace that is private to one process."""


class _Candidate(NamedTuple):
    """A namespace of the same model, and the facts that this engine has otherwise."""

    described: Described
    differences: Sequence[Difference]

    @property
    def distance(self) -> tuple[int, float, int]:
        """Few differences first, then the last used, then the largest."""
        each = self.described
        used_s = math.inf if each.used_s is None else each.used_s
        return len(self.differences), used_s, -each.chunks


async def explain_cold_start(store: OpenStore, wanted: Open) -> None:
    """Log why a store has nothing for this engine, if another namespace has; raise nothing."""
    if store.observable is None or _GENERATION in wanted.facts:
        return
    try:
        async with asyncio.timeout(LONGEST_S):
            found = convert(await store.observable.described(), list[Described])
    except Exception as error:  # it costs the line
        log.debug("%s: what it has is not known: %s", store.name, text_of(error))
        return
    if explained := explanation(wanted.namespace, wanted.facts, found):
        log.info("%s: %s", store.name, explained)


def explanation(namespace: str, facts: Mapping[str, str], found: Sequence[Described]) -> str:
    """Return how this namespace differs from the one most like it; empty if it is not cold.

    Args:
        namespace: the own one.
        facts: those behind it.
        found: what the store has, the own namespace among it or not.
    """
    is_warm = any(each.namespace == namespace and each.chunks for each in found)
    model = model_of(facts)
    if is_warm or not model:
        return ""
    candidates = [
        _Candidate(each, differences(each.facts, facts))
        for each in found
        if each.chunks and each.namespace != namespace and _GENERATION not in each.facts
        if model_of(each.facts) == model
    ]
    explaining = [each for each in candidates if not all(map(_is_of_rank, each.differences))]
    if not explaining:
        return ""
    nearest = min(explaining, key=lambda each: each.distance)
    return _line(namespace, model, nearest)


def _is_of_rank(each: Difference) -> bool:
    """Whether ranks of one engine differ in a fact: such facts alone explain no cold start."""
    return each.name.endswith("rank") or each.name.startswith("rank.")


def _line(namespace: str, model: str, nearest: _Candidate) -> str:
    other, differing = nearest
    size = f"{other.chunks:,} chunks"
    if other.stored_bytes is not None:
        size = f"about {human_bytes(other.stored_bytes)}"
    name, shown = escaped(short(other.namespace)), ", ".join(map(_shown, differing[:SHOWN]))
    more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    return (
        f"namespace {short(namespace)} has no chunks; {size} of '{_cut(model)}' are in namespace "
        f"{name}, which differs in {shown}{more}; kvoffload inspect shows all with "
        f"--diff {name} {short(namespace)}"
    )


def _shown(each: Difference) -> str:
    values = ["(none)" if value is None else value for value in each[1:]]
    one, other = excerpts(values[0], values[1], VALUE_CHARACTERS)
    return f"{_cut(each.name)}: {one} -> {other}"


def _cut(text: str) -> str:
    return escaped(text, VALUE_CHARACTERS)
