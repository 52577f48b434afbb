import pytest
import torch
import torch.nn.functional as F

from kvoffload.core.attention import init_attn_backend, prepare_attn_metadata
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


def test_paged_attention_equals_attention_over_the_whole_prompt(plan):
    torch.manual_seed(0)
    config = plan(40)
    backend = SdpaPagedBackend()
    backends = dict.fromkeys(config.layer_specs, backend)
    cache = reshape_kv_cache(config, allocate_kv_cache(config, "cpu"), backends)["layers.0"]
    builders = init_attn_backend(config, backends)
    lengths = [13, 9, 21]
    tables = [([5, 3, 9, 1],), ([2, 4, 6],), ([10, 12, 11, 20, 22, 21],)]
    query, key, value = ([torch.rand(n, heads, 8) for n in lengths] for heads in (4, 2, 2))
    computed = [0, 0, 0]
    for step in ([13, 8, 7], [0, 1, 13], [0, 0, 1]):
        active = [i for i, n in enumerate(step) if n]
        metadata = prepare_attn_metadata(
            config, builders, [step[i] for i in active], [computed[i] for i in active],
            [tables[i] for i in active],
        )["layers.0"]  # fmt: skip
        now = {i: slice(computed[i], computed[i] + step[i]) for i in active}
        backend.write_kv(
            cache,
            torch.cat([key[i][now[i]] for i in active]),
            torch.cat([value[i][now[i]] for i in active]),
            metadata.slot_mapping,
        )
        out = backend.attend(torch.cat([query[i][now[i]] for i in active]), cache, metadata)
        whole = [
            F.scaled_dot_product_attention(
                query[i].transpose(0, 1), key[i].transpose(0, 1), value[i].transpose(0, 1),
                is_causal=True, enable_gqa=True,
            ).transpose(0, 1)[now[i]]
            for i in active
        ]  # fmt: skip
        assert torch.allclose(out, torch.cat(whole), atol=1e-5)
        computed = [done + n for done, n in zip(computed, step, strict=True)]
        assert metadata.max_query_len == max(step)
