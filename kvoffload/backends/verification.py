"""The report of ``verify``, and the means of every store to make one: a sample, a rate, a count."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvoffload.backends.admin import counted
from kvoffload.config import human_bytes

T = TypeVar("T")


def sampled(chunks: Sequence[T], share: float | None) -> Sequence[T]:
    """Return a part of the chunks at random, at least one; all without a share."""
    if share is None or not chunks:
        return chunks
    return random.sample(chunks, max(1, round(len(chunks) * share)))


class Verification:
    """The count of what a ``verify`` read and found.

    Args:
        of_chunks: chunks in the store.
        total_bytes: bytes of the chunks to read.
        bytes_per_s: the most to read on average; None: no limit.
        progress: called with the bytes done and the bytes to do.
    """

    def __init__(
        self,
        of_chunks: int,
        total_bytes: int,
        bytes_per_s: int | None,
        progress: Callable[[int, int], None],
    ) -> None:
        self._of_chunks, self._total_bytes = of_chunks, total_bytes
        self._bytes_per_s, self._progress = bytes_per_s, progress
        self._chunks = self._read_bytes = self._passed_bytes = 0
        self._other_versions = 0
        self._damaged: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def add(self, read_bytes: int, stored_bytes: int, *, is_gone: bool = False) -> float:
        """Count a chunk of ``stored_bytes``; return the seconds to wait before the next one.

        A chunk that left the store since it was listed is not counted as read.
        """
        self._chunks += not is_gone
        self._read_bytes += read_bytes
        self._passed_bytes += stored_bytes
        self._progress(self._passed_bytes, self._total_bytes)
        if self._bytes_per_s is None:
            return 0.0
        return max(0.0, self._read_bytes / self._bytes_per_s - self._seconds())

    def add_damage(self, path: str, reason: str, why: str, *, removed: bool = False) -> None:
        """Add damage: where it is, its reason, and why it was removed or stays."""
        self._damaged.append({"path": path, "reason": reason, "removed": removed, "why": why})

    def add_other_version(self) -> None:
        """Count a chunk that another version wrote: it is not checked further, and stays."""
        self._other_versions += 1

    def figures(self) -> dict[str, Any]:
        """Return the figures for ``--json``."""
        seconds = self._seconds()
        return {
            "chunks": self._chunks,
            "of_chunks": self._of_chunks,
            "bytes": self._read_bytes,
            "seconds": seconds,
            "bytes_per_second": self._read_bytes / seconds if seconds else 0.0,
            "other_versions": self._other_versions,
            "reasons": dict(Counter(each["reason"] for each in self._damaged)),
            "damaged": self._damaged,
        }

    def _seconds(self) -> float:
        return time.monotonic() - self._began


def lines_of(figures: dict[str, Any]) -> list[str]:
    """Return the figures of a :class:`Verification` as lines for people."""
    lines = [
        f"{counted(figures['chunks'], 'chunk')}, {human_bytes(figures['bytes'])} read in "
        f"{figures['seconds']:.1f} s ({human_bytes(figures['bytes_per_second'])}/s), "
        f"{len(figures['damaged'])} damaged"
    ]
    if figures["chunks"] < figures["of_chunks"]:
        lines.append(f"a part of {figures['of_chunks']} chunks")
    if figures["other_versions"]:
        lines.append(
            f"{counted(figures['other_versions'], 'chunk')} of another version of kvoffload, left "
            "in place unchecked"
        )
    return lines + [
        f"{each['reason']}: {each['path']} ({each['why']})" for each in figures["damaged"]
    ]
