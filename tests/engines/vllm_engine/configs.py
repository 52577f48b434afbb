"""Real configurations of vLLM, as ``vllm serve`` makes them, and the facts that we make of them."""

import time

from kvoffload.connectors.vllm import engine_weights
from kvoffload.connectors.vllm.fingerprint import resolve_facts
from kvoffload.connectors.vllm.start import read_settings


def config_of(model, **options):
    """Make vLLM's configuration for a folder and options of the command line."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector="KVOffloadConnector",
        kv_role="kv_both",
        kv_connector_module_path="kvoffload.connectors.vllm",
        kv_connector_extra_config={"cpu_bytes": "16MiB"},
    )
    asked = {
        "model": str(model),
        "dtype": "bfloat16",
        "block_size": 32,
        "max_model_len": 4096,
        "seed": 0,
        "enforce_eager": True,
        **options,
    }
    return EngineArgs(**{"kv_transfer_config": transfer, **asked}).create_engine_config()


def facts_of(config, *, spec=None, replicated=False, **settings):
    """Return the facts of a rank with such a configuration, and a KV cache of four layers."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = spec or FullAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    group = KVCacheGroupSpec(layers, spec)
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    tensors = {name: torch.zeros(8, 2, 32, 128, dtype=torch.bfloat16) for name in layers}
    asked = read_settings({"cpu_bytes": "16MiB", "blocks_per_chunk": 1, **settings})
    engine_weights.process_begun_ns = time.time_ns  # the test has written the model itself
    return resolve_facts(config, cache, tensors, asked, replicated)
