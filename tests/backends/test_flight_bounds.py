"""What a store has in flight at most: bytes, transfers, one lookup; loads go before stores."""

import threading

import pytest

from kvoffload.backends.flight_bounds import InFlight, Transfer


class Ended(Exception):
    pass


def go_on(transfer):
    """Every transfer goes on."""


class Held:
    """A thread that holds room until it may let go."""

    def __init__(self, bound, kind, nbytes, begun):
        self.let_go = threading.Event()
        self._bound, self._begun = bound, begun
        self.transfer = Transfer(kind, nbytes)
        self.thread = threading.Thread(target=self._hold)
        self.thread.start()

    def _hold(self):
        self._bound.enter(self.transfer)
        self._begun.append(self.transfer.kind)
        self.let_go.wait(60)
        self._bound.leave(self.transfer)


def test_loads_go_before_stores_that_wait(until):
    bound, begun = InFlight(100, go_on), []
    first = Held(bound, "load", 90, begun)
    until(lambda: bound.nbytes == 90)
    store = Held(bound, "store", 60, begun)
    second = Held(bound, "load", 60, begun)
    until(lambda: sorted(bound._waiting) == ["load", "store"])
    bound.enter(Transfer("lookup"))
    bound.leave(Transfer("lookup"))
    first.let_go.set()
    until(lambda: begun == ["load", "load"])
    second.let_go.set()
    until(lambda: begun == ["load", "load", "store"])
    store.let_go.set()
    for held in (first, second, store):
        held.thread.join()
    assert bound.nbytes == 0


def test_a_load_that_gives_up_lets_a_store_go_on(until):
    ended, begun = set(), []

    def check(transfer):
        if transfer.nbytes in ended:
            raise Ended

    def wait_in_vain():
        with pytest.raises(Ended):
            bound.enter(Transfer("load", 70))
        begun.append("ended")

    bound = InFlight(100, check)
    bound.enter(Transfer("load", 50))
    load = threading.Thread(target=wait_in_vain)
    load.start()
    until(lambda: bound._waiting == ["load"])
    store = Held(bound, "store", 50, begun)
    until(lambda: sorted(bound._waiting) == ["load", "store"])
    ended.add(70)
    bound.wake()
    until(lambda: sorted(begun) == ["ended", "store"])
    store.let_go.set()
    for thread in (load, store.thread):
        thread.join()


def test_a_transfer_waits_no_longer_than_its_patience_and_a_large_one_goes_alone():
    bound = InFlight(100, go_on, patience_s=0.05)
    bound.enter(Transfer("store", 1000))
    with pytest.raises(TimeoutError):
        bound.enter(Transfer("load", 1))
    bound.leave(Transfer("store", 1000))
    bound.enter(Transfer("load", 1000))
    assert bound.nbytes == 1000


def test_some_transfers_always_fit_and_never_more_than_the_most():
    bound = InFlight(100, go_on, least=2, most=3, patience_s=0.01)
    for nbytes in (90, 90):
        bound.enter(Transfer("load", nbytes))
    for nbytes in (90, 0):
        bound.leave(Transfer("load", 90))
        bound.enter(Transfer("load", nbytes))
    bound.enter(Transfer("load", 1))
    with pytest.raises(TimeoutError):
        bound.enter(Transfer("load", 0))
