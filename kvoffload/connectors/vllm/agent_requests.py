"""Translates what agents and gateways send of their sessions, in front of vLLM's HTTP server.

``vllm serve --middleware kvoffload.connectors.vllm.agent_requests.AgentRequests``. The variable
``KVOFFLOAD_TRANSLATE`` names what is translated, by commas; without it every request passes as it
came. A name of a session becomes vLLM's header ``X-Session-ID``, a lifetime of a cache becomes the
hint ``returns``. What a request says in vLLM's own words stays.

This module runs in the API server and imports nothing of vLLM.
"""

import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any

from kvoffload.config import did_you_mean
from kvoffload.errors import ConfigError

VARIABLE = "KVOFFLOAD_TRANSLATE"
SESSION_HEADER = b"x-session-id"
SESSION_HEADERS = (
    b"x-claude-code-session-id",
    b"x-session-affinity",
    b"session_id",
    b"session-id",
)
"""Headers that name a session, as agents send them; the first one that a request has counts."""
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_TTLS = {"5m": "minutes", "1h": "hours"}
_RETENTIONS = {"in_memory": "minutes", "in-memory": "minutes", "24h": "hours"}
MOST_BYTES = 8 << 20
"""A larger body passes as it came."""
_SOONEST_FIRST = ("minutes", "hours")
TRANSLATIONS: Mapping[str, bytes] = {
    "session_headers": b"",
    "prompt_cache_key": b'"prompt_cache_key"',
    "prompt_cache_retention": b'"prompt_cache_retention"',
    "cache_control": b'"cache_control"',
    "nvext": b'"nvext"',
}
"""What can be translated, and what a body has then; empty: headers tell it."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AgentRequests:
    """An ASGI middleware; see the module.

    Args:
        app: what serves the requests.
        environ: has the names of what is translated.

    Raises:
        ConfigError: a name is unknown.
    """

    def __init__(self, app: App, environ: Mapping[str, str] = os.environ) -> None:
        self._app = app
        names = [name.strip() for name in environ.get(VARIABLE, "").split(",") if name.strip()]
        for name in names:
            if name not in TRANSLATIONS:
                hint = did_you_mean(name, TRANSLATIONS) or f"known: {', '.join(TRANSLATIONS)}"
                raise ConfigError(VARIABLE, name, hint)
        self._names = frozenset(names)
        self._signs = tuple(sign for name in names if (sign := TRANSLATIONS[name]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _path_of(scope) not in _PATHS:
            await self._app(scope, receive, send)
            return
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        session = self._session_of(headers)
        if self._signs:
            body, messages = await _whole_body(receive)
            new, named = self._translated(body)
            session = session or named
            if new is not body:
                headers = [pair for pair in headers if pair[0] != b"content-length"]
                headers.append((b"content-length", str(len(new)).encode()))
                ends = [each for each in messages if each["type"] != "http.request"]
                messages = [{"type": "http.request", "body": new, "more_body": False}, *ends]
            receive = _again(messages, receive)
        if session and not any(name == SESSION_HEADER for name, _ in headers):
            headers.append((SESSION_HEADER, session))
        await self._app({**scope, "headers": headers}, receive, send)

    def _session_of(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        if "session_headers" not in self._names:
            return b""
        known = dict(headers)
        return next((known[name] for name in SESSION_HEADERS if known.get(name)), b"")

    def _translated(self, body: bytes) -> tuple[bytes, bytes]:
        """Return the body, with a hint where it says when the session returns; and the session."""
        if not any(sign in body for sign in self._signs):
            return body, b""
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                return body, b""
            key = request.get("prompt_cache_key") if "prompt_cache_key" in self._names else None
            found = set(self._returns(request))
            returns = next((name for name in _SOONEST_FIRST if name in found), None)
            return (_with_hint(body, request, returns) if returns else body), _as_header(key)
        except (ValueError, RecursionError):
            return body, b""  # vLLM refuses it in its own words

    def _returns(self, request: dict[str, Any]) -> Iterator[str | None]:
        """Yield the class of each lifetime that a request names."""
        if "prompt_cache_retention" in self._names:
            yield _looked_up(_RETENTIONS, request.get("prompt_cache_retention"))
        if "nvext" in self._names and isinstance(extension := request.get("nvext"), dict):
            yield _of_cache_control(extension)
        if "cache_control" in self._names:
            yield _of_cache_control(request)
            for name in ("system", "tools", "messages"):
                yield from _of_parts(request.get(name))


def _of_parts(parts: object) -> Iterator[str | None]:
    lists = [parts]  # no recursion: a client decides how deep they lie in each other
    while lists:
        inner = lists.pop()
        for part in inner if isinstance(inner, list) else ():
            if isinstance(part, dict):
                yield _of_cache_control(part)
                lists.append(part.get("content"))


def _of_cache_control(part: dict[str, Any]) -> str | None:
    control = part.get("cache_control")
    if not isinstance(control, dict):
        return None
    return _looked_up(_TTLS, control.get("ttl", "5m"))


def _looked_up(names: Mapping[str, str], value: object) -> str | None:
    return names.get(value) if isinstance(value, str) else None


def _as_header(value: object) -> bytes:
    """Return a text as the value of a header; empty if it cannot be one."""
    if not isinstance(value, str) or not value.isprintable():
        return b""
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return b""


def _with_hint(body: bytes, request: dict[str, Any], returns: str) -> bytes:
    """Add the hint to a request that says nothing of it yet."""
    params = request.get("kv_transfer_params")
    if params is None and "kv_transfer_params" not in request:
        # The rest of the body stays as it came, byte for byte.
        hint = json.dumps({"kvoffload": {"returns": returns}})
        return body.rstrip()[:-1] + b',"kv_transfer_params":' + hint.encode() + b"}"
    hints = params.get("kvoffload", {}) if isinstance(params, dict) else params or {}
    if not isinstance(hints, dict) or not isinstance(params, dict | None):
        return body
    if "returns" in hints or "returns_in_s" in hints:
        return body
    changed = {**(params or {}), "kvoffload": {**hints, "returns": returns}}
    return json.dumps({**request, "kv_transfer_params": changed}).encode()


def _path_of(scope: Scope) -> str:
    """Return the path below the root path, which some proxies leave in it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _whole_body(receive: Receive) -> tuple[bytes, list[Message]]:
    """Read a request's body; return it with the messages that it came in.

    A body above :data:`MOST_BYTES` is returned as empty: vLLM asks for an API key after this.
    """
    parts: list[bytes] = []
    messages: list[Message] = []
    size = 0
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BYTES:
            parts.clear()
            break
        if not message.get("more_body", False):
            break
    return b"".join(parts), messages


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Receive these messages, and then what follows."""
    pending = iter(messages)

    async def again() -> Message:
        return next(pending, None) or await receive()

    return again
