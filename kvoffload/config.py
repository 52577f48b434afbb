"""Settings: frozen structs, strict; an unknown key or a bad value is an error at start."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, overload

import msgspec

from kvoffload.errors import HIDDEN, ConfigError, check_setting, shown

_PREFIXES = " kmgtpe"
# Not any number of digits: int() refuses thousands of them in its own words, float() says infinity.
_SIZE = re.compile(
    r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([kKmMgGtTpPeE])([iI]?)[bB]?|[bB])?\s*"
)
_LARGEST = 2**63 - 1
"""What a file system can count; no size in a setting means more."""
HARMLESS_HINTS = ("offload", "max_load_tokens")
"""Hints that cost other requests nothing and tell nothing of them: allowed by default."""
RETURN_HINTS = ("session", "returns_in_s", "returns")
KNOWN_HINTS = (*HARMLESS_HINTS, "tiers", "priority", "explain", *RETURN_HINTS)
_SIZE_REMEDY = "a size is a number of bytes or a string such as '512MiB' or '8GB', below 8 EiB"


class ByteSize(int):
    """A number of bytes; in settings also written as text: ``"8GiB"``, ``"200 GB"``, ``"64k"``."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object, field: str = "size") -> "ByteSize":
        """Read a size from a number or a text; raise ConfigError naming ``field`` otherwise."""
        count: float = -1
        if isinstance(value, int) and not isinstance(value, bool):
            count = value
        elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
            number = float(match[1]) if "." in match[1] else int(match[1])
            base, prefix = 1024 if match[3] else 1000, match[2] or " "
            count = number * base ** _PREFIXES.index(prefix.lower())
        if 0 <= count <= _LARGEST:
            return cls(count)
        raise ConfigError(field, value, _SIZE_REMEDY)


SIZE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": _LARGEST},
        {"type": "string", "pattern": f"^{_SIZE.pattern}$"},
    ]
}
"""The JSON Schema of a size."""
Bytes = Annotated[ByteSize, msgspec.Meta(extra_json_schema=SIZE_SCHEMA)]
"""A size as a field of settings, with what ``msgspec.json.schema`` says of it."""
# What __post_init__ refuses in its own words is told to schemas here.
_AtLeastOne = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 1})]
_Share = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
WAITING_SHARE = 0.9
"""The default of ``waiting_share``."""
_LONGEST_S = 1e9
"""A call of a lock or a queue refuses to wait longer than some ten times this."""
_Seconds = Annotated[
    float, msgspec.Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": _LONGEST_S})
]


def human_bytes(count: float) -> str:
    """Write a number of bytes for people: ``human_bytes(3 << 30) == "3.0 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class BackendConfig(msgspec.Struct, frozen=True):
    """One persistent tier: a registered backend's name and that backend's own options."""

    type: str
    # In settings, a tier's options stand next to its type; see parse_config.
    options: Annotated[dict[str, Any], msgspec.Meta(extra_json_schema={"not": {}})] = {}

    def __repr__(self) -> str:
        return f"BackendConfig(type={self.type!r}, options={shown(self.options)!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The same for rich, which would print the options as they are."""
        return [("type", self.type), ("options", shown(self.options))]


class OffloadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine attaches with. Read one from plain data with :func:`parse_config`."""

    cpu_bytes: Bytes
    """Host memory for offloaded chunks, for this process; 0: chunks are kept on the tiers alone."""
    backends: tuple[BackendConfig, ...] = ()
    """Tiers below host memory, looked up in this order."""
    serve: str = ""
    """The socket of the host's server (``kvoffload serve``), in place of ``backends``: one tier,
    named ``serve``, that all engines of this host share. While there is no server, all is a miss
    there."""
    # By a factory: a schema cannot show a default that is no plain number.
    staging_bytes: Bytes = msgspec.field(default_factory=lambda: ByteSize(256 << 20))
    """Host memory that chunks pass through on their way to the tiers and back if ``cpu_bytes`` is
    0; not used otherwise."""
    blocks_per_chunk: _AtLeastOne | Literal["auto"] = "auto"
    """Consecutive GPU blocks that are keyed, moved and evicted together. A prompt is reused up to
    its last whole chunk. "auto": the power of two that makes chunks of about 2 MiB, and of at most
    256 tokens. Where blocks of a window leave GPU memory, a chunk lies in the window; with
    recurrent states, a chunk is a block under vLLM. Other sizes are other namespaces."""
    policy: str = "handicap"
    """Which host chunks leave first; a name of the ``kvoffload.policies`` entry-point group."""
    load_timeout_s: _Seconds = 5.0
    """A load is a miss when no chunk arrives for so long: none of its own, and none of a load that
    it waits for. The engine then computes."""
    store_timeout_s: _Seconds = 30.0
    """A store or write-through not finished by then is dropped."""
    lookup_timeout_s: _Seconds = 0.25
    """How long a tier may leave "is this chunk here?" unanswered."""
    max_inflight_bytes: Bytes | None = None
    """Host bytes that write-through may pin at once; default: a half of the host memory."""
    store_threshold: _AtLeastOne = 1
    """Requests that must ask for a chunk before it is stored. The value 2 keeps out chunks that are
    used once, and costs one more computation of each chunk that is used again."""
    promote: bool = True
    """Whether a chunk loaded from a tier is also written to the nearer tiers that lack it."""
    waiting_share: _Share = WAITING_SHARE
    """Part of host memory that may be kept for requests in the engine's queue. Their chunks stay
    until they run, and come early from the tiers. 0: the queue is not looked at."""
    tenants: bool = False
    """Whether chunks are told apart by their requests' ``cache_salt``, which names a tenant. Each
    chunk on a disk or in another lasting store then has a tag of its tenant, so that ``gc
    --tenant`` finds it."""
    tenant_share: _Share = 1.0
    """With ``tenants``: the part of host memory that chunks of one tenant may hold while other
    chunks need room. A tenant above it evicts its own chunks first. Requests without a salt are one
    tenant."""
    client_hints: tuple[str, ...] = HARMLESS_HINTS
    """Hints that requests may use. ``priority``, ``tiers``, ``explain``, ``session``, ``returns``
    and ``returns_in_s`` affect other requests or tell of them: allow these where all clients trust
    each other."""
    hint_share: _Share = 0.5
    """The part of host memory, and of a disk, that chunks of sessions which said when they return
    may hold, while other chunks need room."""
    batched_copies: bool = True
    """False: one call of the GPU's driver for each copy, which is slower. It is for
    a driver whose batched copies fail or copy wrong bytes."""
    io: Literal["process", "thread"] = "process"
    """Where the tiers' code runs: in a process of its own, one for each rank, or in a thread of the
    engine's process. With a thread the engine's steps take longer while chunks are read and
    written. Where no process can be started, it is a thread, and a log line says why."""
    metrics_port: Annotated[
        int | None, msgspec.Meta(extra_json_schema={"minimum": 1, "maximum": 65535})
    ] = None
    """A port for an HTTP endpoint with metrics for Prometheus; needs the extra ``metrics``. Under
    vLLM and SGLang each rank has one: rank 0 at this port, rank 1 at the next. Those of the second
    data-parallel replica come after them. By default there is none."""
    metrics_host: str = "127.0.0.1"
    """The address of that endpoint. It has no password: keep it on the machine, or in a network
    whose members may all read it."""
    control_socket: bool = True
    """Whether the engine answers ``kvoffload cache`` of its own user, on a socket in a private
    folder. SGLang's storage has none."""
    record: str = ""
    """A file to which each request's chunks are appended, as a trace for ``kvoffload replay``."""
    otel_spans: bool = False
    """Whether each request's lookup, loads and stores are OpenTelemetry spans; needs the extra
    ``otel``. The variables of OpenTelemetry, as ``OTEL_EXPORTER_OTLP_ENDPOINT``, name the receiver,
    unless the process has a tracer provider."""

    def __post_init__(self) -> None:
        check = partial(check_setting, self)
        remedy = "takes the place of backends: name these in the server's settings"
        check("serve", not (self.serve and self.backends), remedy)
        if self.serve:
            check_socket_path("serve", self.serve)
        remedy = "keeps nothing in host memory: name a tier, or more"
        check("cpu_bytes", self.cpu_bytes or self.has_tiers, remedy)
        blocks = self.blocks_per_chunk
        check("blocks_per_chunk", blocks == "auto" or blocks >= 1, "must be at least 1")
        check("store_threshold", self.store_threshold >= 1, "must be at least 1")
        check("waiting_share", 0 <= self.waiting_share <= 1, "must be a part: from 0 to 1")
        check_share(self.tenant_share)
        remedy = 'means nothing without "tenants": true'
        check("tenant_share", self.tenant_share == 1 or self.tenants, remedy)
        if unknown := [name for name in self.client_hints if name not in KNOWN_HINTS]:
            raise ConfigError("client_hints", unknown[0], f"known: {', '.join(KNOWN_HINTS)}")
        check("hint_share", 0 <= self.hint_share <= 1, "must be 0 to 1")
        remedy = f"must be a positive, finite number of seconds, at most {_LONGEST_S:g}"
        for name in ("load_timeout_s", "store_timeout_s", "lookup_timeout_s"):
            check(name, 0 < getattr(self, name) <= _LONGEST_S, remedy)
        check_metrics_port(self.metrics_port)
        setting, host_bytes = self.host_memory
        if self.max_inflight_bytes is not None and self.max_inflight_bytes > host_bytes:
            remedy = f"write-through pins host memory: at most {setting}, {human_bytes(host_bytes)}"
            raise ConfigError("max_inflight_bytes", human_bytes(self.max_inflight_bytes), remedy)

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything below host memory."""
        return bool(self.backends or self.serve)

    @property
    def host_memory(self) -> tuple[str, ByteSize]:
        """The setting that says how much host memory to take, and how much that is."""
        name = "cpu_bytes" if self.cpu_bytes else "staging_bytes"
        return name, getattr(self, name)


_MOST_THREADS = 256
_LONGEST_PATH = 107
"""Bytes of a socket's path: the kernel takes no more."""


def check_socket_path(field: str, path: str) -> None:
    """Refuse what cannot be the path of a socket; raises ConfigError."""
    if not os.path.isabs(path) or "\0" in path:
        raise ConfigError(field, path, "must be an absolute path, such as /run/kvoffload/s")
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(field, path, f"is too long for a socket: {_LONGEST_PATH} bytes at most")


def check_share(share: float) -> None:
    """Refuse what cannot be a tenant's part of a store; raises ConfigError."""
    if not 0 < share <= 1:
        raise ConfigError("tenant_share", share, "must be above 0, and at most 1")


def check_threads(field: str, threads: int | None) -> None:
    """Refuse a number of threads that no store needs: a typing error must not take the host down.

    Raises ConfigError.
    """
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise ConfigError(field, threads, f"must be 1 to {_MOST_THREADS}")


def check_metrics_port(port: int | None) -> None:
    """Refuse a number that is no port; raises ConfigError."""
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError("metrics_port", port, "must be 1 to 65535, or null")


_Config = TypeVar("_Config", bound=OffloadConfig)


@overload
def parse_config(raw: Mapping[str, Any]) -> OffloadConfig: ...
@overload
def parse_config(raw: Mapping[str, Any], kind: type[_Config]) -> _Config: ...
def parse_config(
    raw: Mapping[str, Any], kind: type[OffloadConfig] = OffloadConfig
) -> OffloadConfig:
    """Read the engine's dictionary (``kv_connector_extra_config``, a YAML file...) into settings.

    ``kind`` is a subclass of the settings where an engine has some of its own.

    Raises:
        ConfigError: names the field, the value and what would be right. The options of each
            backend are checked when it is opened, by its own options struct.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError("config", raw, "must be an object of settings")
    return convert({**raw, "backends": read_tiers(raw)}, kind)


def read_tiers(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tiers of plain settings, each a type with its options; raises ConfigError."""
    backends = raw.get("backends", [])
    if not isinstance(backends, (list, tuple)):
        raise ConfigError("backends", HIDDEN, "must be a list of objects with a 'type'")
    tiers: list[dict[str, Any]] = []
    for i, tier in enumerate(backends):
        # What is no tier is not shown: it may have a password anywhere.
        if not isinstance(tier, Mapping) or not isinstance(tier.get("type"), str):
            raise ConfigError(f"backends[{i}]", HIDDEN, "must be an object with a 'type'")
        options = {k: v for k, v in tier.items() if k != "type"}
        tiers.append({"type": tier["type"], "options": options})
    return tiers


_T = TypeVar("_T", bound=msgspec.Struct)


def convert(data: Mapping[str, Any], struct: type[_T], where: str = "") -> _T:
    """Read plain data into a settings struct, naming the field that is wrong.

    ``where`` prefixes field names in errors (``"backends[0]."``).
    """
    known = [f.encode_name for f in msgspec.structs.fields(struct)]
    for name in data:
        if name not in known:
            hint = did_you_mean(str(name), known) or f"known keys: {', '.join(known)}"
            # Its value may be a password under a misspelt name.
            raise ConfigError(f"{where}{name}", HIDDEN, f"unknown key; {hint}")
    for field in msgspec.structs.fields(struct):
        if field.required and field.encode_name not in data:
            raise ConfigError(f"{where}{field.encode_name}", None, "is required")
    try:
        return msgspec.convert(dict(data), struct, strict=True, dec_hook=_decode)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):  # from a struct's own __post_init__
            cause = error.__cause__
            raise ConfigError(f"{where}{cause.field}", cause.value, cause.remedy) from None
        # msgspec ends its messages with the path: "... - at `$.backends[0].type`"
        text, _, path = str(error).rpartition(" - at `$.")
        name = path.rstrip("`") if text else ""
        value = _found_at(data, name) if name else dict(data)
        remedy = _remedy(text or str(error), struct, name)
        raise ConfigError(f"{where}{name}", value, remedy) from error


def _found_at(data: Mapping[str, Any], path: str) -> Any:
    """Return the item at a path such as ``backends[0].type``, or the last item that exists."""
    found: Any = data
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            found = found[name] if name else found[int(index)]
        except (LookupError, TypeError):
            break
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the name that is nearest, in whatever case; empty if none is near."""
    folded = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), folded, n=1)
    return f"did you mean {folded[close[0]]!r}?" if close else ""


_WRONG_TYPE = re.compile(r"Expected `(\w+)( \| null)?`, got `\w+`")
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def _remedy(message: str, struct: type[msgspec.Struct], name: str) -> str:
    """Say what msgspec says of a wrong value as people say it, with the default as an example."""
    field = {each.encode_name: each for each in msgspec.structs.fields(struct)}.get(name)
    allowed = _allowed(field.type) if field else []
    if any(word.startswith('"') for word in allowed):
        return f"must be {', or '.join(allowed)}"
    match = _WRONG_TYPE.fullmatch(message)
    if match is None or match[1] not in _TYPES:
        return message
    kind = _TYPES[match[1]]
    if match[1] in ("int", "float"):
        kind += " of seconds" if name.endswith("_s") else ""
        default = field.default if field else None
        kind += f", such as {default}" if isinstance(default, int | float) else ""
    return f"must be {kind}" + (", or null" if match[2] else "")


def _allowed(kind: Any) -> list[str]:
    """Return what a field may be, in words; a text of a few in quotes."""
    if get_origin(kind) is Literal:
        return [f'"{each}"' for each in get_args(kind)]
    if (word := _TYPES.get(getattr(kind, "__name__", ""))) is not None:
        return [word]
    return [word for part in get_args(kind) for word in _allowed(part)]


def _decode(kind: type, value: object) -> object:
    if kind is ByteSize:
        try:
            return ByteSize.parse(value)
        except ConfigError as error:
            raise ValueError(error.remedy) from error
    raise NotImplementedError(kind)
