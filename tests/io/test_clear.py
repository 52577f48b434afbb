"""Stores are opened again, empty: nothing of before is found, whatever happens meanwhile."""

import itertools
import threading

import pytest

from kvoffload.errors import ConfigError
from kvoffload.io.protocol import Load, Store
from kvoffload.testing.backends import keys_of
from kvoffload.testing.faults import Plan
from tests.support.disk_chunks import stored_in
from tests.support.planned_store import Process

KEYS = keys_of(4)
NAMESPACE = "0" * 64


def clear(client, timeout_s=20.0):
    client.renew(NAMESPACE, {}, [NAMESPACE], timeout_s)


def files(root):
    return [chunk.key.hex() for chunk in stored_in(root)]


@pytest.fixture
def opened(rig, planned, tmp_path):
    """Open a planned store on a disk; another one, in another process, finds what is there."""

    def opened(**settings):
        options = {**planned.options, "root": str(tmp_path / "kv")}
        return rig.open(("planned", "planned", options), **settings)

    return opened


@pytest.fixture
def client(rig, opened, until):
    """The client of such a store, which has four chunks."""
    client = opened()
    rig.store(client, "planned", KEYS, until)
    return client


def held(client, until, tier="planned"):
    """Return what a store has, once it has listed all."""
    found = client.tiers[tier]
    until(lambda: None not in [found.holds(key) for key in KEYS])
    return [found.holds(key) for key in KEYS]


def test_nothing_is_there_when_it_returns(rig, client, until, tmp_path, caplog):
    assert len(files(tmp_path / "kv")) == 4
    clear(client)
    assert files(tmp_path / "kv") == []
    assert held(client, until) == [False] * 4
    rig.store(client, "planned", KEYS, until)
    assert not caplog.messages
    assert list((tmp_path / "kv").glob("*/manifest.json"))


def test_while_it_goes_on_jobs_are_answered_with_misses(rig, client, planned, until):
    planned.set(process=Process("slow_purge", 1.0))
    with pytest.raises(ConfigError, match=r"took 0\.1 s to open the tiers"):
        clear(client, 0.1)
    load = rig.load(client, "planned", KEYS)
    until(lambda: load.answers)
    assert load.answers == [([False] * 4, "no_store", True)]
    assert client.tiers["planned"].holds(KEYS[0]) is not True
    until(lambda: not client._is_opening)
    assert held(client, until) == [False] * 4
    rig.store(client, "planned", KEYS, until)


def test_a_second_call_takes_the_place_of_one_that_goes_on(client, planned, until):
    planned.set(process=Process("slow_purge", 60.0))
    with pytest.raises(ConfigError):
        clear(client, 0.1)
    planned.set()
    clear(client)
    assert held(client, until) == [False] * 4


def test_what_a_tier_cannot_remove_is_said_and_served(client, planned, until):
    planned.set(process=Process("failed_purge"))
    with pytest.raises(OSError, match="planned: nobody is there"):
        clear(client)
    until(lambda: held(client, until) == [True] * 4)
    planned.set()
    clear(client)
    assert held(client, until) == [False] * 4


def test_a_store_of_before_that_may_come_after_the_removal_is_said(
    rig, opened, planned, until, listener
):
    client = opened()
    planned.set(process=Process("stubborn_write", 60.0))
    client.begin(Store(0, "planned", KEYS, list(range(4)), 4096), listener)
    load = rig.load(client, "planned", KEYS)
    until(lambda: load.answers)  # so the store has begun
    with pytest.raises(OSError, match="planned: a call that began before hangs"):
        clear(client)
    assert not listener.answers
    planned.set()
    until(lambda: listener.answers)
    clear(client)


def test_a_load_of_before_that_hangs_stores_nothing_later(rig, planned, until, listener):
    client = rig.open(("planned", "planned", planned.options))
    planned.set(process=Process("stubborn", 60.0))
    client.begin(Load(0, "planned", KEYS, list(range(4)), 4096), listener)
    rig.store(client, "planned", keys_of(1, "later"), until)  # so the load has begun
    clear(client)
    assert not listener.answers
    planned.set()
    until(lambda: listener.answers)


def test_a_store_that_removes_nothing_is_said(rig, planned):
    client = rig.open(("shy", "shy", planned.options))
    with pytest.raises(OSError, match="shy: this store cannot remove a namespace"):
        clear(client)


def test_a_store_that_hangs_leaves_nothing_behind(rig, opened, planned, until, listener, tmp_path):
    client = opened()
    planned.set(Plan("delay", frozenset({"write"}), seconds=0.5))
    client.begin(Store(0, "planned", KEYS, list(range(4)), 4096), listener)
    clear(client)
    until(lambda: listener.answers)
    assert listener.answers == [([False] * 4, "cancelled", True)]
    assert held(client, until) == [False] * 4
    assert files(tmp_path / "kv") == []


def test_stores_that_cannot_be_opened_are_cleared_later(client, planned, until):
    planned.set(refuse="this")
    with pytest.raises(ConfigError, match="must be better"):
        clear(client)
    planned.set()
    until(lambda: not client._is_opening)
    assert held(client, until) == [False] * 4


def test_an_engine_that_ends_meanwhile_waits_for_nothing(rig, opened, planned, until):
    client = opened()
    planned.set(process=Process("slow_purge", 60.0))
    with pytest.raises(ConfigError):
        clear(client, 0.1)
    client.close(4.0)
    assert client._peer.wait(0)


@pytest.mark.parametrize("rig", ["process"], indirect=True)
def test_an_io_process_that_dies_meanwhile_does_not_end_it(client, planned, until, tmp_path):
    planned.set(process=Process("slow_purge", 60.0))
    with pytest.raises(ConfigError):
        clear(client, 0.1)
    assert len(files(tmp_path / "kv")) == 4
    planned.set()
    client._peer.kill()
    until(lambda: client.died and not client._is_opening)
    assert held(client, until) == [False] * 4
    assert files(tmp_path / "kv") == []


@pytest.mark.parametrize("rig", ["process"], indirect=True)
def test_an_io_process_started_later_removes_nothing_again(rig, opened, until):
    client = opened()
    clear(client)
    rig.store(client, "planned", KEYS, until)
    client._peer.kill()
    until(lambda: client.died and not client._is_opening)
    until(lambda: held(client, until) == [True] * 4)


def test_a_close_ends_the_wait_of_another_thread(rig, opened, planned, until):
    client, said = opened(), []

    def wait():
        try:
            clear(client, 60.0)
        except ConfigError as error:
            said.append(str(error))

    planned.set(process=Process("slow_purge", 60.0))
    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: client._is_opening)
    client.close(4.0)
    waiting.join(10)
    assert "ended before it had opened the tiers" in said[0]


def test_one_tier_of_two_is_emptied(rig, planned, until, tmp_path):
    kept = ("planned", "planned", {**planned.options, "root": str(tmp_path / "kv")})
    client = rig.open(kept, ("other", "disk", {"root": str(tmp_path / "other")}))
    for tier in ("planned", "other"):
        rig.store(client, tier, KEYS, until)
    planned.set(process=Process("slow_purge", 60.0))  # it would not end, if it were begun
    client.renew(NAMESPACE, {}, [NAMESPACE], 20.0, "other")
    assert held(client, until) == [True] * 4
    assert held(client, until, tier="other") == [False] * 4
    assert not files(tmp_path / "other")


def test_a_renewal_does_not_widen_what_is_to_be_removed(rig, planned, until, tmp_path):
    kept = ("planned", "planned", {**planned.options, "root": str(tmp_path / "kv")})
    client = rig.open(kept, ("other", "disk", {"root": str(tmp_path / "other")}))
    rig.store(client, "planned", KEYS, until)
    planned.set(refuse="this")  # the first order stays unconfirmed
    client.renew(NAMESPACE, {}, [NAMESPACE], None, "other")
    client.renew(NAMESPACE, {}, [], None)
    planned.set()
    until(lambda: client.outcome == "" or not client._is_opening)
    assert held(client, until) == [True] * 4


def test_what_is_wrong_is_told_without_a_wait(client, planned, until):
    planned.set(process=Process("failed_purge"))
    client.renew(NAMESPACE, {}, [NAMESPACE], None)
    until(lambda: client.outcome is not None)
    assert client.outcome == "planned: nobody is there"


def test_at_no_moment_is_all_removed_where_it_is_not(rig, planned):
    """Who asks between two lines of the client's thread would take it for done."""
    clients, outcomes = [], []

    def trace(frame, event, arg):
        if frame.f_code.co_name == "_settle":
            outcomes.extend(client.outcome for client in clients)
            return trace
        return None

    threading.settrace(trace)
    try:
        clients.append(rig.open(("shy", "shy", planned.options)))
    finally:
        threading.settrace(None)
    outcomes.clear()
    with pytest.raises(OSError, match="cannot remove a namespace"):
        clear(clients[0])
    assert None in outcomes
    assert "" not in outcomes


@pytest.fixture
def two_disks(rig, tmp_path):
    """Open two disk tiers, of which the second one refuses its folder from then on."""
    settings = {"min_free": 0, "trust_parent_folders": True}
    roots = [tmp_path / name for name in "ab"]
    for root in roots:
        root.mkdir(mode=0o700)
    client = rig.open(*((root.name, "disk", {**settings, "root": str(root)}) for root in roots))
    roots[1].chmod(0o777)
    return client


@pytest.mark.parametrize("rig", ["process"], indirect=True)
def test_a_tier_is_erased_once_though_another_one_cannot_be_opened(rig, two_disks, until, tmp_path):
    client, a = two_disks, two_disks.tiers["a"]
    rig.store(client, "a", KEYS[:1], until)
    with pytest.raises(ConfigError, match="folder"):
        clear(client)
    until(lambda: a.is_open)
    assert files(tmp_path / "a") == []
    rig.store(client, "a", KEYS, until)
    client._peer.kill()
    until(lambda: client.died and a.is_open and a.is_complete)
    assert [a.holds(key) for key in KEYS] == [True] * 4
    assert len(files(tmp_path / "a")) == 4
    assert client.opening.forgotten == {"b": [NAMESPACE]}
    (tmp_path / "b").chmod(0o700)
    until(lambda: not client._is_opening, 40)
    assert client.opening.forgotten == {}


def test_each_tier_removes_each_generation_once(rig, two_disks, until, monkeypatch):
    told, client = [], two_disks
    push = client._link.push

    def note(data):
        told.append(dict(client.opening.forgotten))
        push(data)

    monkeypatch.setattr(client._link, "push", note)
    names = [NAMESPACE, *(f"{i:064}" for i in range(1, 11))]
    for old, new in itertools.pairwise(names):
        client.renew(new, {}, [old], None)
        until(lambda: client.tiers["a"].is_open)
    assert [each["a"] for each in told] == [[name] for name in names[:-1]]
    # The second tier was opened with the first name alone.
    assert [each["b"] for each in told] == [[NAMESPACE]] * 10
    client.renew(NAMESPACE, {}, [NAMESPACE, names[-1]], None)
    assert told[-1]["b"] == [NAMESPACE]
    client.renew("x" * 64, {}, ["y" * 64], None)
    assert told[-1]["b"] == [NAMESPACE, "y" * 64]
