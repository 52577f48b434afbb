"""A replay predicts what the real manager hits, and a manager's record replays to the same."""

import time

import pytest
from named_policies import NAMED_POLICIES
from replays import from_ids, generate, replay

from kvoffload.offload.base import make_offload_key
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import TieredOffloadingManager
from kvoffload.recording import RequestLog
from kvoffload.replay.synthetic import SyntheticOptions
from kvoffload.replay.trace import read_trace
from tests.support.manager_check import check


def serve(manager, record, prompts):
    """Offer every prompt to the manager as a connector does; returns the chunks loaded."""
    loaded = 0
    for keys in prompts:
        record.asked_for(keys)
        manager.touch(keys)
        hits, _ = manager.lookup_prefix(keys)
        loaded += hits
        manager.prepare_load(keys[:hits])
        manager.complete_load(keys[:hits])
        output = manager.prepare_store(keys)
        if output is not None:
            manager.complete_store(output.keys_to_store)
        manager.retire(keys)
    return loaded


@pytest.mark.parametrize("name", sorted(NAMED_POLICIES))
@pytest.mark.parametrize(("workload", "slots"), [("chat", 400), ("agent", 100), ("shared", 400)])
def test_the_replay_of_a_manager_s_record_hits_as_the_manager_did(tmp_path, name, workload, slots):
    policy = NAMED_POLICIES[name]
    trace = from_ids(workload, generate(workload, SyntheticOptions(seed=2, requests=600)))
    prompts = [[make_offload_key(key * 2, 0) for key in request] for request in trace.requests]
    manager = TieredOffloadingManager(HostCache(slots, policy(slots)))
    record = RequestLog(str(tmp_path / "record.jsonl"), tokens_per_chunk=16)
    loaded = serve(manager, record, prompts)
    check(manager)
    recorded = read_trace(tmp_path / "record.jsonl")
    replayed = replay(list(map(tuple, prompts)), policy(slots), slots)
    assert replayed.prefix == loaded
    hits = replay(recorded.requests, policy(slots), slots)
    assert hits.accesses == trace.accesses
    # A record has its own names of blocks, and handicap learns from a sample by the name.
    tolerance = 0.01 if name == "handicap" else 0
    assert hits.prefix_rate == pytest.approx(loaded / trace.accesses, abs=tolerance)


def test_a_record_has_the_times_of_requests(tmp_path, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now_s[0])
    record = RequestLog(str(tmp_path / "record.jsonl"), tokens_per_chunk=16)
    for pause_s in (0.5, 60.0):
        record.asked_for([make_offload_key(bytes(32), 0)])
        now_s[0] += pause_s
    record.asked_for([make_offload_key(bytes(32), 0)])
    times = read_trace(tmp_path / "record.jsonl").requests.times
    assert list(times) == [1000.0, 1000.5, 1060.5]
