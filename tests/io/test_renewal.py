"""Stores are opened again under another namespace while the server still tells of the old ones."""

import asyncio
import threading
import time

import pytest

from kvoffload import registry
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.io.protocol import Load, Opened, PresenceChanges, Store, TierOpened
from kvoffload.testing.backends import keys_of
from kvoffload.transfer.slab import Slab
from tests.support.io_rig import client_over

KEYS = keys_of(4)


@pytest.fixture
def late_word(rig, until, monkeypatch):
    """A client whose thread is taking in a word of the stores until its tiers are reset."""
    client = rig.open()
    rig.store(client, "memory", KEYS, until)
    tier = client.tiers["memory"]
    announced, reset, take = tier.announced, tier.reset, client._take
    is_begun, go_on, is_taken = (threading.Event() for _ in range(3))

    def announced_late(message):
        is_begun.set()
        go_on.wait(20)
        announced(message)

    def take_and_tell(message):
        if isinstance(message, Opened):
            time.sleep(0.2)  # longer than the renewal needs to begin waiting for this message
        take(message)
        if is_begun.is_set() and isinstance(message, PresenceChanges):
            is_taken.set()

    def reset_after_it():
        go_on.set()
        assert is_taken.wait(20)
        reset()

    monkeypatch.setattr(client, "_take", take_and_tell)
    monkeypatch.setattr(tier, "announced", announced_late)
    client.remove("memory", KEYS[:1])
    assert is_begun.wait(20)
    monkeypatch.setattr(tier, "reset", reset_after_it)
    return client


def test_a_late_word_of_the_old_stores_does_not_end_a_renewal(rig, until, late_word):
    late_word.renew("1" * 64, {}, [])
    tier = late_word.tiers["memory"]
    assert [tier.holds(key) for key in KEYS] == [False] * 4
    rig.store(late_word, "memory", KEYS, until)


def test_stores_of_the_old_namespace_that_open_late_do_not_end_a_renewal(rig, monkeypatch):
    """A server that was started in place of a dead one opens them, and then those renewed."""
    client = rig.open()
    wake, take, are_old_said = client._link.wake, client._take, threading.Event()

    def take_after_the_old_words(message):
        assert are_old_said.wait(20)
        take(message)

    def wake_after_the_old_words():
        take(Opened(0, [TierOpened("memory", True, False)]))
        take(PresenceChanges("memory", KEYS, [], True))
        are_old_said.set()
        wake()

    monkeypatch.setattr(client, "_take", take_after_the_old_words)
    monkeypatch.setattr(client._link, "wake", wake_after_the_old_words)
    client.renew("1" * 64, {}, [])
    assert [client.tiers["memory"].holds(key) for key in KEYS] == [False] * 4


class Gated(MemoryBackend):
    """Each write and each question waits for the gate, also after the store was closed."""

    def __init__(self):
        super().__init__(MemoryOptions(), "old")
        self.is_called, self.gate, self.is_past = (threading.Event() for _ in range(3))

    async def contains(self, keys):
        await self._pass(keys)
        return await super().contains(keys)

    async def write(self, keys, chunks):
        await self._pass(keys)
        return await super().write(keys, chunks)

    async def close(self):
        pass

    async def _pass(self, keys):
        if keys:
            self.is_called.set()
            await asyncio.to_thread(self.gate.wait, 20)
            self.is_past.set()


class Unlisted:
    """A memory tier without an index."""

    def __init__(self, inner):
        self.contains, self.write, self.close = inner.contains, inner.write, inner.close


@pytest.fixture
def client_of(monkeypatch, closing):
    """Start a client over a store; a renewal opens another one in its place."""

    def client_of(store, heir):
        client = closing(client_over({"memory": store}, Slab(4, 4096)))
        monkeypatch.setattr(registry, "open_backend", lambda *_, **__: heir)
        return client

    return client_of


def test_a_job_that_ends_on_an_old_store_tells_nothing_of_the_new_one(client_of, until, listener):
    old = Gated()
    client = client_of(old, MemoryBackend(MemoryOptions(), "new"))
    tier = client.tiers["memory"]
    client.begin(Store(0, "memory", KEYS, list(range(4)), 4096), listener)
    assert old.is_called.wait(20)
    client.renew("1" * 64, {}, [])
    old.gate.set()
    until(lambda: listener.answers)
    assert [tier.holds(key) for key in KEYS] == [False] * 4
    assert tier.usage.chunks == 0


def test_an_answer_of_an_old_store_is_none_of_the_new_one(client_of, until, listener):
    old, new = Gated(), Gated()
    client = client_of(Unlisted(old), Unlisted(new))
    tier = client.tiers["memory"]
    old.store(KEYS[0], memoryview(b"x"))
    assert tier.holds(KEYS[0]) is None
    assert old.is_called.wait(20)
    client.renew("1" * 64, {}, [])
    assert tier.holds(KEYS[0]) is None
    assert new.is_called.wait(20)
    old.gate.set()
    assert old.is_past.wait(20)
    client.begin(
        Load(0, "memory", [], [], 4096), listener
    )  # answered after any word of the old store
    until(lambda: listener.answers)
    new.gate.set()
    until(lambda: tier.holds(KEYS[0]) is not None)
    assert tier.holds(KEYS[0]) is False


def test_a_store_that_ends_late_is_none_of_the_new_one(client_of, until, listener):
    old, new = Gated(), Gated()
    client = client_of(Unlisted(old), Unlisted(new))
    tier = client.tiers["memory"]
    client.begin(Store(0, "memory", KEYS, list(range(4)), 4096), listener)
    assert old.is_called.wait(20)
    client.renew("1" * 64, {}, [])
    old.gate.set()
    until(lambda: listener.answers)
    assert listener.answers == [([True] * 4, "", True)]
    assert tier.holds(KEYS[0]) is None
    new.gate.set()
    until(lambda: tier.holds(KEYS[0]) is not None)
    assert tier.holds(KEYS[0]) is False


class Removing(MemoryBackend):
    """Notes the namespaces that it removes while it is open; its closing waits for the gate."""

    def __init__(self):
        super().__init__(MemoryOptions(), "n")
        self.gate, self.removed, self.is_shut = threading.Event(), [], False

    async def close(self):
        self.is_shut = True
        await asyncio.to_thread(self.gate.wait, 20)

    async def purge(self, namespaces):
        if not self.is_shut:
            self.removed += namespaces
        return 0


@pytest.mark.parametrize("has_opened", [True, False])
def test_what_a_store_had_to_remove_as_it_was_replaced_the_next_one_removes(
    closing, until, monkeypatch, has_opened
):
    first, second, third = stores = [Removing() for _ in range(3)]
    client, opens = closing(client_over({"memory": first}, Slab(4, 4096))), threading.Event()
    heirs = iter((second, third))

    def open_next(*_, **__):
        if (heir := next(heirs)) is third:
            opens.wait(20)
        return heir

    monkeypatch.setattr(registry, "open_backend", open_next)
    monkeypatch.setattr(MemoryBackend, "opens_apart", True, raising=False)
    client.renew("1" * 64, {}, ["0" * 64])
    client.renew("2" * 64, {}, ["1" * 64], timeout_s=None)
    until(lambda: second.is_shut)
    if has_opened:
        opens.set()
        until(lambda: client.outcome == "")
    for store in stores:
        store.gate.set()
    if not has_opened:
        time.sleep(0.1)  # the second store finds that it is closed
        opens.set()
    until(lambda: {*third.removed} == {"0" * 64, "1" * 64})
    assert not second.removed


def test_what_a_store_had_to_remove_is_not_lost_with_one_that_is_replaced_as_it_erases(
    closing, until, monkeypatch
):
    first, second, third, fourth = stores = [Removing() for _ in range(4)]
    is_asked = threading.Event()

    async def hangs(namespaces):
        is_asked.set()
        await asyncio.sleep(20)

    third.purge = hangs
    client, heirs = closing(client_over({"memory": first}, Slab(4, 4096))), iter(stores[1:])
    monkeypatch.setattr(registry, "open_backend", lambda *_, **__: next(heirs))
    client.renew("1" * 64, {}, ["0" * 64])
    client.renew("1" * 64, {}, ["1" * 64], timeout_s=None)
    until(lambda: second.is_shut)
    first.gate.set()
    time.sleep(0.1)  # the second store finds that it is closed
    for store in stores:
        store.gate.set()
    assert is_asked.wait(20)
    client.renew("1" * 64, {}, ["1" * 64], timeout_s=None)
    until(lambda: {*fourth.removed} == {"0" * 64, "1" * 64})
