"""Pinning survives a refusal that passes, and gives up what stays refused."""

import threading

import pytest

from kvoffload.transfer.cuda import pinning
from kvoffload.transfer.cuda.pinning import Pinning
from kvoffload.transfer.slab import Slab

SLOT = 8192


class Registrar:
    """Registers memory, but refuses the first tries of the second portion."""

    def __init__(self, slab, refusals):
        self.slab, self.refusals, self.tries, self.registered = slab, refusals, [], set()

    def register(self, address, length):
        place = address - self.slab.address
        self.tries.append(place)
        if place == SLOT and self.refusals:
            self.refusals -= 1
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")
        self.registered.add(place)

    def unregister(self, address):
        self.registered.remove(address - self.slab.address)


@pytest.fixture
def slab():
    return Slab(4, SLOT)


def start(slab, registrar):
    return Pinning(slab, registrar.register, registrar.unregister, portion_bytes=SLOT)


def test_a_portion_that_is_refused_for_a_moment_is_pinned(slab, monkeypatch, caplog, until):
    """A graph is captured on another thread, for example; the rest must not stay slow for ever."""
    monkeypatch.setattr(pinning, "PAUSES_S", (0.0, 0.0, 0.0))
    registrar = Registrar(slab, 3)
    pinned = start(slab, registrar)
    until(lambda: pinned.is_settled(slab.num_bytes))
    assert pinned.pinned_bytes == slab.num_bytes
    assert pinned.error is None
    assert registrar.tries == [0, *[SLOT] * 4, 2 * SLOT, 3 * SLOT]
    assert "could be pinned" not in caplog.text
    pinned.close()
    assert not registrar.registered


def test_a_portion_that_stays_refused_is_given_up_and_told(slab, monkeypatch, caplog, until):
    monkeypatch.setattr(pinning, "PAUSES_S", (0.0, 0.0))
    registrar = Registrar(slab, 1000)
    pinned = start(slab, registrar)
    until(lambda: pinned.is_settled(slab.num_bytes))
    assert pinned.pinned_bytes == SLOT
    assert "CaptureUnsupported" in str(pinned.error)
    assert registrar.tries == [0, *[SLOT] * 3]
    assert "only 8.0 KiB of 32.0 KiB could be pinned" in caplog.text
    pinned.close()
    assert not registrar.registered


def test_the_tries_of_a_portion_take_some_seconds_at_most():
    assert 1 < sum(pinning.PAUSES_S) < 5


def test_a_pause_between_two_tries_ends_when_the_copier_is_closed(slab, monkeypatch, until, caplog):
    monkeypatch.setattr(pinning, "PAUSES_S", (600.0,))
    registrar = Registrar(slab, 1000)
    pinned = start(slab, registrar)
    until(lambda: len(registrar.tries) == 2)
    closes = threading.Thread(target=pinned.close)
    closes.start()
    closes.join(10)
    assert not closes.is_alive()
    assert len(registrar.tries) == 2
    assert "could be pinned" not in caplog.text
    assert not registrar.registered
