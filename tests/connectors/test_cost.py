"""What a transfer costs the engine's thread for each chunk: steps of the interpreter, and calls."""

import sys
from collections import Counter
from functools import partial

import pytest
from local_requests import begin_load, compute
from opcodes import count_opcodes

from kvoffload.cli.bench import benchmark
from kvoffload.messages import make_offload_key
from kvoffload.policies.lru import LRUPolicy

BLOCK = 4
MANAGER, ORDER = "/kvoffload/offload/", "/kvoffload/policies/"


@pytest.fixture
def connect(connect, new_kv_caches):
    caches = new_kv_caches(num_blocks=1024, page_bytes=(64,))
    settings = {"cpu_bytes": "8MiB", "blocks_per_chunk": 1, "policy": "lru"}
    return partial(connect, caches=caches, **settings)


@pytest.fixture
def connector(connect):
    return connect(backends=[])


def ends_of(connector, request, table):
    """Store a request's chunks, then load them; return the steps that taking in each end took."""
    took = []

    def take_in():
        connector._worker.wait(set(connector._transfers.jobs))
        took.append(count_opcodes(connector.poll, MANAGER))
        assert len(connector._transfers.jobs) == 0

    connector.after_forward(request, table, request.num_tokens)
    take_in()
    tokens = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, table, tokens)
    take_in()
    connector.request_finished(request)
    assert connector.stats()["events"]["unexpected_completion"] == 0
    return took


def test_the_end_of_a_whole_transfer_costs_the_manager_nothing_for_each_chunk(
    connector, new_request
):
    few, many = (
        ends_of(connector, new_request(f"{count}", count * BLOCK + 1), [range(1, 2 + count)])
        for count in (100, 600)
    )
    a_chunk = [(more - less) / 500 for less, more in zip(few, many, strict=True)]
    assert max(a_chunk) < 1, "steps a chunk to end a store, a load"


def test_a_write_through_moves_its_chunks_in_the_order_together(connect, new_request, tmp_path):
    disk = {"type": "disk", "root": str(tmp_path), "capacity": "1GiB", "min_free": 0}
    connector = connect(disk, facts={"model": "m", "dtype": "int8", "weights": "w"})
    calls_of = {"begin": [], "end": []}
    for count in (100, 600):
        request = new_request(f"{count}", count * BLOCK + 1)
        connector.after_forward(request, [range(1, 2 + count)], request.num_tokens)
        for of_step in calls_of.values():
            connector._worker.wait(set(connector._transfers.jobs))
            of_step.append(count_calls(connector.poll, ORDER))
        assert connector.flush()
        connector.request_finished(request)
        assert len(connector._manager._host.evictable) >= count
    for few, many in calls_of.values():
        assert many == few, calls_of


@pytest.mark.parametrize("source", ["host", "disk", "both"])
def test_a_load_calls_no_function_for_each_chunk(source, connect, new_request, tmp_path):
    disk = {"type": "disk", "root": str(tmp_path), "capacity": "1GiB", "min_free": 0}
    connector = connect(disk, facts={"model": "m", "dtype": "int8", "weights": "w"})
    few, many = (
        [calls_of_a_load(connector, new_request, source, count) for _ in range(3)][-1]
        for count in (40, 240)
    )
    assert many - few < 20, "calls of 200 chunks"


def count_calls(action, inside="/kvoffload/"):
    """Run an action and count the calls of functions whose file's path has this part."""
    calls = 0

    def note(frame, event, arg):
        nonlocal calls
        calls += event == "call" and inside in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_a_load(connector, new_request, source, count):
    """Load a prompt that is stored; return the calls of this package on the engine's thread."""
    request, table = new_request(f"{count}", count * BLOCK + 1), range(1, 2 + count)
    compute(connector, request, table)
    if source != "host":
        connector._manager.reset_cache()
    if source == "both":
        head = new_request(f"{count}", count // 2 * BLOCK + 1)
        assert begin_load(connector, head, table) == count // 2 * BLOCK
        assert connector.flush()
        assert connector.poll()[0].ok
        connector.request_finished(head)
    outcomes = []
    calls = count_calls(lambda: begin_load(connector, request, table))
    connector._worker.wait(set(connector._transfers.jobs))
    calls += count_calls(lambda: outcomes.extend(connector.poll()))
    calls += count_calls(lambda: connector.request_finished(request))
    (outcome,) = outcomes
    from_disk = {"host": 0, "disk": count, "both": count // 2}[source] * BLOCK
    tokens = Counter({"CPU": count * BLOCK - from_disk, "DISK": from_disk})
    assert outcome.tokens_by_medium == +tokens
    assert connector.flush()
    return calls


def test_the_benchmark_of_the_manager_measures_what_the_connector_does(connector, new_request):
    verbs = ("touch", "prepare_store", "begin_load", "complete", "retire")
    request, table = new_request("p", 41), [range(1, 12)]
    real, measured = told(connector._manager, verbs), benchmark("manager").ours(10, "", LRUPolicy)
    connector.after_forward(request, table, request.num_tokens)
    connector.flush()
    connector.request_finished(request)
    tokens = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, table, tokens)
    connector.flush()
    connector.request_finished(request)
    bench = told(measured.manager, verbs)
    keys = [make_offload_key(hashed, 0) for hashed in request.block_hashes]
    measured.store(keys)
    measured.load(keys)
    store, load = (
        [(verb, keys) for verb in ("touch", begin, "complete", "retire")]
        for begin in ("prepare_store", "begin_load")
    )
    assert real == bench == [*store, *load]


def told(manager, verbs):
    """Record what a manager is told: verbs and chunks."""
    calls = []

    def watch(verb):
        real = getattr(manager, verb)

        def note(of, *rest, **more):
            calls.append((verb, list(getattr(of, "keys", of))))
            return real(of, *rest, **more)

        setattr(manager, verb, note)

    for verb in verbs:
        watch(verb)
    return calls
