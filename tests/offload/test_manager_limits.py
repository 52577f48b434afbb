"""Limits of the manager: rates, memories and tiers."""

import pytest
from manager_parts import Store, figures, keys, new_manager, put

from kvoffload.backends.base import Removal
from kvoffload.offload.admission import AdmissionFilter
from kvoffload.offload.base import Reason, ReqContext
from kvoffload.offload.events import MissReasons
from kvoffload.offload.promises import Speed
from kvoffload.offload.tiers import Tier, first_holder

# ---- rates ---------------------------------------------------------------------------------------


def test_a_rate_is_known_after_four_samples_and_forgets_a_fifth_with_each():
    rate = Speed()
    for known in (False, False, False, True):
        assert rate.per_s is None
        rate.add(100, 1.0)
        assert (rate.per_s is not None) is known
    assert rate.per_s == pytest.approx(100)
    rate.add(1000, 1.0)
    weight = sum(0.8**i for i in range(1, 5))
    assert rate.per_s == pytest.approx((100 * weight + 1000) / (weight + 1))


def test_a_step_without_tokens_or_time_is_no_sample_of_speed():
    manager = new_manager()
    for _ in range(10):
        manager.promises.prefilled(0, 1.0)
        manager.promises.prefilled(100, 0.0)
    assert "prefill_tokens_per_second" not in figures(manager)
    for _ in range(4):
        manager.promises.prefilled(100, 0.5)
    assert figures(manager)["prefill_tokens_per_second"] == pytest.approx(200)


def test_hits_are_told_by_medium_and_those_of_tiers_are_not_hits_of_host_memory():
    manager = new_manager(stores=[Store(keys("a", 3)), Store(keys("a", 4))])
    put(manager, keys("b", 2))
    assert manager.lookup_prefix(keys("b", 2)) == (2, False)
    assert manager.lookup_prefix(keys("a", 5)) == (4, False)
    told = figures(manager)["lookups"]
    assert [told[tier]["hit"] for tier in ("cpu", "tier0", "tier1")] == [2, 3, 1]
    assert told[""] == {"miss": 1, "pending": 0}


# ---- memories ------------------------------------------------------------------------------------


def test_admission_counts_requests_and_forgets_the_chunk_seen_longest_ago():
    seen = AdmissionFilter(threshold=3, limit=2)
    assert seen.admit([b"a"], "one") == ([], [b"a"])
    assert seen.admit([b"a", b"a"], "two") == ([], [b"a", b"a"])
    assert seen.admit([b"a"], "two") == ([], [b"a"])
    assert seen.admit([b"a", b"b"], "three") == ([b"a"], [b"b"])
    seen.see([b"a"], "four")
    seen.see([b"c"], "four")  # now b is forgotten
    assert len(seen) == 2
    assert seen.admit([b"a"], "four") == ([b"a"], [])
    seen.see([b"b", b"b"], "")
    assert seen.admit([b"b"], "") == ([b"b"], [])
    seen.clear()
    assert len(seen) == 0
    everything = new_manager(slots=2, store_threshold=1)
    everything.touch([b"a"], ReqContext("one"))
    assert everything._admission is None


def test_the_latest_reasons_of_a_limited_number_of_chunks_are_remembered():
    memory = MissReasons(3)
    memory.note([b"a", b"b"], "evicted")
    memory.note([], "failed")
    memory.note([b"a"], "dropped")
    assert [memory.reason(key) for key in (b"a", b"b", b"x")] == [
        "dropped",
        "evicted",
        "never_stored",
    ]
    memory.note([b"c", b"d"], "evicted")
    assert [memory.reason(key) for key in (b"a", b"b")] == ["dropped", "never_stored"]
    memory.new_namespace()
    memory.note([b"d"], "evicted")
    assert [memory.reason(key) for key in (b"a", b"c", b"d")] == [
        "other_namespace",
        "other_namespace",
        "evicted",
    ]
    memory.note([b"%d" % i for i in range(9)], "reset")
    assert [memory.reason(b"%d" % i) for i in (5, 6, 8)] == ["never_stored", "reset", "reset"]


# ---- tiers ---------------------------------------------------------------------------------------


def test_the_nearest_tier_that_has_a_chunk_is_read():
    class Unsure(Store):
        def holds(self, key):
            return None

    near, far, unsure = Tier("n", Store()), Tier("f", Store([b"a"])), Tier("u", Unsure())
    assert first_holder(b"a", [near, far]) == (far, True)
    assert first_holder(b"a", [unsure, far]) == (far, True)
    assert first_holder(b"b", [near, unsure, far]) == (None, None)
    assert first_holder(b"b", [near, far]) == (None, False)
    assert first_holder(b"a", []) == (None, False)


def test_chunks_that_a_tier_removed_are_reported_with_their_reason():
    near = Store()
    manager = new_manager(stores=[near])
    a = keys("a", 2)
    put(manager, a)
    (transfer,) = manager.take_transfers()
    manager.complete(transfer, [True, True])
    manager.take_events()
    near.removals = [Removal(a[0], "evicted"), Removal(a[1], "corrupt")]
    told = {(event.keys, event.reason) for event in manager.take_events()}
    assert told == {((a[0],), Reason.EVICTED), ((a[1],), Reason.FAILED)}
    assert figures(manager)["evictions"]["tier0"] == {"evicted": 1, "corrupt": 1}
