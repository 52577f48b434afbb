"""What HiCache calls, on host pools made here: each answer, each key, each form of a page."""

import json
import os
import queue
import re
import subprocess
import threading
import time
import types
import unittest.mock
from urllib.error import URLError

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
import torch
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.hicache_storage import (
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    CacheRequestHandle,
    HybridCacheController,
    PrefetchOperation,
)

from benchmarks.sglang.storage import compare
from kvoffload.cli.top import fetch, of_page
from kvoffload.connectors.sglang import KVOffloadHiCache, storage
from kvoffload.connectors.sglang.page_facts import check_version, warn_of_small_pages
from kvoffload.errors import ConfigError
from kvoffload.testing import Plan
from tests.engines.sglang_engine.host_pools import PAGE, WIDTH, Pool, hashes, stored, tokens
from tests.support.planned_store import installed
from tests.support.redis_server import free_port


def test_pages_come_back_in_place_in_another_engine(attach, until):
    first, second = Pool(), Pool()
    keys = stored(attach(first), 10, until)
    again = attach(second)
    assert isinstance(again, KVOffloadHiCache)
    until(lambda: again.batch_exists([*keys, *hashes(1, 90)]) == 10)
    assert again.batch_get_v1([*keys, *hashes(1, 90)], tokens(range(20, 31))) == [True] * 10 + [
        False
    ]
    assert torch.equal(second.buffer[:, 20:30], first.buffer[:, :10])
    told = again.get_stats()
    assert told.prefetch_pgs == [10]
    assert told.prefetch_bandwidth[0] > 0
    assert again.get_stats().prefetch_pgs == []
    found = REGISTRY.get_sample_value(
        "sglang:kvoffload_events_total", {"event": "loaded", "tp_rank": "0", "pp_rank": "0"}
    )
    assert found == 10


def test_each_rank_serves_metrics_at_a_port_of_its_own_until_it_is_detached(attach, monkeypatch):
    port = free_port()
    monkeypatch.setattr(storage, "process_number", lambda: 1)
    hicache = attach(Pool(), extra={"metrics_port": port})
    assert of_page(fetch(f"http://127.0.0.1:{port + 1}")).tiers["disk"]["up"] == 1
    with pytest.raises(ConfigError, match=r"metrics_port.*cannot be listened on"):
        attach(Pool(), extra={"metrics_port": port})
    hicache.close()
    again = attach(Pool(), extra={"metrics_port": port})
    again.close()
    with pytest.raises(URLError, match="refused"):
        fetch(f"http://127.0.0.1:{port + 1}")


def test_pages_without_v1_are_flat_and_kept_apart(attach, until):
    hicache, in_place = attach(Pool(), v1=0), attach(Pool())
    keys = hashes(5)
    values = [torch.randn(2 * PAGE * WIDTH).to(torch.bfloat16) for _ in keys]
    assert hicache.batch_set(keys, values) is True
    until(lambda: hicache.batch_exists(keys) == 5)
    into = [torch.zeros_like(value) for value in values]
    got = hicache.batch_get([*keys, *hashes(1, 90)], [*into, torch.zeros_like(values[0])])
    assert got[-1] is None
    assert all(map(torch.equal, got[:5], values))
    assert in_place.batch_exists(keys) == 0


def test_a_single_value_has_any_name(attach, until):
    hicache = attach(Pool())
    value = torch.arange(64, dtype=torch.uint8)
    assert not hicache.exists("a name")
    assert hicache.set("a name", value)
    until(lambda: hicache.exists("a name"))
    assert torch.equal(hicache.get("a name", torch.zeros_like(value)), value)
    assert hicache.get("another", torch.zeros_like(value)) is None
    assert not hicache.set("too large", torch.zeros(1 << 20))


@pytest.mark.parametrize(
    "other",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"is_mla_model": True},
    ],
)
def test_another_rank_hits_nothing(attach, until, other):
    keys = stored(attach(Pool()), 4, until)
    hicache = attach(Pool(), **other)
    assert hicache.batch_exists(keys) == 0
    assert hicache.batch_get_v1(keys, tokens(range(4))) == [False] * 4


def test_another_form_of_a_page_hits_nothing(attach, until):
    keys = stored(attach(Pool()), 4, until)
    for change in ({"layout": "layer_first"}, {"dtype": torch.float16}):
        pool = Pool()
        vars(pool).update(change)
        assert attach(pool).batch_exists(keys) == 0
    assert attach(Pool(width=2 * WIDTH)).batch_exists(keys) == 0


def test_a_served_name_is_a_label(attach, until):
    keys = stored(attach(Pool()), 4, until)
    until(lambda: attach(Pool(), model_name="n").batch_exists(keys) == 4)


def test_all_ranks_of_a_mla_model_share_pages(attach, until):
    keys = stored(attach(Pool(), is_mla_model=True, tp_size=2), 4, until)
    reader = attach(Pool(), is_mla_model=True, tp_rank=1, tp_size=2)
    until(lambda: reader.batch_exists(keys) == 4)


def test_ranks_of_context_parallelism_that_nobody_stores_for_are_refused(attach):
    ranks = {"tp_rank": 1, "tp_size": 2, "attn_cp_rank": 1, "attn_cp_size": 2}
    with pytest.raises(ConfigError, match=r"attn_cp_size.*--enable-prefill-cp"):
        attach(Pool(), is_mla_model=True, **ranks)
    assert attach(Pool(), **ranks)._config.is_storage_writer  # has pages of its own, and stores


def test_ranks_of_a_mla_model_on_several_hosts_need_a_tier_that_these_share(
    attach, monkeypatch, tmp_path
):
    two_hosts = types.SimpleNamespace(nnodes=2, tp_size=4, pp_size=1)
    monkeypatch.setattr(storage, "get_parallel", lambda: two_hosts)
    mla = {"is_mla_model": True, "tp_rank": 3}
    assert attach(Pool(), **mla, tp_size=2)  # attention of each host is a group of its own
    assert attach(Pool(), tp_rank=3, tp_size=4)._config.is_storage_writer
    with pytest.raises(ConfigError, match=r"nnodes = 2.*folder, redis or object"):
        attach(Pool(), **mla, tp_size=4)
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    shared = {"type": "redis", "url": "redis://127.0.0.1:1"}
    assert attach(Pool(), backends=[disk, shared], **mla, tp_size=4)
    two_hosts.pp_size = 2  # each stage is on one host
    assert attach(Pool(), **mla, tp_size=4)


def test_a_rank_of_a_mla_model_finds_at_once_what_rank_0_has_stored(attach):
    def rank(number):
        pools = {PoolName.INDEXER: Pool()}
        patient = {"lookup_timeout_s": 8.0}
        return attach(Pool(), pools, extra=patient, is_mla_model=True, tp_rank=number, tp_size=2)

    writer, reader = rank(0), rank(1)
    for turn in range(5):  # the copy of an index needs up to 2 s
        keys = hashes(6, 10 * turn)
        asked = [PoolTransfer(PoolName.INDEXER, tokens(range(6)), keys=keys)]
        assert reader.batch_exists(keys) == 0
        assert writer.batch_set_v1(keys, tokens(range(6))) == [True] * 6
        writer.batch_set_v2(asked)
        assert reader.batch_exists_v2([*keys, *hashes(3, 100)], asked).kv_hit_pages == 6
        assert reader.batch_get_v1(keys, tokens(range(10, 16))) == [True] * 6
        assert reader.batch_get_v2(asked) == {PoolName.INDEXER: [True] * 6}
    assert torch.equal(reader.mem_pool_host.buffer[:, 10:16], writer.mem_pool_host.buffer[:, :6])


def test_side_pools_restore_prefixes_by_their_policies(attach, until):
    kv, state, index = Pool(), Pool(), Pool()
    hicache = attach(kv, {PoolName.MAMBA: state, PoolName.INDEXER: index})
    keys = stored(hicache, 8, until)
    trailing = PoolTransfer(
        PoolName.MAMBA, tokens([2, 5]), keys=[keys[2], keys[5]],
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )  # fmt: skip
    every = PoolTransfer(PoolName.INDEXER, tokens(range(7)), keys=keys[:7])
    assert hicache.batch_set_v2([trailing, every]) == {
        PoolName.MAMBA: [True] * 2,
        PoolName.INDEXER: [True] * 7,
    }
    asked = [
        PoolTransfer(PoolName.MAMBA, keys=[keys[-1]], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        PoolTransfer(PoolName.INDEXER),
    ]

    def found():
        result = hicache.batch_exists_v2(keys, asked)
        return (result.kv_hit_pages, result.restorable_prefix_pages) == (6, [3, 6]) and result

    pools = until(found).extra_pool_hit_pages
    assert pools == {PoolName.KV: 8, PoolName.MAMBA: 6, PoolName.INDEXER: 7}
    wanted = PoolTransfer(PoolName.MAMBA, tokens([30, 31]), keys=[keys[5], keys[4]])
    assert hicache.batch_get_v2([wanted]) == {PoolName.MAMBA: [True, False]}
    assert torch.equal(state.buffer[:, 30], state.buffer[:, 5])


def test_pools_of_one_call_share_its_time(attach, until, tmp_path, monkeypatch):
    """SGLang ends itself if it empties its caches while a call lasts for 10 s."""
    planned = installed(tmp_path, monkeypatch)
    pools = [PoolName.INDEXER, PoolName.SWA, PoolName.DRAFT]
    backend = {"type": "planned", **planned.options}
    limits = {"load_timeout_s": 2.0}
    hicache = attach(Pool(), {name: Pool() for name in pools}, [backend], extra=limits)
    keys = stored(hicache, 4, until)
    asked = [PoolTransfer(name, tokens(range(4)), keys=keys) for name in pools]
    until(lambda: hicache.batch_set_v2(asked) == dict.fromkeys(pools, [True] * 4))
    until(lambda: hicache.batch_exists_v2(keys, asked).kv_hit_pages == 4)
    planned.set(Plan("hang", frozenset({"read"})))
    with unittest.mock.patch.object(
        hicache._store._client, "begin", wraps=hicache._store._client.begin
    ) as ordered:
        assert hicache.batch_get_v2(asked) == dict.fromkeys(pools, [False] * 4)
    assert ordered.call_count == 1
    assert hicache._store.figures.by_event()["load_deadline"] == 12
    planned.set()
    waits = set()

    def present(keys, num_listed, until_s=None):
        waits.add(until_s)
        return [True] * len(keys)

    monkeypatch.setattr(hicache._store._lookup, "present", present)
    assert hicache.batch_exists_v2(keys, asked).kv_hit_pages == 4
    (until_s,) = waits
    assert until_s is not None


@pytest.mark.parametrize("v1", [0, 1])
def test_side_pools_that_are_read_with_kv_pages_share_their_time(
    attach, until, tmp_path, monkeypatch, v1
):
    """SGLang reads both in one batch, and ends itself if it cannot stop that within 10 s."""
    planned = installed(tmp_path, monkeypatch)
    backend = {"type": "planned", **planned.options}
    pools = {PoolName.INDEXER: Pool()}
    hicache = attach(Pool(), pools, [backend], v1=v1, extra={"load_timeout_s": 2.0})
    controller = object.__new__(HybridCacheController)
    controller.storage_backend, controller.storage_host_pool = hicache, hicache.mem_pool_host
    read = controller._page_get_zero_copy if v1 else controller._generic_page_get
    controller.page_get_func = read
    keys, places = hashes(4), tokens(range(4))
    asked = [PoolTransfer(PoolName.INDEXER, places, keys=keys, indices_from_pool=PoolName.KV)]
    if v1:
        hicache.batch_set_v1(keys, places)
    else:
        hicache.batch_set(keys, [torch.zeros(2 * PAGE * WIDTH).bfloat16() for _ in keys])
    hicache.batch_set_v2(asked)
    until(lambda: hicache.batch_exists_v2(keys, asked).kv_hit_pages == 4)
    planned.set(Plan("hang", frozenset({"read"})))
    client = hicache._store._client
    with unittest.mock.patch.object(client, "begin", wraps=client.begin) as ordered:
        operation = types.SimpleNamespace(request_id="r")
        assert controller._page_transfer_kv_batch(operation, keys, places, None, asked) == 0
    assert ordered.call_count == 1  # of the KV pages, which took all of the time
    planned.set()
    alone = PoolTransfer(PoolName.INDEXER, places, keys=hashes(4))  # SGLang makes a list a call
    assert hicache.batch_get_v2([alone]) == {PoolName.INDEXER: [True] * 4}


def test_side_pools_of_one_prefix_share_their_time_with_keys_of_the_prefix(
    attach, until, tmp_path, monkeypatch
):
    """SGLang then makes a call for each number of pages, and ends itself as above."""
    planned = installed(tmp_path, monkeypatch)
    backend = {"type": "planned", **planned.options}
    names = [PoolName.SWA, PoolName.MAMBA]
    hicache = attach(Pool(), {name: Pool() for name in names}, [backend])
    keys = stored(hicache, 4, until)
    hicache.batch_set_v2([PoolTransfer(name, tokens(range(4)), keys=keys) for name in names])
    trailing = PoolHitPolicy.TRAILING_PAGES
    asked = [
        PoolTransfer(PoolName.SWA, tokens(range(3)), keys=keys[1:], hit_policy=trailing),
        PoolTransfer(PoolName.MAMBA, tokens(range(1)), keys=keys[3:], hit_policy=trailing),
    ]
    until(lambda: hicache.batch_exists_v2(keys, asked).kv_hit_pages == 4)
    controller = object.__new__(HybridCacheController)
    controller.storage_backend, controller.page_size = hicache, PAGE
    controller.mem_pool_host = types.SimpleNamespace(entry_map={})
    controller.prefetch_sync_queue = queue.SimpleQueue()
    waits = []
    load = hicache._store.load

    def loading(keys, pages, until_s):
        waits.append(until_s - time.monotonic())
        return load(keys, pages, until_s)

    monkeypatch.setattr(hicache._store, "load", loading)
    operation = PrefetchOperation(CacheRequestHandle("r", 0), [], prefix_keys=hashes(2, 50))
    operation.pool_transfers, operation.hash_value = asked, keys
    controller._page_transfer_sidecar(operation, 4)
    hits = controller.prefetch_sync_queue.get().pool_hits
    assert hits == {PoolName.SWA: 3, PoolName.MAMBA: 1}
    assert len(waits) == 2
    assert sum(waits) <= hicache._settings.load_timeout_s


def test_pages_of_side_pools_and_flat_pages_are_in_sglangs_metrics(attach, until):
    hicache = attach(Pool(), {PoolName.INDEXER: Pool()})
    moved = [PoolTransfer(PoolName.INDEXER, tokens(range(4)), keys=hashes(4))]
    hicache.batch_set_v2(moved)
    until(lambda: hicache._store.present(hicache._side_pools["indexer"].keys(hashes(4)), 4)[-1])
    hicache.batch_get_v2([PoolTransfer(PoolName.INDEXER, tokens(range(5)), keys=hashes(5))])
    told = hicache.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([4], [4])  # the fifth is not there
    assert told.backup_bandwidth[0] > 0 < told.prefetch_bandwidth[0]
    flat = attach(Pool(), v1=0)
    values = [torch.randn(2 * PAGE * WIDTH).to(torch.bfloat16) for _ in range(3)]
    assert flat.batch_set(hashes(3), values)
    until(lambda: flat.batch_exists(hashes(3)) == 3)
    flat.batch_get(hashes(3), values)
    told = flat.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([3], [3])


def test_a_pool_that_comes_later_with_larger_pages_restores_nothing(attach, until, caplog):
    large = Pool(WIDTH * 16)
    side = {PoolName.INDEXER: large}
    every = [PoolTransfer(PoolName.INDEXER, tokens(range(4)), keys=hashes(4))]
    failed = {PoolName.INDEXER: [False] * 4}
    early = attach(Pool(), side)  # has room for it
    stored(early, 4, until)
    assert early.batch_set_v2(every) == {PoolName.INDEXER: [True] * 4}
    until(lambda: early.batch_exists_v2(hashes(4), every).kv_hit_pages == 4)
    hicache = attach(Pool())
    until(lambda: hicache.batch_exists(hashes(4)) == 4)
    hicache.register_mem_host_pool_v2(large, PoolName.INDEXER)
    assert caplog.text.count("NOTHING OF IT IS STORED") == 1
    assert hicache.batch_set_v2(every) == hicache.batch_get_v2(every) == failed
    assert hicache.batch_exists_v2(hashes(4), every).kv_hit_pages == 0
    assert hicache._store.figures.by_event()["raised"] == 0
    small = Pool()  # one that fits
    hicache.register_mem_host_pool_v2(small, PoolName.MAMBA)
    fits = [PoolTransfer(PoolName.MAMBA, tokens(range(4)), keys=hashes(4))]
    assert hicache.batch_set_v2(fits) == {PoolName.MAMBA: [True] * 4}


def test_small_pages_are_warned_of_with_the_page_size_to_set(attach, caplog):
    attach(Pool())  # 512 bytes
    assert "a page of 4 tokens has 512 B on this rank" in caplog.text
    assert "set --page-size 2048, which makes pages of 256.0 KiB" in caplog.text


@pytest.mark.parametrize(
    ("page_bytes", "size"), [(0, None), (128 << 10, 32), ((128 << 10) + 1, None), (48 << 10, 128)]
)
def test_the_page_size_to_set_is_the_least_that_helps(caplog, page_bytes, size):
    warn_of_small_pages(16, page_bytes)
    assert ("--page-size" in caplog.text) == (size is not None)
    assert f"--page-size {size or ''}" in caplog.text or size is None


def test_one_call_looks_up_thousands_of_keys(attach, until):
    hicache = attach(Pool())
    keys = stored(hicache, 50, until)
    assert hicache.batch_exists([*keys, *hashes(5000, 1000)]) == 50


def test_a_clear_is_refused_unless_it_is_allowed(attach, until):
    hicache = attach(Pool())
    keys = stored(hicache, 4, until)
    with pytest.raises(ConfigError, match=r"allow_clear.*--admin-api-key"):
        hicache.clear()
    assert hicache.batch_exists(keys) == 4


def test_clear_removes_and_detach_ends_it(attach, until):
    hicache = attach(Pool(), extra={"allow_clear": True})
    keys = stored(hicache, 4, until)
    hicache.clear()
    assert hicache.batch_exists(keys) == 0
    stored(hicache, 4, until)
    hicache.close()
    hicache.close()
    assert hicache.batch_exists(keys) == 0
    assert hicache.batch_get_v1(keys, tokens(range(4))) == [False] * 4
    assert hicache.batch_set_v1(keys, tokens(range(4))) == [False] * 4
    again = attach(Pool())
    until(lambda: again.batch_exists(keys) == 4)


def test_a_value_that_is_none_is_not_stored(attach):
    assert attach(Pool()).set(hashes(1)[0], None) is False


def test_a_clear_that_fails_is_an_exception_for_which_sglang_answers_false(attach):
    nowhere = {"type": "redis", "url": "redis://127.0.0.1:1"}
    with pytest.raises(OSError, match="redis: "):
        attach(Pool(), backends=[nowhere], extra={"allow_clear": True}).clear()


def test_calls_on_two_threads_while_the_store_is_cleared(attach, until):
    hicache = attach(Pool(), extra={"allow_clear": True})
    keys, wrong = hashes(16), []

    def use(call):
        try:
            for _ in range(30):
                call()
        except Exception as error:
            wrong.append(error)

    calls = [
        lambda: hicache.batch_set_v1(keys, tokens(range(16))),
        lambda: hicache.batch_get_v1(keys, tokens(range(16, 32))),
        lambda: hicache.batch_exists(keys),
    ]
    threads = [threading.Thread(target=use, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    hicache.clear()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert hicache._store.figures.by_event()["raised"] == 0


def test_a_call_that_cannot_be_meant_is_a_miss(attach):
    hicache = attach(Pool())
    assert hicache.batch_get_v1(["not a hash"], tokens([0])) == [False]
    assert hicache.batch_get_v1(hashes(2), None) == [False, False]
    assert hicache.batch_exists(["not a hash"]) == 0


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"cpu_bytes": "1GiB"}, "host memory is HiCache's own"),
        ({"load_timeout": 3}, "did you mean 'load_timeout_s'"),
        ({"backends": []}, "name a tier"),
        ({"backends": [{"type": "disc"}]}, "did you mean 'disk'"),
        ({"blocks_per_chunk": 2}, "--page-size"),
    ],
)
def test_settings_that_cannot_work_are_refused(attach, extra, says):
    with pytest.raises(ConfigError, match=says):
        attach(Pool(), extra=extra)


def test_a_split_of_heads_that_sglang_has_taken_out_of_the_settings_is_refused(attach):
    with pytest.raises(ConfigError, match=r"tp_lcm_size.*--tp-size"):
        attach(Pool(), tp_lcm_size=4)


def test_versions_whose_keys_are_not_seeded_are_refused():
    check_version(False)
    with pytest.raises(ConfigError, match="cache_salt"):
        check_version(True, "0.5.22")
    with pytest.raises(ConfigError, match="allow_untested_sglang"):
        check_version(False, "0.6.0")
    check_version(True, "0.6.0")


def started(python, extra, options="enable_hierarchical_cache=True", **env):
    """Resolve the arguments of a start in another process, and return what it says in the end."""
    extra = {
        "backend_name": "k", "module_path": "kvoffload.connectors.sglang",
        "class_name": "KVOffloadHiCache", "backends": [{"type": "memory"}], **extra,
    }  # fmt: skip
    code = f"""
import sglang.srt.server_args as module
from sglang.srt.plugins import load_plugins
module.ServerArgs.resolve_once = lambda args: None
load_plugins()
args = module.ServerArgs(model_path="none", hicache_storage_backend="dynamic",
                         hicache_storage_backend_extra_config={json.dumps(extra)!r}, {options})
args.resolve_once()
"""
    command = [*python.command, "-c", code]
    env = {**os.environ, **env}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode
    return done.stderr


def test_a_wrong_setting_ends_the_start_before_a_model_is_loaded(imported):
    assert "host memory is HiCache's own" in started(imported, {"cpu_bytes": 1})


def test_a_start_without_hicache_is_refused(imported):
    """SGLang would serve, open no storage and not say so."""
    said = started(imported, {"trust_image_hashes": True}, "")
    assert re.search("enable_hierarchical_cache.*set --enable-hierarchical-cache", said)


@pytest.mark.parametrize(
    "options",
    [
        "disaggregation_mode='decode'",
        "enable_pd_role_switch=True, disaggregation_decode_enable_radix_cache=True",
    ],
)
def test_a_decode_instance_is_refused(imported, options):
    said = started(imported, {"trust_image_hashes": True}, options)
    assert re.search("disaggregation_.*prefill instances", said)


def test_a_decode_instance_is_refused_at_the_attach(attach, monkeypatch):
    decode = types.SimpleNamespace(disaggregation_mode="decode")
    monkeypatch.setattr(storage, "get_disagg", lambda: decode)
    with pytest.raises(ConfigError, match="disaggregation_mode"):
        attach(Pool())


def test_streaming_sessions_are_refused(imported, attach, monkeypatch):
    """The second request of a session ends SGLang's scheduler, whatever the storage is."""
    options = "enable_hierarchical_cache=True, enable_streaming_session=True"
    said = started(imported, {"trust_image_hashes": True}, options)
    assert re.search("enable_streaming_session.*leave it out", said)
    serving = types.SimpleNamespace(enable_streaming_session=True)
    monkeypatch.setattr(storage, "get_serving", lambda: serving)
    with pytest.raises(ConfigError, match="enable_streaming_session"):
        attach(Pool())


def test_engines_that_a_program_starts_in_processes_have_starts_of_their_own(imported):
    """Their weights would else have one name, also where each is sent other ones."""
    code = """
import multiprocessing, os
import sglang.srt.runtime_context as context
import sglang.srt.server_args as module
from sglang.srt.plugins import load_plugins
module.ServerArgs.resolve_once = lambda args: None
context._configure_context = lambda *args, **kwargs: None
load_plugins()
from kvoffload.connectors.sglang.engine_start import start_name

def start(tell):
    module.ServerArgs(model_path="none").resolve_once()
    context.publish(None, role="tokenizer")
    ranks = [fork.Process(target=rank, args=(tell,)) for _ in range(2)]
    for each in ranks:
        each.start()
        each.join()

def rank(tell):
    context.publish(None, role="scheduler")
    tell.put(start_name())

fork = multiprocessing.get_context("fork")
tell = fork.Queue()
start(tell)
for _ in range(2):
    process = fork.Process(target=start, args=(tell,))
    process.start()
    process.join()
print(*(tell.get(timeout=60) for _ in range(6)))
"""
    command = [*imported.command, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = said.split()[-6:]
    assert names[::2] == names[1::2]  # the ranks of a start
    assert len({*names}) == 3


def test_a_machine_that_cannot_compile_sglangs_hashes_ends_the_start(imported, tmp_path):
    said = started(
        imported,
        {"trust_image_hashes": True},
        TORCH_EXTENSIONS_DIR=str(tmp_path),
        CXX="false",
    )
    assert re.search("hicache_hash_cpp.*libssl-dev", said)


def test_sglangs_hashes_are_compiled_by_the_end_of_the_attach(attach):
    native_hash._load_native_hash_module.cache_clear()
    attach(Pool())
    assert native_hash._load_native_hash_module.cache_info().currsize == 1


def test_the_benchmark_starts_with_the_checks_of_today(tmp_path, capsys):
    """Each check may ask for settings that no engine publishes there."""
    names = ["file", "kvoffload", "direct"]
    options = types.SimpleNamespace(mib=1, rounds=1, stores=names, folder=str(tmp_path))
    compare(options, 64 << 10, is_full=False)
    rows = capsys.readouterr().out.splitlines()[-len(names) :]
    assert [row.split()[0] for row in rows] == names
