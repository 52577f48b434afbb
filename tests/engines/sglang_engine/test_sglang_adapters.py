"""Adapters in a real engine: each finds its own pages alone, also under another one's name."""

import json

import pytest

pytest.importorskip("sglang.srt.managers.scheduler")  # whose environment has what writes adapters
import torch
from safetensors.torch import save_file

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

WIDTHS = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "o_proj": 256}
"""Modules of the tiny Llama that adapters change, and the width of what each computes."""
OPTIONS = {
    "enable_lora": True,
    "lora_backend": "torch_native",
    "max_loras_per_batch": 3,
    "max_lora_rank": 8,
    "lora_target_modules": list(WIDTHS),
}


def write_adapter(folder, seed):
    folder.mkdir(exist_ok=True)
    chance, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(4):
        for module, width in WIDTHS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("A", (8, 256)), ("B", (width, 8))):
                values = torch.randn(shape, generator=chance) * 0.3
                weights[f"{name}.lora_{part}.weight"] = values.to(torch.bfloat16)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"r": 8, "lora_alpha": 16, "target_modules": list(WIDTHS), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_an_adapter_finds_its_own_pages_alone(start, prompt, tiers, disk, tmp_path):
    asked, first, second = prompt(1), tmp_path / "first", tmp_path / "second"
    write_adapter(first, 1)
    write_adapter(second, 2)
    together = [None, "a", "b"]

    def load(engine):
        assert engine.ask("adapter", name="a", path=str(first)) is True
        assert engine.ask("adapter", name="b", path=str(second)) is True

    plain = start(**OPTIONS)
    load(plain)
    told = plain.generate(*[asked] * 3, adapters=together)["tokens"]
    assert len(set(map(tuple, told))) == 3
    write_adapter(first, 3)  # trained on in place
    assert plain.ask("adapter", name="a", path=str(first), again=True) is True
    (trained,) = plain.generate(asked, adapters=["a"])["tokens"]
    assert trained not in told
    plain.kill()

    def check(engine, adapters, answers, found):
        engine.forget()
        answer = engine.generate(*[asked] * len(adapters), adapters=adapters)
        assert answer["tokens"] == answers
        assert answer["storage"] == [found] * len(adapters)

    write_adapter(first, 1)
    extra = tiers(disk(tmp_path / "kv"))
    engine = start("dynamic", extra, **OPTIONS)
    load(engine)
    for name, answer in zip(together, told, strict=True):
        check(engine, [name], [answer], 0)
    check(engine, together, told, 592)
    write_adapter(first, 3)
    assert engine.ask("adapter", name="a", path=str(first), again=True) is True
    check(engine, ["a"], [trained], 0)
    check(engine, ["a"], [trained], 592)
    engine.kill()
    write_adapter(first, 1)
    swapped = start("dynamic", extra, lora_paths=[f"b={first}", f"a={second}"], **OPTIONS)
    check(swapped, [None, "b", "a"], told, 592)
