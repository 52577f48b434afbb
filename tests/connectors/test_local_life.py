"""The local connector's figures, its requests and its resets."""

import logging
from functools import partial

import pytest

from kvoffload.backends.disk.backend import DiskBackend
from kvoffload.errors import ConfigError
from kvoffload.replay.trace import read_trace
from kvoffload.testing import Plan
from kvoffload.transfer.cpu.copier import CpuCopier
from tests.support.manager_check import check

FACTS = {"model": "m", "weights": "w", "dtype": "float32"}
BLOCK, PAYLOAD = 4, 2 * (256 + 256 + 64)
"""Tokens of a block; bytes of a chunk of two blocks."""


@pytest.fixture
def connect(connect):
    return partial(connect, facts=FACTS)


def table(request, first=5):
    return [range(first, first + 1 + request.num_tokens // BLOCK)]


def store(connector, request):
    connector.after_forward(request, table(request), request.num_tokens)
    assert connector.flush()
    connector.poll()
    connector.request_finished(request)


def load(connector, request, until):
    tokens = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, table(request, 20), tokens)
    (outcome,) = until(connector.poll)
    return outcome


def disk(root):
    return {"type": "disk", "root": str(root), "capacity": "1MiB", "min_free": 0}


# ---- figures -------------------------------------------------------------------------------------


def test_what_was_moved_is_counted_by_medium_in_chunks_and_bytes(connect, new_request, until):
    connector = connect()
    store(connector, new_request("p", 41))
    stats = connector.stats()
    assert stats["store_chunks"] == {"cpu": 5, "memory": 5}
    assert stats["store_bytes"]["cpu"] == 5 * PAYLOAD
    assert stats["store_bytes"]["memory"] >= 5 * PAYLOAD
    assert sum(stats["store_seconds"]["cpu"]["sums"]) > 0
    assert stats["load_chunks"] == {"cpu": 0, "memory": 0}
    outcome = load(connector, new_request("p", 41), until)
    assert outcome.tokens_by_medium == {"CPU": 40}
    stats = connector.stats()
    assert stats["load_chunks"] == {"cpu": 5, "memory": 0}
    assert stats["load_bytes"]["cpu"] == 5 * PAYLOAD
    assert (stats["saved_prefill_tokens"], stats["hit_tokens"]["cpu"]) == (40, 40)
    assert (stats["capacity_bytes"]["cpu"], stats["slot_bytes"]) == (16 * 4096, 4096)


def test_what_a_fault_kept_from_being_stored_is_not_counted_as_moved(connect, new_request, faults):
    faults.append(Plan("short", frozenset({"write"})))
    connector = connect()
    store(connector, new_request("p", 41))
    moved = connector.stats()["store_chunks"]["memory"]
    assert moved < 5
    assert connector.stats()["stores_dropped"]["memory"]["failed"] == 5 - moved


def test_a_copy_that_fails_leaves_its_slots_free_and_its_chunks_to_the_next_store(
    connect, new_request, until, monkeypatch
):
    connector = connect(backends=[])

    def fails(self, moves, to_host):
        raise RuntimeError("no such memory")

    with monkeypatch.context() as patched:
        patched.setattr(CpuCopier, "_copy", fails)
        store(connector, new_request("p", 41))
    check(connector)
    stats = connector.stats()
    assert (stats["host_chunks_busy"], stats["host_chunks"]) == (0, 0)
    assert stats["stores_dropped"]["cpu"]["failed"] == 5
    assert stats["store_chunks"]["cpu"] == 0
    store(connector, new_request("p", 41))
    assert load(connector, new_request("p", 41), until).num_loaded_tokens == 40


# ---- records of requests -------------------------------------------------------------------------


def test_requests_are_recorded_as_a_trace_for_replay(connect, new_request, until, tmp_path):
    file = tmp_path / "requests.jsonl"
    connector = connect(record=str(file))
    for name in ("p", "p", "q"):
        request = new_request(name, 41)
        if connector.get_num_new_matched_tokens(request, 0):
            load(connector, request, until)
        store(connector, request)
    connector.get_num_new_matched_tokens(new_request("too short", 3), 0)
    file.rename(moved := tmp_path / "moved.jsonl")
    store(connector, new_request("r", 41))
    trace = read_trace(moved)
    assert [len(request) for request in trace.requests] == [5, 5, 5]
    assert trace.distinct == 10
    assert trace.block_tokens == connector.block_size * connector.config.blocks_per_chunk == 8
    assert len(read_trace(file).requests) == 1


def test_a_record_that_cannot_be_written_stops_nothing_else(connect, new_request, caplog, tmp_path):
    connector = connect(record="/dev/full")
    for name in "pq":
        store(connector, new_request(name, 41))
        assert connector.get_num_new_matched_tokens(new_request(name, 41), 0) == 40
    assert caplog.text.count("no longer recorded") == 1
    with pytest.raises(ConfigError, match="record"):
        connect(record=str(tmp_path / "no folder" / "file"))


# ---- requests ------------------------------------------------------------------------------------


def test_a_load_counts_as_a_use_although_the_request_ends_before_it_computes(
    connect, new_request, until, tmp_path
):
    file = tmp_path / "requests.jsonl"
    connector = connect(record=str(file))
    store(connector, new_request("a", 17))
    assert [len(request) for request in read_trace(file).requests] == [2]
    request = new_request("a", 17, request_id="again")
    assert load(connector, request, until).num_loaded_tokens == 16
    assert [len(request) for request in read_trace(file).requests] == [2, 2]
    connector.request_finished(request)  # aborted
    waiting = new_request("a", 17, request_id="never admitted")
    assert connector.get_num_new_matched_tokens(waiting, 0) == 16
    connector.request_finished(waiting)
    assert len(read_trace(file).requests) == 2


def test_an_explanation_leaves_no_state_of_its_request(connect, new_request):
    connector = connect()
    request = new_request("p", 41)
    assert connector.explain(request) == [["never_stored"] * 5]
    store(connector, request)
    assert connector.explain(new_request("p", 41)) == [["CPU"] * 5]
    running = new_request("p", 49, request_id="running")
    assert connector.get_num_new_matched_tokens(running, 0) == 40
    connector.explain(running)
    connector.update_state_after_alloc(running, table(running), 40)  # it is still known
    assert connector.flush()
    assert connector.poll()[0].num_loaded_tokens == 40
    connector.request_finished(running)
    for name in ("p", "q"):
        assert connector.request_finished(new_request(name, 41)) is False


def test_host_memory_of_exactly_one_chunk_will_do_and_less_is_refused(connect, new_request, until):
    connector = connect(cpu_bytes=4096)
    store(connector, new_request("p", 8))
    assert load(connector, new_request("p", 9), until).num_loaded_tokens == 8
    with pytest.raises(ConfigError, match="at least one chunk"):
        connect(cpu_bytes=4095)
    connect(max_inflight_bytes=4096)
    with pytest.raises(ConfigError, match="max_inflight_bytes"):
        connect(max_inflight_bytes=4095)


# ---- resets --------------------------------------------------------------------------------------


def test_only_requests_that_have_blocks_at_a_reset_store_nothing_more(connect, new_request):
    connector = connect()
    begun, loading = new_request("p", 41), new_request("l", 41)
    connector.after_forward(begun, [range(5, 15)], 2)  # its first chunk is not full
    connector.update_state_after_alloc(loading, [range(40, 50)], 0)
    waiting = new_request("w", 41)
    for request in (loading, waiting):
        connector.get_num_new_matched_tokens(request, 0)
    connector.reset_cache()
    for request in (begun, loading, waiting):
        store(connector, request)
    found = [
        connector.get_num_new_matched_tokens(new_request(name, 41, request_id=f"{name} again"), 0)
        for name in "plw"
    ]
    assert found == [0, 0, 40]


def test_an_old_generation_that_cannot_be_removed_is_logged(
    connect, new_request, until, tmp_path, monkeypatch, caplog
):
    async def refuses(self, namespaces):
        raise OSError("no device")

    monkeypatch.setattr(DiskBackend, "purge", refuses)
    connector = connect(disk(tmp_path))
    for _ in range(2):  # the first namespace belongs to replicas as well
        store(connector, new_request("p", 41))
        connector.reset_cache()
    until(lambda: "no device" in caplog.text)
    (record,) = [r for r in caplog.records if "no device" in r.getMessage()]
    assert "stays until it is evicted" in record.getMessage()
    assert record.levelno == logging.WARNING


def test_tiers_that_cannot_remove_a_generation_are_not_asked_to(
    connect, new_request, stores, caplog
):
    connector = connect()
    for _ in range(3):
        store(connector, new_request("p", 41))
        connector.reset_cache()
        assert connector.get_num_new_matched_tokens(new_request("p", 41), 0) == 0
    connector.close()
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
