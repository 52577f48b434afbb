import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.core import compat
from kvoffload.core.interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    ModelLimits,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvoffload.core.planning import (
    check_enough_kv_cache_memory,
    create_kv_cache_group_specs,
    estimate_max_model_len,
    get_kv_cache_config,
    get_kv_cache_groups,
    is_kv_cache_type_uniform,
    unify_hybrid_kv_cache_specs,
    unify_kv_cache_configs,
    unify_page_sizes,
)
from kvoffload.errors import InsufficientMemoryError, KVCacheSpecError

LIMITS = ModelLimits(max_model_len=160, max_num_batched_tokens=64)
SHAPE = (16, 2, 64, torch.float16)
FULL = FullAttentionSpec(*SHAPE)
WINDOW = SlidingWindowSpec(*SHAPE, sliding_window=32)
CHUNKED = ChunkedLocalAttentionSpec(*SHAPE, attention_chunk_size=32)
PAGE = FULL.page_size_bytes
MAMBA = MambaSpec(16, ((100,),), (torch.float32,))


def layers(**counts):
    kinds = {"full": FULL, "window": WINDOW, "chunked": CHUNKED, "mamba": MAMBA}
    return {f"{kind}.{i}": kinds[kind] for kind, n in counts.items() for i in range(n)}


def test_layers_of_different_width_share_one_group():
    specs = {"a": FULL, "b": FullAttentionSpec(16, 8, 64, torch.float16)}
    config = get_kv_cache_config(LIMITS, specs, 20 * 5 * PAGE)
    assert config.num_blocks == 20
    assert [t.size for t in config.kv_cache_tensors] == [20 * PAGE, 20 * 4 * PAGE]
    assert config.layer_specs["b"].num_kv_heads == 8
    assert isinstance(config.kv_cache_groups[0].kv_cache_spec, UniformTypeKVCacheSpecs)


def test_a_repeating_pattern_becomes_groups_that_share_tensors():
    config = get_kv_cache_config(LIMITS, layers(full=10, window=20), 40 * 10 * PAGE)
    assert [len(group.layer_names) for group in config.kv_cache_groups] == [10, 10, 10]
    assert len(config.kv_cache_tensors) == 10
    assert config.num_blocks == 40
    assert config.kv_cache_tensors[0].shared_by == ("full.0", "window.0", "window.1")
    assert config.kv_cache_groups[1].layer_names == tuple(f"window.{i}" for i in range(0, 20, 2))


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ({"full": 5, "window": 25}, 6),
        ({"full": 20, "window": 21}, 2),  # one page in 42 unused, where 20-layer groups waste 19
        ({"full": 3, "window": 8}, 4),
        ({"full": 2, "window": 2, "chunked": 4}, 4),
    ],
)
def test_groups_have_one_length_that_wastes_little(counts, groups):
    planned = get_kv_cache_groups(layers(**counts))
    assert len(planned) == groups
    assert sum(len(group.layer_names) for group in planned) == sum(counts.values())


def test_pages_of_unequal_size_are_made_equal():
    wide = FullAttentionSpec(16, 6, 64, torch.float16)
    unified = unify_page_sizes({"wide": wide, "window": WINDOW, "mamba": MAMBA})
    assert {spec.page_size_bytes for spec in unified.values()} == {3 * PAGE}
    assert unified["window"].block_size == 48  # grown by whole blocks, nothing wasted
    assert unified["mamba"].page_size_padded == 3 * PAGE
    odd = FullAttentionSpec(16, 5, 64, torch.float16)
    unified = unify_page_sizes({"odd": odd, "window": WINDOW})
    assert unified["window"].block_size == 32  # two blocks fit, half a page is left
    assert unified["window"].page_size_padded == odd.page_size_bytes
    again = unify_page_sizes({"odd": odd, "window": unified["window"]})
    assert again == unified
    padded = FullAttentionSpec(*SHAPE, page_size_padded=PAGE + 8)
    assert unify_page_sizes({"odd": odd, "padded": padded})["padded"].block_size == 16


def test_packed_layers_of_a_block_lie_side_by_side():
    config = get_kv_cache_config(LIMITS, layers(full=3, window=3), 30 * 3 * PAGE, packed=True)
    assert [t.offset for t in config.kv_cache_tensors] == [0, PAGE, 2 * PAGE]
    assert {t.block_stride for t in config.kv_cache_tensors} == {3 * PAGE}
    assert {t.allocation for t in config.kv_cache_tensors} == {0}


@pytest.mark.parametrize("memory", ["64MiB", 64e6, None])
@pytest.mark.parametrize(
    "plan", [get_kv_cache_config, check_enough_kv_cache_memory, estimate_max_model_len]
)
def test_memory_that_is_no_number_of_bytes_is_refused(plan, memory):
    """A float would be a plan of 244.0 blocks."""
    with pytest.raises(KVCacheSpecError, match=r"available_memory_bytes = .*: must be a whole"):
        plan(LIMITS, {"0": FULL}, memory)


def test_the_null_block_is_reserved():
    # 160 tokens are 10 blocks; an eleventh stands for "no block".
    assert get_kv_cache_config(LIMITS, layers(full=1), 11 * PAGE).num_blocks == 11
    with pytest.raises(InsufficientMemoryError, match="null block included"):
        get_kv_cache_config(LIMITS, layers(full=1), 11 * PAGE - 1)


def test_too_little_memory_is_refused_with_what_would_do():
    with pytest.raises(ValueError, match=f"at least {22 * PAGE} bytes, or set .* at most 64"):
        check_enough_kv_cache_memory(LIMITS, layers(full=2), 2 * 5 * PAGE)
    for nothing in (0, -5):
        with pytest.raises(InsufficientMemoryError, match=f"at least {22 * PAGE} bytes$"):
            check_enough_kv_cache_memory(LIMITS, layers(full=2), nothing)
    check_enough_kv_cache_memory(LIMITS, layers(full=2), 22 * PAGE)
    for override in (-1, 0, 1):
        with pytest.raises(InsufficientMemoryError):
            get_kv_cache_config(LIMITS, layers(full=1), 10**9, num_blocks_override=override)


@given(blocks=st.integers(0, 40), full=st.integers(1, 3), window=st.integers(0, 3))
def test_the_longest_length_estimated_fits_and_the_next_does_not(blocks, full, window):
    specs = layers(full=full, window=window)
    memory = blocks * PAGE
    longest = estimate_max_model_len(LIMITS, specs, memory)
    if longest:
        check_enough_kv_cache_memory(ModelLimits(longest, 64), specs, memory)
    if longest < LIMITS.max_model_len:
        with pytest.raises(InsufficientMemoryError):
            check_enough_kv_cache_memory(ModelLimits(longest + 1, 64), specs, memory)


def test_windowed_layers_can_be_kept_as_full_attention():
    specs = layers(full=1, window=1)
    unified = unify_hybrid_kv_cache_specs(specs)
    assert unified["window.0"] == FullAttentionSpec(*SHAPE, sliding_window=32)
    assert specs["window.0"] == WINDOW  # the input is left alone
    assert is_kv_cache_type_uniform(unified)
    chunked = unify_hybrid_kv_cache_specs(layers(full=1, chunked=1))
    assert chunked["chunked.0"].attention_chunk_size == 32
    assert unify_hybrid_kv_cache_specs(layers(window=2)) == layers(window=2)


@pytest.mark.parametrize(
    "specs",
    [
        layers(window=1, chunked=1),
        layers(full=1, mamba=1),
        {"latent": MLAAttentionSpec(16, 1, 576, torch.float16), "window": WINDOW},
    ],
)
def test_kinds_that_cannot_be_one_are_named(specs):
    with pytest.raises(KVCacheSpecError, match="groups of their own"):
        unify_hybrid_kv_cache_specs(specs)


@pytest.mark.parametrize(
    ("specs", "cause"),
    [
        (
            {"a": FullAttentionSpec(64, *SHAPE[1:]), "b": WINDOW},
            r"block sizes differ \(a: 64, b: 16\): give all layers one block_size",
        ),
        ({"a": FULL, "c": FullAttentionSpec(64, *SHAPE[1:]), "b": FULL}, r"\(a: 16, c: 64\)"),
        (
            {"a": WINDOW, "b": SlidingWindowSpec(*SHAPE, sliding_window=64)},
            r"SlidingWindowSpec\(sliding_window=32\), SlidingWindowSpec\(sliding_window=64\)",
        ),
        # Both differ: another block size alone would not help.
        ({"a": MambaSpec(64, ((100,),), (torch.float32,)), "b": FULL}, "MambaSpec"),
    ],
)
def test_what_keeps_layers_from_being_one_kind_is_named(specs, cause):
    with pytest.raises(KVCacheSpecError, match=cause):
        unify_hybrid_kv_cache_specs(specs)


def test_workers_agree_on_the_smallest_number_of_blocks():
    configs = [get_kv_cache_config(LIMITS, layers(full=2), n * 2 * PAGE) for n in (30, 20, 25)]
    unified = unify_kv_cache_configs(configs)
    assert [config.num_blocks for config in unified] == [20, 20, 20]
    assert {t.size for config in unified for t in config.kv_cache_tensors} == {20 * PAGE}
    assert configs[0].num_blocks == 30
    in_place = list(configs)
    compat.unify_kv_cache_configs(in_place)
    assert in_place == unified


def test_workers_with_other_layers_of_the_same_kinds_are_served_together():
    stages = [{f"{stage}.{i}": FULL for i in range(3)} for stage in ("first", "second")]
    configs = [get_kv_cache_config(LIMITS, specs, 60 * PAGE) for specs in stages]
    assert unify_kv_cache_configs(configs) == configs


@pytest.mark.parametrize("other", [layers(window=2), layers(full=1, window=1)])
def test_unequal_workers_are_refused(other):
    configs = [
        get_kv_cache_config(LIMITS, layers(full=2), 60 * PAGE),
        get_kv_cache_config(LIMITS, other, 60 * PAGE),
    ]
    with pytest.raises(KVCacheSpecError, match="worker 1 has KV cache groups"):
        unify_kv_cache_configs(configs)
    with pytest.raises(KVCacheSpecError, match="at least one worker"):
        unify_kv_cache_configs([])


def test_groups_are_made_only_of_layers_that_merge():
    specs = layers(full=1, window=1)
    with pytest.raises(KVCacheSpecError, match="cannot share"):
        create_kv_cache_group_specs(specs, [["full.0", "window.0"]])
    groups = create_kv_cache_group_specs(specs, [["full.0"], ["window.0"]])
    assert [group.kv_cache_spec for group in groups] == [FULL, WINDOW]


def test_a_plan_is_plain_data():
    config = get_kv_cache_config(LIMITS, layers(full=1, mamba=1), 60 * PAGE)
    assert config == KVCacheConfig(60, config.kv_cache_tensors, config.kv_cache_groups)
