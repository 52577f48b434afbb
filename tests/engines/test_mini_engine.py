"""The engine without offloading: same tokens as a dense forward pass, whatever the batch does."""

import random

import pytest
import torch

from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.request import Request
from kvoffload.demo import Engine, ModelConfig, SamplingParams
from kvoffload.demo.random_weights import random_weights
from kvoffload.errors import ConfigError
from tests.support.block_checks import check_manager


def settings(tiny, **changes):
    return {
        "model": tiny,
        "block_size": 4,
        "max_model_len": 192,
        "kv_cache_bytes": "1MiB",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        **changes,
    }


def random_prompts(seed, count, longest=90):
    draw = random.Random(seed)
    shared = [draw.randrange(256) for _ in range(40)]
    return [
        shared[: draw.choice([0, 17, 40])]
        + [draw.randrange(256) for _ in range(draw.randint(1, longest - 40))]
        for _ in range(count)
    ]


def one_by_one(config, prompts, params):
    """Each prompt by itself in an empty cache, in one chunk: what batching must not change."""
    config = {
        **config,
        "kv_cache_bytes": "4MiB",
        "max_num_seqs": 1,
        "max_num_batched_tokens": 192,
        "enable_prefix_caching": False,
    }
    with Engine(config) as engine:
        return [
            engine.generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)
        ]


def smallest_cache(tiny, config):
    """Bytes that just hold one request of the greatest length."""
    page = 2 * config["block_size"] * tiny["num_kv_heads"] * tiny["head_size"] * 4
    return (config["max_model_len"] // config["block_size"] + 1) * page * tiny["num_layers"]


def test_greedy_tokens_are_those_of_a_dense_forward_pass(tiny, dense_generate):
    state = random_weights(ModelConfig(**tiny), 0)
    prompts = random_prompts(1, 4)
    with Engine(settings(tiny)) as engine:
        results = engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == dense_generate(ModelConfig(**tiny), state, prompt, 12)


@pytest.mark.parametrize("seed", range(12))
def test_batching_chunking_and_preemption_change_no_token(tiny, seed):
    draw = random.Random(seed)
    block_size = draw.choice([2, 4, 8])
    config = settings(
        tiny,
        block_size=block_size,
        max_num_batched_tokens=draw.choice([8, 13, 64]),
        max_num_seqs=8,
    )
    config["kv_cache_bytes"] = smallest_cache(tiny, config)
    prompts = random_prompts(seed, 8)
    params = [
        SamplingParams(max_tokens=draw.randint(1, 25), temperature=draw.choice([0, 1]), seed=i)
        for i in range(8)
    ]
    with Engine(config) as engine:
        results = engine.generate(prompts, params)
        check_manager(engine.manager)
        assert engine.manager.usage == 0
    assert [r.token_ids for r in results] == one_by_one(config, prompts, params)


def test_a_small_cache_preempts_and_every_request_still_ends(tiny):
    config = settings(tiny)
    config["kv_cache_bytes"] = smallest_cache(tiny, config)
    prompts = random_prompts(3, 10)
    with Engine(config) as engine:
        results = engine.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
    assert sum(r.preemptions for r in results) > 0
    assert all(len(r.token_ids) == 60 for r in results)


def test_kv_pages_are_bit_equal_however_they_were_computed(tiny):
    prompt = random_prompts(4, 1)[0]
    pages = []
    for chunk in (192, 8, 13):
        with Engine(settings(tiny, max_num_batched_tokens=chunk)) as engine:
            engine.generate([prompt], SamplingParams(max_tokens=1))
            follower = Request("follower", HashChain(BlockHasher(4), [*prompt, 1]))
            blocks, count = engine.manager.get_computed_blocks(follower)
            ids = torch.tensor(blocks.get_block_ids()[0])
            caches = engine.runner.canonical_kv_caches()
            pages.append(torch.cat([t.tensor[ids] for t in caches.tensors], 1))
            assert count == len(prompt) // 4 * 4
    assert torch.equal(pages[0], pages[1])
    assert torch.equal(pages[0], pages[2])


def test_a_shared_prefix_is_computed_once(tiny):
    prompt = list(range(80))
    with Engine(settings(tiny)) as engine:
        first, second = (engine.generate([prompt])[0] for _ in range(2))
    assert first.cached_tokens == {"GPU": 0}
    assert second.cached_tokens == {"GPU": 76}  # whole blocks, and the last token anew
    assert first.token_ids == second.token_ids


def test_abort_ends_a_request_in_any_state_and_frees_its_blocks(tiny):
    config = settings(tiny, max_num_seqs=2)
    with Engine(config) as engine:
        names = [engine.add_request(p) for p in random_prompts(5, 4)]
        engine.step()
        engine.abort(names[0])  # running
        engine.abort(names[3])  # waiting
        engine.abort("nobody")
        results = {}
        while engine.has_requests:
            results.update((r.request_id, r) for r in engine.step())
        assert {n: r.finish_reason for n, r in results.items()} == {
            names[0]: "abort",
            names[1]: "length",
            names[2]: "length",
            names[3]: "abort",
        }
        assert engine.manager.usage == 0


def test_an_answer_ends_at_a_stop_token_or_at_the_greatest_length(tiny):
    with Engine(settings(tiny)) as engine:
        free = engine.generate(["stop somewhere"], SamplingParams(max_tokens=10))[0]
        stop = SamplingParams(max_tokens=10, stop_token_ids=frozenset(free.token_ids[3:4]))
        stopped = engine.generate(["stop somewhere"], stop)[0]
    assert free.finish_reason == "length"
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [([], "prompt"), ([5] * 190, "prompt"), ([272], "prompt"), ([-1], "prompt")],
)
def test_a_prompt_that_cannot_be_served_is_refused_at_once(tiny, prompt, field):
    with Engine(settings(tiny)) as engine:
        with pytest.raises(ConfigError) as caught:
            engine.add_request(prompt)
        assert caught.value.field == "prompt"
        assert not engine.has_requests


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_cache_bytes": "64KiB"}, "kv_cache_bytes"),
        ({"device": "gpu"}, "device"),
        ({"device": "cuda:99"}, "device"),
    ],
)
def test_what_cannot_work_is_refused_at_start(tiny, changes, field):
    with pytest.raises(ConfigError) as caught:
        Engine(settings(tiny, **changes))
    assert caught.value.field == field


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tiny):
    with pytest.raises(ConfigError, match="vocab_size"):
        Engine(settings({**tiny, "vocab_size": 100}))
