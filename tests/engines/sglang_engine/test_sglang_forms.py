"""Forms of pages and of models: flat copies, other layouts, MLA, two ranks; attach and detach."""

import importlib.util
import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
ROOT = Path(__file__).parents[3]


def test_flat_pages_and_storage_attached_while_serving(start, prompt, tiers, disk, tmp_path):
    extra = tiers(disk(tmp_path / "kv"), interface_v1=0)
    engine = start("dynamic", extra)
    asked = prompt(1)
    told = engine.generate(asked)["tokens"]
    engine.wait_stored(asked, told)
    assert engine.ask("storage", action="detach") is True
    engine.forget()
    answer = engine.generate(asked)
    assert answer["tokens"] == told
    assert answer["storage"] == [0]
    attach = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(extra),
    }
    assert engine.ask("storage", action="attach", **attach) is True
    engine.wait_stored(asked, told)
    assert engine.ask("storage", action="clear") is True
    other = prompt(2)
    told = engine.generate(other)["tokens"]
    engine.wait_stored(other, told)


def test_pages_of_another_layout(start, prompt, tiers, disk, tmp_path):
    asked = prompt(1)
    storage = tiers(disk(tmp_path / "kv"))
    first = start("dynamic", storage, hicache_mem_layout="layer_first")
    told = first.generate(asked)["tokens"]
    first.wait_stored(asked, told)
    first.kill()
    other = start("dynamic", storage)
    answer = other.generate(asked)
    assert answer["tokens"] == told
    assert answer["storage"] == [0]
    other.kill()
    again = start("dynamic", storage, hicache_mem_layout="layer_first")
    answer = again.generate(asked)
    assert answer["tokens"] == told
    assert answer["storage"] == [592]


def test_a_mla_model(start, prompt, tiers, disk, tmp_path):
    spec = importlib.util.spec_from_file_location("t", ROOT / "examples/vllm/tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = module.make_model(tmp_path / "model", "mla")
    asked = [token % 500 + 3 for token in prompt(1)]
    engine = start(
        "dynamic", tiers(disk(tmp_path / "kv")), folder=folder, load_format="dummy",
    )  # fmt: skip
    told = engine.generate(asked)["tokens"]
    engine.wait_stored(asked, told)


def test_two_ranks_of_a_model(start, prompt, tiers, disk, tmp_path):
    asked = prompt(1)
    first = start("dynamic", tiers(disk(tmp_path / "kv")), tp_size=2)
    told = first.generate(asked)["tokens"]
    first.wait_stored(asked, told)
    first.kill()
    second = start("dynamic", tiers(disk(tmp_path / "kv")), tp_size=2)
    answer = second.generate(asked)
    assert answer["tokens"] == told
    assert answer["storage"] == [592]
