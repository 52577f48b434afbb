"""The connector's parts that need vLLM's classes but no running engine."""

import json
import logging
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
)

from kvoffload.connectors.spec import TieredOffloadingSpec
from kvoffload.connectors.vllm.caches import GpuEnd, canonical
from kvoffload.connectors.vllm.canary import sing
from kvoffload.connectors.vllm.connector import warn_of_settings
from kvoffload.connectors.vllm.facts import hash_root, weights_fingerprint
from kvoffload.connectors.vllm.jobs import Job, JobBook
from kvoffload.connectors.vllm.manager import ManagerAdapter
from kvoffload.connectors.vllm.messages import RankFacts, StepReport
from kvoffload.connectors.vllm.metrics import metric_definitions
from kvoffload.connectors.vllm.presence import LookupStores, RankedPresence
from kvoffload.connectors.vllm.scheduler import KVOffloadScheduler
from kvoffload.connectors.vllm.settings import read_settings
from kvoffload.connectors.vllm.versions import check_version, is_tested
from kvoffload.core.transfers import TransferResult, make_offload_key
from kvoffload.errors import ConfigError
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.offload.policies.lru import LRUPolicy
from kvoffload.transfer.worker import TransferWorker

KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(8)]


# ---- settings and versions ----


def test_a_misspelt_setting_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'cpu_bytes'"):
        read_settings({"cpu_byte": "1GiB"})


def test_settings_of_vllm_itself_are_left_to_it():
    settings = read_settings({"cpu_bytes": "1GiB", "spec_name": "KVOffloadSpec"})
    assert settings.cpu_bytes == 1 << 30


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "not installed"])
def test_an_untested_vllm_is_refused_and_the_message_names_range_and_override(version):
    with pytest.raises(ConfigError, match=r"0\.32 to 0\.33.*allow_untested_vllm"):
        check_version(allow_untested=False, text=version)
    check_version(allow_untested=True, text=version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0rc1"])
def test_tested_versions_pass(version):
    assert is_tested(version)


def _vllm_config(algorithm="sha256", policy="recompute"):
    return types.SimpleNamespace(
        cache_config=types.SimpleNamespace(prefix_caching_hash_algo=algorithm),
        kv_transfer_config=types.SimpleNamespace(kv_load_failure_policy=policy),
    )


def test_a_failure_policy_that_fails_requests_is_warned_about(caplog):
    settings = read_settings({"cpu_bytes": 1 << 20})
    warn_of_settings(_vllm_config(policy="fail"), settings)
    assert "A FAILED LOAD WILL FAIL ITS REQUEST" in caplog.text


def test_a_random_hash_root_is_found_out_and_the_remedy_named(caplog, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    settings = read_settings({"cpu_bytes": 1 << 20, "backends": [{"type": "memory"}]})
    assert not hash_root(_vllm_config("xxhash"))[1]
    warn_of_settings(_vllm_config("xxhash"), settings)
    assert "PYTHONHASHSEED" in caplog.text
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hash_root(_vllm_config("xxhash")) == ("7", True)
    caplog.clear()
    warn_of_settings(_vllm_config("sha256"), settings)
    assert not caplog.text


def test_weights_in_a_folder_are_told_apart(tmp_path):
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(model=str(tmp_path), seed=0),
        load_config=types.SimpleNamespace(load_format="auto"),
    )
    (tmp_path / "model.safetensors").write_bytes(b"a" * 100)
    first = weights_fingerprint(config)
    assert first == weights_fingerprint(config)
    (tmp_path / "model.safetensors").write_bytes(b"b" * 100)
    assert weights_fingerprint(config) != first


# ---- what ranks report ----


def report(job_id, ok, settled=True):
    made = StepReport()
    made.add(TransferResult(job_id, ok, settled))
    return made


def test_a_chunk_is_well_only_if_it_is_on_every_rank():
    both = report(1, (True, True, False)).aggregate(report(1, (True, False, True)))
    assert both.ok == {1: (True, False, False)}
    assert both.ended == {1: 2}


@pytest.fixture
def ledger():
    return TieredOffloadingManager(4, LRUPolicy(4))


def stored(ledger, keys):
    output = ledger.prepare_store(keys)
    return Job("store", output.keys_to_store, tuple(output.store_spec.host_slots.tolist()))


def test_a_store_counts_only_after_the_last_rank_and_only_where_all_have_it(ledger):
    book = JobBook(ledger, num_ranks=2)
    book.begin(5, stored(ledger, KEYS[:2]))
    assert book.take_in(report(5, (True, True))) == []
    assert ledger.lookup(KEYS[0]) is False
    (ended,) = book.take_in(report(5, (True, False)))
    assert ended.ok == (True, False)
    assert [ledger.lookup(key) for key in KEYS[:2]] == [True, False]
    ledger.check()


def test_a_failed_load_is_forgotten_before_anyone_can_look_again(ledger):
    book = JobBook(ledger, num_ranks=2)
    book.begin(1, stored(ledger, KEYS[:2]))
    book.take_in(report(1, (True, True)).aggregate(report(1, (True, True))))
    spec = ledger.prepare_load(KEYS[:2])
    book.begin(2, Job("load", tuple(KEYS[:2]), tuple(spec.host_slots.tolist())))
    book.take_in(report(2, (True, True)))
    book.take_in(report(2, (False, True)))
    assert ledger.lookup(KEYS[0]) is False
    assert ledger.lookup(KEYS[1]) is True
    assert ledger.busy_slots == 0


def test_slots_stay_out_of_use_until_every_rank_has_let_go(ledger):
    book = JobBook(ledger, num_ranks=2)
    book.begin(1, stored(ledger, KEYS[:1]))
    book.take_in(report(1, (False,), settled=False).aggregate(report(1, (True,))))
    assert ledger.busy_slots == 1
    later = StepReport()
    later.settled[1] = 1
    book.take_in(later)
    assert ledger.busy_slots == 0
    ledger.check()


def test_what_a_reset_overtook_ends_as_if_it_had_failed(ledger):
    book = JobBook(ledger, num_ranks=1)
    book.begin(1, stored(ledger, KEYS[:2]))
    ledger.reset_cache()
    book.mark_stale()
    book.take_in(report(1, (True, True)))
    assert [ledger.lookup(key) for key in KEYS[:2]] == [False, False]
    assert ledger.busy_slots == 0


def test_a_rank_that_lacks_its_part_makes_the_chunk_absent():
    class Here:
        def __init__(self, *keys):
            self.keys = set(keys)

        def holds(self, key):
            return key in self.keys

        def forget(self, keys):
            self.keys -= set(keys)

    presence = RankedPresence([], [Here(*KEYS[:2]), Here(KEYS[0])])
    assert [presence.holds(key) for key in KEYS[:3]] == [True, False, False]
    presence.written(KEYS[2:3])
    assert presence.holds(KEYS[2])
    presence.forget([KEYS[0], KEYS[2]])
    assert [presence.holds(key) for key in KEYS[:3]] == [False, False, False]


def test_the_scheduler_looks_into_the_namespaces_of_all_ranks_and_of_the_new_generation(tmp_path):
    settings = read_settings(
        {"cpu_bytes": 1 << 20, "backends": [{"type": "disk", "root": str(tmp_path / "kv")}]}
    )
    stores = LookupStores(settings, [{"rank": 0}, {"rank": 1}])
    before = stores.namespaces
    assert len(set(before)) == 2
    stores.renew("next")
    assert not set(before) & set(stores.namespaces)
    stores.close()


# ---- the adapter ----


def test_the_adapter_says_retry_only_for_what_is_on_its_way(ledger):
    adapter = ManagerAdapter()
    context = ReqContext("r")
    assert adapter.lookup(KEYS[0], context) is LookupResult.MISS
    adapter.attach(ledger, 4)
    book = JobBook(ledger, 1)
    book.begin(1, stored(ledger, KEYS[:1]))
    book.take_in(report(1, (True,)))
    assert adapter.lookup(KEYS[0], context) is LookupResult.HIT
    assert adapter.lookup(KEYS[1], context) is LookupResult.MISS
    assert adapter.lookup_prefix(KEYS[:2], context) == (1, False)


def test_every_metric_emitted_was_declared(ledger):
    adapter = ManagerAdapter()
    adapter.attach(ledger, 4)
    adapter.lookup_prefix(KEYS[:2], ReqContext("r"))
    adapter.stats.worker_counters["failed_missing"] = 2
    stats = adapter.get_stats()
    assert set(stats.data["data"]) <= set(metric_definitions())
    assert adapter.get_stats() is None


# ---- the scheduler half, without an engine ----


@pytest.fixture
def met(monkeypatch):
    """Make a scheduler half that has met one worker, from settings; return it and its ledger."""
    made = []

    def meet(**settings):
        half = object.__new__(KVOffloadScheduler)  # vLLM's part of it wants a whole configuration
        half.adapter = ManagerAdapter()
        half.settings = read_settings(settings)
        half.meet_workers([RankFacts(4, 4096, {"rank": 0})])
        made.append(half)
        return half, half.adapter.ledger

    yield meet
    for half in made:
        half.stores.close()


TWO_TIERS = [{"type": "memory"}, {"type": "memory"}]


@pytest.mark.parametrize(("promote", "nearer"), [(True, ["memory"]), (False, [])])
def test_the_setting_to_promote_reaches_the_ledger(met, promote, nearer):
    half, ledger = met(cpu_bytes=16384, backends=TWO_TIERS, promote=promote)
    half.stores.presences["memory1"].written(KEYS[:1])
    ledger.prepare_load(KEYS[:1])
    ledger.complete_load(KEYS[:1])
    assert [transfer.tier for transfer in ledger.take_transfers()] == nearer


def test_the_store_threshold_and_the_size_of_slots_reach_the_ledger(met):
    _, ledger = met(cpu_bytes=16384, store_threshold=2)
    first, second = (ReqContext(name) for name in "ab")
    ledger.touch(KEYS[:1], first)
    assert ledger.prepare_store(KEYS[:1], first).keys_to_store == ()
    ledger.touch(KEYS[:1], second)
    assert ledger.prepare_store(KEYS[:1], second).keys_to_store == tuple(KEYS[:1])
    assert ledger.stats()["host"]["capacity_bytes"] == 4 * 4096


def test_chunks_that_found_no_room_are_offered_again_while_their_request_runs(met):
    half, ledger = met(cpu_bytes=0, staging_bytes=16384, backends=[{"type": "memory"}])
    state = types.SimpleNamespace(offload_keys=KEYS[:4], next_stored_chunk_idx=0)
    request = types.SimpleNamespace(is_finished=lambda: request.over, over=False)
    half._req_status = {"r": types.SimpleNamespace(req=request, group_states=[state])}

    def offer():
        output = half.adapter.prepare_store(KEYS[:4], ReqContext("r"))
        state.next_stored_chunk_idx = 4  # as vLLM does, however much was taken
        half._offer_again()
        return output.keys_to_store

    assert offer() == KEYS[:2]  # half of four slots; the others are for loads
    assert state.next_stored_chunk_idx == 2
    assert offer() == []
    assert state.next_stored_chunk_idx == 2
    assert ledger.counters["store_refused"] == 0
    request.over = True
    assert offer() == []
    assert state.next_stored_chunk_idx == 4
    assert ledger.counters["store_refused"] == 2


# ---- blocks, chunks and the canary ----


def gpu_end(blocks, sizes, indices, group_ids, per_chunk):
    theirs = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=indices)
    return GpuEnd(theirs, group_ids, per_chunk)


def test_the_gpu_end_is_cut_into_chunks_the_first_of_a_group_may_be_a_part():
    end = gpu_end([7, 8, 9, 1, 2], [3, 2], [1, 0], [0, 2], per_chunk=2)
    assert end.chunks == [(0, (7,)), (0, (8, 9)), (2, (1, 2))]
    part = end.leading(2)
    assert part.block_ids.tolist() == [7, 8, 9]
    assert part.group_sizes == (3, 0, 0)
    assert part.block_indices == (1, 0, 0)


def test_groups_that_are_not_offloaded_keep_their_place():
    tensor = torch.zeros(4, 64, dtype=torch.int8)
    theirs = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, 64)],
        [[CanonicalKVCacheRef(0, 64)], [CanonicalKVCacheRef(0, 32)]],
    )
    ours = canonical(theirs, [0, 2])
    assert [len(refs) for refs in ours.group_data_refs] == [1, 0, 1]
    assert ours.block_bytes(2) == 32


@pytest.fixture
def attached(tmp_path, faulty):
    """Make a spec over a small KV cache, with a store that can be made to lie."""
    made = []

    def make(plans=()):
        tensor = torch.zeros(8, 4096, dtype=torch.int8)
        theirs = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, 4096)], [[CanonicalKVCacheRef(0, 4096)]]
        )
        ours = canonical(theirs, [0])
        settings = read_settings({"cpu_bytes": 1 << 20, "backends": faulty(plans)})
        spec = TieredOffloadingSpec(settings, 4096, {"test": "canary"})
        made.append(spec)
        return spec, TransferWorker(spec.get_handlers(ours)), ours, tensor

    yield make
    for spec in made:
        spec.close()


@pytest.fixture
def faulty(monkeypatch):
    from kvoffload import registry
    from kvoffload.backends.memory import MemoryBackend
    from kvoffload.testing.faults import FaultyBackend

    def configure(plans):
        class Factory:
            Options = MemoryBackend.Options

            def __new__(cls, options, namespace):
                return FaultyBackend(MemoryBackend(options, namespace), *plans)

        real = registry.load
        monkeypatch.setattr(
            registry,
            "load",
            lambda group, name, field="type": (
                Factory if name == "faulty" else real(group, name, field)
            ),
        )
        return [{"type": "faulty"}]

    return configure


def test_the_canary_is_content_and_leaves_no_trace(attached):
    spec, transfers, ours, tensor = attached()
    sing(spec, transfers, ours, 1)
    assert not tensor.any()


def test_the_canary_refuses_a_store_that_returns_other_bytes(attached):
    from kvoffload.testing.faults import Plan

    spec, transfers, ours, _ = attached([Plan("flip", frozenset({"read"}))])
    with pytest.raises(ConfigError, match="other bytes"):
        sing(spec, transfers, ours, 1)


def test_a_store_that_is_down_at_the_start_is_only_warned_about(attached, caplog):
    from kvoffload.testing.faults import Plan

    caplog.set_level(logging.WARNING)
    spec, transfers, ours, _ = attached([Plan("raise")])
    sing(spec, transfers, ours, 1)
    assert "took no chunk" in caplog.text


# ---- our backends under vLLM's own tiering ----


@pytest.fixture
def tier(tmp_path):
    from kvoffload.connectors.vllm.tier import KVOffloadTier

    rows = memoryview(bytearray(8 * 4096)).cast("B", (8, 4096))
    config = types.SimpleNamespace(
        model=types.SimpleNamespace(name="m", dtype="bfloat16"),
        kv_cache_layout="LBNHC",
        canonical_layout=False,
        groups=(),
        cache=types.SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=types.SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
    )
    made = KVOffloadTier(
        types.SimpleNamespace(config=config),
        rows,
        "KVOffloadTier",
        backend="disk",
        root=str(tmp_path / "kv"),
        min_free=0,
    )
    yield made, rows.cast("B")
    made.shutdown()


def _finished(tier):
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    return result


def test_a_backend_serves_as_a_secondary_tier_of_vllms_own_tiering(tier):
    from vllm.v1.kv_offload.tiering.base import TransferJob

    made, rows = tier
    context = ReqContext("r")
    rows[:4096] = b"a" * 4096
    rows[4096:8192] = b"b" * 4096
    made.submit_store(TransferJob(1, KEYS[:2], np.array([0, 1]), False, context))
    assert _finished(made).success
    assert made.lookup(KEYS[0], context) is LookupResult.HIT
    assert made.lookup(KEYS[2], context) is LookupResult.MISS
    made.submit_load(TransferJob(2, [KEYS[1], KEYS[2]], np.array([5, 6]), True, context))
    result = _finished(made)
    assert not result.success
    assert result.successful_keys == [KEYS[1]]
    assert bytes(rows[5 * 4096 : 6 * 4096]) == b"b" * 4096
    assert not made.has_pending_work()


def test_an_unknown_option_of_the_tier_is_refused(tmp_path):
    from kvoffload.config import convert
    from kvoffload.connectors.vllm.tier import TierOptions

    with pytest.raises(ConfigError, match="backend"):
        convert({"backand": "disk"}, TierOptions)


# ---- the rest ----


def test_json_of_the_documentation_is_accepted():
    text = (Path(__file__).parents[3] / "docs/vllm.md").read_text()
    examples = [part.split("```")[0] for part in text.split("```json")[1:]]
    assert examples
    for example in examples:
        extra = json.loads(example)["kv_connector_extra_config"]
        if "secondary_tiers" not in extra:
            read_settings(extra)


def test_block_ids_travel_as_plain_numbers():
    end = gpu_end(np.array([3, 4]).tolist(), [2], [0], [0], per_chunk=1)
    assert all(type(block) is int for _, blocks in end.chunks for block in blocks)
