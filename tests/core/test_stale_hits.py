"""A lookup's answer is used later than it was given: it still stands, or the request is refused."""

import pytest
import torch

from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from kvoffload.core.manager import KVCacheManager
from kvoffload.core.prefix import KVCacheBlocks
from kvoffload.core.request import Request
from kvoffload.errors import UsageError
from tests.support.block_checks import check_manager, free_in_order

HASHER = BlockHasher(4)
SHAPE = {"block_size": 4, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float16}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=9)


def cache(num_blocks, *specs):
    groups = [KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs or [FULL])]
    return KVCacheManager(KVCacheConfig(num_blocks, [], groups), max_model_len=1000)


def request(name, tokens):
    return Request(name, HashChain(HASHER, tokens))


def allocate(manager, one, found, hit, **options):
    count = options.pop("count", one.num_tokens - hit)
    new = manager.allocate_slots(
        one, count, num_new_computed_tokens=hit, new_computed_blocks=found, **options
    )
    check_manager(manager)
    return new


def serve(manager, one):
    """Admit a request and end it: its full blocks stay cached."""
    allocate(manager, one, *manager.get_computed_blocks(one))
    manager.free(one)


def refused(manager, one, found, hit, **options):
    """Allocation with a stale hit raises, and takes nothing."""
    free, order = manager.num_free_blocks, free_in_order(manager.pool.free_queue)
    with pytest.raises(UsageError, match=rf"{one.request_id}.*get_computed_blocks\(\) again"):
        allocate(manager, one, found, hit, **options)
    assert (manager.num_free_blocks, free_in_order(manager.pool.free_queue)) == (free, order)
    assert not any(manager.get_block_ids(one.request_id))
    check_manager(manager)
    allocate(manager, one, *manager.get_computed_blocks(one))  # the remedy that the message names


# Every way in which the blocks found can lose their contents before the allocation.


def taken_by_another(manager):
    serve(manager, request("other", range(100, 111)))


def taken_and_held_by_another(manager):
    other = request("other", range(100, 107))
    allocate(manager, other, *manager.get_computed_blocks(other))


def taken_and_registered_under_other_hashes(manager):
    serve(manager, request("other", range(100, 112)))


def evicted(manager):
    manager.evict_blocks([2])


def reset(manager):
    assert manager.reset_prefix_cache()


def evicted_with_a_copy_left(manager):
    one, two = request("one", range(8)), request("two", range(8))
    allocate(manager, one, None, 0)
    allocate(manager, two, None, 0)
    manager.free(one)
    manager.free(two)
    manager.evict_blocks([1, 2])


LOSSES = [
    taken_by_another, taken_and_held_by_another, taken_and_registered_under_other_hashes, evicted,
    reset, evicted_with_a_copy_left,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_blocks_that_lost_the_prefix_are_refused(loss):
    # Four usable blocks are few enough for others to need those of the prefix.
    manager = cache(7 if loss is evicted_with_a_copy_left else 4)
    serve(manager, request("first", range(8)))
    one = request("late", range(9))
    found, hit = manager.get_computed_blocks(one)
    assert hit == 8
    loss(manager)
    check_manager(manager)
    refused(manager, one, found, hit)


# Every way in which others may act between lookup and allocation without harm.


def test_the_hit_of_an_equal_request_is_taken_and_that_of_another_refused():
    manager = cache(20)
    serve(manager, request("first", range(8)))
    found, hit = manager.get_computed_blocks(request("asked", range(9)))
    assert allocate(manager, request("equal", range(10)), found, hit) is not None
    refused(manager, request("unlike", range(100, 110)), found, hit)
    refused(manager, request("shorter", range(7)), found, hit, count=0)


def test_blocks_put_together_by_hand_are_taken_if_they_hold_the_prefix():
    manager = cache(20)
    serve(manager, request("first", range(12)))
    one = request("r", range(13))
    assert allocate(manager, one, KVCacheBlocks(([1, 2],)), 8) is not None
    refused(manager, request("s", range(13)), KVCacheBlocks(([1, 3],)), 8)
    refused(manager, request("t", range(13)), KVCacheBlocks(([0, 2],)), 8)


# Tokens and blocks that do not belong together.


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW,), (FULL, WINDOW)])
def test_more_tokens_than_the_blocks_found_hold_are_refused(specs):
    manager = cache(40, *specs)
    one = request("r", range(21))
    with pytest.raises(UsageError, match=r"num_new_computed_tokens = 8.*0 tokens"):
        allocate(manager, one, None, 8, count=1)
    serve(manager, request("first", range(20)))
    found, hit = manager.get_computed_blocks(one)
    with pytest.raises(UsageError, match=rf"num_new_computed_tokens = 24.*{hit} tokens"):
        allocate(manager, one, found, 24, count=1)
    assert allocate(manager, one, found, hit) is not None
