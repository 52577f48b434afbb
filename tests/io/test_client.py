"""The I/O client and its server, in both forms: jobs, presence, figures, refusals, the end."""

import asyncio
import logging
import socket
import threading
import time

import pytest

from kvoffload.backends.memory import MemoryBackend
from kvoffload.errors import ConfigError
from kvoffload.io import chunk_jobs, deadlines, server
from kvoffload.io.protocol import Load, Store
from kvoffload.testing import Plan
from kvoffload.testing.backends import keys_of
from tests.support.planned_store import Process

KEYS = keys_of(20)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_chunks_come_back_byte_for_byte_and_arrive_once_each(rig, until, tmp_path, kind):
    options = {"root": str(tmp_path), "min_free": 0} if kind == "disk" else {}
    client = rig.open(("tier", kind, options))
    rig.store(client, "tier", KEYS, until)
    load = rig.load(client, "tier", KEYS, first=30)
    until(lambda: load.answers)
    assert load.answers == [([True] * 20, "", True)]
    assert set(load.numbers) <= set(range(20))
    assert all(rig.has(key, 30 + i) for i, key in enumerate(KEYS))
    assert not rig.slab.rows[:30].any()


def test_each_chunk_has_its_own_answer_and_reason(rig, until):
    client = rig.open()
    rig.store(client, "memory", KEYS[:4], until)
    load = rig.load(client, "memory", KEYS[2:6])
    until(lambda: load.answers)
    assert load.answers == [([True, True, False, False], "missing", True)]


@pytest.mark.parametrize("kind", ["memory", "disk", "folder"])
def test_a_chunk_that_the_store_has_is_no_traffic(rig, until, tmp_path, kind):
    options = {} if kind == "memory" else {"root": str(tmp_path), "capacity": "1MiB"}
    client = rig.open(("tier", kind, options | ({"min_free": 0} if kind == "disk" else {})))
    for keys in (KEYS[:4], KEYS[:6], KEYS[:6]):
        rig.store(client, "tier", keys, until)
    stored = {name: value for name, _, value in client.tiers["tier"]._stores.samples()}
    assert (stored["store_chunks"], stored["store_bytes"]) == (6, 6 * 4096)


def test_sizes_of_chunks_may_differ(rig, until, listener):
    client = rig.open()
    rig.slab.rows[:] = 7
    client.begin(Store(0, "memory", KEYS[:2], [0, 1], [1000, 4096]), listener)
    until(lambda: listener.answers)
    rig.slab.rows[:] = 0
    again = type(listener)()
    client.begin(Load(0, "memory", KEYS[:2], [2, 3], [1000, 4096]), again)
    until(lambda: again.answers)
    assert again.answers[0][0] == [True, True]
    assert (rig.slab.rows[2][:1000].all(), rig.slab.rows[2][1000:].any()) == (True, False)
    assert rig.slab.rows[3].all()


def test_a_job_without_chunks_is_answered(rig, until):
    load = rig.load(rig.open(), "memory", [])
    assert until(lambda: load.answers) == [([], "", True)]


def test_an_unknown_tier_is_refused_at_once(rig, listener):
    client = rig.open()
    with pytest.raises(KeyError):
        client.begin(Load(0, "none", KEYS, list(range(20)), 4096), listener)
    assert not listener.answers


# ---- presence ----


def test_what_was_stored_before_is_listed_and_what_leaves_is_told(rig, until, tmp_path):
    disk = ("disk", "disk", {"root": str(tmp_path), "min_free": 0, "capacity": "1MiB"})
    first = rig.open(disk)
    rig.store(first, "disk", KEYS, until)
    first.close()
    client = rig.open(disk)
    tier = client.tiers["disk"]
    until(lambda: tier.is_complete)
    assert [tier.holds(key) for key in KEYS] == [True] * 20
    assert tier.num_leading([*KEYS[:5], b"other", *KEYS]) == 5
    assert tier.holds(b"other") is False
    client.remove("disk", KEYS[:1])
    until(lambda: tier.holds(KEYS[0]) is False)
    assert tier.holds(KEYS[1])


@pytest.mark.parametrize("rig", ["thread"], indirect=True)
def test_a_store_that_opens_tells_what_it_has_before_the_next_look_at_changes(
    rig, until, tmp_path, monkeypatch
):
    disk = ("disk", "disk", {"root": str(tmp_path), "min_free": 0})
    first = rig.open(disk)
    rig.store(first, "disk", KEYS, until)
    first.close()
    monkeypatch.setattr(server, "CHANGES_S", 3600.0)
    tier = rig.open(disk).tiers["disk"]
    until(lambda: tier.is_complete)
    assert tier.num_leading(KEYS) == len(KEYS)


@pytest.mark.parametrize("name", ["planned", "shy"])
def test_a_tier_holds_nothing_once_its_client_is_closed(rig, until, planned, name):
    if name == "shy":  # has no index
        planned.set(Plan("lie", frozenset({"contains"})))
    client = rig.open((name, name, planned.options))
    tier = client.tiers[name]
    rig.store(client, name, KEYS[:2], until)
    assert tier.is_listed is (name == "planned")
    assert tier.holds(KEYS[0])
    client.close()
    assert [tier.holds(key) for key in KEYS[:3]] == [False] * 3
    assert tier.num_leading(KEYS[:2]) == 0


def test_a_forgotten_chunk_is_absent_until_it_is_stored_again(rig, until):
    client = rig.open()
    rig.store(client, "memory", KEYS[:2], until)
    tier = client.tiers["memory"]
    tier.forget(KEYS[:1])
    assert tier.holds(KEYS[0]) is False
    time.sleep(0.1)
    assert [tier.holds(key) for key in KEYS[:2]] == [False, True]
    rig.store(client, "memory", KEYS[:1], until)
    assert tier.holds(KEYS[0])


def test_thousands_of_chunks_are_listed_in_several_messages(rig, until, tmp_path, listener):
    keys = keys_of(3000)
    disk = ("disk", "disk", {"root": str(tmp_path), "min_free": 0, "capacity": "64MiB"})
    first = rig.open(disk, store_timeout_s=60)
    stores = [type(listener)() for _ in range(50)]
    for i, store in enumerate(stores):
        part = keys[60 * i : 60 * i + 60]
        first.begin(Store(0, "disk", list(part), list(range(len(part))), 4096), store)
    until(lambda: all(store.answers for store in stores), 60)
    first.close()
    tier = rig.open(disk, lookup_timeout_s=30).tiers["disk"]
    until(lambda: all(tier.holds(key) is not None for key in keys))
    assert all(tier.holds(key) for key in keys)


def test_a_store_without_an_index_is_asked_in_one_question(rig, until, planned, monkeypatch):
    """A store that only contains() tells of: here FaultyBackend without the index of its inner."""
    planned.set(Plan("lie", frozenset({"contains"})))
    client = rig.open(("shy", "shy", planned.options))
    tier = client.tiers["shy"]
    assert [tier.holds(key) for key in KEYS] == [None] * 20
    until(lambda: all(tier.holds(key) for key in KEYS))
    tier.forget(KEYS[:1])
    assert tier.holds(KEYS[0]) is False


def test_a_chunk_is_there_when_its_store_is_answered(rig, until, planned, listener):
    client = rig.open(("shy", "shy", planned.options))
    tier, seen = client.tiers["shy"], []
    until(lambda: tier.holds(KEYS[0]) is False)
    listener.ended = lambda *_: seen.append(tier.holds(KEYS[0]))
    client.begin(Store(0, "shy", KEYS[:1], [0], 4096), listener)
    assert until(lambda: seen) == [True]


def test_evictions_and_figures_are_known_when_the_store_is_answered(rig, until, listener):
    client = rig.open(("memory", "memory", {"capacity": 3 * 4096}))
    client.begin(Store(0, "memory", KEYS[:5], list(range(5)), 4096), listener)
    until(lambda: listener.answers)
    tier = client.tiers["memory"]
    assert [removal[:] for removal in tier.take_removals()] == [
        (KEYS[0], "evicted"),
        (KEYS[1], "evicted"),
    ]
    assert [tier.holds(key) for key in KEYS[:5]] == [False, False, True, True, True]
    assert tier.usage[:3] == (3 * 4096, 3 * 4096, 3)
    assert tier.counters["evicted"] == 2


# ---- refusals ----


def test_what_cannot_be_opened_is_the_error_it_is(rig, until, tmp_path):
    threads = threading.active_count()
    disk = ("disk", "disk", {"root": str(tmp_path / "a"), "min_free": 0})
    for second, field in (
        (("b", "disk", {"root": "/proc/none"}), "backends[1].root"),
        (("b", "disk", {"rot": "/x"}), "backends[1].rot"),
        (("b", "tape", {}), "backends[1].type"),
        (("b", "disk", disk[2]), "backends[1]"),
        (("b", "memory", {"capacity": "lots"}), "backends[1].capacity"),
    ):
        with pytest.raises(ConfigError) as caught:
            rig.open(disk, second)
        assert caught.value.field == field
        assert caught.value.remedy
    until(lambda: threading.active_count() <= threads)


def test_a_renewal_changes_what_is_there_and_a_refused_one_leaves_nothing(rig, until, planned):
    client = rig.open(("planned", "planned", planned.options))
    rig.store(client, "planned", KEYS[:2], until)
    tier = client.tiers["planned"]
    client.renew("1" * 64, {}, [])
    assert tier.holds(KEYS[0]) is False
    rig.store(client, "planned", KEYS[:2], until)
    planned.set(refuse="this")
    with pytest.raises(ConfigError, match="must be better"):
        client.renew("2" * 64, {}, [])
    assert tier.holds(KEYS[0]) is False
    load = rig.load(client, "planned", KEYS[:2])
    assert until(lambda: load.answers) == [([False, False], "no_store", True)]
    planned.set()
    client.renew("3" * 64, {}, [])
    rig.store(client, "planned", KEYS[:2], until)


# ---- deadlines and the end ----


def test_a_hung_load_is_answered_at_its_deadline_and_released(
    rig, until, planned, monkeypatch, caplog
):
    client = rig.open(("planned", "planned", planned.options), load_timeout_s=0.2)
    rig.store(client, "planned", KEYS[:1], until)
    planned.set(Plan("hang", frozenset({"read"})))
    with monkeypatch.context() as patient:
        patient.setattr(deadlines, "CANCEL_GRACE_S", 60.0)
        load = rig.load(client, "planned", KEYS[:1])
        until(lambda: load.answers)
    assert load.answers == [([False], "deadline", True)]
    assert "tier planned: a load of 1 chunks is given up after 0.2 s" in caplog.text
    planned.set(process=Process("stubborn", 60.0))
    load = rig.load(client, "planned", KEYS[:1], first=3)
    until(lambda: load.answers)
    assert (load.answers, load.releases) == ([([False], "deadline", False)], 0)
    planned.set()
    until(lambda: load.releases)
    assert rig.slab.rows[3].all(), "its late write came before its release"
    assert len(load.answers) == 1


def test_only_a_job_with_a_short_deadline_wakes_the_clients_thread(
    rig, until, planned, monkeypatch
):
    client = rig.open(("planned", "planned", planned.options), load_timeout_s=1.5)
    rig.store(client, "planned", KEYS[:1], until)
    planned.set(Plan("hang", frozenset({"read"})))
    wake, woken = client._link.wake, []
    monkeypatch.setattr(client._link, "wake", lambda: (woken.append(True), wake()))
    until(lambda: not client._jobs.unanswered and not client._jobs.late)
    patient = rig.load(client, "planned", KEYS[:1])
    assert not woken
    client._load_timeout_s = 0.1
    hurried = rig.load(client, "planned", KEYS[:1], first=3)
    assert woken, "the thread may be asleep for longer than this job has"
    for load in (patient, hurried):
        until(lambda load=load: load.answers)
        assert [reason for _, reason, _ in load.answers] == ["deadline"]


def test_a_load_that_goes_on_may_take_longer_than_its_timeout(rig, until, tmp_path, planned):
    """Calls of eight chunks end one after the other; each gives the load more time."""
    client = rig.open(("planned", "planned", planned.options), load_timeout_s=1.5)
    keys = keys_of(60)
    rig.store(client, "planned", keys, until)
    planned.set(process=Process("queue", 0.2))
    begun = time.monotonic()
    load = rig.load(client, "planned", keys)
    until(lambda: load.answers)
    assert load.answers == [([True] * 60, "", True)]
    assert time.monotonic() - begun > 1.5


@pytest.mark.parametrize("is_hung", [False, True])
def test_a_load_that_waits_behind_another_has_time_while_that_one_goes_on(
    rig, until, planned, monkeypatch, is_hung
):
    monkeypatch.setattr(deadlines, "CANCEL_GRACE_S", 60.0)
    client = rig.open(("planned", "planned", planned.options), load_timeout_s=1.5)
    keys = keys_of(56)
    rig.store(client, "planned", keys, until)
    hang = [Plan("hang", frozenset({"read"}), keys=frozenset(keys[48:]))] if is_hung else []
    planned.set(*hang, process=Process("queue", 0.28))  # eight chunks at a time
    first = rig.load(client, "planned", keys[:48])
    begun = time.monotonic()
    second = rig.load(client, "planned", keys[48:], first=48)
    until(lambda: first.answers)
    ended = time.monotonic()
    assert first.answers == [([True] * 48, "", True)]
    assert ended - begun > 1.5
    until(lambda: second.answers)
    assert second.answers == [([not is_hung] * 8, "deadline" if is_hung else "", True)]
    if is_hung:
        assert 1.0 < time.monotonic() - ended < 60.0


def test_the_end_answers_every_job_and_does_not_wait_for_a_hung_store(rig, until, planned):
    client = rig.open(("planned", "planned", planned.options))
    planned.set(process=Process("stubborn", 90.0))
    load = rig.load(client, "planned", KEYS[:1])
    time.sleep(0.1)
    begun = time.monotonic()
    client.close(0.3)
    assert time.monotonic() - begun < 60.0
    assert [(reason, settled) for _, reason, settled in load.answers] == [("shutdown", False)]
    after = rig.load(client, "planned", KEYS[:1])
    assert after.answers == [([False], "io_died", True)]
    client.tiers["planned"].forget(KEYS[:1])
    client.close()


@pytest.mark.parametrize("rig", ["thread"], indirect=True)
def test_an_answer_that_fails_ends_the_server_and_frees_the_slots(rig, until, monkeypatch):
    client = rig.open(load_timeout_s=0.2)
    rig.store(client, "memory", KEYS, until)

    def no_memory(*_):
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(chunk_jobs, "Answered", no_memory)
    load = rig.load(client, "memory", KEYS)
    until(lambda: load.answers and load.releases)
    assert load.answers[0][1:] == ("io_died", False)
    until(lambda: not client._is_opening)
    rig.store(client, "memory", KEYS, until)
    assert client.died == 1


def test_a_cut_connection_frees_no_slot_that_a_call_still_writes_to(
    thread_rig, until, planned, monkeypatch
):
    """A call that hangs outlives its session; only a process could be killed with it."""
    monkeypatch.setattr(server, "END_S", 0.05)
    client = thread_rig.open(("planned", "planned", planned.options))
    thread_rig.store(client, "planned", KEYS[:1], until)
    planned.set(process=Process("stubborn", 60.0))
    load = thread_rig.load(client, "planned", KEYS[:1])
    first = client._peer
    until(lambda: first.session._jobs.calls)
    with client._link.lock:
        client._link._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: load.answers)
    assert load.answers == [([False], "io_died", False)]
    time.sleep(1.0)
    assert load.releases == 0
    planned.set()
    until(lambda: load.releases)
    assert thread_rig.slab.slot(0, 4096) == b"\xee" * 4096
    until(lambda: client._peer is not first and not client._is_opening)
    thread_rig.store(client, "planned", KEYS[:1], until)


def test_a_process_whose_call_hangs_ends_with_the_engine(process_rig, until, planned):
    """Its calls end with it: no engine waits for them at its own end."""
    client = process_rig.open(("planned", "planned", planned.options))
    process_rig.store(client, "planned", KEYS[:1], until)
    planned.set(process=Process("stubborn", 60.0))
    load = process_rig.load(client, "planned", KEYS[:1])
    asked_s = client._heard_s
    until(lambda: client._heard_s > asked_s + 2 * server.FIGURES_S)  # it has begun
    client.close(60.0)
    assert client._peer.wait(0)
    assert load.answers == [([False], "shutdown", False)]
    assert time.monotonic() < client._close_by_s - 20


def test_a_store_whose_end_hangs_keeps_no_tier_away(thread_rig, until, plug_in, monkeypatch):
    """A thread that goes on until its calls have ended does not wait for what uses no slot."""
    monkeypatch.setattr(server, "CLOSE_S", 0.05)
    may_end = threading.Event()

    class Hanging(MemoryBackend):
        async def close(self):
            while not may_end.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await super().close()

    plug_in("hanging", Hanging)
    client = thread_rig.open(("hanging", "hanging", {}), ("memory", "memory", {}))
    first = client._peer
    with client._link.lock:
        client._link._sock.shutdown(socket.SHUT_RDWR)
    try:
        until(lambda: client._peer is not first and not client._is_opening)
        thread_rig.store(client, "memory", KEYS[:1], until)
    finally:
        may_end.set()


def test_a_hung_store_does_not_keep_another_from_closing(rig, until, tmp_path, planned):
    disk = ("disk", "disk", {"root": str(tmp_path / "kv"), "min_free": 0})
    client = rig.open(("planned", "planned", planned.options), disk)
    rig.store(client, "disk", KEYS[:1], until)
    planned.set(process=Process("stubborn", 6.0))
    rig.load(client, "planned", KEYS[:1])
    time.sleep(0.1)
    client.close(4.0)
    assert not list((tmp_path / "kv" / ".writers").iterdir()), "the disk store was left open"


def test_logs_of_the_server_are_logs_of_the_engine(rig, until, planned, caplog):
    with caplog.at_level(logging.WARNING, "kvoffload"):
        client = rig.open(("planned", "planned", planned.options))
        planned.set(Plan("raise", frozenset({"read"})))
        load = rig.load(client, "planned", KEYS[:1])
        until(lambda: "a fault was planned here" in caplog.text)
    assert until(lambda: load.answers) == [([False], "error", True)]
    (record,) = [r for r in caplog.records if "planned here" in r.getMessage()]
    assert record.name == "kvoffload.io.open_stores"
