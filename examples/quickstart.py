"""Offload a KV cache, lose it, and get it back: the whole library in one page.

Run it: ``python examples/quickstart.py``. No model here, only its memory: a cache of 64 blocks over
two layers. For a real engine around the same calls see ``kvoffload/demo``.
"""

import tempfile
import time

import torch

from kvoffload import LocalConnector, canonicalize_kv_caches
from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.core.interface import FullAttentionSpec, ModelLimits
from kvoffload.core.manager import KVCacheManager
from kvoffload.core.planning import get_kv_cache_config
from kvoffload.core.request import Request
from kvoffload.core.sdpa import SdpaPagedBackend
from kvoffload.core.tensors import allocate_kv_cache, reshape_kv_cache

# 1. Plan and allocate the cache of a small model.
BLOCK = 16
spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)
layers = {"layer.0": spec, "layer.1": spec}
limits = ModelLimits(max_model_len=512, max_num_batched_tokens=512)
plan = get_kv_cache_config(limits, layers, available_memory_bytes=4 << 20)
backends = dict.fromkeys(layers, SdpaPagedBackend())
caches = reshape_kv_cache(plan, allocate_kv_cache(plan, torch.device("cpu")), backends)
manager = KVCacheManager(plan, max_model_len=512)

# 2. Attach offloading: 8 MiB of host memory over a folder.
folder = tempfile.mkdtemp()
connector = LocalConnector(
    {
        "cpu_bytes": "8MiB",
        "blocks_per_chunk": 2,
        "backends": [{"type": "disk", "root": folder, "capacity": "64MiB"}],
    },
    canonicalize_kv_caches(plan, caches, backends),
    block_size=BLOCK,
    facts={"model": "quickstart", "weights": "none", "dtype": "float32"},
)

# 3. A request is computed: the engine fills its blocks, the connector stores the full ones.
prompt = list(range(200))
request = Request("first", HashChain(BlockHasher(BLOCK), prompt))
manager.allocate_slots(request, len(prompt))
(blocks,) = manager.get_block_ids("first")
for cache in caches.values():
    cache[:, blocks] = torch.randn_like(cache[:, blocks])  # the forward pass
computed = {name: cache[:, blocks[:12]].clone() for name, cache in caches.items()}
connector.after_forward(request, (blocks,), len(prompt))
connector.flush()
connector.request_finished(request)
manager.free(request)

# 4. GPU memory forgets everything...
manager.reset_prefix_cache()
for cache in caches.values():
    cache.zero_()

# 5. ...and the same prompt comes again: its blocks are loaded instead of computed.
again = Request("second", HashChain(BlockHasher(BLOCK), prompt))
_, hit = manager.get_computed_blocks(again)
external = connector.get_num_new_matched_tokens(again, hit)
manager.allocate_slots(
    again, 0, num_external_computed_tokens=external or 0, delay_cache_blocks=True
)
(blocks,) = manager.get_block_ids("second")
connector.update_state_after_alloc(again, (blocks,), external or 0)
while not (outcomes := connector.poll()):
    time.sleep(0.0001)
manager.cache_blocks(again, outcomes[0].num_loaded_tokens)

same = all(torch.equal(cache[:, blocks[:12]], computed[name]) for name, cache in caches.items())
print(f"{len(prompt)} prompt tokens, {hit} in GPU memory, {external} loaded: {outcomes[0]}")
print(f"restored bytes are identical: {same}")
connector.close()
