"""Every layout of a cache: shaped as the backend wants, seen as rows of a block's bytes."""

import pytest
import torch

from kvoffload.core.attention import (
    init_attn_backend,
    make_block_table,
    make_slot_mapping,
    prepare_attn_metadata,
)
from kvoffload.core.interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    ModelLimits,
    SlidingWindowSpec,
)
from kvoffload.core.planning import get_kv_cache_config
from kvoffload.core.sdpa import SdpaPagedBackend
from kvoffload.core.tensors import (
    allocate_kv_cache,
    bind_kv_cache,
    canonicalize_kv_caches,
    init_kv_cache,
    reshape_kv_cache,
)
from kvoffload.errors import KVCacheSpecError
from tests.support.layer_kinds import LatentPagedBackend

SHAPE = (4, 2, 8, torch.float32)
FULL = FullAttentionSpec(*SHAPE)
WINDOW = SlidingWindowSpec(*SHAPE, sliding_window=8)
LATENT = MLAAttentionSpec(4, 1, 24, torch.bfloat16)
STATES = MambaSpec(4, ((3, 5), (2, 2, 2)), (torch.float32, torch.float16))
LIMITS = ModelLimits(8, 4)


class Layout(SdpaPagedBackend):
    """A backend with a shape and memory order of its own."""

    def __init__(self, shape, order):
        super().__init__()
        self._shape, self._order = shape, order

    def get_kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_size):
        sizes = {"2": 2, "N": num_blocks, "B": block_size, "H": num_kv_heads, "D": head_size}
        return tuple(sizes[letter] for letter in self._shape)

    def get_kv_cache_stride_order(self):
        return self._order


LAYOUTS = {
    "2NBHD": Layout("2NBHD", (0, 1, 2, 3, 4)),
    "2NBHD, blocks first in memory": Layout("2NBHD", (1, 0, 2, 3, 4)),
    "2NBHD, heads before tokens": Layout("2NBHD", (0, 1, 3, 2, 4)),
    "N2BHD": Layout("N2BHD", (0, 1, 2, 3, 4)),
    "N2BHD, heads before tokens": Layout("N2BHD", (0, 1, 3, 2, 4)),
    "N2HBD": Layout("N2HBD", (0, 1, 2, 3, 4)),
    "heads outermost": Layout("2NBHD", (3, 0, 1, 2, 4)),
}


def fill(config, caches, backends):
    """Number every element, and say what bytes each block of each layer has."""
    generator = torch.Generator().manual_seed(0)
    pages = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            cache = caches[name]
            dim = 0
            if isinstance(cache, torch.Tensor):
                shape = backends[name].get_kv_cache_shape(config.num_blocks, 4, 2, 8)
                dim = shape.index(config.num_blocks)
                cache = (cache,)
            for part in cache:
                part.copy_(torch.rand(part.shape, generator=generator))
            pages[name] = [
                b"".join(
                    sorted_bytes(part.select(dim, block)) for part in cache
                )
                for block in range(config.num_blocks)
            ]  # fmt: skip
    return pages


def sorted_bytes(tensor):
    return bytes(sorted(tensor.contiguous().view(torch.uint8).flatten().tolist()))


def row_bytes(canonical, group, block):
    return b"".join(
        canonical.tensors[ref.tensor_idx]
        .tensor[block, : ref.page_size_bytes]
        .contiguous()
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for ref in canonical.group_data_refs[group]
    )


def check_rows(config, caches, backends):
    """See that a group's rows of a block hold the bytes of that block in all its layers.

    Layers of other groups share the memory, so each group is filled and looked at by itself.
    """
    canonical = canonicalize_kv_caches(config, caches, backends)
    for tensor in canonical.tensors:
        assert tensor.tensor.dtype == torch.int8
        assert tensor.tensor.shape == (config.num_blocks, tensor.page_size_bytes)
        assert tensor.tensor.stride(1) == 1
    for index, group in enumerate(config.kv_cache_groups):
        alone = KVCacheConfig(config.num_blocks, config.kv_cache_tensors, [group])
        pages = fill(alone, caches, backends)
        assert canonical.block_bytes(index) == sum(
            group.layer_spec(name).unpadded_page_size_bytes for name in group.layer_names
        )
        for block in range(config.num_blocks):
            expected = sorted(b"".join(pages[name][block] for name in group.layer_names))
            assert sorted(row_bytes(canonical, index, block)) == expected
    return canonical


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_the_bytes_of_a_block_in_every_layout(layout, packed):
    specs = {"a": FULL, "b": FULL}
    backends = dict.fromkeys(specs, LAYOUTS[layout])
    config = get_kv_cache_config(LIMITS, specs, 0, 7, packed=packed)
    caches = init_kv_cache(config, backends, "cpu")
    assert caches["a"].shape == LAYOUTS[layout].get_kv_cache_shape(7, 4, 2, 8)
    canonical = check_rows(config, caches, backends)
    if packed:  # a block of all layers is one piece
        assert len(canonical.tensors) == 1
        assert canonical.tensors[0].page_size_bytes == 2 * FULL.page_size_bytes


def test_memory_lies_in_the_order_the_backend_wants():
    backend = LAYOUTS["2NBHD, heads before tokens"]
    config = get_kv_cache_config(LIMITS, {"a": FULL}, 0, 7)
    cache = init_kv_cache(config, {"a": backend}, "cpu")["a"]
    assert cache.stride() == (7 * 64, 64, 8, 32, 1)
    assert cache.permute(0, 1, 3, 2, 4).is_contiguous()


@pytest.mark.parametrize("packed", [False, True])
def test_groups_of_different_kinds_overlay_the_same_bytes(packed):
    specs = {"f0": FULL, "w0": WINDOW, "w1": WINDOW, "f1": FULL, "w2": WINDOW, "w3": WINDOW}
    backends = dict.fromkeys(specs, LAYOUTS["2NBHD"])
    config = get_kv_cache_config(LIMITS, specs, 0, 9, packed=packed)
    caches = init_kv_cache(config, backends, "cpu")
    canonical = check_rows(config, caches, backends)
    used = [{ref.tensor_idx for ref in refs} for refs in canonical.group_data_refs]
    assert used[0] == used[1] == used[2]
    assert caches["f0"].data_ptr() == caches["w0"].data_ptr() == caches["w1"].data_ptr()


def test_a_group_with_fewer_layers_uses_the_front_of_a_packed_block():
    specs = {"f0": FULL, "f1": FULL, **{f"w{i}": WINDOW for i in range(5)}}
    backends = dict.fromkeys(specs, LAYOUTS["N2BHD"])
    config = get_kv_cache_config(LIMITS, specs, 0, 12, packed=True)
    assert [len(group.layer_names) for group in config.kv_cache_groups] == [2, 2, 2, 1]
    canonical = check_rows(config, init_kv_cache(config, backends, "cpu"), backends)
    assert len(canonical.tensors) == 1
    assert canonical.block_bytes(3) == FULL.page_size_bytes


@pytest.mark.parametrize("layout", ["2NBHD", "N2BHD"])
def test_states_and_attention_share_whole_pages(layout):
    specs = {"f": FULL, "m0": STATES, "m1": STATES}
    backends = {"f": LAYOUTS[layout]}
    config = get_kv_cache_config(LIMITS, specs, 0, 12)
    caches = init_kv_cache(config, backends, "cpu")
    conv, ssm = caches["m0"]
    assert (conv.shape, conv.dtype) == ((12, 3, 5), torch.float32)
    assert (ssm.shape, ssm.dtype) == ((12, 2, 2, 2), torch.float16)
    check_rows(config, caches, backends)
    # Writing one block's states leaves every other block's keys and values alone.
    caches["f"].zero_()
    conv[3], ssm[3] = 1, 1
    touched = caches["f"].view(torch.int32).ne(0).nonzero()
    dim = LAYOUTS[layout].get_kv_cache_shape(12, 4, 2, 8).index(12)
    assert set(touched[:, dim].tolist()) == {3}


def test_padding_is_not_part_of_a_row():
    padded = FullAttentionSpec(*SHAPE, page_size_padded=1024)
    backends = {"a": LAYOUTS["2NBHD"]}
    config = get_kv_cache_config(LIMITS, {"a": padded}, 0, 7)
    caches = init_kv_cache(config, backends, "cpu")
    canonical = check_rows(config, caches, backends)
    assert canonical.tensors[0].tensor.stride(0) == 1024
    assert canonical.block_bytes(0) == FULL.page_size_bytes


def test_a_latent_cache_is_one_row_a_layer():
    backend = LatentPagedBackend(value_size=16)
    config = get_kv_cache_config(LIMITS, {"a": LATENT}, 0, 7)
    cache = init_kv_cache(config, {"a": backend}, "cpu")["a"]
    assert cache.shape == (7, 4, 24)
    canonical = canonicalize_kv_caches(config, {"a": cache}, {"a": backend})
    assert [t.tensor.shape for t in canonical.tensors] == [(7, 4 * 24 * 2)]
    cache[3] = 1
    assert canonical.tensors[0].tensor.ne(0).any(dim=1).nonzero().flatten().tolist() == [3]


def test_latent_attention_equals_the_same_over_the_whole_prompt():
    torch.manual_seed(1)
    backend = LatentPagedBackend(value_size=16, scale=0.3)
    spec = MLAAttentionSpec(4, 1, 24, torch.float32)
    config = get_kv_cache_config(LIMITS, {"a": spec}, 0, 9)
    cache = init_kv_cache(config, {"a": backend}, "cpu")["a"]
    query, latent = torch.rand(11, 3, 24), torch.rand(11, 24)
    table = ([5, 2, 7],)
    for start, end in ((0, 6), (6, 11)):
        builders = init_attn_backend(config, {"a": backend})
        metadata = prepare_attn_metadata(config, builders, [end - start], [start], [table])["a"]
        backend.write_latent(cache, latent[start:end], metadata.slot_mapping)
        out = backend.attend(query[start:end], cache, metadata)
        scores = torch.einsum("thd,sd->hts", query, latent) * 0.3
        scores = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), float("-inf"))
        whole = torch.einsum("hts,sd->thd", scores.softmax(-1), latent[:, :16])
        assert torch.allclose(out, whole[start:end], atol=1e-5)


@pytest.mark.parametrize("lens", [[9], [9, 3, 14]])
def test_a_windowed_layer_sees_its_window_whatever_the_batch(lens):
    torch.manual_seed(2)
    backend = SdpaPagedBackend(sliding_window=5)
    spec = SlidingWindowSpec(*SHAPE, sliding_window=5)
    config = get_kv_cache_config(LIMITS, {"a": spec}, 0, 30)
    cache = init_kv_cache(config, {"a": backend}, "cpu")["a"]
    builders = init_attn_backend(config, {"a": backend})
    tables = [([8 * i + 1, 8 * i + 4, 8 * i + 2, 8 * i + 3],) for i in range(len(lens))]
    query, key, value = ([torch.rand(n, 2, 8) for n in lens] for _ in range(3))
    for step in (lambda n: (0, n - 2), lambda n: (n - 2, n - 1), lambda n: (n - 1, n)):
        spans = [step(n) for n in lens]
        now = [slice(*span) for span in spans]
        metadata = prepare_attn_metadata(
            config, builders, [b - a for a, b in spans], [a for a, _ in spans], tables
        )["a"]
        written = [torch.cat([x[i][now[i]] for i in range(len(lens))]) for x in (key, value)]
        backend.write_kv(cache, *written, metadata.slot_mapping)
        out = backend.attend(
            torch.cat([query[i][now[i]] for i in range(len(lens))]), cache, metadata
        )
        expected = []
        for i, n in enumerate(lens):
            far = torch.arange(n)[:, None] - torch.arange(n)
            scores = torch.einsum("thd,shd->hts", query[i], key[i]) / 8**0.5
            scores = scores.masked_fill((far < 0) | (far >= 5), float("-inf"))
            expected.append(torch.einsum("hts,shd->thd", scores.softmax(-1), value[i])[now[i]])
        assert torch.allclose(out, torch.cat(expected), atol=1e-5)


def test_the_longest_query_is_the_longest_not_the_sum():
    config = get_kv_cache_config(LIMITS, {"a": FULL}, 0, 30)
    builders = init_attn_backend(config, {"a": SdpaPagedBackend()})
    tables = [([1, 2],), ([3],), ([4, 5],)]
    metadata = prepare_attn_metadata(config, builders, [3, 1, 2], [2, 0, 4], tables)["a"]
    assert metadata.max_query_len == 3
    assert metadata.max_seq_len == 6
    assert metadata.query_start_loc.tolist() == [0, 3, 4, 6]
    assert metadata.seq_lens.tolist() == [5, 1, 6]
    assert metadata.num_computed_tokens_cpu.tolist() == [2, 0, 4]
    assert metadata.block_table_tensor.tolist() == [[1, 2], [3, 0], [4, 5]]
    assert metadata.slot_mapping.tolist() == [6, 7, 8, 12, 20, 21]


def test_each_group_has_its_own_tables_and_its_layers_share_metadata():
    config = get_kv_cache_config(LIMITS, {"f": FULL, "w": WINDOW}, 0, 30)
    builders = init_attn_backend(config, dict.fromkeys("fw", SdpaPagedBackend()))
    metadata = prepare_attn_metadata(config, builders, [2], [0], [([1], [2])])
    assert metadata["f"].slot_mapping.tolist() == [4, 5]
    assert metadata["w"].slot_mapping.tolist() == [8, 9]
    assert make_block_table([]).shape == (0, 1)
    assert make_slot_mapping([], [], [], 4).shape == (0,)


def test_layers_are_bound_to_their_caches():
    class Layer:
        kv_cache = None

    config = get_kv_cache_config(LIMITS, {"a": FULL, "b": FULL}, 0, 7)
    backends = dict.fromkeys("ab", SdpaPagedBackend())
    layers = {"a": Layer(), "b": Layer()}
    caches = init_kv_cache(config, backends, "cpu", layers)
    assert layers["b"].kv_cache is caches["b"]
    assert bind_kv_cache(caches, layers)[0] is caches["a"]
    with pytest.raises(KVCacheSpecError, match="differ in"):
        bind_kv_cache(caches, {"a": Layer()})


@pytest.mark.parametrize(
    ("shape", "order", "message"),
    [
        ("2NBHD", (0, 1, 2, 3), "names each dimension once"),
        ("2BHD", (0, 1, 2, 3), "exactly one dimension"),
        ("NBHD", (0, 1, 2, 3), "does not hold"),
    ],
)
def test_a_backend_whose_shape_does_not_fit_is_refused(shape, order, message):
    config = get_kv_cache_config(LIMITS, {"a": FULL}, 0, 7)
    with pytest.raises(KVCacheSpecError, match=message):
        init_kv_cache(config, {"a": Layout(shape, order)}, "cpu")


def test_plans_that_contradict_themselves_are_refused():
    group = KVCacheGroupSpec(["a"], FULL)
    page = FULL.page_size_bytes
    with pytest.raises(KVCacheSpecError, match="name different layers"):
        allocate_kv_cache(KVCacheConfig(2, [KVCacheTensor(2 * page, ["b"])], [group]), "cpu")
    with pytest.raises(KVCacheSpecError, match="multiple of num_blocks"):
        allocate_kv_cache(KVCacheConfig(2, [KVCacheTensor(2 * page + 1, ["a"])], [group]), "cpu")
    small = KVCacheConfig(2, [KVCacheTensor(page, ["a"])], [group])
    with pytest.raises(KVCacheSpecError, match="its format needs"):
        reshape_kv_cache(small, allocate_kv_cache(small, "cpu"), {"a": SdpaPagedBackend()})
    odd = MambaSpec(4, ((1,), (1,)), (torch.float16, torch.float32))
    with pytest.raises(KVCacheSpecError, match="largest first"):
        init_kv_cache(get_kv_cache_config(LIMITS, {"m": odd}, 0, 9), {}, "cpu")
