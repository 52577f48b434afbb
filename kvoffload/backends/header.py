"""The header in front of every stored chunk, on disk and in Redis alike.

A chunk carries its own identity: key, namespace, length, checksum. A reader that checks them needs
to trust neither a file name nor an index nor another process. The layout
is in ``docs/reference/format.md``.

Writing: ``pack_header(key, digest, payload) + payload``. Reading: :func:`check_chunk` returns None,
or the reason why the bytes are a miss.
"""

import hashlib
import struct
from typing import NamedTuple

import xxhash

Buffer = bytes | bytearray | memoryview

COMPACT_BYTES = 256
"""Header size without alignment (Redis values)."""
ALIGNED_BYTES = 4096
"""Header size on disk: the payload begins on a page, as direct I/O demands."""
MAX_KEY_BYTES = 120
"""Longest key: its hex form and a suffix must fit a file name."""

MAGIC = b"\x89KVOFF\r\n"
VERSION = 1
XXH3_128 = 1
OTHER_VERSION = "other_version"
"""The reason why a whole chunk of another version of this format is a miss. It is not damage."""

# magic, version, header bytes, checksum kind, key length, payload length, checksum, namespace, key
_FIELDS = struct.Struct(f"<8sHHHHQ16s32s{MAX_KEY_BYTES}s")
_SEAL = struct.Struct("<Q")


class Header(NamedTuple):
    """A valid header; :func:`mismatch` compares it with the one wanted."""

    header_bytes: int
    key: bytes
    payload_bytes: int
    checksum: bytes
    namespace: bytes


def namespace_digest(namespace: str) -> bytes:
    """Return the 32 bytes of a namespace in headers; in hex they are its folder's name."""
    return hashlib.sha256(namespace.encode()).digest()


def checksum(payload: Buffer) -> bytes:
    """Return a checksum of 16 bytes (XXH3, 128 bit, canonical form).

    It guards against accidents, not against an attacker who can write to the store.
    """
    # Before xxhash 4 the one-shot function holds the GIL for the whole chunk; this never does.
    digest = xxhash.xxh3_128()
    digest.update(payload)
    return bytes(digest.digest())


def check_key(key: bytes) -> None:
    """Refuse a key that no header can hold; raises ValueError."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def pack_header(
    key: bytes, namespace: bytes, payload: Buffer, *, header_bytes: int = COMPACT_BYTES
) -> bytes:
    """Return the header of a chunk.

    Args:
        key: 1 to :data:`MAX_KEY_BYTES` bytes.
        namespace: from :func:`namespace_digest`.
        payload: the chunk, contiguous bytes.
        header_bytes: :data:`COMPACT_BYTES` or :data:`ALIGNED_BYTES`.
    """
    check_key(key)
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    digest = checksum(payload)
    fields = _FIELDS.pack(
        MAGIC, VERSION, header_bytes, XXH3_128, len(key), size, digest, namespace, key
    )
    body = fields.ljust(header_bytes - _SEAL.size, b"\0")
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def parse_header(buffer: Buffer) -> Header | str:
    """Read a header from the start of ``buffer``; return the reason if there is none.

    Reasons: ``short``, ``magic``, ``header`` (its own checksum or sizes are wrong),
    :data:`OTHER_VERSION` (a right header of another version, or with a checksum of another kind).
    """
    view = memoryview(buffer)
    if len(view) < COMPACT_BYTES:
        return "short"
    magic, version, size, kind, key_bytes, payload_bytes, digest, namespace, key = (
        _FIELDS.unpack_from(view)
    )
    if magic != MAGIC:
        return "magic"
    if size not in (COMPACT_BYTES, ALIGNED_BYTES):
        return "header"
    if len(view) < size:
        return "short"
    body = view[: size - _SEAL.size]
    if _SEAL.unpack_from(view, size - _SEAL.size)[0] != xxhash.xxh3_64_intdigest(body):
        return "header"
    # Every version has these lengths and this seal: damage does not pass for another version.
    if version != VERSION or kind != XXH3_128:
        return OTHER_VERSION
    if not 0 < key_bytes <= MAX_KEY_BYTES:
        return "header"
    return Header(size, key[:key_bytes], payload_bytes, digest, namespace)


def check_chunk(header: Buffer, payload: Buffer, key: bytes, namespace: bytes) -> str | None:
    """Return why header and payload are not exactly the chunk wanted, or None.

    Reasons: those of :func:`mismatch`, and ``payload`` (its checksum is wrong).
    """
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    found = parse_header(header)
    reason = mismatch(found, key, namespace, size)
    if reason is None and isinstance(found, Header) and checksum(payload) != found.checksum:
        return "payload"
    return reason


def mismatch(found: Header | str, key: bytes, namespace: bytes, payload_bytes: int) -> str | None:
    """Return why a parsed header is not that of the chunk wanted, or None.

    Reasons: those of :func:`parse_header`, ``namespace``, ``key``, ``length``.
    """
    if isinstance(found, str):
        return found
    if found.namespace != namespace:
        return "namespace"
    if found.key != key:
        return "key"
    return None if found.payload_bytes == payload_bytes else "length"


CHECKS = (
    "payload", "header", "key", "namespace", "size", "folder", "length", "link", "mac", "magic",
    "short", "special", "type",
)  # fmt: skip
"""What a stored chunk may fail: the ends of :func:`counted_as`, and those of disk and Redis."""
CHECK_OF = {f"{verb}corrupt_{check}": check for check in CHECKS for verb in ("", "read_")}
"""Counter of a backend → the check that it counts the failures of."""


def counted_as(reason: str) -> str:
    """Return the counter's name for a reason: all but :data:`OTHER_VERSION` are damage."""
    return reason if reason == OTHER_VERSION else f"corrupt_{reason}"
