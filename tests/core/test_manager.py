"""The block manager on models of one kind of layer."""

import pytest

from kvoffload.core.cache_stats import AllBlocksCleared, BlockRemoved, BlockStored
from kvoffload.errors import UsageError
from tests.support.block_checks import check_manager


def admit(manager, request, new_tokens=None):
    found, tokens = manager.get_computed_blocks(request)
    new = manager.allocate_slots(
        request,
        request.num_tokens - tokens if new_tokens is None else new_tokens,
        num_new_computed_tokens=tokens,
        new_computed_blocks=found,
    )
    check_manager(manager)
    if new is not None:
        request.num_computed_tokens = request.num_tokens
    return tokens, new


def test_a_prompt_seen_before_is_found_but_for_its_last_token(make_manager, make_request):
    manager = make_manager(20)
    first = make_request(list(range(12)))
    assert admit(manager, first)[0] == 0
    assert manager.get_block_ids(first.request_id) == ([1, 2, 3],)
    # 12 tokens are cached, but one must be computed, so the last whole block is.
    tokens, new = admit(manager, make_request(list(range(12))))
    assert tokens == 8
    assert new.get_block_ids() == ([4],)
    assert admit(manager, make_request([*range(12), 99]))[0] == 12


def test_a_cache_is_reset_only_when_nobody_holds_blocks(make_manager, make_request):
    manager = make_manager(10, log_stats=True)
    request = make_request(list(range(16)))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    check_manager(manager)
    assert manager.get_computed_blocks(make_request(list(range(16))))[1] == 0
    assert manager.make_prefix_cache_stats().reset


def test_events_say_what_became_findable_and_what_ceased_to_be(make_manager, make_request):
    manager = make_manager(4, enable_kv_cache_events=True)
    request = make_request(list(range(12)), lora="poet")
    admit(manager, request)
    hashes = request.block_hashes
    assert manager.take_events() == [
        BlockStored(list(hashes), None, list(range(12)), 4, lora_name="poet")
    ]
    manager.free(request)
    other = make_request(list(range(100, 108)))
    admit(manager, other)
    assert manager.take_events() == [
        BlockRemoved([hashes[2], hashes[1]]),
        BlockStored(list(other.block_hashes), None, list(range(100, 108)), 4),
    ]
    manager.free(other)
    manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_without_caching_nothing_is_found(make_manager, make_request):
    manager = make_manager(10, enable_caching=False)
    admit(manager, make_request(list(range(8))))
    assert manager.get_computed_blocks(make_request(list(range(8))))[1] == 0


def test_a_chain_hashed_by_another_block_size_is_refused(make_manager):
    from kvoffload.core.hashing import BlockHasher, HashChain
    from kvoffload.core.request import Request

    manager = make_manager(10)
    with pytest.raises(UsageError, match="hash_block_size"):
        manager.get_computed_blocks(Request("r", HashChain(BlockHasher(8), range(20))))


def test_a_request_is_not_answered_for_another_that_had_its_id(make_manager, make_request):
    manager = make_manager(20)
    admit(manager, make_request(list(range(13))))
    gone, here = make_request(list(range(13))), make_request(list(range(100, 113)))
    assert manager.get_computed_blocks(gone)[1] == 12
    here.request_id = gone.request_id
    assert manager.get_computed_blocks(here)[1] == 0


def test_a_waiting_request_is_looked_up_again_only_if_the_answer_may_differ(
    make_manager, make_request, monkeypatch
):
    manager = make_manager(20)
    admit(manager, make_request(list(range(8))))
    waiting, runner = make_request(list(range(21))), make_request(list(range(100, 104)))
    lookups = []
    find = manager.pool.index.find
    monkeypatch.setattr(
        manager.pool.index,
        "find",
        lambda group, hashes: lookups.append(group) or find(group, hashes),
    )

    def hit_and_lookups():
        lookups.clear()
        hit = manager.get_computed_blocks(waiting)[1]
        return hit, bool(lookups)

    assert hit_and_lookups() == (8, True)
    assert [hit_and_lookups() for _ in range(3)] == [(8, False)] * 3
    admit(manager, runner)  # registers a block of another prefix: one look at the index tells
    assert [hit_and_lookups() for _ in range(3)] == [(8, False)] * 3
    runner.append_token_ids(range(7))
    manager.allocate_slots(runner, 7)
    assert hit_and_lookups() == (8, False)
    admit(manager, make_request(list(range(12))))  # registers the block after the hit
    assert [hit_and_lookups() for _ in range(2)] == [(12, True), (12, False)]
    manager.evict_blocks([2])  # of the hit
    assert [hit_and_lookups() for _ in range(2)] == [(4, True), (4, False)]
    waiting.append_token_ids([5])
    assert hit_and_lookups() == (4, True)


def test_numbers_that_cannot_be_are_refused(make_manager, make_request):
    manager = make_manager(20)
    for wrong in ({-1}, {3, 20}, {5000}):
        with pytest.raises(ValueError, match="blocks 1 to 19"):
            manager.evict_blocks(wrong)
    for wrong in (
        {"num_new_tokens": -1},
        {"num_new_tokens": 1, "num_lookahead_tokens": -1},
        {"num_new_tokens": 1, "num_external_computed_tokens": -4},
        {"num_new_tokens": 1, "num_new_computed_tokens": -4},
        {"num_new_tokens": 1, "num_encoder_tokens": -1},
    ):
        with pytest.raises(ValueError, match="0 or more"):
            manager.allocate_slots(make_request([1, 2]), **wrong)


def test_lookups_are_counted_when_a_request_is_admitted(make_manager, make_request):
    manager = make_manager(20, log_stats=True)
    admit(manager, make_request(list(range(13))))
    waiting = make_request(list(range(13)))
    for _ in range(3):
        manager.get_computed_blocks(waiting)
    admit(manager, waiting)
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 26, 12)
    assert manager.make_prefix_cache_stats().requests == 0
    assert make_manager(20).make_prefix_cache_stats() is None
