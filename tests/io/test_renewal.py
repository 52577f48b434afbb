"""Stores are opened again under another namespace while the server still tells of the old ones."""

import threading
import time

import pytest

from kvoffload.io.protocol import Opened, Presence, TierOpened
from kvoffload.testing.backends import keys_of

KEYS = keys_of(4)


@pytest.fixture
def late_word(rig, until, monkeypatch):
    """A client whose thread is taking in a word of the stores until its tiers are reset."""
    client = rig.open()
    rig.store(client, "memory", KEYS, until)
    tier = client.tiers["memory"]
    announced, reset, take = tier.announced, tier.reset, client._take
    is_begun, go_on, is_taken = (threading.Event() for _ in range(3))

    def announced_late(message, is_current):
        is_begun.set()
        go_on.wait(20)
        announced(message, is_current)

    def take_and_tell(message):
        if isinstance(message, Opened):
            time.sleep(0.2)  # longer than the renewal needs to begin waiting for this message
        take(message)
        if is_begun.is_set() and isinstance(message, Presence):
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
    old = client._opening.namespace
    send = client._link.send

    def send_after_the_old_words(data):
        client._take(Opened(old, [TierOpened("memory", True, False)]))
        client._take(Presence("memory", KEYS, [], True))
        send(data)

    monkeypatch.setattr(client._link, "send", send_after_the_old_words)
    client.renew("1" * 64, {}, [])
    assert [client.tiers["memory"].holds(key) for key in KEYS] == [False] * 4
