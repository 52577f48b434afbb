"""The header in front of every stored chunk, on disk and in Redis alike.

A chunk carries its own identity: key, namespace, length, checksum. A reader that checks them needs
to trust neither a file name nor an index nor another process. The layout
is in ``docs/reference/format.md``.

Writing: ``pack_header(key, digest, payload) + payload``. Reading: :func:`check_chunk` returns None,
or the reason why the bytes are a miss.
"""

import hashlib
import struct
import sys
from typing import NamedTuple

import xxhash

Buffer = bytes | bytearray | memoryview

COMPACT_BYTES = 256
"""Header size without alignment (Redis values)."""
ALIGNED_BYTES = 4096
"""Header size on disk: the payload begins on a page, as direct I/O demands."""
MAX_KEY_BYTES = 120
"""Longest key: its hex form and a suffix must fit a file name."""

CHECKSUM_BYTES = 16
NONCE_BYTES = 24
KEY_ID_BYTES = 8
TENANT_BYTES = 16
NO_TENANT = bytes(TENANT_BYTES)

MAGIC = b"\x89KVOFF\r\n"
VERSION = 1
XXH3_128 = 1
AES_256_GCM = 2
"""The payload is encrypted, and the tag of the cipher takes the place of the checksum."""
OTHER_VERSION = "other_version"
"""The reason why a whole chunk of another version of this format is a miss. It is not damage."""
OTHER_KEY = "other_key"
"""The reason why a whole chunk is a miss that is not encrypted under a key of this reader. A reader
with a key takes no plain chunk: anybody could have written it. It is not damage."""
NOT_DAMAGED = frozenset((OTHER_VERSION, OTHER_KEY))
"""The reasons of whole chunks that this reader cannot use, and leaves in place."""

# magic, version, header bytes, checksum kind, key length, payload length, checksum, namespace, key,
# nonce, id of the encryption key, tag of the tenant
_FIELDS = struct.Struct(
    f"<8sHHHHQ16s32s{MAX_KEY_BYTES}s{NONCE_BYTES}s{KEY_ID_BYTES}s{TENANT_BYTES}s"
)
_FRONT = struct.Struct("<8sHHHHQ")
"""Those before the checksum."""
_SEAL = struct.Struct("<Q")
SEAL_BYTES = _SEAL.size
"""At the end of each header, and of each record of the disk tier: a checksum of the rest."""
_CHECKSUM_AT = 24


class Header(NamedTuple):
    """A valid header; :func:`mismatch` compares it with the one wanted."""

    header_bytes: int
    key: bytes
    payload_bytes: int
    checksum: bytes
    """Or the tag of the cipher."""
    namespace: bytes
    kind: int = XXH3_128
    nonce: bytes = bytes(NONCE_BYTES)
    key_id: bytes = bytes(KEY_ID_BYTES)
    tenant: bytes = NO_TENANT
    """:data:`NO_TENANT`, or what tells the chunk's tenant to those who know its salt."""


def namespace_digest(namespace: str) -> bytes:
    """Return the 32 bytes of a namespace in headers; in hex they are its folder's name."""
    return hashlib.sha256(namespace.encode()).digest()


def checksum(*parts: Buffer) -> bytes:
    """Return a checksum of 16 bytes (XXH3, 128 bit, canonical form) of a payload.

    It guards against accidents, not against an attacker who can write to the store.
    """
    if len(parts) == 1 and num_bytes(parts[0]) <= _ONE_SHOT_BYTES:
        return bytes(xxhash.xxh3_128_digest(parts[0]))
    digest = running_checksum()
    for part in parts:
        digest.update(part)
    return bytes(digest.digest())


def num_bytes(payload: Buffer) -> int:
    """Return how many bytes a buffer has."""
    return payload.nbytes if isinstance(payload, memoryview) else len(payload)


def running_checksum() -> xxhash.xxh3_128:
    """Return what takes a payload in pieces (``update``), and then tells its checksum (``digest``).

    It never holds the GIL for a whole chunk.
    """
    return xxhash.xxh3_128()


def one_shot_bytes(version: str) -> int:
    """Return how much one call of this version of xxhash may hash.

    Up to 512 KiB it takes 0.6 times as long as ``update``. Before version 4 it holds the GIL: up to
    64 KiB that takes 3 µs, less than to give the GIL away.
    """
    return 64 << 10 if int(version.partition(".")[0]) < 4 else sys.maxsize


_ONE_SHOT_BYTES = one_shot_bytes(xxhash.VERSION)


def is_key(key: bytes) -> bool:
    """Return whether a header can hold a key; the file name of an empty key would be a folder's."""
    return 0 < len(key) <= MAX_KEY_BYTES


def check_key(key: bytes) -> None:
    """Refuse a key that no header can hold; raises ValueError."""
    if not is_key(key):
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def pack_header(
    key: bytes,
    namespace: bytes,
    payload: Buffer,
    *,
    header_bytes: int = COMPACT_BYTES,
    tenant: bytes = b"",
) -> bytes:
    """Return the header of a chunk.

    Args:
        key: 1 to :data:`MAX_KEY_BYTES` bytes.
        namespace: from :func:`namespace_digest`.
        payload: the chunk, contiguous bytes.
        header_bytes: :data:`COMPACT_BYTES` or :data:`ALIGNED_BYTES`.
        tenant: a tag of :data:`TENANT_BYTES`, or nothing.
    """
    size, digest = num_bytes(payload), checksum(payload)
    body = header_body(key, namespace, size, digest, header_bytes=header_bytes, tenant=tenant)
    return sealed(body)


def header_body(
    key: bytes,
    namespace: bytes,
    payload_bytes: int,
    digest: bytes,
    *,
    header_bytes: int,
    kind: int = XXH3_128,
    nonce: bytes = b"",
    key_id: bytes = b"",
    tenant: bytes = b"",
) -> bytes:
    """Return a header without its seal; see :func:`pack_header` for what it has."""
    check_key(key)
    fields = _FIELDS.pack(
        MAGIC, VERSION, header_bytes, kind, len(key), payload_bytes, digest, namespace, key,
        nonce, key_id, tenant,
    )  # fmt: skip
    return fields.ljust(header_bytes - SEAL_BYTES, b"\0")


def sealed(body: bytes, digest: Buffer = b"") -> bytes:
    """Return a whole header or record; ``digest`` takes the place of a header's checksum."""
    if digest:
        body = b"".join((body[:_CHECKSUM_AT], digest, body[_CHECKSUM_AT + CHECKSUM_BYTES :]))
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def body_of(header: memoryview, found: Header) -> memoryview:
    """Return a valid header without its seal."""
    return header[: found.header_bytes - SEAL_BYTES]


def associated_data(body: Buffer) -> bytes:
    """Return what the tag of a cipher covers of a header without its seal: all but the tag."""
    return b"".join((body[:_CHECKSUM_AT], body[_CHECKSUM_AT + CHECKSUM_BYTES :]))


def parse_header(buffer: Buffer) -> Header | str:
    """Read a header from the start of ``buffer``; return the reason if there is none.

    Reasons: ``short``, ``magic``, ``header`` (its own checksum or sizes are wrong),
    :data:`OTHER_VERSION` (a right header of another version, or with a checksum of another kind).
    """
    view = memoryview(buffer)
    if len(view) < COMPACT_BYTES:
        return "short"
    (
        magic, version, size, kind, key_bytes, payload_bytes, digest, namespace, key, nonce, key_id,
        tenant,
    ) = _FIELDS.unpack_from(view)  # fmt: skip
    if magic != MAGIC:
        return "magic"
    if size not in (COMPACT_BYTES, ALIGNED_BYTES):
        return "header"
    if len(view) < size:
        return "short"
    body = view[: size - SEAL_BYTES]
    if _SEAL.unpack_from(view, size - SEAL_BYTES)[0] != xxhash.xxh3_64_intdigest(body):
        return "header"
    # Every version has these lengths and this seal: damage does not pass for another version.
    if version != VERSION or kind not in (XXH3_128, AES_256_GCM):
        return OTHER_VERSION
    if not 0 < key_bytes <= MAX_KEY_BYTES:
        return "header"
    own_key = key[:key_bytes]
    return Header(size, own_key, payload_bytes, digest, namespace, kind, nonce, key_id, tenant)


def check_chunk(header: Buffer, payload: Buffer, key: bytes, namespace: bytes) -> str | None:
    """Return why header and payload are not exactly the chunk wanted, or None.

    Reasons: those of :func:`mismatch`, :data:`OTHER_KEY` (the payload is encrypted), and
    ``payload`` (its checksum is wrong).
    """
    return check_sum(header, num_bytes(payload), checksum(payload), key, namespace)


def check_sum(header: Buffer, size: int, digest: bytes, key: bytes, namespace: bytes) -> str | None:
    """Do the same by length and checksum of the payload."""
    view = memoryview(header)
    front = _FRONT.pack(MAGIC, VERSION, len(view), XXH3_128, len(key), size)
    wanted = b"".join((front, digest, namespace, key))
    if view[: len(wanted)] == wanted and len(view) in (COMPACT_BYTES, ALIGNED_BYTES):
        seal = xxhash.xxh3_64_intdigest(view[: -_SEAL.size])
        if _SEAL.unpack_from(view, len(view) - SEAL_BYTES)[0] == seal:
            return None
    found = parse_header(view)
    reason = mismatch(found, key, namespace, size)
    if reason is not None or not isinstance(found, Header):
        return reason
    if found.kind != XXH3_128:
        return OTHER_KEY
    return None if digest == found.checksum else "payload"


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
    """Return the counter's name for a reason: all but those of :data:`NOT_DAMAGED` are damage."""
    return reason if reason in NOT_DAMAGED else f"corrupt_{reason}"
