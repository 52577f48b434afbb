"""Model Runner V2 zeroes new blocks before the stores out of them are over.

A model with Mamba layers is not for the CPU with Triton's interpreter. The plug-in ``zeroing.py``
makes vLLM treat the KV cache of a small Llama as it treats theirs.
"""

from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)
HERE = Path(__file__).parent
OVERWRITTEN = "vllm:kvoffload_worker_events stores_overwritten"


def test_under_memory_pressure_outputs_stay_those_of_vllm_alone(start, prompts, tmp_path):
    info = tmp_path / "zeroing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zeroing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nzeroing = zeroing:install\n")
    asked = {
        "env": {
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "PYTHONPATH": f"{tmp_path}:{HERE}",
        },
        # Two requests at a time have all blocks: each gets those that another one has just left.
        "num_gpu_blocks_override": 17,
        "max_model_len": 256,
        "max_num_seqs": 2,
        "kind": "weighted-llama",
        "load_format": "auto",
        "dtype": "float32",
    }
    wanted = prompts(8, 224)
    plain = start(**asked)
    told = plain.generate(wanted, 8)["tokens"]
    plain.kill()
    assert len({tuple(answer) for answer in told}) == 8
    engine = start({"cpu_bytes": "64MiB"}, **asked)
    # A request that ends with its prompt: its blocks are given out in the step of its last stores.
    first = engine.generate(wanted, 1)
    assert first["tokens"] == [answer[:1] for answer in told]
    again = engine.generate(wanted, 8)
    assert again["tokens"] == told
    assert engine.ask("counted")[OVERWRITTEN] > 0
    assert any(again["cached"]), "nothing was loaded"
    engine.kill()
