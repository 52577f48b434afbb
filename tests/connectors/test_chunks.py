"""How a prefix is sought among chunks of several KV cache groups: what is asked, and how often."""

import torch

from kvoffload.connectors.chunks import ChunkGroups
from kvoffload.core.interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from kvoffload.core.transfers import get_offload_group_idx, make_offload_key

BLOCK = 4
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.int8}
KINDS = [FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=7)]


def test_chunks_of_full_attention_are_asked_for_together_and_only_those_of_windows_one_by_one():
    config = KVCacheConfig(
        64, [], [KVCacheGroupSpec([f"layer {i}"], kind) for i, kind in enumerate(KINDS)]
    )
    groups = ChunkGroups(BLOCK, 1, config)
    keys = [[make_offload_key(bytes([i]) * 32, group) for i in range(10)] for group in (0, 1)]
    together, alone = [], []

    def find_prefix(wanted):
        together.append(list(wanted))
        return len(wanted), False

    def find(key):
        alone.append(key)
        return True

    assert groups.longest(keys, 0, 40, find_prefix, find, lambda _: True) == (40, False)
    assert together == [keys[0]]
    assert alone == keys[1][-2:]
    assert {get_offload_group_idx(key) for key in alone} == {1}
