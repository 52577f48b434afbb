"""LRU in the order of the host's table decides as LRU with a table of its own."""

import random

import pytest
from manager_parts import keys

from kvoffload.config import KNOWN_HINTS
from kvoffload.offload.base import ReqContext
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy
from tests.support.manager_check import check


class OwnTable(LRUPolicy):
    """The same policy; the host gives its table to no subclass."""


def evictions(policy_class, seed, priorities, slots):
    """Drive a manager at random; return what each store evicted."""
    rng = random.Random(seed)
    host = HostCache(slots, policy_class(slots))
    manager = TieredOffloadingManager(host, client_hints=KNOWN_HINTS)
    prompts = [keys(f"prompt {i}", rng.randrange(1, slots)) for i in range(12)]
    jobs, gone = [], []
    for step in range(400):
        prompt = rng.choice(prompts)
        hint = {"kvoffload": {"priority": rng.choice(priorities)}}
        context = ReqContext(f"r{step}", hint if step > 100 else None)
        action = rng.randrange(6)
        if action == 0:
            manager.touch(prompt, context)
        elif action == 1:
            manager.retire(prompt, context)
        elif action == 2 and (hits := manager.lookup_prefix(prompt, context)[0]):
            jobs.append(manager.begin_load(prompt[:hits], context))
        elif action == 3 and jobs:
            job = jobs.pop(rng.randrange(len(jobs)))
            manager.complete(job, [rng.random() < 0.9 for _ in job.keys])
        elif output := manager.prepare_store(prompt[: rng.randrange(len(prompt) + 1)], context):
            gone.append(output.evicted_keys)
            if output.job:
                jobs.append(output.job)
        check(manager)
    return gone


@pytest.mark.parametrize("slots", [5, 60])
@pytest.mark.parametrize("priorities", [(0,), (-1, 0, 0, 1)])
@pytest.mark.parametrize("seed", range(8))
def test_evictions_are_the_same(seed, priorities, slots):
    shared = evictions(LRUPolicy, seed, priorities, slots)
    assert any(shared)
    assert shared == evictions(OwnTable, seed, priorities, slots)


def test_the_host_keeps_no_second_table():
    policy = LRUPolicy(4)
    manager = TieredOffloadingManager(HostCache(4, policy))
    for name in "ab":
        manager.complete(manager.prepare_store(keys(name, 3)).job, [True] * 3)
    assert manager.resident == 4
    assert len(policy) == 0
