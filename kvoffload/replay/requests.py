"""The requests of a trace in four bytes a block: numbers of blocks, and one key for each number."""

from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import overload

Keys = tuple[bytes, ...]
"""The blocks of one prompt, head first; equal keys mean equal prefixes."""


class Requests(Sequence[Keys]):
    """Requests in order; each is made when it is asked for.

    Args:
        keys: of all blocks, each once. A block's number is its key's place here.
        numbers: the blocks of all requests, one request after the other.
        spans: for each request, in order, its begin and its end in ``numbers``.
        times: of each request, in seconds.
    """

    def __init__(
        self,
        keys: list[bytes],
        numbers: "array[int]",
        spans: "array[int]",
        times: "array[float]",
    ) -> None:
        self.keys = keys
        self.times = times
        self._numbers = numbers
        self._spans = spans

    @property
    def accesses(self) -> int:
        return len(self._numbers)

    def __len__(self) -> int:
        return len(self._spans) // 2

    @overload
    def __getitem__(self, at: int) -> Keys: ...
    @overload
    def __getitem__(self, at: slice) -> list[Keys]: ...
    def __getitem__(self, at: int | slice) -> Keys | list[Keys]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        return self._keys_of(self._blocks(range(len(self))[at]))

    def __iter__(self) -> Iterator[Keys]:
        return map(self._keys_of, self.blocks())

    def blocks(self) -> "Iterator[array[int]]":
        """Yield the requests as the numbers of their blocks."""
        return map(self._blocks, range(len(self)))

    def blocks_backwards(self) -> "Iterator[array[int]]":
        """Yield the same, the last request first."""
        return map(self._blocks, reversed(range(len(self))))

    def only(self, kept: Container[bytes]) -> "Requests":
        """Return what is left if all but these blocks are taken out; no request is left empty."""
        new: dict[int, int] = {}
        keys: list[bytes] = []
        numbers, spans, times = array("I"), array("Q"), array("d")
        for time, blocks in zip(self.times, self.blocks(), strict=True):
            begin = len(numbers)
            for block in blocks:
                key = self.keys[block]
                if key in kept:
                    if block not in new:
                        new[block] = len(keys)
                        keys.append(key)
                    numbers.append(new[block])
            if begin < len(numbers):
                spans.extend((begin, len(numbers)))
                times.append(time)
        return Requests(keys, numbers, spans, times)

    def _blocks(self, at: int) -> "array[int]":
        return self._numbers[self._spans[2 * at] : self._spans[2 * at + 1]]

    def _keys_of(self, blocks: "array[int]") -> Keys:
        return tuple(map(self.keys.__getitem__, blocks))


class Scope:
    """Numbers the blocks that names mean where they are used.

    Keys are digests: uniform, as the hashes are that name blocks in an engine.
    """

    def __init__(self, keys: list[bytes], prefix: str = "") -> None:
        self._keys = keys
        self._prefix = prefix
        self._by_name: dict[int | str, int] = {}
        self._by_key: dict[bytes, int] = {}  # the names 1 and "1" mean the same block

    def numbers(self, names: Sequence[int | str]) -> Iterator[int]:
        """Return the numbers of blocks, new ones for new names."""
        for name in names:
            if name not in self._by_name:
                self._by_name[name] = self._number(name)
        return map(self._by_name.__getitem__, names)

    def _number(self, name: int | str) -> int:
        key = blake2b(f"{self._prefix}{name}".encode(), digest_size=16).digest()
        if key not in self._by_key:
            self._by_key[key] = len(self._keys)
            self._keys.append(key)
        return self._by_key[key]


class RequestsBuilder:
    """Collects requests, then sorts them by time."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._numbers, self._spans, self._times = array("I"), array("Q"), array("d")
        self._shared = Scope(self._keys)

    def scope(self, prefix: str) -> Scope:
        """Return a scope for names that other scopes do not know."""
        return Scope(self._keys, prefix)

    def add(
        self, names: Iterable[int | str], time: float = 0.0, scope: Scope | None = None
    ) -> None:
        """Append a request, given by its time in seconds and its blocks' names, head first."""
        begin = len(self._numbers)
        self._numbers.extend((scope or self._shared).numbers(list(names)))
        self._spans.extend((begin, len(self._numbers)))
        self._times.append(time)

    def __len__(self) -> int:
        return len(self._times)

    def build(self) -> Requests:
        """Return the requests in the order of their times; those of one time as they came."""
        order = sorted(range(len(self)), key=self._times.__getitem__)
        spans = array("Q")
        for at in order:
            spans.extend(self._spans[2 * at : 2 * at + 2])
        times = array("d", map(self._times.__getitem__, order))
        return Requests(self._keys, self._numbers, spans, times)
