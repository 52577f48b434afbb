"""How a prefix is sought among chunks of several KV cache groups: what is asked, and how often."""

import pytest
import torch

from kvoffload.connectors.block_tables import to_load
from kvoffload.connectors.chunking import NULL_BLOCK, ChunkGroups, Piece
from kvoffload.core.interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from kvoffload.messages import get_offload_group_idx, make_offload_key

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


@pytest.mark.parametrize(
    ("has_nulls", "first"),
    [(True, [Piece(0, 1, 3, 4)]), (False, [Piece(0, 0, 0, 2), Piece(0, 1, 2, 4)])],
)
def test_only_where_there_is_a_null_block_is_block_0_left_out_of_loads(has_nulls, first):
    groups = ChunkGroups(BLOCK, 2)
    table = [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 7, 8, 9]
    assert to_load(groups, [table], 0, 24, has_nulls) == [*first, Piece(0, 2, 4, 6)]
