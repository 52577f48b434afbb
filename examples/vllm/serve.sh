#!/bin/sh
# A vLLM server with kvoffload: host memory, then local disk. Usage: serve.sh MODEL [more options]
# KV_HOST, KV_ROOT and KV_DISK say how much host memory, which folder and how much disk. A folder for
# itself on a fast disk is better than the default, which leaves 10 GiB to the others on /var/tmp.
# As `vllm serve` does, and also where that command does not start: in the wheel for CPU.
set -eu
MODEL=$1; shift
exec "${PYTHON:-python3}" -m vllm.entrypoints.openai.api_server --model "$MODEL" --kv-transfer-config '{
  "kv_connector": "KVOffloadConnector",
  "kv_connector_module_path": "kvoffload.connectors.vllm",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {
    "cpu_bytes": "'"${KV_HOST:-8GiB}"'",
    "backends": [{"type": "disk", "root": "'"${KV_ROOT:-/var/tmp/kvoffload}"'", "capacity": "'"${KV_DISK:-20GiB}"'", "min_free": "10GiB"}]
  }
}' "$@"
