"""What policies remember of keys that are not in the order, in bounded memory."""

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import TypeVar

Note = TypeVar("Note")
_SLACK = 32


class PinnedState(dict[bytes, Note]):
    """Notes on keys taken out of the order, most of them pinned and soon to be back.

    A key may also be deleted without a further call. The oldest notes beyond ``limit`` are
    therefore dropped, a slice at a time: reading a dict's oldest keys steps over deleted ones.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._slice = 1 + limit // _SLACK
        self._most = limit + limit // _SLACK

    def keep(self, keys: Sequence[bytes], notes: Sequence[Note]) -> None:
        """Remember a note for each key until the key comes back."""
        self.update(zip(keys, notes, strict=True))
        excess = len(self) - self._most
        if excess > 0:  # as many slices as calls for one key each would drop
            self.drop(list(islice(self, -(-excess // self._slice) * self._slice)))

    def drop(self, keys: Sequence[bytes]) -> None:
        """Delete the notes on keys."""
        deque(map(self.pop, keys), maxlen=0)


_MOST = 3


def _masks() -> tuple[tuple[int, ...], ...]:
    """Make masks of 3, 6 and 9 bits of a word, each with the bits of the one before."""
    rng = Random(0)
    orders = [rng.sample(range(64), 3 * _MOST) for _ in range(4096)]
    return tuple(
        tuple(sum(1 << bit for bit in order[: 3 * times]) for order in orders)
        for times in range(1, _MOST + 1)
    )


_MASKS = _masks()
"""The bits that say "seen once", "twice", "three times or more"; picked by checksum."""


class RotatingBloomFilter:
    """How often evicted keys had been seen, in about two bytes a key instead of the key itself.

    The filter has two generations, and the bits of one key lie in one 64-bit word. When the younger
    generation is full, the older one is dropped. A third one becomes the younger; it was cleared a
    word at a time, so that no call is slow. The last ``keys`` to ``2 * keys`` noted keys are
    remembered, all of them: a filter that forgets single keys tears holes into prefixes. About one
    unknown key in a hundred is taken for known, which only misplaces it in the order.
    """

    def __init__(self, keys: int) -> None:
        self._keys = max(1, keys)
        self._words = max(1, self._keys // 3)
        self.clear()

    def clear(self) -> None:
        self._noted = 0
        self._is_empty = True
        self._young = array("Q", [0]) * self._words
        self._old, self._next = self._young[:], self._young[:]

    def note(self, checksums: Sequence[int], times: int) -> None:
        """Remember that the keys with these checksums had been seen 1, 2 or 3 (or more) times."""
        masks, words, most, noted = _MASKS[times - 1], self._words, self._keys, self._noted
        self._is_empty = False
        young, following = self._young, self._next
        for checksum in checksums:
            high, at = divmod(checksum, words)
            young[at] |= masks[high & 4095]
            if noted < words:
                following[noted] = 0
            noted += 1
            if noted >= most:
                self._old, self._young, self._next = young, following, self._old
                young, following, noted = following, self._next, 0
        self._noted = noted

    def recall(self, checksum: int) -> int:
        """Return how often the key with this checksum had been seen: 0 to 3."""
        high, at = divmod(checksum, self._words)
        young, old = self._young[at], self._old[at]
        seen = 0
        for masks in _MASKS:
            bits = masks[high & 4095]
            if young & bits != bits and old & bits != bits:
                break
            seen += 1
        return seen

    def recall_all(self, checksums: Sequence[int]) -> list[int]:
        """Return for each key how often it had been seen; most are unknown, and cost the least."""
        words, young, old, masks = self._words, self._young, self._old, _MASKS[0]
        seen = [0] * len(checksums)
        if self._is_empty:  # as after a start, when all chunks of a store are added
            return seen
        for i, checksum in enumerate(checksums):
            at, bits = checksum % words, masks[checksum // words & 4095]
            if young[at] & bits == bits or old[at] & bits == bits:
                seen[i] = self.recall(checksum)
        return seen
