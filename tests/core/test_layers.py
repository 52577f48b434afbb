"""From the attention layers of an engine to the format of each."""

import dataclasses

import pytest
import torch

from kvoffload.core.attention import AttentionLayer, AttentionType, get_kv_cache_spec
from kvoffload.core.interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvoffload.errors import KVCacheSpecError

SHAPE = (16, 2, 8, torch.float16)
PLAIN = AttentionLayer(num_kv_heads=2, head_size=8)


def formats(**layers):
    return get_kv_cache_spec(layers, torch.float16, block_size=16)


def changed(**changes):
    return dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        (PLAIN, FullAttentionSpec(*SHAPE)),
        (changed(sliding_window=5), SlidingWindowSpec(*SHAPE, sliding_window=5)),
        (
            changed(attention_chunk_size=32),
            ChunkedLocalAttentionSpec(*SHAPE, attention_chunk_size=32),
        ),
        (AttentionLayer(1, 24, use_mla=True), MLAAttentionSpec(16, 1, 24, torch.float16)),
        (changed(attn_type=AttentionType.ENCODER_DECODER), CrossAttentionSpec(*SHAPE)),
        (changed(attn_type=AttentionType.ENCODER_ONLY), EncoderOnlyAttentionSpec(*SHAPE)),
        (changed(attn_type=AttentionType.ENCODER), EncoderOnlyAttentionSpec(*SHAPE)),
        # A window of an encoder decides nothing: nothing is kept.
        (changed(attn_type="encoder_only", sliding_window=5), EncoderOnlyAttentionSpec(*SHAPE)),
    ],
)
def test_each_kind_of_layer_has_its_format(layer, spec):
    assert formats(a=layer) == {"a": spec}


def test_a_recurrent_layer_gives_its_format_itself_and_order_is_kept():
    state = MambaSpec(16, ((3,),), (torch.float32,))
    assert list(formats(b=PLAIN, a=state, c=changed(sliding_window=4)).items()) == [
        ("b", FullAttentionSpec(*SHAPE)),
        ("a", state),
        ("c", SlidingWindowSpec(*SHAPE, sliding_window=4)),
    ]


def test_a_layer_that_reads_the_kv_of_another_keeps_none():
    window = changed(sliding_window=5)
    specs = formats(
        a=PLAIN, b=window, c=changed(kv_sharing_target_layer_name="a"),
        d=changed(sliding_window=5, kv_sharing_target_layer_name="b"),
    )  # fmt: skip
    assert list(specs) == ["a", "b"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"a": changed(kv_sharing_target_layer_name="z")}, r"layer a.*= z.*earlier layer"),
        ({"a": changed(kv_sharing_target_layer_name="a")}, r"layer a.*= a.*earlier layer"),
        (
            {"a": changed(kv_sharing_target_layer_name="b"), "b": PLAIN},
            r"layer a.*= b.*earlier layer",
        ),
        (
            {"a": PLAIN, "b": changed(kv_sharing_target_layer_name="a"),
             "c": changed(kv_sharing_target_layer_name="b")},
            r"layer c.*= b.*earlier layer",
        ),
        (
            {"a": PLAIN, "b": changed(head_size=4, kv_sharing_target_layer_name="a")},
            r"layer b.*= a.*same format",
        ),
        ({"a": changed(attn_type="sideways")}, r"layer a.*attn_type = 'sideways'.*encoder_only"),
        ({"a": changed(sliding_window=4, use_mla=True)}, r"layer a.*sliding_window.*use_mla"),
        (
            {"a": changed(sliding_window=4, attention_chunk_size=8)},
            r"layer a.*sliding_window.*attention_chunk_size",
        ),
        ({"a": PLAIN, "b": changed(head_size=0)}, r"layer b.*head_size = 0"),
        ({"a": changed(sliding_window=0)}, r"layer a.*sliding_window = 0"),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_kept_is_named(layers, message):
    with pytest.raises(KVCacheSpecError, match=message):
        formats(**layers)


def test_the_mini_engine_takes_its_formats_from_its_layers():
    from kvoffload.demo.engine_config import EngineConfig
    from kvoffload.demo.runner import plan_kv_cache
    from tests.support.layer_kinds import HybridConfig

    shape = HybridConfig(
        layer_kinds=("full", "window", "latent", "state"), num_layers=4, sliding_window=48,
        num_kv_heads=2, num_heads=2, head_size=8, latent_size=16, state_channels=4, state_size=3,
    )  # fmt: skip
    plan = plan_kv_cache(EngineConfig(model=shape, dtype="float16"))
    kinds = [type(spec) for _, spec in sorted(plan.layer_specs.items())]
    assert kinds == [FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec, MambaSpec]
    specs = dict(plan.layer_specs)
    assert specs["model.layers.1.self_attn"].sliding_window == 48
    assert specs["model.layers.2.self_attn"].head_size == 16 + 8
    assert specs["model.layers.3.self_attn"].shapes == ((4, 3), (3, 4))
