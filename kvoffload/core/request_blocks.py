"""The block tables of one request, and the events of its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvoffload.core.block_pool import NULL_BLOCK
from kvoffload.core.cache_stats import BlockStored
from kvoffload.core.groups import Group
from kvoffload.core.hashing import HashChain


class RequestBlocks:
    """A request's block tables, one a group, and their progress.

    Attributes:
        tables: block ids in order of position, null blocks where none is needed.
        live: by group: all blocks before this index are null.
        registered: by group: blocks before this index were found, registered, or never will be.
        quiet: up to so many tokens an allocation has nothing to do.
    """

    __slots__ = ("live", "quiet", "registered", "tables")

    def __init__(self, num_groups: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.live = [0] * num_groups
        self.registered = [0] * num_groups
        self.quiet = 0

    def drop(self, group: Group, num_computed_tokens: int) -> list[int]:
        """Take out the blocks that no later token reads; returns them, tail first."""
        index = group.index
        table = self.tables[index]
        live = self.live[index]
        first = min(group.first_needed(num_computed_tokens), len(table))
        if first <= live:
            return []
        dead = [block for block in reversed(table[live:first]) if block]
        table[live:first] = [NULL_BLOCK] * (first - live)
        self.live[index] = first
        return dead

    def settle(self, groups: Iterable[Group], max_model_len: int, registers: bool) -> None:
        """Work out :attr:`quiet`: nothing is to be taken, given back or registered before."""
        quiet = max_model_len
        for group in groups:
            index = group.index
            holds = group.holds(len(self.tables[index]))
            quiet = min(quiet, holds, group.needed_until(self.live[index]))
            if registers:
                quiet = min(quiet, (self.registered[index] + 1) * group.block_size - 1)
        self.quiet = quiet

    def tails_first(self) -> tuple[list[int], ...]:
        """List the blocks by group, each group from its tail to its head."""
        return tuple(
            [block for block in reversed(table[live:]) if block]
            for table, live in zip(self.tables, self.live, strict=True)
        )


def stored_runs(
    group: Group,
    chain: HashChain,
    hashes: Sequence[bytes],
    start: int,
    end: int,
    known: Iterable[int],
) -> Iterator[BlockStored]:
    """Make events for blocks ``start`` to ``end``, in runs between those already known."""
    size = group.block_size
    for stop in (*(start + position for position in known), end):
        if start < stop:
            yield BlockStored(
                block_hashes=list(hashes[start:stop]),
                parent_block_hash=hashes[start - 1] if start else None,
                token_ids=chain.token_ids[start * size : stop * size],
                block_size=size,
                lora_name=chain.extras.lora,
                group_idx=group.index,
            )
        start = stop + 1
