"""Waits for a fence that end: what never ends fails its test."""

import time

import torch

from kvoffload.transfer.base import Fence


def ends(fence: Fence, timeout_s: float = 60.0) -> bool:
    """Return whether a fence is done within this time."""
    until_s = time.monotonic() + timeout_s
    while not fence.done():
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.0002)
    return True


def store_and_load(copier, caches, moves, blocks, compared=slice(None)):
    """Copy blocks out and back; both transfers succeed, and all or some blocks are as before."""
    before = [entry.tensor[compared].clone() for entry in caches.tensors]
    for to_host in (True, False):
        fence = copier.launch(moves, to_host, copier.record_fence())
        assert ends(fence)
        assert fence.error is None
        with torch.inference_mode():
            for entry in caches.tensors if to_host else ():
                entry.tensor[blocks] = 0
    for entry, expected in zip(caches.tensors, before, strict=True):
        assert torch.equal(entry.tensor[compared], expected)
