"""What an engine of one's own passes: any sequence of numbers is taken, any other is refused."""

import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from local_requests import compute

from kvoffload.connectors.local import LocalConnector
from kvoffload.connectors.local.chunking import NULL_BLOCK, ChunkGroups, to_load, to_store
from kvoffload.connectors.local.engine_arguments import check_blocks, check_pieces
from kvoffload.core.groups import make_group
from kvoffload.core.interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvoffload.errors import ConfigError, UsageError
from tests.support.manager_check import check

BLOCKS, OTHERS = list(range(5, 13)), list(range(20, 28))


@pytest.fixture
def connector(connect):
    return connect(blocks_per_chunk=1, backends=[])


def load(connector, request, table):
    assert connector.get_num_new_matched_tokens(request, 0) == 32
    connector.update_state_after_alloc(request, table, 32)
    assert connector.flush()
    assert connector.poll()[0].ok


@pytest.mark.parametrize("form", [list, tuple, iter, set, np.array, torch.tensor, torch.IntTensor])
def test_a_pass_waits_for_copies_of_its_blocks_in_any_flat_form(
    connector, kv_caches, new_request, form
):
    gate, copier = threading.Event(), connector._spec._copier
    copy = copier._copy
    copier._copy = lambda *copies: (gate.wait(5), copy(*copies))
    tensor = kv_caches.tensors[0].tensor
    before = tensor[BLOCKS].clone()
    connector.after_forward(new_request("p", 33), [BLOCKS], 32)
    threading.Timer(0.1, gate.set).start()
    connector.before_forward(form(BLOCKS))
    assert gate.is_set()
    tensor[BLOCKS] = 0  # the pass
    assert connector.flush()
    connector.request_finished(new_request("p", 33))
    load(connector, new_request("p", 33), [OTHERS])
    assert torch.equal(tensor[OTHERS], before)


@pytest.mark.parametrize(
    "blocks",
    [
        [BLOCKS],
        (tuple(BLOCKS),),
        [torch.tensor(BLOCKS)],
        torch.tensor([BLOCKS]),
        np.array([BLOCKS]),
        torch.tensor(BLOCKS, dtype=torch.float32),
        torch.arange(64) < 8,
        np.arange(64) < 8,
        [True, False],
        ["5"],
        [None],
        5,
        None,
        [64],
        [10**9],
        [-1],
    ],
    ids=repr,
)
def test_a_pass_whose_blocks_are_none_is_refused_in_flight_or_not(connector, blocks):
    with pytest.raises(UsageError, match=r"(?s)blocks = .*: must be (the numbers of|below 64)"):
        connector.before_forward(blocks)


TABLES = [[BLOCKS], (tuple(BLOCKS),), [np.array(BLOCKS)], [torch.tensor(BLOCKS)]]


@pytest.mark.parametrize("table", [*TABLES, torch.tensor([BLOCKS])], ids=repr)
def test_a_table_in_any_form_is_stored_and_loaded(connector, kv_caches, new_request, table):
    tensor = kv_caches.tensors[0].tensor
    before = tensor[BLOCKS].clone()
    connector.after_forward(new_request("p", 33), table, 32)
    assert connector.flush()
    connector.request_finished(new_request("p", 33))
    tensor[BLOCKS] = 0
    load(connector, new_request("p", 33), table)
    assert torch.equal(tensor[BLOCKS], before)


REFUSED = {
    "flat": (BLOCKS, "block_ids = .*must be a sequence of block numbers for each of 1"),
    "flat tensor": (torch.tensor(BLOCKS), "block_ids = .*must be a sequence"),
    "nothing": (None, "block_ids = None: must be a sequence"),
    "two groups": ([BLOCKS, BLOCKS], "block_ids = .*must be a sequence"),
    "too short": ([BLOCKS[:4]], r"block_ids\[0\] = .*has too few blocks for 32 tokens"),
    "beyond": ([[*BLOCKS[:-1], 99_999]], r"block_ids\[0\] = .*99999\]: must be below"),
    "negative": ([[-1, *BLOCKS[1:]]], r"block_ids\[0\] = .*must be below"),
    "mask": (torch.ones((1, 64), dtype=torch.bool), r"block_ids\[0\] = .*must be the numbers of"),
    "texts": ([["5"] * 8], r"block_ids\[0\] = .*must be the numbers of blocks"),
}


def test_a_load_into_one_block_twice_is_refused(connector, new_request):
    """As of an engine whose KV cache groups have a pool of blocks each."""
    connector.after_forward(new_request("p", 33), [BLOCKS], 32)
    assert connector.flush()
    request = new_request("p", 33)
    assert connector.get_num_new_matched_tokens(request, 0) == 32
    with pytest.raises(UsageError, match=r"block_ids = .*names a block twice: all groups"):
        connector.update_state_after_alloc(request, [[*BLOCKS[:-1], BLOCKS[0]]], 32)
    assert not connector._transfers.jobs
    connector.update_state_after_alloc(request, [OTHERS], 32)
    assert connector.flush()
    assert connector.poll()[0].ok


@pytest.mark.parametrize("block_hash", ["text", bytes(4001)], ids=["text", "long"])
def test_a_hash_that_no_message_takes_is_refused(connector, new_request, block_hash):
    request = new_request("p", 33)
    request.block_hashes[:] = [block_hash] * len(request.block_hashes)
    with pytest.raises(UsageError, match=r"block_hashes = .*must be bytes, at most 4,000"):
        connector.after_forward(request, [BLOCKS], 32)


@pytest.mark.parametrize("hashes", [None, 5, iter([b"hash"])], ids=["None", "5", "an iterator"])
def test_a_request_without_a_sequence_of_hashes_is_refused(connector, new_request, hashes):
    """As of an engine whose prefix cache is off, and hashes nothing."""
    request = new_request("p", 33)
    request.block_hashes = hashes
    with pytest.raises(UsageError, match=r"block_hashes = .*: must be bytes"):
        connector.get_num_new_matched_tokens(request, 0)


@pytest.mark.parametrize(("table", "told"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_table_is_refused_before_anything_is_counted(connector, new_request, table, told):
    request = new_request("p", 33)
    with pytest.raises(UsageError, match=told):
        connector.after_forward(request, table, 32)
    compute(connector, request, BLOCKS)
    request = new_request("p", 33)
    assert connector.get_num_new_matched_tokens(request, 0) == 32
    before = connector.stats()
    with pytest.raises(UsageError, match=told):
        connector.update_state_after_alloc(request, table, 32)
    assert connector.stats() == before
    assert not connector._transfers.jobs
    connector.update_state_after_alloc(request, [OTHERS], 32)
    assert connector.flush()
    assert connector.poll()[0].ok
    check(connector)


SHAPE = {"block_size": 2, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
KINDS = [
    FullAttentionSpec(**SHAPE),
    SlidingWindowSpec(**SHAPE, sliding_window=9),
    ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=8),
    MambaSpec(4, shapes=((2,),), dtypes=(torch.float32,)),
]


def check_all(spans, *checked):
    """Check the blocks to load, and that those which are good are returned as they are."""
    tables = checked[1]
    for span in spans:
        numbers = check_blocks(span, *checked)
        assert numbers == [tables[span.group.index][i] for i in span.blocks]


def test_a_wrong_number_of_any_block_that_is_moved_is_refused_in_any_kind_of_group():
    """Blocks are checked from the first that is moved, of each group, to the last."""
    draw, limit, num_checked = random.Random(0), 20, 0
    for _ in range(1000):
        kinds = [make_group(i, draw.choice(KINDS), 2) for i in range(draw.randint(1, 3))]
        groups, tokens = ChunkGroups(kinds, draw.randint(1, 4)), 4 * draw.randint(1, 10)
        tables = [draw.choices(range(limit), k=tokens // group.block_size) for group in groups.all]
        for table in tables:
            table[: draw.randint(0, len(table))] = draw.choice([[], [NULL_BLOCK]])
            table[:0] = [NULL_BLOCK] * (tokens // 2 - len(table))
        keys = [[b"key"] * (tokens // group.chunk_tokens) for group in groups.all]
        checked = keys, tables, limit
        if draw.random() < 0.5:
            pieces = to_store(groups, tables, [0] * len(kinds), tokens, True)
            check_now = partial(check_pieces, pieces, groups, *checked)
            per = [group.per_chunk for group in groups.all]
            moved = [(g, range(chunk * per[g], (chunk + 1) * per[g])) for g, chunk in pieces]
        else:
            end = groups.aligned(groups.all[0].chunk_tokens * len(keys[0]))
            spans = to_load(groups, tables, draw.randrange(0, end + 1, 2), end, True)
            spans = [span for span in spans if span.chunks.stop <= len(keys[span.group.index])]
            check_now = partial(check_all, spans, *checked)
            moved = [(span.group.index, span.blocks) for span in spans]
        check_now()
        if moved:
            index, blocks = draw.choice(moved)
            tables[index][draw.choice(blocks)] = draw.choice([limit, -1, 1.5, "3", None])
            with pytest.raises(UsageError, match=rf"block_ids\[{index}\]"):
                check_now()
            del keys[index][draw.choice(groups.all[index].chunks(blocks)) :]
            with pytest.raises(UsageError):
                check_now()
            num_checked += 1
    assert num_checked > 500


def test_more_tokens_than_there_are_chunks_of_are_refused(connector, new_request):
    request, table = new_request("p", 33), [list(range(40))]
    with pytest.raises(UsageError, match="block_hashes = 'group 0': name 8 full chunks"):
        connector.after_forward(request, table, 80)


@pytest.mark.parametrize("wanted", [5, 31, 33, 36, -4, 4.0, "4"])
def test_only_whole_blocks_of_what_was_promised_can_be_asked_for(connector, new_request, wanted):
    compute(connector, new_request("p", 33), BLOCKS)
    request = new_request("p", 33)
    with pytest.raises(UsageError, match="returned 0"):  # nothing was asked
        connector.update_state_after_alloc(request, [OTHERS], 4)
    assert connector.get_num_new_matched_tokens(request, 0) == 32
    with pytest.raises(UsageError, match="num_external_tokens = "):
        connector.update_state_after_alloc(request, [OTHERS], wanted)
    connector.update_state_after_alloc(request, [OTHERS], torch.tensor(8))
    assert connector.flush()
    (outcome,) = connector.poll()
    assert (outcome.num_loaded_tokens, outcome.ok) == (8, True)


@pytest.mark.parametrize("computed", [-4, 4.0, None])
def test_computed_tokens_are_a_count(connector, new_request, computed):
    request = new_request("p", 33)
    with pytest.raises(UsageError, match="num_computed_tokens = "):
        connector.get_num_new_matched_tokens(request, computed)
    with pytest.raises(UsageError, match="num_computed_tokens = "):
        connector.after_forward(request, [BLOCKS], computed)
    with pytest.raises(UsageError, match="num_tokens = "):
        connector.note_prefill(computed, 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("request_id", 7), ("num_tokens", None), ("block_hashes", [1, 2]), ("block_hashes", "ab")],
)
def test_a_request_of_other_types_is_refused_and_leaves_nothing(
    connector, new_request, name, value
):
    request = new_request("p", 33)
    vars(request)[name] = value
    for call in (
        lambda: connector.get_num_new_matched_tokens(request, 0),
        lambda: connector.update_state_after_alloc(request, [BLOCKS], 32),
        lambda: connector.after_forward(request, [BLOCKS], 32),
    ):
        with pytest.raises(UsageError, match=name):
            call()
    assert not connector._requests


def test_tensors_of_other_groups_than_the_configuration_are_refused(kv_caches):
    pair = type(kv_caches)(kv_caches.tensors, kv_caches.group_data_refs * 2)
    with pytest.raises(ConfigError, match="kv_caches = '2 groups': kv_cache_config has 1"):
        LocalConnector({"cpu_bytes": "64KiB"}, pair, block_size=4, facts={"model": "m"})


def test_caches_that_are_no_canonical_views_are_refused(kv_caches):
    for given in ({"layers.0": kv_caches.tensors[0].tensor}, kv_caches.tensors, None):
        wrong = rf"kv_caches = '{type(given).__name__}': .*canonicalize_kv_caches"
        with pytest.raises(ConfigError, match=wrong):
            LocalConnector({"cpu_bytes": "64KiB"}, given, block_size=4, facts={"model": "m"})
