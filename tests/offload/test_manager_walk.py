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

from kvoffload.offload import waiting
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
TIER_ANSWERS = [True, True, False, None]
PROMPT, PLACE = st.integers(0, PROMPTS - 1), st.integers(0, LENGTH - 1)
WHICH, TIER = st.integers(0, 9), st.integers(0, 1)
HINT, TOLD = st.sampled_from(HINTS), st.sampled_from(RETURNS)
ANSWER = {"which": WHICH, "good": st.sampled_from(GOOD), "settled": st.booleans()}


@pytest.fixture(autouse=True)
def _quiet():
    """Second completions are part of the walk; the lines they log would fill the screen."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch):
    """Claims on these short prompts come and end over several calls, as those on long ones do."""
    monkeypatch.setattr(waiting, "PORTION", 2)


def calls(name, **drawn):
    """Return a rule that takes a step of the walk with drawn values."""

    def step(self, **values):
        getattr(self.walk, name)(**values)

    return rule(**drawn)(step)


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

    queue = calls("queue", prompt=PROMPT, tenant=st.sampled_from(TENANTS), hint=HINT)
    serve_queue = calls("serve_queue")
    preempt = calls("preempt", which=WHICH)
    ask = calls("ask", which=WHICH)
    admit = calls("admit", which=WHICH)
    abort = calls("abort", which=WHICH)
    load = calls("load", prompt=PROMPT, start=PLACE, hint=HINT)
    end_load = calls("end_load", **ANSWER)
    store = calls("store", prompt=PROMPT, count=st.integers(1, LENGTH), hint=HINT)
    end_store = calls("end_store", **ANSWER)
    take_transfers = calls("take_transfers")
    end_transfer = calls("end_transfer", **ANSWER)
    end_early_read = calls("end_early_read", **ANSWER)
    answer_again = calls("answer_again", which=st.integers(0, 19))
    settle = calls("settle", which=WHICH)
    evict_below = calls("evict_below", tier=TIER, prompt=PROMPT, i=PLACE)
    others_write = calls("others_write", tier=TIER, prompt=PROMPT)
    tier_answers = calls("tier_answers", tier=TIER, answer=st.sampled_from(TIER_ANSWERS))
    compute = calls("compute", tokens=st.sampled_from([10, 1000]))
    touch = calls("touch", prompt=PROMPT, told=TOLD)
    retire = calls("retire", prompt=PROMPT, told=TOLD)
    explain = calls("explain", prompt=PROMPT)
    reset = calls("reset")
    replace_tiers = calls("replace_tiers")

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
    max_examples=100,  # of each: 10,000 rules in all; the walks below carry out 20,000 more
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
        match rng.randrange(27):
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
            case 26:
                walk.ask(a)
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
        walk.tier_answers(a, rng.choice(TIER_ANSWERS))
    elif a < 50:
        walk.compute(rng.choice([10, 1000]))
    elif a < 60:
        walk.explain(prompt)
    elif a < 80:
        walk.touch(prompt, rng.choice(RETURNS))
    else:
        walk.retire(prompt, rng.choice(RETURNS))


@pytest.mark.parametrize("seed", range(10))
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
