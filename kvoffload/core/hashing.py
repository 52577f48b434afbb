"""Chained block hashes: equal hashes mean equal prefixes (tokens, LoRA, images, salt).

The bytes that are hashed are canonical and versioned:

* the *root* binds the version, the algorithm, the block size and, for tenants, a secret;
* LoRA name and cache salt, if any, are bound into the first parent, once for the chain;
* block i is ``H(parent | token ids as little-endian u32 | image items in it)``.

The number of tokens in a block is fixed by the root, so no two inputs share an encoding.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvoffload.errors import ConfigError

HASH_VERSION = b"kvoffload.block-hash.v1"
_LITTLE_ENDIAN = sys.byteorder == "little"

Digest = Callable[[bytes], bytes]


@dataclass(frozen=True)
class MultiModalItem:
    """An image, sound or other item whose placeholder tokens lie in the prompt.

    Attributes:
        identifier: names the content, for instance its hash.
        offset: position of its first placeholder token.
        length: number of placeholder tokens.
    """

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True)
class Extras:
    """The inputs besides its tokens that decide the KV of a prompt.

    Attributes:
        lora: name of the prompt's adapter. Only the name is hashed, so it must change with the
            adapter's weights.
        mm_items: multi-modal items, ordered by offset.
        cache_salt: prompts with different salts share nothing.
    """

    lora: str | None = None
    mm_items: tuple[MultiModalItem, ...] = ()
    cache_salt: str | None = None


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _blake3() -> Digest:
    try:
        from blake3 import blake3
    except ImportError:
        raise ConfigError(
            "algorithm", "blake3", "needs its extra: pip install '/path/to/kvoffload[blake3]'"
        ) from None
    return lambda data: blake3(data).digest()


def _keyed_xxh3(root: bytes | None) -> Digest:
    import xxhash

    if not root:
        raise ConfigError(
            "algorithm", "xxh3",
            "is not collision resistant without a secret: give the hasher a secret root of at "
            "least 16 bytes, or use sha256",
        )  # fmt: skip
    seed = int.from_bytes(_sha256(HASH_VERSION + b"xxh3 seed" + root)[:8], "little")
    xxh3 = xxhash.xxh3_128_digest
    return lambda data: xxh3(data, seed)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(4, "little") + value


class BlockHasher:
    """Hashes blocks of ``block_size`` tokens; shared by all requests of an engine.

    Args:
        block_size: tokens in a block: the greatest common divisor of the groups' block sizes.
        algorithm: ``sha256``, ``blake3``, or ``xxh3`` (fast, 16 bytes, only with a secret root).
        root: a secret of at least 16 bytes. Hashes of different roots never meet, so tenants with
            different roots share no cache and cannot guess each other's keys. None: the fixed
            root, the same in every process.

    Raises:
        ConfigError: unknown algorithm, bad block size, or a root that is too short.
    """

    def __init__(
        self, block_size: int, algorithm: str = "sha256", root: bytes | None = None
    ) -> None:
        if block_size < 1:
            raise ConfigError("block_size", block_size, "must be at least 1 token")
        if root is not None and len(root) < 16:
            raise ConfigError("root", f"{len(root)} bytes", "a secret root has at least 16 bytes")
        digests: dict[str, Callable[[], Digest]] = {
            "sha256": lambda: _sha256,
            "blake3": _blake3,
            "xxh3": lambda: _keyed_xxh3(root),
        }
        if algorithm not in digests:
            raise ConfigError("algorithm", algorithm, f"must be one of {', '.join(digests)}")
        self.block_size = block_size
        self.algorithm = algorithm
        self.digest = digests[algorithm]()
        self.root = self.digest(
            HASH_VERSION
            + _field(b"A", algorithm.encode())
            + _field(b"B", block_size.to_bytes(4, "little"))
            + _field(b"R", root or b"")
        )

    def start(self, extras: Extras) -> bytes:
        """Return the parent of a chain's first block."""
        if extras.lora is None and extras.cache_salt is None:
            return self.root
        message = self.root
        if extras.lora is not None:
            message += _field(b"L", extras.lora.encode())
        if extras.cache_salt is not None:
            message += _field(b"S", extras.cache_salt.encode())
        return self.digest(message)

    def extend(
        self, parent: bytes, token_ids: Sequence[int], first_block: int, extras: Extras
    ) -> list[bytes]:
        """Hash consecutive whole blocks.

        Raises:
            ValueError: a token id does not fit in 32 bits.
        """
        mm_items = extras.mm_items
        data = _pack_tokens(token_ids)
        step = 4 * self.block_size
        hashes: list[bytes] = []
        append = hashes.append
        if not mm_items and self.algorithm == "sha256":
            sha256 = hashlib.sha256  # the common case, without a call in between
            for i in range(0, len(data), step):
                parent = sha256(parent + data[i : i + step]).digest()
                append(parent)
            return hashes
        digest = self.digest
        for i in range(0, len(data), step):
            message = parent + data[i : i + step]
            if mm_items:
                start = (first_block + i // step) * self.block_size
                message += _items_in_block(mm_items, start, start + self.block_size)
            parent = digest(message)
            append(parent)
        return hashes


def _items_in_block(items: Iterable[MultiModalItem], start: int, end: int) -> bytes:
    """Encode the items that overlap a block: identity, and offset relative to the block."""
    encoded = b""
    for item in items:
        if item.offset >= end:
            break
        if item.offset + item.length > start:
            relative = (item.offset - start).to_bytes(8, "little", signed=True)
            encoded += _field(b"M", item.identifier.encode()) + relative
    return encoded


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be whole numbers from 0 to 2**32 - 1: {error}") from None
    if not _LITTLE_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


class HashChain:
    """The tokens of one request and the hashes of its full blocks, kept up as tokens are appended.

    Args:
        hasher: of the engine; another class with ``block_size``, ``start`` and ``extend`` will do.
        token_ids: the prompt.
        lora: name of the adapter the KV cache is computed with; other weights need another name,
            for instance ``poet@2``.
        mm_items: multi-modal items of the prompt, in any order.
        cache_salt: requests with different salts share nothing.

    Attributes:
        block_size: tokens in a hashed block.
        extras: the further inputs that the hashes cover.
        token_ids: all tokens; only the chain writes them.
        hashes: one for each *full* block; read only.
    """

    __slots__ = (
        "_start", "block_size", "extras", "hasher", "hashes", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        hasher: BlockHasher,
        token_ids: Iterable[int] = (),
        *,
        lora: str | None = None,
        mm_items: Sequence[MultiModalItem] = (),
        cache_salt: str | None = None,
    ) -> None:
        self.hasher = hasher
        items = tuple(sorted(mm_items, key=lambda item: item.offset))
        self.extras = Extras(lora, items, cache_salt)
        self.token_ids: list[int] = list(token_ids)
        self.hashes: list[bytes] = []
        self.block_size = hasher.block_size
        self._start: bytes = hasher.start(self.extras)
        self._catch_up()

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        """Add one token; hashes its block if that is full now."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if not len(token_ids) % self.block_size:
            self._catch_up()

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens; hashes the blocks that are full now."""
        self.token_ids.extend(token_ids)
        self._catch_up()

    def _catch_up(self) -> None:
        hashes = self.hashes
        done = len(hashes)
        size = self.block_size
        full = len(self.token_ids) // size
        if full == done:
            return
        parent = hashes[-1] if hashes else self._start
        tokens = self.token_ids[done * size : full * size]
        hashes += self.hasher.extend(parent, tokens, done, self.extras)
