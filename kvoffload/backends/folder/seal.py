"""The authentication of chunks by a secret that all hosts have.

A keyed BLAKE3 of header and chunk lies in the header's last bytes, before its seal. They are zeros
without a secret, so a file has the disk tier's format in both cases. Engines with a secret have
namespaces of their own: those without it see none of their chunks, and no damage.
"""

import hmac
import logging
from typing import Any

from kvoffload.backends.header import COMPACT_BYTES, SEAL_BYTES, XXH3_128, Header, sealed
from kvoffload.backends.seals import ChecksumSeal, Seal
from kvoffload.backends.secret_files import derived, exposure, read_key

log = logging.getLogger(__name__)

_MAC_BYTES = 32


class SecretSeal(Seal):
    """A seal of chunks that are stored as they are, with an authentication code in the header.

    Args:
        secret: key of 32 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._plain = ChecksumSeal()
        self.suffix = f"+mac-{derived(secret, 'kvoffload folder key id v1')[:8].hex()}"
        """The end of the name of each namespace of engines with this secret."""

    def pack(
        self,
        key: bytes,
        namespace: bytes,
        chunk: memoryview,
        *,
        header_bytes: int = COMPACT_BYTES,
        tenant: bytes = b"",
    ) -> tuple[bytes, memoryview]:
        header, _ = self._plain.pack(
            key, namespace, chunk, header_bytes=header_bytes, tenant=tenant
        )
        told = header[: -_MAC_BYTES - SEAL_BYTES]
        code = _Code(self._secret, told, b"")
        code.update(chunk)
        return sealed(told + code.digest()), chunk

    def fault(
        self, header: memoryview, payload: memoryview, key: bytes, namespace: bytes
    ) -> str | None:
        reason = super().fault(header, payload, key, namespace)
        return "mac" if reason == "payload" else reason

    def begin_check(self, header: memoryview, found: Header) -> "_Code | None":
        if found.kind != XXH3_128:
            return None
        end = found.header_bytes - SEAL_BYTES
        return _Code(
            self._secret, header[: end - _MAC_BYTES], bytes(header[end - _MAC_BYTES : end])
        )

    def is_of(self, found: Header, tenant: bytes) -> bool | None:
        return self._plain.is_of(found, tenant)


class _Code:
    """The code of a chunk that is read in pieces; it covers all that a checksum would."""

    def __init__(self, secret: bytes, told: bytes | memoryview, wanted: bytes) -> None:
        import blake3

        self._wanted = wanted
        self._code: Any = blake3.blake3(key=secret)
        self._code.update(told)

    def update(self, piece: memoryview) -> None:
        self._code.update(piece)

    def digest(self) -> bytes:
        code: bytes = self._code.digest()
        return code

    def is_whole(self) -> bool:
        return hmac.compare_digest(self.digest(), self._wanted)


def read_secret(file: str) -> SecretSeal | None:
    """Return what authenticates chunks by ``secret_file``; None without a file.

    Raises:
        ConfigError: the file cannot be read, or holds no secret.
    """
    if (key := read_key(file, "kvoffload folder v1")) is None:
        return None
    for problem, remedy in exposure("secret_file", file):
        log.warning("folder: %s; %s", problem, remedy)
    return SecretSeal(key)
