"""Block hashes byte for byte as vLLM's ``sha256_cbor`` makes them, to share with its fleets.

vLLM started with ``--prefix-caching-hash-algo sha256_cbor`` names blocks by
``sha256(cbor((parent, tokens, extra_keys)))``. A chain made with :class:`VllmBlockHasher` gives
the same names, so caches, routers and event consumers can be shared. Slower than our own bytes:
use it only for sharing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from kvoffload.core.hashing import Extras
from kvoffload.errors import ConfigError

DEFAULT_SEED = "vllm-none-hash"
"""Where vLLM's chains start, unless ``PYTHONHASHSEED`` is set in its environment."""

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = 0x00, 0x20, 0x40, 0x60, 0x80
_NULL = b"\xf6"


def _head(major: int, value: int) -> bytes:
    """Encode a CBOR head in its shortest form, as canonical CBOR demands."""
    if value < 24:
        return bytes((major | value,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * size:
            return bytes((major | code,)) + value.to_bytes(size, "big")
    raise ValueError(f"{value} does not fit in 64 bits")


def _int(value: int) -> bytes:
    return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return _head(_TEXT, len(encoded)) + encoded


def _array(items: Sequence[bytes]) -> bytes:
    return _head(_ARRAY, len(items)) + b"".join(items)


def _encode_tokens(token_ids: Sequence[int]) -> list[bytes]:
    small = [bytes((i,)) for i in range(24)]
    try:
        return [
            _head(_UNSIGNED, t) if t >= 24 else small[t] if t >= 0 else _int(t) for t in token_ids
        ]
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"token ids must be whole numbers from -2**64 to 2**64 - 1: {error}"
        ) from None


class VllmBlockHasher:
    """Takes the place of :class:`~kvoffload.core.hashing.BlockHasher` in a chain.

    Args:
        block_size: tokens in a block, as in vLLM.
        seed: the value of ``PYTHONHASHSEED`` in vLLM's environment, if it is set there.
        lora_paths: adapter name → path, as given to vLLM, which hashes both. Other weights need
            another name or path.
    """

    algorithm = "vllm-sha256-cbor"

    def __init__(
        self,
        block_size: int,
        seed: str = DEFAULT_SEED,
        lora_paths: Mapping[str, str] | None = None,
    ) -> None:
        if block_size < 1:
            raise ConfigError("block_size", block_size, "must be at least 1 token")
        self.block_size = block_size
        self.root = hashlib.sha256(_text(seed)).digest()
        self._lora_paths = dict(lora_paths or {})

    def start(self, extras: Extras) -> bytes:
        """Return the parent of a chain's first block: the same for all chains."""
        return self.root

    def extend(
        self, parent: bytes, token_ids: Sequence[int], first_block: int, extras: Extras
    ) -> list[bytes]:
        """Hash consecutive whole blocks. Token ids below 0, as vLLM's placeholders, are hashed too.

        Raises:
            ValueError: a token id is no whole number of at most 64 bits.
        """
        size = self.block_size
        encoded = _encode_tokens(token_ids)
        before = _head(_ARRAY, 3) + _head(_BYTES, 32)
        count = _head(_ARRAY, size)
        hashes = []
        for i in range(0, len(encoded), size):
            start = first_block * size + i
            extra = self._extra_keys(start, extras)
            tokens = b"".join(encoded[i : i + size])
            parent = hashlib.sha256(before + parent + count + tokens + extra).digest()
            hashes.append(parent)
        return hashes

    def _extra_keys(self, start: int, extras: Extras) -> bytes:
        keys = []
        lora = extras.lora
        if lora is not None:
            if lora not in self._lora_paths:
                raise ConfigError(
                    "lora_paths", sorted(self._lora_paths), f"must say where adapter {lora!r} lies"
                )
            keys.append(_array([_text("lora"), _text(lora), _text(self._lora_paths[lora])]))
        for item in extras.mm_items:
            if item.offset < start + self.block_size and item.offset + item.length > start:
                keys.append(
                    _array([_text("mm"), _text(item.identifier), _int(item.offset - start)])
                )
        if extras.cache_salt and start == 0:
            keys.append(_array([_text("cache_salt"), _text(extras.cache_salt)]))
        return _array(keys) if keys else _NULL
