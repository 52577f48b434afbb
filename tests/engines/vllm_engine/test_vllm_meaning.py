"""Equal keys, other KV: engines that differ in what bytes mean never load each other's chunks.

Each test stores with one engine and asks another one on the same root. The outputs of the second
must be those of an engine without tiers.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.engines.vllm_engine.adapters import make_adapter

pytestmark = pytest.mark.timeout(1800)


def settings(root, **more):
    disk = {"type": "disk", "root": str(root), "min_free": 0}
    return {"cpu_bytes": "64MiB", "backends": [disk], **more}


def test_a_processor_that_orders_bytes_otherwise_finds_nothing(
    start, models, prompts, plugin, tmp_path
):
    root, asked = tmp_path / "kv", prompts(1, 500)
    options = {"dtype": "bfloat16", "block_size": 32}
    first = start(settings(root), **options)
    first.generate(asked)
    first.ask("quiet")
    first.kill()
    env = plugin("other_order")
    plain = start(env=env, **options)
    told = plain.generate(asked)["tokens"]
    plain.kill()
    other = start(settings(root), env=env, **options)
    answer = other.generate(asked)
    other.kill()
    assert (answer["cached"], answer["tokens"]) == ([0], told)


def test_images_named_by_a_counter_stay_out_of_the_tiers(start, prompts, tmp_path):
    """A counter begins again in each process: the same name is another image."""
    asked = prompts(1, 500)
    options = {
        "kind": "blip2",
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
    }
    extra = settings(tmp_path / "kv", trust_image_uuids=True)
    first = start(extra, **options)
    one = first.generate(asked, images=[1], salts=["tenant"])
    first.ask("quiet")
    assert "names images by a counter" in first.log
    first.kill()
    second = start(extra, **options)
    other = second.generate(asked, images=[2], salts=["tenant"])
    right = second.generate(asked, images=[2], salts=["another"])
    second.kill()
    assert other["cached"] == [0]
    assert other["tokens"] == right["tokens"] != one["tokens"]


def test_an_adapter_cut_down_to_some_modules_is_another_adapter(start, models, prompts, tmp_path):
    adapter = make_adapter(tmp_path / "a", models(), 0)
    asked, lora = prompts(1, 500), [["a", 1, adapter]]
    options = {"enable_lora": True, "max_lora_rank": 8}
    first = start(settings(tmp_path / "kv"), **options)
    whole = first.generate(asked, loras=lora)["tokens"]
    first.ask("quiet")
    first.kill()
    plain = start(lora_target_modules=["o_proj"], **options)
    right = plain.generate(asked, loras=lora)["tokens"]
    plain.kill()
    second = start(settings(tmp_path / "kv"), lora_target_modules=["o_proj"], **options)
    answer = second.generate(asked, loras=lora)
    second.kill()
    assert (answer["cached"], answer["tokens"]) == ([0], right)
    assert right != whole


def test_an_adapter_trained_again_under_its_path_is_another_adapter(
    start, models, prompts, tmp_path
):
    adapter = make_adapter(tmp_path / "a", models(), 0)
    asked, lora = prompts(1, 500), [["a", 1, adapter]]
    options = {"enable_lora": True, "max_lora_rank": 8}
    engine = start(settings(tmp_path / "kv"), **options)
    whole = engine.generate(asked, loras=lora)["tokens"]
    engine.ask("quiet")
    file = Path(adapter, "adapter_model.safetensors")
    again = Path(make_adapter(tmp_path / "b", models(), 1), file.name)
    file.write_bytes(again.read_bytes())
    # Loaded already: it computes as before, and nothing says which content it has.
    engine.ask("reset", connector=False)
    answer = engine.generate(asked, loras=lora)
    assert (answer["cached"], answer["tokens"]) == ([0], whole)
    assert "changed after they were read" in engine.log
    base = engine.generate(asked)
    engine.ask("quiet")
    engine.kill()
    second = start(settings(tmp_path / "kv"), **options)
    trained = second.generate(asked, loras=lora)
    assert trained["cached"] == [0]
    assert trained["tokens"] != whole
    second.ask("quiet")
    second.ask("reset", connector=False)
    answer = second.generate(asked, loras=lora)
    assert (answer["cached"], answer["tokens"]) == ([480], trained["tokens"])
    second.kill()
    third = start(settings(tmp_path / "kv"), **options)
    answer = third.generate(asked, loras=lora)
    assert (answer["cached"], answer["tokens"]) == ([480], trained["tokens"])
    third.kill()
    # The base model's chunks are those of engines without adapters.
    plain = start(settings(tmp_path / "kv"))
    answer = plain.generate(asked)
    assert (answer["cached"], answer["tokens"]) == ([480], base["tokens"])
    plain.kill()


def test_weights_that_change_while_it_runs_leave_nothing_behind(
    start, models, prompts, weigh, tmp_path
):
    """Neither are old chunks served to the new weights, nor new ones to a start with the old."""
    old = models()
    new = tmp_path / "new"
    new.mkdir()
    for file in Path(old).iterdir():
        (new / file.name).write_bytes(file.read_bytes())
    negate_some_weights(new)
    first, second = prompts(2, 500)
    plain = start(model=str(new))
    right = [plain.generate([each])["tokens"] for each in (first, second)]
    plain.kill()
    plain = start(model=old)
    before = [plain.generate([each])["tokens"] for each in (first, second)]
    plain.kill()
    assert right[0] != before[0]
    assert right[1] != before[1]

    engine = start(settings(tmp_path / "kv"), model=old)
    assert engine.generate([first])["tokens"] == before[0]
    engine.ask("quiet")
    engine.ask("update", path=str(new))
    assert "may have changed the weights" in engine.log
    # As code that was written for vLLM alone does: the connector is not named.
    assert engine.ask("reset", connector=False)
    for each, told in zip((first, second), right, strict=True):
        answer = engine.generate([each])
        assert (answer["cached"], answer["tokens"]) == ([0], told)
    engine.ask("quiet")
    engine.ask("reset", connector=False)
    answer = engine.generate([second])
    assert (answer["cached"], answer["tokens"]) == ([480], right[1])
    engine.kill()

    again = start(settings(tmp_path / "kv"), model=old)
    for each, told, cached in zip((first, second), before, (480, 0), strict=True):
        answer = again.generate([each])
        assert (answer["cached"], answer["tokens"]) == ([cached], told)
    again.kill()


def test_weights_that_a_trainer_loads_past_the_engine_core_leave_nothing_behind(
    start, models, prompts, tmp_path
):
    """A trainer in the worker's process tells vLLM nothing, and resets vLLM's own cache alone."""
    old, new = models(), tmp_path / "new"
    shutil.copytree(old, new)
    negate_some_weights(new, "input_layernorm")
    first, second = prompts(2, 500)
    plain = start(model=str(new))
    right = [plain.generate([each])["tokens"] for each in (first, second)]
    plain.kill()

    engine = start(settings(tmp_path / "kv"), model=old)
    before = engine.generate([first])["tokens"]
    assert before != right[0]
    engine.ask("quiet")
    engine.ask("load_weights", path=str(new))
    assert engine.ask("reset", connector=False)
    for each, told in zip((first, second), right, strict=True):
        answer = engine.generate([each])
        assert answer["tokens"] == told
    assert "load_weights of the model in a worker may have changed the weights" in engine.log
    engine.ask("quiet")
    assert engine.ask("reset", connector=False)
    engine.generate([second])
    engine.ask("quiet")
    assert engine.ask("reset", connector=False)
    answer = engine.generate([second])
    assert (answer["cached"], answer["tokens"]) == ([480], right[1])
    engine.kill()

    again = start(settings(tmp_path / "kv"), model=old)
    for each, cached in zip((first, second), (480, 0), strict=True):
        answer = again.generate([each])
        assert answer["cached"] == [cached]
        assert answer["tokens"] != right[0]
    assert again.generate([first])["tokens"] == before
    again.kill()


def negate_some_weights(folder, part="v_proj"):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    state = load_file(file)
    changed = {name: -value if part in name else value for name, value in state.items()}
    save_file(changed, file, {"format": "pt"})


def test_a_latent_cache_stored_by_one_rank_is_found_by_two(start, prompts, tmp_path):
    one = {"kind": "mla", "dtype": "float32"}
    two = {**one, "ranks": 2}
    asked = prompts(1, 500)
    first = start(settings(tmp_path / "kv"), **one)
    told = first.generate(asked)["tokens"]
    first.ask("quiet")
    first.kill()
    second = start(settings(tmp_path / "kv"), **two)
    answer = second.generate(asked)
    second.kill()
    assert (answer["cached"], answer["tokens"]) == ([496], told)
    (folder,) = (each for each in (tmp_path / "kv").iterdir() if len(each.name) == 64)
    facts = json.loads((folder / "manifest.json").read_text())
    assert "any" in str(facts)
