"""What agents send of their sessions, as vLLM's server gets it behind the middleware."""

import asyncio
import json

import pytest

from kvoffload.connectors.vllm import agent_requests
from kvoffload.connectors.vllm.agent_requests import (
    MOST_BYTES,
    TRANSLATIONS,
    VARIABLE,
    AgentRequests,
)
from kvoffload.errors import ConfigError

EVERYTHING = ",".join(TRANSLATIONS)


def send(body, headers=(), names=EVERYTHING, path="/v1/chat/completions", pieces=1, root_path=""):
    """Send a request through the middleware; return the headers and the body that arrive."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = -(-len(raw) // pieces) or 1
    parts = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": at + 1 < len(parts)}
        for at, part in enumerate(parts)
    ]
    messages.append({"type": "http.disconnect"})
    arrived = {}

    async def app(scope, receive, send):
        arrived["headers"] = dict(scope["headers"])
        whole = b""
        while (message := await receive())["type"] == "http.request":
            whole += message["body"]
            if not message["more_body"]:
                break
        arrived["body"] = whole
        arrived["after"] = (await receive())["type"]

    async def receive():
        return messages.pop(0)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": root_path,
        "headers": [(b"content-length", str(len(raw)).encode()), *headers],
    }
    asyncio.run(AgentRequests(app, {VARIABLE: names})(scope, receive, None))
    assert arrived["after"] == "http.disconnect"
    assert arrived["headers"][b"content-length"] == str(len(arrived["body"])).encode()
    return arrived["headers"], arrived["body"]


def hints(body, **how):
    params = json.loads(send(body, **how)[1]).get("kv_transfer_params") or {}
    return params.get("kvoffload")


@pytest.mark.parametrize("name", ["X-Claude-Code-Session-Id", "session_id", "x-session-affinity"])
def test_a_header_that_names_a_session_becomes_vllm_s(name):
    headers, _ = send({}, [(name.encode(), b"s-1")])
    assert headers[b"x-session-id"] == b"s-1"
    headers, _ = send({}, [(name.encode(), b"s-1"), (b"X-Session-ID", b"own")])
    assert headers[b"x-session-id"] == b"own"


def test_a_prompt_cache_key_names_a_session_where_no_header_does():
    assert send({"prompt_cache_key": "k"})[0][b"x-session-id"] == b"k"
    both = send({"prompt_cache_key": "k"}, [(b"session_id", b"h")])
    assert both[0][b"x-session-id"] == b"h"
    for bad in ("", "a\r\nx: y", "\u20ac", 7, None, ["k"]):
        assert b"x-session-id" not in send({"prompt_cache_key": bad})[0]


@pytest.mark.parametrize(
    ("body", "returns"),
    [
        ({"prompt_cache_retention": "24h"}, "hours"),
        ({"prompt_cache_retention": "in-memory"}, "minutes"),
        ({"prompt_cache_retention": "1y"}, None),
        ({"system": [{"type": "text", "cache_control": {"type": "ephemeral"}}]}, "minutes"),
        ({"system": [{"cache_control": {"ttl": "1h"}}]}, "hours"),
        ({"tools": [{"cache_control": {"ttl": "1h"}}], "messages": [
            {"content": [{"cache_control": {"ttl": "5m"}}]}]}, "minutes"),
        ({"messages": [{"content": "cache_control"}]}, None),
        ({"messages": [{"content": [{"content": [{"cache_control": {"ttl": "1h"}}]}]}]}, "hours"),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}, "hours"),
        ({"nvext": "cache_control", "messages": 7, "tools": [None]}, None),
        ({"cache_control": [], "system": {"cache_control": 5}}, None),
    ],
)  # fmt: skip
def test_a_lifetime_of_a_cache_becomes_a_class_of_returns(body, returns):
    assert hints(body) == ({"returns": returns} if returns else None)


def test_what_a_request_says_in_our_words_stays():
    own = {"kvoffload": {"returns_in_s": 3}}
    assert hints({"prompt_cache_retention": "24h", "kv_transfer_params": own}) == {
        "returns_in_s": 3
    }
    both = {"kvoffload": {"session": "s"}, "other": 1}
    body = {"prompt_cache_retention": "24h", "kv_transfer_params": both}
    assert json.loads(send(body)[1])["kv_transfer_params"] == {
        "kvoffload": {"session": "s", "returns": "hours"},
        "other": 1,
    }
    for odd in (7, "text", {"kvoffload": 7}):
        raw = json.dumps({"prompt_cache_retention": "24h", "kv_transfer_params": odd}).encode()
        assert send(raw)[1] == raw
    assert hints({"prompt_cache_retention": "24h", "kv_transfer_params": None}) == {
        "returns": "hours"
    }


def test_the_rest_of_a_body_stays_byte_for_byte():
    raw = b'{ "n": 123456789012345678901234567890, "x": 1.10, "prompt_cache_retention":"24h" }\n'
    assert send(raw)[1].startswith(raw.rstrip()[:-1])
    assert send(raw, names="nvext")[1] == raw
    assert send(raw, names="")[1] == raw


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"nvext"', b'"nvext"', b'{"nvext":' + b"[" * 99999])
def test_what_is_no_request_passes_as_it_came(raw):
    assert send(raw)[1] == raw


@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_a_body_may_come_in_pieces(pieces):
    body = {"prompt_cache_retention": "24h", "messages": ["x" * 1000]}
    assert hints(body, pieces=pieces) == {"returns": "hours"}
    assert (
        send({"messages": ["x" * 1000]}, pieces=pieces)[1]
        == json.dumps({"messages": ["x" * 1000]}).encode()
    )


def test_only_what_is_named_is_translated_and_only_where_prompts_are_sent():
    body = {"prompt_cache_retention": "24h", "prompt_cache_key": "k"}
    assert hints(body, names="prompt_cache_key") is None
    assert b"x-session-id" not in send(body, names="prompt_cache_retention")[0]
    assert b"x-session-id" not in send(body, [(b"session_id", b"s")], names="nvext")[0]
    assert hints(body, path="/v1/embeddings") is None


def test_a_misspelt_name_is_an_error_at_the_start():
    with pytest.raises(ConfigError, match=r"prompt_cache_keys.*prompt_cache_key"):
        AgentRequests(None, {VARIABLE: "session_headers, prompt_cache_keys"})


def test_other_protocols_pass():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    scope = {"type": "lifespan"}
    asyncio.run(AgentRequests(app, {VARIABLE: EVERYTHING})(scope, None, None))
    assert seen == [scope]


def test_a_body_that_is_too_large_is_not_kept_and_passes_as_it_came():
    body = {"prompt_cache_retention": "24h", "messages": ["x" * MOST_BYTES]}
    assert send(body, pieces=50)[1] == json.dumps(body).encode()


def test_a_root_path_is_no_part_of_the_path():
    body = {"prompt_cache_retention": "24h"}
    path = "/api/v1/chat/completions"
    assert hints(body, path=path) is None
    assert hints(body, path=path, root_path="/api") == {"returns": "hours"}


@pytest.mark.parametrize("depth", [10, 200, 330, 490, 5000, 100_000])
def test_parts_may_lie_in_each_other_however_deep(depth):
    """Whether Python reads such a body depends on its version; the middleware never fails."""
    inner = '{"cache_control": {"type": "ephemeral"}}'
    parts = '{"content": [' * depth + inner + "]}" * depth
    body = b'{"kv_transfer_params": {}, "messages": [' + parts.encode() + b"]}"
    arrived = send(body)[1]
    assert arrived == body or b'"returns": "minutes"' in arrived


def test_the_parts_of_a_deep_body_are_found():
    parts = [{"cache_control": {"ttl": "1h"}}]
    for _ in range(5000):
        parts = [{"content": parts}]
    assert set(agent_requests._of_parts(parts)) == {None, "hours"}
