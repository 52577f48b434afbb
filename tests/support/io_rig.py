"""An I/O client over stores that a test has made, with the server on a thread."""

import asyncio
from unittest.mock import patch

from kvoffload import registry
from kvoffload.io.client import IOClient
from kvoffload.io.forms import ServerThread
from kvoffload.io.protocol import VERSION, Open, TierSettings


def opening(tiers, slot_bytes=4096, lookup_timeout_s=5.0, namespace="0" * 64):
    """The first message, for tiers given as (name, type, options)."""
    wanted = [TierSettings(*tier, f"backends[{i}].") for i, tier in enumerate(tiers)]
    return Open(VERSION, wanted, namespace, {"of": "test"}, 1, slot_bytes, lookup_timeout_s)


def client_over(stores, slab, load_timeout_s=30.0, store_timeout_s=30.0, **settings):
    """Start a server thread over open stores, given by the names of their tiers."""

    def open_store(type, options, namespace, where=""):
        return stores[type]

    tiers = [(name, name, {}) for name in stores]
    memory = slab.slot(0, slab.num_bytes)
    with patch.object(registry, "open_backend", open_store):
        return IOClient(
            lambda: ServerThread(memory),
            opening(tiers, slab.slot_bytes, **settings),
            load_timeout_s,
            store_timeout_s,
        )


def loop_of(client):
    """The event loop of the server."""
    return client._peer.session.loop


def call(client, work, timeout_s=20.0):
    """Run a coroutine where the stores run; return its result."""
    return asyncio.run_coroutine_threadsafe(work, loop_of(client)).result(timeout_s)
