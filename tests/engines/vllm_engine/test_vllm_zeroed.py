"""Model Runner V2 zeroes new blocks before the stores out of them are over.

The hybrids that run on a CPU need their requests one at a time, and then no block is given out so
soon. The plug-in ``zeroing.py`` makes vLLM treat the KV cache of a small Llama as it treats theirs.
"""

import pytest

pytestmark = pytest.mark.timeout(1800)
OVERWRITTEN = "vllm:kvoffload_events stores_overwritten"
RUNNER_V2 = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


@pytest.fixture(scope="module")
def imported(preload):
    return preload(**RUNNER_V2)


def test_under_memory_pressure_outputs_stay_those_of_vllm_alone(
    start, prompts, plugin, record_property
):
    record_property("runner", "V2")
    asked = {
        "env": RUNNER_V2 | plugin("zeroing"),
        # Two requests at a time have all blocks: each gets those that another one has just left.
        "num_gpu_blocks_override": 17,
        "max_model_len": 256,
        "max_num_seqs": 2,
    }
    wanted = prompts(8, 224)
    plain = start(**asked)
    told = plain.generate(wanted, 8)["tokens"]
    plain.kill()
    assert len({tuple(answer) for answer in told}) == 8
    engine = start({"cpu_bytes": "64MiB"}, **asked)
    assert engine.generate(wanted[:1], 1)["tokens"] == [told[0][:1]]
    engine.ask("quiet")  # alone, it kept its blocks until they were stored
    assert engine.ask("reset")
    # A request that ends with its prompt: its blocks are given out in the step of its last stores.
    first = engine.generate(wanted, 1)
    assert first["tokens"] == [answer[:1] for answer in told]
    assert first["cached"][0] >= 192, "nothing was loaded"
    assert engine.generate(wanted, 8)["tokens"] == told
    assert engine.ask("counted")[OVERWRITTEN] > 0
    engine.kill()
