"""Hints come from clients: what they cost, what they leave behind, and who may use which."""

import logging
import sys
import tracemalloc
from collections import Counter

import msgspec
import pytest
from manager_parts import Store

from kvoffload.config import HARMLESS_HINTS, KNOWN_HINTS, OffloadConfig, parse_config
from kvoffload.errors import ConfigError
from kvoffload.offload.base import ReqContext, make_offload_key
from kvoffload.offload.hints import (
    MAX_NAME_CHARS,
    NO_HINTS,
    HintReader,
    Hints,
)
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.policies.lru import LRUPolicy

TIERS = frozenset({"disk"})


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def reader(clock):
    return HintReader(Counter(), KNOWN_HINTS, lambda: clock[0])


def ask(reader, hint, name="r"):
    return reader.hints(ReqContext(name, {"kvoffload": hint}), TIERS)


def ignored(reader):
    return reader._counters["hints_ignored"]


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_by_default_a_request_may_use_only_the_hints_that_cost_others_nothing():
    assert OffloadConfig(cpu_bytes=1).client_hints == HARMLESS_HINTS
    reader = HintReader(Counter())
    wishes = {"offload": False, "max_load_tokens": 7, "tiers": [], "priority": 8, "explain": True}
    assert ask(reader, wishes) == Hints(offload=False, max_load_tokens=7)
    assert reader._counters == {"hints_not_allowed": 3}


def test_an_engine_may_name_the_tiers_that_a_request_reads():
    def tiers(hint, reads_tier):
        context = ReqContext("r", {"kvoffload": hint}, reads_tier)
        known = frozenset(["disk", "redis"])
        hints = HintReader(Counter(), KNOWN_HINTS).hints(context, known)
        return hints.tiers, hints.load_tiers and sorted(hints.load_tiers)

    assert tiers({}, None) == (None, None)
    assert tiers({}, lambda name: name != "disk") == (None, ["redis"])
    assert tiers({"tiers": ["disk"]}, lambda name: name == "disk") == (("disk",), ["disk"])
    assert tiers({"tiers": ["disk"]}, lambda name: False) == (("disk",), ())
    # A client cannot name it: the hint ``tiers`` has its own rules.
    assert ask(HintReader(Counter(), KNOWN_HINTS), {"load_tiers": ["disk"]}).load_tiers is None


@pytest.mark.parametrize("params", [None, {}, {"kvoffload": {}}])
def test_the_tiers_that_a_request_reads_need_no_wish_of_the_client(params):
    a = make_offload_key(bytes(32), 0)
    tiers = [Tier(name, store) for name in ("near", "far") for store in [Store([a])]]
    manager = TieredOffloadingManager(HostCache(4, LRUPolicy(4)), tiers)
    assert manager.explain([a], ReqContext("r", params)) == ["NEAR"]
    context = ReqContext("s", params, lambda name: name == "far")
    assert manager.explain([a], context) == ["FAR"]
    assert manager.counters["hints_ignored"] == 0


def test_the_manager_obeys_the_setting():
    def priority(**settings):
        manager = TieredOffloadingManager(HostCache(4, LRUPolicy(4)), **settings)
        return manager.hints(ReqContext("r", {"kvoffload": {"priority": 8}})).priority

    assert priority() == 0
    assert priority(client_hints=("priority",)) == 8


def test_the_settings_name_every_hint_and_no_other():
    fields = {field.name for field in msgspec.structs.fields(Hints)}
    assert set(KNOWN_HINTS) == fields - {"load_tiers"}  # which the engine says, not a client
    with pytest.raises(ConfigError, match=r"client_hints = 'explian'.*explain"):
        parse_config({"cpu_bytes": 1, "client_hints": ["explian"]})


def test_nothing_that_a_client_sends_is_kept(reader):
    tracemalloc.start()
    for i in range(50):
        junk = {"pad": "x" * (1 << 20), "tiers": ["y" * (1 << 20)], "priority": 10**5000}
        ask(reader, junk, f"r{i}")
        del junk
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 1 << 20


def test_hints_end_with_their_request():
    manager = TieredOffloadingManager(HostCache(4, LRUPolicy(4)))
    context = ReqContext("r", {"kvoffload": {"max_load_tokens": 7}})
    assert manager.hints(context).max_load_tokens == 7
    manager.retire([make_offload_key(bytes(32), 0)], context)
    assert len(manager._hints.known) == 0


class Counting(dict):
    """Counts how often its items are looked at."""

    looks = 0

    def items(self):
        Counting.looks += 1
        return super().items()

    def __eq__(self, other):
        raise AssertionError("a client's object was compared")

    __hash__ = None


def test_hints_are_parsed_once_a_request(reader):
    hint = Counting(max_load_tokens=7)
    for _ in range(5):
        assert ask(reader, hint).max_load_tokens == 7
    assert Counting.looks == 1


def test_a_request_without_a_name_is_read_each_time(reader):
    assert ask(reader, {"max_load_tokens": 7}, "").max_load_tokens == 7
    assert ask(reader, {"max_load_tokens": 8}, "").max_load_tokens == 8


@pytest.mark.parametrize(
    "hint",
    [
        lambda: dict.fromkeys(map(str, range(300_000)), 1),
        {"tiers": ["disk"] * 100_000},
        {"tiers": nested(sys.getrecursionlimit() * 3)},
        {"unknown": nested(sys.getrecursionlimit() * 3)},
        nested(sys.getrecursionlimit() * 3),
        {"max_load_tokens": -(10**5000)},
        {"max_load_tokens": "7"},
        {"explain": float("nan")},
        {"\ud800": "\ud800"},
    ],
)
def test_what_makes_no_sense_is_ignored_in_one_line(reader, hint, caplog):
    assert ask(reader, hint() if callable(hint) else hint) == NO_HINTS
    assert ignored(reader) == 1
    (record,) = caplog.records
    assert len(record.getMessage()) < 300


def test_a_name_from_a_client_forges_no_line(reader, caplog):
    ask(reader, {"a\nCRITICAL forged\x1b[31m" + "z" * 5_000_000: 1})
    (record,) = caplog.records
    text = record.getMessage()
    assert text.isprintable()
    assert text.isascii()
    assert text.count("z") < MAX_NAME_CHARS


def test_as_many_names_and_items_as_make_sense_are_read_and_no_more(reader):
    some = {f"unknown {i}": 1 for i in range(15)}
    assert ask(reader, {**some, "priority": 3}, "a").priority == 3
    assert ignored(reader) == 15
    assert ask(reader, {**some, "more": 1, "priority": 3}, "b") == NO_HINTS
    assert ignored(reader) == 16
    assert ask(reader, {"tiers": ["disk"] * 16}, "c").tiers == ("disk",) * 16
    assert ask(reader, {"tiers": ["disk"] * 17}, "d").tiers is None
    assert ignored(reader) == 17


def test_tiers_that_do_not_exist_are_left_out_and_counted(reader):
    assert ask(reader, {"tiers": ["disk", "tape"]}, "a").tiers == ("disk",)
    assert ignored(reader) == 1
    assert ask(reader, {"tiers": ["tape"]}, "b").tiers == ()
    assert ask(reader, {"tiers": []}, "c").tiers == ()
    assert ignored(reader) == 2


def test_a_load_of_no_tokens_may_be_wished_for_and_of_less_may_not(reader):
    assert ask(reader, {"max_load_tokens": 0}, "a").max_load_tokens == 0
    assert ask(reader, {"max_load_tokens": -1, "priority": 1}, "b") == Hints(priority=1)
    assert ignored(reader) == 1


def test_one_line_a_minute_tells_what_is_ignored(reader, clock, caplog):
    for now_s, lines in ((0.0, 1), (59.9, 1), (60.0, 2), (119.9, 2), (120.0, 3)):
        clock[0] = now_s
        ask(reader, {"x" * 41: 1}, f"r{now_s}")
        assert len(caplog.records) == lines
    assert f"hint '{'x' * 40}' of a request" in caplog.messages[0]
    assert "(1 ignored, 0 not allowed so far)" in caplog.messages[0]
    assert "(3 ignored, 0 not allowed so far)" in caplog.messages[1]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_hints_of_the_last_1024_requests_are_remembered(reader):
    for i in range(1025):
        ask(reader, {"priority": 2}, f"r{i}")
    assert len(reader.known) == 1024
    assert reader.known.get("r0", NO_HINTS) == NO_HINTS
    assert [reader.known.get(f"r{i}", NO_HINTS).priority for i in (1, 1024)] == [2, 2]
    reader.forget("r1")
    reader.forget("never")
    assert reader.known.get("r1", NO_HINTS) == NO_HINTS
