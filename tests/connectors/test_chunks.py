"""How a prefix is sought among chunks of several KV cache groups: what is asked, and how often."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvoffload.connectors.local.chunking import (
    NULL_BLOCK,
    ChunkGroups,
    Piece,
    Span,
    cut_load,
    cut_store,
    kinds_of_groups,
    to_load,
    to_store,
)
from kvoffload.connectors.local.prefix_search import PrefixSearch
from kvoffload.core.interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvoffload.messages import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    get_offload_group_idx,
    make_offload_key,
)
from kvoffload.offload.base import ReqContext
from kvoffload.transfer.layout import ChunkLayout

BLOCK = 4
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.int8}
KINDS = [FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=7)]
FULL, WINDOW = KINDS
NARROW = SlidingWindowSpec(**SHAPE, sliding_window=4)
STATE = MambaSpec(block_size=8, shapes=((4,),), dtypes=(torch.int8,))


def groups_of(*kinds, per_chunk=1):
    specs = [KVCacheGroupSpec([f"layer {i}"], kind) for i, kind in enumerate(kinds)]
    return ChunkGroups(kinds_of_groups(BLOCK, KVCacheConfig(64, [], specs)), per_chunk)


def keys_of(groups, tokens):
    keys = [[] for _ in groups.all]
    groups.extend_keys(keys, [bytes([i]) * 32 for i in range(tokens // BLOCK)])
    return keys


def sought(groups, keys, start, limit, find_prefix, find, has_room, waits=True):
    """Return how far a prompt can be loaded, by the answers of a manager."""
    manager = SimpleNamespace(
        lookup_prefix=lambda wanted, context: find_prefix(wanted),
        lookup=lambda key, req_context: find(key),
        has_room=has_room,
        promises=SimpleNamespace(is_worth_loading=lambda *asked: True),
    )
    search = PrefixSearch(manager, ReqContext("r"), groups, keys, start, waits=waits)
    return search.longest(limit)


def longest(groups, keys, start, limit, there, room=None):
    """Return how far a prompt can be loaded if only these chunks are there."""

    def find_prefix(wanted):
        hits = next((i for i, key in enumerate(wanted) if key not in there), len(wanted))
        return hits, False

    def has_room(wanted):
        return room is None or len(wanted) <= room

    find = there.__contains__
    return sought(groups, keys, start, limit, find_prefix, find, has_room)


def test_chunks_of_full_attention_are_asked_for_together_and_only_those_of_windows_one_by_one():
    config = KVCacheConfig(
        64, [], [KVCacheGroupSpec([f"layer {i}"], kind) for i, kind in enumerate(KINDS)]
    )
    groups = ChunkGroups(kinds_of_groups(BLOCK, config), 1)
    keys = [[make_offload_key(bytes([i]) * 32, group) for i in range(10)] for group in (0, 1)]
    together, alone = [], []

    def find_prefix(wanted):
        together.append(list(wanted))
        return len(wanted), False

    def find(key):
        alone.append(key)
        return True

    assert sought(groups, keys, 0, 40, find_prefix, find, lambda _: True) == (40, False)
    assert together == [keys[0]]
    assert alone == keys[1][-2:]
    assert {get_offload_group_idx(key) for key in alone} == {1}


@pytest.mark.parametrize(
    ("has_nulls", "blocks", "chunks"),
    [(True, range(3, 6), range(1, 3)), (False, range(6), range(3))],
)
def test_only_where_there_is_a_null_block_is_block_0_left_out_of_loads(has_nulls, blocks, chunks):
    groups = ChunkGroups(kinds_of_groups(BLOCK, None), 2)
    table = [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 7, 8, 9]
    (span,) = to_load(groups, [table], 0, 24, has_nulls)
    assert (span.group.index, span.blocks, span.chunks) == (0, blocks, chunks)
    assert to_load(groups, [[NULL_BLOCK] * 6], 0, 24, has_nulls=True) == []


# ---- how far a load can go -----------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [(FULL, WINDOW), (WINDOW, FULL)])
def test_what_full_attention_lacks_ends_a_prefix_wherever_the_group_stands(kinds):
    groups = groups_of(*kinds)
    keys = keys_of(groups, 40)
    everything = {key for each in keys for key in each}
    (full,) = (group.index for group in groups.all if group.reads_all)
    assert longest(groups, keys, 0, 43, everything) == (40, False)
    assert longest(groups, keys, 0, 40, everything - {keys[full][6]}) == (24, False)
    assert longest(groups, keys, 24, 40, everything - {keys[full][6]}) == (24, False)
    assert longest(groups, keys, 28, 40, everything - {keys[full][6]}) == (40, False)
    # A window of 7 tokens reads the last two blocks only.
    window = 1 - full
    assert longest(groups, keys, 0, 40, everything - {keys[window][7]}) == (40, False)
    assert longest(groups, keys, 0, 40, everything - {keys[window][8]}) == (32, False)
    assert longest(groups, keys, 32, 40, everything - {keys[window][8]}) == (32, False)
    assert longest(groups, keys, 36, 40, everything - {keys[window][8]}) == (40, False)


def test_an_answer_that_may_come_soon_leaves_all_of_it_open():
    groups = groups_of(FULL, WINDOW)
    keys = keys_of(groups, 40)
    calls = []

    def ask(prefix, find, waits=True):
        return sought(groups, keys, 8, 40, lambda _: prefix, find, lambda _: True, waits)

    assert ask((3, True), calls.append) == (8, True)
    assert calls == []
    assert ask((8, False), lambda key: None) == (8, True)
    assert ask((8, False), lambda key: True) == (40, False)
    assert ask((3, False), lambda key: True) == (20, False)
    assert ask((3, True), lambda key: True, waits=False) == (20, False)
    assert ask((8, False), lambda key: None, waits=False) == (8, False)


@pytest.mark.parametrize(
    ("room", "end"), [(0, 0), (1, 0), (2, 4), (3, 4), (4, 8), (7, 20), (11, 36), (12, 40)]
)
def test_a_prefix_is_as_long_as_the_room_for_the_chunks_of_all_groups(room, end):
    """The first 20 tokens need five chunks of full attention and two of the window."""
    groups = groups_of(FULL, WINDOW)
    keys = keys_of(groups, 40)
    everything = {key for each in keys for key in each}
    assert longest(groups, keys, 0, 40, everything, room) == (end, False)


def test_a_prompt_without_a_full_chunk_is_not_asked_for_and_not_waited_for():
    groups = groups_of(FULL, per_chunk=16)
    assert keys_of(groups, 40) == [[]]
    asked = []
    assert sought(groups, [[]], 0, 40, asked.append, asked.append, asked.append) == (0, False)
    assert asked == []


def test_a_group_alone_is_asked_for_no_room():
    groups = groups_of(FULL)
    keys = keys_of(groups, 40)
    assert groups.keeps_prefixes
    assert longest(groups, keys, 0, 40, set(keys[0]), room=0) == (40, False)
    assert not groups_of(WINDOW).keeps_prefixes
    assert not groups_of(FULL, FULL).keeps_prefixes


# ---- what a load was good for --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "end"),
    [
        (range(10), 40),
        ([0, 2, 3, 4, 5, 6, 7, 8, 9], 4),
        ([0, 1, 2, 4, 5, 6, 7, 9], 12),
        ([1, 2, 3], 0),
        ([], 0),
    ],
)
def test_a_load_is_of_use_up_to_the_first_chunk_that_full_attention_lacks(good, end):
    groups = groups_of(FULL)
    assert groups.usable(0, 40, [(0, chunk) for chunk in good]) == end
    both = groups_of(FULL, WINDOW)
    windows = [(1, chunk) for chunk in range(10)]
    assert both.usable(0, 40, [*windows, *((0, chunk) for chunk in good)]) == end


def test_a_load_is_of_use_where_windows_have_all_that_they_read():
    groups = groups_of(FULL, WINDOW)
    whole = [(0, chunk) for chunk in range(10)]
    assert groups.usable(0, 40, [*whole, (1, 8), (1, 9)]) == 40
    assert groups.usable(0, 40, [*whole, (1, 7), (1, 8)]) == 36
    assert groups.usable(0, 40, [*whole, (1, 9)]) == 0
    assert groups.usable(36, 40, [*whole, (1, 9)]) == 40
    assert groups.usable(36, 40, whole) == 36
    assert groups.usable(16, 40, []) == 16


def test_a_load_is_of_use_only_as_far_as_it_brought_each_block_of_a_window():
    """Of a chunk with blocks 6 and 7 a prefix of 36 reads the second, one of 32 reads both."""
    groups = groups_of(FULL, SlidingWindowSpec(**SHAPE, sliding_window=6), per_chunk=2)
    assert groups.all[1].per_chunk == 2
    without_last = [(0, block) for block in range(8)]
    assert groups.usable(0, 36, [*without_last, (1, 7), (1, 8)]) == 0
    assert groups.usable(0, 36, [*without_last, (1, 6), (1, 7), (1, 8)]) == 32
    assert groups.usable(0, 36, [*without_last, (0, 8), (1, 7), (1, 8)]) == 36


def test_a_load_is_of_use_only_where_the_engine_still_has_the_window_before_it():
    """Of what lies before 32, an end at 40 needs blocks 6 and 7, one at 36 block 5 as well."""
    groups = groups_of(FULL, SlidingWindowSpec(**SHAPE, sliding_window=17))
    assert groups.usable(32, 40, [(0, 8), (1, 8)]) == 32
    assert groups.usable(8, 16, [(0, 2), (1, 2)]) == 12  # both read all blocks before


@pytest.mark.parametrize("kinds", [(FULL, WINDOW), (WINDOW, FULL)])
def test_the_group_that_reads_everything_tells_where_tokens_came_from(kinds):
    groups = groups_of(*kinds, per_chunk=2)
    (full,) = (group.index for group in groups.all if group.reads_all)
    media = {(full, chunk): "DISK" if chunk < 2 else "CPU" for chunk in range(5)}
    media |= {(1 - full, chunk): "REDIS" for chunk in range(5)}
    assert groups.tokens_by_medium(0, 40, media) == {"DISK": 16, "CPU": 24}
    assert groups.tokens_by_medium(12, 40, media) == {"DISK": 4, "CPU": 24}
    assert dict(groups.tokens_by_medium(40, 40, media)) == {}


def test_of_windows_alone_the_last_chunk_tells():
    groups = groups_of(WINDOW)
    media = {(0, 8): "DISK", (0, 9): "CPU"}
    assert groups.tokens_by_medium(4, 40, media) == {"CPU": 36}
    assert dict(groups.tokens_by_medium(40, 40, media)) == {}
    # Chunks in null blocks are not loaded: the first here, or all of a group that is not alone.
    assert groups.tokens_by_medium(4, 40, {(0, 9): "DISK"}) == {"DISK": 36}
    both = groups_of(WINDOW, NARROW)
    assert both.tokens_by_medium(4, 40, {(1, 9): "DISK"}) == {"CPU": 36}


# ---- which blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "per_chunk", "expected"),
    [(9, 4, 2), (9, 3, 1), (6, 4, 2), (5, 4, 1), (64, 4, 4), (17, 6, 3)],
)
def test_chunks_of_a_window_are_as_large_as_can_be_whole_in_it(size, per_chunk, expected):
    wide = SlidingWindowSpec(**SHAPE, sliding_window=size)
    (group,) = groups_of(wide, per_chunk=per_chunk).all
    assert (group.per_chunk, group.chunk_tokens) == (expected, expected * BLOCK)
    assert groups_of(STATE, per_chunk=per_chunk).all[0].per_chunk == 1


def test_keys_are_added_for_chunks_that_are_full():
    groups = groups_of(FULL, per_chunk=3)
    hashes, keys = [bytes([i]) * 32 for i in range(8)], []
    for number, chunks in ((2, 0), (3, 1), (5, 1), (6, 2), (8, 2)):
        groups.extend_keys([keys], hashes[:number])
        assert keys == [make_offload_key(hashes[i], 0) for i in (2, 5)[:chunks]]
    undescribed = ChunkGroups(kinds_of_groups(BLOCK, None), 3)
    assert keys_of(undescribed, 24) == [keys]


def test_chunks_become_ready_to_store_from_head_to_tail_of_the_prompt():
    groups = groups_of(FULL, NARROW, per_chunk=2)
    assert [group.per_chunk for group in groups.all] == [2, 1]
    tables = [list(range(1, 9)), list(range(11, 19))]
    pieces = to_store(groups, tables, [0, 0], 18, True)
    assert pieces == [(1, 0), (0, 0), (1, 1), (1, 2), (0, 1), (1, 3)]
    pieces = to_store(groups, tables, [1, 3], 18, True)
    assert pieces == [Piece(0, 1), Piece(1, 3)]
    tables[1][3] = NULL_BLOCK
    assert to_store(groups, tables, [1, 3], 18, True) == [Piece(0, 1)]
    assert to_store(groups, tables, [1, 3], 18, False) == pieces
    assert to_store(groups, tables, [2, 4], 18, True) == []


@pytest.mark.parametrize(
    ("computed", "first", "stored"),
    [(8, 0, [0]), (24, 0, [2]), (24, 2, [2]), (24, 3, []), (25, 0, []), (7, 0, []), (23, 0, [])],
)
def test_of_states_the_one_at_the_last_token_alone_is_there(computed, first, stored):
    groups = groups_of(STATE)
    pieces = to_store(groups, [[1, 2, 3, 4]], [first], computed, True)
    assert [piece.chunk for piece in pieces] == stored


def test_a_store_has_a_slot_a_group_and_the_blocks_of_each_chunk_in_any_order():
    groups = groups_of(FULL, NARROW, FULL, per_chunk=2)
    tables = [np.arange(10, 20), range(20, 30), torch.arange(30, 40)]
    pieces = [Piece(0, 1), Piece(2, 0), Piece(0, 2), Piece(1, 4)]
    moves = cut_store(groups, pieces, tables, np.array([7, 5, 9, 8], np.int32))
    assert [(slot, group, first, blocks.tolist()) for slot, group, first, blocks in moves] == [
        (7, 0, 0, [12, 13]),
        (5, 2, 0, [30, 31]),
        (9, 0, 0, [14, 15]),
        (8, 1, 0, [24]),
    ]


def test_a_store_of_nothing_has_no_chunks():
    assert len(cut_store(groups_of(FULL), [], [[1, 2]], np.array([], np.int32))) == 0


@pytest.mark.parametrize(
    ("num_chunks", "sizes", "blocks"),
    [
        (6, (5, 0, 2, 3), [13, 14, 15, 16, 17, 34, 35, 40, 41, 42]),
        (5, (5, 0, 2, 2), [13, 14, 15, 16, 17, 34, 35, 40, 41]),
        (4, (5, 0, 2, 0), [13, 14, 15, 16, 17, 34, 35]),
        (3, (5, 0, 0, 0), [13, 14, 15, 16, 17]),
        (2, (3, 0, 0, 0), [13, 14, 15]),
        (1, (1, 0, 0, 0), [13]),
        (0, (0, 0, 0, 0), []),
    ],
)
def test_a_load_has_the_blocks_of_its_first_chunks(num_chunks, sizes, blocks):
    groups = groups_of(FULL, FULL, FULL, FULL, per_chunk=2)
    ranges = {0: range(3, 8), 2: range(4, 6), 3: range(0, 3)}
    spans = [Span(groups.all[i], each, groups.all[i].chunks(each)) for i, each in ranges.items()]
    numbers = [[10 * (i + 1) + block for block in of_group] for i, of_group in ranges.items()]
    slots = np.arange(20, 20 + num_chunks)
    moves = cut_load(spans, numbers, slots)
    assert moves.block_ids.tolist() == blocks
    tensor = CanonicalKVCacheTensor(torch.zeros(64, BLOCK, dtype=torch.int8), BLOCK)
    caches = CanonicalKVCaches((tensor,), ((CanonicalKVCacheRef(0, BLOCK),),) * 4)
    same = ChunkLayout(caches, 2).moves(GPULoadStoreSpec(blocks, sizes, (3, 0, 4, 0)), slots)
    assert moves.chunks.tolist() == same.chunks.tolist()


# ---- orders --------------------------------------------------------------------------------------


def test_keys_of_all_groups_stand_in_the_order_of_their_tokens():
    groups = groups_of(FULL, NARROW, per_chunk=2)
    keys = keys_of(groups, 16)
    (a, b), (c, d, e, f) = keys
    assert groups.from_head_to_tail(keys) == [c, a, d, e, b, f]
    assert groups_of(FULL).from_head_to_tail([[b, a]]) == [b, a]


def test_of_windows_a_request_uses_what_it_loads():
    groups = groups_of(FULL, WINDOW)
    keys = keys_of(groups, 16)
    assert set(groups.used(keys, 0)) == set(keys[0])
    assert set(groups.used(keys, 12)) == {*keys[0], *keys[1][1:3]}
    alone = groups_of(FULL)
    assert alone.used(keys_of(alone, 16), 0) == keys[0]


def test_a_prompt_whose_groups_lack_room_for_a_while_is_asked_about_again():
    groups = groups_of(FULL, WINDOW)
    keys = keys_of(groups, 40)
    there = {key for of_group in keys for key in of_group}
    asks = (lambda wanted: (len(wanted), False)), there.__contains__
    assert sought(groups, keys, 0, 39, *asks, lambda wanted: None) == (0, True)
    assert sought(groups, keys, 0, 39, *asks, lambda wanted: True) == (36, False)
