"""The GPU blocks of a cache: who holds them, who may be reused next, and what can be found in them.

A block is a number. What is known of it lies in arrays, not in objects, so that a prompt's
thousands of blocks are handled by a few bulk operations. The arrays are shared by two views:
``array`` for one element at a time, numpy for many.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.core.free_queue import FreeBlockQueue
from kvoffload.core.stats import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvoffload.errors import InsufficientMemoryError, UsageError

NULL_BLOCK = 0
"""Stands in block tables for a block that is not needed (any more); never given out."""

_FEW = 12
"""Up to so many blocks a Python loop beats numpy's cost of a call."""

Resident = dict[bytes, int]
"""Hash → block, for one group. Of several blocks with one hash, the one cached first."""


class BlockPool:
    """Blocks 1 to ``num_blocks - 1``: reference counts, reuse order, and contents by hash.

    A block that nobody holds is *free*: it may be taken, in the order of
    :class:`~kvoffload.core.free_queue.FreeBlockQueue`. A free block that was registered can still
    be found and adopted until it is taken.

    Args:
        num_blocks: including the null block.
        num_groups: KV cache groups that use the blocks; a block belongs to one at a time.
        enable_events: record what becomes findable and what ceases to be.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, enable_events: bool = False) -> None:
        if num_blocks < 2:
            raise InsufficientMemoryError(
                f"num_blocks = {num_blocks}: block 0 is reserved, so at least 2 are needed"
            )
        self.num_blocks = num_blocks
        self.resident: list[Resident] = [{} for _ in range(num_groups)]
        self.version = 0
        """Changes whenever a lookup might answer differently than before."""
        self.free_queue = FreeBlockQueue(num_blocks)
        self._ref = array("i", bytes(4 * num_blocks))
        self._refs: npt.NDArray[np.int32] = np.frombuffer(self._ref, dtype=np.int32)
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._group_of = array("H", bytes(2 * num_blocks))
        self._copies: dict[tuple[int, bytes], list[int]] = {}
        """Blocks beyond the first with the same group and hash: rare, so kept aside."""
        self._ref[NULL_BLOCK] = 1
        self._events: list[KVCacheEvent] | None = [] if enable_events else None
        self._removed: list[list[bytes]] = [[] for _ in range(num_groups)]

    # -- holding -----------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return self.free_queue.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, from 0 to 1."""
        total = self.num_blocks - 1
        return (total - self.free_queue.num_free) / total

    def take(self, count: int) -> list[int]:
        """Take the next free blocks and hold them; what was cached in them is forgotten.

        Raises:
            InsufficientMemoryError: fewer are free; nothing is taken. Plan first.
        """
        blocks = self.free_queue.pop(count)
        if len(blocks) <= _FEW:
            ref = self._ref
            for block in blocks:
                ref[block] = 1
        else:
            self._refs[blocks] = 1
        hash_of = self._hash_of
        self._forget([block for block in blocks if hash_of[block] is not None])
        return blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Count the blocks among these that nobody holds: adopting them uses up free blocks."""
        if len(blocks) <= _FEW:
            ref = self._ref
            return sum(not ref[block] for block in blocks)
        return len(blocks) - int(np.count_nonzero(self._refs[_ids(blocks)]))

    def adopt(self, blocks: Sequence[int]) -> None:
        """Hold blocks that were found, once more each. The null block must not be among them."""
        if len(blocks) <= _FEW:
            ref = self._ref
            idle = [block for block in blocks if not ref[block]]
            for block in blocks:
                ref[block] += 1
            self.free_queue.remove(idle)
            return
        ids = _ids(blocks)
        held = self._refs[ids]
        self._refs[ids] = held + 1
        self.free_queue.remove(ids[held == 0])

    def release(self, blocks: Sequence[int]) -> None:
        """Stop holding blocks, each once; give the tail of a prefix first, so that it goes first.

        Blocks that nobody holds any more become free: those without contents are reused first,
        the last released before the others; then come those with contents, the longest unused
        first.

        Raises:
            UsageError: a block is not held (or is the null block); nothing is released.
        """
        if len(blocks) <= _FEW:
            self._release_few(blocks)
            return
        ids = _ids(blocks)
        held = self._refs[ids]
        if int(held.min()) < 1 or int(ids.min()) == NULL_BLOCK:
            raise UsageError("released a block that is not held")
        self._refs[ids] = held - 1
        hash_of = self._hash_of
        idle = ids[held == 1].tolist()
        cached = [block for block in idle if hash_of[block] is not None]
        if len(cached) == len(idle):
            self.free_queue.append(idle)
            return
        self.free_queue.append(cached)
        self.free_queue.prepend([block for block in idle if hash_of[block] is None])

    def _release_few(self, blocks: Sequence[int]) -> None:
        ref, hash_of = self._ref, self._hash_of
        for block in blocks:
            if ref[block] < 1 or block == NULL_BLOCK:
                raise UsageError(f"released block {block}, which is not held")
        cached: list[int] = []
        empty: list[int] = []
        for block in blocks:
            ref[block] -= 1
            if not ref[block]:
                (empty if hash_of[block] is None else cached).append(block)
        self.free_queue.append(cached)
        self.free_queue.prepend(empty)

    # -- finding -----------------------------------------------------------------------------

    def register(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[int]:
        """Make held blocks findable under their hashes.

        Returns:
            Positions of the hashes that could be found before (in another block); seldom any.

        Raises:
            UsageError: a block is registered under another hash.
        """
        hash_of, group_of = self._hash_of, self._group_of
        for block, block_hash in zip(blocks, hashes, strict=True):
            if hash_of[block] is not None:
                raise UsageError(f"block {block} is cached already; forget it first")
            hash_of[block] = block_hash
            group_of[block] = group
        self.version += 1
        resident = self.resident[group]
        if resident.keys().isdisjoint(hashes):
            resident.update(zip(hashes, blocks, strict=True))
            return []
        known = []
        for position, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
            if block_hash in resident:
                self._copies.setdefault((group, block_hash), []).append(block)
                known.append(position)
            else:
                resident[block_hash] = block
        return known

    def forget(self, blocks: Sequence[int]) -> None:
        """Make blocks unfindable; whoever holds them goes on holding them."""
        hash_of = self._hash_of
        self._forget([block for block in dict.fromkeys(blocks) if hash_of[block] is not None])

    def _forget(self, cached: Sequence[int]) -> None:
        if not cached:
            return
        self.version += 1
        hash_of, group_of, copies = self._hash_of, self._group_of, self._copies
        events = self._events is not None
        for block in cached:
            block_hash = hash_of[block]
            hash_of[block] = None
            group = group_of[block]
            resident = self.resident[group]
            if copies and (group, block_hash) in copies:
                self._forget_copy(group, block_hash, block)
                continue
            del resident[block_hash]  # type: ignore[arg-type]
            if events:
                self._removed[group].append(block_hash)  # type: ignore[arg-type]

    def _forget_copy(self, group: int, block_hash: Any, block: int) -> None:
        copies = self._copies[group, block_hash]
        resident = self.resident[group]
        if resident[block_hash] == block:
            resident[block_hash] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[group, block_hash]

    def reset(self) -> bool:
        """Forget all contents; False, and nothing done, while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        self.version += 1
        self._hash_of = [None] * self.num_blocks
        for resident in self.resident:
            resident.clear()
        self._copies.clear()
        if self._events is not None:
            self._flush_removed()
            self._events.append(AllBlocksCleared())
        return True

    # -- events ------------------------------------------------------------------------------

    @property
    def enable_events(self) -> bool:
        """Whether events are recorded."""
        return self._events is not None

    def add_event(self, event: BlockStored) -> None:
        """Record that a run of blocks can be found; only the owner of :meth:`register` calls."""
        if self._events is not None:
            self._flush_removed()
            self._events.append(event)

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, in the order the facts became true."""
        if self._events is None:
            return []
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def _flush_removed(self) -> None:
        """Turn removals gathered so far into one event a group, before anything follows them."""
        for group, hashes in enumerate(self._removed):
            if hashes and self._events is not None:
                self._events.append(BlockRemoved(hashes, group))
                self._removed[group] = []

    # -- checking ----------------------------------------------------------------------------

    def ref_count(self, block: int) -> int:
        """How often a block is held."""
        return self._ref[block]

    def hash_of(self, block: int) -> bytes | None:
        """Return the hash a block can be found under."""
        return self._hash_of[block]

    def check(self) -> None:
        """Verify all invariants, in O(blocks); for tests.

        Raises:
            UsageError: names the first one broken.
        """
        free = self.free_queue.check()
        for block in range(1, self.num_blocks):
            if (self._ref[block] == 0) != (block in free):
                raise UsageError(
                    f"block {block}: {self._ref[block]} holders, free: {block in free}"
                )
        found = 0
        for group, resident in enumerate(self.resident):
            for block_hash, first in resident.items():
                for block in (first, *self._copies.get((group, block_hash), ())):
                    found += 1
                    if self._hash_of[block] != block_hash or self._group_of[block] != group:
                        raise UsageError(f"block {block} is found under a hash it does not have")
        if found != sum(block_hash is not None for block_hash in self._hash_of):
            raise UsageError("a block has a hash but cannot be found under it")
        if self._hash_of[NULL_BLOCK] is not None or self._ref[NULL_BLOCK] != 1:
            raise UsageError("the null block was used")


def _ids(blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(blocks, dtype=np.int64)
