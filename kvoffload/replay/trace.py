"""Traces: which blocks each request asked for, in order, from three kinds of file.

* a JSONL file with one request a line (``hash_ids``, as the Mooncake traces have them);
* a folder of JSON files, one conversation each, with ``hash_ids`` in their requests;
* a JSONL file of requests by the keys of their chunks, which :mod:`kvoffload.recording` writes.

Requests with times are put in the order of these. ``timestamp`` is in milliseconds, ``t`` in
seconds.
"""

import gzip
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

import msgspec

from kvoffload.errors import ConfigError
from kvoffload.replay.requests import Requests, RequestsBuilder

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Time = Annotated[float, msgspec.Meta(ge=0)]
_Ids = list[_Count | str]
_Tokens = Annotated[int, msgspec.Meta(ge=1)] | None

_STDIN = Path("-")
_MS = 1e-3
_TOO_DEEP = "is nested too deeply"
_SHOWN = 200
"""Characters of a wrong value that its error shows."""


class TraceError(ConfigError):
    """A trace that cannot be read; names the file, the line and the field.

    A field of a conversation, whose objects span lines, is named by its path from the top, ``$``.
    """

    def __init__(
        self, path: Path, line: int | None, field: str, value: object, remedy: str
    ) -> None:
        where = f"{path}:{line}: " if line else f"{path}: "
        text = repr(value)  # of a prompt, thousands of ids
        short = value if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        super().__init__(field if value == str(path) else where + field, short, remedy)
        self.path = path
        self.line = line


class RequestLine(msgspec.Struct):
    """One line of a request trace; fields not named here are ignored."""

    reason: ClassVar = "used"
    tokens_per_chunk: ClassVar = None
    keys: _Ids = msgspec.field(name="hash_ids")
    timestamp: _Time | None = None


class RecordedLine(msgspec.Struct):
    """One recorded request; see :mod:`kvoffload.recording`."""

    keys: list[str]
    timestamp: _Time | None = None
    reason: str = "used"
    """Version 0.1 wrote lines of other reasons as well, which are no requests."""
    tokens_per_chunk: _Tokens = None


@dataclass(frozen=True)
class Trace:
    """Requests in order, and what was read to get them."""

    name: str
    requests: Requests
    sample: float = 1.0
    """The share of all blocks that was kept. Capacities are to be scaled by it."""
    weights: Mapping[bytes, float] = field(default_factory=dict)
    """Of a sample: how many uses each use of a block stands for."""
    block_tokens: int | None = None
    """Tokens in a block, where the trace says so throughout."""

    @property
    def accesses(self) -> int:
        return self.requests.accesses

    @property
    def distinct(self) -> int:
        return len(self.requests.keys)


class _Told(set[int | None]):
    """The tokens in a block, as the parts of a trace say: one number, or nothing."""

    def hear(self, tokens: int | None, path: Path, line: int | None, field: str) -> None:
        """Take what one part says; raise TraceError if an earlier part says something else."""
        others = self - {tokens, None}
        if tokens is not None and others:
            remedy = f"what precedes it says {others.pop()}; replay the parts one by one"
            raise TraceError(path, line, field, tokens, remedy)
        self.add(tokens)

    @property
    def tokens(self) -> int | None:
        """What every part says; None if one says nothing."""
        return next(iter(self)) if len(self) == 1 else None


def from_timed(name: str, requests: Iterable[tuple[float, Iterable[int | str]]]) -> Trace:
    """Make a trace of requests given by times in seconds and block ids, as of a workload."""
    builder = RequestsBuilder()
    for time, ids in requests:
        builder.add(ids, time)
    return Trace(name, builder.build())


def read_trace(path: Path) -> Trace:
    """Read a trace of any kind; ``-`` is standard input, a name ending in ``.gz`` a packed file.

    Raises:
        TraceError: names file, line and field.
    """
    try:
        requests, told = _folder(path) if path.is_dir() else _lines(path)
    except (OSError, EOFError, zlib.error) as error:  # the last two: of a packed file
        remedy = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        wrong = Path(getattr(error, "filename", None) or path)  # one file of a folder
        raise TraceError(wrong, None, "trace", str(wrong), remedy) from error
    if not requests.accesses:
        raise TraceError(path, None, "trace", str(path), "has no block accesses")
    name = "standard input" if path == _STDIN else path.name
    return Trace(name, requests, block_tokens=told.tokens)


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    if path == _STDIN:
        return sys.stdin.buffer
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _lines(path: Path) -> tuple[Requests, _Told]:
    """Requests of a JSONL file, by ids or by recorded keys, told apart by the first line."""
    with _open(path) as file:
        lines = ((number, line) for number, raw in enumerate(file, 1) if (line := raw.strip()))
        first = next(lines, (0, b""))
        of_file = chain((first,) if first[0] else (), lines)
        is_recorded = b'"keys"' in first[1] and b'"hash_ids"' not in first[1]
        decoder = msgspec.json.Decoder(RecordedLine if is_recorded else RequestLine)
        builder, told, since = RequestsBuilder(), _Told(), 0.0
        for number, line in of_file:
            request = _decoded(line, path, decoder.decode, number)
            told.hear(request.tokens_per_chunk, path, number, "tokens_per_chunk")
            since = since if request.timestamp is None else request.timestamp
            if request.reason == "used":
                builder.add(request.keys, since * _MS)
        return builder.build(), told


def _decoded(
    raw: bytes, path: Path, decode: Callable[[bytes], Any], line: int | None = None
) -> Any:
    """Return what a file has, or a line of one; raises TraceError."""
    try:
        raw.decode()
        return decode(raw)
    except UnicodeDecodeError as error:
        at = line or raw.count(b"\n", 0, error.start) + 1
        field = f"column {error.start + 1}" if line else "text"
        raise TraceError(path, at, field, _text(raw), "is not UTF-8") from error
    except msgspec.DecodeError as error:
        if line and isinstance(error, msgspec.ValidationError):
            field, remedy = _field(error)
            raise TraceError(path, line, field, _shown(raw, field), remedy) from error
        at = line or _line_of(raw, error)
        raise TraceError(path, at, "JSON", _text(raw), str(error)) from error
    except RecursionError as error:
        raise TraceError(path, line, "JSON", _text(raw), _TOO_DEEP) from error


def _text(raw: bytes) -> str:
    """Return the beginning of a line or file, for the message."""
    return raw[:60].decode(errors="replace")


def _field(error: msgspec.ValidationError) -> tuple[str, str]:
    """Take msgspec's message apart: the field, and what would be right."""
    text, _, at = str(error).rpartition(" - at `$.")
    if text:
        return at.rstrip("`"), text
    if "missing required field" in str(error):
        return str(error).split("`")[1], "is required"
    return "line", str(error)


def _shown(line: bytes, field: str) -> object:
    """Return the value of a field, for the message."""
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):  # the field came before what is wrong as JSON
        return _text(line)
    name = field.split("[", maxsplit=1)[0]
    return data.get(name) if isinstance(data, dict) and name in data else _text(line)


def _folder(root: Path) -> tuple[Requests, _Told]:
    """Requests of all conversations, merged by their times."""
    builder, told = RequestsBuilder(), _Told()
    for path in sorted(root.glob("*.json")):
        data = _decoded(path.read_bytes(), path, msgspec.json.decode)
        facts = data if isinstance(data, dict) else {}
        is_local = facts.get("hash_id_scope") == "local"
        scope = builder.scope(f"{path.name}:") if is_local else None
        tokens = _checked(facts.get("block_size"), _Tokens, path, "$.block_size")
        told.hear(tokens, path, None, "$.block_size")
        try:
            for time, ids in _conversation(data, path, "$", 0.0):
                builder.add(ids, time, scope)
        except RecursionError as error:
            raise TraceError(path, None, "JSON", _text(path.read_bytes()), _TOO_DEEP) from error
    return builder.build(), told


def _line_of(raw: bytes, error: msgspec.DecodeError) -> int:
    """Return the line of msgspec's byte position; the last line if it names none."""
    _, _, position = str(error).rpartition("(byte ")
    end = int(position.rstrip(")")) if position.rstrip(")").isdigit() else len(raw)
    return raw.count(b"\n", 0, end) + 1


def _conversation(
    node: Any, path: Path, where: str, since: float
) -> Iterator[tuple[float, list[int | str]]]:
    """Find the requests in a conversation: objects with ``hash_ids``, at any depth of lists."""
    if isinstance(node, list):
        for at, item in enumerate(node):
            yield from _conversation(item, path, f"{where}[{at}]", since)
    elif isinstance(node, dict):
        called, unit = ("timestamp", _MS) if "timestamp" in node else ("t", 1.0)
        time = since
        if called in node:
            time = _checked(node[called], _Time, path, f"{where}.{called}") * unit
        if "hash_ids" in node:
            yield time, _checked(node["hash_ids"], _Ids, path, f"{where}.hash_ids")
        for name in ("requests", "turns"):
            if name in node:
                yield from _conversation(node[name], path, f"{where}.{name}", time)
    else:
        raise TraceError(path, None, where, node, "must be an object or a list of them")


def _checked(value: Any, kind: Any, path: Path, where: str) -> Any:
    """Return a field of a conversation as what it should be.

    Raises:
        TraceError: it is not; names the place within the field, too.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).rpartition(" - at `$")
        field = f"{where}{place.rstrip('`')}" if text else where
        raise TraceError(path, None, field, value, text or str(error)) from error
