"""Every built-in policy passes the suite that plug-in authors inherit, and bad ones do not."""

from collections.abc import Sequence

import pytest

from kvoffload.policies.lru import LRUPolicy
from kvoffload.registry import POLICIES, load
from kvoffload.testing import PolicySuite
from kvoffload.testing.policies import work

BUILT_IN = ["arc", "handicap", "lru"]


@pytest.mark.parametrize("name", BUILT_IN)
class TestBuiltInPolicies(PolicySuite):
    @pytest.fixture(autouse=True)
    def _policy(self, name):
        self.policy_class = load(POLICIES, name)

    def make(self, capacity):
        return self.policy_class(capacity)


class Scanning(LRUPolicy):
    """Looks at a part of all keys to find one."""

    def victims(self, count: int) -> Sequence[bytes]:
        for _ in zip(range(len(self) // 16), self._table, strict=False):
            pass
        return super().victims(count)


class SkipsPinned(LRUPolicy):
    """Keeps pinned keys in its order and steps over them."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.order, self.pinned = {}, set()

    def add(self, keys):
        self.pinned.difference_update(keys)
        for key in keys:
            self.order.pop(key, None)
        self.order.update(dict.fromkeys(keys))

    def remove(self, keys):
        self.pinned.update(keys)

    def victims(self, count):
        taken = []
        for key in list(self.order):
            if len(taken) == count:
                break
            if key not in self.pinned:
                taken.append(key)
                del self.order[key]
        return taken

    def __len__(self):
        return len(self.order) - len(self.pinned)

    def __contains__(self, key):
        return key in self.order and key not in self.pinned


class Hoards(LRUPolicy):
    """Remembers every key it ever saw."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.seen = set()

    def add(self, keys):
        self.seen.update(keys)
        super().add(keys)


class HeadFirst(LRUPolicy):
    """Evicts the most recent key."""

    def victims(self, count):
        order = self._table
        return [order.popitem()[0] for _ in range(min(count, len(self)))]


class ForgetsTheRest(LRUPolicy):
    """Takes the first key of a batch alone."""

    def add(self, keys):
        super().add(keys[:1])


def test_work_that_grows_is_not_done_to_its_end():
    done = []
    with pytest.raises(AssertionError, match="work grew to more than 1,000"):
        work(lambda: [done.append(i) for i in range(100_000)], at_most=1000)
    assert len(done) < 1000


@pytest.mark.parametrize(
    ("policy", "fails"),
    [
        (Scanning, "test_work_does_not_grow_with_the_number_of_residents"),
        (SkipsPinned, "test_pinned_keys_cost_nothing"),
        (Hoards, "test_memory_is_bounded_by_the_capacity"),
        (HeadFirst, "test_the_tail_of_a_prefix_leaves_before_its_head"),
        (ForgetsTheRest, "test_a_batch_decides_as_a_call_for_each_key"),
    ],
)
def test_the_suite_catches_a_policy_that_breaks_the_contract(policy, fails):
    class Suite(PolicySuite):
        def make(self, capacity):
            return policy(capacity)

    with pytest.raises(AssertionError, match="assert "):  # the message shows the values
        getattr(Suite(), fails)()
