"""What a request, or the engine, may ask of the local connector beyond storing and loading."""

import pytest


@pytest.fixture
def connector(connect):
    return connect(cpu_bytes="20KiB")  # five chunks


@pytest.fixture
def ask(new_request):
    """Make a request of ten blocks with hints."""

    def make(name="p", **hints):
        request = new_request(name, 41)
        request.kv_transfer_params = {"kvoffload": hints}
        return request

    return make


def store(connector, request):
    connector.after_forward(request, [list(range(5, 15))], 40)
    assert connector.flush()
    connector.request_finished(request)


def test_a_request_may_limit_what_is_loaded_for_it(connector, ask, until):
    store(connector, ask())
    request = ask(max_load_tokens=18)
    assert connector.get_num_new_matched_tokens(request, 4) == 16  # whole blocks
    connector.update_state_after_alloc(request, [list(range(20, 31))], 16)
    (outcome,) = until(connector.poll)
    assert (outcome.num_loaded_tokens, outcome.ok) == (16, True)
    connector.request_finished(request)
    assert connector.get_num_new_matched_tokens(ask(max_load_tokens=0), 0) == 0


def test_a_request_may_keep_its_chunks_to_itself(connector, ask):
    store(connector, ask(offload=False))
    assert connector.get_num_new_matched_tokens(ask(), 0) == 0
    assert connector.explain(ask()) == [["not_wanted"] * 5]


def test_a_request_is_told_where_its_chunks_are(connector, ask):
    assert connector.explain(ask("new")) == [["never_stored"] * 5]
    store(connector, ask("first"))
    store(connector, ask("second"))
    assert connector.explain(ask("first")) == [["MEMORY"] * 5]
    assert connector.explain(ask("second")) == [["CPU"] * 5]
    connector.reset_cache()
    assert connector.explain(ask("second")) == [["other_namespace"] * 5]


def test_a_short_load_is_promised_however_fast_the_engine_computes(connector, ask, until):
    names = ("a", "b", "c", "d", "e", "f")
    for name in names:
        store(connector, ask(name))
    for _ in range(5):
        connector.note_prefill(num_tokens=10**12, seconds=0.001)
    for name in names[:5]:
        request = ask(name)
        assert connector.get_num_new_matched_tokens(request, 0) == 40
        connector.update_state_after_alloc(request, [list(range(20, 31))], 40)
        assert until(connector.poll)[0].ok
        connector.request_finished(request)
    assert connector.stats()["lookups"]["memory"]["declined"] == 0
