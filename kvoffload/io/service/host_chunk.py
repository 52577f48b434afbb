"""A chunk in a server's memory, and the blocks that it takes."""

BLOCK = 16 << 10
"""Bytes of a block: a chunk takes whole ones."""


def blocks_of(size: int) -> int:
    """Return how many blocks a chunk of so many bytes takes."""
    return max(1, -(-size // BLOCK))


class Chunk:
    """Where it is, its header, and who reads it; guarded by the memory's lock."""

    __slots__ = ("gone_from", "header", "is_verified", "num_readers", "runs", "size")

    def __init__(self, header: bytes, runs: list[tuple[int, int]], size: int) -> None:
        self.header, self.runs, self.size = header, runs, size
        self.num_readers = 0
        self.gone_from = b""
        """The namespace that it has left; then the last reader frees its blocks."""
        self.is_verified = False
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
        return sum(count for _, count in self.runs) * BLOCK

    def can_be_lent(self, size: int) -> bool:
        """Whether its bytes are so many, and in one piece."""
        return self.size == size and len(self.runs) == 1
