"""Stores whose opening blocks: the event loop and the other stores go on meanwhile."""

import contextlib
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kvoffload import registry
from kvoffload.backends.disk import backend as disk_backend
from kvoffload.backends.disk import store as disk_store
from kvoffload.errors import ConfigError
from kvoffload.io import client as io_client
from kvoffload.io import deadlines
from kvoffload.io import server as io_server
from kvoffload.io.protocol import Cancel, Load, Store
from kvoffload.testing.backends import keys_of
from tests.support.small_disk import small_disk

KEYS = keys_of(4)
MEMORY = ("memory", "memory", {})


class Gate:
    """Holds back each opening of a disk tier while it is shut."""

    def __init__(self, monkeypatch):
        self.is_open, self.waiting, self.opened = threading.Event(), 0, 0
        self.is_open.set()
        real = disk_backend.DiskStore

        def open_late(*args):
            self.waiting += 1
            self.is_open.wait(60)
            store = real(*args)
            self.opened += 1
            return store

        monkeypatch.setattr(disk_backend, "DiskStore", open_late)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.is_open.set()


@pytest.fixture
def client(thread_rig, tmp_path, gate):
    disk = ("disk", "disk", {"root": str(tmp_path), "min_free": 0})
    return thread_rig.open(disk, MEMORY)


def held_files(root):
    """Return how often each file that a store keeps open is open: none that it only reads."""
    found = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by another thread
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if path == root or path.name.startswith((".ledger", ".owner", "lock")):
                found[path.name] += root in (path, *path.parents)
    return found


def test_while_one_store_opens_the_others_serve_and_the_loop_goes_on(
    client, thread_rig, gate, until
):
    gate.is_open.clear()
    renewal = threading.Thread(target=client.renew, args=("1" * 64, {}, []))
    renewal.start()
    until(lambda: client.tiers["memory"].is_open)
    thread_rig.store(client, "memory", KEYS, until)
    load = thread_rig.load(client, "memory", KEYS)
    until(lambda: load.answers)
    assert load.answers == [([True] * 4, "", True)]
    assert not client.tiers["disk"].is_open
    assert renewal.is_alive()
    gate.is_open.set()
    renewal.join(20)
    thread_rig.store(client, "disk", KEYS, until)


def test_a_store_that_opens_when_another_is_wanted_is_closed(client, gate, until, tmp_path):
    # Once its first look at the root has ended.
    before = until(lambda: (found := held_files(tmp_path)).total() == 4 and found)
    gate.is_open.clear()
    for i in range(3):
        with pytest.raises(io_client.ConfigError, match="to open the tiers"):
            client.renew(f"{i}" * 64, {}, [], 0.2)
    until(lambda: gate.waiting == 4)
    gate.is_open.set()
    until(lambda: gate.opened == 4 and client.tiers["disk"].is_open)
    until(lambda: held_files(tmp_path) == before, 20)
    assert len(os.listdir(tmp_path / ".writers")) == 1


def test_a_store_that_cannot_open_keeps_no_other_from_opening(client, until, monkeypatch):
    def refuse(*args):
        raise io_client.ConfigError("root", "x", "is not there")

    with monkeypatch.context() as patched:
        patched.setattr(disk_backend, "DiskStore", refuse)
        with pytest.raises(io_client.ConfigError, match="is not there"):
            client.renew("1" * 64, {}, [])
        until(lambda: client.tiers["memory"].is_open)
        assert client.tiers["memory"].holds(KEYS[0]) is False
    until(lambda: client.tiers["disk"].is_open, 20)
    assert not client._is_opening


def test_stores_of_one_place_are_told_alike_whichever_opens_first(
    thread_rig, tmp_path, monkeypatch
):
    real = registry.open_backend

    def open_second_first(type, options, *rest, **more):
        time.sleep(0.2 if options.get("read_threads") else 0.0)
        return real(type, options, *rest, **more)

    monkeypatch.setattr(registry, "open_backend", open_second_first)
    options = {"root": str(tmp_path), "min_free": 0}
    with pytest.raises(io_client.ConfigError, match=r"backends\[1\].* backends\[0\] keeps"):
        thread_rig.open(("a", "disk", {**options, "read_threads": 1}), ("b", "disk", options))


def test_orders_of_a_store_that_opens_wait_for_it_and_no_others_do(
    client, gate, until, listener, new_listener
):
    gate.is_open.clear()
    client.renew("1" * 64, {}, [], None)
    late, ready = listener, new_listener()
    client.begin(Store(0, "disk", KEYS, list(range(4)), 4096), late)
    client.begin(Store(0, "memory", KEYS, list(range(4)), 4096), ready)
    until(lambda: ready.answers)
    time.sleep(1.0)  # a disk may take that long
    assert (late.answers, ready.answers) == ([], [([True] * 4, "", True)])
    gate.is_open.set()
    until(lambda: late.answers)
    assert late.answers == [([True] * 4, "", True)]
    until(lambda: all(client.tiers["disk"].holds(key) for key in KEYS))


@pytest.mark.parametrize("is_at_once", [True, False])
def test_orders_that_wait_for_a_store_never_reach_one_of_a_later_namespace(
    client, gate, until, listener, is_at_once
):
    gate.is_open.clear()
    client.renew("1" * 64, {}, [], None)
    client.begin(Store(0, "disk", KEYS, list(range(4)), 4096), listener)
    if not is_at_once:
        until(lambda: client._peer.session._waiting)
    client.renew("2" * 64, {}, [], None)
    until(lambda: client.tiers["memory"].is_open)  # the server knows of it
    gate.is_open.set()
    until(lambda: listener.answers)
    assert listener.answers == [([False] * 4, "no_store", True)]
    until(lambda: not client._is_opening)
    disk = client.tiers["disk"]
    until(lambda: disk.is_complete)
    assert [disk.holds(key) for key in KEYS] == [False] * 4
    assert not client._peer.session._waiting


def test_orders_wait_for_a_store_that_hangs_only_so_long(
    client, gate, until, listener, monkeypatch
):
    monkeypatch.setattr(io_server, "PATIENT_S", 0.2)
    gate.is_open.clear()
    client.renew("1" * 64, {}, [], None)
    client.begin(Store(0, "disk", KEYS, list(range(4)), 4096), listener)
    until(lambda: listener.answers)
    assert listener.answers == [([False] * 4, "no_store", True)]


def test_a_deadline_ends_an_order_that_waits_for_its_store(
    thread_rig, tmp_path, gate, until, listener, monkeypatch
):
    monkeypatch.setattr(deadlines, "CANCEL_GRACE_S", 60.0)
    disk = ("disk", "disk", {"root": str(tmp_path), "min_free": 0})
    client = thread_rig.open(disk, store_timeout_s=0.2)
    gate.is_open.clear()
    client.renew("1" * 64, {}, [], None)
    client.begin(Store(0, "disk", KEYS, list(range(4)), 4096), listener)
    until(lambda: listener.answers)
    assert listener.answers == [([False] * 4, "deadline", True)]


def test_an_order_that_is_cancelled_as_its_store_opens_does_not_begin(
    client, thread_rig, gate, until, listener
):
    thread_rig.store(client, "disk", KEYS, until)
    session = client._peer.session
    gate.is_open.clear()
    client.renew("0" * 64, {}, [], None)
    client.begin(order := Load(0, "disk", KEYS, list(range(4)), 4096), listener)
    until(lambda: session._waiting)
    tried = session._tries["disk"]
    wake = tried.set

    def set_and_cancel():  # what waits is woken, and a Cancel is read before it runs
        wake()
        session._take(Cancel(order.job))

    tried.set = set_and_cancel
    gate.is_open.set()
    until(lambda: listener.answers)
    assert listener.answers == [([False] * 4, "no_store", True)]
    assert not session._waiting


def test_a_reset_of_an_engine_does_not_wait_for_a_disk_that_hangs_as_it_opens(
    small_engine, gate, tmp_path, until
):
    disk = {"type": "disk", "root": str(tmp_path), "min_free": 0}
    connector = small_engine({"type": "memory"}, disk, io="thread").connector
    gate.is_open.clear()
    began_s = time.monotonic()
    connector.reset_cache()
    assert time.monotonic() - began_s < 5.0
    assert [tier.name for tier in connector._manager.tiers] == ["memory", "disk"]
    until(lambda: connector._spec.tiers["memory"].is_open)
    assert not connector._spec.tiers["disk"].is_open
    gate.is_open.set()
    until(lambda: connector._spec.tiers["disk"].is_open)


class Hung:
    """Holds back a read of a disk tier while it is shut."""

    def __init__(self, monkeypatch):
        self.gate, self.is_called = threading.Event(), threading.Event()
        real = disk_store.DiskStore.load_run

        def load_run(*args):
            self.is_called.set()
            self.gate.wait(60)
            return real(*args)

        monkeypatch.setattr(disk_store.DiskStore, "load_run", load_run)


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_store_whose_call_hangs_at_the_end_is_closed_once_it_returns(
    thread_rig, tmp_path, until, monkeypatch, is_reset, caplog
):
    monkeypatch.setattr(io_server, "END_S", 0.1)
    monkeypatch.setattr(io_server, "CLOSE_S", 0.1)
    hung = Hung(monkeypatch)
    disk = ("disk", "disk", {"root": str(tmp_path), "min_free": 0, "stall_s": 1.0})
    client = thread_rig.open(disk)
    thread_rig.store(client, "disk", KEYS, until)
    thread_rig.load(client, "disk", KEYS)
    assert hung.is_called.wait(20)
    if is_reset:
        client.renew("1" * 64, {}, [])
    client.close(0.2)  # the engine waits no longer
    assert not client._peer.wait(0)
    assert held_files(tmp_path).total()
    hung.gate.set()
    until(lambda: not held_files(tmp_path).total())
    assert os.listdir(tmp_path / ".writers") == []
    until(lambda: client._peer.wait(0))
    assert "exception" not in caplog.text


@pytest.fixture
def full_disk(tmp_path):
    """Return a tier on a disk of its own, and what fills the disk."""
    where = tmp_path / "disk"
    where.mkdir()
    with small_disk(where, "size=4m,mode=0700") as is_small:
        if not is_small:
            pytest.skip("needs root")
        options = {"root": str(where / "kv"), "capacity": "1MiB", "min_free": 0}

        def fill():
            with contextlib.suppress(OSError), (where / "filler").open("wb", 0) as filler:
                while filler.write(bytes(4096)):
                    pass
            return where / "filler"

        yield ("disk", "disk", options), fill


def test_an_engine_starts_without_a_full_disk_and_has_it_once_there_is_room(
    process_rig, full_disk, until, caplog
):
    tier, fill = full_disk
    client = process_rig.open(tier)
    process_rig.store(client, "disk", KEYS, until)
    client.close(10.0)
    filler = fill()
    client = process_rig.open(tier, MEMORY)
    assert "the engine starts without the tier disk: " in caplog.text
    assert "No space left on device" in caplog.text
    assert "; make space on it" in caplog.text
    process_rig.store(client, "memory", KEYS, until)
    disk = client.tiers["disk"]
    assert (disk.is_listed, disk.is_shared) == (True, True)  # vLLM asks once, at its start
    assert disk.holds(KEYS[0]) is False
    refused = process_rig.load(client, "disk", KEYS)
    assert until(lambda: refused.answers) == [([False] * 4, "no_store", True)]
    assert "the tier disk is open" not in caplog.text
    filler.unlink()
    until(lambda: client.tiers["disk"].holds(KEYS[0]))
    assert until(lambda: "the tier disk is open, at try " in caplog.text)
    found = process_rig.load(client, "disk", KEYS)
    assert until(lambda: found.answers) == [([True] * 4, "", True)]


def test_a_full_disk_hides_no_wrong_setting(process_rig, full_disk, tmp_path):
    tier, fill = full_disk
    fill()
    (tmp_path / "file").touch()
    wrong = {"root": str(tmp_path / "file"), "capacity": "1MiB"}
    with pytest.raises(ConfigError, match="is not a folder"):
        process_rig.open(tier, ("disk1", "disk", wrong))
