"""Memory of the server that chunks of all engines share: who leaves, and where bytes are.

A chunk is in *runs* of blocks, so memory that is free in pieces serves chunks of any size. Chunks
of all namespaces are in one eviction order. A chunk in one run can be *lent*: engines map the
memory, and read it there. The kernel lets no engine write. The next server can *adopt* the memory.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol

from kvoffload.backends.base import WriteResult, Written
from kvoffload.backends.header import namespace_digest, running_checksum
from kvoffload.io.lent_memory import ADVICE, NO_FORK, advise
from kvoffload.io.service.free_blocks import FreeBlocks, TakenBlocks
from kvoffload.io.service.host_chunk import BLOCK, Chunk, Runs, blocks_of
from kvoffload.io.service.key_parts import new_parts
from kvoffload.io.service.memory_file import MemoryFile, file_of, private_memory, sealed_file
from kvoffload.io.service.namespace_shares import NamespaceOrder, NamespaceShares
from kvoffload.policies.base import Policy
from kvoffload.policies.kept_order import KeptOrder
from kvoffload.policies.tenant_order import TenantShares, told_apart

log = logging.getLogger(__name__)
PIECE = 256 << 10
"""Bytes copied, and then hashed, at once: a processor's second cache has them."""
MOST_LENT = 0.5
"""The part of the memory that is lent at most: the rest can always make room."""
Name = bytes
"""Four bytes of a namespace's number, then the key."""
_NUMBER = 4


class Reader(Protocol):
    """What learns of the chunks of one namespace; called on any thread, under a lock."""

    def changed(self, key: bytes) -> None:
        """Take in that a chunk appeared or left."""
        ...

    def evicted(self, key: bytes) -> None:
        """Take in that a chunk left to make room."""
        ...


_Parts = dict[bytes, dict[bytes, Chunk]]
_EMPTY: _Parts = new_parts(dict)


class HostMemory:
    """Chunks by namespace and key, within a number of bytes. Thread-safe.

    The memory is mapped at once, and taken from the system as it is first used.

    Args:
        capacity_bytes: at most so many bytes of chunks, each rounded up to whole blocks.
        make_policy: makes the eviction order for a number of chunks.
        lends: whether other processes can map the memory. Many systems give private memory large
            pages, and shared memory none.
        tenants: shares of the tenants that :meth:`own` tells; used by this memory alone.
        shares: those of namespaces, likewise; None: they have none, and nothing is counted.
        keeps: whether the next server may adopt the memory.
        fd: the memory of an earlier server, to be adopted if it is one like this; closed with it.

    Raises:
        OSError: the system refuses so much memory.
        ValueError: it would not hold a block.
    """

    def __init__(
        self,
        capacity_bytes: int,
        make_policy: Callable[[int], Policy],
        *,
        lends: bool = False,
        tenants: TenantShares | None = None,
        shares: NamespaceShares | None = None,
        keeps: bool = False,
        fd: int = -1,
    ) -> None:
        blocks = capacity_bytes // BLOCK
        if blocks < 1:
            raise ValueError(f"{capacity_bytes} bytes hold no block of {BLOCK}")
        self.capacity_bytes = size = blocks * BLOCK
        self.file: MemoryFile | None = None
        """The memory as a file with a table; None: it ends with this process."""
        if keeps or fd >= 0:
            self.file = file_of(size, blocks, fd)
        elif lends:
            self.file = sealed_file(size, blocks)
        self._table = self.file if keeps or fd >= 0 else None
        """What tells the next server of chunks; None: it adopts none, so nothing is entered."""
        self.lends = lends and self.file is not None
        """Whether engines may map it."""
        self._map = self.file.map if self.file else private_memory(size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for advice in (*ADVICE, NO_FORK):
            advise(self._address, size, advice)
        self._lock = threading.Lock()
        self._free = FreeBlocks(blocks)
        self._most_lent = int(MOST_LENT * size)
        self.lent_bytes = 0
        """Bytes of the blocks of chunks on loan; one that is lent twice counts twice."""
        self._tables = dict[bytes, _Parts]()
        """A namespace's number → its chunks by their keys, in parts: listing looks at no other."""
        self._num_chunks = 0
        self._make_policy = told_apart(make_policy, tenants)
        self._tenants, self._shares = tenants, shares
        self._spared: set[Name] = set()
        """What requests in the engines' queues need, whether it is here or not."""
        self._order: KeptOrder | None = None
        self._by_namespace: NamespaceOrder | None = None
        """What that order wraps, if namespaces have shares."""
        self._passed: dict[Chunk, Name] = {}
        """Chunks that an eviction has passed, as they are on loan or read: out of the order until
        that ends. So each costs one eviction a moment, and the next ones nothing."""
        self._numbers: dict[bytes, int] = {}
        self._readers: dict[bytes, Reader] = {}
        if shares is not None:
            shares.attached = self._readers
        self._old_loans: list[Chunk] = []
        """Chunks that an earlier server has lent, and an engine may still copy."""
        if self.file and self.file.is_adopted:
            self._adopt(self.file, blocks)

    # ---- namespaces ----

    def number_of(self, namespace: str) -> bytes:
        """Return how the names of a namespace's chunks begin."""
        with self._lock:
            return self._number_of(namespace_digest(namespace))

    def _number_of(self, digest: bytes) -> bytes:
        return self._numbers.setdefault(digest, len(self._numbers)).to_bytes(_NUMBER, "big")

    def begin_reading(self, number: bytes, reader: Reader) -> None:
        """Tell a namespace's one reader of changes from now on."""
        with self._lock:
            self._readers[number] = reader

    def tables(self, number: bytes) -> Collection[Collection[bytes]]:
        """Return the keys of a namespace in tables, which change as it does."""
        return self._parts(number).values()

    def end_reading(self, number: bytes, reader: Reader) -> None:
        """Tell this reader nothing more."""
        with self._lock:
            if self._readers.get(number) is reader:
                del self._readers[number]
                self._forget_if_unused(number)

    def names_of(self, namespace: str) -> list[Name]:
        """Return the names of the chunks of a namespace."""
        with self._lock:
            known = self._numbers.get(namespace_digest(namespace))
            if known is None:  # an engine may name any, and none of these may be kept
                return []
            number = known.to_bytes(_NUMBER, "big")
            return [number + key for part in self._parts(number).values() for key in part]

    def bytes_of(self, namespace: str) -> int | None:
        """Return the bytes that count as a namespace's; None: namespaces have no shares."""
        number = self.number_of(namespace)
        return None if self._shares is None else self._shares.bytes_of[number]

    # ---- chunks ----

    @property
    def resident_bytes(self) -> int:
        """Bytes that chunks take, those that are being written or read among them."""
        return self.capacity_bytes - self._free.num_blocks * BLOCK

    def __len__(self) -> int:
        return self._num_chunks

    def __contains__(self, name: Name) -> bool:
        return self._find(name) is not None

    def holds(self, number: bytes, key: bytes) -> bool:
        """Whether a chunk of a namespace is here: as its name among the chunks, and faster."""
        return key in self._parts(number)[key[:1]]

    def held(self, number: bytes, keys: Iterable[bytes]) -> list[bool]:
        """Return this for many keys of a namespace."""
        parts = self._parts(number)
        return [key in parts[key[:1]] for key in keys]

    def _find(self, name: Name) -> Chunk | None:
        # In one line: a loan of 64 chunks asks 128 times.
        parts = self._tables.get(name[:_NUMBER], _EMPTY)
        return parts[name[_NUMBER : _NUMBER + 1]].get(name[_NUMBER:])

    def _chunk(self, name: Name) -> Chunk:
        return self._part(name)[name[_NUMBER:]]

    def _part(self, name: Name) -> dict[bytes, Chunk]:
        return self._parts(name[:_NUMBER])[name[_NUMBER : _NUMBER + 1]]

    def _parts(self, number: bytes) -> _Parts:
        return self._tables.get(number, _EMPTY)

    def read(self, name: Name, header: memoryview, into: memoryview) -> bytes | None:
        """Copy the header and as much of a chunk as there is room for; None: it is not here.

        Returns the checksum of what ``into`` has then. Each piece is hashed in its copy, which a
        processor's cache still has.
        """
        with self._lock:
            if (chunk := self._find(name)) is None:
                return None
            chunk.num_readers += 1
        try:
            header[: len(chunk.header)] = chunk.header
            digest, size = running_checksum(), min(chunk.size, into.nbytes)
            target, at, hashed = _address_of(into), 0, 0
            for first, count in chunk.runs:
                source, end = self._address + first * BLOCK - at, min(at + count * BLOCK, size)
                while at < end:
                    length = min(end - at, PIECE)
                    # The interpreter runs other threads meanwhile.
                    ctypes.memmove(target + at, source + at, length)
                    at += length
                    if at == size or at - hashed >= PIECE:
                        digest.update(into[hashed:at])
                        hashed = at
        finally:
            with self._lock:
                self._end_reading([chunk])
        return bytes(digest.digest())

    def verify(
        self, name: Name, size: int, check: Callable[[memoryview, memoryview], bool]
    ) -> bool:
        """Check a chunk where it is, so that it can be lent; False: it is damaged.

        Args:
            name: of the chunk.
            size: one of another size cannot be lent.
            check: says whether the header and the bytes are those of the chunk.
        """
        with self._lock:
            chunk = self._find(name)
            if chunk is None or chunk.is_verified or not chunk.can_be_lent(size):
                return True
            chunk.num_readers += 1
        try:
            with memoryview(self._map) as memory:
                there = memory[chunk.start : chunk.start + size]
                chunk.is_verified = check(memoryview(chunk.header), there)
        finally:
            with self._lock:
                self._end_reading([chunk])
        return chunk.is_verified

    def lend(
        self, number: bytes, keys: Sequence[bytes], sizes: Sequence[int]
    ) -> tuple[list[int], Callable[[], None]]:
        """Lend chunks that are verified; return the first byte of each, and what ends the loan.

        -1 stands for a chunk that is not here, not verified, in pieces, of another size, or too
        much. Blocks of a chunk on loan are not used again, also if the chunk leaves. The end counts
        a use of each: an eviction passes them until then, and no engine waits for it.
        """
        starts, lent, names = list[int](), list[Chunk](), list[Name]()
        with self._lock:
            # Steps of Python are most of the time of a loan: so no calls here for each chunk.
            parts, most, lent_bytes = self._parts(number), self._most_lent, self.lent_bytes
            for key, size in zip(keys, sizes, strict=True):
                chunk, start = parts[key[:1]].get(key), -1
                if chunk is not None and chunk.is_verified and chunk.size == size:
                    first, count = chunk.runs[0]
                    if len(chunk.runs) == 1 and lent_bytes + count * BLOCK <= most:
                        lent_bytes += count * BLOCK
                        chunk.num_readers += 1
                        lent.append(chunk)
                        names.append(number + key)
                        start = first * BLOCK
                starts.append(start)
            self.lent_bytes = lent_bytes
            self._mark_lent(lent)
        return starts, partial(self._end_loans, lent, names)

    def end_old_loans(self) -> None:
        """Use blocks again that an earlier server had lent, once none of its engines maps them."""
        if self._old_loans and self.file and not self.file.is_mapped_from_before():
            self._end_loans(self._old_loans, [])

    def _end_loans(self, lent: list[Chunk], names: list[Name]) -> None:
        with self._lock:
            self.lent_bytes -= sum(chunk.room for chunk in lent)
            self._end_reading(lent[::-1])
            used = zip(names[::-1], lent[::-1], strict=False)  # old loans have no names
            self._count_use([name for name, chunk in used if not chunk.is_gone])
            lent.clear()
            names.clear()

    def write(self, name: Name, header: bytes, chunk: memoryview) -> Written:
        """Keep a chunk, unless it is here; False: there is no room for it."""
        with self._lock:
            if (known := self._find(name)) is not None:
                if known.size == chunk.nbytes:
                    return WriteResult.PRESENT
                self._remove(name)
            runs = self._take(name[:_NUMBER], blocks_of(chunk.nbytes))
        if runs is None:
            return False
        try:
            self._copy_in(runs, chunk)
            with self._lock:
                if name not in self:  # else another thread was as fast
                    self._order_of(chunk.nbytes).add((name,))
                    if self._table:
                        self._table.note(header, runs)
                    self._enter(name, Chunk(header, runs, chunk.nbytes))
                    runs = ()
                    self._tell(name)
        finally:
            if runs:
                with self._lock:
                    self._release(name[:_NUMBER], runs)
        return True

    def own(self, names: Iterable[Name], tenants: Iterable[bytes]) -> None:
        """Note the tenants of chunks about to be stored, before room is made for them."""
        if self._tenants is not None:
            with self._lock:
                for name, tenant in zip(names, tenants, strict=True):
                    if name not in self:
                        self._tenants.own((name,), tenant)

    def disown(self, names: Iterable[Name]) -> None:
        """Take back :meth:`own` for chunks that were not stored."""
        if self._tenants is not None:
            with self._lock:
                self._tenants.forget(name for name in names if name not in self)

    def drop(self, names: Sequence[Name]) -> int:
        """Remove the chunks that are here; return how many there were."""
        with self._lock:
            before = self._num_chunks
            for name in names:
                if name in self:
                    self._remove(name)
            return before - self._num_chunks

    def used(self, names: Sequence[Name]) -> None:
        """Count a use of each chunk that is here, the tail of the prefix first."""
        with self._lock:
            self._count_use([name for name in names if name in self])

    def _count_use(self, names: Sequence[Name]) -> None:
        if self._order is not None:
            self._order.touch(names)
            self._note_use(names)

    def reorder(self, names: Sequence[Name]) -> None:
        """Put chunks that were stored together into this order; counts as no use."""
        with self._lock:
            here = self._ordered(dict.fromkeys(names))
            if self._order is not None and len(here) > 1:
                self._order.remove(here)
                self._order.add(here)
                self._note_use(here)

    def spare(self, number: bytes, keys: Collection[bytes]) -> None:
        """Evict these chunks of a namespace last, and those of the call before as usual again."""
        wanted = {number + key for key in keys}
        with self._lock:
            gone = {name for name in self._spared if name.startswith(number)} - wanted
            self._end_sparing(gone)
            new = wanted - self._spared
            if self._order is not None:
                self._order.keep(self._ordered(new))
            self._spared |= new

    # ---- under the lock ----

    def _take(self, number: bytes, count: int) -> Runs | None:
        """Take so many blocks for a namespace, and evict for them; None: there are not so many."""
        if count * BLOCK > self.capacity_bytes:
            return None
        if self._shares is not None and not self._keep_within(number, count * BLOCK):
            return None
        while self._free.num_blocks < count:
            if not self._evict(self._victims()):
                return None
        if self._shares is not None:
            self._shares.count(number, count * BLOCK)
        return tuple(self._free.take(count))

    def _keep_within(self, number: bytes, num_bytes: int = 0) -> bool:
        """Evict until a namespace may have so many bytes more; False: it may not."""
        while self._shares is not None and not self._shares.has_room(number, num_bytes):
            if not self._evict(self._victims(number)):
                return False
        return True

    def _evict(self, victims: Sequence[Name]) -> bool:
        """Evict chunks that an order has named; False: it has named none."""
        for name in victims:
            chunk = self._chunk(name)
            if chunk.num_readers:  # it would leave without making room
                self._passed[chunk] = name
                continue
            self._leave(name)
            if reader := self._readers.get(name[:_NUMBER]):
                reader.evicted(name[_NUMBER:])
        return bool(victims)

    def _victims(self, number: bytes = b"") -> Sequence[Name]:
        """Take the next chunk to leave out of the order: of one namespace, or of all."""
        order, by_namespace = self._order, self._by_namespace
        if order is None:
            return ()
        take = order.victims
        if by_namespace is not None and number:
            take = partial(by_namespace.victims_of, number)
        if not (victims := take(1)) and self._spared:
            self._end_sparing({name for name in self._spared if name.startswith(number)})
            victims = take(1)
        if not victims and by_namespace is not None and not number:
            victims = by_namespace.any_victims()
        return victims

    def _end_sparing(self, names: set[Name]) -> None:
        self._spared -= names
        if self._order is not None:
            self._order.let_go(self._ordered(names))

    def _ordered(self, names: Iterable[Name]) -> list[Name]:
        """Return those of chunks that are here, and in the order."""
        here = (name for name in names if name in self)
        return [name for name in here if self._chunk(name) not in self._passed]

    def _order_of(self, size: int) -> KeptOrder:
        if self._order is None:  # policies count chunks: all are as large as the first, say
            chunks = self.capacity_bytes // (blocks_of(size) * BLOCK)
            if self._tenants is not None:
                self._tenants.limit(chunks)
            make_policy = partial(self._make_policy, max(1, chunks))
            if self._shares is not None:
                self._by_namespace = NamespaceOrder(make_policy, self._shares, _number_in)
            policy = make_policy() if self._by_namespace is None else self._by_namespace
            self._order = KeptOrder(policy, self._spared)
        return self._order

    def _remove(self, name: Name) -> None:
        if self._order is not None and not self._passed.pop(self._chunk(name), None):
            self._order.remove((name,))
        self._leave(name)

    def _leave(self, name: Name) -> None:
        part = self._part(name)
        chunk = part.pop(name[_NUMBER:])
        self._num_chunks -= 1
        if self._tenants is not None:
            self._tenants.forget((name,))
        chunk.gone_from = name[:_NUMBER]
        if not chunk.num_readers:
            self._release(chunk.gone_from, chunk.runs)
        elif self._table:
            self._table.mark(chunk.first, is_lent=True, is_gone=True)
        self._tell(name)
        if not part:
            self._forget_if_unused(chunk.gone_from)

    def _forget_if_unused(self, number: bytes) -> None:
        """Forget the tables of a namespace that has neither chunks nor a reader."""
        if number not in self._readers and not any(self._parts(number).values()):
            self._tables.pop(number, None)
            if self._by_namespace is not None:
                self._by_namespace.forget(number)

    def _tell(self, name: Name) -> None:
        if reader := self._readers.get(name[:_NUMBER]):
            reader.changed(name[_NUMBER:])

    def _mark_lent(self, lent: Sequence[Chunk]) -> None:
        if self._table:
            for chunk in lent:
                self._table.mark(chunk.first, is_lent=True, is_gone=chunk.is_gone)

    def _end_reading(self, chunks: Sequence[Chunk]) -> None:
        """End a use of chunks, the tail of the prefix first."""
        back = list[Name]()
        for chunk in chunks:
            chunk.num_readers -= 1
            if chunk.num_readers:
                continue
            if chunk.is_gone:
                self._release(chunk.gone_from, chunk.runs)
            elif self._table:
                self._table.mark(chunk.first, is_lent=False)
            if name := self._passed.pop(chunk, None):
                back.append(name)
        if back and self._order is not None:
            self._order.add(back)

    def _enter(self, name: Name, chunk: Chunk) -> None:
        if (number := name[:_NUMBER]) not in self._tables:
            self._tables[number] = new_parts(dict)
        self._part(name)[name[_NUMBER:]] = chunk
        self._num_chunks += 1

    def _note_use(self, names: Sequence[Name]) -> None:
        if self._table:
            self._table.use([self._chunk(name).first for name in names])

    def _release(self, number: bytes, runs: Runs) -> None:
        if self._table:
            self._table.clear(runs[0][0])
        self._free.add(runs)
        if self._shares is not None:
            self._shares.count(number, -BLOCK * sum(count for _, count in runs))

    # ---- without it ----

    def _adopt(self, file: MemoryFile, blocks: int) -> None:
        """Go on with the chunks that an earlier server has left; the rest is free."""
        taken, size, by_use = TakenBlocks(blocks), 0, list[tuple[int, Name]]()
        for record in file.records():
            runs, size = tuple(record.runs), record.header.payload_bytes
            if sum(count for _, count in runs) != blocks_of(size) or not taken.add(runs):
                file.clear(runs[0][0])
                continue
            number = self._number_of(record.header.namespace)
            name, chunk = number + record.header.key, Chunk(record.raw, runs, size)
            if self._shares is not None:
                self._shares.count(number, chunk.room)
            if record.is_gone or name in self:
                chunk.gone_from = number
            else:
                self._enter(name, chunk)
                by_use.append((record.used, name))
            if chunk.is_gone or record.is_lent:
                chunk.num_readers += 1
                self._old_loans.append(chunk)
        self.lent_bytes = sum(chunk.room for chunk in self._old_loans)
        self._mark_lent(self._old_loans)
        self._free = taken.rest()
        if by_use:
            self._order_of(size).add([name for _, name in sorted(by_use)])
        for number in list(self._tables):  # one that loses its last chunk is forgotten
            self._keep_within(number)
        log.info("%d chunks of the server before are adopted", len(self))

    def _copy_in(self, runs: Runs, chunk: memoryview) -> None:
        at = 0
        for start, count in runs:
            part = chunk[at : at + count * BLOCK]
            target = self._address + start * BLOCK
            if part.readonly:
                ctypes.memmove(target, bytes(part), part.nbytes)
            elif part.nbytes:
                ctypes.memmove(target, _address_of(part), part.nbytes)
            at += part.nbytes


def _number_in(name: Name) -> bytes:
    return name[:_NUMBER]


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory.nbytes else 0
