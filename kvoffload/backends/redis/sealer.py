"""The seal of values: a header before the chunk, and with a secret an authentication code behind.

A value is ``header + chunk`` (see :mod:`kvoffload.backends.header`). An authenticated value ends
with 32 bytes of keyed BLAKE3; an encrypted one needs no more than its tag. One value holds one
whole chunk, so parts of different writes cannot mix.
"""

import hmac

from kvoffload.backends.header import OTHER_VERSION, parse_header
from kvoffload.backends.seals import ChecksumSeal, Seal
from kvoffload.backends.secret_files import derived

MAC_BYTES = 32
ENCRYPTED = "gcm"
"""The scheme of encrypted values, whatever their key: the header tells which it is."""


class Sealer:
    """Makes and checks the header of values, and their authentication code if there is a secret.

    Args:
        namespace: whose values these are.
        secret: of the authentication code.
        cipher: encrypts the chunks, if they are to be encrypted.
    """

    def __init__(self, namespace: bytes, secret: bytes | None, cipher: Seal | None = None) -> None:
        self._namespace = namespace
        self._secret = secret
        self.cipher = cipher
        self._seal = cipher or ChecksumSeal()
        self.scheme = _scheme(secret) if cipher is None else ENCRYPTED
        """The check of values, as a part of their names."""
        self.tail_bytes = MAC_BYTES if secret else 0

    def seal(
        self, key: bytes, chunk: memoryview, tenant: bytes = b""
    ) -> tuple[bytes, memoryview, bytes]:
        """Return the bytes before the chunk, those in its place, and those after it.

        Pass the second to :meth:`done` once the value is sent.
        """
        header, stored = self._seal.pack(key, self._namespace, chunk, tenant=tenant)
        return header, stored, self._mac(header, stored)

    def done(self, stored: memoryview) -> None:
        """Take back what :meth:`seal` returned in place of a chunk."""
        self._seal.done(stored)

    def broken(self, header: memoryview, tail: memoryview, key: bytes, chunk: memoryview) -> str:
        """Return why this value is not the wanted chunk; empty if it is."""
        if self._secret is not None and not hmac.compare_digest(self._mac(header, chunk), tail):
            # Another version may make it otherwise. No byte of such a value is used.
            return OTHER_VERSION if parse_header(header) == OTHER_VERSION else "mac"
        return self._seal.fault(header, chunk, key, self._namespace) or ""

    def _mac(self, header: bytes | memoryview, chunk: memoryview) -> bytes:
        if self._secret is None:
            return b""
        import blake3

        mac = blake3.blake3(key=self._secret)
        mac.update(header)
        mac.update(chunk)
        digest: bytes = mac.digest()
        return digest


def _scheme(secret: bytes | None) -> str:
    """Return ``xxh3``, or ``mac-`` with a fingerprint of the secret that does not reveal it."""
    if secret is None:
        return "xxh3"
    return f"mac-{derived(secret, 'kvoffload redis key id v1')[:8].hex()}"
