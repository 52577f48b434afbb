"""Outputs with and without the connector are equal, whatever vLLM computes and how.

The models' weights make every token depend on the whole prompt (``add_weights``). Each comparison
is shown to notice wrong chunks: when loads bring back other bytes, outputs differ. A request that
is aborted while it loads changes none of the rest.
"""

import os

import pytest

from tests.engines.vllm_engine.adapters import make_adapter

pytestmark = pytest.mark.timeout(1800)
LENGTH, COUNT, TOKENS = 600, 3, 24


def a_case(name, kind="llama", marks=pytest.mark.long, **options):
    return pytest.param(kind, options, id=name, marks=marks)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        a_case("full attention", marks=()),
        a_case("sliding windows", "sliding", marks=()),
        a_case("local attention", "local"),
        a_case("states", "conv", max_num_seqs=1),
        a_case("MLA", "mla"),
        a_case("MLA on two ranks", "mla", ranks=2),
        a_case("chunked prefill", max_num_batched_tokens=128),
        a_case("async scheduling", plugin="truly_async"),
        a_case(
            "speculative decoding",
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 3,
            },
        ),
        a_case("8 bits a value", kv_cache_dtype="fp8"),
        a_case("preemption", marks=(), num_gpu_blocks_override=40, max_model_len=1024),
        a_case("LoRA", enable_lora=True, max_lora_rank=8),
        a_case("images", "blip2", max_model_len=2048),
    ],
)
def test_outputs_are_those_of_vllm_alone(
    start, models, prompts, plugin, faulty_tier, tmp_path, kind, options
):
    env, _, set_plan = faulty_tier
    options = {**options, "env": {**env, **options.get("env", {})}}
    if is_async := "plugin" in options:
        more_paths = plugin(options.pop("plugin"))["PYTHONPATH"]
        options["env"]["PYTHONPATH"] += os.pathsep + more_paths
    more = {}
    if kind == "blip2":
        more["images"] = list(range(COUNT))
    if "enable_lora" in options:
        more["loras"] = [["a", 1, make_adapter(tmp_path / "adapter", models(), 0)]] * COUNT
    wanted = prompts(COUNT, LENGTH)
    plain = start(kind=kind, **options)
    told = plain.generate(wanted, TOKENS, **more)["tokens"]
    plain.kill()
    assert len({tuple(answer) for answer in told}) == COUNT
    engine = start({"cpu_bytes": "64MiB", "trust_image_uuids": True}, kind=kind, **options)
    if is_async:
        assert engine.ask("steps_in_flight") == 2, "vLLM switches it off on a CPU"
    assert engine.generate(wanted, TOKENS, **more)["tokens"] == told
    ended = forgotten(engine).generate(wanted, TOKENS, abort={0: 2}, **more)
    assert ended["tokens"][1:] == told[1:]
    again = forgotten(engine).generate(wanted, TOKENS, **more)
    assert again["tokens"] == told
    assert min(again["cached"]) >= LENGTH // 2
    if "num_gpu_blocks_override" in options:
        assert engine.ask("metrics")["vllm:num_preemptions"] > 0
    set_plan(copy={"fault": "repeat"})
    wrong = forgotten(engine).generate(wanted, TOKENS, **more)
    set_plan()
    assert min(wrong["cached"]) >= LENGTH // 2
    assert all(one != right for one, right in zip(wrong["tokens"], told, strict=True))
    engine.kill()


def forgotten(engine):
    """Let everything be stored, and GPU memory forget it."""
    engine.ask("quiet")
    assert engine.ask("reset")
    return engine
