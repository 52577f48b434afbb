"""Host pools, ours and SGLang's own; and a storage that is attached to them without an engine."""

import hashlib
import types

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKOnlyPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvoffload.connectors.sglang import storage

PAGE, NUM_PAGES, WIDTH, LAYERS = 4, 64, 32, 3
TEXT = {"is_multimodal": False, "is_audio_model": False}


class Pool:
    """A host pool of two buffers, K and V, in pages of four tokens."""

    page_size, layout, dtype = PAGE, "page_first", torch.bfloat16

    def __init__(self, width=WIDTH):
        self.buffer = torch.randn(2, NUM_PAGES, PAGE, width).to(self.dtype)

    def get_page_buffer_meta(self, indices):
        pages = [int(i) // PAGE for i in indices[::PAGE]]
        parts = [self.buffer[half, page] for page in pages for half in range(2)]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]

    def get_dummy_flat_data_page(self):
        return torch.zeros_like(self.buffer[:, 0]).flatten()


def tokens(pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def hashes(count, start=0):
    return [hashlib.sha256(str(i).encode()).hexdigest() for i in range(start, start + count)]


def host_pool(kind, layout, num_pages=NUM_PAGES, v_width=8):
    """SGLang's own host pool of some layers, with random bytes."""
    shared = {
        "page_size": PAGE, "dtype": torch.bfloat16, "device": torch.device("cpu"),
    }  # fmt: skip
    where = {
        "host_to_device_ratio": 1.0, "host_size": 0, "page_size": PAGE, "layout": layout,
        "pin_memory": False, "device_capacity_tokens": num_pages * PAGE, "start_layer": 0,
        "end_layer": LAYERS,
    }  # fmt: skip
    if kind == "heads":
        rows = tuple(torch.zeros(num_pages * PAGE, 2, 8).bfloat16() for _ in range(LAYERS))
        places = torch.tensor([row.data_ptr() for row in rows], dtype=torch.uint64)
        buffers = KVBuffers(
            k=rows, v=rows, k_data_ptrs=places, v_data_ptrs=places, layout=KVBufferLayout.NHD
        )
        info = MHABufferInfo(
            buffers=buffers, head_num=2, head_dim=8, v_head_dim=v_width, **shared
        )  # fmt: skip
        pool = get_mha_host_pool_cls(info)(info, **where)
    else:
        rows = tuple(torch.zeros(num_pages * PAGE, 1, 24).bfloat16() for _ in range(LAYERS))
        info = MLABufferInfo(
            buffers=rows, data_ptrs=None, layer_indices=tuple(range(LAYERS)),
            device_layer_num=LAYERS, kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24,
            **shared,
        )  # fmt: skip
        pool = MLATokenToKVPoolHost(info, **where, target_layer_num=LAYERS)
    for part in pool.kv_buffer:
        part.copy_(torch.randn(part.shape))
    return pool


def index_pool(anchor, layout):
    """SGLang's own host pool of index keys, which belong to the pages of another pool."""
    device = MHATokenToKOnlyPool(anchor.size, PAGE, torch.bfloat16, 1, 8, LAYERS, "cpu", False)
    return MHATokenToKOnlyPoolHost(device, anchor, layout, pin_memory=False)


def state_pool(dtype, conv_dtype=torch.bfloat16, shape=(4, 16, 16), capacity=8):
    """SGLang's own host pool of recurrent states."""
    info = MambaStateBufferInfo(
        conv=(torch.zeros(2, capacity, 32, 3, dtype=conv_dtype),),
        temporal=torch.zeros(2, capacity, *shape, dtype=dtype),
    )
    where = {"pin_memory": False, "layout": "page_first_direct", "device_capacity": capacity}
    return MambaPoolHost(info, 2.0, 0, **where)


def v4_pool(name, item_bytes, layout="page_first", num_pages=NUM_PAGES):
    """SGLang's own host pool of a compressed part of DeepSeek V4, with random bytes."""
    rows = [torch.zeros(num_pages, item_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    pool = DeepSeekV4PagedHostPool(
        str(name), rows, item_bytes, num_pages, PAGE, layout, pin_memory=False
    )
    for part in pool.kv_buffer:
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
    return pool


def stored(hicache, count, until, start=0):
    keys = hashes(count, start)
    assert hicache.batch_set_v1(keys, tokens(range(count))) == [True] * count
    until(lambda: hicache.batch_exists(keys) == count)
    return keys


def attached(made, tmp_path, monkeypatch):
    """Return a function that attaches a storage to pools of an engine with known weights."""
    monkeypatch.setattr(storage, "process_model_config", lambda: types.SimpleNamespace(**TEXT))
    monkeypatch.setattr(storage, "engine_facts", lambda settings: {"weights": "w"})
    monkeypatch.setattr(storage, "check_hooks", lambda: None)
    plain = types.SimpleNamespace(disaggregation_mode="null", enable_pd_role_switch=False)
    monkeypatch.setattr(storage, "get_disagg", lambda: plain)
    serving = types.SimpleNamespace(enable_streaming_session=False)
    monkeypatch.setattr(storage, "get_serving", lambda: serving)
    one_host = types.SimpleNamespace(nnodes=1, tp_size=2, pp_size=1)
    monkeypatch.setattr(storage, "get_parallel", lambda: one_host)

    def begin(pool, side_pools=None, backends=None, v1=1, extra=None, **ranks):
        disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
        wanted = {
            "backend_name": "kvoffload",
            "module_path": "kvoffload.connectors.sglang",
            "class_name": "KVOffloadHiCache",
            "interface_v1": v1,
            "io": "thread",
            "staging_bytes": "1MiB",
            "backends": [disk] if backends is None else backends,
            **(extra or {}),
        }
        config = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
            "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": True,
            "is_page_first_layout": True, "model_name": "m",
        }  # fmt: skip
        config = HiCacheStorageConfig(**(config | ranks), extra_config=wanted)
        made.append(StorageBackendFactory.create_backend("dynamic", config, pool))
        made[-1].register_mem_pool_host(pool)
        for name, each in (side_pools or {}).items():
            made[-1].register_mem_host_pool_v2(each, name)
        made[-1].on_host_pools_registered()
        return made[-1]

    return begin
