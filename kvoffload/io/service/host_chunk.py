"""A chunk in a server's memory, and the blocks that it takes."""

import msgspec

BLOCK = 16 << 10
"""Bytes of a block: a chunk takes whole ones."""


def blocks_of(size: int) -> int:
    """Return how many blocks a chunk of so many bytes takes."""
    return -(-size // BLOCK) or 1


Runs = tuple[tuple[int, int], ...]
"""Runs of blocks, as (first, number)."""


class Chunk(msgspec.Struct, eq=False, gc=False):
    """Where it is, its header, and who reads it; guarded by the memory's lock.

    The garbage collector looks at no chunk: one look at a million takes a second, in which no
    engine is served. So nothing here may refer to what refers to a chunk.
    """

    header: bytes
    runs: Runs
    size: int
    num_readers: int = 0
    gone_from: bytes = b""
    """The namespace that it has left; then the last reader frees its blocks."""
    is_verified: bool = False
    """Whether its bytes have been checked here; no other process changes them."""

    @property
    def is_gone(self) -> bool:
        """Whether it has left."""
        return bool(self.gone_from)

    @property
    def first(self) -> int:
        """Its first block."""
        return self.runs[0][0]

    @property
    def start(self) -> int:
        """Its first byte."""
        return self.first * BLOCK

    @property
    def room(self) -> int:
        """Bytes of its blocks."""
        return blocks_of(self.size) * BLOCK

    def can_be_lent(self, size: int) -> bool:
        """Whether its bytes are so many, and in one piece."""
        return self.size == size and len(self.runs) == 1
