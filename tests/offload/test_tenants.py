"""Shares of tenants in host memory: a flood evicts its own chunks, and nobody else's."""

import random

import pytest
from manager_parts import Store, keys, new_manager

from kvoffload.config import parse_config
from kvoffload.connectors.builder import make_host_cache, tenants_of
from kvoffload.errors import ConfigError
from kvoffload.offload.base import ReqContext, make_offload_key, tenant_id
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.tenant_order import TenantOrder, TenantShares
from kvoffload.registry import POLICIES, load
from kvoffload.testing import PolicySuite
from tests.support.manager_check import check

A, B = tenant_id("a"), tenant_id("b")


def context(tenant, name="r"):
    return ReqContext(name, tenant=tenant)


def put(manager, wanted, tenant):
    output = manager.prepare_store(wanted, context(tenant))
    manager.complete(output.job, [True] * len(output.job.keys))
    check(manager)
    return output.evicted_keys


def here(manager, wanted):
    return [key for key in wanted if manager.lookup(key)]


@pytest.mark.parametrize("name", ["lru", "arc", "handicap"])
def test_a_flood_evicts_its_own_chunks_once_it_is_above_its_share(name):
    settings = parse_config({"cpu_bytes": 1, "tenants": True, "tenant_share": 0.5, "policy": name})
    host = make_host_cache(name, 20, 1, (), tenants=tenants_of(settings))
    manager = TieredOffloadingManager(host)
    kept, flood = keys("b", 10), keys("a", 200)
    put(manager, kept, B)
    for start in range(0, 200, 4):
        gone = put(manager, flood[start : start + 4], A)
        assert not set(gone) & set(kept)
    assert here(manager, kept) == kept
    assert len(here(manager, flood)) == 10


def test_the_log_names_the_tiers_without_shares_where_shares_are_asked_for(caplog):
    tiers = [
        {"type": "disk", "root": "/kv"},
        {"type": "folder", "root": "/mnt"},
        {"type": "memory"},
    ]
    for share, backends in ((1.0, tiers), (0.5, tiers[:2]), (0.5, tiers)):
        assert not caplog.records
        tenants_of(
            parse_config(
                {"cpu_bytes": 1, "tenants": True, "tenant_share": share, "backends": backends}
            )
        )
    (record,) = caplog.records
    assert "no shares of tenants on memory: " in record.getMessage()
    caplog.clear()
    served = {"cpu_bytes": 1, "tenants": True, "tenant_share": 0.5, "serve": "/run/s"}
    tenants_of(parse_config(served))
    assert not caplog.records  # a server has a setting of its own


def test_a_share_is_no_limit_while_there_is_room_and_is_given_back_when_it_is_needed():
    manager = new_manager(20, tenant_share=0.5)
    put(manager, keys("a", 20), A)
    assert len(here(manager, keys("a", 20))) == 20
    gone = put(manager, keys("b", 10), B)
    assert len(gone) == 10
    assert len(here(manager, keys("b", 10))) == len(here(manager, keys("a", 20))) == 10


def test_requests_without_a_salt_are_one_tenant_and_a_use_counts_within_a_tenant():
    manager = new_manager(8, tenant_share=0.5)
    put(manager, keys("b", 4), B)
    for i in range(4):
        put(manager, keys(f"plain{i}", 1), b"")
    manager.touch(keys("plain0", 1))
    put(manager, keys("more", 1), b"")
    assert len(here(manager, keys("b", 4))) == 4
    assert here(manager, keys("plain0", 1))
    assert not here(manager, keys("plain1", 1))


def test_chunks_from_a_tier_belong_to_the_request_that_loads_them():
    wanted = keys("a", 6)
    manager = new_manager(8, [Store(wanted)], tenant_share=0.5)
    put(manager, keys("b", 4), B)
    for part in (wanted[:3], wanted[3:]):
        job = manager.begin_load(part, context(A))
        assert job.keys == tuple(part)
        assert job.spec.fetches[0].tenants == (A, A, A)
        check(manager)
        manager.complete(job, [True] * 3)
        check(manager)
    assert len(here(manager, keys("b", 4))) == 4
    assert manager._host.tenants_of(wanted[3:]) == [A] * 3


def test_chunks_of_several_sizes_count_by_their_bytes():
    tenants = TenantShares(0.5)
    host = make_host_cache("lru", 40, 4096, (4096, 3 * 4096), tenants=tenants)
    manager = TieredOffloadingManager(host)
    mine = [make_offload_key(f"b{i}".encode() * 8, i % 2) for i in range(8)]
    put(manager, mine, B)
    for i in range(60):
        put(manager, [make_offload_key(f"a{i}".encode() * 8, i % 2)], A)
    assert len(here(manager, mine)) == 8


def test_failed_stores_and_resets_leave_nothing_counted():
    manager = new_manager(8, tenant_share=0.5)
    output = manager.prepare_store(keys("a", 4), context(A))
    manager.complete(output.job, [True, False, True, False])
    check(manager)
    assert manager._host._tenants._bytes == {A: 2}
    manager.reset_cache()
    check(manager)
    assert manager._host._tenants._bytes == {}


@pytest.mark.parametrize("seed", range(8))
def test_tables_agree_after_random_steps(seed):
    rng = random.Random(seed)
    tier = Store()
    manager, jobs = new_manager(12, [tier], tenant_share=rng.choice([0.2, 0.5, 1.0])), []
    prompts = {tenant: keys(repr(tenant), 12) for tenant in (A, B, b"")}
    for _ in range(400):
        tenant = rng.choice([A, B, b""])
        first = rng.randrange(12)
        some = prompts[tenant][first : first + rng.randrange(1, 5)]
        step = rng.randrange(4)
        if step == 0 and (output := manager.prepare_store(some, context(tenant))) and output.job:
            jobs.append(output.job)
        elif step == 1 and (job := manager.begin_load(some, context(tenant))).keys:
            jobs.append(job)
        elif step == 2:
            manager.touch(some)
        elif jobs:
            job = jobs.pop(rng.randrange(len(jobs)))
            manager.complete(job, [rng.random() < 0.8 for _ in job.keys])
        for job in manager.take_transfers():
            tier.held.update(job.keys)
            jobs.append(job)
        check(manager)


class TestOrder(PolicySuite):
    """Without a tenant above its share, the order is a policy like any other."""

    def make(self, capacity):
        return TenantOrder(LRUPolicy(capacity), TenantShares(1.0))


@pytest.mark.parametrize("name", ["lru", "arc", "handicap"])
def test_without_a_tenant_above_its_share_each_decision_is_the_policys_own(name):
    rng, names = random.Random(5), [b"%d" % i for i in range(40)]
    plain = load(POLICIES, name)(16)
    shared = TenantOrder(load(POLICIES, name)(16), TenantShares(1.0))
    for _ in range(2000):
        some = rng.sample(names, 3)
        there = [key for key in some if key in plain]
        for order in (plain, shared):
            order.remove(there)
            order.add(some)
            order.touch(some)
        if len(plain) > 16:
            assert list(plain.victims(len(plain) - 16)) == list(shared.victims(len(shared) - 16))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tenants": True, "tenant_share": 0}, "tenant_share"),
        ({"tenants": True, "tenant_share": 1.5}, "tenant_share"),
        ({"tenants": True, "tenant_share": float("nan")}, "tenant_share"),
        ({"tenant_share": 0.5}, "tenant_share"),
        ({"tenants": "yes"}, "tenants"),
    ],
)
def test_shares_that_mean_nothing_are_refused(settings, field):
    with pytest.raises(ConfigError) as caught:
        parse_config({"cpu_bytes": 1, **settings})
    assert caught.value.field == field


@pytest.mark.parametrize("salt", ["", None, "a", "\ud800", 7])
def test_any_salt_names_a_tenant_or_none(salt):
    assert len(tenant_id(salt)) == (16 if salt else 0)
