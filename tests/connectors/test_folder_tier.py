"""Engines of two hosts, each with a disk of its own, that share a folder by two mounts."""

import signal

import pytest

from tests.connectors.test_local import load, store
from tests.support.sshfs_mounts import MISSING, sshfs_mounts


def tiers(disk, shared, **settings):
    """Return a host's tiers: its own disk, and below it the folder that all hosts share."""
    common = {"capacity": "16MiB", "trust_parent_folders": True}
    return (
        {"type": "disk", "root": str(disk), "min_free": 0, **common},
        {"type": "folder", "root": str(shared), **common, **settings},
    )


def test_a_stopped_file_server_costs_a_computation_and_no_more(
    connect, new_kv_caches, new_request, until, tmp_path
):
    with sshfs_mounts(tmp_path) as mounts:
        if mounts is None:
            pytest.skip(MISSING)
        root, server = mounts[0] / "kv", mounts[2]
        caches = new_kv_caches(seed=1)
        stored = connect(*tiers(tmp_path / "a", root), caches=caches)
        request = new_request("p", 41)
        store(stored, request)
        stored.close()
        settings = {"load_timeout_s": 1.0, "store_timeout_s": 1.0, "lookup_timeout_s": 1.0}
        (_, folder) = tiers(tmp_path / "a", root, timeout_s=0.3)
        engine = connect(folder, caches=caches, **settings)
        until(lambda: engine.get_num_new_matched_tokens(new_request("p", 41), 0) == 40)
        server.signal(signal.SIGSTOP)
        outcome = load(engine, new_request("p", 41), list(range(30, 41)), until)
        assert not outcome.ok
        assert store(engine, new_request("new", 41))  # the engine goes on
        server.signal(signal.SIGCONT)
        until(lambda: engine.stats()["host_chunks_busy"] == 0)
        engine.close()
