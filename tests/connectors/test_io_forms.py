"""The local connector over the I/O thread and process: the same bytes, the same failures."""

from itertools import count

import pytest
import torch

from kvoffload.offload import promises
from kvoffload.testing import Plan
from tests.support.manager_check import check
from tests.support.planned_store import Process

BLOCK = 4
SLOT = 4096
PROMPT = 81
TOKENS = 80
STORED, LOADED = list(range(5, 25)), list(range(30, 51))


@pytest.fixture(params=["thread", "process"])
def io_form(request):
    return request.param


@pytest.fixture
def connect(connect, io_form):
    """Make connectors with a cache in host memory, or with slots that chunks pass through."""

    def make(*backends, slots=0, **settings):
        memory = {"cpu_bytes": 0 if slots else 16 * SLOT, "staging_bytes": slots * SLOT}
        return connect(*backends, io=io_form, **memory, **settings)

    return make


def store(connector, request):
    """Compute a prompt, and go on until all of it is stored."""
    while True:
        connector.after_forward(request, [STORED], request.num_tokens)
        assert connector.flush()
        if not connector._requests.find(request).refused:
            break
    connector.request_finished(request)


def push_out(connector, new_request):
    """Fill host memory with other prompts."""
    for i in range(4):
        store(connector, new_request(f"other {i}", PROMPT))


def begin_load(connector, request, until):
    until(lambda: connector.get_num_new_matched_tokens(request, 0) is not None)
    tokens = connector.get_num_new_matched_tokens(request, 0)
    if tokens:
        connector.update_state_after_alloc(request, [LOADED], tokens)
    return tokens


@pytest.mark.parametrize("slots", [0, 1, 3, 20])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_prompt_comes_back_byte_for_byte(
    connect, kv_caches, new_request, until, tmp_path, kind, slots
):
    backend = {"type": kind, "capacity": "1MiB"}
    if kind == "disk":
        backend |= {"root": str(tmp_path), "min_free": 0}
    connector = connect(backend, slots=slots)
    originals = [t.tensor[STORED].clone() for t in kv_caches.tensors]
    store(connector, new_request("p", PROMPT))
    push_out(connector, new_request)
    assert begin_load(connector, new_request("p", PROMPT), until) == TOKENS
    (outcome,) = until(connector.poll)
    assert outcome.ok
    for t, original in zip(kv_caches.tensors, originals, strict=True):
        assert torch.equal(t.tensor[LOADED[:20]], original)
    assert connector.flush()
    check(connector)
    stats = connector.stats()
    assert stats["tier_gauges"][kind]["chunks"] == 50
    assert stats["resident_bytes"][kind] > 0


@pytest.mark.parametrize("slots", [3, 20])
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan("raise", frozenset({"read"})), "error"),
        (Plan("hang", frozenset({"read"})), "deadline"),
        (Plan("miss", frozenset({"read"})), "missing"),
        (Process("stubborn", 1.0), "deadline"),
    ],
    ids=["raise", "hang", "miss", "stubborn"],
)
def test_a_failed_load_is_not_promised_again_and_frees_its_slots(
    connect, new_request, until, planned, plan, reason, slots
):
    load_timeout_s = 0.3 if reason == "deadline" else 10.0
    backend = {"type": "planned", **planned.options}
    connector = connect(backend, slots=slots, load_timeout_s=load_timeout_s)
    store(connector, new_request("p", PROMPT))
    if isinstance(plan, Process):
        planned.set(process=plan)
    else:
        planned.set(plan)
    request = new_request("p", PROMPT)
    assert begin_load(connector, request, until) == TOKENS
    (outcome,) = until(connector.poll)
    assert outcome.num_loaded_tokens == 0
    assert connector.get_num_new_matched_tokens(request, 0) == 0, "forgotten before it was told"
    assert connector.stats()["transfer_failures"][reason] > 0
    planned.set()
    until(lambda: connector.poll() or not connector.stats()["host_chunks_busy"])
    check(connector)


def load(connector, request, until):
    """Load a prompt as far as it is promised; return how many tokens came from the tier."""
    if not begin_load(connector, request, until):
        return 0
    (outcome,) = until(connector.poll)
    connector.request_finished(request)
    return outcome.tokens_by_medium.get("PLANNED", 0)


def test_a_tier_slower_than_the_engine_is_declined_until_it_is_found_to_be_fast(
    connect, new_request, until, planned, monkeypatch
):
    monkeypatch.setattr(promises, "PROBE_DECLINES", 3)
    monkeypatch.setattr(promises, "PROBE_S", 0.2)
    monkeypatch.setattr(promises, "LEAST_S", 0.3)
    connector = connect({"type": "planned", **planned.options}, slots=20)
    store(connector, new_request("p", PROMPT))
    for _ in range(4):
        connector.note_prefill(num_tokens=80_000, seconds=1.0)
    planned.set(Plan("delay", frozenset({"read"}), seconds=0.6))
    loaded = [load(connector, new_request("p", PROMPT, request_id=str(i)), until) for i in range(4)]
    assert loaded == [TOKENS] * 4  # the tier's speed is measured with loads
    waiting = new_request("p", PROMPT, request_id="waiting")
    answers = [connector.get_num_new_matched_tokens(waiting, 0) for _ in range(20)]
    assert answers == [0] * 20
    assert set(connector.explain(waiting)[0]) == {"too_slow"}
    assert connector.stats()["lookups"]["planned"]["declined"] == 1
    planned.set()
    asked = (new_request("p", PROMPT, request_id=f"again {i}") for i in count())
    until(lambda: load(connector, next(asked), until))
    assert [load(connector, next(asked), until) for _ in range(8)] == [TOKENS] * 8
    assert connector.get_num_new_matched_tokens(waiting, 0) == 0
    connector.request_finished(waiting)


def test_nothing_old_is_found_after_a_reset(connect, new_request, until, tmp_path):
    connector = connect({"type": "disk", "root": str(tmp_path), "min_free": 0})
    store(connector, new_request("p", PROMPT))
    connector.reset_cache()
    assert begin_load(connector, new_request("p", PROMPT), until) == 0
    store(connector, new_request("p", PROMPT))
    push_out(connector, new_request)
    assert begin_load(connector, new_request("p", PROMPT), until) == TOKENS
    assert until(connector.poll)[0].ok
