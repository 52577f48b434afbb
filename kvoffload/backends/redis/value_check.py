"""The check of a stored value by its name alone, without the engine that wrote it."""

from typing import NamedTuple

from kvoffload.backends.header import COMPACT_BYTES, counted_as, namespace_digest
from kvoffload.backends.redis.connection import Address
from kvoffload.backends.redis.namespace_info import namespace_of
from kvoffload.backends.redis.sealer import ENCRYPTED, MAC_BYTES, Sealer
from kvoffload.backends.seals import Seal


class StoredValue(NamedTuple):
    """A chunk on a server."""

    address: Address
    name: bytes
    stored_bytes: int

    @property
    def path(self) -> str:
        """The server and the name."""
        return f"{self.address} {self.name.decode()}"


class ValueCheck:
    """Checks values of all namespaces; ``secret`` and ``cipher`` are those of the engines.

    Without the secret, a value that has an authentication code is checked by its checksum. Without
    the cipher, the header of an encrypted value is checked.
    """

    def __init__(self, secret: bytes | None, cipher: Seal | None) -> None:
        self._secret = secret
        self._cipher = cipher
        self._scheme = Sealer(b"", secret).scheme
        self.unauthenticated = 0
        """Values with an authentication code of another secret."""

    def fault(self, name: bytes, value: memoryview) -> str | None:
        """Return why loads of a value miss it, or None."""
        _, _, scheme, tag = name.decode().split(":")
        is_encrypted = scheme == ENCRYPTED
        tail_bytes = 0 if scheme == "xxh3" or is_encrypted else MAC_BYTES
        is_known = scheme == self._scheme
        self.unauthenticated += not is_known and tail_bytes > 0
        stop = len(value) - tail_bytes
        if stop < COMPACT_BYTES:
            return "corrupt_short"
        sealer = Sealer(
            namespace_digest(namespace_of(name)),
            self._secret if is_known else None,
            self._cipher if is_encrypted else None,
        )
        header, chunk, tail = value[:COMPACT_BYTES], value[COMPACT_BYTES:stop], value[stop:]
        broken = sealer.broken(header, tail, bytes.fromhex(tag[1:-1]), chunk)
        return counted_as(broken) if broken else None
