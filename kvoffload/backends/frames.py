"""Headers for stores whose authors only move bytes: made before a store, checked after a load."""

from collections.abc import Callable

from kvoffload.backends.base import ReadResult
from kvoffload.backends.header import COMPACT_BYTES, counted_as, namespace_digest
from kvoffload.backends.seals import ChecksumSeal, Seal


class Frames:
    """Makes and checks the headers of one namespace's chunks; thread-safe.

    Args:
        namespace: of the chunks.
        count: told why a load was a miss: ``read_missing``, ``read_length``, ``corrupt_payload``,
            ``other_key``.
        header_bytes: :data:`COMPACT_BYTES` or :data:`ALIGNED_BYTES`.
    """

    def __init__(
        self, namespace: str, count: Callable[[str], None], header_bytes: int = COMPACT_BYTES
    ) -> None:
        self._digest = namespace_digest(namespace)
        self._count = count
        self._header_bytes = header_bytes
        self.seal: Seal = ChecksumSeal()

    def pack(self, key: bytes, chunk: memoryview, tenant: bytes = b"") -> tuple[bytes, memoryview]:
        """Return header and bytes to store; see :meth:`Seal.pack`, and pass them to :meth:`done`.

        Raises:
            ValueError: the key has a wrong length.
        """
        return self.seal.pack(
            key, self._digest, chunk, header_bytes=self._header_bytes, tenant=tenant
        )

    def done(self, stored: memoryview) -> None:
        """Take back the bytes of :meth:`pack`, which are stored or never will be."""
        self.seal.done(stored)

    def blank(self) -> memoryview:
        """Return memory for the header of a chunk to load."""
        return memoryview(bytearray(self._header_bytes))

    def verdict(
        self, found: bool | ReadResult, key: bytes, header: memoryview, into: memoryview
    ) -> ReadResult:
        """Return what a load found: a hit only if header and chunk are exactly those wanted."""
        if not found:
            result = found if isinstance(found, ReadResult) else ReadResult.MISSING
            if result is ReadResult.MISSING:
                self._count("read_missing")
            return result
        return self.result(self.seal.fault(header, into, key, self._digest))

    def result(self, reason: str | None) -> ReadResult:
        """Return what a check of header and chunk comes to, with the reason why it failed."""
        if reason is None:
            return ReadResult.HIT
        if reason == "length":  # no damage: a namespace may have chunks of several lengths
            self._count("read_length")
            return ReadResult.MISSING
        self._count(counted_as(reason))
        return ReadResult.of(counted_as(reason))
