"""What the end of a transfer costs the manager, in steps of the interpreter for each chunk."""

import pytest
from opcodes import count_opcodes

from kvoffload.cli.bench import benchmark
from kvoffload.connectors.local import LocalConnector
from kvoffload.messages import make_offload_key
from kvoffload.policies.lru import LRUPolicy

BLOCK = 4
MANAGER = "/kvoffload/offload/"


@pytest.fixture
def connector(new_kv_caches):
    caches = new_kv_caches(num_blocks=1024, page_bytes=(64,))
    settings = {"cpu_bytes": "8MiB", "blocks_per_chunk": 1, "policy": "lru"}
    made = LocalConnector(settings, caches, block_size=BLOCK, facts={"model": "m"})
    yield made
    made.close()


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
