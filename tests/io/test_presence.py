"""The presence cache on a clock of its own."""

import threading

import pytest

from kvoffload.io import presence
from kvoffload.io.presence import PresenceCache


class World:
    """A clock, and how often there was something to ask."""

    def __init__(self):
        self.now = 100.0
        self.asked = 0
        self.presence = PresenceCache(self.ask, 0.25, 1.0, clock=lambda: self.now)

    def ask(self):
        self.asked += 1


@pytest.fixture
def world():
    return World()


def test_an_answer_after_the_deadline_changes_nothing_yet(world):
    presence = world.presence
    presence.holds(b"a")
    keys = presence.take_questions()
    world.now += 0.3
    assert presence.holds(b"a") is False
    presence.answer(keys, [True])
    assert presence.holds(b"a") is False
    world.now += 1.1
    assert presence.holds(b"a") is None  # asked again


def test_memory_is_bounded_and_the_oldest_go_first(world, monkeypatch):
    monkeypatch.setattr(presence, "MAX_ENTRIES", 100)
    for i in range(1000):
        world.presence.set(b"%d" % i, True)
    assert len(world.presence._entries) <= 100
    assert world.presence.holds(b"999") is True
    assert world.presence.holds(b"0") is None


def test_two_threads_may_use_it_at_once():
    """One asks and forgets, one answers and notes what was stored: nothing ever raises."""
    presence = PresenceCache(lambda: None, 60.0, 60.0)
    keys = [b"%d" % i for i in range(500)]
    stop, failures = threading.Event(), []

    def answering():
        try:
            while not stop.is_set():
                asked = presence.take_questions()
                presence.answer(asked, [True] * len(asked))
                for key in keys[::9]:
                    presence.set(key, True)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=answering)
    thread.start()
    for i in range(40_000):
        presence.holds(keys[i % 500])
        if i % 7 == 0:
            presence.forget([keys[(i * 31) % 500]])
    stop.set()
    thread.join()
    assert not failures
