"""Stores one above the other, as the server of a host has them for a namespace."""

from kvoffload.io.open_stores import OpenStore
from kvoffload.io.service.layered_store import MEMORY, SharedStore


def shared_store(memory, unused=lambda: None, **below):
    """Return what the sessions of a namespace share: the memory, and the stores below it."""
    shared = SharedStore(memory, list(below), unused, {})
    layers = {MEMORY: memory, **below}
    shared._take([OpenStore(*layer) for layer in layers.items()])
    shared.settle(late_have_index=True)
    return shared


def sole_view(memory, **below):
    """Return a view that ends its store with it."""
    shared = shared_store(memory, **below)
    view = shared.new_view()

    class SoleView(type(view)):
        async def close(self):
            await super().close()
            await shared.close()

    view.__class__ = SoleView
    return view
