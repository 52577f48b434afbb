"""Every format: bytes of a page, bytes of a request, what may share a group, what is refused."""

import pytest
import torch

from kvoffload.core.compat import type_id
from kvoffload.core.interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    ModelLimits,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvoffload.errors import KVCacheSpecError

LIMITS = ModelLimits(
    max_model_len=1000, max_num_batched_tokens=100, max_num_encoder_input_tokens=50
)
SHAPE = (16, 2, 64, torch.float16)
PAGE = 2 * 16 * 2 * 64 * 2
MAMBA = MambaSpec(16, ((3, 4), (5,)), (torch.float16, torch.float32))


def full(**options):
    return FullAttentionSpec(*SHAPE, **options)


@pytest.mark.parametrize(
    ("spec", "page", "blocks"),
    [
        (full(), PAGE, 63),
        (full(use_mla=True), PAGE // 2, 63),
        (MLAAttentionSpec(16, 1, 576, torch.bfloat16), 16 * 576 * 2, 63),
        (full(page_size_padded=PAGE + 100), PAGE + 100, 63),
        (full(sliding_window=32), PAGE, 63),
        # (window - 1) + batched = 131 tokens are 9 blocks; one more where the window begins inside.
        (SlidingWindowSpec(*SHAPE, sliding_window=32), PAGE, 10),
        (SlidingWindowSpec(*SHAPE, sliding_window=5000), PAGE, 64),
        (ChunkedLocalAttentionSpec(*SHAPE, attention_chunk_size=64), PAGE, 11),
        (ChunkedLocalAttentionSpec(*SHAPE, attention_chunk_size=5000), PAGE, 63),
        (CrossAttentionSpec(*SHAPE), PAGE, 4),
        (EncoderOnlyAttentionSpec(*SHAPE), PAGE, 0),
        # A state of its own block, and the one before it, which a step reads.
        (MAMBA, 24 + 20, 2),
        (MambaSpec(1000, ((3, 4),), (torch.float16,)), 24, 1),
        (MambaSpec(1000, ((3, 4),), (torch.float16,), num_speculative_blocks=2), 24, 3),
        (MambaSpec(16, ((3, 4),), (torch.float16,), page_size_padded=64), 64, 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVCacheSpec) else None,
)
def test_pages_and_requests_have_the_bytes_their_format_says(spec, page, blocks):
    assert spec.page_size_bytes == page
    assert spec.max_memory_usage_bytes(LIMITS) == blocks * page


def test_context_parallel_ranks_share_a_requests_tokens():
    limits = ModelLimits(1000, 100, decode_context_parallel_size=4)
    assert full().max_memory_usage_bytes(limits) == 16 * PAGE
    with pytest.raises(KVCacheSpecError, match="decode_context_parallel_size = 4"):
        SlidingWindowSpec(*SHAPE, sliding_window=8).max_memory_usage_bytes(limits)


def test_window_sizes_merge_if_they_agree_or_are_missing():
    assert FullAttentionSpec.merge_window_sizes(set()) is None
    assert FullAttentionSpec.merge_window_sizes({7}) == 7
    with pytest.raises(KVCacheSpecError, match=r"\[7, 8\]"):
        FullAttentionSpec.merge_window_sizes({7, 8})
    assert FullAttentionSpec.merge([full(), full(sliding_window=7)]) == full(sliding_window=7)
    with pytest.raises(KVCacheSpecError, match="attention_chunk_size"):
        FullAttentionSpec.merge([full(sliding_window=7), full(attention_chunk_size=8)])
    with pytest.raises(KVCacheSpecError, match="heads, head size"):
        FullAttentionSpec.merge([full(), FullAttentionSpec(16, 4, 64, torch.float16)])
    with pytest.raises(KVCacheSpecError, match="cannot share"):
        FullAttentionSpec.merge([full(), MLAAttentionSpec(*SHAPE)])


def test_equal_formats_merge_and_others_do_not():
    window = SlidingWindowSpec(*SHAPE, sliding_window=8)
    assert SlidingWindowSpec.merge([window, window]) == window
    with pytest.raises(KVCacheSpecError, match="different groups"):
        SlidingWindowSpec.merge([window, SlidingWindowSpec(*SHAPE, sliding_window=9)])
    with pytest.raises(KVCacheSpecError, match="at least one"):
        SlidingWindowSpec.merge([])
    with pytest.raises(KVCacheSpecError, match="at least one"):
        FullAttentionSpec.merge([])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: full(sliding_window=4, attention_chunk_size=4), "one or the other"),
        (lambda: full(sliding_window=0), "sliding_window = 0"),
        (lambda: full(page_size_padded=PAGE - 1), f"at least the {PAGE} bytes"),
        (lambda: FullAttentionSpec(0, 1, 1, torch.float16), "block_size = 0"),
        (lambda: FullAttentionSpec(16, -1, 1, torch.float16), "num_kv_heads = -1"),
        (lambda: FullAttentionSpec(16, 1, 1, "bfloat16"), "dtype = 'bfloat16': must be a torch"),
        (lambda: MambaSpec(16, ((1,),), ("float16",)), r"dtypes\[0\] = 'float16': must be a torch"),
        (lambda: SlidingWindowSpec(*SHAPE), "sliding_window = 0"),
        (lambda: SlidingWindowSpec(*SHAPE, True, 8), "use MLAAttentionSpec"),
        (lambda: ChunkedLocalAttentionSpec(*SHAPE), "attention_chunk_size = 0"),
        (lambda: MLAAttentionSpec(*SHAPE, use_mla=False), "use FullAttentionSpec"),
        (lambda: MambaSpec(16), "at least one"),
        (lambda: MambaSpec(16, ((1,),), ()), "1 shapes and 0 dtypes"),
        (lambda: MambaSpec(16, ((0,),), (torch.float16,)), "positive"),
        (lambda: MambaSpec(16, ((9,),), (torch.float16,), 17), "at least the 18 bytes"),
        (
            lambda: MambaSpec(16, ((9,),), (torch.float16,), num_speculative_blocks=-1),
            "num_speculative_blocks = -1",
        ),
        (lambda: ModelLimits(0, 1), "max_model_len = 0"),
        (lambda: ModelLimits(1, 1, -1), "max_num_encoder_input_tokens = -1"),
        (lambda: KVCacheTensor(-1), "size=-1"),
        (lambda: UniformTypeKVCacheSpecs.from_specs({}), "at least one layer"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(make, message):
    with pytest.raises(KVCacheSpecError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def test_uniform_type_means_the_same_token_slots():
    small, big = full(), FullAttentionSpec(16, 8, 64, torch.float16)
    both = UniformTypeKVCacheSpecs.from_specs({"a": small, "b": big})
    assert both.page_size_bytes == small.page_size_bytes + big.page_size_bytes
    assert both.max_memory_usage_bytes(LIMITS) == 63 * both.page_size_bytes
    window = SlidingWindowSpec(*SHAPE, sliding_window=8)
    for other in (
        window,
        FullAttentionSpec(32, 2, 64, torch.float16),
        CrossAttentionSpec(*SHAPE),
        MAMBA,
        ChunkedLocalAttentionSpec(*SHAPE, attention_chunk_size=8),
    ):
        assert UniformTypeKVCacheSpecs.from_specs({"a": small, "b": other}) is None
    wider = SlidingWindowSpec(*SHAPE, sliding_window=9)
    assert UniformTypeKVCacheSpecs.from_specs({"a": window, "b": wider}) is None
    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": small, "b": MLAAttentionSpec(*SHAPE)})


def test_an_unknown_format_is_named():
    with pytest.raises(KVCacheSpecError, match="AttentionSpec is no format"):
        UniformTypeKVCacheSpecs.is_uniform_type({"a": AttentionSpec(*SHAPE)})


def test_the_base_formats_leave_their_sizes_open():
    with pytest.raises(NotImplementedError):
        _ = KVCacheSpec(16).page_size_bytes
    with pytest.raises(NotImplementedError):
        KVCacheSpec(16).max_memory_usage_bytes(LIMITS)


def test_a_plan_maps_layers_to_tensors_and_formats():
    tensor = KVCacheTensor(100, ["a", "b"])
    config = KVCacheConfig(
        2, [tensor], [KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["b"], MAMBA)]
    )
    assert dict(config.tensors) == {"a": tensor, "b": tensor}
    assert dict(config.layer_specs) == {"a": full(), "b": MAMBA}
    with pytest.raises(TypeError):
        config.tensors["a"] = tensor


def test_type_ids_differ_where_slots_or_bytes_do():
    specs = [
        full(),
        full(sliding_window=8),
        full(attention_chunk_size=8),
        SlidingWindowSpec(*SHAPE, sliding_window=8),
        SlidingWindowSpec(*SHAPE, sliding_window=9),
        FullAttentionSpec(16, 4, 64, torch.float16),
        FullAttentionSpec(32, 1, 64, torch.float16),
        MAMBA,
        UniformTypeKVCacheSpecs.from_specs({"a": full(), "b": full()}),
    ]
    assert len({type_id(spec) for spec in specs}) == len(specs)
    assert type_id(full()) == type_id(full())
