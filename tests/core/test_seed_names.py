"""Every name of the five documents this library began from is there, under its name.

The documents are not part of the repository. Where a checkout has them beside it, the list below is
compared with them; elsewhere the list stands for them.
"""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

SEEDS = {
    # The formats as vLLM 0.9 documented them.
    "000": {
        "core.interface": [
            "AttentionSpec", "FullAttentionSpec.sliding_window",
            "FullAttentionSpec.max_memory_usage_bytes", "FullAttentionSpec.merge",
            "KVCacheConfig.num_blocks", "KVCacheConfig.tensors", "KVCacheConfig.kv_cache_groups",
            "KVCacheGroupSpec", "KVCacheSpec.max_memory_usage_bytes", "KVCacheSpec.merge",
            "KVCacheTensor", "SlidingWindowSpec.max_memory_usage_bytes",
        ],
        "core.compat": ["type_id"],
    },
    # Planning, hashing and blocks of the same time.
    "001": {
        "core.planning": [
            "check_enough_kv_cache_memory", "create_kv_cache_group_specs",
            "estimate_max_model_len", "get_kv_cache_config", "is_kv_cache_type_uniform",
            "unify_hybrid_kv_cache_specs", "unify_kv_cache_configs",
        ],
        "core.cache_stats": ["PrefixCachingMetrics.observe", "PrefixCacheStats"],
        "core.request": ["Request"],
        "core.compat": [
            "NONE_HASH", "BlockHashType", "FreeKVCacheBlockQueue.append",
            "FreeKVCacheBlockQueue.get_all_free_blocks", "FreeKVCacheBlockQueue.popleft",
            "FreeKVCacheBlockQueue.remove", "KVCacheBlock.block_id", "KVCacheBlock.ref_cnt",
            "KVCacheBlock._block_hash", "KVCacheBlock.prev_free_block",
            "KVCacheBlock.next_free_block", "KVCacheBlock.incr_ref", "KVCacheBlock.decr_ref",
            "_gen_lora_extra_hash_keys", "_gen_mm_extra_hash_keys",
            "_get_kv_cache_config_uniform_type", "generate_block_hash_extra_keys",
            "hash_block_tokens", "hash_request_tokens", "need_extra_keys",
            "unify_kv_cache_configs",
        ],
    },
    # The formats of vLLM 0.11, as source.
    "002": {
        "core.interface": [
            "KVCacheSpec.block_size", "KVCacheSpec.page_size_bytes",
            "KVCacheSpec.max_memory_usage_bytes", "KVCacheSpec.merge",
            "AttentionSpec.num_kv_heads", "AttentionSpec.head_size", "AttentionSpec.dtype",
            "AttentionSpec.use_mla", "AttentionSpec.page_size_bytes",
            "FullAttentionSpec.sliding_window", "FullAttentionSpec.attention_chunk_size",
            "FullAttentionSpec.max_memory_usage_bytes", "FullAttentionSpec.merge_window_sizes",
            "FullAttentionSpec.merge", "ChunkedLocalAttentionSpec.attention_chunk_size",
            "ChunkedLocalAttentionSpec.max_memory_usage_bytes", "SlidingWindowSpec.sliding_window",
            "SlidingWindowSpec.max_memory_usage_bytes", "MambaSpec.shapes", "MambaSpec.dtypes",
            "MambaSpec.page_size_padded", "MambaSpec.mamba_type",
            "MambaSpec.num_speculative_blocks", "MambaSpec.page_size_bytes",
            "MambaSpec.max_memory_usage_bytes", "EncoderOnlyAttentionSpec.max_memory_usage_bytes",
            "CrossAttentionSpec.max_memory_usage_bytes", "UniformTypeKVCacheSpecs.kv_cache_specs",
            "UniformTypeKVCacheSpecs.page_size_bytes",
            "UniformTypeKVCacheSpecs.max_memory_usage_bytes",
            "UniformTypeKVCacheSpecs.is_uniform_type", "UniformTypeKVCacheSpecs.from_specs",
            "KVCacheTensor.size", "KVCacheTensor.shared_by", "KVCacheGroupSpec.layer_names",
            "KVCacheGroupSpec.kv_cache_spec", "KVCacheConfig.num_blocks",
            "KVCacheConfig.kv_cache_tensors", "KVCacheConfig.kv_cache_groups", "cdiv",
        ],
    },
    # The model runner's side, December 2025. Two helpers lost their underscore here.
    "003": {
        "core.tensors": [
            "_allocate_kv_cache", "_reshape_kv_cache", "bind_kv_cache", "init_kv_cache",
        ],
        "core.attention": [
            "build_attn_metadata", "get_kv_cache_spec", "init_attn_backend",
            "AttentionBackend.get_builder_cls", "AttentionBackend.get_kv_cache_shape",
            "AttentionBackend.get_kv_cache_stride_order", "AttentionBackend.get_name",
            "AttentionMetadataBuilder.build", "AttentionType.DECODER",
            "CommonAttentionMetadata.query_start_loc",
            "CommonAttentionMetadata.query_start_loc_cpu", "CommonAttentionMetadata.seq_lens",
            "CommonAttentionMetadata.seq_lens_cpu", "CommonAttentionMetadata.max_seq_len",
            "CommonAttentionMetadata.num_computed_tokens_cpu", "CommonAttentionMetadata.num_reqs",
            "CommonAttentionMetadata.num_actual_tokens", "CommonAttentionMetadata.max_query_len",
            "CommonAttentionMetadata.block_table_tensor", "CommonAttentionMetadata.slot_mapping",
            "CommonAttentionMetadata.causal", "CpuGpuBuffer",
        ],
    },
    # The offloading interfaces, 2026.
    "004": {
        "offload.base": [
            "BlockIDsLoadStoreSpec", "CanonicalKVCacheRef", "CanonicalKVCacheTensor",
            "CanonicalKVCaches", "GPULoadStoreSpec.block_ids", "GPULoadStoreSpec.group_sizes",
            "GPULoadStoreSpec.block_indices", "LoadStoreSpec", "OffloadingManager.complete_load",
            "OffloadingManager.complete_store", "OffloadingManager.lookup",
            "OffloadingManager.prepare_load", "OffloadingManager.prepare_store",
            "OffloadingManager.shutdown", "OffloadingManager.take_events",
            "OffloadingSpec.get_handlers", "OffloadingSpec.get_manager", "make_offload_key",
            "OffloadKey", "ReqContext.kv_transfer_params", "PrepareStoreOutput",
            "OffloadingEvent", "OffloadingHandler",
        ],
    },
}  # fmt: skip
PATHS = [
    (module, path) for seed in SEEDS.values() for module, paths in seed.items() for path in paths
]
FOLDER = Path(__file__).parents[3] / "shared" / "seeds"
TAGS = {"dataclass", "property", "classmethod", "abstractmethod"} | {
    f"{owner}-attribute" for owner in ("class", "instance", "module")
}


def test_each_name_of_the_seeds_is_there_and_documented():
    for module, path in PATHS:
        owner = importlib.import_module(f"kvoffload.{module}")
        name, _, member = path.partition(".")
        thing = getattr(owner, name, None) or getattr(owner, name.removeprefix("_"))
        if inspect.isclass(thing) or (inspect.isfunction(thing) and not name.startswith("_")):
            assert inspect.getdoc(thing), path
        if member and not (
            dataclasses.is_dataclass(thing)
            and member in {f.name for f in dataclasses.fields(thing)}
        ):
            assert hasattr(thing, member) or member in inspect.signature(thing).parameters, path


def names_of_source(text):
    """Classes, their methods and their fields; the source lost its indentation."""
    return set(re.findall(r"^(?:class |def )(\w+)", text, re.MULTILINE)) | set(
        re.findall(r"^(\w+): \w", text, re.MULTILINE)
    )


def names_of_page(text):
    """Headings of a documentation page; tags may stand between a name and the mark after it."""
    lines = [word for line in text.splitlines() for word in (line.replace(" ¶", "\n¶")).split("\n")]
    names = set()
    for end, line in enumerate(lines):
        if line == "¶":
            heading = [word for word in lines[max(end - 4, 0) : end] if word not in TAGS]
            names.add(heading[-1].split(" ")[0])
    # Pages of the newer kind have no marks: a heading is followed by its signature.
    return names | set(re.findall(r"^(\w+)\n\n\1\(", text, re.MULTILINE))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_list_names_what_the_seeds_name(seed):
    files = list(FOLDER.glob(f"{seed}_*.txt"))
    if not files:
        pytest.skip("the seed documents are not beside this checkout")
    text = files[0].read_text()
    derived = names_of_source(text) if "# SPDX" in text else names_of_page(text)
    derived = {name for name in derived if "." not in name and not name.startswith("__")}
    listed = {part for paths in SEEDS[seed].values() for path in paths for part in path.split(".")}
    assert len(derived) > 5
    assert derived <= listed
    assert {name for name in listed if not re.search(rf"\b{name}\b", text)} == set()
