#!/bin/sh
# A SGLang server with kvoffload below HiCache: local disk. Usage: serve.sh MODEL [more options]
# HOST_GB, KV_ROOT and KV_DISK say how much host memory, which folder and how much disk. A folder for
# itself on a fast disk is better than the default, which leaves 10 GiB to the others on /var/tmp.
set -eu
MODEL=$1; shift
exec "${PYTHON:-python3}" -m sglang.launch_server --model-path "$MODEL" \
  --enable-hierarchical-cache --hicache-size "${HOST_GB:-16}" --page-size 64 \
  --hicache-write-policy write_through --hicache-storage-prefetch-policy timeout \
  --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
  "backend_name": "kvoffload",
  "module_path": "kvoffload.connectors.sglang",
  "class_name": "KVOffloadHiCache",
  "interface_v1": 1,
  "backends": [{"type": "disk", "root": "'"${KV_ROOT:-/var/tmp/kvoffload}"'", "capacity": "'"${KV_DISK:-20GiB}"'", "min_free": "10GiB"}]
}' "$@"
