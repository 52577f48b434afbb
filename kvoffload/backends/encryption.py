"""Encrypted chunks: AES-256-GCM under a key of each namespace, and of each chunk.

The layout and the derivations are in ``docs/reference/format.md``. The tag takes the place of the
checksum, and authenticates the header as well.

**Why no nonce repeats.** Hosts that share a store share a key, and know nothing of each other's
counters. A nonce of 96 random bits would allow 2^32 chunks a key. So the nonce has 192 random bits,
as in XAES-256-GCM of C2SP. The first half derives a key from the namespace's, and the second half
is GCM's nonce under that key. Two of 2^80 chunks meet with a probability of 2^-32.
"""

import mmap
import os
import threading
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.cmac import CMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvoffload.backends.header import (
    AES_256_GCM,
    ALIGNED_BYTES,
    CHECKSUM_BYTES,
    COMPACT_BYTES,
    KEY_ID_BYTES,
    NO_TENANT,
    NONCE_BYTES,
    Header,
    associated_data,
    body_of,
    header_body,
    sealed,
)
from kvoffload.backends.seals import Seal, tenant_tag

_INFO = b"kvoffload chunk encryption v1 "
_KEY_BYTES = 32
_HALF = NONCE_BYTES // 2


class NamespaceKey:
    """The key of one namespace, from which that of each chunk is derived.

    Args:
        key: 32 bytes.
        key_id: names the key in headers, and tells nothing of it.
        tenants_key: of the tags of tenants, 32 bytes.
    """

    def __init__(self, key: bytes, key_id: bytes = b"", tenants_key: bytes = b"") -> None:
        self.id = key_id
        self.tenants_key = tenants_key
        self._mac = CMAC(algorithms.AES(key))
        """Has taken no block yet: each chunk's key is the end of a copy."""

    @classmethod
    def derived(cls, secret: bytes, namespace: bytes) -> "NamespaceKey":
        """Derive the key of a namespace, named by its digest, from a secret of 256 bits or more."""
        id_end = _KEY_BYTES + KEY_ID_BYTES
        length = id_end + _KEY_BYTES
        made = HKDF(hashes.SHA256(), length, None, _INFO + namespace).derive(secret)
        return cls(made[:_KEY_BYTES], made[_KEY_BYTES:id_end], made[id_end:])

    def __repr__(self) -> str:
        return f"NamespaceKey({self.id.hex()})"

    def of_chunk(self, nonce: bytes) -> bytes:
        """Return the key of the chunk that has this nonce."""
        # SP 800-108, as XAES-256-GCM has it: a block for each half of the key.
        return b"".join(self._block(number, nonce[:_HALF]) for number in (1, 2))

    def _block(self, number: int, context: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(b"\0%cX\0" % number + context)
        return mac.finalize()


class CipherSeal(Seal):
    """Encrypts what is stored with the first of some secrets, and decrypts what any of them wrote.

    Args:
        secrets: at least one; the caller has checked them.
    """

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = tuple(secrets)
        self._keys: dict[bytes, list[NamespaceKey]] = {}
        """Namespace → its keys, in the order of the secrets."""
        self._buffers = _Buffers()

    def __repr__(self) -> str:
        return f"CipherSeal({len(self._secrets)} secrets)"

    def pack(
        self,
        key: bytes,
        namespace: bytes,
        chunk: memoryview,
        *,
        header_bytes: int = COMPACT_BYTES,
        tenant: bytes = b"",
    ) -> tuple[bytes, memoryview]:
        own = self._of(namespace)[0]
        nonce = os.urandom(NONCE_BYTES)
        body = header_body(
            key,
            namespace,
            chunk.nbytes,
            bytes(CHECKSUM_BYTES),
            header_bytes=header_bytes,
            kind=AES_256_GCM,
            nonce=nonce,
            key_id=own.id,
            tenant=tenant_tag(tenant, own.tenants_key),
        )
        buffer = self._buffers.take(chunk.nbytes + CHECKSUM_BYTES)
        cipher = AESGCM(own.of_chunk(nonce))
        cipher.encrypt_into(nonce[_HALF:], chunk, associated_data(body), buffer)
        stored, tag = buffer[: chunk.nbytes], buffer[chunk.nbytes :]
        return sealed(body, tag), stored

    def done(self, stored: memoryview) -> None:
        self._buffers.give_back(stored)

    def begin_check(self, header: memoryview, found: Header) -> "_Decryption | None":
        if (own := self._key_of(found)) is None:
            return None
        mode = modes.GCM(found.nonce[_HALF:], found.checksum)
        cipher = Cipher(algorithms.AES(own.of_chunk(found.nonce)), mode).decryptor()
        cipher.authenticate_additional_data(associated_data(body_of(header, found)))
        return _Decryption(cipher)

    def is_of(self, found: Header, tenant: bytes) -> bool | None:
        if (own := self._key_of(found)) is None or found.tenant == NO_TENANT:
            return None
        return found.tenant == tenant_tag(tenant, own.tenants_key)

    def _key_of(self, found: Header) -> NamespaceKey | None:
        if found.kind != AES_256_GCM:
            return None
        return next((each for each in self._of(found.namespace) if each.id == found.key_id), None)

    def _of(self, namespace: bytes) -> list[NamespaceKey]:
        if (keys := self._keys.get(namespace)) is None:
            keys = [NamespaceKey.derived(secret, namespace) for secret in self._secrets]
            self._keys[namespace] = keys
        return keys


class _Decryption:
    """Decrypts a chunk where its bytes are; they are the chunk's once :meth:`is_whole` says so."""

    def __init__(self, cipher: AEADDecryptionContext) -> None:
        self._cipher = cipher

    def update(self, piece: memoryview) -> None:
        self._cipher.update_into(piece, piece)

    def is_whole(self) -> bool:
        try:
            self._cipher.finalize()
        except InvalidTag:
            return False
        return True


class _Buffers:
    """Memory for encrypted chunks, in whole pages as direct I/O needs it, that is used again.

    There are as many buffers as chunks were stored at once.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> memoryview:
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None or len(memory) < nbytes:  # in time all are as long as the longest chunk
            memory = mmap.mmap(-1, -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES)
        return memoryview(memory)[:nbytes]

    def give_back(self, part: memoryview) -> None:
        with self._lock:
            self._free.append(part.obj)  # type: ignore[arg-type]
