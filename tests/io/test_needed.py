"""What requests in the engine's queue need: each server learns it, also one that opens again."""

import pytest

from kvoffload.io import link as io_link
from kvoffload.io import server as io_server
from kvoffload.testing.backends import keys_of

CHUNKS = 8
ON_DISK = 2 * 4096
"""Bytes of a chunk and its header."""


@pytest.fixture
def client(thread_rig, tmp_path):
    room = {"capacity": CHUNKS * ON_DISK, "high_watermark": 1.0, "min_free": 0}
    return thread_rig.open(("disk", "disk", {"root": str(tmp_path), **room}))


def flood(rig, client, until):
    for i in range(2 * CHUNKS):
        rig.store(client, "disk", keys_of(1, f"new {i}"), until)


def test_a_store_that_opens_again_knows_it_before_anything_is_stored(
    client, thread_rig, until, monkeypatch
):
    needed = keys_of(3)
    thread_rig.store(client, "disk", needed, until)
    monkeypatch.setattr(io_server, "CHANGES_S", 3600.0)
    client.awaits([(1, needed)])
    client.renew(client.opening.namespace, {}, [])
    until(lambda: client.tiers["disk"].is_complete)
    flood(thread_rig, client, until)
    assert all(map(client.tiers["disk"].holds, needed))


def test_what_a_clogged_link_could_not_tell_is_told_later(client, until, monkeypatch):
    with monkeypatch.context() as clogged:
        clogged.setattr(io_link, "CLOGGED_BYTES", -1)
        client.awaits([(1, keys_of(1)), (2, keys_of(2)), (3, keys_of(3))])
        client.awaits([(2, [])])
    client.awaits([(3, keys_of(4)), (4, keys_of(5))])
    needed = {1: keys_of(1), 3: keys_of(4), 4: keys_of(5)}
    until(lambda: client._peer.session._awaited == needed)
    client.awaits([(number, []) for number in needed])
    until(lambda: not client._peer.session._awaited)
