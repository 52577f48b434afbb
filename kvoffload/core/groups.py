"""The kinds of KV cache groups: which blocks a kind needs, and when a prefix can be reused.

A kind is four small answers; the block manager knows nothing else of it:

* ``find``: the longest reusable prefix, as a block table with null blocks where none is needed;
* ``first_needed`` (and ``needed_until``): which leading blocks of a table are not read any more;
* ``extend`` (and ``holds``, ``encoder_blocks``): how a table grows to hold more tokens;
* ``first_registrable``: which full blocks can serve a later request.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from kvoffload.core.block_index import BlockIndex, Ints
from kvoffload.core.interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
    spec_kind,
)
from kvoffload.errors import KVCacheSpecError

_NOTHING: Ints = np.zeros(0, dtype=np.int32)


class Group:
    """Full attention, and the base of the other kinds: every block is needed to the end."""

    prefix_closed = True
    """Whether every part of a reusable prefix, from its start, is reusable."""
    drops_blocks = False
    """Whether leading blocks may cease to be needed while a request runs."""
    findable = True
    """Whether blocks are ever shared between requests."""

    def __init__(self, index: int, spec: KVCacheSpec, hash_block_size: int) -> None:
        self.index = index
        self.block_size = spec.block_size
        self.hashes_per_block = spec.block_size // hash_block_size

    def hashes(self, chain_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Pick the hashes at this group's block ends: each covers the whole prefix up to there."""
        every = self.hashes_per_block
        return chain_hashes if every == 1 else chain_hashes[every - 1 :: every]

    def find(self, index: BlockIndex, hashes: Sequence[bytes], num_blocks: int) -> Ints:
        """Find the longest reusable prefix of at most ``num_blocks`` blocks.

        Returns:
            Its block table, null blocks where the kind needs none.
        """
        return self._leading(index, hashes, 0, num_blocks)

    def first_needed(self, num_computed_tokens: int) -> int:
        """Return the index of the first block that later tokens read."""
        return 0

    def needed_until(self, block: int) -> int:
        """Return the most computed tokens at which a block is still needed."""
        return sys.maxsize

    def holds(self, num_blocks: int) -> int:
        """Return the tokens for which a table of so many blocks is long enough."""
        return num_blocks * self.block_size

    def extend(self, num_blocks: int, num_tokens: int, num_lookahead: int) -> tuple[int, int]:
        """Say how a table of ``num_blocks`` grows to hold ``num_tokens`` and look-ahead slots.

        Returns:
            ``(nulls, blocks)``: null blocks to append, then blocks to take and append.
        """
        return 0, max(cdiv(num_tokens + num_lookahead, self.block_size) - num_blocks, 0)

    def first_registrable(self, num_tokens: int) -> int:
        """Return the index of the first full block worth registering at ``num_tokens`` tokens."""
        return 0

    def encoder_blocks(self, num_encoder_tokens: int) -> int:
        """Return the blocks to take at admission for encoder states."""
        return 0

    def _leading(self, index: BlockIndex, hashes: Sequence[bytes], start: int, end: int) -> Ints:
        """Return the blocks of the hashes from ``start`` on, up to the first that is not there."""
        parts = []
        size = 1  # a prompt never seen shows at its first block
        while start < end:
            part = index.find(self.index, hashes[start : min(start + size, end)])
            missing = np.flatnonzero(part == 0)
            if len(missing):
                parts.append(part[: missing[0]])
                break
            parts.append(part)
            start += size
            size = 4096
        return np.concatenate(parts) if parts else _NOTHING


class SlidingWindowGroup(Group):
    """A token reads the last ``sliding_window`` tokens, itself included."""

    prefix_closed = False
    drops_blocks = True

    def __init__(self, index: int, spec: KVCacheSpec, hash_block_size: int, window: int) -> None:
        super().__init__(index, spec, hash_block_size)
        self.window = window
        self.window_blocks = cdiv(window - 1, self.block_size)

    def find(self, index: BlockIndex, hashes: Sequence[bytes], num_blocks: int) -> Ints:
        """Search from the right for a run that fills the window, or reaches the start."""
        end = num_blocks
        while end > 0:
            start = max(end - self.window_blocks, 0)
            run = index.find(self.index, hashes[start:end])
            missing = np.flatnonzero(run == 0)
            if not len(missing):
                return _after_nulls(start, run)
            # No window that ends further right can spare the first missing block.
            end = start + int(missing[0])
        return _NOTHING

    def first_needed(self, num_computed_tokens: int) -> int:
        """Return the block of the first token in the next token's window."""
        return max(num_computed_tokens - self.window + 1, 0) // self.block_size

    def needed_until(self, block: int) -> int:
        """Return the last length at which the window still touches the block."""
        return (block + 1) * self.block_size + self.window - 2


class ChunkedLocalGroup(Group):
    """A token reads the tokens before it in its own chunk."""

    prefix_closed = False
    drops_blocks = True

    def __init__(self, index: int, spec: KVCacheSpec, hash_block_size: int, chunk: int) -> None:
        super().__init__(index, spec, hash_block_size)
        self.chunk = chunk

    def find(self, index: BlockIndex, hashes: Sequence[bytes], num_blocks: int) -> Ints:
        """Search forward through the chunk the prefix ends in, else through the one before."""
        while num_blocks > 0:
            start = self.first_needed(num_blocks * self.block_size)
            run = self._leading(index, hashes, start, num_blocks)
            end = start + len(run)
            # A chunk may begin inside a block; then a shorter end may belong to an earlier chunk.
            if self.first_needed(end * self.block_size) == start:
                return _after_nulls(start, run)
            num_blocks = end
        return _NOTHING

    def first_needed(self, num_computed_tokens: int) -> int:
        """Return the block in which the next token's chunk begins."""
        return num_computed_tokens // self.chunk * self.chunk // self.block_size

    def needed_until(self, block: int) -> int:
        """Return the last length before a chunk that begins after the block."""
        last_start = ((block + 1) * self.block_size - 1) // self.chunk
        return (last_start + 1) * self.chunk - 1


class MambaGroup(Group):
    """A recurrent layer: block i holds the state after its last token.

    A step reads the state of the last computed token and writes the state of its own last token. A
    block boundary between them makes that another block. Only these are real blocks, and ``extra``
    ones after them for the states of speculative tokens. A state is registered only when it is
    exactly at the end of a block.
    """

    prefix_closed = False
    drops_blocks = True

    def __init__(self, index: int, spec: KVCacheSpec, hash_block_size: int, extra: int) -> None:
        super().__init__(index, spec, hash_block_size)
        self.extra = extra

    def find(self, index: BlockIndex, hashes: Sequence[bytes], num_blocks: int) -> Ints:
        """Search from the right for one state."""
        end = num_blocks
        while end > 0:
            start = max(end - 64, 0)
            states = index.find(self.index, hashes[start:end])
            there = np.flatnonzero(states)
            if len(there):
                last = int(there[-1])
                return _after_nulls(start + last, states[last : last + 1])
            end = start
        return _NOTHING

    def first_needed(self, num_computed_tokens: int) -> int:
        """Return the block of the last computed token."""
        return max(num_computed_tokens - 1, 0) // self.block_size

    def needed_until(self, block: int) -> int:
        """Return the length at which the block is full."""
        return (block + 1) * self.block_size

    def extend(self, num_blocks: int, num_tokens: int, num_lookahead: int) -> tuple[int, int]:
        """Grow so that the last token's block and the speculative ones after it are real."""
        missing = max(cdiv(num_tokens, self.block_size) + self.extra - num_blocks, 0)
        blocks = min(missing, 1 + self.extra)
        return missing - blocks, blocks

    def holds(self, num_blocks: int) -> int:
        """Return the tokens for which the table leaves its speculative blocks free."""
        return (num_blocks - self.extra) * self.block_size

    def first_registrable(self, num_tokens: int) -> int:
        """Return the last block, if the state stands at its end."""
        full, rest = divmod(num_tokens, self.block_size)
        return full if rest else full - 1


class CrossAttentionGroup(Group):
    """Blocks for encoder states: taken once at admission, never shared, held to the end."""

    findable = False

    def extend(self, num_blocks: int, num_tokens: int, num_lookahead: int) -> tuple[int, int]:
        """Decoder tokens need no slots here."""
        return 0, 0

    def holds(self, num_blocks: int) -> int:
        """Any number of decoder tokens."""
        return sys.maxsize

    def encoder_blocks(self, num_encoder_tokens: int) -> int:
        return cdiv(num_encoder_tokens, self.block_size)


def make_group(index: int, spec: KVCacheSpec, hash_block_size: int) -> Group:
    """Make the group of a format.

    Raises:
        KVCacheSpecError: the format keeps nothing on the GPU, or is unknown.
    """
    one = spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        one = next(iter(spec.kv_cache_specs.values()))
    kind = spec_kind(one)
    if kind is FullAttentionSpec:
        return Group(index, spec, hash_block_size)
    if isinstance(one, SlidingWindowSpec):
        return SlidingWindowGroup(index, spec, hash_block_size, one.sliding_window)
    if isinstance(one, ChunkedLocalAttentionSpec):
        return ChunkedLocalGroup(index, spec, hash_block_size, one.attention_chunk_size)
    if isinstance(one, MambaSpec):
        return MambaGroup(index, spec, hash_block_size, one.num_speculative_blocks)
    if kind is CrossAttentionSpec:
        return CrossAttentionGroup(index, spec, hash_block_size)
    raise KVCacheSpecError(
        f"{type(one).__name__} keeps nothing between steps: leave its layers out of the groups"
    )


def _after_nulls(count: int, blocks: Ints) -> Ints:
    table = np.zeros(count + len(blocks), dtype=np.int32)
    table[count:] = blocks
    return table
