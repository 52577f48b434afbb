"""What every store's ``verify`` needs: a sample, a rate, a count, and the report."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvoffload.backends.admin import Check, Verified, counted
from kvoffload.backends.header import NOT_DAMAGED, OTHER_KEY, OTHER_VERSION
from kvoffload.config import human_bytes

T = TypeVar("T")


class Verification(Generic[T]):
    """The count of what a ``verify`` read and found.

    Args:
        chunks: all chunks of the store.
        wanted: what to read of them.
        size_of: returns the stored bytes of a chunk.
    """

    def __init__(self, chunks: Sequence[T], wanted: Check, size_of: Callable[[T], int]) -> None:
        self.chosen = chunks
        """The chunks to read: all, or a part at random, at least one."""
        if wanted.share is not None and chunks:
            self.chosen = random.sample(chunks, max(1, round(len(chunks) * wanted.share)))
        self._wanted, self._of_chunks, self._size_of = wanted, len(chunks), size_of
        self._total_bytes = sum(map(size_of, self.chosen))
        self._chunks = self._read_bytes = self._passed_bytes = 0
        self._unread = Counter[str]()
        self._damaged: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def add_damage(self, path: str, reason: str, why: str, *, removed: bool = False) -> None:
        """Add damage: where it is, its reason, and why it was removed or stays."""
        self._damaged.append({"path": path, "reason": reason, "removed": removed, "why": why})

    def judge(
        self,
        chunk: T,
        path: str,
        reason: str | None,
        read_bytes: int,
        remove: Callable[[], str | None],
    ) -> float:
        """Count a chunk and what is wrong with it, and remove it if that is asked for.

        Args:
            chunk: one of those chosen.
            path: of it.
            reason: why loads miss it; empty or None: they do not. One that is ``missing`` left the
                store since it was listed, and is not counted as read. One of another version or
                key is not checked further, and stays.
            read_bytes: of it.
            remove: removes it; returns why it stays, or nothing.

        Returns:
            The seconds to wait before the next one.
        """
        self._chunks += reason != "missing"
        if reason in NOT_DAMAGED:
            self._unread[reason] += 1
        elif reason and reason != "missing":
            stays = remove() if self._wanted.repair else "left in place"
            self.add_damage(path, reason, stays or "removed", removed=not stays)
        self._read_bytes += read_bytes
        self._passed_bytes += self._size_of(chunk)
        self._wanted.progress(self._passed_bytes, self._total_bytes)
        if self._wanted.bytes_per_s is None:
            return 0.0
        return max(0.0, self._read_bytes / self._wanted.bytes_per_s - self._seconds())

    def report(
        self, more: Sequence[str] = (), *, is_sound: bool = True, **figures: Any
    ) -> Verified:
        """Return the result, with further lines, faults and figures of the store itself."""
        seconds, damaged = self._seconds(), self._damaged
        per_second = self._read_bytes / seconds if seconds else 0.0
        lines = [
            f"{counted(self._chunks, 'chunk')}, {human_bytes(self._read_bytes)} read in "
            f"{seconds:.1f} s ({human_bytes(per_second)}/s), {len(damaged)} damaged"
        ]
        if self._chunks < self._of_chunks:
            lines.append(f"a part of {self._of_chunks} chunks")
        if other_versions := self._unread[OTHER_VERSION]:
            lines.append(
                f"{counted(other_versions, 'chunk')} of another version of kvoffload, left "
                "in place unchecked"
            )
        if other_keys := self._unread[OTHER_KEY]:
            lines.append(
                f"{counted(other_keys, 'chunk')} that loads with these settings miss: only "
                "headers were checked; give the engines' encryption with -o"
            )
        lines += [f"{each['reason']}: {each['path']} ({each['why']})" for each in damaged]
        told = {
            "chunks": self._chunks,
            "of_chunks": self._of_chunks,
            "bytes": self._read_bytes,
            "seconds": seconds,
            "bytes_per_second": per_second,
            "other_versions": other_versions,
            "other_keys": other_keys,
            "reasons": dict(Counter(each["reason"] for each in damaged)),
            "damaged": damaged,
        }
        return Verified([*lines, *more], told | figures, is_sound and not damaged)

    def _seconds(self) -> float:
        return time.monotonic() - self._began
