"""Copies of scattered pages in CPU memory, as fast as one Python thread allows.

numpy copies any number of pages of one array in one call, without the GIL. Small pages of many
tensors would be many calls, which would cost more than the bytes. Tensors whose parts of a chunk
are adjacent in a slot are therefore viewed as one array, and a chunk takes one call.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.transfer.slab import HostBytes

Indices = npt.NDArray[np.intp]
Items = npt.NDArray[np.void]

PAGES_AT_ONCE = 512
"""Pages touched before they are copied: as many as fit the processor's TLB."""
LEAST_ITEM_BYTES = 4096
"""Items of at least this size are as fast as whole pages."""
LARGE_PAGE_BYTES = 1 << 16
"""Pages of at least this size take so long to copy that a call for each costs little."""


class PagesOfTensor(NamedTuple):
    """One tensor's part in the chunks of a group."""

    pages: HostBytes
    """``(num_blocks, page_bytes)``; rows may have gaps between them."""
    offset: int
    """Its place in a slot."""

    @property
    def address(self) -> int:
        """Address of block 0."""
        return int(self.pages.ctypes.data)

    @property
    def page_bytes(self) -> int:
        """Bytes of a block in this tensor."""
        return int(self.pages.shape[1])

    @property
    def row_bytes(self) -> int:
        """Distance of two blocks."""
        return int(self.pages.strides[0])

    @property
    def end(self) -> int:
        """Address after the last block."""
        return self.address + (len(self.pages) - 1) * self.row_bytes + self.page_bytes


class PageCopy:
    """Copies between blocks and slots for tensors whose parts of a chunk are adjacent in a slot.

    The tensors are viewed as one array of pages, from the first tensor to the last, with foreign
    memory between them. Only items that are pages may be touched, so indices must be checked.
    """

    def __init__(self, parts: Sequence[PagesOfTensor], per_chunk: int) -> None:
        first = parts[0]
        self._parts = tuple(parts)  # keeps the tensors' memory
        self._per_chunk = per_chunk
        self._offset, self._page_bytes = first.offset, first.page_bytes
        base = min(part.address for part in parts)
        length = max(part.end for part in parts) - base
        self._memory = memoryview((ctypes.c_char * length).from_address(base))
        self._bytes = np.frombuffer(self._memory, np.int8)
        self._step = _step(parts)
        """A divisor of rows and tensor distances, in bytes: the unit of page numbers."""
        self._starts: Indices = np.array([(p.address - base) // self._step for p in parts], np.intp)
        self._steps_a_row = first.row_bytes // self._step

    def copy(self, ids: Indices, first: int, memory: HostBytes, slots: Sequence[int]) -> None:
        """Copy blocks of chunks.

        Args:
            ids: a row for each chunk: block ``first`` of it and those after it.
            first: the same for all these chunks.
            memory: what has the slots.
            slots: the first byte of each chunk's slot.
        """
        rows = ids * self._steps_a_row
        if ids.shape[1] == self._per_chunk:
            pages = (self._starts[:, None] + rows[:, None]).reshape(len(ids), -1)
            self._copy_all(pages, memory, [at + self._offset for at in slots])
            return
        # In a part of a chunk, the pages of two tensors are not adjacent in the slot.
        for i, start in enumerate(self._starts):
            before = self._offset + (i * self._per_chunk + first) * self._page_bytes
            self._copy_all(start + rows, memory, [at + before for at in slots])

    def _copy_all(self, pages: Indices, memory: HostBytes, places: Sequence[int]) -> None:
        """Copy a row of pages for each chunk, as many chunks at once as fit the TLB."""
        size, num_pages = self._page_bytes, pages.shape[1]
        most = max(1, PAGES_AT_ONCE // num_pages)
        for i in range(0, len(pages), most):
            for begin in range(0, num_pages, PAGES_AT_ONCE):
                some = pages[i : i + most, begin : begin + PAGES_AT_ONCE]
                if size < LARGE_PAGE_BYTES:
                    # The processor looks up many page addresses in parallel while it reads one byte
                    # of each. While it copies pages, it looks up one at a time. Both ends are read,
                    # because our pages may cross a boundary of the system's pages.
                    ends = some * self._step
                    self._bytes.take(ends, mode="clip")
                    ends += size - 1
                    self._bytes.take(ends, mode="clip")
                start, end = begin * size, (begin + some.shape[1]) * size
                parts = [memory[at + start : at + end] for at in places[i : i + most]]
                self._copy(some, parts)

    def _copy(self, pages: Indices, in_slots: Sequence[HostBytes]) -> None:
        """Copy a row of pages to or from each place in a slot."""
        raise NotImplementedError


class Gather(PageCopy):
    """Blocks → slot. numpy gathers without a buffer only from an array without gaps."""

    def __init__(self, parts: Sequence[PagesOfTensor], per_chunk: int) -> None:
        super().__init__(parts, per_chunk)
        self._items: Items = np.frombuffer(self._memory, np.dtype((np.void, self._step)))
        self._within: Indices = np.arange(self._page_bytes // self._step, dtype=np.intp)

    def _copy(self, pages: Indices, in_slots: Sequence[HostBytes]) -> None:
        for index, slot in zip(_items_of(pages, self._within), in_slots, strict=True):
            # With "clip" numpy needs no buffer; the indices have been checked.
            self._items.take(index, out=slot.view(self._items.dtype), mode="clip")


class GatherTwice(PageCopy):
    """Blocks → slot for pages at odd distances, which numpy copies twice."""

    def __init__(self, parts: Sequence[PagesOfTensor], per_chunk: int) -> None:
        super().__init__(parts, per_chunk)
        self._items = _overlapping(self._memory, self._page_bytes, self._step)

    def _copy(self, pages: Indices, in_slots: Sequence[HostBytes]) -> None:
        for index, slot in zip(pages, in_slots, strict=True):
            slot.view(self._items.dtype)[:] = self._items[index]


class Scatter(PageCopy):
    """Slot → blocks. Items are pages or parts of large pages, and may begin at every step.

    Parts, because numpy releases the GIL only for more than 500 items, however large.
    """

    def __init__(self, parts: Sequence[PagesOfTensor], per_chunk: int) -> None:
        super().__init__(parts, per_chunk)
        item_bytes = _item_bytes(self._page_bytes, self._step)
        self._items = _overlapping(self._memory, item_bytes, self._step)
        starts = range(0, self._page_bytes, item_bytes)
        self._within: Indices = np.array([at // self._step for at in starts], np.intp)

    def _copy(self, pages: Indices, in_slots: Sequence[HostBytes]) -> None:
        for index, slot in zip(_items_of(pages, self._within), in_slots, strict=True):
            self._items[index] = slot.view(self._items.dtype)


class ScatterLarge(PageCopy):
    """Slot → blocks, page by page: a few large items would be copied without releasing the GIL."""

    def _copy(self, pages: Indices, in_slots: Sequence[HostBytes]) -> None:
        size, target = self._page_bytes, self._bytes
        for begins, slot in zip((pages * self._step).tolist(), in_slots, strict=True):
            for i, begin in enumerate(begins):
                target[begin : begin + size] = slot[i * size : (i + 1) * size]


def _items_of(pages: Indices, within: Indices) -> Indices:
    """Return the items of rows of pages."""
    return pages if len(within) == 1 else (pages[:, :, None] + within).reshape(len(pages), -1)


def _item_bytes(page_bytes: int, step: int) -> int:
    """Return the least item size, from ``LEAST_ITEM_BYTES`` on, that divides pages."""
    sizes = range(step, page_bytes, step)
    small = (size for size in sizes if page_bytes % size == 0 and size >= LEAST_ITEM_BYTES)
    return next(small, page_bytes)


def _overlapping(memory: memoryview, item_bytes: int, step: int) -> Items:
    count = (len(memory) - item_bytes) // step + 1
    return np.ndarray((count,), np.dtype((np.void, item_bytes)), memory, 0, (step,))


def gathers(parts: Iterable[PagesOfTensor], per_chunk: int, slab_address: int) -> list[PageCopy]:
    """Choose the copies that store a group's chunks, in the fewest calls.

    Args:
        parts: the group's tensors in the order of a slot.
        per_chunk: blocks in a chunk.
        slab_address: the slab's first byte. The slab must not be between tensors that are viewed as
            one array, because numpy copies twice if its two arrays overlap.
    """

    def go_together(some: Sequence[PagesOfTensor]) -> bool:
        return _alike(some, per_chunk, slab_address) and _has_whole_items(some)

    return [
        Gather(some, per_chunk) if _has_whole_items(some) else GatherTwice(some, per_chunk)
        for some in _split(parts, go_together)
    ]


def scatters(parts: Iterable[PagesOfTensor], per_chunk: int, slab_address: int) -> list[PageCopy]:
    """Choose the copies that load a group's chunks; see :func:`gathers`."""
    runs = _split(parts, lambda some: _alike(some, per_chunk, slab_address))
    return [
        ScatterLarge(some, per_chunk)
        if some[0].page_bytes >= LARGE_PAGE_BYTES
        else Scatter(some, per_chunk)
        for some in runs
    ]


def _split(
    parts: Iterable[PagesOfTensor], go_together: Callable[[Sequence[PagesOfTensor]], bool]
) -> list[list[PagesOfTensor]]:
    runs: list[list[PagesOfTensor]] = []
    for part in parts:
        if runs and go_together([*runs[-1], part]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _step(parts: Sequence[PagesOfTensor]) -> int:
    first = parts[0]
    size = math.gcd(first.row_bytes, *(part.address - first.address for part in parts))
    # The items of a gather have no gaps, so their size must divide rows and pages.
    whole = math.gcd(size, first.page_bytes)
    return whole if whole >= min(LEAST_ITEM_BYTES, first.page_bytes) else size


def _has_whole_items(parts: Sequence[PagesOfTensor]) -> bool:
    """Whether pages consist of whole items of a sufficient size."""
    step, page_bytes = _step(parts), parts[0].page_bytes
    return page_bytes % step == 0 and step >= min(LEAST_ITEM_BYTES, page_bytes)


def _alike(parts: Sequence[PagesOfTensor], per_chunk: int, slab_address: int) -> bool:
    """Whether parts have one shape and are adjacent, without the slab between them."""
    before, last = parts[-2:]
    if before.offset + before.page_bytes * per_chunk != last.offset:
        return False
    shapes = {(part.page_bytes, part.row_bytes) for part in parts}
    begin, end = min(part.address for part in parts), max(part.end for part in parts)
    return len(shapes) == 1 and not begin <= slab_address < end
