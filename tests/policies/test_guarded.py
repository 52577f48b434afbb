"""A plug-in's policy that fails: engine, disk and server go on, in the order of LRU."""

import logging

import pytest
from disk_parts import ON_DISK, SIZE, chunk_bytes, open_disk
from kvoffload_policies.fifo import FIFOPolicy
from manager_parts import keys, put

from kvoffload import registry
from kvoffload.config import ByteSize
from kvoffload.connectors.builder import make_host_cache
from kvoffload.io.service.host_store import HostStore
from kvoffload.io.service.service import Service
from kvoffload.io.service.settings import read_serve_config
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.guarded import GuardedPolicy
from kvoffload.testing import PolicySuite
from kvoffload.testing.backends import CHUNK_BYTES, filled, keys_of, slots
from tests.support.manager_check import check

VERBS = ["add", "touch", "remove", "victims"]


class TestGuarded(PolicySuite):
    """While the plug-in's policy works, its order counts."""

    def make(self, capacity):
        return GuardedPolicy(FIFOPolicy, capacity)


def failing(verb, does):
    """Return a policy whose call fails from its sixth time on, after the check at the start."""

    def call(self, *given):
        self.calls = getattr(self, "calls", 0) + 1
        return getattr(FIFOPolicy, verb)(self, *given) if self.calls < 6 else does(*given)

    return type("Failing", (FIFOPolicy,), {verb: call})


def raises(*_):
    raise RuntimeError("a bug")


@pytest.fixture
def install(monkeypatch):
    """Install a policy as "mine"."""

    def install(policy):
        registry._refusal.cache_clear()
        point = type("Point", (), {"value": "mine", "dist": None, "load": lambda self: policy})
        monkeypatch.setattr(registry, "_named", lambda group: {"mine": [point()]})

    return install


@pytest.fixture
def engine(install):
    def new(policy, slots=6):
        install(policy)
        return TieredOffloadingManager(make_host_cache("mine", slots, 1, ()))

    return new


def assert_said_once(caplog):
    (record,) = (each for each in caplog.records if each.levelno >= logging.WARNING)
    assert "Failing failed; LRU from now on" in record.getMessage()


@pytest.mark.parametrize("verb", VERBS)
def test_an_engine_goes_on_with_lru_where_a_call_of_a_policy_raises(engine, verb, caplog):
    manager = engine(failing(verb, raises))
    prompts = [keys(f"p{i}", 2) for i in range(20)]
    for number, prompt in enumerate(prompts):
        manager.touch(prompt)
        assert len(put(manager, prompt).keys_to_store) == 2
        manager.complete(manager.begin_load(prompt), (True, True))
        manager.retire(prompt)
        check(manager)
        assert manager.resident == min(6, 2 * number + 2)
    assert manager.lookup_prefix(prompts[-3]) == (2, False)  # the latest three are here
    assert_said_once(caplog)


async def use(backend, size):
    """Store 20 chunks where 6 fit, remove and load each; the last ones are there."""
    chunks = keys_of(20)
    for key in chunks:
        assert await backend.write([key], filled([key], size)) == [True]
        await backend.remove([key])
        assert await backend.write([key], filled([key], size)) == [True]
        assert await backend.read([key, key], slots(2, size)) == [True, True]
    await backend.remove(chunks[-1:])
    assert await backend.contains(chunks[-6:]) == [True] * 5 + [False]


@pytest.mark.parametrize("verb", VERBS)
async def test_a_disk_goes_on_with_lru_where_a_call_of_a_policy_raises(
    install, tmp_path, verb, caplog
):
    install(failing(verb, raises))
    marks = {"high_watermark": 1.0, "low_watermark": 1.0}
    backend = open_disk(tmp_path, policy="mine", capacity=ByteSize(6 * ON_DISK), **marks)
    await use(backend, SIZE)
    assert backend.counters()["evicted"] == 14
    assert backend._store.root.quota.refresh() == chunk_bytes(tmp_path) == 5 * ON_DISK
    await backend.close()
    assert_said_once(caplog)


@pytest.mark.parametrize("verb", VERBS)
async def test_a_server_goes_on_with_lru_where_a_call_of_a_policy_raises(install, verb, caplog):
    install(failing(verb, raises))
    settings = read_serve_config({"socket": "/unused", "policy": "mine", "memory": 6 * CHUNK_BYTES})
    store = HostStore(Service(settings).memory, "namespace")
    await use(store, CHUNK_BYTES)
    await store.close()
    assert_said_once(caplog)


async def test_a_loan_costs_no_block_where_its_use_cannot_be_counted(install, caplog):
    install(failing("touch", raises))
    settings = read_serve_config({"socket": "/unused", "policy": "mine", "memory": 6 * CHUNK_BYTES})
    memory, chunks, sizes = Service(settings).memory, keys_of(7), [CHUNK_BYTES]
    store = HostStore(memory, "namespace")
    for key in chunks[:6]:
        assert await store.write([key], filled([key])) == [True]
        await store.verify([key], sizes)
    for key in chunks[5::-1]:  # the sixth use fails, and is one for LRU
        starts, end = store.lend([key], sizes)
        assert starts[0] >= 0
        end()
        assert memory.lent_bytes == 0
    assert await store.write(chunks[6:], filled(chunks[6:])) == [True]
    assert list(map(store.holds, chunks)) == [True] * 5 + [False, True]
    await store.close()
    assert_said_once(caplog)


@pytest.mark.parametrize(
    "named",
    [
        lambda held: [b"unknown" * 6],
        lambda held: [held[0], held[0]],
        lambda held: held[:3],
        lambda held: [],
        lambda held: None,
        lambda held: [[held[0]]],
    ],
    ids=["unknown", "twice", "too many", "none", "no list", "no keys"],
)
def test_wrong_victims_are_not_evicted(engine, named):
    held = keys("old", 6)
    manager = engine(failing("victims", lambda count: named(held)))
    for _ in range(6):
        put(manager, held)
        manager.reset_cache()
    put(manager, held)
    for i in range(8):
        assert len(put(manager, keys(f"new{i}", 2)).evicted_keys) == 2
        check(manager)


def test_policies_of_the_package_need_no_guard():
    host = make_host_cache("arc", 6, 1, ())
    assert isinstance(host.order.normal, ARCPolicy)
