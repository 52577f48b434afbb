"""Engines under random load: no wrong output, no death, and nothing left when all is over.

``make chaos`` runs it. ``KVOFFLOAD_CHAOS_SEEDS=7,12`` chooses seeds, ``KVOFFLOAD_SOAK_S`` the
seconds of each.
"""

import os
import random

import pytest

from tests.engines.vllm_engine.adapters import make_adapter

SECONDS = float(os.environ.get("KVOFFLOAD_SOAK_S", "60"))
SEEDS = [int(seed) for seed in os.environ.get("KVOFFLOAD_CHAOS_SEEDS", "").split(",") if seed]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600 + 4 * SECONDS)]
TOKENS, MODEL_LEN = 16, 1024


def settings_of(seed, root):
    """Return a kind of model, settings, options of the engine, whether it schedules asynchronously,
    how many share one folder, and how many adapters they have.
    """
    rng = random.Random(seed)
    disk = {"type": "disk", "root": str(root), "min_free": 0}
    extra = {
        "cpu_bytes": rng.choice(["256KiB", "1MiB", "3MiB", "64MiB"]),
        "blocks_per_chunk": rng.choice([1, 2, 4]),
        "policy": rng.choice(["lru", "arc", "handicap"]),
        "offload_prompt_only": rng.random() < 0.5,
        "fixed_weights": rng.random() < 0.5,
        "backends": rng.choice([[], [{**disk, "capacity": rng.choice(["1MiB", "64MiB"])}]]),
    }
    options = {
        "num_gpu_blocks_override": rng.choice([40, 70, 150]),
        "max_num_seqs": rng.choice([1, 4, 16]),
        "max_num_batched_tokens": rng.choice([70, 128, 512]),
        "enable_prefix_caching": rng.random() < 0.8,
    }
    kind = rng.choice(["llama", "llama", "sliding"])
    is_async = rng.random() < 0.5
    count = 1 + (extra["backends"] != [] and rng.random() < 0.5)
    adapters = 2 if kind == "llama" and rng.random() < 0.5 else 0
    return kind, extra, options, is_async, count, adapters


def make_prompts(seed=5):
    """Make prompts over three prefixes, with lengths at and beside the ends of blocks."""
    rng = random.Random(seed)
    heads = [rng.choices(range(3, 512), k=512) for _ in range(3)]
    ends = [size * count for size in (32, 64, 128) for count in (1, 3)]
    tails = [end + past for end in ends for past in (-1, 0, 1)]
    prompts = [rng.choices(range(3, 512), k=k) for k in (2, 7)]
    for tail in tails:
        shared = rng.choice(heads)[: 32 * rng.randrange(17)]
        prompts.append(shared + rng.choices(range(3, 512), k=tail))
    return prompts


@pytest.fixture(scope="module")
def right(start):
    """Return prompts and the trusted tokens of each, for a kind of model, free and bound.

    Half of the prompts go on with an answer, so that chunks with generated tokens are loaded.
    """
    known = {}

    def of_kind(kind):
        if kind not in known:
            settings = {"enable_prefix_caching": False, "logprobs_mode": "processed_logprobs"}
            plain = start(kind=kind, max_model_len=MODEL_LEN, **settings)
            prompts = make_prompts()
            first = plain.ask("trusted", prompts=prompts, max_tokens=TOKENS)
            prompts += [
                [*prompt, *told, 7, 8, 9]
                for prompt, told in zip(prompts[::2], first[::2], strict=True)
            ]
            told, bound = (
                plain.ask("trusted", prompts=prompts, max_tokens=TOKENS, is_bound=is_bound)
                for is_bound in (False, True)
            )
            known[kind] = {"prompts": prompts, "told": told, "bound": bound}
            plain.kill()
        return known[kind]

    return of_kind


@pytest.mark.parametrize("seed", SEEDS or range(1, 13))
def test_under_random_load_every_output_is_right_and_nothing_is_left(
    start, right, models, plugin, tmp_path, seed
):
    kind, extra, options, is_async, count, adapters = settings_of(seed, tmp_path / "kv")
    paths = [make_adapter(tmp_path / f"a{i}", models(kind), seed=i) for i in range(adapters)]
    load = {**right(kind), "max_tokens": TOKENS, "adapters": paths}
    env = plugin("truly_async") if is_async else {}
    more = {"kind": kind, "max_model_len": MODEL_LEN, "env": env, **options}
    if paths:  # fewer at once than there are, so that they come and go
        more |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
    engines = [start(extra, **more) for _ in range(count)]
    for i, engine in enumerate(engines):
        engine.send("random_load", seconds=SECONDS, seed=seed + 1000 * i, **load)
    for engine in engines:
        seen = engine.answer(SECONDS + 600)
        print(f"seed {seed}", kind, extra, options, is_async, seen)
        assert "error" not in seen, engine.log[-3000:]
        assert "stuck" not in seen
        assert not seen["wrong"]
        assert not seen["left"]
        assert seen["adapted" if paths else "compared"] > 0
    for engine in engines:
        engine.kill()
