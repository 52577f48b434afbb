"""Open stores: a plug-in's exceptions are logged and cost only what they concern."""

import asyncio
import sys
import threading
from collections import deque

import numpy as np
import pytest

from kvoffload import open_backend
from kvoffload.backends.base import Spares, Usage
from kvoffload.backends.blocking_pool import undisturbed
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.errors import ConfigError
from kvoffload.io import client as io_client
from kvoffload.io import open_stores
from kvoffload.io.open_stores import (
    OpenStore,
    ReadInPlace,
    close_stores,
    greet,
    open_store,
    purge,
)
from kvoffload.io.presence import PresenceCache
from kvoffload.io.protocol import (
    Answered,
    Figures,
    Load,
    MessageReader,
    PresenceChanges,
    Present,
    Store,
    frame,
)
from kvoffload.io.remote_tier import RemoteTier
from kvoffload.testing import FaultyBackend
from kvoffload.transfer.slab import Slab
from tests.support.io_rig import client_over, opening

KEYS = [b"a" * 36, b"b" * 36]


class Broken(MemoryBackend):
    """Fails in everything that is optional."""

    def _fail(self, *_):
        raise RuntimeError("out of order")

    counters = take_removals = take_changes = holds = forget = _fail

    async def describe(self, facts):
        self._fail()

    async def contains(self, keys):
        self._fail()

    async def close(self):
        self._fail()


@pytest.fixture
def broken():
    return OpenStore("theirs", Broken(MemoryOptions(), "n"))


def test_a_store_that_cannot_say_what_it_has_is_only_logged(broken, caplog):
    assert broken.figures() is None
    assert broken.removals() == []
    assert broken.held(KEYS) == []
    broken.forget(KEYS)
    told = broken.changes()
    assert (told.added, told.removed, told.complete) == ([], [], True)
    assert broken.changes() is None
    assert "theirs: usage and counters failed: RuntimeError('out of order')" in caplog.messages


class Odd(MemoryBackend):
    """Answers with what is not asked for."""

    def usage(self):
        return Usage(1.5, np.int64(7), np.int32(2), {1: True})

    def counters(self):
        return {"hits": 2.0, "huge": 1 << 80, "\ud800": 1}

    def take_changes(self, limit):
        return [("a", True)]

    def take_removals(self):
        return [(b"a", None)]

    @property
    def is_complete(self):
        return np.bool_(True)


def test_figures_of_other_types_are_numbers_and_odd_keys_a_failure_of_the_store(caplog):
    store = OpenStore("odd", Odd(MemoryOptions(), "n"))
    figures = store.figures()
    assert figures.usage == (1, 7, 2, {"1": 1})
    assert figures.counters == {"hits": 2, "huge": 1 << 53, "?": 1}
    assert store.removals() == []
    assert store.changes() == PresenceChanges("odd", [], [], True)
    unknown = Figures("odd", (None, None, None, {}), {})
    (first, second) = MessageReader(to_server=False).feed(frame(figures) + frame(unknown))
    assert (first, second) == (figures, unknown)
    assert "odd: take_removals failed: ValidationError" in caplog.messages[0]


@pytest.mark.parametrize("named", [None, {"hits": None}, [1]])
def test_counters_that_are_none_keep_the_figures_as_they_were(caplog, monkeypatch, named):
    backend = MemoryBackend(MemoryOptions(), "n")
    store = OpenStore("odd", backend)
    assert store.figures() is not None
    monkeypatch.setattr(backend, "counters", lambda: named)
    assert store.figures() is None
    assert "odd: usage and counters failed" in caplog.text


async def test_a_store_whose_check_raises_is_refused(monkeypatch):
    monkeypatch.setattr(MemoryBackend, "check_fit", lambda self, chunk_bytes: 1 / 0)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        await open_store(opening([("memory", "memory", {})]), 0, {})


async def test_why_a_store_stays_down_is_told_less_and_less_often(monkeypatch, caplog):
    monkeypatch.setattr(open_stores, "TRY_AGAIN_S", 0.0)
    monkeypatch.setattr(open_stores, "_TELL_EACH", 30)
    tried, told = [], []

    async def open():
        tried.append(len(tried) + 1)
        if tried[-1] < 100:
            raise ConfigError("root", "/kv", "is no folder" if tried[-1] == 20 else "is full")
        return "open"

    def refused(error):
        told.append(tried[-1])

    assert await open_stores.until_open("disk", open, refused) == "open"
    assert told == [1, 2, 4, 8, 16, 20, 21, 30, 32, 60, 64, 90]
    assert "the tier disk is open, at try 100, after 0 s" in caplog.text


async def test_a_store_that_does_not_close_is_only_logged(broken, caplog):
    await close_stores([broken])
    assert caplog.messages == ["theirs: closing failed: out of order"]


def test_a_store_that_cannot_order_what_it_evicts_is_only_logged(caplog):
    class Stubborn(MemoryBackend, Spares):
        spare = expect = Broken._fail

    store = OpenStore("theirs", Stubborn(MemoryOptions(), "n"))
    store.spare(KEYS)
    store.expect([], 0.5)
    assert "theirs: spare failed: RuntimeError('out of order')" in caplog.messages
    OpenStore("other", MemoryBackend(MemoryOptions(), "n")).expect([], 0.5)


def test_a_store_that_cannot_be_read_in_place_is_only_logged(caplog):
    class Stubborn(MemoryBackend):
        reader = None
        in_place = places = used = Broken._fail

    store = OpenStore("theirs", Stubborn(MemoryOptions(), "n"))
    assert store.in_place() == {}
    assert store.places(KEYS) == []
    store.used(KEYS)
    assert caplog.messages == ["theirs: in_place failed: RuntimeError('out of order')"]


@pytest.mark.parametrize("what", ["\ud800", 1 << 70])
def test_what_no_message_can_carry_is_only_logged(caplog, what):
    """The session would end with it, and all tiers with that."""

    class Stubborn(MemoryBackend):
        reader, used = None, list
        places = take_removals = lambda *_: [(b"key", what)]

        def in_place(self):
            return {"place": what}

    store = OpenStore("theirs", Stubborn(MemoryOptions(), "n"))
    assert store.in_place() == {}
    assert store.places(KEYS) == store.removals() == []
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("theirs: in_place failed: ")


async def test_what_a_wrapper_passes_through_or_a_subclass_has_is_not_read_in_place(tmp_path):
    inner = open_backend("disk", {"root": str(tmp_path), "capacity": "1MiB", "min_free": 0}, "n")
    assert isinstance(inner, ReadInPlace)
    wrapper = FaultyBackend(inner)
    assert OpenStore("theirs", wrapper).in_place() == {}, "its faults would strike no such read"
    inner.__class__ = type("Theirs", (type(inner),), {})
    assert OpenStore("theirs", inner).in_place() == {}, "it may store other bytes than it reads"
    await wrapper.close()


@pytest.mark.parametrize(
    "named",
    [
        {"in_place": True, "places": 1, "used": 7, "reader": 1},
        {"in_place": dict, "places": set, "used": set},
    ],
)
def test_attributes_of_a_store_that_mean_something_else_read_nothing_in_place(named):
    theirs = type("Theirs", (MemoryBackend,), named)
    store = OpenStore("theirs", theirs(MemoryOptions(), "n"))
    assert store.in_place() == {}
    assert store.places(KEYS) == []
    store.used(KEYS)


async def test_a_store_says_why_a_namespace_stays(broken):
    class Unable(MemoryBackend):
        purge = None

    broken.backend.purge = broken.backend.close
    unable, able = (
        OpenStore(kind.__name__, kind(MemoryOptions(), "n")) for kind in (Unable, MemoryBackend)
    )
    assert [await purge(store, ["old"]) for store in (broken, unable, able)] == [
        "theirs: Broken.close() takes 1 positional argument but 2 were given",
        "Unable: this store cannot remove a namespace",
        "",
    ]


async def test_a_store_that_cannot_connect_is_named_in_the_log(broken, caplog):
    with pytest.raises(RuntimeError):  # the server logs it
        await greet(broken, {})
    assert caplog.messages == ["the first call of a store failed: out of order"]


async def test_changes_are_told_once_and_in_portions():
    store = OpenStore("memory", MemoryBackend(MemoryOptions(), "n"))
    first = store.changes()
    assert (first.added, first.removed, first.complete) == ([], [], True)
    assert store.changes() is None
    keys = [i.to_bytes(36, "big") for i in range(1030)]
    await store.backend.write(keys, [memoryview(b"x")] * len(keys))
    portions = [store.changes(), store.changes()]
    assert [len(each.added) for each in portions] == [1024, 6]
    assert store.changes() is None
    store.forget(keys[:1])
    assert store.changes().removed == keys[:1]


class Listing(MemoryBackend):
    """Lists very many chunks that are not there."""

    left = 40_000

    def take_changes(self, limit):
        start = self.left
        self.left = max(0, start - limit)
        return [(i.to_bytes(36, "big"), True) for i in range(self.left, start)]

    is_complete = property(lambda self: not self.left)


def test_an_engine_that_reads_nothing_is_told_no_more_than_its_socket_takes(until, monkeypatch):
    store, go_on, real = Listing(MemoryOptions(), "n"), threading.Event(), RemoteTier.announced

    def announced(self, *message):
        go_on.wait(20)
        real(self, *message)

    monkeypatch.setattr(RemoteTier, "announced", announced)
    lefts = []
    threading.Timer(1.0, lambda: (lefts.append(store.left), go_on.set())).start()
    client = client_over({"t": store}, Slab(1, 4096))
    until(lambda: client.tiers["t"].is_complete)
    assert all(client.tiers["t"].holds(i.to_bytes(36, "big")) for i in range(40_000))
    assert lefts[0] > 20_000, "the rest of the list waits in the server's memory"
    client.close()


class Each(MemoryBackend):
    """Reports each chunk, and a moment later answers for all."""

    async def read_each(self, keys, into, arrived):
        for i in range(len(keys)):
            arrived(i)
        await asyncio.sleep(0)
        return [True] * len(keys)


def test_a_chunk_that_has_arrived_does_not_arrive_again_with_its_answer(until, listener):
    """Reported and answered for in one message, it would be copied twice."""
    client = client_over({"t": Each(MemoryOptions(), "n")}, Slab(4, 4096))
    client.begin(Load(0, "t", [b"%d" % i * 36 for i in range(4)], list(range(4)), 4096), listener)
    until(lambda: listener.answers)
    assert listener.answers == [([True] * 4, "", True)]
    assert sorted(listener.numbers) == [0, 1, 2, 3]
    client.close()


def test_a_load_ends_though_its_store_hangs_once_all_chunks_have_arrived(until, listener):
    """As a server of the host that stores them nearer: its engine's request goes on."""
    go_on = threading.Event()

    class Copies(Each):
        async def read_each(self, *call):
            answers = await super().read_each(*call)
            await undisturbed(asyncio.ensure_future(asyncio.to_thread(go_on.wait, 60)))
            return answers

    client = client_over({"t": Copies(MemoryOptions(), "n")}, Slab(4, 4096), load_timeout_s=3600)
    client.begin(Load(0, "t", KEYS, [0, 1], 4096), listener)
    until(lambda: listener.answers)
    assert (listener.answers, listener.releases) == ([([True] * 2, "", False)], 0)
    go_on.set()
    until(lambda: listener.releases)
    client.close()


@pytest.mark.parametrize(
    "answers",
    [[np.zeros(2)] * 2, dict.fromkeys(KEYS, False), {False, None}],
    ids=["neither true nor false", "by key", "without order"],
)
def test_answers_that_are_not_one_for_each_key_are_a_failed_read(
    until, listener, monkeypatch, answers
):
    async def read(*_):
        return answers

    backend = MemoryBackend(MemoryOptions(), "n")
    monkeypatch.setattr(backend, "read", read)
    client = client_over({"t": backend}, Slab(4, 4096))
    client.begin(Load(0, "t", KEYS, list(range(2)), 4096), listener)
    until(lambda: listener.answers)
    assert listener.answers == [([False] * 2, "error", True)]
    assert client.died == 0
    client.close()


# ---- what the log says ----


def test_a_store_that_raises_at_each_call_takes_one_line_a_second(until, listener, caplog):
    class Raising(MemoryBackend):
        async def read(self, keys, into):
            raise RuntimeError("out of order")

    client = client_over({"t": Raising(MemoryOptions(), "n")}, Slab(40, 4096))
    client.begin(Load(0, "t", [b"%d" % i * 36 for i in range(40)], list(range(40)), 4096), listener)
    until(lambda: listener.answers)
    client.close()
    assert [line for line in caplog.messages if "read of" in line] == [
        "t: read of 8 chunks failed: out of order"
    ]


def test_a_server_that_is_a_thread_is_not_said_to_be_killed(until, listener, caplog, monkeypatch):
    go_on = threading.Event()

    class Hung(MemoryBackend):
        async def read(self, keys, into):
            go_on.wait(20)  # on the event loop
            return [False] * len(keys)

    monkeypatch.setattr(io_client, "SILENT_S", 0.1)
    client = client_over({"t": Hung(MemoryOptions(), "n")}, Slab(2, 4096), load_timeout_s=0.1)
    client.begin(Load(0, "t", KEYS, list(range(2)), 4096), listener)
    until(lambda: [line for line in caplog.messages if "has been silent" in line])
    go_on.set()
    client.close()
    assert "the I/O thread has been silent for 0.1 s; it cannot be ended" in caplog.messages
    assert "it is killed" not in caplog.text


# ---- what the engine's process knows, on two threads ----


@pytest.fixture
def asked():
    """Events at which a tier had something to send."""
    return []


@pytest.fixture
def tier(asked):
    tier = RemoteTier("t", 1.0, lambda: asked.append(True))
    tier.opened(has_index=True)
    return tier


def test_a_key_forgotten_while_others_are_taken_is_taken_too(tier, asked):
    class Interrupted(deque):
        def popleft(self):
            if late:
                tier.forget([late.pop()])
            return super().popleft()

    late = [KEYS[1]]
    tier.unsent = Interrupted()
    tier.forget(KEYS[:1])
    assert tier.take_forgotten() == KEYS
    assert asked == [True]


def test_a_key_forgotten_as_the_taking_of_others_ends_is_sent(tier, asked):
    taken = []

    class Interrupted(deque):
        def extend(self, keys):
            taken.extend(tier.take_forgotten())
            super().extend(keys)

    tier.unsent = Interrupted()
    for key in KEYS:
        tier.forget([key])
    assert (taken, asked) == (KEYS[:1], [True, True])


def test_counters_may_be_read_while_the_store_closes(tier):
    """No counter falls, or counts twice, on a thread that reads it meanwhile."""
    seen, failures, is_over = [], [], threading.Event()

    def read():
        try:
            while not is_over.is_set():
                seen.append(sum(tier.counters.values()))
        except Exception as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(400):  # a new name each time
            tier.take(Figures("t", (0, None, 0, {}), {"every": 1000, f"{number}": 1}))
            tier.reset()
    finally:
        is_over.set()
        reader.join()
        sys.setswitchinterval(before)
    assert not failures
    assert seen == sorted(seen)
    assert not {total % 1001 for total in seen} - {0}


@pytest.mark.parametrize("verb", ["holds", "set", "answer", "take_questions"])
def test_a_tier_that_is_reset_while_it_is_asked_or_told_raises_nothing(tier, monkeypatch, verb):
    """By another thread, between a look at its cache and the use of it."""
    real = getattr(PresenceCache, verb)

    def reset_first(cache, *given):
        tier.reset()
        return real(cache, *given)

    tier.opened(has_index=False)
    monkeypatch.setattr(PresenceCache, verb, reset_first)
    answer = Answered(1, b"\1\1", "", 0.1)
    tier.holds(KEYS[0])
    tier.opened(has_index=False)
    tier.moved(Store(1, "t", KEYS, [0, 1], 4096), answer)
    tier.opened(has_index=False)
    tier.answered(Present("t", KEYS, [True, True]))
    tier.opened(has_index=False)
    assert tier.take_questions() == []
