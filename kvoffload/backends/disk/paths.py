"""Names of everything under the root of the disk backend.

::

    root/
      <namespace digest, hex>/       one folder a namespace
        manifest.json                the facts behind the digest, for people
        snapshot                     the saved index: a hint that makes a restart faster
        <2 hex digits>/<key, hex>    chunks, a file each
        segments/<token>.table, .slots  small chunks, in slots of a file, and which is in which
      .bounds.json                   capacity and other limits, agreed by all processes
      .ledger                        bytes allocated under the root, shared by all processes
      .owner                         locked by the process that evicts
      .writers/<token>/              temporary files of one writer, locked while it runs
      .quarantine/                   chunks that failed verification, a bounded number
"""

from collections.abc import Iterable

import xxhash

MANIFEST = "manifest.json"
SNAPSHOT = "snapshot"
SEGMENTS, TABLE, SLOTS = "segments", ".table", ".slots"
BOUNDS = ".bounds.json"
LEDGER = ".ledger"
OWNER = ".owner"
WRITERS = ".writers"
OTHER_STORE = ".store.json"
"""Marks a root of the folder backend, which this backend refuses."""
QUARANTINE = ".quarantine"
SCRATCH = ".doctor-"
"""Prefix of the name of a folder in which ``kvoffload doctor`` measures."""
SHARDS = tuple(f"{i:02x}" for i in range(256))


def is_namespace(name: str) -> bool:
    """Return whether a name under the root is that of a namespace folder."""
    return len(name) == 64 and not name.strip("0123456789abcdef")


def key_of(name: str) -> bytes | None:
    """Return the key that a chunk's file name spells, or None for the name of another file."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if key and key.hex() == name else None  # fromhex() takes spaces and capitals too


def stems_of(names: Iterable[str]) -> list[str]:
    """Return the names of segments, without an ending, by those of the files in their folder."""
    return [name.removesuffix(TABLE) for name in names if name.endswith(TABLE)]


def shard_of(key: bytes) -> str:
    """Return the shard folder of a key; any set of keys spreads evenly."""
    return SHARDS[xxhash.xxh32_intdigest(key) & 0xFF]
