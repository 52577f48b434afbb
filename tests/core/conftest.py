import itertools
from collections.abc import Callable

import pytest
import torch

from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.interface import FullAttentionSpec, KVCacheConfig, ModelLimits
from kvoffload.core.manager import KVCacheManager
from kvoffload.core.planning import get_kv_cache_config
from kvoffload.core.request import Request


@pytest.fixture
def full_attention() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=torch.float32)


@pytest.fixture
def plan(full_attention: FullAttentionSpec) -> Callable[[int], KVCacheConfig]:
    limits = ModelLimits(max_model_len=8, max_num_batched_tokens=8)

    def make(num_blocks: int) -> KVCacheConfig:
        specs = {f"layers.{i}": full_attention for i in range(2)}
        return get_kv_cache_config(limits, specs, 0, num_blocks_override=num_blocks)

    return make


@pytest.fixture
def make_manager(plan: Callable[[int], KVCacheConfig]) -> Callable[..., KVCacheManager]:
    def make(num_blocks: int, **options: object) -> KVCacheManager:
        return KVCacheManager(plan(num_blocks), max_model_len=1000, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    hasher = BlockHasher(4)
    numbers = itertools.count()

    def make(tokens: list[int], **options: object) -> Request:
        return Request(f"r{next(numbers)}", HashChain(hasher, tokens, **options))  # type: ignore[arg-type]

    return make
