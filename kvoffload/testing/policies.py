"""The conformance suite of eviction policies, for authors of plug-ins.

Inherit it in a test file; pytest does the rest::

    class TestMyPolicy(PolicySuite):
        def make(self, capacity):
            return MyPolicy(capacity)

The suite counts executed bytecodes and key comparisons instead of time, so that its result does not
depend on the load of the machine.
"""

import math
import random
import sys
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from kvoffload.policies.base import Policy, refusal

__all__ = ["PolicySuite", "work"]


class _Key(bytes):
    """A key that counts how often it is hashed and compared."""

    operations = 0

    def __hash__(self) -> int:
        _Key.operations += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        _Key.operations += 1
        return super().__eq__(other)

    def __lt__(self, other: bytes) -> bool:
        _Key.operations += 1
        return super().__lt__(other)


def _key(number: int) -> bytes:
    return _Key(number.to_bytes(32, "big") + bytes(4))


def _keys(numbers: Iterable[int]) -> list[bytes]:
    return [_key(number) for number in numbers]


def work(action: Callable[[], object], at_most: float = math.inf) -> int:
    """Run ``action`` and return its cost: bytecodes executed plus keys hashed and compared.

    Raises:
        AssertionError: it costs more than ``at_most``; what is left of it is not run.
    """
    executed = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal executed
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        assert executed <= at_most, f"work grew to more than {at_most:,.0f}"
        return trace

    before, outer = _Key.operations, sys.gettrace()
    # Python 3.12 sends opcodes only if a frame had asked for them when tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(outer)
    return executed + _Key.operations - before


def _use(policy: Policy, capacity: int, key: bytes) -> None:
    """Make one request for one key, as a store does on a hit or on a miss."""
    policy.touch([key])
    if key not in policy:
        if len(policy) >= capacity:
            policy.victims(1)
        policy.add([key])


def _filled(policy: Policy, capacity: int, rng: random.Random) -> Policy:
    """Use more keys than fit, a part of them often."""
    for number in range(3 * capacity):
        _use(policy, capacity, _key(number))
        _use(policy, capacity, _key(rng.randrange(capacity)))
    return policy


def _fill_up(policy: Policy, capacity: int) -> None:
    """Add new keys until the store is full."""
    policy.add(_keys(range(10**9, 10**9 + capacity - len(policy))))


def _in_single_calls(policy: Policy, name: str, keys: Iterable[bytes]) -> None:
    for key in keys:
        getattr(policy, name)([key])


class PolicySuite(ABC):
    """What every policy must do, whichever key it evicts. Override :meth:`make`."""

    @abstractmethod
    def make(self, capacity: int) -> Policy:
        """Make a policy for a store of ``capacity`` entries."""

    def test_it_takes_batches_of_keys(self) -> None:
        """A policy whose methods take one key a call is refused when it is loaded."""
        assert refusal(self.make) == ""

    def test_no_key_is_lost_or_duplicated_whatever_the_calls(self) -> None:
        """A random walk against a plain set."""
        for seed in range(30):
            rng = random.Random(seed)
            capacity = rng.choice([1, 2, 3, 10, 40])
            policy = self.make(capacity)
            order: set[bytes] = set()
            for _ in range(600):
                keys = _keys(rng.sample(range(3 * capacity), rng.randrange(4)))
                call = rng.choice(["add", "add", "touch", "touch", "remove", "victims"])
                if call == "add":
                    new = [key for key in keys if key not in order][: capacity - len(order)]
                    policy.add(new)
                    order.update(new)
                elif call == "touch":
                    policy.touch(keys)
                elif call == "remove":
                    gone = [key for key in keys if key in order]
                    policy.remove(gone)
                    order.difference_update(gone)
                else:
                    count = rng.randrange(4)
                    taken = policy.victims(count)
                    assert len(taken) == len(set(taken)) == min(count, len(order))
                    assert order.issuperset(taken), "only keys of the order may leave"
                    order.difference_update(taken)
                assert len(policy) == len(order)
                assert all((key in policy) == (key in order) for key in keys)
            assert set(policy.victims(capacity)) == order
            assert len(policy) == 0

    def test_a_pinned_key_is_no_victim_and_comes_back(self) -> None:
        """``remove`` protects a key until ``add``, however much is evicted meanwhile."""
        policy = self.make(8)
        policy.add(_keys(range(8)))
        policy.remove([_key(3)])
        policy.touch([_key(3)])
        assert _key(3) not in policy
        for number in range(100, 140):
            policy.touch([_key(number)])
            if len(policy) >= 7:
                assert list(policy.victims(1)) != [_key(3)]
            policy.add([_key(number)])
        policy.victims(1)
        policy.add([_key(3)])
        assert _key(3) in policy
        assert _key(3) in policy.victims(8)

    def test_the_tail_of_a_prefix_leaves_before_its_head(self) -> None:
        """Of a prompt used tail first the tail is given up first."""
        policy = self.make(64)
        prompts = [_keys(range(100 * p, 100 * p + 8)) for p in range(8)]
        for prompt in prompts:
            for key in reversed(prompt):
                _use(policy, 64, key)
        for prompt in prompts[::2]:
            for key in reversed(prompt):
                _use(policy, 64, key)
        gone = list(policy.victims(64))
        for prompt in prompts:
            assert [key for key in gone if key in prompt] == prompt[::-1]

    def test_the_same_calls_bring_the_same_victims(self) -> None:
        """Neither time nor chance decides, and ``clear`` makes a policy as good as new."""
        policies = [self.make(50), self.make(50), _filled(self.make(50), 50, random.Random(1))]
        policies[2].clear()
        assert len(policies[2]) == 0
        orders = [_filled(policy, 50, random.Random(2)).victims(50) for policy in policies]
        assert list(orders[0]) == list(orders[1]) == list(orders[2])

    def test_a_batch_decides_as_a_call_for_each_key(self) -> None:
        """A batch only saves time."""
        policies = [_filled(self.make(60), 60, random.Random(4)) for _ in range(2)]
        evicted = list(policies[0].victims(20))
        assert evicted == list(policies[1].victims(20))
        pinned = [key for key in _keys(range(180)) if key in policies[0]][::2]
        new = _keys(range(500, 510))
        calls = [
            ("remove", pinned),
            ("touch", _keys(range(0, 180, 3))),
            ("add", pinned),
            ("add", [new[0], *evicted[:5], *new[1:5]]),
            ("touch", new),
        ]
        for name, keys in calls:
            getattr(policies[0], name)(keys)
            _in_single_calls(policies[1], name, keys)
            assert len(policies[0]) == len(policies[1])
        assert list(policies[0].victims(60)) == list(policies[1].victims(60))

    def test_work_does_not_grow_with_the_number_of_residents(self) -> None:
        costs, at_most = [], math.inf
        for capacity in (256, 4096):
            policy = _filled(self.make(capacity), capacity, random.Random(3))
            uses = _keys(range(capacity - 100, capacity + 100))

            def act(policy: Policy = policy, cap: int = capacity, keys: Any = uses) -> None:
                for key in keys:
                    _use(policy, cap, key)

            costs.append(work(act, at_most))
            at_most = 2.5 * costs[0] + 2000
        assert costs[1] < at_most, f"work grew from {costs[0]} to {costs[1]}"

    def test_pinned_keys_cost_nothing(self) -> None:
        capacity, costs = 2000, []
        for pinned in (0, 1800):
            policy = self.make(capacity)
            _fill_up(policy, capacity)
            policy.remove(_keys(range(10**9, 10**9 + pinned)))

            def act(policy: Policy = policy) -> None:
                for number in range(25):
                    policy.victims(1)
                    policy.add([_key(number)])

            costs.append(work(act))
        assert costs[1] < 1.5 * costs[0] + 200, f"work grew from {costs[0]} to {costs[1]}"

    def test_memory_is_bounded_by_the_capacity(self) -> None:
        """The history of evicted and removed keys does not grow for ever."""
        capacity = 100
        policy = self.make(capacity)
        held = []
        tracemalloc.start()
        try:
            for number in range(8000):
                _use(policy, capacity, _key(number))
                if number % 3 == 0 and _key(number) in policy:
                    policy.remove([_key(number)])
                if number in (3999, 7999):
                    held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert held[1] < 1.3 * held[0] + 4096, f"memory grew from {held[0]} to {held[1]} bytes"
