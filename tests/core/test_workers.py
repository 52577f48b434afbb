"""Plans of several workers: tensor-parallel ranks, pipeline stages, and both."""

import pytest
import torch

from kvoffload.core.attention import init_attn_backend, prepare_attn_metadata
from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.interface import (
    FullAttentionSpec,
    MambaSpec,
    ModelLimits,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvoffload.core.manager import KVCacheManager
from kvoffload.core.planning import get_kv_cache_config, unify_kv_cache_configs
from kvoffload.core.request import Request
from kvoffload.core.sdpa import SdpaPagedBackend
from kvoffload.core.tensors import canonicalize_kv_caches, init_kv_cache
from kvoffload.core.workers import get_kv_cache_configs
from kvoffload.errors import InsufficientMemoryError, KVCacheSpecError

LIMITS = ModelLimits(max_model_len=64, max_num_batched_tokens=64)
SHAPE = (16, 2, 8, torch.float16)
FULL = FullAttentionSpec(*SHAPE)
WINDOW = SlidingWindowSpec(*SHAPE, sliding_window=32)
PAGE = FULL.page_size_bytes
STATE = MambaSpec(16, ((16,),), (torch.float32,))


def stage(first, *specs):
    return {f"layers.{i}": spec for i, spec in enumerate(specs, first)}


FIRST = stage(0, WINDOW, WINDOW, WINDOW, WINDOW, WINDOW, FULL)
SECOND = stage(6, FULL, WINDOW, WINDOW, WINDOW, WINDOW, FULL)


def names(config):
    return [group.layer_names for group in config.kv_cache_groups]


def test_stages_of_a_hybrid_model_agree_on_the_groups_of_the_whole_model():
    configs = get_kv_cache_configs(LIMITS, [FIRST, SECOND], [1 << 18, 1 << 17])
    whole = get_kv_cache_config(LIMITS, {**FIRST, **SECOND}, 1 << 20)
    for config, layers in zip(configs, (FIRST, SECOND), strict=True):
        assert names(config) == [tuple(n for n in group if n in layers) for group in names(whole)]
        assert set(config.layer_specs) == set(layers)
        assert [g.kv_cache_spec for g in config.kv_cache_groups] == [
            g.kv_cache_spec for g in whole.kv_cache_groups
        ]
    tensors = [len(config.kv_cache_tensors) for config in configs]
    affordable = [(1 << 18) // (tensors[0] * PAGE), (1 << 17) // (tensors[1] * PAGE)]
    assert [config.num_blocks for config in configs] == [min(affordable)] * 2
    assert {t.size for c in configs for t in c.kv_cache_tensors} == {min(affordable) * PAGE}
    assert unify_kv_cache_configs(configs) == configs


def test_ranks_of_one_stage_have_the_same_layers():
    configs = get_kv_cache_configs(LIMITS, [FIRST, FIRST, SECOND, SECOND], [1 << 18] * 4)
    assert configs[0] == configs[1]
    assert configs[2] == configs[3]
    alone = get_kv_cache_configs(LIMITS, [FIRST], [1 << 18])
    assert alone == [get_kv_cache_config(LIMITS, FIRST, 1 << 18)]


def test_layers_of_unequal_width_keep_their_own_formats_in_each_stage():
    wide = FullAttentionSpec(16, 4, 8, torch.float16)
    configs = get_kv_cache_configs(
        LIMITS, [stage(0, FULL, wide), stage(2, wide, wide)], [40 * PAGE] * 2
    )
    assert [config.num_blocks for config in configs] == [10, 10]
    assert [[t.size for t in config.kv_cache_tensors] for config in configs] == [
        [10 * PAGE, 20 * PAGE], [20 * PAGE, 20 * PAGE],
    ]  # fmt: skip
    for config in configs:
        spec = config.kv_cache_groups[0].kv_cache_spec
        assert isinstance(spec, UniformTypeKVCacheSpecs)
        assert set(spec.kv_cache_specs) == set(config.layer_specs)


def test_a_stage_without_cached_layers_has_the_blocks_of_the_others():
    configs = get_kv_cache_configs(LIMITS, [stage(0, FULL), {}], [20 * PAGE, 0])
    assert [config.num_blocks for config in configs] == [20, 20]
    assert (names(configs[1]), configs[1].kv_cache_tensors) == ([()], ())


def test_blocks_may_be_given_and_packed():
    configs = get_kv_cache_configs(
        LIMITS, [FIRST, SECOND], [0, 0], num_blocks_override=30, packed=True
    )
    assert [config.num_blocks for config in configs] == [30, 30]
    for config in configs:
        assert {t.block_stride for t in config.kv_cache_tensors} == {
            PAGE * len(config.kv_cache_tensors)
        }


def test_a_stage_without_a_layer_of_some_group_runs():
    """The whole path: plan, memory, metadata, rows, and one manager for both stages."""
    stages = [stage(0, WINDOW, WINDOW, STATE), stage(3, FULL, WINDOW)]
    configs = get_kv_cache_configs(LIMITS, stages, [1 << 18] * 2)
    assert () in names(configs[0])
    manager = KVCacheManager(configs[0], max_model_len=64)
    request = Request("r", HashChain(BlockHasher(manager.hash_block_size), range(20)))
    assert manager.allocate_slots(request, 20)
    tables = manager.get_block_ids("r")
    for config in configs:
        backends = {
            name: SdpaPagedBackend(sliding_window=getattr(spec, "sliding_window", None))
            for name, spec in config.layer_specs.items()
        }
        caches = init_kv_cache(config, backends, "cpu")
        builders = init_attn_backend(config, backends)
        metadata = prepare_attn_metadata(config, builders, [20], [0], [tables])
        assert set(metadata) == set(caches) == set(config.layer_specs)
        for group, table in zip(config.kv_cache_groups, tables, strict=True):
            for name in group.layer_names:
                assert metadata[name].block_table_tensor.tolist() == [table]
        refs = canonicalize_kv_caches(config, caches, backends).group_data_refs
        assert [bool(ref) for ref in refs] == [bool(group) for group in names(config)]


@pytest.mark.parametrize(
    ("layers", "memory", "error", "message"),
    [
        ([FIRST, stage(5, WINDOW)], [1 << 18] * 2, KVCacheSpecError,
         r"layers\.5.*worker 1.*worker 0"),
        ([FIRST, SECOND], [1 << 18], KVCacheSpecError, "2 workers.*1"),
        ([FIRST, SECOND], [1 << 18, PAGE], InsufficientMemoryError, "worker 1: .* give at least"),
        ([{}, {}], [1, 1], KVCacheSpecError, "nothing to plan"),
        ([], [], KVCacheSpecError, "at least one worker"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_names_the_worker(layers, memory, error, message):
    with pytest.raises(error, match=message):
        get_kv_cache_configs(LIMITS, layers, memory)


def test_stages_planned_one_by_one_are_refused_with_what_works():
    configs = [get_kv_cache_config(LIMITS, layers, 1 << 18) for layers in (FIRST, SECOND)]
    with pytest.raises(KVCacheSpecError, match=r"worker 1.*workers\.get_kv_cache_configs\(\)"):
        unify_kv_cache_configs(configs)
