"""The number of blocks in a chunk, where ``blocks_per_chunk`` is ``"auto"``.

A tier pays for each chunk: system calls, a message, a wake-up. A prompt is reused up to its last
whole chunk. ``docs/benchmarks/chunk-size.md`` has both sides in figures.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from kvoffload.config import OffloadConfig, human_bytes
from kvoffload.errors import ConfigError

AUTO_BYTES = 2 << 20
"""The size of chunks that is aimed at; a power of two of blocks comes within √2 of it."""
AUTO_TOKENS = 256
"""The most tokens of a chunk."""


class ChunkSize(NamedTuple):
    """A number of blocks, and what decided it."""

    num_blocks: int
    reason: str

    def told(self, block_bytes: int, block_tokens: int) -> str:
        """Say it to people; the arguments are those of :func:`choose_chunk_size`."""
        count, size = self.num_blocks, human_bytes(self.num_blocks * block_bytes)
        blocks = f"{count} block{'s' * (count > 1)} of {block_tokens} tokens"
        chunk = f"a chunk is {blocks}, {count * block_tokens} tokens, {size}"
        return f'blocks_per_chunk "auto": {chunk}; decided by {self.reason}'


def choose_chunk_size(
    block_bytes: int, block_tokens: int, limits: Mapping[str, int] | None = None
) -> ChunkSize:
    """Choose a power of two of blocks.

    Args:
        block_bytes: of a block of the largest KV cache group.
        block_tokens: the most tokens of a block of any group.
        limits: what else limits a chunk, and to how many blocks.
    """
    bounds = {
        f"the aim of {human_bytes(AUTO_BYTES)}": AUTO_BYTES * math.sqrt(2) / max(1, block_bytes),
        f"the limit of {AUTO_TOKENS} tokens": AUTO_TOKENS / block_tokens,
        **(limits or {}),
    }
    reason = min(bounds, key=lambda each: bounds[each])
    return ChunkSize(1 << int(math.log2(max(1.0, bounds[reason]))), reason)


def blocks_of(config: OffloadConfig) -> int:
    """Return ``blocks_per_chunk`` as the number that a connector has put in the place of "auto".

    Raises:
        ConfigError: it is "auto" still.
    """
    if config.blocks_per_chunk == "auto":
        raise ConfigError("blocks_per_chunk", "auto", "must be a number here")
    return config.blocks_per_chunk
