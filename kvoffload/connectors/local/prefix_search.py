"""Finds how far a prompt can be loaded.

A prefix can be loaded up to a token if every group has the chunks that it reads there. A chunk that
one group lacks shortens the prefix for all groups, and groups with windows then read other chunks.
So the search goes on until all groups agree.
"""

from collections.abc import Callable
from functools import cache, partial

from kvoffload.connectors.local.chunking import ChunkGroup, ChunkGroups, Keys
from kvoffload.connectors.prefix_room import last_with_room
from kvoffload.messages import OffloadKey
from kvoffload.offload.base import Manager, ReqContext

Find = Callable[[OffloadKey], bool | None]
"""Looks up one chunk; None: it may come soon."""


class PrefixSearch:
    """Looks up the chunks of a prompt.

    Args:
        manager: knows where they are, and which are worth loading.
        context: of the request.
        groups: of the cache.
        keys: of the prompt's chunks.
        start: tokens that GPU memory has.
        waits: False: what is not known yet is a miss.
    """

    def __init__(
        self,
        manager: Manager,
        context: ReqContext,
        groups: ChunkGroups,
        keys: Keys,
        start: int,
        *,
        waits: bool,
    ) -> None:
        self._manager = manager
        self._context = context
        self._groups = groups
        self._keys = keys
        self._start = start
        self._waits = waits

    def longest(self, limit: int) -> tuple[int, bool]:
        """Find how far the prompt can be loaded, with chunks that are worth it.

        Args:
            limit: tokens to load up to at most.

        Returns:
            ``(end, pending)``: tokens up to which all is there, the start for nothing; and whether
            it may become more soon.
        """
        start, is_worth = self._start, self._manager.promises.is_worth_loading
        while True:
            end, pending = self._reach_of_all(limit)
            if end > start and not self._groups.keeps_prefixes:
                find = cache(partial(self._manager.lookup, req_context=self._context))
                end, pending = self._windows_end(end, find)
            if end == start or is_worth(self._to_load(end), end - start, self._context):
                return end, pending

    def _reach_of_all(self, limit: int) -> tuple[int, bool]:
        """Return up to which token the groups that read everything are there."""
        groups = self._groups
        end = groups.aligned(limit)
        for group in groups.by_reach:
            if group.reads_all and end > self._start:
                reach, pending = self._reach(group, end)
                if pending and self._waits:
                    return self._start, True
                end = groups.aligned(min(end, reach))
        return max(end, self._start), False

    def _reach(self, group: ChunkGroup, end: int) -> tuple[int, bool]:
        """Return up to which token a group that reads everything is there."""
        chunks = group.chunks(group.needed(self._start, end))
        wanted = self._keys[group.index][chunks.start : chunks.stop]
        if not wanted:
            return self._start, False
        hits, pending = self._manager.lookup_prefix(wanted, self._context)
        if hits == len(chunks):
            return end, False
        return (chunks.start + hits) * group.chunk_tokens, pending

    def _windows_end(self, end: int, find: Find) -> tuple[int, bool]:
        """Return the last end at which the other groups have what they read, and all have room."""
        before = -1
        while end > self._start and end != before:
            before = end
            for group in self._groups.by_reach:
                if group.reads_all:
                    continue
                shorter = self._window_end(group, end, find)
                if shorter is None:
                    return self._start, True
                end = shorter
            if end == before:
                shorter = last_with_room(self._start, end, self._groups.alignment, self._has_room)
                if shorter is None:
                    return self._start, True
                end = shorter
        return end, False

    def _window_end(self, group: ChunkGroup, end: int, find: Find) -> int | None:
        """Return the last end at which a group has what it reads; None if that is not known yet."""
        keys = self._keys[group.index]
        while end > self._start:
            missing = None
            for chunk in group.chunks(group.needed(self._start, end)):
                # All are asked, so that questions to slow tiers travel together.
                answer = find(keys[chunk]) if chunk < len(keys) else False
                if answer is None and self._waits:
                    return None
                if not answer:
                    missing = chunk
            if missing is None:
                return end
            end = self._groups.aligned(min(end - 1, missing * group.chunk_tokens))
        return self._start

    def _has_room(self, end: int) -> bool | None:
        room = self._manager.has_room(self._to_load(end))
        return room if self._waits else room is True

    def _to_load(self, end: int) -> list[OffloadKey]:
        """List the chunks of all groups that a load reads."""
        found: list[OffloadKey] = []
        for group in self._groups.offloaded:
            span = group.chunks(group.needed(self._start, end))
            found += self._keys[group.index][span.start : span.stop]
        return found
