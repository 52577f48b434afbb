"""Names of older vLLM versions, for code written against them. New code needs nothing from here.

Blocks are objects and block hashes are tuples in this module, as they were. The block manager
(:mod:`kvoffload.core.manager`) works on numbers and bytes. Each docstring names the replacement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvoffload.core import planning
from kvoffload.core.hashing import HASH_VERSION, MultiModalItem
from kvoffload.core.interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    ModelLimits,
    UniformTypeKVCacheSpecs,
)
from kvoffload.core.prefix import RequestLike
from kvoffload.errors import InsufficientMemoryError, KVCacheSpecError, UsageError

NONE_HASH: int = int.from_bytes(hashlib.sha256(HASH_VERSION + b" none").digest(), "big")
"""Parent of a first block, as a number; now :attr:`kvoffload.core.hashing.BlockHasher.root`."""

HashFunction = Callable[[tuple[Any, ...]], int]


class BlockHashType(NamedTuple):
    """A block's hash with what was hashed; now plain bytes in ``HashChain.hashes``."""

    hash_value: int
    token_ids: tuple[int, ...]
    extra_keys: Any = None


def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: int | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHashType:
    """Hash one block after its parent; now ``BlockHasher.extend``."""
    tokens = tuple(curr_block_token_ids)
    parent = parent_block_hash or NONE_HASH
    return BlockHashType(hash_function((parent, tokens, extra_keys)), tokens, extra_keys)


def hash_request_tokens(
    hash_function: HashFunction, block_size: int, request: RequestLike
) -> list[BlockHashType]:
    """Hash a request's full blocks; now ``HashChain``, which keeps up as tokens are appended."""
    tokens = request.chain.token_ids
    hashes: list[BlockHashType] = []
    mm_idx = 0
    for end in range(block_size, len(tokens) + 1, block_size):
        start = end - block_size
        extra_keys, mm_idx = generate_block_hash_extra_keys(request, start, end, mm_idx)
        parent = hashes[-1].hash_value if hashes else None
        hashes.append(hash_block_tokens(hash_function, parent, tokens[start:end], extra_keys))
    return hashes


def need_extra_keys(request: RequestLike) -> bool:
    """Whether inputs besides tokens decide the request's KV."""
    extras = request.chain.extras
    return bool(extras.mm_items or extras.lora is not None or extras.cache_salt)


def generate_block_hash_extra_keys(
    request: RequestLike, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """Return the extra keys of a block, each tagged with its kind, and the next item's index.

    Untagged keys could meet: an adapter may be named like a salt or an image.
    """
    extras = request.chain.extras
    mm_keys, next_mm_idx = _gen_mm_extra_hash_keys(
        request, start_token_idx, end_token_idx, start_mm_idx
    )
    keys = _gen_lora_extra_hash_keys(request) + mm_keys
    if extras.cache_salt and start_token_idx == 0:
        keys.append(("cache_salt", extras.cache_salt))
    return (tuple(keys) if keys else None), next_mm_idx


def _gen_lora_extra_hash_keys(request: RequestLike) -> list[tuple[Any, ...]]:
    lora = request.chain.extras.lora
    return [] if lora is None else [("lora", lora)]


def _gen_mm_extra_hash_keys(
    request: RequestLike, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[list[tuple[Any, ...]], int]:
    """Return keys of the items that overlap the block; ``start_mm_idx`` -1 is the last item."""
    items: tuple[MultiModalItem, ...] = request.chain.extras.mm_items
    index = start_mm_idx + len(items) if start_mm_idx < 0 else start_mm_idx
    if not items or items[-1].offset + items[-1].length <= start_token_idx:
        return [], start_mm_idx
    keys: list[tuple[Any, ...]] = []
    while index < len(items) and items[index].offset < end_token_idx:
        item = items[index]
        end = item.offset + item.length
        if end > start_token_idx:
            keys.append(("mm", item.identifier, item.offset - start_token_idx))
        if end > end_token_idx:
            break
        index += 1
    return keys, index


@dataclass
class KVCacheBlock:
    """A block as an object; now a number, with its facts in ``BlockPool``."""

    block_id: int
    ref_cnt: int = 0
    _block_hash: BlockHashType | None = None
    prev_free_block: KVCacheBlock | None = field(default=None, repr=False, compare=False)
    next_free_block: KVCacheBlock | None = field(default=None, repr=False, compare=False)

    def incr_ref(self) -> None:
        self.ref_cnt += 1

    def decr_ref(self) -> None:
        self.ref_cnt -= 1

    @property
    def block_hash(self) -> BlockHashType | None:
        """The hash that the block is cached under; set once, until :meth:`reset_hash`."""
        return self._block_hash

    @block_hash.setter
    def block_hash(self, block_hash: BlockHashType) -> None:
        if self._block_hash is not None:
            raise UsageError(f"block {self.block_id} has a hash already; reset_hash() comes first")
        self._block_hash = block_hash

    def reset_hash(self) -> None:
        """Forget the hash: the block is evicted."""
        self._block_hash = None


class FreeKVCacheBlockQueue:
    """A linked list through block objects, the next to be reused first; now ``FreeBlockQueue``."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._ends = KVCacheBlock(-1)
        self._ends.next_free_block = self._ends.prev_free_block = self._ends
        self.num_free_blocks = 0
        for block in blocks:
            self.append(block)

    def popleft(self) -> KVCacheBlock:
        """Take the first block.

        Raises:
            InsufficientMemoryError: none is free.
        """
        first = self._ends.next_free_block
        if first is None or first is self._ends:
            raise InsufficientMemoryError("No free blocks available")
        self.remove(first)
        return first

    def remove(self, block: KVCacheBlock) -> None:
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise UsageError(f"block {block.block_id} is not in the queue")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        last = self._ends.prev_free_block or self._ends
        last.next_free_block = self._ends.prev_free_block = block
        block.prev_free_block, block.next_free_block = last, self._ends
        self.num_free_blocks += 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """List the blocks, the next to be reused first; for tests."""
        blocks = []
        block = self._ends.next_free_block
        while block is not None and block is not self._ends:
            blocks.append(block)
            block = block.next_free_block
        return blocks


def type_id(spec: KVCacheSpec) -> str:
    """Name a format: equal for layers that need the same slots and bytes; now ``==`` and merge."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return "uniform(" + ",".join(type_id(s) for s in spec.kv_cache_specs.values()) + ")"
    parts = [type(spec).__name__, str(spec.block_size), str(spec.page_size_bytes)]
    if isinstance(spec, AttentionSpec):
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(spec, name, None) is not None:
                parts.append(f"{name}={getattr(spec, name)}")
    if isinstance(spec, MambaSpec):
        parts.append(f"{spec.shapes}{spec.dtypes}{spec.num_speculative_blocks}")
    return "_".join(parts)


def _get_kv_cache_config_uniform_type(
    limits: ModelLimits, kv_cache_spec: planning.Specs, available_memory: int
) -> KVCacheConfig:
    """Plan a model whose layers all have one format; now ``planning.get_kv_cache_config``."""
    if not planning.is_kv_cache_type_uniform(kv_cache_spec):
        raise KVCacheSpecError(
            "the layers have several formats: use kvoffload.core.planning.get_kv_cache_config(), "
            "which plans a group for each"
        )
    return planning.get_kv_cache_config(limits, kv_cache_spec, available_memory)


def unify_kv_cache_configs(kv_cache_configs: MutableSequence[KVCacheConfig]) -> None:
    """Make the workers' plans agree, in the list given; now the pure function of that name."""
    kv_cache_configs[:] = planning.unify_kv_cache_configs(kv_cache_configs)
