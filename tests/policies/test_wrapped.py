"""What wraps a policy loses no key of it, whichever policy it is."""

import math
import random
from functools import partial

import pytest
from named_policies import NAMED_POLICIES

from kvoffload.io.service.namespace_shares import NamespaceOrder, NamespaceShares
from kvoffload.policies.guarded import GuardedPolicy
from kvoffload.policies.kept_order import KeptOrder
from kvoffload.policies.lru import LRUPolicy
from kvoffload.policies.return_order import ReturnOrder
from kvoffload.policies.tenant_order import TenantOrder, TenantShares
from kvoffload.policies.told_return import ToldReturn


def of_namespace(capacity):
    shares = NamespaceShares()
    shares.count(b"", 1)
    return NamespaceOrder(partial(LRUPolicy, capacity), shares, lambda key: b"")


ORDERS = {
    **NAMED_POLICIES,
    "guarded": partial(GuardedPolicy, LRUPolicy),
    "of a namespace": of_namespace,
    "of tenants": lambda capacity: TenantOrder(LRUPolicy(capacity), TenantShares(1.0)),
    "kept": lambda capacity: KeptOrder(LRUPolicy(capacity), {b"an absent key": None}),
}
"""What a store may have in place of a policy, too."""


def keys(numbers):
    return [number.to_bytes(32, "big") + bytes(4) for number in numbers]


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_claims_over_the_policy_lose_no_key(name):
    """Sessions that say when they return take their chunks out of the policy, and back."""
    for seed in range(10):
        rng, now_s = random.Random(seed), [0.0]
        policy = ReturnOrder(ORDERS[name](60), 60, now_s=partial(min, now_s))
        order: set[bytes] = set()
        for _ in range(600):
            now_s[0] += rng.uniform(0, 5)
            first = 10 * rng.randrange(12)
            prompt = keys(range(first, first + rng.randrange(1, 10)))
            policy.touch(prompt[::-1])
            new = [key for key in prompt[::-1] if key not in order][: 60 - len(order)]
            policy.add(new)
            order.update(new)
            call = rng.choice(["expect", "expect", "withdraw", "used", "pin"])
            if call == "expect":
                policy.expect(prompt[0], prompt, rng.choice([0.0, 9.0, 99.0, math.inf]))
            elif call == "withdraw":
                policy.withdraw(prompt[0])
            elif call == "used":
                policy.used(prompt)
            else:
                here = [key for key in prompt if key in order]
                policy.remove(here)
                policy.add(here[::-1])
            gone = policy.victims(rng.randrange(9))
            assert order.issuperset(gone), "only keys of the order may leave"
            order.difference_update(gone)
            assert len(policy) == len(order)
        assert set(policy.victims(60)) == order


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_kept_chunks_leave_last_whatever_is_told_of_them(name):
    """A store takes chunks that queued requests need out of the order of returns, and back."""
    for seed in range(4):
        rng, kept = random.Random(seed), dict[bytes, None]()
        returns = ReturnOrder(ORDERS[name](60), 60, now_s=lambda: 0.0)
        policy, order = KeptOrder(returns, kept), set[bytes]()
        for _ in range(200):
            prompt = keys(range(first := 5 * rng.randrange(24), first + rng.randrange(1, 9)))
            new = [key for key in prompt if key not in order][: 60 - len(order)]
            policy.add(new)
            order.update(new)
            in_s = rng.choice([None, 0.0, 9.0, math.inf])
            ToldReturn(prompt[0], prompt, in_s, rng.randrange(9)).apply(returns)
            keep = [key for key in prompt if key in order and key not in kept]
            policy.keep(keep)
            kept.update(dict.fromkeys(keep))
            let_go = [key for key in kept if rng.random() < 0.5]
            for key in let_go:
                del kept[key]
            policy.let_go(let_go)
            gone = policy.victims(rng.randrange(9))
            assert kept.keys().isdisjoint(gone), "a kept key was evicted"
            assert order.issuperset(gone), "only keys of the order may leave"
            order.difference_update(gone)
            assert len(policy) == len(order)
        assert set(policy.victims(60)) == order - kept.keys()
