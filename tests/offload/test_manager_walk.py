"""Random walks over the manager: any order of calls, completions late, failed, partial, unsettled.

What a walk may do and what it checks is in ``tests/helpers/manager_walk.py``.
"""

import logging
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from manager_walk import LENGTH, PROMPTS, Walk

from kvoffload.policies.arc import ARCPolicy
from kvoffload.policies.handicap import HandicapPolicy
from kvoffload.policies.lru import LRUPolicy

ORDERS = [LRUPolicy, LRUPolicy, ARCPolicy, HandicapPolicy]
"""One without notes on pinned keys, one with ghosts, one that learns."""
HINTS = [
    None,
    None,
    None,
    {"offload": False},
    {"tiers": ["t1"]},
    {"tiers": []},
    {"priority": -1},
    {"priority": 2, "unheard_of": 1},
]
SHARES = [0.0, 0.3, 0.9, 0.9, 1.0]
TENANTS = ["", "", "a", "b"]
RETURNS = [
    None,
    {"returns_in_s": 3},
    {"returns_in_s": 9, "session": "a"},
    {"returns": "never", "session": "a"},
    {"returns": "soon", "session": "b"},
    {"session": "b"},
]
GOOD = [-1, -1, -1, 0, 1, 2, 5]
"""Which chunks of a transfer arrive, as bits."""


@pytest.fixture(autouse=True)
def _quiet():
    """Second completions are part of the walk; the lines they log would fill the screen."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class ManagerMachine(RuleBasedStateMachine):
    staging = False

    @initialize(
        slots=st.integers(1, 12),
        tiers=st.integers(0, 2),
        persisting=st.integers(0, 8),
        threshold=st.sampled_from([1, 1, 2, 3]),
        sized=st.booleans(),
        policy=st.sampled_from(ORDERS),
        share=st.sampled_from(SHARES),
    )
    def start(self, **how):
        self.walk = Walk(
            how["slots"],
            how["tiers"],
            how["persisting"],
            how["threshold"],
            how["sized"],
            how["policy"],
            self.staging,
            how["share"],
        )

    @rule(
        prompt=st.integers(0, PROMPTS - 1),
        tenant=st.sampled_from(TENANTS),
        hint=st.sampled_from(HINTS),
    )
    def queue(self, prompt, tenant, hint):
        self.walk.queue(prompt, tenant, hint)

    @rule()
    def serve_queue(self):
        self.walk.serve_queue()

    @rule(which=st.integers(0, 9))
    def preempt(self, which):
        self.walk.preempt(which)

    @rule(which=st.integers(0, 9))
    def admit(self, which):
        self.walk.admit(which)

    @rule(which=st.integers(0, 9))
    def abort(self, which):
        self.walk.abort(which)

    @rule(
        prompt=st.integers(0, PROMPTS - 1),
        start=st.integers(0, LENGTH - 1),
        hint=st.sampled_from(HINTS),
    )
    def load(self, prompt, start, hint):
        self.walk.load(prompt, start, hint)

    @rule(
        which=st.integers(0, 9),
        good=st.sampled_from(GOOD),
        settled=st.booleans(),
    )
    def end_load(self, which, good, settled):
        self.walk.end_load(which, good, settled)

    @rule(
        prompt=st.integers(0, PROMPTS - 1),
        count=st.integers(1, LENGTH),
        hint=st.sampled_from(HINTS),
    )
    def store(self, prompt, count, hint):
        self.walk.store(prompt, count, hint)

    @rule(
        which=st.integers(0, 9),
        good=st.sampled_from(GOOD),
        settled=st.booleans(),
    )
    def end_store(self, which, good, settled):
        self.walk.end_store(which, good, settled)

    @rule()
    def take_transfers(self):
        self.walk.take_transfers()

    @rule(
        which=st.integers(0, 9),
        good=st.sampled_from(GOOD),
        settled=st.booleans(),
    )
    def end_transfer(self, which, good, settled):
        self.walk.end_transfer(which, good, settled)

    @rule(
        which=st.integers(0, 9),
        good=st.sampled_from(GOOD),
        settled=st.booleans(),
    )
    def end_early_read(self, which, good, settled):
        self.walk.end_early_read(which, good, settled)

    @rule(which=st.integers(0, 19))
    def answer_again(self, which):
        self.walk.answer_again(which)

    @rule(which=st.integers(0, 9))
    def settle(self, which):
        self.walk.settle(which)

    @rule(t=st.integers(0, 1), p=st.integers(0, PROMPTS - 1), i=st.integers(0, LENGTH - 1))
    def evict_below(self, t, p, i):
        self.walk.evict_below(t, p, i)

    @rule(t=st.integers(0, 1), prompt=st.integers(0, PROMPTS - 1))
    def others_write(self, t, prompt):
        self.walk.others_write(t, prompt)

    @rule(t=st.integers(0, 1), answer=st.sampled_from([True, True, False, None]))
    def tier_answers(self, t, answer):
        self.walk.tier_answers(t, answer)

    @rule(tokens=st.sampled_from([10, 1000]))
    def compute(self, tokens):
        self.walk.compute(tokens)

    @rule(prompt=st.integers(0, PROMPTS - 1), told=st.sampled_from(RETURNS))
    def touch(self, prompt, told):
        self.walk.touch(prompt, told)

    @rule(prompt=st.integers(0, PROMPTS - 1), told=st.sampled_from(RETURNS))
    def retire(self, prompt, told):
        self.walk.retire(prompt, told)

    @rule(prompt=st.integers(0, PROMPTS - 1))
    def explain(self, prompt):
        self.walk.explain(prompt)

    @rule()
    def reset(self):
        self.walk.reset()

    @rule()
    def replace_tiers(self):
        self.walk.replace_tiers()

    @invariant()
    def consistent(self):
        if hasattr(self, "walk"):
            self.walk.check()

    def teardown(self):
        if hasattr(self, "walk"):
            self.walk.drain()


class StagingMachine(ManagerMachine):
    staging = True


TestManagerMachine, TestStagingMachine = ManagerMachine.TestCase, StagingMachine.TestCase
TestManagerMachine.settings = TestStagingMachine.settings = settings(
    max_examples=200,  # of each: 20,000 rules in all; the walks below carry out 50,000 more
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)


def random_walk(rng):
    return Walk(
        rng.randrange(1, 14),
        rng.randrange(3),
        rng.choice([None, 0, 2, 8]),
        rng.choice([1, 1, 2]),
        rng.random() < 0.5,
        rng.choice(ORDERS),
        rng.random() < 0.4,
        rng.choice(SHARES),
    )


def random_steps(walk, rng, steps):
    for _ in range(steps):
        a, b, settled = rng.randrange(100), rng.choice(GOOD), rng.random() < 0.9
        prompt, i = rng.randrange(PROMPTS), rng.randrange(LENGTH)
        hint = rng.choice(HINTS) if rng.random() < 0.3 else None
        if rng.random() < 0.1:
            walk.answer_again(rng.randrange(20))
        match rng.randrange(26):
            case 20 | 21:
                walk.queue(prompt, rng.choice(TENANTS), hint)
            case 22:
                walk.admit(a)
            case 23:
                walk.abort(a)
            case 24:
                walk.serve_queue()
            case 25:
                walk.preempt(a)
            case 0 | 1 | 2 | 3:
                walk.load(prompt, i, hint)
            case 4 | 5 | 6:
                walk.end_load(a, b, settled)
            case 7 | 8 | 9:
                walk.store(prompt, i + 1, hint)
            case 10 | 11 | 12:
                walk.end_store(a, b, settled)
            case 13 | 14:
                walk.take_transfers()
            case 15 | 16:
                walk.end_transfer(a, b, settled)
                walk.end_early_read(a, b, settled)
            case 17:
                walk.settle(a)
            case 18:
                walk.evict_below(a, prompt, i)
            case _:
                seldom(walk, rng, a, prompt)
        walk.check()


def seldom(walk, rng, a, prompt):
    if a < 6:
        walk.reset()
    elif a < 10:
        walk.replace_tiers()
    elif a < 20:
        walk.others_write(a, prompt)
    elif a < 40:
        walk.tier_answers(a, rng.choice([True, True, False, None]))
    elif a < 50:
        walk.compute(rng.choice([10, 1000]))
    elif a < 60:
        walk.explain(prompt)
    elif a < 80:
        walk.touch(prompt, rng.choice(RETURNS))
    else:
        walk.retire(prompt, rng.choice(RETURNS))


@pytest.mark.parametrize("seed", range(25))
def test_no_order_of_calls_breaks_the_manager(seed):
    rng = random.Random(seed)
    for _ in range(4):
        walk = random_walk(rng)
        random_steps(walk, rng, 500)
        walk.drain()


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_million_steps():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(1000):
        walk = random_walk(rng)
        random_steps(walk, rng, 1000)
        walk.drain()
