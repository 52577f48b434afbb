"""A hash table from contents to blocks over arrays, for one block or for thousands.

A Python dict would keep an object for every hash and every block number, and visit them one by one.
This table is a row of block numbers, open addressing with linear probing. The hashes lie side by
side in one buffer, so that a few numpy calls look up, add and remove a prompt's blocks. The table
stores and compares whole hashes. A hash's place comes from its first eight bytes, scattered by a
random factor: no client can choose prompts that collide.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.errors import UsageError

Ints = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

FEW = 12
"""Up to so many blocks a Python loop beats numpy's cost of a call."""

_EMPTY = 0
"""A slot never used: a search ends here. Block 0 is the null block, so no block looks like it."""
_DELETED = -1
"""A slot whose block was removed: a search goes on."""
_WORD = (1 << 64) - 1
_GROUP_STEP = 0x9E3779B97F4A7C15


class BlockIndex:
    """Finds blocks by (group, hash). Hashes have one length, a multiple of 8 bytes.

    At most one block is *listed* for a (group, hash); a block's hash can be stored without listing
    the block.

    Args:
        num_blocks: including the null block, which is never listed.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._bits = max((3 * num_blocks).bit_length(), 6)
        self._mask = (1 << self._bits) - 1
        self._shift = 64 - self._bits
        self._factor = secrets.randbits(64) | 1
        self._width = 0
        self._buffer = bytearray()
        self._rows: Words = np.zeros((0, 0), dtype=np.uint64)
        self._whole: npt.NDArray[np.void] = np.zeros(0, dtype="V8")
        self._at = array("i", bytes(4 * num_blocks))
        self._ats: Ints = np.frombuffer(self._at, dtype=np.int32)
        self._group = array("H", bytes(2 * num_blocks))
        self._groups = np.frombuffer(self._group, dtype=np.uint16)
        self.clear()

    def clear(self) -> None:
        self._slot = array("i", bytes(4 << self._bits))
        self._slots: Ints = np.frombuffer(self._slot, dtype=np.int32)
        self._used = 0

    def __len__(self) -> int:
        return int(np.count_nonzero(self._slots > 0))

    # -- one block ---------------------------------------------------------------------------

    def get(self, group: int, block_hash: bytes) -> int:
        """Return the block listed under a hash; 0 if none is."""
        slot = self._home_of(block_hash, group)
        slots, groups, width = self._slot, self._group, self._width
        while (block := slots[slot]) != _EMPTY:
            if (
                block > 0
                and groups[block] == group
                and self._buffer[block * width : (block + 1) * width] == block_hash
            ):
                return block
            slot = (slot + 1) & self._mask
        return 0

    def hash_of(self, block: int) -> bytes:
        return bytes(self._buffer[block * self._width : (block + 1) * self._width])

    def group_of(self, block: int) -> int:
        return self._group[block]

    def _home_of(self, block_hash: bytes, group: int) -> int:
        word = int.from_bytes(block_hash[:8], "little") + group * _GROUP_STEP
        return (word * self._factor & _WORD) >> self._shift

    # -- many blocks -------------------------------------------------------------------------

    def find(self, group: int, hashes: Sequence[bytes]) -> Ints:
        """Return the block listed under each hash; 0 where none is."""
        count = len(hashes)
        if count <= FEW:
            return np.array([self.get(group, h) for h in hashes], dtype=np.int32)
        if not self._width:
            return np.zeros(count, dtype=np.int32)
        wanted = self._words(hashes)
        first = wanted[:, 0]
        slots = self._homes(first, np.uint64(group * _GROUP_STEP & _WORD))
        blocks = self._slots[slots]
        rows, groups = self._rows, self._groups
        hit = (blocks > 0) & (rows[blocks, 0] == first) & (groups[blocks] == group)
        result: Ints = np.where(hit, blocks, np.int32(0))
        pending = np.flatnonzero(~hit & (blocks != _EMPTY))
        slots = slots[pending]
        while len(pending) > FEW:
            slots = (slots + 1) & self._mask
            blocks = self._slots[slots]
            hit = (blocks > 0) & (rows[blocks, 0] == first[pending]) & (groups[blocks] == group)
            result[pending[hit]] = blocks[hit]
            onward = ~hit & (blocks != _EMPTY)
            pending, slots = pending[onward], slots[onward]
        for position in pending.tolist():
            result[position] = self.get(group, hashes[position])
        # Eight equal bytes are no proof: compare all.
        found = np.flatnonzero(result)
        if len(found) < count:
            wanted = wanted.take(found, axis=0)
        if not np.array_equal(rows.take(result[found], axis=0), wanted):
            return np.array([self.get(group, h) for h in hashes], dtype=np.int32)
        return result

    def store(self, group: int, blocks: Sequence[int] | Ints, hashes: Sequence[bytes]) -> None:
        """Note the hashes of blocks, without listing them; an array for many, else a list.

        Raises:
            UsageError: the hashes are not as long as those before.
        """
        if len(blocks) > FEW:
            self._whole[blocks] = self._words(hashes).view(self._whole.dtype)[:, 0]
            self._groups[blocks] = group
            return
        for block, block_hash in zip(blocks, hashes, strict=True):
            if len(block_hash) != self._width:
                self._set_width(len(block_hash))
            self._buffer[block * self._width : (block + 1) * self._width] = block_hash
            self._group[block] = group

    def add(self, blocks: Sequence[int] | Ints) -> None:
        """Make blocks findable under their stored hashes, which no listed block has."""
        if 2 * (self._used + len(blocks)) > len(self._slot):
            self._rebuild()
        self._used += len(blocks)
        if isinstance(blocks, np.ndarray):
            blocks = self._add_many(blocks)
        for block in blocks:
            slot = self._home_of(self.hash_of(block), self._group[block])
            while self._slot[slot] != _EMPTY:
                slot = (slot + 1) & self._mask
            self._slot[slot] = block
            self._at[block] = slot

    def remove(self, blocks: Sequence[int] | Ints) -> None:
        """Make listed blocks unfindable; their stored hashes remain."""
        if isinstance(blocks, np.ndarray):
            slots = self._ats[blocks]
            last = self._slots[(slots + 1) & self._mask] == _EMPTY  # no search goes on from here
            self._slots[slots] = np.where(last, _EMPTY, _DELETED)
            self._used -= int(np.count_nonzero(last))
            return
        for block in blocks:
            slot = self._at[block]
            last = self._slot[(slot + 1) & self._mask] == _EMPTY
            self._slot[slot] = _EMPTY if last else _DELETED
            self._used -= last

    def hashes_of(self, blocks: Ints) -> list[bytes]:
        width = self._width
        data = self._rows.take(blocks, axis=0).tobytes()
        return [data[i : i + width] for i in range(0, len(data), width)]

    def _add_many(self, blocks: Ints) -> list[int]:
        """Add until only a few are left, which did not find a free slot yet; returns these."""
        slots = self._homes_of(blocks)
        while len(blocks) > FEW:
            free = self._slots[slots] == _EMPTY
            # The last block written to a slot keeps it; the losers see that and probe on.
            self._slots[slots[free]] = blocks[free]
            here = self._slots[slots] == blocks
            self._ats[blocks[here]] = slots[here]
            onward = ~here
            blocks, slots = blocks[onward], (slots[onward] + 1) & self._mask
        left: list[int] = blocks.tolist()
        return left

    def _rebuild(self) -> None:
        """Add all blocks again to drop deleted slots; once in num_blocks / 2 additions."""
        listed = self._slots[self._slots > 0].copy()
        self.clear()
        self.add(listed)

    def _homes_of(self, blocks: Ints) -> npt.NDArray[np.int64]:
        steps = self._groups[blocks] * np.uint64(_GROUP_STEP)
        return self._homes(self._rows[blocks, 0], steps)

    def _homes(self, words: Words, steps: Words | np.uint64) -> npt.NDArray[np.int64]:
        scattered: Words = words + steps
        scattered *= np.uint64(self._factor)
        scattered >>= np.uint64(self._shift)
        return scattered.view(np.int64)

    def _words(self, hashes: Sequence[bytes]) -> Words:
        data = b"".join(hashes)
        if len(data) != self._width * len(hashes):
            self._set_width(len(hashes[0]))
        return np.frombuffer(data, dtype="<u8").reshape(len(hashes), -1)

    def _set_width(self, width: int) -> None:
        if self._width or width % 8 or not width:
            raise UsageError(
                f"a block hash of {width} bytes among hashes of {self._width}: all requests of a "
                "cache need hashers of one algorithm"
            )
        self._width = width
        self._buffer = bytearray(width * self._num_blocks)
        self._rows = np.frombuffer(self._buffer, dtype="<u8").reshape(self._num_blocks, -1)
        self._whole = np.frombuffer(self._buffer, dtype=f"V{width}")
