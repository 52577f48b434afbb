"""The names engines and connectors know are where they look for them."""

import dataclasses
import importlib
import inspect
import subprocess
import sys

import pytest

NAMES = {
    "interface": ["MLAAttentionSpec", "ModelLimits"],
    "hashing": ["BlockHasher", "HashChain", "MultiModalItem"],
    "block_pool": ["BlockPool"],
    "manager": ["KVCacheManager", "KVCacheBlocks"],
    "cache_stats": ["BlockStored", "BlockRemoved", "AllBlocksCleared"],
    "sdpa": ["SdpaPagedBackend"],
    "tensors": ["canonicalize_kv_caches"],
}
"""Beside those of the seeds, which ``test_seed_names.py`` lists."""
VERBS = [
    "get_computed_blocks", "allocate_slots", "cache_blocks", "free", "get_block_ids",
    "evict_blocks", "reset_prefix_cache", "take_events", "usage", "make_prefix_cache_stats",
    "pop_blocks_for_free",
]  # fmt: skip


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names])
def test_a_known_name_is_there_and_documented(module, name):
    thing = getattr(importlib.import_module(f"kvoffload.core.{module}"), name)
    if inspect.isclass(thing) or (inspect.isfunction(thing) and not name.startswith("_")):
        assert inspect.getdoc(thing)


@pytest.mark.parametrize("verb", VERBS)
def test_the_block_managers_verbs_are_those_of_vllm(verb):
    from kvoffload.core.manager import KVCacheManager

    assert inspect.getdoc(getattr(KVCacheManager, verb))


def test_formats_take_the_arguments_they_always_took():
    import torch

    from kvoffload.core.interface import FullAttentionSpec, KVCacheTensor, SlidingWindowSpec

    full = FullAttentionSpec(16, 2, 64, torch.float16, False, 128)
    assert (full.use_mla, full.sliding_window) == (False, 128)
    window = SlidingWindowSpec(16, 2, 64, torch.float16, False, 128)
    assert window.sliding_window == 128
    assert KVCacheTensor(100).size == 100
    assert KVCacheTensor(100, ["a"]).shared_by == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        full.block_size = 8


def test_formats_hashes_and_the_manager_load_no_torch():
    code = (
        "import sys, kvoffload.core.interface, kvoffload.core.planning, kvoffload.core.manager,"
        "kvoffload.core.hashing, kvoffload.core.request; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
