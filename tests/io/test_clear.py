"""Stores are opened again, empty: nothing of before is found, whatever happens meanwhile."""

import threading

import pytest

from kvoffload.errors import ConfigError
from kvoffload.testing.backends import keys_of
from kvoffload.testing.faults import Plan
from tests.support.planned_store import Process

KEYS = keys_of(4)
NAMESPACE = "0" * 64


def clear(client, timeout_s=20.0):
    client.renew(NAMESPACE, {}, [NAMESPACE], timeout_s)


def files(root):
    return [path.name for path in root.glob("*/??/*")]


@pytest.fixture
def opened(rig, planned, tmp_path):
    """Open a planned store on a disk; another one, in another process, finds what is there."""

    def opened(**settings):
        options = {**planned.options, "root": str(tmp_path / "kv")}
        return rig.open(("planned", "planned", options), **settings)

    return opened


def held(client, until, keys=KEYS):
    """Return what the store has, once it has listed all."""
    tier = client.tiers["planned"]
    until(lambda: None not in [tier.holds(key) for key in keys])
    return [tier.holds(key) for key in keys]


def test_nothing_is_there_when_it_returns(rig, opened, until, tmp_path, caplog):
    client = opened()
    rig.store(client, "planned", KEYS, until)
    assert len(files(tmp_path / "kv")) == 4
    clear(client)
    assert files(tmp_path / "kv") == []
    assert held(client, until) == [False] * 4
    rig.store(client, "planned", KEYS, until)
    assert not caplog.messages
    assert list((tmp_path / "kv").glob("*/manifest.json"))


def test_while_it_goes_on_jobs_are_answered_with_misses(rig, opened, planned, until):
    client = opened()
    rig.store(client, "planned", KEYS, until)
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


def test_a_second_call_takes_the_place_of_one_that_goes_on(rig, opened, planned, until):
    client = opened()
    rig.store(client, "planned", KEYS, until)
    planned.set(process=Process("slow_purge", 60.0))
    with pytest.raises(ConfigError):
        clear(client, 0.1)
    planned.set()
    clear(client)
    assert held(client, until) == [False] * 4


def test_what_a_tier_cannot_remove_is_said_and_served(rig, opened, planned, until):
    client = opened()
    rig.store(client, "planned", KEYS, until)
    planned.set(process=Process("failed_purge"))
    with pytest.raises(OSError, match="planned: nobody is there"):
        clear(client)
    until(lambda: held(client, until) == [True] * 4)
    planned.set()
    clear(client)
    assert held(client, until) == [False] * 4


def test_a_store_that_removes_nothing_is_said(rig, planned):
    client = rig.open(("shy", "shy", planned.options))
    with pytest.raises(OSError, match="shy: this store cannot remove a namespace"):
        clear(client)


def test_a_store_that_hangs_leaves_nothing_behind(rig, opened, planned, until, listener, tmp_path):
    client = opened()
    planned.set(Plan("delay", frozenset({"write"}), seconds=0.5))
    client.store("planned", KEYS, range(4), 4096, listener)
    clear(client)
    until(lambda: listener.answers)
    assert listener.answers == [([False] * 4, "cancelled", True)]
    assert held(client, until) == [False] * 4
    assert files(tmp_path / "kv") == []


def test_stores_that_cannot_be_opened_are_cleared_later(rig, opened, planned, until, monkeypatch):
    client = opened()
    rig.store(client, "planned", KEYS, until)
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
def test_an_io_process_that_dies_meanwhile_does_not_end_it(rig, opened, planned, until, tmp_path):
    client = opened()
    rig.store(client, "planned", KEYS, until)
    planned.set(process=Process("slow_purge", 60.0))
    with pytest.raises(ConfigError):
        clear(client, 0.1)
    assert len(files(tmp_path / "kv")) == 4
    planned.set()
    client._peer.kill()
    until(lambda: client.counters["died"] and not client._is_opening)
    assert held(client, until) == [False] * 4
    assert files(tmp_path / "kv") == []


@pytest.mark.parametrize("rig", ["process"], indirect=True)
def test_an_io_process_started_later_removes_nothing_again(rig, opened, until):
    client = opened()
    clear(client)
    rig.store(client, "planned", KEYS, until)
    client._peer.kill()
    until(lambda: client.counters["died"] and not client._is_opening)
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
