"""The authentication of chunks by a secret that all hosts have.

A keyed BLAKE3 of header and chunk lies in the header's last bytes, before its seal. They are zeros
without a secret, so a file has the disk tier's format in both cases. Engines with a secret have
namespaces of their own: those without it see none of their chunks, and no damage.
"""

import hmac
import struct
from pathlib import Path

import xxhash

from kvoffload.errors import ConfigError

_LEAST_BYTES, _LEAST_DISTINCT = 32, 8
_RANDOM = "openssl rand -hex 32 makes one"
_MAC_BYTES = 32
_SEAL = struct.Struct("<Q")


class Seal:
    """Signs headers and checks them. Thread-safe.

    Args:
        secret: key of 32 bytes; None: nothing is signed, and every chunk passes.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._suffix = "" if secret is None else f"+mac-{_fingerprint(secret)}"

    def namespace(self, name: str) -> str:
        """Return the namespace in the folder for an engine's namespace."""
        return name + self._suffix

    def name_of(self, namespace: str) -> str:
        """Return an engine's namespace for one in the folder of engines with this secret."""
        return namespace.removesuffix(self._suffix)

    def is_of_this_secret(self, namespace: str) -> bool:
        """Return whether a namespace in the folder is one of engines with this secret."""
        return bool(self._suffix) and namespace.endswith(self._suffix)

    def signed(self, header: bytes, chunk: memoryview) -> bytes:
        """Return the header with the authentication code of both in it."""
        if self._secret is None:
            return header
        told = header[: -_MAC_BYTES - _SEAL.size]
        body = told + _mac(self._secret, told, chunk)
        return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))

    def is_broken(self, header: memoryview, chunk: memoryview) -> bool:
        """Return whether header and chunk lack the code of the secret."""
        if self._secret is None:
            return False
        told, code = header[: -_MAC_BYTES - _SEAL.size], header[-_MAC_BYTES - _SEAL.size :]
        return not hmac.compare_digest(_mac(self._secret, told, chunk), code[:_MAC_BYTES])


def _mac(secret: bytes, told: bytes | memoryview, chunk: memoryview) -> bytes:
    import blake3

    mac = blake3.blake3(key=secret)
    mac.update(told)
    mac.update(chunk)
    digest: bytes = mac.digest()
    return digest


def _fingerprint(secret: bytes) -> str:
    """Return a name of the secret that does not reveal it."""
    import blake3

    context = "kvoffload folder key id v1"
    name: str = blake3.blake3(secret, derive_key_context=context).hexdigest()
    return name[:16]


def secret_key(file: str) -> bytes | None:
    """Derive the key that authenticates chunks from ``secret_file``; None without a file.

    Raises:
        ConfigError: the file cannot be read, or holds no secret.
    """
    if not file:
        return None
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError("secret_file", file, f"cannot be read: {error.strerror}") from error
    if len(secret) < _LEAST_BYTES or len(set(secret)) < _LEAST_DISTINCT:
        remedy = f"needs at least {_LEAST_BYTES} random bytes; {_RANDOM}"
        raise ConfigError("secret_file", file, remedy)
    import blake3

    derived: bytes = blake3.blake3(secret, derive_key_context="kvoffload folder v1").digest()
    return derived
