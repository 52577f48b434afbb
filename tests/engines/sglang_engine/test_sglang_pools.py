"""SGLang's own host pools: each page comes back, and what its form means is in its key."""

import types

import pytest

pytest.importorskip("sglang.srt.managers.scheduler")  # its processes are hooked
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.plugins.hook_registry import HookRegistry

from kvoffload.connectors.sglang import register, storage
from kvoffload.errors import ConfigError
from kvoffload.identity import namespace
from tests.engines.sglang_engine.host_pools import (
    NUM_PAGES,
    PAGE,
    Pool,
    hashes,
    host_pool,
    index_pool,
    state_pool,
    stored,
    tokens,
    v4_pool,
)
from tests.support.host_server import HostServer


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_sglangs_own_pools_in_each_layout(attach, until, kind, layout):
    first, second = host_pool(kind, layout), host_pool(kind, layout)
    is_mla = {"is_mla_model": kind == "latent"}
    keys = stored(attach(first, **is_mla), 6, until)
    again = attach(second, **is_mla)
    until(lambda: again.batch_exists(keys) == 6)
    assert again.batch_get_v1(keys, tokens(range(20, 26))) == [True] * 6
    for page in range(6):
        loaded = second.get_data_page((20 + page) * PAGE, flat=True)
        assert torch.equal(loaded, first.get_data_page(page * PAGE, flat=True))
    for other in {"layer_first", "page_first", "page_first_direct"} - {layout}:
        assert attach(host_pool(kind, other), **is_mla).batch_exists(keys) == 0


def test_pages_come_from_a_server_of_the_host_that_another_engine_has_left(attach, until, tmp_path):
    server = HostServer(tmp_path)
    first, second = Pool(), Pool()
    settings = {"backends": [], "extra": {"serve": server.path}}
    try:
        engine = attach(first, **settings)
        keys = stored(engine, 6, until)
        engine.close()
        again = attach(second, **settings)
        until(lambda: again.batch_exists(keys) == 6)
        assert again.batch_get_v1(keys, tokens(range(20, 26))) == [True] * 6
        assert torch.equal(second.buffer[:, 20:26], first.buffer[:, :6])
        server.kill()
        assert again.batch_get_v1(keys, tokens(range(6))) == [False] * 6
        server.start()
        until(lambda: again.batch_set_v1(keys, tokens(range(20, 26))) == [True] * 6)
        until(lambda: again.batch_exists(keys) == 6)
    finally:
        server.kill()


def test_pages_of_deepseek_v4_whose_kv_pool_has_no_memory(attach, until):
    names = (PoolName.DEEPSEEK_V4_C4, PoolName.DEEPSEEK_V4_C128)
    keys = hashes(6)

    def attached(v1):
        pools = {name: v4_pool(name, 64 + 64 * i) for i, name in enumerate(names)}
        anchor = LogicalHostPool(NUM_PAGES * PAGE, PAGE)
        return attach(anchor, pools, is_mla_model=True, v1=v1), pools

    def moved(pages):
        return [PoolTransfer(name, tokens(pages), keys=keys) for name in names]

    first, source = attached(v1=1)
    asked = [PoolTransfer(name) for name in names]
    assert first.batch_set_v1(keys, tokens(range(6))) == [True] * 6
    assert first.batch_exists_v2(keys, asked).kv_hit_pages == 0  # what has bytes decides
    assert first.batch_set_v2(moved(range(6))) == dict.fromkeys(names, [True] * 6)
    again, target = attached(v1=1)
    until(lambda: again.batch_exists_v2(keys, asked).kv_hit_pages == 6)
    assert again.batch_get_v1(keys, tokens(range(20, 26))) == [True] * 6
    assert again.batch_get_v1(hashes(2, 90), tokens(range(2))) == [False] * 2
    assert again.batch_get_v2(moved(range(20, 26))) == dict.fromkeys(names, [True] * 6)
    for name in names:
        assert torch.equal(target[name].kv_buffer[20:26], source[name].kv_buffer[:6])
    flat, _ = attached(v1=0)
    assert flat.batch_exists(keys) == 0


def test_pools_that_tell_no_page_are_refused(attach):
    anchor = LogicalHostPool(NUM_PAGES * PAGE, PAGE)
    with pytest.raises(ConfigError, match="no pool has memory"):
        attach(anchor)
    anchor.size_per_token = 4
    with pytest.raises(ConfigError, match="does not tell where its pages are"):
        attach(anchor)


def test_pools_without_pages_for_a_storage_are_refused_with_what_to_set(attach):
    heads = host_pool("heads", "layer_first")
    index = {PoolName.INDEXER: index_pool(heads, "layer_first")}
    says = r"KOnlyPoolHost.*layer_first; set --hicache-mem-layout page_first"
    with pytest.raises(ConfigError, match=says):
        attach(heads, index)
    narrow = host_pool("heads", "page_first", v_width=4)  # V of other heads than K
    with pytest.raises(ConfigError, match=r'AsymmetricMHA.*set "interface_v1": 1'):
        attach(narrow, v1=0)
    attach(narrow, {PoolName.INDEXER: index_pool(heads, "page_first")})


def test_recurrent_states_of_other_dtypes_and_shapes_have_other_keys():
    told = [
        namespace(**storage.HostPool(pool).facts)
        for pool in (
            state_pool(torch.bfloat16),
            state_pool(torch.float16),
            state_pool(torch.bfloat16, torch.float16),
            state_pool(torch.bfloat16, shape=(16, 4, 16)),
        )
    ]
    assert len({*told}) == 4
    larger = storage.HostPool(state_pool(torch.bfloat16, capacity=16))
    assert namespace(**larger.facts) == told[0]  # a size is no fact


@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_the_size_of_a_pool_is_no_fact(kind):
    small = storage.HostPool(host_pool(kind, "page_first"))
    large = storage.HostPool(host_pool(kind, "page_first", 2 * NUM_PAGES))
    assert large.pool.size != small.pool.size
    assert large.facts == small.facts


def test_ranks_of_a_mla_model_have_their_own_heads_of_a_draft(attach):
    pools = {
        PoolName.DRAFT: host_pool("heads", "page_first"),
        PoolName.DRAFT_SWA: host_pool("latent", "page_first"),
        PoolName.MAMBA: state_pool(torch.bfloat16),
    }
    first, second = (
        attach(host_pool("latent", "page_first"), pools, is_mla_model=True, tp_size=2, tp_rank=rank)
        for rank in range(2)
    )
    shared = {
        str(name): first._side_pools[str(name)].keys(hashes(2))
        == second._side_pools[str(name)].keys(hashes(2))
        for name in pools
    }
    assert shared == {"draft": False, "draft_swa": True, "mamba": False}


def test_each_rank_of_a_mla_model_stores_its_own_heads_of_a_draft(attach):
    register()
    HookRegistry.apply_hooks()
    pools = {
        PoolName.DRAFT: host_pool("heads", "page_first"),
        PoolName.DRAFT_SWA: host_pool("latent", "page_first"),
        PoolName.MAMBA: state_pool(torch.bfloat16),
    }
    kv = host_pool("latent", "page_first")
    ours = attach(kv, pools, is_mla_model=True, tp_size=2, tp_rank=1)
    controller = object.__new__(HybridCacheController)
    controller.storage_backend_type, controller.storage_backend = "dynamic", ours
    controller.storage_config = ours._config
    stores = {str(name): controller.should_backup(PoolTransfer(name)) for name in pools}
    assert stores == {"draft": True, "draft_swa": False, "mamba": True}
    controller.storage_backend = object()  # another storage, whose keys do not name the rank
    assert not controller.should_backup(PoolTransfer(PoolName.DRAFT))


def test_a_model_with_images_is_refused_at_the_attach(attach, monkeypatch):
    pictures = types.SimpleNamespace(
        is_multimodal=True,
        is_audio_model=False,
        hf_config=types.SimpleNamespace(architectures=None),
    )
    monkeypatch.setattr(storage, "process_model_config", lambda: pictures)
    with pytest.raises(ConfigError, match="trust_image_hashes"):
        attach(Pool())
    attach(Pool(), extra={"trust_image_hashes": True})
