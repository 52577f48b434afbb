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
