"""A client and its server, in both forms, over a slab."""

import os

import pytest

from kvoffload.io.client import IOClient
from kvoffload.io.forms import ServerProcess, ServerThread
from kvoffload.io.protocol import Load, Store
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab
from tests.support.io_rig import opening
from tests.support.small_engine import SmallEngine

SLOT = 4096
NUM_SLOTS = 64


class Listener:
    """Notes what a job tells."""

    def __init__(self):
        self.numbers, self.answers, self.releases = [], [], 0

    def arrived(self, numbers):
        assert not self.answers, "a chunk arrived after the answer"
        self.numbers.extend(numbers)

    def ended(self, ok, reason, settled, io_time_s):
        self.answers.append((list(map(bool, ok)), reason, settled))

    def released(self):
        self.releases += 1


class Rig:
    """Clients over one slab of 64 slots."""

    def __init__(self, form):
        self.form = form
        self._fd = create_shared_memory(NUM_SLOTS * SLOT)
        self.slab = Slab(NUM_SLOTS, SLOT, self._fd)
        self.clients = []

    def start(self):
        if self.form == "process":
            return ServerProcess(self._fd)
        return ServerThread(self.slab.slot(0, self.slab.num_bytes))

    def open(self, *tiers, load_timeout_s=30.0, store_timeout_s=30.0, **settings):
        """Open tiers given as (name, type, options)."""
        wanted = opening(tiers or [("memory", "memory", {})], SLOT, **settings)
        client = IOClient(self.start, wanted, load_timeout_s, store_timeout_s)
        self.clients.append(client)
        return client

    def close(self):
        for client in self.clients:
            client.close(10.0)  # or one that is killed, and never reaped, warns in another test
        os.close(self._fd)

    def store(self, client, tier, keys, until, first=0):
        """Fill slots with each key's bytes and store them."""
        for i, key in enumerate(keys):
            self.slab.slot(first + i, SLOT)[:] = (key * (SLOT // len(key) + 1))[:SLOT]
        listener = Listener()
        client.begin(
            Store(0, tier, list(keys), list(range(first, first + len(keys))), SLOT), listener
        )
        until(lambda: listener.answers)
        assert listener.answers == [([True] * len(keys), "", True)]
        until(lambda: all(client.tiers[tier].holds(key) for key in keys))
        self.slab.rows[:] = 0

    def load(self, client, tier, keys, first=0):
        listener = Listener()
        client.begin(
            Load(0, tier, list(keys), list(range(first, first + len(keys))), SLOT), listener
        )
        return listener

    def has(self, key, slot):
        """Whether the slot has the bytes of the key."""
        return self.slab.slot(slot, SLOT) == (key * (SLOT // len(key) + 1))[:SLOT]


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def new_listener():
    return Listener


@pytest.fixture(params=["thread", "process"])
def rig(request, closing):
    return closing(Rig(request.param))


@pytest.fixture
def process_rig(closing):
    return closing(Rig("process"))


@pytest.fixture
def thread_rig(closing):
    return closing(Rig("thread"))


@pytest.fixture
def small_engine(new_kv_caches, new_request, closing):
    """Start engines, which are closed after the test."""

    def make(*backends, **settings):
        engine = SmallEngine(new_kv_caches(), new_request, *backends, **settings)
        closing(engine.connector)
        return engine

    return make
