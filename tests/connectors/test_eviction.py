"""What leaves host memory first, as an engine sees it through the connector."""

import pytest

BLOCK = 4


@pytest.fixture
def connect(connect):
    """Make connectors with host memory for so many chunks, and no tiers."""
    return lambda chunks, **settings: connect(cpu_bytes=chunks * 4096, backends=[], **settings)


def use(connector, request):
    """Compute a request in one step, after loading what is there; return the tokens loaded."""
    table = [range(1, 2 + request.num_tokens // BLOCK)]
    found = connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, table, found)
    assert connector.flush()
    connector.poll()
    connector.after_forward(request, table, request.num_tokens)
    assert connector.flush()
    connector.request_finished(request)
    return found


@pytest.mark.parametrize(("settings", "survives"), [({}, True), ({"policy": "lru"}, False)])
def test_by_default_a_prompt_that_came_back_outlives_prompts_seen_once(
    connect, new_request, settings, survives
):
    connector = connect(chunks=16, **settings)
    assert [use(connector, new_request("again", 33)) for _ in range(2)] == [0, 32]
    for i in range(4):  # as many chunks as host memory takes
        use(connector, new_request(f"once {i}", 33))
    assert use(connector, new_request("again", 33)) == (32 if survives else 0)


def test_a_request_that_is_preempted_counts_as_used_once(connect, new_request):
    connector = connect(chunks=8, policy="arc")
    request, table = new_request("p", 33), [range(5, 14)]
    for computed in (16, 32):
        connector.after_forward(request, table, computed)
        assert connector.flush()
        assert connector.request_preempted(request) is False
        assert connector.get_num_new_matched_tokens(request, 0) == computed
    connector.after_forward(request, table, 32)
    connector.request_finished(request)
    order = connector._manager._host.order.normal
    assert (len(order._once.keys), len(order._again.keys)) == (4, 0)
    use(connector, request)
    assert (len(order._once.keys), len(order._again.keys)) == (0, 4)


def test_a_preempted_request_that_is_not_admitted_again_leaves_nothing(connect, new_request):
    connector = connect(chunks=8, policy="arc")
    request = new_request("p", 33)
    connector.after_forward(request, [range(5, 14)], 32)
    connector.request_preempted(request)
    connector.request_finished(request)
    use(connector, request)
    assert len(connector._manager._host.order.normal._again.keys) == 4
