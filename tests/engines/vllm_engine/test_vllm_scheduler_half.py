"""The scheduler half when it has met its workers, without an engine."""

import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.v1.kv_offload.base import ReqContext

from kvoffload.connectors.vllm.manager_adapter import ManagerAdapter
from kvoffload.connectors.vllm.scheduler import KVOffloadScheduler
from kvoffload.connectors.vllm.settings import read_settings
from kvoffload.connectors.vllm.step_messages import WorkerInfo
from kvoffload.connectors.vllm.tier_index import LookupStores
from kvoffload.messages import make_offload_key

KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(8)]


@pytest.fixture
def met(monkeypatch):
    """Make a scheduler half that has met one worker, from settings; return it and its ledger."""
    made = []

    def meet(**settings):
        half = object.__new__(KVOffloadScheduler)  # vLLM's part of it wants a whole configuration
        half.adapter = ManagerAdapter()
        half.settings = read_settings(settings)
        half.meet_workers([WorkerInfo(4, 4096, {"rank": 0})])
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


def test_a_slot_that_a_tier_may_still_touch_on_one_rank_is_given_to_no_chunk(met):
    half, _ = met(cpu_bytes=16384)
    half.stores.close()
    ranks = [WorkerInfo(4, 4096, {"rank": rank}, first_slot=rank) for rank in range(2)]
    half.meet_workers(ranks)
    ledger = half.adapter.ledger
    keys = KEYS[:3]
    slots = ledger.prepare_store(keys, ReqContext("a")).store_spec.host_slots.tolist()
    assert sorted(slots) == [1, 2, 3]
    assert ledger.stats().host.capacity_bytes == 3 * 4096


def test_the_store_threshold_and_the_size_of_slots_reach_the_ledger(met):
    _, ledger = met(cpu_bytes=16384, store_threshold=2)
    first, second = (ReqContext(name) for name in "ab")
    ledger.touch(KEYS[:1], first)
    assert ledger.prepare_store(KEYS[:1], first).keys_to_store == ()
    ledger.touch(KEYS[:1], second)
    assert ledger.prepare_store(KEYS[:1], second).keys_to_store == tuple(KEYS[:1])
    assert ledger.stats().host.capacity_bytes == 4 * 4096


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
