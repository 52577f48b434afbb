"""SGLang's own host pools: each page comes back, and what its form means is in its key."""

import types

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvoffload.connectors.sglang import storage
from kvoffload.errors import ConfigError
from kvoffload.identity import namespace
from tests.engines.sglang_engine.host_pools import (
    NUM_PAGES,
    PAGE,
    Pool,
    hashes,
    host_pool,
    state_pool,
    stored,
    tokens,
)


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
