"""Headers for stores whose authors only move bytes: made before a store, checked after a load."""

from collections.abc import Callable

from kvoffload.backends.base import ReadResult
from kvoffload.backends.header import (
    COMPACT_BYTES,
    check_chunk,
    counted_as,
    namespace_digest,
    pack_header,
)


class Frames:
    """Makes and checks the headers of one namespace's chunks; thread-safe.

    Args:
        namespace: of the chunks.
        count: told why a load was a miss: ``read_missing``, ``read_length``, ``corrupt_payload``.
        header_bytes: :data:`COMPACT_BYTES` or :data:`ALIGNED_BYTES`.
    """

    def __init__(
        self, namespace: str, count: Callable[[str], None], header_bytes: int = COMPACT_BYTES
    ) -> None:
        self._digest = namespace_digest(namespace)
        self._count = count
        self._header_bytes = header_bytes

    def header(self, key: bytes, chunk: memoryview) -> bytes:
        """Return what is stored in front of the chunk; ValueError for a key of a wrong length."""
        return pack_header(key, self._digest, chunk, header_bytes=self._header_bytes)

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
        reason = check_chunk(header, into, key, self._digest)
        if reason is None:
            return ReadResult.HIT
        if reason == "length":  # no damage: a namespace may have chunks of several lengths
            self._count("read_length")
            return ReadResult.MISSING
        self._count(counted_as(reason))
        return ReadResult.of(counted_as(reason))
