"""What ranks report and what vLLM's scheduler asks, as the manager is told of it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _create_req_context
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvoffload.connectors.jobs import JobTable
from kvoffload.connectors.vllm.client_requests import ClientParams
from kvoffload.connectors.vllm.engine_metrics import metric_definitions
from kvoffload.connectors.vllm.manager_adapter import ManagerAdapter
from kvoffload.connectors.vllm.step_messages import WorkerReport
from kvoffload.connectors.vllm.tier_index import TierIndex
from kvoffload.messages import TransferResult, make_offload_key
from kvoffload.metrics.samples import packed
from kvoffload.offload.base import ReqContext as OurContext
from kvoffload.offload.base import tenant_id
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.offload.tiers import Presence
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.tenant_order import TenantOrder, TenantShares

KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(8)]


class Holds(Presence):
    """A tier that has every chunk."""

    def holds(self, key):
        return True

    def forget(self, keys):
        pass


@pytest.mark.parametrize(
    ("wished", "media"),
    [
        (None, {"DISK"}),
        ([{"medium": "storage"}], {"DISK"}),
        ([{"locality": "remote"}], {"REDIS1"}),
        ([{"medium": "storage", "locality": "local"}, {"locality": "remote"}], {"DISK"}),
        ([{"medium": "cpu"}], None),
        ([], None),
        ([{"medium": "tape"}], {"DISK"}),  # wrong: vLLM's own parser warns and takes all
    ],
)
def test_a_request_loads_from_the_tiers_that_it_names_to_vllm(wished, media):
    tiers = [Tier("disk", Holds()), Tier("redis1", Holds())]
    manager = TieredOffloadingManager(HostCache(4, LRUPolicy(4)), tiers)
    adapter = ManagerAdapter()
    adapter.attach(manager, 4)
    params = {} if wished is None else {"kv_load_tiers": wished}
    context = _create_req_context(
        SimpleNamespace(request_id="r", kv_transfer_params=params, kv_hints=None)
    )
    adapter.on_new_request(context)
    assert adapter.lookup(KEYS[0], context) is (LookupResult.HIT if media else LookupResult.MISS)
    assert adapter.lookup_prefix(KEYS[:2], context) == (2 if media else 0, False)
    if media:
        adapter.prepare_load(KEYS[:2], context)
        (job,) = adapter.take_jobs().values()
        assert set(job.media()) == media
    # Host memory is read whatever the request wishes, and every tier is written.
    job = adapter.prepare_store(KEYS[2:4], context)
    assert adapter.take_jobs()[job.store_spec.job_id].tiers is None


def test_wishes_of_tiers_that_vllm_has_and_we_do_not_are_told_once_and_counted(caplog):
    adapter = ManagerAdapter()
    wishes = ClientParams(adapter.count)
    for name in "abc":
        params = {"remote_prefiller": {"remote_host": "h"}, "do_remote_prefill": True}
        hints = object() if name == "b" else None
        assert wishes.of(SimpleNamespace(kv_transfer_params=params, kv_hints=hints)) is params
    said = [record.args[0] for record in caplog.records]
    assert said == ["remote_prefiller", "kv_hints"]
    assert +adapter.manager.counters == {"wishes_refused": 4}


def report(job_id, ok, settled=True):
    made = WorkerReport()
    made.ended.append(TransferResult(job_id, ok, settled))
    return made


@pytest.fixture
def manager():
    return TieredOffloadingManager(HostCache(4, LRUPolicy(4)))


def stored(manager, keys):
    return manager.prepare_store(keys).job


def test_a_failed_load_is_forgotten_before_anyone_can_look_again(manager):
    jobs = JobTable(manager, num_ranks=2)
    jobs.begin(1, stored(manager, KEYS[:2]))
    report(1, (True, True)).aggregate(report(1, (True, True))).answer(jobs)
    jobs.begin(2, manager.begin_load(KEYS[:2]))
    report(2, (True, True)).answer(jobs)
    report(2, (False, True)).answer(jobs)
    assert manager.lookup(KEYS[0]) is False
    assert manager.lookup(KEYS[1]) is True
    assert manager.busy_slots == 0


def test_a_job_that_settles_with_its_last_answer_ends_settled():
    tier = Tier("disk", TierIndex([0, 1], 1.0))
    tier.holds = lambda key: False
    manager = TieredOffloadingManager(HostCache(4, LRUPolicy(4)), [tier], 4)
    jobs = JobTable(manager, num_ranks=2)
    context = OurContext("r")
    for job_id, keys in ((1, KEYS[:2]), (2, KEYS[2:4])):
        manager.complete(manager.prepare_store(keys, context).job, (True, True))
        jobs.begin(job_id, *manager.take_transfers())
    manager.retire(KEYS[:4], context)
    report(1, (True, True)).aggregate(report(1, (True, True))).answer(jobs)
    report(2, (False, False), settled=False).answer(jobs)
    last = report(2, (True, True))
    last.settled.append(2)
    last.answer(jobs)
    assert manager.busy_slots == 0
    # The chunks took their place in the order of the ended request: its tail leaves first.
    assert manager.prepare_store(KEYS[4:8]).evicted_keys == tuple(KEYS[3::-1])


# ---- the adapter ----


def test_the_adapter_says_retry_only_for_what_is_on_its_way(manager):
    adapter = ManagerAdapter()
    context = ReqContext("r")
    assert adapter.lookup(KEYS[0], context) is LookupResult.RETRY  # the workers are to tell first
    adapter.attach(manager, 4)
    jobs = JobTable(manager, 1)
    jobs.begin(1, stored(manager, KEYS[:1]))
    report(1, (True,)).answer(jobs)
    assert adapter.lookup(KEYS[0], context) is LookupResult.HIT
    assert adapter.lookup(KEYS[1], context) is LookupResult.MISS
    assert adapter.lookup_prefix(KEYS[:2], context) == (1, False)


def test_every_metric_emitted_was_declared(manager):
    adapter = ManagerAdapter()
    adapter.attach(manager, 4)
    adapter.lookup_prefix(KEYS[:2], ReqContext("r"))
    adapter.worker_figures[0] = packed([("tier_up", ("disk",), 1)])
    adapter.stats.publish_all()
    told = set(adapter.get_stats().data["data"])
    assert {"vllm:kvoffload_events", "vllm:kvoffload_lookups", "vllm:kvoffload_tier_up"} <= told
    assert told <= set(metric_definitions())


def test_what_was_counted_before_the_manager_came_is_counted_on(manager):
    adapter = ManagerAdapter()
    adapter.note_request(ReqContext("r"), None, False)
    adapter.attach(manager, 4)
    adapter.count("hints_ignored")
    assert (manager.counters["requests_not_trusted"], manager.counters["hints_ignored"]) == (1, 1)


def test_a_salt_names_the_tenant_of_a_requests_chunks_until_it_ends():
    tenants = TenantShares(1.0)
    host = HostCache(4, TenantOrder(LRUPolicy(4), tenants))
    host.tell_tenants_apart(tenants)
    adapter = ManagerAdapter()
    adapter.attach(TieredOffloadingManager(host), 4)
    request = SimpleNamespace(request_id="r", kv_transfer_params={}, kv_hints=None)
    context = _create_req_context(request)
    adapter.note_request(context, "a salt", True)
    adapter.prepare_store(KEYS[:2], context)
    assert tenants.of == dict.fromkeys(KEYS[:2], tenant_id("a salt"))
    adapter.on_request_finished(context)
    adapter.prepare_store(KEYS[2:3], _create_req_context(request))
    assert tenants.of[KEYS[2]] == b""
