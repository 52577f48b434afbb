import pytest
import torch

from kvoffload.core.sdpa import SdpaPagedBackend
from kvoffload.core.tensors import allocate_kv_cache, canonicalize_kv_caches, reshape_kv_cache


class BlocksFirst(SdpaPagedBackend):
    """The same attention over a cache whose blocks are outermost in memory."""

    def get_kv_cache_stride_order(self):
        return (1, 0, 2, 3, 4)


@pytest.mark.parametrize("backend", [SdpaPagedBackend(), BlocksFirst()], ids=["second", "first"])
def test_canonical_rows_are_the_bytes_of_a_block(plan, backend):
    config = plan(6)
    backends = dict.fromkeys(config.layer_specs, backend)
    caches = reshape_kv_cache(config, allocate_kv_cache(config, "cpu"), backends)
    for cache in caches.values():
        assert cache.shape == (2, 6, 4, 2, 8)
        cache.copy_(torch.rand(cache.shape))
    canonical = canonicalize_kv_caches(config, caches, backends)
    page = next(iter(config.layer_specs.values())).page_size_bytes
    assert canonical.block_bytes(0) == 2 * page
    for block in range(6):
        parts = [
            part.contiguous().view(torch.int8).flatten()
            for cache in caches.values()
            for part in cache[:, block]
        ]
        rows = [
            canonical.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes]
            for ref in canonical.group_data_refs[0]
        ]
        assert torch.equal(torch.cat(rows), torch.cat(parts))
