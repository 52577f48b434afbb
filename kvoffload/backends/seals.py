"""What guards a stored chunk: a header before a store, a check of header and chunk after a load.

A :class:`ChecksumSeal` leaves the chunk as it is. The seal of
:mod:`~kvoffload.backends.encryption` stores it encrypted, and decrypts it where it was read.
"""

import hashlib
from typing import Protocol

from kvoffload.backends.header import (
    COMPACT_BYTES,
    NO_TENANT,
    OTHER_KEY,
    TENANT_BYTES,
    XXH3_128,
    Header,
    check_chunk,
    mismatch,
    pack_header,
    parse_header,
    running_checksum,
)


class RunningCheck(Protocol):
    """The check of a payload that is read in pieces."""

    def update(self, piece: memoryview) -> None:
        """Take the next bytes; their memory is undefined afterwards."""
        ...

    def is_whole(self) -> bool:
        """Return whether all pieces together are what was stored."""
        ...


class Seal(Protocol):
    """Makes and checks the headers of chunks of any namespace; thread-safe."""

    def pack(
        self,
        key: bytes,
        namespace: bytes,
        chunk: memoryview,
        *,
        header_bytes: int = COMPACT_BYTES,
        tenant: bytes = b"",
    ) -> tuple[bytes, memoryview]:
        """Return the header, and the bytes to store behind it, as many as the chunk has.

        Pass those bytes to :meth:`done` once they are stored. Raises ValueError for a key that no
        header can hold. ``tenant`` stands for whose chunk it is; empty: that is not told.
        """
        ...

    def done(self, stored: memoryview) -> None:
        """Take back what :meth:`pack` returned; by default, it is the caller's own chunk."""
        return

    def fault(
        self, header: memoryview, payload: memoryview, key: bytes, namespace: bytes
    ) -> str | None:
        """Return why header and payload are not the chunk wanted; None: ``payload`` is the chunk.

        Of a chunk that another kind of seal guards, or other keys do, only header and length are
        checked. After a fault the content of ``payload`` is undefined.
        """
        found = parse_header(header)
        reason = mismatch(found, key, namespace, payload.nbytes)
        if reason is not None or not isinstance(found, Header):
            return reason
        if (running := self.begin_check(header, found)) is None:
            return OTHER_KEY
        running.update(payload)
        return None if running.is_whole() else "payload"

    def begin_check(self, header: memoryview, found: Header) -> RunningCheck | None:
        """Return the check of the payload behind a header; None: another seal guards it."""
        ...

    def is_of(self, found: Header, tenant: bytes) -> bool | None:
        """Return whether a chunk is a tenant's; None: its header does not tell it to this seal."""
        ...


class ChecksumSeal(Seal):
    """Stores chunks as they are, under a checksum that finds accidents."""

    def pack(
        self,
        key: bytes,
        namespace: bytes,
        chunk: memoryview,
        *,
        header_bytes: int = COMPACT_BYTES,
        tenant: bytes = b"",
    ) -> tuple[bytes, memoryview]:
        tag = tenant_tag(tenant, namespace)
        return pack_header(key, namespace, chunk, header_bytes=header_bytes, tenant=tag), chunk

    def fault(
        self, header: memoryview, payload: memoryview, key: bytes, namespace: bytes
    ) -> str | None:
        return check_chunk(header, payload, key, namespace)

    def begin_check(self, header: memoryview, found: Header) -> RunningCheck | None:
        return _RunningChecksum(found.checksum) if found.kind == XXH3_128 else None

    def is_of(self, found: Header, tenant: bytes) -> bool | None:
        if found.kind != XXH3_128 or found.tenant == NO_TENANT:
            return None
        return found.tenant == tenant_tag(tenant, found.namespace)


def is_of(header: Header | str, tenant: bytes, cipher: Seal | None) -> bool | None:
    """Return whether a chunk is a tenant's by its header, as :func:`parse_header` returns it.

    None: the header is damaged or does not tell it, or ``cipher`` lacks its key.
    """
    if not isinstance(header, Header):
        return None
    seals: list[Seal] = [ChecksumSeal(), *filter(None, (cipher,))]
    answers = (seal.is_of(header, tenant) for seal in seals)
    return next((answer for answer in answers if answer is not None), None)


def tenant_tag(tenant: bytes, key: bytes) -> bytes:
    """Return what a header tells of a tenant: keyed, so that two stores do not tell the same."""
    if not tenant:
        return b""
    return hashlib.blake2b(
        tenant, key=key, digest_size=TENANT_BYTES, person=b"kvoffload tenant"
    ).digest()


class _RunningChecksum:
    def __init__(self, wanted: bytes) -> None:
        self._wanted = wanted
        self._digest = running_checksum()

    def update(self, piece: memoryview) -> None:
        self._digest.update(piece)

    def is_whole(self) -> bool:
        return bytes(self._digest.digest()) == self._wanted
