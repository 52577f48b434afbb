"""What requests say of their session's return, from the hint to the order of host memory."""

import math
from collections import Counter

import pytest
from manager_parts import Store
from named_policies import NAMED_POLICIES

from kvoffload.config import HARMLESS_HINTS, KNOWN_HINTS, RETURN_HINTS, parse_config
from kvoffload.errors import ConfigError
from kvoffload.offload import returns
from kvoffload.offload.base import ReqContext, make_offload_key
from kvoffload.offload.extents import ExtentCache
from kvoffload.offload.geometry import HostGeometry
from kvoffload.offload.hints import MAX_SESSION_CHARS, HintReader
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy
from kvoffload.replay.loop_stores import chunks_of
from kvoffload.replay.synthetic import SyntheticOptions, timed
from kvoffload.replay.trace import from_timed
from tests.support.manager_check import check


def prompt(name, count, group=0):
    return [make_offload_key(f"{name} {i}".ljust(32).encode(), group) for i in range(count)]


class Engine:
    """Serves requests one by one, as a connector does; a test sets the clock."""

    def __init__(self, slots=16, policy=LRUPolicy, hints=KNOWN_HINTS, host=None):
        self.now_s = 0.0
        self.host = host or HostCache(slots, policy(slots))
        self.host.now_s = lambda: self.now_s
        self.manager = TieredOffloadingManager(self.host, client_hints=hints)
        self.number = 0

    def serve(self, keys, **told):
        self.number += 1
        context = ReqContext(str(self.number), {"kvoffload": told} if told else None)
        self.manager.touch(keys, context)
        found = self.manager.lookup_prefix(keys, context)[0]
        stored = self.manager.prepare_store(keys, context)
        if stored is not None and stored.job is not None:
            self.manager.complete(stored.job, [True] * len(stored.job.keys))
        self.manager.retire(keys, context)
        check(self.manager)
        return found


def test_the_session_that_returns_last_makes_room():
    engine = Engine(slots=12)
    a, b, c = (prompt(name, 4) for name in "abc")
    engine.serve(a, returns_in_s=60, session="a")
    engine.serve(b, returns="hours", session="b")
    engine.serve(c, returns_in_s=30, session="c")
    engine.serve(prompt("d", 4), returns="soon")
    assert [engine.serve(keys) for keys in (a, c)] == [4, 4]
    assert engine.serve(b) == 0


def test_a_session_that_says_never_again_leaves_the_prompt_that_others_use():
    engine = Engine(slots=12)
    shared = prompt("system", 3)
    engine.serve([*shared, *prompt("x", 2)])
    engine.serve([*shared, *prompt("a", 4)], returns="never", session="a")
    engine.serve(prompt("b", 7))
    assert engine.serve([*shared, *prompt("x", 2)]) == 5


def test_a_later_request_of_the_session_that_says_nothing_ends_the_claim():
    engine = Engine(slots=8)
    engine.serve(prompt("a", 4), returns="hours", session="a")
    engine.serve(prompt("b", 4), returns_in_s=1, session="b")
    engine.serve(prompt("a", 4), session="a")
    engine.serve(prompt("b", 4), session="b")
    assert not engine.host.returns.has_claim(prompt("a", 4)[-1])
    engine.serve(prompt("c", 4))
    assert engine.serve(prompt("b", 4)) == 4


def test_equal_session_names_of_prompts_that_begin_otherwise_are_two_sessions():
    """A client cannot end the claim of another tenant, whose salt is in the first chunk's key."""
    engine = Engine(slots=12)
    engine.serve(prompt("a", 4), returns_in_s=5, session="1")
    engine.serve(prompt("b", 4), returns="never", session="1")
    engine.serve(prompt("c", 4), returns_in_s=9, session="c")
    engine.serve(prompt("d", 4))
    assert engine.serve(prompt("a", 4)) == 4


@pytest.mark.parametrize("name", sorted(NAMED_POLICIES))
def test_without_a_return_each_decision_is_the_policy_s_own(name):
    trace = from_timed("agent", timed("agent", SyntheticOptions(seed=3, requests=250)))
    events = []
    for told in ({}, {"session": "s"}, {"max_load_tokens": 10**6}):
        engine = Engine(150, NAMED_POLICIES[name])
        for request in trace.requests:
            engine.serve(chunks_of(request), **told)
        events.append(engine.manager.take_events())
        assert engine.host.order._returns is None, "no claim, no order of claims"
    assert events[0] == events[1] == events[2]
    assert len(events[0]) > 250


def test_hints_of_returns_need_the_operator_s_leave():
    assert not set(HARMLESS_HINTS) & set(RETURN_HINTS)
    engine = Engine(hints=HARMLESS_HINTS)
    engine.serve(prompt("a", 4), returns_in_s=1, session="a")
    assert engine.host.order._returns is None
    assert engine.manager.counters["hints_not_allowed"] == 2


@pytest.mark.parametrize(
    ("hint", "returns_s"),
    [
        ({"returns_in_s": 3}, 3.0),
        ({"returns_in_s": 0.0}, 0.0),
        ({"returns_in_s": 1e18}, 1e18),
        ({"returns": "never"}, math.inf),
        ({"returns": "soon", "returns_in_s": 400.0}, 400.0),
        ({"returns": "soon", "returns_in_s": -1}, 10.0),
        ({"returns_in_s": -1}, None),
        ({"returns_in_s": math.nan}, None),
        ({"returns_in_s": math.inf}, None),
        ({"returns_in_s": "3"}, None),
        ({"returns_in_s": True}, None),
        ({"returns_in_s": 10**400}, None),
        ({"returns": "tomorrow"}, None),
        ({"returns": ["soon"]}, None),
    ],
)
def test_a_return_is_a_time_or_a_class_of_times(hint, returns_s):
    counters = Counter()
    read = HintReader(counters, KNOWN_HINTS)
    hints = read.hints(ReqContext("r", {"kvoffload": hint}), frozenset())
    assert hints.returns_s == returns_s
    assert bool(counters["hints_ignored"]) == (returns_s is None or hint.get("returns_in_s") == -1)


def test_a_session_s_name_is_short():
    read = HintReader(Counter(), KNOWN_HINTS)

    def session(name, req_id):
        return read.hints(ReqContext(req_id, {"kvoffload": {"session": name}}), frozenset()).session

    assert session("é" * MAX_SESSION_CHARS, "a") == "é" * MAX_SESSION_CHARS
    assert session("x" * (1 << 20), "b") is None
    assert session(7, "c") is None
    engine = Engine()
    engine.serve(prompt("a", 4), session="\ud800 no UTF-8", returns_in_s=4)
    assert len(engine.host.returns._claims) == 1


@pytest.mark.parametrize("in_s", [1e18, 0, 1e-9])
def test_the_most_extreme_times_are_times(in_s):
    engine = Engine(slots=8)
    for name in "abcd":
        engine.serve(prompt(name, 3), returns_in_s=in_s, session=name)
        engine.now_s += 10
    assert engine.manager.resident == 8


def test_chunks_of_several_sizes_follow_a_claim_in_the_order_of_each():
    geometry = HostGeometry.plan(96 * 4096, [4096, 8192])
    engine = Engine(host=ExtentCache(geometry, LRUPolicy))

    def both(name):
        of_groups = zip(prompt(name, 3), prompt(name, 3, group=1), strict=True)
        return [key for keys in of_groups for key in keys]

    last = [str(number) for number in range(9)]
    for name in last:
        engine.serve(both(name), returns_in_s=20 if name in last[::2] else 300, session=name)
    for name in "ab":
        engine.serve(both(name), returns="soon", session=name)
    found = {name: engine.manager.lookup_prefix(both(name))[0] for name in last}
    assert [found[name] for name in last[::2]] == [6] * 5, "the ones that return soon"
    assert min(found.values()) < 6


def test_priorities_and_claims_go_together():
    engine = Engine(slots=12)
    engine.serve(prompt("low", 4), priority=-1, returns_in_s=1, session="low")
    engine.serve(prompt("high", 4), priority=1, returns="never", session="high")
    engine.serve(prompt("soon", 4), returns_in_s=1, session="soon")
    engine.serve(prompt("new", 4))
    assert engine.serve(prompt("high", 4)) == 4, "a priority goes before a claim"
    assert engine.serve(prompt("low", 4)) == 0


@pytest.mark.parametrize("sized", [False, True])
def test_after_a_reset_a_told_return_holds_for_chunks_stored_anew(sized):
    geometry = HostGeometry.plan(96 * 4096, [4096, 8192])
    engine = Engine(12, host=ExtentCache(geometry, LRUPolicy) if sized else None)
    a = prompt("a", 4)
    engine.serve(a, returns_in_s=60, session="a")
    engine.serve(prompt("b", 4), returns_in_s=600, session="b")
    engine.manager.reset_cache()
    check(engine.manager)
    assert engine.serve(a) == 0
    for i in range(60):
        engine.serve(prompt(f"new {i}", 4))
    assert engine.serve(a, session="a") == 4


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_a_part(share):
    with pytest.raises(ConfigError, match="hint_share"):
        parse_config({"cpu_bytes": 1, "hint_share": share})


def test_a_claim_whose_tail_left_and_came_again_is_one_claim():
    """Two sessions leave the same tail; in between, it was evicted and stored anew."""
    engine = Engine(slots=12)

    def turn(session, letters):
        chunks = [prompt(letter, 1)[0] for letter in letters]
        engine.serve(chunks, session=session, returns_in_s=10)

    turn("s", "abcde")
    turn("s", "abcx")
    stored = engine.manager.prepare_store(prompt("lost", 7), ReqContext("lost"))
    engine.manager.complete(stored.job, [False] * 7)
    turn("t", "abcde")
    turn("t", "abcdy")
    for i in range(30):
        engine.serve(prompt(f"more {i}", 4))
    assert engine.manager.busy_slots == 0


def test_stores_are_told_what_requests_say_and_no_more_than_is_taken(monkeypatch):
    monkeypatch.setattr(returns, "MOST_UNTOLD_CHUNKS", 30)
    engine = Engine(slots=64)
    engine.serve(prompt("a", 4), returns_in_s=5, session="a")
    assert not engine.manager.returns.to_tell, "there is no store"
    engine.manager.replace_tiers([Tier("disk", Store())])
    shared = prompt("shared", 2)
    engine.serve(shared)
    engine.serve([*shared, *prompt("b", 4)], returns_in_s=7, session="b")
    engine.serve([*shared, *prompt("b", 5)], session="b")
    told = engine.manager.returns.take_told()
    assert [(len(each.keys), each.in_s, each.num_used) for each in told] == [
        (2, None, 2),
        (6, 7.0, 2),
        (7, None, 7),
    ]
    assert told[1].claim == told[2].claim
    for i in range(40):
        engine.serve(prompt(f"{i}", 7), returns_in_s=i, session="c")
    assert [each.in_s for each in engine.manager.returns.to_tell] == [36, 37, 38, 39]
    engine.serve(prompt("long", 50), returns_in_s=1)
    assert [len(each.keys) for each in engine.manager.returns.take_told()] == [50]
    engine.serve(prompt("d", 4), returns_in_s=1)
    engine.manager.reset_cache()
    assert len(engine.manager.returns.take_told()) == 1, "chunks stored anew are needed then, too"
