"""What clients write into ``kv_transfer_params``: little work and few lines, however much it is."""

import inspect
import sys
import types

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.v1.kv_offload.base import Locality, TierFilter
from vllm.v1.request import Request

from kvoffload.connectors.vllm.client_requests import ClientParams
from tests.engines.vllm_engine.test_vllm_uses import Vllm

MANY = 20_000


@pytest.fixture
def half():
    engine = Vllm()
    yield engine.half
    engine.close()


def asked(half, params, name="r"):
    """Let the scheduler half take in a request; return what it made of it and functions called."""
    request = types.SimpleNamespace(
        request_id=name,
        block_hashes=[],
        kv_transfer_params=params,
        kv_hints=None,
        cache_salt=None,
        mm_features=[],
        lora_request=None,
        skip_reading_prefix_cache=False,
    )
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        half.on_new_request(request)
    finally:
        sys.setprofile(None)
    return half._req_status[name], calls


HOSTILE = {
    "numbers": {"kv_load_tiers": [1] * MANY},
    "unknown media": {"kv_load_tiers": [{"medium": "x"}] * MANY},
    "known media": {"kv_load_tiers": [{"medium": "CPU"}] * MANY},
    "a long text": {"kv_load_tiers": [{"medium": "m" * 3_000_000}]},
    "a nested text": {"kv_load_tiers": [{"locality": ["m" * 3_000_000]}]},
    "no list": {"kv_load_tiers": "m" * 3_000_000},
    "a few unknown media": {"kv_load_tiers": [{"medium": "a\nCRITICAL forged\x1b[31m"}] * 16},
    "limits that are lists": {"max_load_tokens": [1] * MANY, "max_offload_tokens": "m" * MANY},
}


@pytest.mark.parametrize("params", HOSTILE.values(), ids=HOSTILE)
def test_a_request_with_huge_wishes_is_taken_in_with_little_work_and_one_line(half, caplog, params):
    _, usual = asked(half, {"kv_load_tiers": [{"locality": "remote"}]}, "usual")
    for i in range(3):
        status, calls = asked(half, dict(params), f"r{i}")
        assert status.req_context.load_tier_filter is TierFilter.ALL
        assert status.max_load_tokens is None
        assert status.max_offload_tokens is None
        assert not set(params) & set(status.req_context.kv_transfer_params)
        assert calls < usual + 2000, "a look at each item would be 20,000"
    assert half.adapter.manager.counters["hints_ignored"] == 3 * len(params)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(params), "the first of each kind, once"
    assert all(len(line) < 200 and "\n" not in line for line in lines)


def test_wishes_that_vllm_knows_reach_it_unchanged(half, caplog):
    params = {
        "kv_load_tiers": [{"locality": "remote"}, {"medium": "storage", "locality": None}],
        "max_load_tokens": 0,
        "max_offload_tokens": 64,
    }
    status, _ = asked(half, params)
    assert status.req_context.kv_transfer_params is params
    first, second = status.req_context.load_tier_filter.matchers
    assert first.locality is Locality.REMOTE
    assert second.locality is None
    assert (status.max_load_tokens, status.max_offload_tokens) == (0, 64)
    nothing, _ = asked(half, {"kv_load_tiers": []}, "nothing")
    assert nothing.req_context.load_tier_filter == TierFilter(matchers=())
    assert not half.adapter.manager.counters["hints_ignored"]
    assert not caplog.records


@pytest.mark.parametrize("params", [None, {}, {"kvoffload": {"explain": True}}, ["no object"]])
def test_parameters_without_such_wishes_are_passed_on(params):
    assert ClientParams(pytest.fail).bounded(params) is params


@pytest.mark.parametrize(
    ("params", "session", "told"),
    [
        (None, "s", {"kvoffload": {"session": "s"}}),
        ({"other": 1}, "s", {"other": 1, "kvoffload": {"session": "s"}}),
        (
            {"kvoffload": {"returns": "soon"}},
            "s",
            {"kvoffload": {"session": "s", "returns": "soon"}},
        ),
        ({"kvoffload": {"session": "own"}}, "s", {"kvoffload": {"session": "own"}}),
        ({"kvoffload": {"returns": "soon"}}, None, {"kvoffload": {"returns": "soon"}}),
        ({"kvoffload": 7}, "s", {"kvoffload": 7}),
        (["no object"], "s", ["no object"]),
        (None, None, None),
    ],
)
def test_vllm_s_own_name_of_a_session_is_the_hint(params, session, told):
    request = types.SimpleNamespace(kv_transfer_params=params, session_id=session, kv_hints=None)
    assert ClientParams(pytest.fail, takes_sessions=True).of(request) == told
    assert ClientParams(pytest.fail).of(request) is params, "not among the hints allowed"


def test_a_request_of_vllm_has_a_session():
    """Of 0.32 and 0.33: the attribute is read without a look whether it is there."""
    assert "session_id" in inspect.signature(Request).parameters
