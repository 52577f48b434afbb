"""vLLM returns the experts of each token: it keeps them apart from the KV cache, and from us.

Model Runner V2 alone does so.
"""

import json
import shutil

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from kvoffload.connectors.vllm.start import installed_version

pytestmark = pytest.mark.timeout(1800)
RUNNER_V2 = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def imported(preload):
    return preload(**RUNNER_V2)


@pytest.fixture
def options(models, weigh, tmp_path):
    folder = tmp_path / "mixtral"
    shutil.copytree(models(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | MIXTRAL))
    weigh(folder)
    return {
        "model": str(folder),
        "env": RUNNER_V2,
        "enable_return_routed_experts": True,
        "max_model_len": 256,
        "num_gpu_blocks_override": 12,
    }


def test_experts_are_returned_of_loaded_tokens_or_the_start_is_refused(
    start, prompts, options, tmp_path, record_property
):
    record_property("runner", "V2")
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}
    extra = {"cpu_bytes": "64MiB", "backends": [disk]}
    if installed_version().startswith("0.32"):
        engine = start(extra, ready=False, **options)
        assert "error" in engine.answer()
        assert "enable_return_routed_experts = True: " in engine.log
        engine.kill()
        return
    prompt, *others = prompts(4, 100)
    engine = start(extra, **options)
    told = engine.generate([prompt], 4)["tokens"]
    for other in others:  # until the GPU has forgotten the first one; a reset forgets experts, too
        engine.ask("quiet")
        engine.generate([other], 4)
    answer = engine.generate([prompt], 4)
    assert (answer["tokens"], answer["cached"]) == (told, [96])
    engine.ask("quiet")
    engine.kill()
    answer = start(extra, **options).generate([prompt], 4)
    assert (answer["tokens"], answer["cached"]) == (told, [0]), "the experts have gone"
