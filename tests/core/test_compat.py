"""Names of older versions still mean what they meant."""

import hashlib

import pytest
import torch

from kvoffload.core.cache_stats import PrefixCacheStats, PrefixCachingMetrics
from kvoffload.core.compat import (
    NONE_HASH,
    BlockHashType,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    _get_kv_cache_config_uniform_type,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    hash_request_tokens,
    need_extra_keys,
)
from kvoffload.core.hashing import BlockHasher, HashChain, MultiModalItem
from kvoffload.core.interface import FullAttentionSpec, ModelLimits, SlidingWindowSpec
from kvoffload.core.request import Request
from kvoffload.errors import InsufficientMemoryError, KVCacheSpecError, UsageError


def number(value):
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest(), "big")


def request(tokens, **options):
    return Request("r", HashChain(BlockHasher(4), tokens, **options))


def test_block_hashes_chain_and_keep_what_they_hash():
    first = hash_block_tokens(number, None, [1, 2])
    assert first == BlockHashType(number((NONE_HASH, (1, 2), None)), (1, 2), None)
    second = hash_block_tokens(number, first.hash_value, [3, 4], ("key",))
    assert second.hash_value == number((first.hash_value, (3, 4), ("key",)))
    assert hash_request_tokens(number, 2, request([1, 2, 3, 4, 5]))[0] == first


def test_extra_keys_are_tagged_and_relative_to_the_block():
    items = [MultiModalItem("cat", 2, 4), MultiModalItem("dog", 7, 1)]
    one = request(range(12), mm_items=items, lora="poet", cache_salt="poet")
    assert need_extra_keys(one)
    keys, index = generate_block_hash_extra_keys(one, 0, 4, 0)
    assert keys == (("lora", "poet"), ("mm", "cat", 2), ("cache_salt", "poet"))
    assert index == 0
    keys, index = generate_block_hash_extra_keys(one, 4, 8, index)
    assert keys == (("lora", "poet"), ("mm", "cat", -2), ("mm", "dog", 3))
    assert index == 2
    assert generate_block_hash_extra_keys(one, 8, 12, index) == ((("lora", "poet"),), 2)
    # -1 is the last item; past the last item nothing is searched.
    assert generate_block_hash_extra_keys(one, 4, 8, -1) == (
        (("lora", "poet"), ("mm", "dog", 3)), 2,
    )  # fmt: skip
    plain = request(range(12))
    assert not need_extra_keys(plain)
    assert generate_block_hash_extra_keys(plain, 0, 4, 0) == (None, 0)


def test_a_blocks_hash_is_set_once_until_reset():
    block = KVCacheBlock(3)
    block.incr_ref()
    block.incr_ref()
    block.decr_ref()
    assert block.ref_cnt == 1
    block.block_hash = BlockHashType(1, (2,))
    with pytest.raises(UsageError, match="reset_hash"):
        block.block_hash = BlockHashType(2, (3,))
    block.reset_hash()
    assert block.block_hash is None


def test_the_block_queue_gives_the_first_and_loses_any():
    blocks = [KVCacheBlock(i) for i in range(4)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert repr(blocks[1]).count("KVCacheBlock") == 1  # does not follow its neighbours
    queue.remove(blocks[1])
    with pytest.raises(UsageError, match="not in the queue"):
        queue.remove(blocks[1])
    assert queue.popleft() is blocks[0]
    queue.append(blocks[0])
    assert [block.block_id for block in queue.get_all_free_blocks()] == [2, 3, 0]
    assert queue.num_free_blocks == 3
    for _ in range(3):
        queue.popleft()
    with pytest.raises(InsufficientMemoryError, match="No free blocks available"):
        queue.popleft()


def test_a_model_of_one_format_shares_memory_equally_and_another_is_refused():
    limits = ModelLimits(max_model_len=64, max_num_batched_tokens=64)
    full = FullAttentionSpec(16, 1, 8, torch.float16)
    plan = _get_kv_cache_config_uniform_type(limits, {"a": full, "b": full}, 10 * 1024)
    assert plan.num_blocks == 10
    assert {name: tensor.size for name, tensor in plan.tensors.items()} == {"a": 5120, "b": 5120}
    window = SlidingWindowSpec(16, 1, 8, torch.float16, sliding_window=32)
    with pytest.raises(KVCacheSpecError, match=r"get_kv_cache_config\(\)"):
        _get_kv_cache_config_uniform_type(limits, {"a": full, "b": window}, 1 << 20)


def test_the_hit_rate_is_of_recent_requests():
    metrics = PrefixCachingMetrics(max_recent_requests=10)
    assert metrics.hit_rate == 0
    metrics.observe(PrefixCacheStats(requests=6, queries=100, hits=100))
    metrics.observe(PrefixCacheStats())  # an idle interval is no observation
    metrics.observe(PrefixCacheStats(requests=6, queries=100, hits=50))
    assert metrics.hit_rate == 0.5  # the first six are too old by now
    metrics.observe(PrefixCacheStats(requests=2, queries=100, hits=0))
    assert metrics.hit_rate == 0.25
    metrics.observe(PrefixCacheStats(reset=True, requests=1, queries=4, hits=1))
    assert metrics.hit_rate == 0.25
    metrics.reset()
    assert metrics.hit_rate == 0
