"""Caches, views and attention on a GPU are those on the CPU."""

import pytest
import torch

from kvoffload.core.attention import init_attn_backend, prepare_attn_metadata
from kvoffload.core.interface import FullAttentionSpec, MambaSpec, ModelLimits, SlidingWindowSpec
from kvoffload.core.planning import get_kv_cache_config
from kvoffload.core.sdpa import SdpaPagedBackend
from kvoffload.core.tensors import canonicalize_kv_caches, init_kv_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = (16, 2, 64, torch.float32)
LIMITS = ModelLimits(64, 64)


@pytest.mark.parametrize("window", [None, 20])
def test_paged_attention_on_a_gpu_equals_the_cpu(window):
    torch.manual_seed(0)
    backend = SdpaPagedBackend(sliding_window=window)
    config = get_kv_cache_config(LIMITS, {"a": FullAttentionSpec(*SHAPE)}, 0, 40)
    lengths, tables = [50, 33, 7], [([3, 1, 4, 2],), ([9, 7, 8],), ([20],)]
    query, key, value = ([torch.rand(n, heads, 64) for n in lengths] for heads in (4, 2, 2))
    outputs = []
    for device in ("cpu", "cuda"):
        cache = init_kv_cache(config, {"a": backend}, device)["a"]
        builders = init_attn_backend(config, {"a": backend}, device)
        for start in (0, 1):
            done = [(n - 1) * start for n in lengths]
            counts = [1 if start else n - 1 for n in lengths]
            metadata = prepare_attn_metadata(config, builders, counts, done, tables, device)["a"]
            now = [slice(d, d + c) for d, c in zip(done, counts, strict=True)]
            step = [
                torch.cat([x[i][now[i]] for i in range(3)]).to(device) for x in (query, key, value)
            ]
            backend.write_kv(cache, step[1], step[2], metadata.slot_mapping)
            outputs.append(backend.attend(step[0], cache, metadata).cpu())
    assert torch.allclose(outputs[0], outputs[2], atol=1e-4)
    assert torch.allclose(outputs[1], outputs[3], atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_on_a_gpu_are_the_bytes_of_a_block(packed):
    state = MambaSpec(16, ((4, 8), (3, 4)), (torch.float32, torch.float16))
    specs = {
        "f": FullAttentionSpec(*SHAPE),
        "w": SlidingWindowSpec(*SHAPE, sliding_window=20),
        "s": state,
    }
    backends = dict.fromkeys("fw", SdpaPagedBackend())
    config = get_kv_cache_config(LIMITS, specs, 0, 60, packed=packed)
    rows = []
    for device in ("cpu", "cuda"):
        caches = init_kv_cache(config, backends, device)
        torch.manual_seed(1)
        caches["f"].copy_(torch.rand(caches["f"].shape))
        canonical = canonicalize_kv_caches(config, caches, backends)
        rows.append([tensor.tensor.cpu() for tensor in canonical.tensors])
    assert len(rows[0]) == len(rows[1])
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
