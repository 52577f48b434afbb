"""The order by expected return: which chunk leaves first, and what claims cost."""

import random
import tracemalloc
from itertools import pairwise
from math import inf

import pytest
from named_policies import NAMED_POLICIES

from kvoffload.policies import return_order
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.return_order import GRACE_S, MAX_CLAIMS, ReturnOrder
from kvoffload.testing.policies import work


def keys(name, count, start=0):
    return [f"{name}{i:04}".encode() for i in range(start, start + count)]


class Told:
    """A full store over LRU, with a clock that a test sets."""

    def __init__(self, capacity=1000, share=1.0, policy=LRUPolicy):
        self.now_s = 0.0
        self.order = ReturnOrder(policy(capacity), capacity, share, lambda: self.now_s)

    def use(self, prompt, claim=None, in_s=None):
        """End a request as the manager does."""
        self.order.touch(prompt[::-1])
        self.order.add([key for key in prompt[::-1] if key not in self.order])
        if in_s is None:
            self.order.used(prompt)
        else:
            self.order.expect(claim or prompt[-1], prompt, in_s)


def test_helpers_of_one_session_do_not_end_each_other_s_claims():
    """Agents send one session id with the requests of all their helpers."""
    told = Told()
    system, chat = keys("system", 2), keys("main", 9)
    told.use(system + chat, b"a", 30)
    told.use(keys("b", 2), b"b", 60)
    told.use(system + keys("helper", 4), b"a", 10)
    assert told.order.victims(2) == keys("b", 2)[::-1]
    assert told.order.victims(9) == chat[::-1]
    told.use(system + chat, b"a", 30)
    told.use(system + keys("helper", 4), b"a", 10)
    told.use(system + chat + keys("more", 1), b"a", 1)
    assert told.order.victims(6) == [*keys("helper", 4)[::-1], keys("more", 1)[0], chat[-1]]


def test_a_later_prompt_with_its_last_chunk_fulfils_a_claim_without_a_name():
    told = Told()
    told.use(keys("a", 3), in_s=0)
    told.use(keys("a", 5))
    assert not told.order.has_claim(keys("a", 3)[-1])
    told.use(keys("b", 3), b"b", 1)
    assert sorted(told.order.victims(8)) == sorted(keys("a", 5) + keys("b", 3))


def test_a_claim_further_than_the_policy_keeps_chunks_protects_nothing():
    """Without it, sessions that honestly say "hours" would hold their share of a busy store."""
    told = Told(capacity=100, share=0.5)
    for number in range(200):  # idle chunks leave after about 100 s
        told.now_s += 1
        told.use(keys(f"busy{number}", 1))
        if len(told.order) > 90:
            told.order.victims(1)
    told.use(keys("soon", 4), b"soon", 20)
    told.use(keys("hours", 4), b"hours", 3600)
    assert told.order.victims(4) == keys("hours", 4)[::-1]
    assert told.order.victims(40)
    assert all(key in told.order for key in keys("soon", 4))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_one_who_lies_gains_the_share_at_most(share):
    capacity = 200
    told = Told(capacity, share)
    told.order.add(keys("honest", capacity))
    held = []
    for number in range(100):  # returns in a second, each time, and never does
        told.now_s += 0.01
        lie = keys(f"lie{number}", 5)
        told.order.victims(5)
        told.use(lie, str(number).encode(), 1)
        held.append(sum(key.startswith(b"lie") for key in _in(told.order)))
    assert max(held) <= share * capacity + 5, "and the request that runs"
    assert sum(key in told.order for key in keys("honest", capacity)) >= (1 - share) * capacity - 5


def _in(order):
    return [*order.normal._table, *(order._before.keys() - order._away)]


@pytest.mark.parametrize("name", sorted(NAMED_POLICIES))
def test_without_claims_each_decision_is_the_policy_s_own(name):
    rng = random.Random(name)
    plain, wrapped = NAMED_POLICIES[name](50), Told(50, 0.5, NAMED_POLICIES[name]).order
    names = keys("k", 150)
    for _ in range(3000):
        some = rng.sample(names, rng.randrange(5))
        call = rng.choice(["add", "touch", "touch", "remove", "victims", "used", "withdraw"])
        if call == "victims":
            count = rng.randrange(4)
            assert list(wrapped.victims(count)) == list(plain.victims(count))
        elif call == "used":
            wrapped.used(some)
        elif call == "withdraw":
            wrapped.withdraw(b"nobody")
        else:
            if call == "add":
                some = [key for key in some if key not in plain][: 50 - len(plain)]
            elif call == "remove":
                some = [key for key in some if key in plain]
            getattr(plain, call)(some)
            getattr(wrapped, call)(some)
    assert len(plain) == len(wrapped) > 0


class Reference:
    """The rules without any structure: all claims, each with the chunks that it still covers."""

    def __init__(self):
        self.claims, self.now_s = {}, 0.0

    def expected_s(self, name):
        in_s = self.claims[name][0] - self.now_s
        return in_s if in_s >= 0 else GRACE_S - in_s

    def victim(self):
        while True:
            name = max(self.claims, key=self.expected_s)
            _, prompt = self.claims[name]
            tail = prompt.pop()
            covered = any(tail in other for _, other in self.claims.values())
            if covered or not prompt:
                del self.claims[name]  # others expect what it still covered, and sooner
            if not covered:
                return tail


def test_victims_are_those_of_the_rules_written_down_without_a_structure():
    for seed in range(60):
        rng = random.Random(seed)
        told, reference = Told(), Reference()
        for step in range(150):
            told.now_s = reference.now_s = told.now_s + rng.uniform(0, 9)
            if rng.random() < 0.6 or not reference.claims:
                before = [prompt for _, prompt in reference.claims.values()] or [keys("head", 3)]
                base = rng.choice(before)
                session = rng.randrange(8)
                if session in reference.claims:  # it goes on, so that nothing is left behind
                    base = reference.claims[session][1]
                elif rng.random() < 0.5:
                    base = base[: rng.randrange(1, 9)]
                prompt = [*base, *keys(f"s{step}-", rng.randrange(1, 4))]
                in_s = rng.choice([rng.uniform(0, 20), rng.uniform(0, 200)])
                told.use(prompt, str(session).encode(), in_s)
                reference.claims[session] = (told.now_s + in_s, list(prompt))
            else:
                assert told.order.victims(1) == [reference.victim()]
        held = {key for _, prompt in reference.claims.values() for key in prompt}
        assert len(told.order) == len(held) > 0


def test_a_million_sessions_take_20_mib_at_most(monkeypatch):
    """Beyond the most there are, each one takes the place of another: here beyond an eighth."""
    monkeypatch.setattr(return_order, "MAX_CLAIMS", MAX_CLAIMS // 8)
    told = Told(capacity=1000, share=0.5)
    tracemalloc.start()
    try:
        for number in range(2 * MAX_CLAIMS // 8):
            key = number.to_bytes(16, "big")
            told.order.expect(key, (key * 2,), number % 3600)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < (20 << 20) / 8
    assert len(told.order._claims) <= MAX_CLAIMS // 8


@pytest.mark.parametrize("jump_s", [1e9, -1e9, 1e18, -1e18])
def test_a_clock_that_jumps_loses_nothing(jump_s):
    told = Told()
    prompts = [keys(name, 3) for name in "abc"]
    for number, prompt in enumerate(prompts):
        told.use(prompt, prompt[0], 10**number)
    told.now_s += jump_s
    told.use(keys("d", 3), b"d", 1e18)
    gone = told.order.victims(12)
    assert sorted(gone) == sorted(key for prompt in [*prompts, keys("d", 3)] for key in prompt)
    for prompt in prompts:
        assert [key for key in gone if key in prompt] == prompt[::-1]
    assert len(told.order) == 0


def test_work_grows_neither_with_chunks_nor_with_claims():
    costs = []
    for sessions in (100, 3000):
        told = Told(capacity=sessions * 4)
        for number in range(sessions):
            told.use(keys(f"s{number}-", 3), b"%d" % number, number % 97)

        def act(told=told):
            for number in range(20):
                told.order.victims(3)
                told.use(keys(f"new{number}-", 3), b"n%d" % number, number)

        costs.append(work(act))
    assert costs[1] < 2 * costs[0] + 2000


def test_pins_and_claims_in_any_order_lose_no_key():
    for seed in range(60):
        rng = random.Random(seed)
        told = Told(40, rng.choice([0.0, 0.5, 1.0]), rng.choice(list(NAMED_POLICIES.values())))
        order, inside, pinned = told.order, set(), set()
        prompts = [keys("head", 3) + keys(name, rng.randrange(1, 9)) for name in "abcdef"]
        for _ in range(400):
            told.now_s += rng.choice([0.0, 0.1, 30.0])
            prompt = rng.choice(prompts)[: rng.randrange(1, 12)]
            call = rng.choice(["add", "pin", "unpin", "victims", "touch", "expect", "used", "end"])
            if call == "add":
                new = [key for key in prompt[::-1] if key not in inside | pinned]
                order.add(new)
                inside.update(new)
            elif call == "pin":
                some = [key for key in prompt if key in inside]
                order.remove(some)
                inside.difference_update(some)
                pinned.update(some)
            elif call == "unpin":
                some = [key for key in prompt if key in pinned]
                order.add(some[::-1])
                pinned.difference_update(some)
                inside.update(some)
            elif call == "victims":
                gone = order.victims(rng.randrange(6))
                assert inside.issuperset(gone)
                assert len(set(gone)) == len(gone)
                inside.difference_update(gone)
            elif call == "expect":
                order.expect(rng.choice([prompt[0], prompt[-1]]), prompt, rng.choice([0, 9, inf]))
            elif call == "end":
                order.withdraw(rng.choice(prompt))
            else:
                getattr(order, call)(prompt)
            assert len(order) == len(inside)
            assert all((key in order) == (key in inside) for p in prompts for key in p)
        assert set(order.victims(100)) == inside
        order.clear()
        assert len(order) == 0
        assert not any(key in order for prompt in prompts for key in prompt)
        assert list(order.victims(100)) == []


def test_the_claims_hang_together_whatever_happened():
    """Each chunk under a claim is held by one claim or chunk behind it, and its forks."""
    rng = random.Random(3)
    told = Told(60, 1.0)
    order = told.order
    for step in range(3000):
        told.now_s += 1
        prompt = keys("head", rng.randrange(1, 5)) + keys(f"s{rng.randrange(9)}", rng.randrange(9))
        if rng.random() < 0.6:
            told.use(prompt, b"%d" % rng.randrange(12), rng.randrange(300))
        elif rng.random() < 0.5:
            told.use(prompt)
        while len(order) > 50:
            order.victims(rng.randrange(1, 9))
        if step % 50:
            continue
        holders = {}
        for before in order._before.values():
            holders[before] = holders.get(before, 0) + 1
        for claim in order._claims.values():
            holders[claim.tail] = holders.get(claim.tail, 0) + 1
        holders.pop(None, None)
        assert holders == {key: 1 + order._forks.get(key, 0) for key in order._before}
        dues = sorted(c.due_s for c in order._claims.values())
        assert all(a <= b for a, b in pairwise(dues))
