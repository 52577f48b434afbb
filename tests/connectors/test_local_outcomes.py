"""Which loads ``poll`` names: those that the engine was told to wait for, each of them once."""

import time

import pytest
import torch
from local_requests import compute

from kvoffload.connectors.local import LocalConnector
from kvoffload.demo.mini_engine import Engine
from kvoffload.demo.sampling import SamplingParams

STORED, FIRST, SECOND = range(5, 13), range(20, 28), range(30, 38)


class LateCopies:
    """Begins each copy into the engine's blocks a little later."""

    error = None

    def __init__(self, connector, seconds):
        self._seconds = seconds
        self._launch = connector._worker._copier.launch
        connector._worker._copier.launch = lambda moves, to_host, after, lent=None: self._launch(
            moves, to_host, self
        )

    def done(self):
        return True

    def wait(self):
        time.sleep(self._seconds)


@pytest.fixture
def connector(connect):
    return connect({"type": "memory"}, blocks_per_chunk=1)


@pytest.fixture
def request_(connector, new_request):
    """A request whose chunks are stored."""
    request = new_request("p", 33)
    compute(connector, request, STORED)
    return request


def begin_load(connector, request, blocks):
    tokens = connector.get_num_new_matched_tokens(request, 0)
    assert tokens == 32
    connector.update_state_after_alloc(request, [blocks], tokens)


def names(connector, seconds=0.3):
    """Poll for a while; return the requests named."""
    until_s, named = time.monotonic() + seconds, []
    while time.monotonic() < until_s:
        named += [outcome.request_id for outcome in connector.poll()]
        time.sleep(0.005)
    return named


@pytest.mark.parametrize("end", ["request_finished", "request_preempted"])
def test_a_load_that_ended_before_its_request_is_not_named_after_it(connector, request_, end):
    begin_load(connector, request_, FIRST)
    assert connector.flush()
    assert getattr(connector, end)(request_) is False
    assert names(connector) == []


def test_a_refused_load_is_not_named_after_its_request(connector, request_, monkeypatch):
    tokens = connector.get_num_new_matched_tokens(request_, 0)
    connector._manager.reset_cache()
    monkeypatch.setattr(connector._spec.tiers["memory"], "_keys", set())
    connector.update_state_after_alloc(request_, [FIRST], tokens)
    assert connector.request_finished(request_) is False
    assert names(connector) == []


def test_the_load_of_a_request_admitted_again_is_the_one_named(connector, request_, kv_caches):
    begin_load(connector, request_, FIRST)
    assert connector.flush()
    connector.request_preempted(request_)
    LateCopies(connector, 0.2)
    begin_load(connector, request_, SECOND)
    assert connector.poll() == []
    (named,) = names(connector, 0.6)
    assert named == "p"
    for each in kv_caches.tensors:
        assert torch.equal(each.tensor[SECOND], each.tensor[STORED])


def test_a_request_preempted_in_a_load_is_named_once_and_then_looked_up_again(connector, request_):
    LateCopies(connector, 0.2)
    begin_load(connector, request_, FIRST)
    assert connector.request_preempted(request_) is True
    assert connector.get_num_new_matched_tokens(request_, 0) is None
    assert connector.request_preempted(request_) is True
    assert names(connector) == ["p"]
    assert connector.get_num_new_matched_tokens(request_, 0) == 32
    assert connector.request_finished(request_) is False


@pytest.mark.parametrize("wait", [LocalConnector.flush, LocalConnector.reset_cache])
def test_a_load_that_ends_in_a_flush_is_named_if_its_request_was_told_to_wait(
    connector, request_, wait
):
    LateCopies(connector, 0.1)
    begin_load(connector, request_, FIRST)
    assert connector.request_preempted(request_) is True
    wait(connector)
    assert connector.request_finished(request_) is True
    assert names(connector) == ["p"]


def test_a_load_that_a_reset_voids_saves_no_token(connector, request_):
    def saved():
        return connector.stats()["saved_prefill_tokens"]

    begin_load(connector, request_, FIRST)
    assert connector.flush()
    connector.reset_cache()
    (voided,) = connector.poll()
    assert (voided.num_loaded_tokens, voided.ok, saved()) == (0, False, 0)
    connector.request_finished(request_)
    compute(connector, request_, STORED)
    begin_load(connector, request_, FIRST)
    assert connector.flush()
    (loaded,) = connector.poll()
    assert (loaded.num_loaded_tokens, saved()) == (32, 32)
    connector.request_finished(request_)


MODEL = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_size": 32,
    "intermediate_size": 32,
}


@pytest.mark.parametrize("wait", [LocalConnector.flush, LocalConnector.reset_cache])
def test_an_engine_lives_on_if_a_request_is_aborted_whose_load_ended_in_a_flush(wait):
    prompts = [[(7 * i + 13 * j) % 250 for j in range(160)] for i in range(6)]
    settings = {
        "model": MODEL,
        "kv_cache_bytes": 40 * 16 * 2 * 32 * 4,
        "max_model_len": 512,
        "offload": {"cpu_bytes": "4MiB", "blocks_per_chunk": 1},
    }
    with Engine(settings) as engine:
        for prompt in prompts:
            engine.generate([prompt], SamplingParams(max_tokens=1))
        assert engine.connector.flush()
        name = engine.add_request(prompts[0], SamplingParams(max_tokens=4))
        engine._scheduler.schedule()
        assert engine._scheduler.is_loading(name)
        wait(engine.connector)
        engine.abort(name)
        engine.step()
        assert not engine._scheduler.has_requests


def test_a_load_is_named_as_far_as_host_memory_had_room_for_it(connect, kv_caches, new_request):
    connector = connect({"type": "memory", "capacity": "1MiB"}, cpu_bytes=12 * 4096)
    few, many = new_request("few", 41), new_request("many", 73)
    for request, blocks in ((few, range(1, 11)), (many, range(11, 29))):
        connector.after_forward(request, [blocks], request.num_tokens - 1)
        assert connector.flush()
        connector.request_finished(request)
    stored = [cache.tensor[11:25].clone() for cache in kv_caches.tensors]
    connector._manager.reset_cache()
    assert [connector.get_num_new_matched_tokens(each, 0) for each in (few, many)] == [40, 72]
    connector.update_state_after_alloc(few, [range(30, 40)], 40)
    connector.update_state_after_alloc(many, [range(40, 58)], 72)  # seven slots are left
    assert connector.flush()
    outcomes = {outcome.request_id: outcome for outcome in connector.poll()}
    assert (outcomes["few"].ok, outcomes["few"].num_loaded_tokens) == (True, 40)
    assert (outcomes["many"].ok, outcomes["many"].num_loaded_tokens) == (False, 56)
    assert outcomes["many"].tokens_by_medium == {"MEMORY": 56}
    for cache, expected in zip(kv_caches.tensors, stored, strict=True):
        assert torch.equal(cache.tensor[40:54], expected)
    for request in (few, many):
        connector.request_finished(request)
