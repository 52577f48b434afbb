#!/bin/sh
# vllm serve with kvoffload: host memory, then local disk. Usage: serve.sh MODEL [more options]
set -eu
MODEL=$1; shift
exec vllm serve "$MODEL" --kv-transfer-config '{
  "kv_connector": "KVOffloadConnector",
  "kv_connector_module_path": "kvoffload.connectors.vllm",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {
    "cpu_bytes": "'"${KV_HOST:-8GiB}"'",
    "backends": [{"type": "disk", "root": "'"${KV_ROOT:-/var/tmp/kvoffload}"'", "capacity": "'"${KV_DISK:-200GiB}"'"}]
  }
}' "$@"
