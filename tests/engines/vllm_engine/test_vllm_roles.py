"""Roles: which ones the connector takes, and what an outer producer may free too early."""

import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from benchmarks.vllm_parts.engine import ours
from kvoffload.connectors.vllm import register
from kvoffload.connectors.vllm.scheduler import KVOffloadScheduler
from kvoffload.errors import ConfigError

pytestmark = pytest.mark.timeout(900)
TIGHT = {"max_model_len": 192, "num_gpu_blocks_override": 7, "max_num_batched_tokens": 512}
EXTRA = {"cpu_bytes": "64MiB", "offload_prompt_only": False, "blocks_per_chunk": 1}


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_of_one_direction_is_refused_before_a_model_is_loaded(role):
    by_path = {"kv_connector_module_path": "kvoffload.connectors.vllm"}
    config = KVTransferConfig(kv_connector="KVOffloadConnector", kv_role=role, **by_path)
    register()  # as vLLM does it, before it has read its command line
    with pytest.raises(ConfigError, match=f"kv_role = '{role}': must be \"kv_both\""):
        KVConnectorFactory.get_connector_class(config)
    # The class may be asked for without its settings.
    with pytest.raises(ConfigError, match="kv_role"):
        KVOffloadScheduler(None, None, types.SimpleNamespace(kv_transfer_config=config), None)


def beneath(role):
    """Return a configuration of ``MultiConnector`` in this role, with our connector in it."""
    connectors = [ours(EXTRA)]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_a_request_that_ends_while_preempted_stores_no_block_of_another_one(
    start, prompts, plugin, role
):
    """Its last token was in flight when it lost its blocks.

    vLLM defers the freeing of such blocks for consumers alone.
    """
    engine = start(env=plugin("truly_async"), kv_transfer_config=beneath(role), **TIGHT)
    assert engine.ask("steps_in_flight") == 2
    (short,) = prompts(1, 40)
    for seed, length in enumerate((103, 104, 105)):
        (long,) = prompts(1, length, seed=1 + seed)
        assert engine.ask("reset", connector=True)
        made = engine.generate([long, short], [60, 25])["tokens"][1]
        engine.ask("quiet")
        assert engine.ask("reset")
        continued = short + made + [7, 8, 9]
        loaded = engine.generate([continued], 12)
        assert engine.ask("reset", connector=True)
        computed = engine.generate([continued], 12)
        assert computed["cached"] == [0]
        assert loaded["tokens"] == computed["tokens"], (length, loaded["cached"])
    assert engine.ask("metrics")["vllm:num_preemptions"] > 0
    engine.kill()
