"""vLLM's offline interface with kvoffload: the second run of a prompt loads what the first stored.

python examples/vllm/offline.py [MODEL]    (without a model: a tiny one with random weights)
"""

import sys
import tempfile
from pathlib import Path

from tiny_model import make_model
from vllm import LLM, SamplingParams

KV_TRANSFER = {
    "kv_connector": "KVOffloadConnector",
    "kv_connector_module_path": "kvoffload.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",  # vLLM's default fails the request instead
    "kv_connector_extra_config": {
        "cpu_bytes": "256MiB",
        "backends": [{"type": "disk", "root": "/tmp/kvoffload-example", "capacity": "1GiB"}],
    },
}


def main() -> None:
    """Ask twice, and say how many tokens the second answer did not have to compute."""
    if len(sys.argv) > 1:
        options = {"model": sys.argv[1]}
    else:
        folder = Path(tempfile.mkdtemp())
        options = {"model": make_model(folder), "load_format": "dummy", "enforce_eager": True}
    llm = LLM(**options, block_size=32, max_model_len=4096, kv_transfer_config=KV_TRANSFER)
    prompt = {"prompt_token_ids": list(range(3, 500)) * 2}
    params = SamplingParams(temperature=0, max_tokens=16)
    first = llm.generate([prompt], params)[0]
    llm.reset_prefix_cache()  # GPU memory forgets; host memory and disk do not
    again = llm.generate([prompt], params)[0]
    print(f"cached: first {first.num_cached_tokens}, again {again.num_cached_tokens} tokens")
    print(f"same answer: {first.outputs[0].token_ids == again.outputs[0].token_ids}")


if __name__ == "__main__":
    main()
