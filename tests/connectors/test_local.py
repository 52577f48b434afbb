"""The local connector under everything an engine and a store can do to it."""

import functools
import threading
import time

import pytest
import torch
from local_requests import begin_load, compute

from kvoffload import registry
from kvoffload.testing import Plan
from kvoffload.transfer.base import CopyFence
from kvoffload.transfer.cpu.copier import CpuCopier
from tests.support.manager_check import check

BLOCK = 4


@pytest.fixture
def faulty(stores, faults):
    """Set the faults of all stores: ``faulty(Plan("raise"))``; without arguments all is well."""

    def plan(*plans):
        faults[:] = plans

    plan.stores = stores
    return plan


def store(connector, request, first_block=5):
    """Compute and store all full blocks; returns the blocks."""
    end = first_block + request.num_tokens // BLOCK
    return compute(connector, request, list(range(first_block, end)))


def load(connector, request, blocks, until, computed=0):
    tokens = connector.get_num_new_matched_tokens(request, computed)
    if not tokens:
        return None
    connector.update_state_after_alloc(request, [blocks], tokens)
    (outcome,) = until(connector.poll)
    return outcome


def push_out(connector, new_request, requests=8):
    """Store enough else that nothing older stays in host memory."""
    for i in range(requests):
        store(connector, new_request(f"filler {i}", 40))


def test_the_last_token_of_a_prompt_is_left_to_compute(connect, new_request):
    connector = connect()
    request = new_request("p", 40)
    store(connector, request)
    assert connector.get_num_new_matched_tokens(request, 0) == 36
    assert connector.get_num_new_matched_tokens(new_request("p", 41), 0) == 40
    assert connector.get_num_new_matched_tokens(request, 36) == 0
    assert connector.get_num_new_matched_tokens(new_request("another", 40), 0) == 0


def test_a_store_that_always_fails_loses_nothing_but_hits(connect, new_request, until, faulty):
    connector = connect()
    faulty(Plan("raise"))
    request = new_request("p", 41)
    store(connector, request)
    assert load(connector, request, range(20, 31), until).ok  # host memory has it
    connector.request_finished(request)
    push_out(connector, new_request)
    assert connector.get_num_new_matched_tokens(request, 0) == 0
    assert connector.stats()["transfer_failures"]["error"] > 0
    check(connector)


def test_a_request_aborted_while_loading_keeps_its_blocks_until_told(
    connect, new_request, until, faulty
):
    connector = connect()
    request = new_request("p", 41)
    store(connector, request)
    push_out(connector, new_request)
    faulty(Plan("delay", frozenset({"read"}), seconds=0.1))
    begin_load(connector, request, range(20, 31))
    assert connector.request_finished(request) is True
    assert connector.request_finished(request) is True  # told again, named once
    (outcome,) = until(connector.poll)
    assert outcome.request_id == "p"
    check(connector)


def test_a_request_whose_load_has_ended_may_free_its_blocks_at_once(connect, new_request, until):
    connector = connect()
    request = new_request("p", 41)
    store(connector, request)
    assert load(connector, request, range(20, 31), until).ok
    assert connector.request_finished(request) is False


def test_two_requests_for_one_prefix_share_the_fetch(connect, new_request, until, faulty):
    connector = connect(load_timeout_s=5.0, lookup_timeout_s=0.001)
    store(connector, new_request("p", 41))
    push_out(connector, new_request)
    faulty(Plan("delay", frozenset({"read"}), seconds=0.1))
    first = new_request("p", 41, request_id="first")
    second = new_request("p", 41, request_id="second")
    begin_load(connector, first, range(20, 31))
    while not connector.poll():  # soon in host memory: worth waiting, for longer than for a lookup
        assert connector.get_num_new_matched_tokens(second, 0) is None
        time.sleep(0.01)
    outcome = load(connector, second, range(40, 51), until)
    assert outcome.tokens_by_medium == {"CPU": 40}


def test_asking_again_ends_with_the_load_of_another_one(connect, new_request, until, faulty):
    connector = connect(load_timeout_s=0.3, lookup_timeout_s=0.05)
    store(connector, new_request("p", 41))
    push_out(connector, new_request)
    faulty(Plan("hang", frozenset({"read"})))
    first = new_request("p", 41, request_id="first")
    second = new_request("p", 41, request_id="second")
    begin_load(connector, first, range(20, 31))
    until(lambda: connector.poll() or connector.get_num_new_matched_tokens(second, 0) == 0)
    assert connector.get_num_new_matched_tokens(second, 0) == 0


def held_copies(connector):
    """Let copies wait for an event, which is returned."""
    copier, gate = connector._spec._copier, threading.Event()
    copy = copier._copy
    copier._copy = lambda *copies: (gate.wait(60), copy(*copies))
    return gate


def test_blocks_are_not_overwritten_before_their_store_has_read_them(
    connect, kv_caches, new_request, until
):
    """Without before_forward a slow copy stores what the next request writes: here it must not."""
    connector = connect()
    gate = held_copies(connector)
    request = new_request("p", 41)
    blocks = list(range(5, 15))
    original = kv_caches.tensors[0].tensor[blocks].clone()
    connector.after_forward(request, [blocks], 40)
    assert connector.request_finished(request) is False
    begun_s = time.monotonic()
    connector.before_forward([1, 2, 3])  # other blocks: no waiting
    assert time.monotonic() - begun_s < 50
    threading.Timer(0.2, gate.set).start()
    connector.before_forward([14])
    for tensor in kv_caches.tensors:
        tensor.tensor[blocks] = 0  # the next request's forward pass
    connector.flush()
    assert load(connector, new_request("p", 41), range(20, 31), until).ok
    assert torch.equal(kv_caches.tensors[0].tensor[20:30], original)


def test_host_memory_full_of_loads_shortens_a_load_instead_of_failing(
    connect, new_request, until, faulty
):
    connector = connect(cpu_bytes="16KiB", load_timeout_s=5.0, lookup_timeout_s=0.01)  # 4 slots
    for name in ("p", "q"):
        for end in (17, 33, 41):  # four slots cannot take ten chunks at once
            store(connector, new_request(name, end))
    faulty(Plan("delay", frozenset({"read"}), seconds=0.1))
    p, q = new_request("p", 41), new_request("q", 41)
    tokens = connector.get_num_new_matched_tokens(p, 0)
    assert tokens == 32
    connector.update_state_after_alloc(p, [range(20, 31)], tokens)
    assert connector.get_num_new_matched_tokens(q, 0) == 0  # every slot is taken: a miss
    assert until(connector.poll)[0].ok
    assert connector.get_num_new_matched_tokens(q, 0) == 32


def test_a_store_is_waited_for_even_if_a_load_into_its_blocks_has_failed_since(
    connect, new_request, until, faulty
):
    connector = connect()
    loaded = new_request("p", 41)
    store(connector, loaded)
    push_out(connector, new_request)
    gate = held_copies(connector)
    connector.after_forward(new_request("q", 41), [range(20, 30)], 40)  # copied only later
    waited = []
    connector._worker.wait = waited.append
    faulty(Plan("miss", frozenset({"read"})))
    assert not load(connector, loaded, range(20, 31), until).ok
    connector.before_forward([25])
    assert len(waited) == 2  # by the load, and still by the forward pass
    del connector._worker.wait
    gate.set()


def test_blocks_that_a_preempted_load_still_writes_are_waited_for(
    connect, kv_caches, new_request, until
):
    """An engine that ignores the answer of request_finished waits longer, and no more."""
    connector = connect()
    store(connector, new_request("p", 41))
    gate = held_copies(connector)
    request = new_request("p", 41)
    begin_load(connector, request, range(20, 31))
    assert connector.request_finished(request) is True
    threading.Timer(0.2, gate.set).start()
    connector.before_forward([29])
    for tensor in kv_caches.tensors:
        tensor.tensor[20:30] = 0  # the next request's forward pass
    until(connector.poll)
    assert not any(tensor.tensor[20:30].any() for tensor in kv_caches.tensors)


def test_a_store_copies_what_the_forward_pass_before_it_writes(
    connect, kv_caches, new_request, until, monkeypatch
):
    connector = connect()

    class Compute(CopyFence):
        def wait(self):
            kv_caches.tensors[0].tensor[5:15] = 42  # the pass ends only now

    monkeypatch.setattr(CpuCopier, "record_fence", lambda _: Compute())
    connector.after_forward(new_request("p", 41), [range(5, 15)], 40)
    assert connector.flush()
    monkeypatch.undo()
    assert load(connector, new_request("p", 41), range(20, 31), until).ok
    assert (kv_caches.tensors[0].tensor[20:30] == 42).all()


def test_a_request_id_used_again_while_its_aborted_load_runs(connect, new_request, until, faulty):
    connector = connect(load_timeout_s=5.0, lookup_timeout_s=0.01)
    for name in ("p", "q"):
        store(connector, new_request(name, 41))
    push_out(connector, new_request)
    faulty(Plan("delay", frozenset({"read"}), seconds=0.1))
    first = new_request("p", 41, request_id="same")
    begin_load(connector, first, range(20, 31))
    assert connector.request_finished(first) is True
    until(lambda: sum(store.struck for store in faulty.stores))  # its read has begun
    faulty(Plan("delay", frozenset({"read"}), seconds=2.0))
    second = new_request("q", 41, request_id="same")
    assert connector.get_num_new_matched_tokens(second, 0) is None
    until(connector.poll)  # the first one's load ends
    begin_load(connector, second, range(40, 51))
    assert connector.request_finished(second) is True
    until(connector.poll)


def test_a_load_that_outlives_the_wait_of_a_reset_brings_nothing(
    connect, new_request, until, monkeypatch
):
    connector = connect()
    store(connector, new_request("p", 41))
    gate = held_copies(connector)
    request = new_request("p", 41)
    begin_load(connector, request, range(20, 31))
    with monkeypatch.context() as hasty:
        hasty.setattr(connector, "flush", functools.partial(connector.flush, 0.01))
        connector.reset_cache()
    assert connector.poll() == []  # its copy is not done, and will be well
    gate.set()
    (outcome,) = until(connector.poll)
    assert (outcome.num_loaded_tokens, outcome.ok) == (0, False)
    store(connector, new_request("q", 41))
    assert load(connector, new_request("q", 41), range(20, 31), until).ok  # of after the reset
    check(connector)


def test_a_shutdown_says_how_many_transfers_it_did_not_wait_for(
    connect, new_request, caplog, monkeypatch
):
    connector = connect()
    copier, gate = connector._spec._copier, threading.Event()
    copy = copier._copy
    monkeypatch.setattr(copier, "_copy", lambda *copies: (gate.wait(5), copy(*copies)))
    connector.after_forward(new_request("p", 41), [range(5, 15)], 40)
    threading.Timer(1.0, gate.set).start()
    connector.close(timeout_s=0.01)
    assert "1 transfers had not ended at shutdown" in caplog.text


def test_after_a_close_nothing_is_stored_or_loaded_and_each_call_is_answered(
    connect, new_request, caplog
):
    connector = connect()
    store(connector, new_request("p", 41))
    asked = new_request("p", 41)
    promised = connector.get_num_new_matched_tokens(asked, 0)
    connector.close()
    caplog.clear()
    connector.update_state_after_alloc(asked, [range(20, 30)], promised)
    connector.before_forward(range(30, 41))
    connector.after_forward(new_request("another prompt", 44), [range(30, 41)], 44)
    assert connector.flush()
    (outcome,) = connector.poll()
    assert (outcome.request_id, outcome.num_loaded_tokens, outcome.ok) == ("p", 0, False)
    lines = [(each.levelname, each.getMessage(), each.exc_info) for each in caplog.records]
    assert [(level, failed) for level, _, failed in lines] == [("WARNING", None)] * 2, lines
    assert all("is refused: the copier is closed" in text for _, text, _ in lines)


def test_tiers_that_cannot_be_opened_again_at_a_reset_have_nothing_until_they_are(
    connect, new_request, monkeypatch, caplog, until
):
    connector = connect()
    store(connector, new_request("p", 41))
    with monkeypatch.context() as broken:
        broken.setattr(registry, "open_backend", lambda *_, **__: 1 / 0)
        connector.reset_cache()
    assert "cannot be opened again yet" in caplog.text
    assert connector.get_num_new_matched_tokens(new_request("p", 41), 0) == 0
    store(connector, new_request("p", 41))
    assert connector.get_num_new_matched_tokens(new_request("p", 41), 0) == 40
    until(lambda: "memory" in connector.stats()["resident_bytes"])  # figures of an open store
    store(connector, new_request("q", 41))
    push_out(connector, new_request)
    assert connector.get_num_new_matched_tokens(new_request("q", 41, request_id="last"), 0) == 40


@pytest.mark.parametrize("params", [[1], "x", {"kvoffload": 3}, {"kvoffload": {"tiers": 5}}])
def test_what_a_client_sends_as_parameters_never_raises(connect, new_request, params):
    request = new_request("p", 41)
    request.kv_transfer_params = params
    assert connect().get_num_new_matched_tokens(request, 0) == 0


def test_a_request_whose_loads_are_short_twice_is_promised_nothing_until_it_computes(
    connect, new_request, until, faulty
):
    connector = connect(load_timeout_s=5.0)
    request = new_request("p", 81)
    store(connector, request)
    faulty(Plan("short", frozenset({"read"})))
    promised = []
    for _ in range(2):
        push_out(connector, new_request)
        promised.append(connector.get_num_new_matched_tokens(request, 0))
        outcome = load(connector, request, range(20, 41), until)
        assert 0 < outcome.num_loaded_tokens < promised[-1]  # the good prefix is kept
        connector.request_finished(request)  # preempted before it got on
    faulty()
    assert 80 == promised[0] > promised[1]
    assert connector.get_num_new_matched_tokens(request, 0) == 0
    assert connector.stats()["events"]["declined_after_short_load"] == 1
    connector.after_forward(request, [range(20, 41)], 4)
    assert connector.get_num_new_matched_tokens(request, 0) > 0


def test_a_request_may_limit_what_is_loaded_for_it(connect, new_request, until):
    connector, request = connect(cpu_bytes="20KiB"), new_request("p", 41)  # five chunks
    store(connector, request)
    request.kv_transfer_params = {"kvoffload": {"max_load_tokens": 18}}
    outcome = load(connector, request, range(20, 31), until, computed=4)
    assert (outcome.num_loaded_tokens, outcome.ok) == (16, True)  # whole blocks
    connector.request_finished(request)
    request.kv_transfer_params = {"kvoffload": {"max_load_tokens": 0}}
    assert connector.get_num_new_matched_tokens(request, 0) == 0
