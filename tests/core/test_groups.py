"""What each kind of KV cache group keeps, gives back, registers and finds, by example."""

import pytest
import torch

from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvoffload.core.manager import KVCacheManager
from kvoffload.core.request import Request
from kvoffload.errors import KVCacheSpecError, UsageError
from tests.support.block_checks import check_manager

SHAPE = {"num_kv_heads": 1, "head_size": 4, "dtype": torch.float16}


def full(block_size=4):
    return FullAttentionSpec(block_size, **SHAPE)


def window(size, block_size=4):
    return SlidingWindowSpec(block_size, **SHAPE, sliding_window=size)


def chunked(size, block_size=4):
    return ChunkedLocalAttentionSpec(block_size, **SHAPE, attention_chunk_size=size)


def state(block_size=4, extra=0):
    return MambaSpec(block_size, ((3,),), (torch.float32,), num_speculative_blocks=extra)


def cache(*specs, num_blocks=100, **options):
    groups = [KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(KVCacheConfig(num_blocks, [], groups), max_model_len=1000, **options)


def request(manager, count, name="r", first=0):
    tokens = range(first, first + count)
    return Request(name, HashChain(BlockHasher(manager.hash_block_size), tokens))


def compute(manager, one, count, **options):
    """Admit or go on by ``count`` tokens, as an engine does; returns the tokens found."""
    found, hit = None, 0
    if not any(manager.get_block_ids(one.request_id)):
        found, hit = manager.get_computed_blocks(one)
    assert manager.allocate_slots(
        one, count, num_new_computed_tokens=hit, new_computed_blocks=found, **options
    )
    one.num_computed_tokens += hit + count
    check_manager(manager)
    return hit


def test_a_window_gives_back_what_it_passed_and_keeps_the_block_it_begins_in():
    manager = cache(window(6))
    one = request(manager, 30)
    compute(manager, one, 12)
    assert manager.get_block_ids("r") == ([1, 2, 3],)
    compute(manager, one, 1)  # token 12 sees 7 to 12
    assert manager.get_block_ids("r") == ([0, 2, 3, 4],)
    compute(manager, one, 1)  # token 13 sees 8 to 13
    assert manager.get_block_ids("r") == ([0, 0, 3, 4],)


def test_a_prompt_is_found_by_its_last_window_alone():
    manager = cache(window(6))
    one = request(manager, 41)
    compute(manager, one, 41)
    manager.free(one)
    manager.evict_blocks({1, 2, 3, 4})
    found, hit = manager.get_computed_blocks(request(manager, 41, "again"))
    assert hit == 40
    assert found.blocks == ([0] * 8 + [9, 10],)


def test_a_chunk_needs_only_its_own_blocks():
    manager = cache(chunked(8))
    one = request(manager, 31)
    # Where a chunk begins, nothing before is read: not even an empty cache makes it compute that.
    assert compute(manager, one, 7) == 24
    assert manager.get_block_ids("r") == ([0] * 6 + [1, 2],)
    found, hit = manager.get_computed_blocks(request(manager, 31, "again"))
    assert (hit, found.blocks) == (28, ([0] * 6 + [1],))
    manager.evict_blocks({1})
    assert manager.get_computed_blocks(request(manager, 31, "and again"))[1] == 24


def test_a_state_is_kept_for_others_only_where_a_step_ended_with_a_block():
    manager = cache(state())
    one = request(manager, 40)
    compute(manager, one, 10)  # ends inside block 2: no state of tokens 8 or 12 exists
    compute(manager, one, 6)  # ends with block 3
    compute(manager, one, 5)
    assert manager.get_computed_blocks(request(manager, 40, "again"))[1] == 16
    manager.free(one)
    assert manager.get_computed_blocks(request(manager, 16, "shorter"))[1] == 0


def test_encoder_states_are_taken_once_and_never_shared():
    manager = cache(full(), CrossAttentionSpec(4, **SHAPE), enable_kv_cache_events=True)
    one = request(manager, 10)
    compute(manager, one, 10, num_encoder_tokens=9)
    assert [len(table) for table in manager.get_block_ids("r")] == [3, 3]
    one.append_token_ids([1, 2, 3])
    compute(manager, one, 3)
    assert [len(table) for table in manager.get_block_ids("r")] == [4, 3]
    # What a decoder keeps depends on the encoder's input, which the hashes do not cover.
    assert manager.get_computed_blocks(request(manager, 10, "again"))[1] == 0
    assert manager.take_events() == []
    manager.free(one)
    assert manager.num_free_blocks == 99


def test_external_tokens_take_no_blocks_behind_a_window():
    manager = cache(full(), window(6), num_blocks=20)
    one = request(manager, 41)
    new = manager.allocate_slots(one, 0, num_external_computed_tokens=40, delay_cache_blocks=True)
    assert [len(blocks) for blocks in new.blocks] == [10, 2]
    assert manager.get_block_ids("r")[1] == [0] * 8 + [11, 12]
    manager.cache_blocks(one, 40)
    one.num_computed_tokens = 40
    check_manager(manager)
    assert manager.get_computed_blocks(request(manager, 41, "again"))[1] == 40
    assert not manager.keeps_all_blocks
    assert cache(full(), MLAAttentionSpec(4, **SHAPE)).keeps_all_blocks


def test_slots_end_at_the_greatest_length():
    manager = KVCacheManager(
        KVCacheConfig(20, [], [KVCacheGroupSpec(["l"], full())]), max_model_len=10
    )
    one = request(manager, 9)
    compute(manager, one, 9, num_lookahead_tokens=50)
    assert manager.get_block_ids("r") == ([1, 2, 3],)


def test_a_prefix_is_adopted_only_at_the_first_allocation():
    manager = cache(full())
    one = request(manager, 9)
    compute(manager, one, 9)
    with pytest.raises(UsageError, match="free"):
        manager.allocate_slots(one, 1, num_new_computed_tokens=4)
    with pytest.raises(UsageError, match="holds no blocks"):
        manager.cache_blocks(request(manager, 9, "unknown"), 4)
    manager.free(request(manager, 9, "unknown"))
    assert manager.get_block_ids("unknown") == ([],)


def test_a_refused_request_that_asks_again_gets_the_same_answer_until_something_changes():
    manager = cache(full(), num_blocks=12)
    one = request(manager, 17)
    compute(manager, one, 17)
    manager.free(one)
    hog = request(manager, 24, "hog", first=500)
    compute(manager, hog, 20)
    again = request(manager, 33, "again")

    def attempt():
        found, hit = manager.get_computed_blocks(again)
        return hit, manager.allocate_slots(
            again, 33 - hit, num_new_computed_tokens=hit, new_computed_blocks=found
        )

    for _ in range(3):
        assert attempt() == (16, None)
    compute(manager, hog, 4)  # takes a block without contents, registers another
    assert attempt() == (16, None)
    manager.evict_blocks({3})
    assert attempt() == (8, None)
    manager.free(hog)
    hit, new = attempt()
    assert (hit, len(new.blocks[0])) == (8, 7)


def test_layers_that_keep_nothing_are_no_group():
    with pytest.raises(KVCacheSpecError, match="leave its layers out"):
        cache(EncoderOnlyAttentionSpec(4, **SHAPE))
    with pytest.raises(KVCacheSpecError, match="nothing to manage"):
        cache()
