"""Names of objects: of chunks, of the facts behind a namespace, of manifests.

A chunk's name begins with two digits of a hash, because a provider splits a bucket by the beginning
of names: ``ab/NAMESPACE/KEY``, with 16 digits of the namespace and the key in hexadecimal.
"""

import re
from typing import NamedTuple

import msgspec
import xxhash

from kvoffload.backends.header import MAX_KEY_BYTES, namespace_digest

FACTS = "namespaces"
MANIFESTS = "manifests"
SHARDS = [f"{i:02x}" for i in range(256)]
PROBE = "probe/nothing"
"""No object has this name: a request for it tells whether the bucket answers."""
NAMESPACE_DIGITS = 16
_CHUNK = re.compile(rf"([0-9a-f]{{2}})/([0-9a-f]{{16}})/((?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}})")


class ChunkName(NamedTuple):
    """What a chunk's name tells."""

    tag: str
    """The namespace, see :func:`namespace_tag`."""
    key: bytes


class Described(msgspec.Struct):
    """The content of an object with facts."""

    namespace: str
    facts: dict[str, str]


def namespace_tag(namespace: str) -> str:
    """Return the namespace as names have it."""
    return namespace_digest(namespace).hex()[:NAMESPACE_DIGITS]


def chunk_name(tag: str, key: bytes) -> str:
    """Return the name of a chunk."""
    return f"{_shard(tag, key)}/{tag}/{key.hex()}"


def parse_chunk(name: str) -> ChunkName | None:
    """Return what a chunk's name tells; None for other names, foreign ones among them."""
    found = _CHUNK.fullmatch(name)
    if found is None:
        return None
    key = bytes.fromhex(found[3])
    return ChunkName(found[2], key) if _shard(found[2], key) == found[1] else None


def facts_name(tag: str) -> str:
    """Return the name of the object with a namespace's facts."""
    return f"{FACTS}/{tag}"


def read_facts(content: bytes) -> Described | None:
    """Return the content of an object with facts; None for anything else."""
    try:
        return msgspec.json.decode(content, type=Described)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _shard(tag: str, key: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(tag.encode() + key) & 0xFF:02x}"
