"""What requests in the engine's queue need: each server learns it, also one that opens again."""

import os
import signal

import pytest

from kvoffload.io import engine_queue
from kvoffload.io import link as io_link
from kvoffload.policies.told_return import ToldReturn
from kvoffload.testing.backends import keys_of

CHUNKS = 8
ON_DISK = 2 * 4096
"""Bytes of a chunk and its header."""


def on_disk(root):
    room = {"capacity": CHUNKS * ON_DISK, "high_watermark": 1.0, "min_free": 0}
    return "disk", "disk", {"root": str(root), **room}


@pytest.fixture
def client(thread_rig, tmp_path):
    return thread_rig.open(on_disk(tmp_path))


def returning(claim, keys, in_s):
    return ToldReturn(claim, keys, in_s, 0)


def index_of(client):
    return client._peer.session._stores["disk"].backend._store.index


def renew(client, until):
    client.renew(client.opening.namespace, {}, [])
    until(lambda: client.tiers["disk"].is_complete)
    # The store whose place is taken may evict for a moment longer.
    until(lambda: client._peer.session._stores["disk"].backend._store.root.evictor.held)


def flood(rig, client, until):
    for i in range(2 * CHUNKS):
        rig.store(client, "disk", keys_of(1, f"new {i}"), until)


def test_a_store_that_opens_again_knows_it_before_anything_is_stored(
    client, thread_rig, until, monkeypatch
):
    needed = keys_of(3)
    thread_rig.store(client, "disk", needed, until)
    monkeypatch.setattr(engine_queue, "PAUSE_S", 3600.0)
    client.awaits([(1, needed)])
    renew(client, until)
    flood(thread_rig, client, until)
    assert all(map(client.tiers["disk"].holds, needed))


def test_a_store_that_opens_again_knows_when_sessions_return(client, thread_rig, until):
    needed, never = keys_of(3), keys_of(3, "never")
    for keys in (needed, never):
        thread_rig.store(client, "disk", keys, until)
    client.expects([returning(b"a", needed, 20.0), returning(b"b", never, 20.0)])
    client.expects([returning(b"b", never, None)])
    renew(client, until)
    until(lambda: index_of(client)._returns is not None)
    flood(thread_rig, client, until)
    assert all(map(client.tiers["disk"].holds, needed))
    assert not any(map(client.tiers["disk"].holds, never))


def test_what_is_told_while_there_is_no_server_holds_for_what_the_next_one_finds(
    process_rig, tmp_path, until
):
    client, needed = process_rig.open(on_disk(tmp_path)), keys_of(3)
    process_rig.store(client, "disk", needed, until)
    client.expects([returning(b"late", keys_of(2), 0.0)])
    os.kill(client._peer.pid, signal.SIGKILL)
    until(lambda: not client._link.is_up or client.died)  # the next one may be there at once
    # As late as protects: the next process may be long in coming.
    client.expects([returning(b"a", needed, 35.0)])
    until(lambda: client.died == 1 and client.tiers["disk"].is_complete)
    assert [told.claim for told in client._returns.to_come()] == [b"a"]
    flood(process_rig, client, until)
    assert all(map(client.tiers["disk"].holds, needed))


def test_what_a_store_is_told_before_its_first_chunk_holds_for_it(client, thread_rig, until):
    needed = keys_of(3)
    client.expects([returning(b"a", needed, 20.0)])
    thread_rig.store(client, "disk", needed, until)
    flood(thread_rig, client, until)
    assert all(map(client.tiers["disk"].holds, needed))


def test_what_a_clogged_link_could_not_tell_is_told_later(client, until, monkeypatch):
    with monkeypatch.context() as clogged:
        clogged.setattr(io_link, "CLOGGED_BYTES", -1)
        client.awaits([(1, keys_of(1)), (2, keys_of(2)), (3, keys_of(3))])
        client.awaits([(2, [])])
    client.awaits([(3, keys_of(4)), (4, keys_of(5))])
    needed = {1: keys_of(1), 3: keys_of(4), 4: keys_of(5)}
    until(lambda: client._peer.session.queue.needs == needed)
    client.awaits([(number, []) for number in needed])
    until(lambda: not client._peer.session.queue.needs)
