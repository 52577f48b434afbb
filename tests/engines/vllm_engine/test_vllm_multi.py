"""Inside vLLM's ``MultiConnector``, beside connectors that shake hands or store files."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)
HERE = Path(__file__).parent
RESIDENT = "vllm:kvoffload_host_chunks"
SHAKING = {"kv_connector": "ShakingConnector", "kv_connector_module_path": "sibling"}
OURS = {"kv_connector": "KVOffloadConnector"}
BY_PATH = {**OURS, "kv_connector_module_path": "kvoffload.connectors.vllm"}


def ours(root, how):
    disk = {"type": "disk", "root": str(root), "capacity": "1GiB", "min_free": 0}
    extra = {"cpu_bytes": "64MiB", "backends": [disk], "lookup_timeout_s": 30.0}
    extra |= {"blocks_per_chunk": 1}
    return {**how, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def several(*connectors):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [{"kv_role": "kv_both", **connector} for connector in connectors]
        },
    }


@pytest.mark.parametrize("place", ["after", "before"])
def test_beside_a_connector_that_shakes_hands_it_hits_and_reports(start, prompts, tmp_path, place):
    mine = ours(tmp_path / "kv", OURS if place == "after" else BY_PATH)
    pair = [SHAKING, mine] if place == "after" else [mine, SHAKING]
    # Where the class is found by its module's path, plug-ins are not needed.
    plugins = {} if place == "after" else {"VLLM_PLUGINS": ""}
    asked = {"kv_transfer_config": several(*pair), "env": {"PYTHONPATH": str(HERE), **plugins}}
    engine = start(**asked)
    wanted = prompts(2, 1000)
    told = engine.generate(wanted)
    assert told["cached"] == [0, 0]
    assert engine.ask("quiet")[RESIDENT] >= 2 * 31
    assert engine.ask("reset")
    again = engine.generate(wanted)
    assert [again["tokens"], again["cached"]] == [told["tokens"], [992, 992]]
    engine.ask("quiet")
    engine.kill()
    # The first request after a start finds what is on the disk, though the engine was idle.
    engine = start(**asked)
    again = engine.generate(wanted)
    assert [again["tokens"], again["cached"]] == [told["tokens"], [992, 992]]
    engine.kill()


def test_beside_vllms_example_connector_both_serve(start, prompts, tmp_path):
    files = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")},
    }
    engine = start(
        kv_transfer_config=several(ours(tmp_path / "kv", OURS), files),
        disable_hybrid_kv_cache_manager=True,
    )
    (wanted,) = prompts(1, 1000)
    told = engine.generate([wanted])["tokens"]
    engine.ask("quiet")
    assert engine.ask("reset")
    again = engine.generate([wanted])
    assert [again["tokens"], again["cached"]] == [told, [992]]
    assert engine.ask("quiet")["vllm:kv_offload_load_bytes"] > 0
    engine.kill()


@pytest.mark.skipif(
    os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1",
    reason="Runner V2 of vLLM 0.33 goes on with other tokens itself after such a failure",
)
def test_nothing_is_stored_that_is_computed_on_what_another_connector_failed_to_load(
    start, prompts, tmp_path
):
    """vLLM computes the request again, and the connector learns of it after it ordered stores."""
    losing = {"kv_connector": "LosingConnector", "kv_connector_module_path": "sibling"}
    pair = several(ours(tmp_path / "kv", OURS), losing)
    engine = start(kv_transfer_config=pair, env={"PYTHONPATH": str(HERE)})
    warm, wanted = prompts(2, 1000)
    engine.generate([warm])
    engine.ask("quiet")
    assert engine.ask("reset")  # blocks hold what others have computed
    told = engine.generate([wanted])["tokens"]
    engine.ask("quiet")
    assert engine.ask("reset")
    again = engine.generate([wanted])
    assert again["tokens"] == told
    assert again["cached"] == [992], "what it computed the second time is stored"
    engine.kill()


def test_nor_where_the_request_was_preempted_before_vllm_knew(start, prompts, plugin, tmp_path):
    """For an outer producer vLLM preempts requests of a step in flight, and keeps their blocks."""
    tight = {"max_model_len": 448, "num_gpu_blocks_override": 15, "max_num_batched_tokens": 1024}
    (running,), (wanted,) = prompts(1, 64), prompts(1, 353, seed=1)
    plain = start(**tight)
    told = plain.generate([wanted])["tokens"]
    plain.kill()
    losing = {"kv_connector": "LosingConnector", "kv_connector_module_path": "sibling"}
    pair = several(ours(tmp_path / "kv", BY_PATH), losing) | {"kv_role": "kv_producer"}
    engine = start(kv_transfer_config=pair, env=plugin("truly_async"), **tight)
    assert engine.ask("steps_in_flight") == 2
    engine.generate(prompts(1, 300, seed=2))
    engine.ask("quiet")
    assert engine.ask("reset")  # blocks hold what others have computed
    # The next step takes the last block for the first request, and preempts the second one.
    assert engine.generate([running, wanted], [40, 16])["tokens"][1:] == told
    assert engine.ask("quiet")["vllm:num_preemptions"] > 0
    assert engine.ask("reset")
    again = engine.generate([wanted])
    assert [again["tokens"], again["cached"]] == [told, [352]]
    engine.kill()
