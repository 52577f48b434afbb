"""``blocks_per_chunk: "auto"`` under vLLM: what limits it, and that both halves choose alike."""

import logging
import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvoffload.connectors.vllm.auto_chunks import choose_blocks_per_chunk
from kvoffload.errors import ConfigError

pytestmark = pytest.mark.timeout(900)
KiB, MiB = 1 << 10, 1 << 20
SHAPE = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def full(block_size=16):
    return FullAttentionSpec(block_size=block_size, **SHAPE)


def window(tokens, block_size=16):
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **SHAPE)


def local(tokens):
    return ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=tokens, **SHAPE)


def state(block_size=16):
    return MambaSpec(block_size=block_size, shapes=((64,),), dtypes=(torch.bfloat16,))


def chosen(*specs, block_bytes=8 * KiB, kept=None, is_worker=False, stages=1):
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    config = types.SimpleNamespace(
        groups=[
            types.SimpleNamespace(group_id=i, tokens_per_block=spec.block_size)
            for i, spec in enumerate(specs)
        ],
        worker_kv_bytes_per_block=block_bytes,
    )
    vllm_config = types.SimpleNamespace(
        cache_config=types.SimpleNamespace(prefix_cache_retention_interval=kept),
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=stages),
    )
    return choose_blocks_per_chunk(config, vllm_config, caches, is_worker)


@pytest.mark.parametrize(
    ("specs", "more", "number"),
    [
        ([full()], {}, 16),
        ([full()], {"block_bytes": 192 * KiB}, 8),
        ([full()], {"block_bytes": 2 * MiB}, 1),
        ([full(64)], {}, 4),
        ([full(), full(64)], {}, 4),
        ([full(), window(1024)], {}, 16),
        ([full(), window(128)], {}, 8),
        ([full(), window(100)], {}, 4),  # 112 tokens are a chunk of seven blocks: no power of two
        ([full(), window(8)], {}, 1),
        ([full(), local(64)], {}, 4),
        ([full(), local(8192)], {}, 16),
        ([full(), state()], {}, 1),
        ([full(), state(528)], {"block_bytes": 2 * MiB}, 1),
        ([full(), window(1024)], {"kept": 0}, 16),
        ([full(), window(1024)], {"kept": 64}, 4),
        ([full(), window(1024)], {"kept": 16 * 12}, 4),
        ([full()], {"kept": 64}, 16),  # vLLM keeps all blocks of full attention
    ],
)
def test_size_tokens_windows_states_and_retention_limit_a_chunk(specs, more, number):
    assert chosen(*specs, **more) == number
    assert chosen(*specs, **more, is_worker=True) == number


def test_the_scheduler_alone_says_what_decided(caplog):
    caplog.set_level(logging.INFO, "kvoffload")
    chosen(full(), window(128), is_worker=True)
    assert not caplog.messages
    chosen(full(), window(128))
    (line,) = caplog.messages
    assert line == (
        'kvoffload: blocks_per_chunk "auto": a chunk is 8 blocks of 16 tokens, 128 tokens, 64.0 '
        "KiB; decided by a window of 128 tokens"
    )


def test_stages_of_a_pipeline_take_the_number_of_the_first(monkeypatch):
    """The scheduler knows the layers of the first stage alone."""
    told = []

    def broadcast_object(number, src):
        told.append((number, src))
        return 4

    group = types.SimpleNamespace(broadcast_object=broadcast_object)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
    assert chosen(full(), is_worker=True, stages=2) == 4
    assert told == [(16, 0)]
    assert chosen(full(), stages=2) == 16  # the scheduler speaks with no group


def test_both_halves_have_the_number_and_the_fact_and_a_prompt_comes_back(halves):
    rig = halves(blocks_per_chunk="auto")
    half, worker = rig.scheduler.connector.connector_scheduler, rig.worker.connector_worker
    assert half.settings.blocks_per_chunk == worker.settings.blocks_per_chunk == 16
    assert half.config.blocks_per_chunk == worker.spec.blocks_per_chunk == 16
    assert worker._info.facts["blocks_per_chunk"] == 16
    assert worker._info.slot_bytes == 16 * 16 * KiB * 2


def test_halves_that_chose_differently_are_refused(halves):
    rig = halves(blocks_per_chunk="auto")
    half, info = rig.scheduler.connector.connector_scheduler, rig.worker.connector_worker._info
    info.facts["blocks_per_chunk"] = 8
    with pytest.raises(ConfigError, match="rank 0 chose 8"):
        half.meet_workers([info])


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("llama", 768),  # chunks of 256 tokens
        ("mla", 768),
        ("sliding", 896),  # of 128, as the window
        ("conv", 992),  # of a block
    ],
)
def test_an_engine_by_default_loads_from_host_memory_and_disk(
    start, prompts, tmp_path, kind, found
):
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}
    extra = {"cpu_bytes": "64MiB", "backends": [disk], "blocks_per_chunk": "auto"}
    wanted = prompts(3, 1000)

    def each(engine):
        """One by one: loads that end at different times change which tokens are computed together,
        and with it a convolution's last bits.
        """
        answers = [engine.generate([prompt]) for prompt in wanted]
        return [answer["tokens"] for answer in answers], [answer["cached"] for answer in answers]

    bare = start(kind=kind)
    expected = [[tokens] for tokens in bare.generate(wanted)["tokens"]]
    bare.kill()
    engine = start(extra, kind=kind)
    assert 'blocks_per_chunk "auto": a chunk is' in engine.log
    engine.generate(wanted)
    engine.ask("quiet")
    assert engine.ask("reset")
    assert each(engine) == (expected, [[found]] * 3)
    engine.ask("quiet")
    engine.kill()
    engine = start(extra, kind=kind)
    assert each(engine) == (expected, [[found]] * 3)
    engine.kill()
