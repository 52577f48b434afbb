"""The GPU blocks of a cache: who holds them, who may be reused next, and what can be found in them.

A block is a number. What is known of it lies in arrays, not in objects, so that a prompt's
thousands of blocks are handled by a few bulk operations. The arrays are seen in two ways:
``array`` for one element at a time, numpy for many.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.core.block_index import FEW, BlockIndex, Ints
from kvoffload.core.cache_stats import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvoffload.core.free_queue import FreeBlockQueue
from kvoffload.errors import InsufficientMemoryError, UsageError

NULL_BLOCK = 0
"""Stands in block tables for a block that is not needed (any more); never given out."""


_CACHED_ALREADY = "a block to register is cached already; forget it first"


class BlockPool:
    """Blocks 1 to ``num_blocks - 1``: reference counts, reuse order, and contents by hash.

    A block without a reference is *free*: it may be taken, in the order of
    :class:`~kvoffload.core.free_queue.FreeBlockQueue`. A free block that was registered can still
    be found and adopted until it is taken.

    Args:
        num_blocks: including the null block.
        num_groups: KV cache groups that use the blocks; a block belongs to one at a time.
        enable_events: record which blocks become findable and which no longer are.

    Attributes:
        index: the findable blocks; only the pool writes it.
        num_registrations: grows with each :meth:`register`: a lookup might find more than before.
        num_losses: grows when a watched block is forgotten: a lookup might find less.
        num_moves: grows whenever blocks are taken, adopted or released.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, enable_events: bool = False) -> None:
        if num_blocks < 2:
            raise InsufficientMemoryError(
                f"num_blocks = {num_blocks}: block 0 is reserved, so at least 2 are needed"
            )
        self.num_blocks = num_blocks
        self.index = BlockIndex(num_blocks)
        self.free_queue = FreeBlockQueue(num_blocks)
        self.num_registrations = self.num_losses = self.num_moves = 0
        self._ref = array("i", bytes(4 * num_blocks))
        self._refs: Ints = np.frombuffer(self._ref, dtype=np.int32)
        self._ref[NULL_BLOCK] = 1
        self._cached = bytearray(num_blocks)
        self._cacheds: npt.NDArray[np.bool_] = np.frombuffer(self._cached, dtype=np.bool_)
        self._watched: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        self._copies: dict[tuple[int, bytes], list[int]] = {}
        """Blocks with the same group and hash as one in the index: rare, so kept aside."""
        self._events: list[KVCacheEvent] | None = [] if enable_events else None
        self._removed: list[list[bytes]] = [[] for _ in range(num_groups)]

    # -- holding -----------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
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
        self.num_moves += 1
        if count > FEW:
            ids = self.free_queue.pop(count)
            self._refs[ids] = 1
            self._forget(ids[self._cacheds[ids]])
            taken: list[int] = ids.tolist()
            return taken
        blocks = self.free_queue.pop_few(count)
        for block in blocks:
            self._ref[block] = 1
            if self._cached[block]:
                self._forget(np.array([block], dtype=np.int32))
        return blocks

    def num_idle(self, blocks: Ints) -> int:
        """Count the blocks without a reference: adopting them uses up free blocks."""
        return len(blocks) - int(np.count_nonzero(self._refs[blocks]))

    def adopt(self, blocks: Ints) -> None:
        """Add one reference to each block found. The null block must not be among them."""
        self.num_moves += 1
        held = self._refs[blocks]
        self._refs[blocks] = held + 1
        self.free_queue.remove(blocks[held == 0])

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block; give the tail of a prefix first: it is reused first.

        Blocks without a further reference become free. Blocks without contents are reused first,
        the last released one at the front; then blocks with contents, the longest unused first.

        Raises:
            UsageError: a block is not held (or is the null block); nothing is released.
        """
        if not blocks:
            return
        self.num_moves += 1
        if len(blocks) <= FEW:
            self._release_few(blocks)
            return
        ids = np.array(blocks, dtype=np.int32)
        held = self._refs[ids]
        if int(held.min()) < 1 or int(ids.min()) == NULL_BLOCK:
            raise UsageError("released a block that is not held")
        self._refs[ids] = held - 1
        idle = ids[held == 1]
        cached = self._cacheds[idle]
        self.free_queue.append(idle[cached])
        self.free_queue.prepend(idle[~cached])

    def _release_few(self, blocks: Sequence[int]) -> None:
        ref = self._ref
        for block in blocks:
            if ref[block] < 1 or block == NULL_BLOCK:
                raise UsageError(f"released block {block}, which is not held")
        cached: list[int] = []
        empty: list[int] = []
        for block in blocks:
            ref[block] -= 1
            if not ref[block]:
                (cached if self._cached[block] else empty).append(block)
        self.free_queue.append(cached)
        self.free_queue.prepend(empty)

    # -- finding -----------------------------------------------------------------------------

    def register(self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[int]:
        """Make held blocks findable under their hashes.

        Returns:
            Positions of the hashes that could be found before (in another block); seldom any.

        Raises:
            UsageError: a block is registered already.
        """
        self.num_registrations += 1
        if len(blocks) > FEW:
            return self._register_many(group, np.array(blocks, dtype=np.int32), hashes)
        known = []
        for position, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True)):
            if self._cached[block]:
                raise UsageError(_CACHED_ALREADY)
            self._cached[block] = 1
            self.index.store(group, (block,), (block_hash,))
            if self.index.get(group, block_hash):
                self._copies.setdefault((group, block_hash), []).append(block)
                known.append(position)
            else:
                self.index.add((block,))
        return known

    def _register_many(self, group: int, blocks: Ints, hashes: Sequence[bytes]) -> list[int]:
        if self._cacheds[blocks].any():
            raise UsageError(_CACHED_ALREADY)
        self._cacheds[blocks] = True
        self.index.store(group, blocks, hashes)
        known: list[int] = np.flatnonzero(self.index.find(group, hashes)).tolist()
        for position in known:
            copies = self._copies.setdefault((group, hashes[position]), [])
            copies.append(int(blocks[position]))
        self.index.add(np.delete(blocks, known) if known else blocks)
        return known

    def is_registered(self, group: int, blocks: Ints, hashes: Sequence[bytes]) -> bool:
        """Whether each block is registered under its hash, for this group."""
        return (
            bool(self._cacheds[blocks].all())
            and self.index.hashes_of(blocks) == list(hashes)
            and all(self.index.group_of(block) == group for block in blocks.tolist())
        )

    def watch(self, blocks: Ints) -> None:
        """Have :attr:`num_losses` grow when one of these blocks is forgotten."""
        self._watched[blocks] = True

    def forget(self, blocks: Sequence[int]) -> None:
        """Make blocks unfindable; their references stay."""
        ids = np.unique(np.array(blocks, dtype=np.int32))
        self._forget(ids[self._cacheds[ids]])

    def _forget(self, cached: Ints) -> None:
        if not len(cached):
            return
        self._cacheds[cached] = False
        if self._watched[cached].any():
            self._watched[cached] = False
            self.num_losses += 1
        if self._copies:
            self._forget_copies(cached)
            return
        self.index.remove(cached)
        if self._events is not None:
            self._note_removed(cached)

    def _forget_copies(self, cached: Ints) -> None:
        """Forget blocks of which some have, or are, copies: a copy takes its original's place."""
        gone = []
        for block in cached.tolist():
            key = self.index.group_of(block), self.index.hash_of(block)
            copies = self._copies.get(key)
            if copies is None:
                gone.append(block)
            elif block in copies:
                copies.remove(block)
            else:
                self.index.remove([block])
                self.index.add([copies.pop(0)])
            if copies is not None and not copies:
                del self._copies[key]
        self.index.remove(gone)
        if gone and self._events is not None:
            self._note_removed(np.array(gone, dtype=np.int32))

    def reset(self) -> bool:
        """Forget all contents; False, and nothing done, while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        self.num_losses += 1
        self.index.clear()
        self._cacheds[:] = False
        self._watched[:] = False
        self._copies.clear()
        if self._events is not None:
            self._flush_removed()
            self._events.append(AllBlocksCleared())
        return True

    # -- events ------------------------------------------------------------------------------

    @property
    def enable_events(self) -> bool:
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

    def _note_removed(self, blocks: Ints) -> None:
        hashes = self.index.hashes_of(blocks)
        if len(self._removed) == 1:
            self._removed[0] += hashes
            return
        for block, block_hash in zip(blocks.tolist(), hashes, strict=True):
            self._removed[self.index.group_of(block)].append(block_hash)

    def _flush_removed(self) -> None:
        """Turn removals gathered so far into one event a group, before anything follows them."""
        for group, hashes in enumerate(self._removed):
            if hashes and self._events is not None:
                self._events.append(BlockRemoved(hashes, group))
                self._removed[group] = []
