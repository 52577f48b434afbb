"""Stores, loads, overwrites and preemptions in random order, against a model of the result.

The model has the bytes of every block and slot, and of a server's memory, in the order in which the
engine and the server asked for them. On a device that runs copies late, or early, every missing
fence shows as other bytes than the model's.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from kvoffload.messages import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.transfer.base import Copier, CopyFence
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab
from tests.support.fence_ends import ends
from tests.support.lender import Lender
from tests.support.moves import move, moves_of

NUM_BLOCKS, NUM_SLOTS, PER_CHUNK = 24, 8, 2
PAGES = ((256, 0), (64, 0), (1024, 64))
"""Bytes of each tensor's pages, and the padding between them."""
GARBAGE, NO_SLOT = -1, -1
WAIT_S = 60.0


class Engine(Protocol):
    """The effects of a forward pass on blocks, enqueued on the engine's stream."""

    def write(self, block: int, version: int) -> None:
        """Fill a block's pages with a number."""
        ...

    def read(self, block: int) -> Callable[[], list[int]]:
        """Read a block; the function returned later gives the numbers found."""
        ...

    def finish(self) -> None:
        """Wait until everything enqueued is done."""
        ...


def small_caches(device: str = "cpu") -> CanonicalKVCaches:
    """Make the caches that interleavings run on."""
    tensors, refs = [], []
    for i, (page, padding) in enumerate(PAGES):
        rows = torch.zeros((NUM_BLOCKS, page + padding), dtype=torch.int8, device=device)
        tensors.append(CanonicalKVCacheTensor(rows[:, :page], page))
        refs.append(CanonicalKVCacheRef(i, page))
    return CanonicalKVCaches(tuple(tensors), (tuple(refs),))


def small_parts(
    device: str = "cpu", num_slots: int = NUM_SLOTS, new_slab: Callable[[int, int], Slab] = Slab
) -> tuple[CanonicalKVCaches, ChunkLayout, Slab]:
    """Make those caches, with the layout of their chunks and host memory for some of them."""
    caches = small_caches(device)
    layout = ChunkLayout(caches, PER_CHUNK)
    return caches, layout, new_slab(num_slots, layout.slot_bytes)


def words(kv_caches: CanonicalKVCaches, block: int) -> list[torch.Tensor]:
    """Return a block's pages as 64-bit numbers, not copies."""
    return [entry.tensor[block].view(torch.int64) for entry in kv_caches.tensors]


@dataclass
class _Copy:
    slot: int
    blocks: tuple[int, ...]
    versions: tuple[int, ...]
    to_host: bool
    fence: CopyFence


@dataclass
class Interleaving:
    """One run; :meth:`run` raises AssertionError where bytes are not the model's.

    Args:
        copier: under test, on caches from :func:`small_caches` and ``NUM_SLOTS`` slots.
        engine: writes and reads the same caches.
        slab: of the copier.
        layout: of the copier.
        seed: of all choices.
        flushes: whether a block is waited for before it is overwritten; False breaks a rule that
            engines keep, to show that it is needed.
        keeps_slots: whether a slot is left alone while a load reads it; likewise.
        keeps_blocks: whether the blocks of a load whose request was preempted are left alone until
            it has ended; likewise.
    """

    copier: Copier
    engine: Engine
    slab: Slab
    layout: ChunkLayout
    seed: int
    flushes: bool = True
    keeps_slots: bool = True
    keeps_blocks: bool = True
    keeps_loans: bool = True
    """Whether a server leaves a chunk alone until the copy out of it has ended; likewise."""
    compared: int = 0
    """Blocks and slots found to have the right bytes."""
    _copies: list[_Copy] = field(default_factory=list)
    _reads: list[tuple[Callable[[], list[int]], int, str]] = field(default_factory=list)

    def run(self, steps: int = 30) -> None:
        """Take random steps, then wait for everything and compare the rest."""
        with closing(Lender(NUM_SLOTS * self.layout.slot_bytes)) as self._lender:
            assert self._lender.memory is not None
            self._memory = self._lender.memory
            self._run(steps)
            self._memory.leave()
            self._lender.theirs.settimeout(WAIT_S)
            assert self._lender.theirs.recv(1) == b"", "a loan did not end"

    def _run(self, steps: int) -> None:
        self._draw = random.Random(self.seed)
        self._versions = [0] * NUM_BLOCKS
        self._slots: list[tuple[int, ...] | None] = [None] * NUM_SLOTS
        self._next_version = 1
        self._lent: list[tuple[int, ...] | None] = [None] * NUM_SLOTS
        self._loans = [0] * NUM_SLOTS
        self._released: deque[int] = deque()
        actions = [self._store, self._store, self._load, self._load, self._overwrite]
        actions += [self._scribble, self._poll, self._serve, self._borrow]
        for _ in range(steps):
            self._draw.choice(actions)()
        for copy in self._copies:
            assert ends(copy.fence, WAIT_S), "a copy did not end"
        self._poll()
        assert not self._copies, "a copy that was waited for is not done"
        for block in range(NUM_BLOCKS):
            self._expect(block, "in the end")
        self.engine.finish()
        for read, version, when in self._reads:
            found = read()
            assert found == [version], f"seed {self.seed}: {found}, not {version}, {when}"
            self.compared += 1

    # ---- the engine and the manager ----

    def _store(self) -> None:
        """Copy blocks just written, or about to be, to an unused slot."""
        slot = self._pick(set(range(NUM_SLOTS)) - {copy.slot for copy in self._copies})
        blocks = self._pick_blocks(self._blocks(to_host=False))
        if slot is None or blocks is None:
            return
        if self._draw.random() < 0.7:
            for block in blocks:
                self._write(block)
        self._launch(slot, blocks, tuple(self._versions[block] for block in blocks), True)

    def _load(self) -> None:
        """Copy a slot to blocks that compute may still be reading for their last owner."""
        storing = {copy.slot for copy in self._copies if copy.to_host}
        full = {slot for slot, held in enumerate(self._slots) if held is not None}
        slot = self._pick(full - storing)
        if slot is not None:
            self._load_from(self._slots[slot], lambda *given: self._launch(slot, *given, False))

    def _borrow(self) -> None:
        """Copy a chunk of a server's memory to such blocks."""
        chunk = self._pick({chunk for chunk, held in enumerate(self._lent) if held is not None})
        if chunk is not None:
            self._load_from(self._lent[chunk], lambda *given: self._launch_from(chunk, *given))

    def _load_from(
        self,
        held: tuple[int, ...] | None,
        launch: Callable[[tuple[int, ...], tuple[int, ...]], None],
    ) -> None:
        blocks = self._pick_blocks(self._blocks(True) | self._blocks(False))
        if blocks is None:
            return
        for block in blocks:
            self._expect(block, "read before a load")
            if self._draw.random() < 0.3:
                self._write(block)  # zeroed for its new owner, for example
        assert held is not None
        launch(blocks, held)
        for block, version in zip(blocks, held, strict=True):
            self._versions[block] = version

    def _serve(self) -> None:
        """Let the server write a chunk that is not on loan."""
        while self._released:
            self._loans[self._released.popleft()] -= 1
        chunk = self._pick({chunk for chunk, loans in enumerate(self._loans) if not loans})
        if chunk is None:
            return
        versions = tuple(self._new_version() for _ in range(PER_CHUNK))
        self._lent[chunk] = versions
        for region in self.layout.regions[0]:
            pages = np.repeat(np.array(versions), region.page_bytes // 8)
            self._lender.write(chunk * self.layout.slot_bytes + region.offset, pages)

    def _overwrite(self) -> None:
        """Preempt a request, and give its block to another one."""
        loading = self._blocks(to_host=False)
        kept = set(range(NUM_BLOCKS)) - loading
        block = self._pick(kept if self.keeps_blocks or not loading else loading)
        if block is not None:
            self._write(block)

    def _scribble(self) -> None:
        """Give a slot to a new chunk, which is written from the host."""
        kept = {copy.slot for copy in self._copies if copy.to_host or self.keeps_slots}
        slot = self._pick(set(range(NUM_SLOTS)) - kept)
        if slot is not None:
            self._slot_words(slot)[:] = GARBAGE
            self._slots[slot] = None

    def _poll(self) -> None:
        """Take in the copies that have ended."""
        for copy in [copy for copy in self._copies if copy.fence.done()]:
            assert copy.fence.error is None, copy.fence.error
            self._copies.remove(copy)
            if copy.to_host:
                self._compare_slot(copy)
                self._slots[copy.slot] = copy.versions
            else:
                for block in copy.blocks:
                    self._expect(block, "after a load")

    # ---- the model ----

    def _launch(
        self, slot: int, blocks: tuple[int, ...], versions: tuple[int, ...], to_host: bool
    ) -> None:
        moves = moves_of(move(slot, list(blocks)))
        fence = self.copier.launch(moves, to_host, self.copier.record_fence())
        self._copies.append(_Copy(slot, blocks, versions, to_host, fence))

    def _launch_from(self, chunk: int, blocks: tuple[int, ...], versions: tuple[int, ...]) -> None:
        memory, start = self._memory, chunk * self.layout.slot_bytes
        self._loans[chunk] += 1
        loan = memory.borrow([0], [start], lambda: self._released.append(chunk))
        moves, after = moves_of(move(start, list(blocks))), self.copier.record_fence()
        fence = self.copier.launch(moves, False, after, memory)
        if self.keeps_loans:
            fence.when_reached(loan.end)
        else:
            loan.end()
        self._copies.append(_Copy(NO_SLOT, blocks, versions, False, fence))

    def _new_version(self) -> int:
        self._next_version += 1
        return self._next_version - 1

    def _write(self, block: int) -> None:
        for copy in self._copies:
            if self.flushes and copy.to_host and block in copy.blocks:
                assert ends(copy.fence, WAIT_S), "a store did not end"
        self._versions[block] = self._new_version()
        self.engine.write(block, self._versions[block])

    def _expect(self, block: int, when: str) -> None:
        self._reads.append((self.engine.read(block), self._versions[block], when))

    def _compare_slot(self, copy: _Copy) -> None:
        found = self._slot_words(copy.slot)
        for region in self.layout.regions[0]:
            size = region.page_bytes // 8
            for i, version in enumerate(copy.versions):
                at = region.offset // 8 + i * size
                page = np.unique(found[at : at + size]).tolist()
                assert page == [version], f"seed {self.seed}: slot has {page}, not {version}"
        self.compared += 1

    def _slot_words(self, slot: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return self.slab.rows[slot, : self.layout.payload_bytes[0]].view(np.int64)

    def _blocks(self, to_host: bool) -> set[int]:
        """Return the blocks that stores read (True) or loads write."""
        return {block for copy in self._copies if copy.to_host is to_host for block in copy.blocks}

    def _pick(self, among: set[int]) -> int | None:
        return self._draw.choice(sorted(among)) if among else None

    def _pick_blocks(self, taken: set[int]) -> tuple[int, ...] | None:
        free: Sequence[int] = sorted(set(range(NUM_BLOCKS)) - taken)
        return tuple(self._draw.sample(free, PER_CHUNK)) if len(free) >= PER_CHUNK else None
