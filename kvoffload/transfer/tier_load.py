"""A load from tiers, in parts that take turns in host slots.

A slot is read into again when the copy out of it has ended. A chunk is copied to the GPU when it is
read and verified, so reads and copies of a load run at the same time.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvoffload.io.client import IOClient
from kvoffload.io.deadlines import Listener
from kvoffload.io.lent_memory import Loan
from kvoffload.io.protocol import Load
from kvoffload.messages import Fetch, OffloadKey
from kvoffload.transfer.base import Copier, CopyFence, Fence
from kvoffload.transfer.layout import ChunkLayout, Moves

if TYPE_CHECKING:
    from kvoffload.transfer.engine import EngineJob

log = logging.getLogger(__name__)


_FINAL = ("deadline", "shutdown", "io_died", "refused_transfer")
"""Reasons after which no further part of a load begins in the same slots."""


class TierLoad:
    """The parts of one load.

    Args:
        job: gets the answers of the parts.
        fetches: what to read from which tier.
        moves: the chunks of the load, with their slots.
        layout: sizes of chunks.
        io: carries out the reads.
        copier: copies the chunks that have arrived.
        after: done when the blocks may be written.
        borrows: whether chunks are copied from where a server has them, if the copier is as good at
            that. Their slots have other bytes than theirs.

    Raises:
        KeyError: there is no such tier; nothing was begun.
    """

    def __init__(
        self,
        job: "EngineJob",
        fetches: Sequence[Fetch],
        moves: Moves,
        layout: ChunkLayout,
        io: IOClient,
        copier: Copier,
        after: Fence,
        borrows: bool = False,
    ) -> None:
        self.job = job
        self.layout = layout
        self.io = io
        self.moves = moves
        self.copier = copier
        self.after = after
        self.may_borrow = borrows and copier.can_borrow()
        self.lock = threading.Lock()
        """Guards what the parts count."""
        self.parts: list[_Part] = []
        slots = moves.chunks[0].tolist()
        last: dict[int, _Part] = {}
        for fetch in fetches:
            io.tiers[fetch.tier]  # a tier that is not there ends the load before it begins
            mine = [slots[i] for i in fetch.positions]
            for start, end in portions(mine):
                part = _Part(self, fetch, start, end, mine[start:end])
                for earlier in {last[slot] for slot in last.keys() & part.slots}:
                    earlier.followers.append(part)
                    part.waits_for += 1
                last.update(dict.fromkeys(part.slots, part))
                self.parts.append(part)
        self.first = [part for part in self.parts if not part.waits_for]
        """The parts that wait for no other: begin them, and the rest will follow."""


class _Part(Listener):
    """One read of a load, and the copies of its chunks."""

    def __init__(
        self, load: TierLoad, fetch: Fetch, start: int, end: int, slots: Sequence[int]
    ) -> None:
        self.slots = slots
        self.waits_for = 0
        """Parts whose slots this one reads into."""
        self._load = load
        self._tier = fetch.tier
        self._positions = fetch.positions[start:end]
        self._keys: Sequence[OffloadKey] = fetch.keys[start:end]
        self._tenants = fetch.tenants[start:end]
        self.followers: list[_Part] = []
        """Parts that begin only when this one has released its slots."""
        self._launched: set[int] = set()
        self._uses = 1
        """The read and the copies that still use the slots."""
        self._reason = ""
        self._is_dropped = False

    def begin(self) -> None:
        """Begin the read."""
        load = self._load
        try:
            sizes = load.layout.sizes(self._keys)
            order = Load(0, self._tier, [*self._keys], [*self.slots], sizes, [*self._tenants])
            order.may_lend = load.may_borrow
            needs_slots = bool(self.followers)
            load.io.begin(order, self, needs_slots=needs_slots, moved_s=self.moved_s)
        except Exception:
            log.exception("a read of %d chunks could not begin", len(self._keys))
            self.ended(bytes(len(self._keys)), "refused_transfer", True, 0.0)

    # ---- on the I/O client's thread ----

    def arrived(self, numbers: Sequence[int]) -> None:
        """Launch the copies of arrived chunks, but for those launched before."""
        new = [n for n in numbers if n not in self._launched]
        if new and (fence := self._launch(new)) is not None and self.followers:
            with self._load.lock:
                self._uses += 1
            fence.when_reached(self._copied)

    def lent(self, loan: Loan) -> None:
        """Launch the copies of chunks in the server's memory: they use no slots."""
        fence = self._launch(loan.numbers, loan)
        if fence is None:
            loan.end()
        else:
            fence.when_reached(loan.end)

    def _launch(self, numbers: Sequence[int], loan: Loan | None = None) -> CopyFence | None:
        """Launch the copies of some chunks, from slots or from a loan; None: they are refused."""
        self._launched.update(numbers)
        load = self._load
        try:
            positions = [self._positions[n] for n in numbers]
            moves = load.moves.take(positions)
            if loan is not None:
                moves.chunks[0] = loan.starts
            fence = load.copier.launch(moves, False, load.after, loan.memory if loan else None)
        except Exception as error:
            log.warning("copies of %d chunks were refused: %s", len(numbers), error)
            self._reason = "refused_transfer"
            return None
        load.job.copied(fence, positions)
        return fence

    def ended(self, ok: bytes, reason: str, settled: bool, io_time_s: float) -> None:
        self.arrived([n for n, good in enumerate(ok) if good])
        self._load.job.part_ended(self._reason or reason, settled, io_time_s)
        if not settled or reason in _FINAL:
            self._drop_followers(reason or "deadline")
        elif self.followers:
            self._used()

    def released(self) -> None:
        self._load.job.released()

    # ---- turns ----

    def _copied(self) -> None:
        """Note the end of a copy: with it the followers' time begins again."""
        self.moved_s = time.monotonic()
        self._used()

    def _used(self) -> None:
        """Note the end of the read or of a copy; after the last, the followers may begin."""
        begin: list[_Part] = []
        with self._load.lock:
            self._uses -= 1
            if not self._uses:
                for part in self.followers:
                    # One that brought nothing leaves them what is left of its time.
                    part.moved_s = max(part.moved_s, self.moved_s)
                    part.waits_for -= 1
                    if not part.waits_for and not part._is_dropped:
                        begin.append(part)
        for part in begin:
            part.begin()

    def _drop_followers(self, reason: str) -> None:
        """End the parts that would read into slots which the server may still use."""
        left = list(self.followers)
        while left:
            part = left.pop()
            with self._load.lock:
                was_dropped, part._is_dropped = part._is_dropped, True
            if not was_dropped:
                left.extend(part.followers)
                self._load.job.part_ended(reason, True, 0.0)


def portions(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut a load into parts, as (start, end) of each.

    No part repeats a slot. Where chunks take turns in the slots, a part takes half of them. While
    it reads, the chunks of the part before are copied out of the rest.
    """
    distinct = len(set(slots))
    if distinct == len(slots):
        if slots:
            yield 0, len(slots)
        return
    limit = max(1, distinct // 2)
    taken: set[int] = set()
    start = 0
    for i, slot in enumerate(slots):
        if len(taken) == limit or slot in taken:
            yield start, i
            start, taken = i, set()
        taken.add(slot)
    yield start, len(slots)
