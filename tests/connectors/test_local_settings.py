"""Settings with which the local connector is refused before it has started anything."""

import threading

import numpy as np
import pytest
import torch

from kvoffload import folder_digest
from kvoffload.connectors.local import LocalConnector
from kvoffload.core.interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from kvoffload.errors import ConfigError

BLOCK = 4
MEMORY = [{"type": "memory"}]


@pytest.fixture
def start(kv_caches):
    """Start a connector, and close it."""

    def start(facts=None, block_size=BLOCK, kv_cache_config=None, **settings):
        settings, facts = {"cpu_bytes": "64KiB", **settings}, facts or {"model": "m"}
        how = {"block_size": block_size, "kv_cache_config": kv_cache_config}
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


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_size_that_holds_nothing_is_refused(start, block_size):
    with pytest.raises(ConfigError, match="block_size"):
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


@pytest.mark.parametrize("value", [1.5, ["a"], {"x": 1}, np.int64(3)])
def test_a_fact_that_has_no_one_spelling_is_refused_at_the_start(start, value):
    with pytest.raises(ConfigError, match=r"facts\.scale.*must be a text"):
        start({"model": "m", "scale": value})
