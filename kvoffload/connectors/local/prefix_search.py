"""Finds how far a prompt can be loaded.

A prefix can be loaded up to a token if every group has the chunks that it reads there. A chunk that
one group lacks shortens the prefix for all groups, and groups with windows then read other chunks.
So the search goes on until all groups agree.
"""

from collections.abc import Callable, Sequence
from functools import cache

from kvoffload.connectors.local.chunking import ChunkGroup, ChunkGroups, Keys
from kvoffload.connectors.prefix_room import last_with_room
from kvoffload.messages import OffloadKey

Prefix = Callable[[Sequence[OffloadKey]], tuple[int, bool]]
"""Looks up consecutive chunks: how many there are, and whether the next may come soon."""
Find = Callable[[OffloadKey], bool | None]
"""Looks up one chunk; None: it may come soon."""
HasRoom = Callable[[Sequence[OffloadKey]], bool | None]
"""Whether chunks can be loaded all at once; None: it may be soon."""
IsWorth = Callable[[Sequence[OffloadKey], int], bool]
"""Whether chunks are worth loading, for so many tokens; if not, lookups find fewer from now on."""


def longest(
    groups: ChunkGroups,
    keys: Keys,
    start: int,
    limit: int,
    find_prefix: Prefix,
    find: Find,
    has_room: HasRoom,
    is_worth: IsWorth,
) -> tuple[int, bool]:
    """Find how far a prompt can be loaded, with chunks that are worth it.

    Args:
        groups: of the cache.
        keys: of the prompt's chunks.
        start: tokens that GPU memory has.
        limit: tokens to load up to at most.
        find_prefix: looks up consecutive chunks.
        find: looks up one chunk.
        has_room: asked about the chunks of all groups together; ``find_prefix`` asks for its.
        is_worth: asked about the chunks of all groups together.

    Returns:
        ``(end, pending)``: tokens up to which all is there, ``start`` for nothing; and whether
        it may become more soon.
    """
    while True:
        end, pending = _reach_of_all(groups, keys, start, limit, find_prefix)
        if end > start and not groups.keeps_prefixes:
            end, pending = _windows_end(groups, keys, start, end, cache(find), has_room)
        if end == start or is_worth(_to_load(groups, keys, start, end), end - start):
            return end, pending


def _reach_of_all(
    groups: ChunkGroups, keys: Keys, start: int, limit: int, find_prefix: Prefix
) -> tuple[int, bool]:
    """Return up to which token the groups that read everything are there."""
    end = groups.aligned(limit)
    for group in groups.by_reach:
        if group.reads_all and end > start:
            reach, pending = _reach(group, keys[group.index], start, end, find_prefix)
            if pending:
                return start, True
            end = groups.aligned(min(end, reach))
    return max(end, start), False


def _windows_end(
    groups: ChunkGroups, keys: Keys, start: int, end: int, has: Find, has_room: HasRoom
) -> tuple[int, bool]:
    """Return the last end at which the other groups have what they read, and all have room."""
    before = -1
    while end > start and end != before:
        before = end
        for group in groups.by_reach:
            if group.reads_all:
                continue
            shorter = _window_end(groups.aligned, group, keys[group.index], start, end, has)
            if shorter is None:
                return start, True
            end = shorter
        if end == before:
            shorter = last_with_room(
                start, end, groups.alignment, lambda at: has_room(_to_load(groups, keys, start, at))
            )
            if shorter is None:
                return start, True
            end = shorter
    return end, False


def _to_load(groups: ChunkGroups, keys: Keys, start: int, end: int) -> list[OffloadKey]:
    """List the chunks of all groups that a load reads."""
    chunks = [(group.index, group.chunks(group.needed(start, end))) for group in groups.offloaded]
    return [key for index, span in chunks for key in keys[index][span.start : span.stop]]


def _window_end(
    aligned: Callable[[int], int],
    group: ChunkGroup,
    keys: Sequence[OffloadKey],
    start: int,
    end: int,
    has: Find,
) -> int | None:
    """Return the last end at which a group has what it reads; None if that is not known yet."""
    while end > start:
        missing = None
        for chunk in group.chunks(group.needed(start, end)):
            # All are asked, so that questions to slow tiers travel together.
            answer = has(keys[chunk]) if chunk < len(keys) else False
            if answer is None:
                return None
            if not answer:
                missing = chunk
        if missing is None:
            return end
        end = aligned(min(end - 1, missing * group.chunk_tokens))
    return start


def _reach(
    group: ChunkGroup, keys: Sequence[OffloadKey], start: int, end: int, find_prefix: Prefix
) -> tuple[int, bool]:
    """Return up to which token a group that reads everything is there."""
    chunks = group.chunks(group.needed(start, end))
    wanted = keys[chunks.start : chunks.stop]
    if not wanted:
        return start, False
    hits, pending = find_prefix(wanted)
    if hits == len(chunks):
        return end, False
    return (chunks.start + hits) * group.chunk_tokens, pending
