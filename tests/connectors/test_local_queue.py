"""What a queued request needs stays in host memory, and comes early from a real disk."""

import os
import signal
import time

import pytest
import torch

from kvoffload.offload import waiting
from tests.support.manager_check import check

BLOCK, CHUNK = 4, 8
PROMPT = 5 * CHUNK + 1
SLOT_BYTES = 4096
BLOCKS, OTHERS = list(range(5, 16)), list(range(20, 31))


@pytest.fixture
def connect(connect, tmp_path):
    """Make connectors with host memory for so many chunks, over a disk."""
    disk = {"type": "disk", "root": str(tmp_path), "capacity": "1MiB", "min_free": 0}
    facts = {"model": "m", "weights": "w", "dtype": "float32"}

    def make(num_chunks, **settings):
        settings = {"backends": [disk], **settings}
        return connect(cpu_bytes=num_chunks * SLOT_BYTES, facts=facts, **settings)

    return make


def store(connector, request, kv_caches, seed):
    generator = torch.Generator().manual_seed(seed)
    for t in kv_caches.tensors:
        shape = t.tensor[BLOCKS].shape
        t.tensor[BLOCKS] = torch.randint(-128, 127, shape, dtype=torch.int8, generator=generator)
    truth = [t.tensor[BLOCKS].clone() for t in kv_caches.tensors]
    connector.after_forward(request, [BLOCKS], PROMPT)
    assert connector.flush()
    connector.poll()
    assert connector.flush()
    connector.request_finished(request)
    return truth


def poll_until(connector, is_so):
    until_s = time.monotonic() + 120
    while not is_so():
        assert connector.poll() == []
        assert time.monotonic() < until_s, "it does not come"
        time.sleep(0.005)


def tell_stores(connector):
    """Tell the server of changes; return when its stores know: half a second is between words."""
    connector.poll()
    words = connector._spec.io.loop_delays.counts
    enough = sum(words) + 2
    poll_until(connector, lambda: sum(words) >= enough)


def load(connector, request, until):
    tokens = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, [OTHERS], tokens)
    (outcome,) = until(connector.poll)
    return outcome


def read_early(connector):
    return connector.stats()["queue_chunks"]["read_early"]


@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_queued_prompt_comes_from_disk_before_its_turn(
    connect, new_request, kv_caches, until, io
):
    connector = connect(8, io=io)
    truth = store(connector, new_request("wanted", PROMPT), kv_caches, 1)
    store(connector, new_request("other", PROMPT), kv_caches, 2)
    wanted = new_request("wanted", PROMPT)
    assert "DISK" in connector.explain(wanted)[0]
    connector.request_queued(wanted)
    poll_until(connector, lambda: set(connector.explain(wanted)[0]) == {"CPU"})
    assert read_early(connector) > 0
    outcome = load(connector, wanted, until)
    assert outcome.ok
    assert outcome.tokens_by_medium == {"CPU": 5 * CHUNK}
    for t, expected in zip(kv_caches.tensors, truth, strict=True):
        assert torch.equal(t.tensor[OTHERS][:10], expected[:10])
    assert connector.stats()["queue_chunks"]["read_in_vain"] == 0
    assert connector.stats()["queue_requests"] == 0
    connector.request_finished(wanted)


@pytest.mark.parametrize("end", ["finished", "preempted", "admitted without a load"])
def test_nothing_stays_for_a_request_that_left_the_queue(connect, new_request, kv_caches, end):
    connector = connect(8)
    store(connector, new_request("a", PROMPT), kv_caches, 1)
    request = new_request("a", PROMPT)
    connector.request_queued(request)
    connector.poll()
    assert connector.stats()["queue_kept_bytes"] == 5 * SLOT_BYTES
    if end == "finished":
        connector.request_finished(request)
    elif end == "preempted":
        connector.request_preempted(request)
    else:
        connector.after_forward(request, [BLOCKS], PROMPT)
    assert connector.stats()["queue_kept_bytes"] == 0
    assert connector.stats()["queue_requests"] == 0


def test_what_a_long_prompt_kept_ends_while_it_runs_though_none_waits(
    connect, new_request, kv_caches, monkeypatch
):
    monkeypatch.setattr(waiting, "PORTION", 2)
    connector = connect(8)
    store(connector, new_request("a", PROMPT), kv_caches, 1)
    request = new_request("a", PROMPT)
    connector.request_queued(request)
    kept = []
    for _ in range(4):
        connector.poll()
        kept.append(connector.stats()["queue_kept_bytes"] // SLOT_BYTES)
    connector.after_forward(request, [BLOCKS], PROMPT)
    for _ in range(3):
        kept.append(connector.stats()["queue_kept_bytes"] // SLOT_BYTES)
        connector.poll()
    assert kept == [2, 4, 5, 5, 3, 1, 0]


def test_a_preempted_request_keeps_before_those_that_came_later(connect, new_request, kv_caches):
    connector = connect(11, backends=[], waiting_share=1)
    store(connector, new_request("waits", PROMPT), kv_caches, 1)
    preempted, waits = new_request("preempted", PROMPT), new_request("waits", PROMPT)
    connector.after_forward(preempted, [BLOCKS], PROMPT)
    assert connector.flush()
    connector.request_queued(waits)
    connector.request_preempted(preempted)
    connector.request_queued(preempted)
    connector.poll()
    for i in range(2):
        store(connector, new_request(f"running{i}", PROMPT), kv_caches, 2 + i)
    assert connector.explain(preempted) == [["CPU"] * 5]
    assert "CPU" not in connector.explain(waits)[0][1:]
    for request in (preempted, waits):
        connector.request_finished(request)
    assert connector.stats()["queue_kept_bytes"] == 0


def test_a_request_that_may_load_nothing_keeps_nothing(connect, new_request, kv_caches):
    connector = connect(8)
    store(connector, new_request("a", PROMPT), kv_caches, 1)
    request = new_request("a", PROMPT)
    request.kv_transfer_params = {"kvoffload": {"max_load_tokens": 0}}
    connector.request_queued(request)
    assert connector.stats()["queue_requests"] == 0


@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_disk_keeps_what_a_queued_request_needs(connect, new_request, kv_caches, tmp_path, io):
    chunk = 8192
    disk = {"type": "disk", "root": str(tmp_path), "capacity": 14 * chunk, "min_free": 0}
    # Host memory may keep no whole chunk, so nothing comes early.
    connector = connect(6, io=io, backends=[disk], waiting_share=0.1)
    store(connector, new_request("wanted", PROMPT), kv_caches, 1)
    wanted = new_request("wanted", PROMPT)
    connector.request_queued(wanted)
    connector.poll()
    tell_stores(connector)
    for i in range(6):
        store(connector, new_request(f"running{i}", PROMPT), kv_caches, i + 2)
    assert connector.explain(wanted) == [["DISK"] * 5]
    connector.request_finished(wanted)
    tell_stores(connector)
    for i in range(6):
        store(connector, new_request(f"later{i}", PROMPT), kv_caches, i + 9)
    assert "DISK" not in connector.explain(wanted)[0]
    assert connector.stats()["queue_chunks"]["read_early"] == 0


def test_a_queued_prompt_comes_early_though_the_io_process_dies(connect, new_request, kv_caches):
    connector = connect(8, io="process")
    store(connector, new_request("wanted", PROMPT), kv_caches, 1)
    store(connector, new_request("other", PROMPT), kv_caches, 2)
    wanted, io = new_request("wanted", PROMPT), connector._spec.io
    for died in (1, 2):  # idle, and soon after it was told
        connector.request_queued(wanted)
        if died == 2:
            connector.poll()
        os.kill(io._peer.pid, signal.SIGKILL)
        poll_until(connector, lambda died=died: io.died == died)
        poll_until(connector, lambda: set(connector.explain(wanted)[0]) == {"CPU"})
        connector.request_finished(wanted)
        store(connector, new_request(f"more{died}", PROMPT), kv_caches, 3)
        store(connector, new_request(f"last{died}", PROMPT), kv_caches, 4)
    assert io._awaited == {}


def test_a_disk_knows_what_is_needed_after_a_death_of_the_io_process(
    connect, new_request, kv_caches, tmp_path
):
    disk = {"type": "disk", "root": str(tmp_path), "capacity": 14 * 8192, "min_free": 0}
    connector = connect(6, io="process", backends=[disk], waiting_share=0.1)
    store(connector, new_request("wanted", PROMPT), kv_caches, 1)
    wanted, io = new_request("wanted", PROMPT), connector._spec.io
    connector.request_queued(wanted)
    connector.poll()
    os.kill(io._peer.pid, signal.SIGKILL)
    poll_until(connector, lambda: io.died and io.tiers["disk"].is_complete)
    tell_stores(connector)
    for i in range(6):
        store(connector, new_request(f"running{i}", PROMPT), kv_caches, i + 2)
    assert connector.explain(wanted) == [["DISK"] * 5]


@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_disk_evicts_the_session_that_returns_last(connect, new_request, kv_caches, tmp_path, io):
    disk = {"type": "disk", "root": str(tmp_path), "capacity": 18 * 8192, "min_free": 0}
    hints = ["session", "returns_in_s"]
    connector = connect(6, io=io, backends=[disk], client_hints=hints)
    for seed, (name, in_s) in enumerate((("soon", 20), ("late", 9000))):
        request = new_request(name, PROMPT)
        request.kv_transfer_params = {"kvoffload": {"session": name, "returns_in_s": in_s}}
        store(connector, request, kv_caches, seed)
        connector.poll()
    tell_stores(connector)
    for i in range(3):
        store(connector, new_request(f"new{i}", PROMPT), kv_caches, 2 + i)
    places = {name: connector.explain(new_request(name, PROMPT))[0] for name in ("soon", "late")}
    assert set(places["soon"]) <= {"DISK", "CPU"}
    assert places["late"] == ["evicted"] * 5


def test_a_preempted_request_has_not_ended(connect, new_request, kv_caches):
    """Its session has said nothing yet: the request itself comes again."""
    connector = connect(8, client_hints=["returns_in_s"])
    request = new_request("a", PROMPT)
    request.kv_transfer_params = {"kvoffload": {"returns_in_s": 20}}
    connector.after_forward(request, [BLOCKS], PROMPT)
    assert connector.flush()
    connector.request_preempted(request)
    assert connector.stats()["return_chunks"]["told"] == 0
    connector.after_forward(request, [BLOCKS], PROMPT)
    connector.request_finished(request)
    assert connector.stats()["return_chunks"]["told"] == 5


@pytest.mark.parametrize("when", ["before it looks", "after it looked"])
def test_requests_that_share_a_name_get_each_its_own_chunks(
    connect, new_request, kv_caches, until, when
):
    """A client may send a name twice, and one of the two may never end."""
    connector = connect(16)
    store(connector, new_request("other", PROMPT), kv_caches, 1)
    truth = store(connector, new_request("wanted", PROMPT), kv_caches, 2)
    other, wanted = (new_request(name, PROMPT, request_id="x") for name in ("other", "wanted"))

    def comes_between():
        connector.request_queued(other)
        connector.poll()
        assert connector.get_num_new_matched_tokens(other, 0) == 5 * CHUNK

    if when == "before it looks":
        comes_between()
    connector.request_queued(wanted)
    connector.poll()
    tokens = connector.get_num_new_matched_tokens(wanted, 0)
    if when == "after it looked":
        comes_between()
    connector.update_state_after_alloc(wanted, [OTHERS], tokens)
    (outcome,) = until(connector.poll)
    assert outcome.ok
    for t, expected in zip(kv_caches.tensors, truth, strict=True):
        assert torch.equal(t.tensor[OTHERS][:10], expected[:10])
    check(connector)
    for request in (other, wanted):
        connector.request_finished(request)
    assert connector.stats()["queue_requests"] == 0
    assert connector.stats()["queue_kept_bytes"] == 0


def test_a_prompt_whose_last_tokens_were_replaced_is_named_anew(
    connect, new_request, kv_caches, until
):
    """As in a session whose next part takes the place of the last token that was sampled."""
    connector = connect(16, backends=[])
    truth = store(connector, new_request("a", PROMPT), kv_caches, 1)
    session = new_request("a", PROMPT)
    replaced, session.block_hashes[-1] = session.block_hashes[-1], b"sampled".ljust(32)
    connector.request_queued(session)
    connector.poll()
    assert connector.get_num_new_matched_tokens(session, 0) == 4 * CHUNK
    session.block_hashes[-1] = replaced
    outcome = load(connector, session, until)
    assert outcome.tokens_by_medium == {"CPU": 5 * CHUNK}
    for t, expected in zip(kv_caches.tensors, truth, strict=True):
        assert torch.equal(t.tensor[OTHERS][:10], expected[:10])
    connector.request_finished(session)
    assert connector.stats()["queue_kept_bytes"] == 0
