"""A plug-in's policy that fails: the engine goes on, in the order of LRU."""

import logging

import pytest
from kvoffload_policies.fifo import FIFOPolicy
from manager_parts import keys, put

from kvoffload import registry
from kvoffload.connectors.builder import make_host_cache
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.guarded import GuardedPolicy
from kvoffload.testing import PolicySuite


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
def engine(monkeypatch):
    def new(policy, slots=6):
        registry._refusal.cache_clear()
        point = type("Point", (), {"value": "mine", "dist": None, "load": lambda self: policy})
        monkeypatch.setattr(registry, "_named", lambda group: {"mine": [point()]})
        return TieredOffloadingManager(make_host_cache("mine", slots, 1, ()))

    return new


@pytest.mark.parametrize("verb", ["add", "touch", "remove", "victims"])
def test_an_engine_goes_on_with_lru_where_a_call_of_a_policy_raises(engine, verb, caplog):
    manager = engine(failing(verb, raises))
    prompts = [keys(f"p{i}", 2) for i in range(20)]
    for number, prompt in enumerate(prompts):
        manager.touch(prompt)
        assert len(put(manager, prompt).keys_to_store) == 2
        manager.complete(manager.begin_load(prompt), (True, True))
        manager.retire(prompt)
        manager.check()
        assert manager.resident == min(6, 2 * number + 2)
    assert manager.lookup_prefix(prompts[-3]) == (2, False)  # the latest three are here
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert "Failing failed; LRU from now on" in record.getMessage()


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
        manager.check()


def test_policies_of_the_package_need_no_guard():
    host = make_host_cache("arc", 6, 1, ())
    assert isinstance(host.order.policy, ARCPolicy)
