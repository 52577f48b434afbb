"""``blocks_per_chunk: "auto"``: which number it comes to, what decides it, what becomes cold."""

import logging
from contextlib import closing

import pytest
import torch

from benchmarks.harness import caches_of
from kvoffload.connectors.chunk_size import choose_chunk_size
from kvoffload.connectors.local import LocalConnector
from kvoffload.core.interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

KiB, MiB = 1 << 10, 1 << 20
BLOCK = 16


@pytest.mark.parametrize(
    ("block_bytes", "block_tokens", "num_blocks", "reason"),
    [
        (192 * KiB, 16, 8, "the aim of 2.0 MiB"),  # 12 KiB a token: 1.5 MiB
        (384 * KiB, 32, 4, "the aim of 2.0 MiB"),  # the same tokens in other blocks: the same chunk
        (2 * MiB, 16, 1, "the aim of 2.0 MiB"),  # 128 KiB a token, as Llama 3.1 8B
        (512 * KiB, 16, 4, "the aim of 2.0 MiB"),
        (MiB, 16, 2, "the aim of 2.0 MiB"),
        (1500 * KiB, 16, 1, "the aim of 2.0 MiB"),  # two would be 2.9 MiB
        (1400 * KiB, 16, 2, "the aim of 2.0 MiB"),  # 2.7 MiB is nearer than 1.4
        (64 * MiB, 1056, 1, "the aim of 2.0 MiB"),
        (16 * KiB, 16, 16, "the limit of 256 tokens"),
        (16 * KiB, 48, 4, "the limit of 256 tokens"),  # 192 tokens: a power of two of blocks
        (0, 1, 256, "the limit of 256 tokens"),
        (16 * KiB, 512, 1, "the limit of 256 tokens"),
    ],
)
def test_chunks_have_about_two_mebibytes_and_at_most_256_tokens(
    block_bytes, block_tokens, num_blocks, reason
):
    assert choose_chunk_size(block_bytes, block_tokens) == (num_blocks, reason)


def test_what_else_limits_a_chunk_is_the_reason_where_it_decides():
    limits = {"a window of 128 tokens": 8, "another": 20}
    assert choose_chunk_size(16 * KiB, 16, limits) == (8, "a window of 128 tokens")
    assert choose_chunk_size(MiB, 16, limits) == (2, "the aim of 2.0 MiB")
    assert choose_chunk_size(16 * KiB, 16, {"a window of 8 tokens": 0}).num_blocks == 1


def spec(kind=FullAttentionSpec, block_size=BLOCK, **more):
    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.int8}
    return kind(block_size=block_size, **shape, **more)


def caches_with(*page_bytes, num_blocks=64):
    """Return caches with a tensor for each group."""
    return caches_of(*([torch.zeros((num_blocks, size), dtype=torch.int8)] for size in page_bytes))


@pytest.fixture
def start(caplog):
    """Start a connector with this cache; returns its number of blocks, and what it logged of it."""
    caplog.set_level(logging.INFO, "kvoffload")

    def begin(kv_caches, *specs, block_size=BLOCK, **settings):
        config = None
        if specs:
            groups = [KVCacheGroupSpec([f"layer {i}"], each) for i, each in enumerate(specs)]
            config = KVCacheConfig(64, [], groups)
        caplog.clear()
        connector = LocalConnector(
            {"cpu_bytes": "64MiB", **settings},
            kv_caches,
            block_size=block_size,
            facts={"model": "m"},
            kv_cache_config=config,
        )
        connector.close()
        told = [each.getMessage() for each in caplog.records if "per_chunk" in each.getMessage()]
        return connector.config.blocks_per_chunk, told

    return begin


def test_the_local_connector_chooses_by_its_cache_and_says_why_once(start):
    number, told = start(caches_with(512 * KiB))
    assert number == 4
    assert told == [
        'kvoffload: blocks_per_chunk "auto": a chunk is 4 blocks of 16 tokens, 64 tokens, 2.0 MiB; '
        "decided by the aim of 2.0 MiB"
    ]
    assert start(caches_with(512 * KiB), blocks_per_chunk=3) == (3, [])
    number, (line,) = start(caches_with(KiB))
    assert number == 16
    assert line.endswith("256 tokens, 16.0 KiB; decided by the limit of 256 tokens")


def test_the_largest_group_decides_and_recurrent_states_do_not(start):
    full, wide = spec(), spec(SlidingWindowSpec, sliding_window=4096)
    assert start(caches_with(256 * KiB, 512 * KiB), full, wide)[0] == 4
    assert start(caches_with(512 * KiB, 256 * KiB), full, wide)[0] == 4
    state = MambaSpec(block_size=BLOCK, shapes=((8,),), dtypes=(torch.int8,))
    assert start(caches_with(256 * KiB, 4 * MiB), full, state)[0] == 8
    # The group with the longest blocks has 256 tokens, too.
    assert start(caches_with(KiB, KiB), spec(), spec(block_size=4 * BLOCK))[0] == 4


def test_a_narrow_window_has_smaller_chunks_and_its_prompts_are_found(new_request, until):
    narrow = spec(SlidingWindowSpec, sliding_window=40)
    groups = [KVCacheGroupSpec(["a"], spec()), KVCacheGroupSpec(["b"], narrow)]
    with closing(
        LocalConnector(
            {"cpu_bytes": "8MiB"},
            caches_with(KiB, KiB),
            block_size=BLOCK,
            facts={"model": "m"},
            kv_cache_config=KVCacheConfig(64, [], groups),
        )
    ) as connector:
        assert [group.per_chunk for group in connector._groups.all] == [16, 2]
        prompt = new_request("p", 530, block_size=BLOCK)
        table = list(range(1, 34))
        # Blocks that the window has left are null.
        connector.after_forward(prompt, [table, [0] * 28 + table[28:]], 512)
        assert connector.flush()
        connector.request_finished(prompt)
        again = new_request("p", 530, block_size=BLOCK, request_id="again")
        assert connector.get_num_new_matched_tokens(again, 0) == 512


@pytest.mark.parametrize("former", [1, 8])
def test_a_store_of_another_chunk_size_is_named_as_the_cause_of_a_cold_start(
    tmp_path, caplog, until, new_request, former
):
    """As after an update from a version whose default was one block."""
    caplog.set_level(logging.INFO, "kvoffload")
    disk = {"type": "disk", "root": str(tmp_path), "min_free": 0}
    kv_caches = caches_with(512 * KiB, num_blocks=16)
    for more in ({"blocks_per_chunk": former}, {}):
        settings = {"cpu_bytes": "64MiB", "backends": [disk], **more}
        facts = {"model": "Qwen/Qwen3-8B"}
        with closing(
            LocalConnector(settings, kv_caches, block_size=BLOCK, facts=facts)
        ) as connector:
            if more:
                prompt = new_request("p", 130, block_size=BLOCK)
                connector.after_forward(prompt, [list(range(8))], 128)
                assert connector.flush()
            else:
                until(lambda: "has no chunks" in caplog.text)
    (line,) = [each.getMessage() for each in caplog.records if "has no chunks" in each.getMessage()]
    assert f"which differs in blocks_per_chunk: {former} -> 4;" in line
