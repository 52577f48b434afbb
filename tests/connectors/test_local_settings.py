"""Settings with which the local connector is refused before it has started anything."""

import os
import threading

import numpy as np
import pytest
import torch

from kvoffload import folder_digest
from kvoffload.connectors.local import LocalConnector
from kvoffload.core.hashing import BlockHasher
from kvoffload.core.interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvoffload.errors import ConfigError
from kvoffload.messages import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

BLOCK = 4
MEMORY = [{"type": "memory"}]
ROWS = torch.zeros((64, 32), dtype=torch.int8)
TENSOR, REF = CanonicalKVCacheTensor(ROWS, 32), CanonicalKVCacheRef(0, 32)


@pytest.fixture
def start(kv_caches):
    """Start a connector, and close it."""

    def start(facts=None, block_size=BLOCK, kv_cache_config=None, hasher=None, **settings):
        settings, facts = {"cpu_bytes": "64KiB", **settings}, facts or {"model": "m"}
        how = {"block_size": block_size, "kv_cache_config": kv_cache_config, "hasher": hasher}
        LocalConnector(settings, kv_caches, facts=facts, **how).close()

    return start


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"cpu_bytes": 100}, "cpu_bytes"),
        ({"cpu_bytes": "900TiB"}, "cpu_bytes"),
        ({"cpu_bytes": 0}, "cpu_bytes"),
        ({"cpu_bytes": 0, "staging_bytes": 100, "backends": MEMORY}, "staging_bytes"),
        ({"cpu_bytes": 0, "staging_bytes": "900TiB", "backends": MEMORY}, "staging_bytes"),
        ({"policy": "newest"}, "policy"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk"),
        ({"backends": [{"type": "tape"}]}, "backends[0].type"),
        ({"backends": [{"type": "disk", "rot": "/x"}]}, "backends[0].rot"),
        ({"backends": [{"type": "disk", "root": "/proc/none"}]}, "backends[0].root"),
        ({"load_timeout": 3}, "load_timeout"),
        ({"load_timeout_s": -1}, "load_timeout_s"),
        ({"max_inflight_bytes": "1KiB"}, "max_inflight_bytes"),
    ],
)
def test_bad_settings_name_the_field_and_start_nothing(start, settings, field, until):
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError) as caught:
        start(**settings)
    assert caught.value.field == field
    assert caught.value.remedy
    until(lambda: set(threading.enumerate()) <= threads)  # one asked the file system


def test_a_second_tier_that_cannot_open_leaves_the_first_one_closed(start, tmp_path, until):
    threads = set(threading.enumerate())
    disk = {"type": "disk", "root": str(tmp_path), "capacity": "1MiB"}
    with pytest.raises(ConfigError):
        start(backends=[disk, {"type": "memroy"}])
    until(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.parametrize("block_size", [0, -4, "4", 4.0, None, True, np.int64(4)])
def test_a_block_size_that_holds_nothing_is_refused(start, block_size):
    with pytest.raises(ConfigError, match=r"block_size = .*: must be an int"):
        start(block_size=block_size)


@pytest.mark.parametrize("block_size", [12, 32])
def test_hashes_that_end_where_no_block_does_are_refused(start, block_size):
    """With 12 tokens of a hash, the key of 16 tokens would be one of 12 of them alone."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype=torch.int8)
    groups = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)])
    with pytest.raises(ConfigError, match=rf"block_size = {block_size}: must divide the 16 tokens"):
        start(block_size=block_size, kv_cache_config=groups)


def test_a_fact_of_the_engine_that_the_connectors_own_would_hide_is_refused(start):
    """Engines that differ in it would share a namespace."""
    start({"model": "m", "block_size": BLOCK})
    with pytest.raises(ConfigError, match=r"facts\.chunk_layout.*another name"):
        start({"model": "m", "chunk_layout": "heads first"})
    with pytest.raises(ConfigError, match="must tell models apart"):
        start({"label.model": "m"})


def test_an_engine_that_names_too_little_is_told_which_facts_are_missing(start, caplog):
    def started(*tiers, **facts):
        caplog.clear()
        start({"model": "m", **facts}, backends=list(tiers), io="thread")
        return caplog.text

    memory = {"type": "memory", "capacity": "1MiB"}
    assert "do not name weights and dtype" in started(memory)
    assert "do not name weights:" in started(memory, dtype="float32")
    assert "do not name" not in started(memory, dtype="float32", weights="sha256:1")
    assert "do not name" not in started()


@pytest.mark.parametrize("untold", [None, ""])
def test_weights_that_nothing_tells_are_no_fact(start, tmp_path, untold):
    """Two models of one form would load each other's chunks: a folder without known files."""
    (tmp_path / "model.ckpt").write_bytes(b"weights")
    facts = {"dtype": "float32", "weights": folder_digest(tmp_path) if untold is None else untold}
    tier = {"type": "memory", "capacity": "1MiB"}
    for tiers in ({"backends": [tier], "io": "thread"}, {"serve": str(tmp_path / "server")}):
        with pytest.raises(ConfigError, match=r"facts\.weights.*name them"):
            start(facts, **tiers)


@pytest.mark.parametrize("value", [1.5, ["a"], {"x": 1}, np.int64(3), os.fsdecode(b"/m\xff")])
def test_a_fact_that_has_no_one_spelling_is_refused_at_the_start(start, value):
    with pytest.raises(ConfigError, match=r"facts\.scale.*must be a text"):
        start({"model": "m", "scale": value})


@pytest.mark.parametrize("facts", [["model"], "model", None, {1: "m"}], ids=repr)
def test_facts_that_are_no_dictionary_of_names_are_refused(kv_caches, facts):
    with pytest.raises(ConfigError, match=r"^facts = .*must be a (dictionary|text)"):
        LocalConnector({"cpu_bytes": "64KiB"}, kv_caches, block_size=BLOCK, facts=facts)


@pytest.mark.parametrize(
    "hasher", ["sha256", hash, BlockHasher(2 * BLOCK)], ids=["text", "function", "other blocks"]
)
def test_a_hasher_of_no_such_blocks_is_refused(start, hasher):
    """It would find no prompt of an operator who looks one up."""
    with pytest.raises(ConfigError, match=r"hasher = .*: must be a BlockHasher of 4 tokens"):
        start(hasher=hasher)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"kv_cache_groups": []}, "kv_cache_config"),
        ([], "kv_cache_config"),
        (KVCacheConfig(64, [], [{"layer": None}]), r"kv_cache_config.kv_cache_groups[0]"),
    ],
)
def test_groups_of_another_type_are_refused(start, config, field):
    with pytest.raises(ConfigError, match=r"must be a .*KVCache") as caught:
        start(kv_cache_config=config)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("tensors", "refs", "field"),
    [
        ([], [[REF]], "tensors"),
        ([ROWS], [[REF]], "tensors[0]"),
        ([CanonicalKVCacheTensor(ROWS.numpy(), 32)], [[REF]], "tensors[0]"),
        ([CanonicalKVCacheTensor(ROWS[:, :0], 0)], [[REF]], "tensors[0]"),
        ([CanonicalKVCacheTensor(ROWS.view(64, 4, 8), 32)], [[REF]], "tensors[0]"),
        ([TENSOR], [[]], "group_data_refs"),
        ([TENSOR], [REF], "group_data_refs[0]"),
        ([TENSOR], [[32]], "group_data_refs[0]"),
        ([TENSOR], [[CanonicalKVCacheRef(-1, 32)]], "group_data_refs[0].tensor_idx"),
        ([TENSOR], [[CanonicalKVCacheRef("0", 32)]], "group_data_refs[0].tensor_idx"),
        ([TENSOR], [[CanonicalKVCacheRef(0, 0)]], "group_data_refs[0].page_size_bytes"),
        ([TENSOR], [[CanonicalKVCacheRef(0, 33)]], "group_data_refs[0].page_size_bytes"),
        ([TENSOR], [[CanonicalKVCacheRef(0, 32.0)]], "group_data_refs[0].page_size_bytes"),
    ],
)
def test_caches_that_are_no_rows_of_bytes_are_refused_by_name(tensors, refs, field):
    threads = set(threading.enumerate())
    caches = CanonicalKVCaches(tuple(tensors), tuple(refs))
    with pytest.raises(ConfigError) as caught:
        LocalConnector({"cpu_bytes": "64KiB"}, caches, block_size=BLOCK, facts={"model": "m"})
    assert caught.value.field == f"kv_caches.{field}"
    assert caught.value.remedy.startswith("must ")
    assert set(threading.enumerate()) == threads
