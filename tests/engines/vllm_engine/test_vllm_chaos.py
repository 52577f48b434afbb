"""Engines under random load: no wrong output, no death, and nothing left when all is over.

``make chaos`` runs it. ``KVOFFLOAD_CHAOS_SEEDS=7,12`` chooses seeds, ``KVOFFLOAD_SOAK_S`` the
seconds of each.
"""

import os
import random
import time
from types import SimpleNamespace

import pytest

from tests.engines.vllm_engine.adapters import make_adapter
from tests.support import redis_server

SECONDS = float(os.environ.get("KVOFFLOAD_SOAK_S", "60"))
SEEDS = [int(seed) for seed in os.environ.get("KVOFFLOAD_CHAOS_SEEDS", "").split(",") if seed]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600 + 4 * SECONDS)]
TOKENS, MODEL_LEN = 16, 1024


def settings_of(seed, root):
    """Draw a kind of model, its adapters, ranks, settings, options, and engines that share tiers.

    The URL of a tier in Redis is that of the server, once there is one.
    """
    rng = random.Random(seed)
    kind = rng.choice(["llama", "llama", "sliding", "mla"])
    disk = {"type": "disk", "root": str(root), "min_free": 0}
    disk["capacity"] = rng.choice(["1MiB", "64MiB"])
    redis = {"type": "redis", "url": ""}
    tiers = [[], [disk], [redis], [disk, redis]] if redis_server.BINARY else [[], [disk]]
    extra = {
        "cpu_bytes": rng.choice([*([] if kind == "mla" else ["256KiB"]), "1MiB", "3MiB", "64MiB"]),
        "blocks_per_chunk": rng.choice([1, 2, 4]),
        "policy": rng.choice(["lru", "arc", "handicap"]),
        "offload_prompt_only": rng.random() < 0.5,
        "fixed_weights": rng.random() < 0.5,
        "backends": rng.choice(tiers),
    }
    blocks = rng.choice([40, 70, 150])
    if kind == "sliding":  # its two groups of layers share them
        blocks = max(blocks, 70)
    options = {
        "num_gpu_blocks_override": 2 * blocks if kind == "mla" else blocks,  # half as long
        "max_num_seqs": rng.choice([1, 4, 16]),
        "max_num_batched_tokens": rng.choice([70, 128, 512]),
        "enable_prefix_caching": rng.random() < 0.8,
    }
    return SimpleNamespace(
        kind=kind,
        adapters=2 if kind == "llama" and rng.random() < 0.5 else 0,
        ranks=rng.choice([1, 1, 2]),
        is_async=rng.random() < 0.5,
        engines=1 + (extra["backends"] != [] and rng.random() < 0.5),
        extra=extra,
        options=options,
    )


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


@pytest.fixture
def server(tmp_path):
    """Start a redis-server that evicts."""
    running = []

    def begin():
        limits = "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru"
        running.append(redis_server.RedisServer(tmp_path / "redis", *limits))
        return running[0]

    yield begin
    for each in running:
        each.stop()


def mistreat(server, rng, seconds):
    """Kill a server and let it hang, again and again; it serves most of the time."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, rng.uniform(1, 10)))
        undo = rng.choice([(server.kill, server.start), (server.pause, server.resume)])
        for step in undo:
            step()
            time.sleep(rng.uniform(0, 2))


@pytest.mark.parametrize("seed", SEEDS or range(1, 19))
def test_under_random_load_every_output_is_right_and_nothing_is_left(
    start, right, models, plugin, server, tmp_path, seed
):
    drawn = settings_of(seed, tmp_path / "kv")
    paths = [
        make_adapter(tmp_path / f"a{i}", models(drawn.kind), seed=i) for i in range(drawn.adapters)
    ]
    servers = [tier for tier in drawn.extra["backends"] if tier["type"] == "redis"]
    for tier in servers:
        running = server()
        tier["url"] = running.url
    load = {**right(drawn.kind), "max_tokens": TOKENS, "adapters": paths}
    env = plugin("truly_async") if drawn.is_async else {}
    more = {"kind": drawn.kind, "ranks": drawn.ranks, "max_model_len": MODEL_LEN, **drawn.options}
    if paths:  # fewer at once than there are, so that they come and go
        more |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the load looks into the scheduler
    engines = [start(drawn.extra, env=env, **more) for _ in range(drawn.engines)]
    for i, engine in enumerate(engines):
        engine.send("random_load", seconds=SECONDS, seed=seed + 1000 * i, **load)
    if servers:
        mistreat(running, random.Random(seed), SECONDS)
    for engine in engines:
        seen = engine.answer(SECONDS + 600)
        print(f"seed {seed}", drawn, seen)
        assert "error" not in seen, engine.log[-3000:]
        assert "stuck" not in seen
        assert not seen["wrong"]
        assert not seen["left"]
        assert seen["adapted" if paths else "compared"] > 0
    for engine in engines:
        engine.kill()
