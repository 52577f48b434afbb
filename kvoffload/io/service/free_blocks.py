"""Blocks of a memory that no chunk has."""

from collections.abc import Sequence
from itertools import islice

_RUNS_LOOKED_AT = 64
"""Free runs among which one is sought that holds a whole chunk; without one it is in pieces."""


class FreeBlocks:
    """Free blocks in runs, as (first, number). Not thread-safe.

    Args:
        num_blocks: so many are free, from the first on.
    """

    def __init__(self, num_blocks: int) -> None:
        self.runs, self._ends = dict[int, int](), dict[int, int]()
        """First block → length of each run, and the block after it → its first. No two are
        neighbours. Those freed last are used first."""
        self.num_blocks = 0
        if num_blocks:
            self.add([(0, num_blocks)])

    def take(self, count: int) -> list[tuple[int, int]]:
        """Take so many blocks, which there must be; in one run, if one is near."""
        taken: list[tuple[int, int]] = []
        self.num_blocks -= count
        runs = self.runs
        latest = islice(reversed(runs), _RUNS_LOOKED_AT)
        fitting = next((start for start in latest if runs[start] >= count), None)
        while count:
            start = next(reversed(runs)) if fitting is None else fitting
            end = start + runs.pop(start)
            length = min(count, end - start)
            del self._ends[end]
            if start + length < end:
                self._note(start + length, end)
            taken.append((start, length))
            count -= length
        return taken

    def add(self, runs: Sequence[tuple[int, int]]) -> None:
        """Take in that these are free."""
        for first, count in reversed(runs):
            self.num_blocks += count
            start, end = first, first + count
            if end in self.runs:
                end += self.runs.pop(end)
                del self._ends[end]
            if start in self._ends:
                start = self._ends.pop(start)
                del self.runs[start]
            self._note(start, end)

    def _note(self, start: int, end: int) -> None:
        self.runs[start], self._ends[end] = end - start, start


class TakenBlocks:
    """Blocks that chunks have, while it is found out which.

    Args:
        num_blocks: of the memory.
    """

    def __init__(self, num_blocks: int) -> None:
        self._taken = bytearray(num_blocks) + b"\1"  # the end counts as taken

    def add(self, runs: Sequence[tuple[int, int]]) -> bool:
        """Take blocks; False: one of them is taken, and all stay as they were."""
        taken = self._taken
        for i, (start, count) in enumerate(runs):
            if not count or taken.find(1, start, start + count) >= 0:
                for first, length in runs[:i]:
                    taken[first : first + length] = bytes(length)
                return False
            taken[start : start + count] = b"\1" * count
        return True

    def rest(self) -> FreeBlocks:
        """Return those that no chunk has."""
        free, end = FreeBlocks(0), 0
        while (start := self._taken.find(0, end)) >= 0:
            end = self._taken.index(1, start)
            free.add([(start, end - start)])
        return free
