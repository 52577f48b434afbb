"""The messages between an engine's I/O client and its I/O server.

Both ends come from one installation; ``VERSION`` finds the mistake if they do not. A message is a
tagged MessagePack array after its length (4 bytes, little endian), over a Unix stream socket. The
bytes of chunks never travel here: both ends map the slab, and memory that a server lends.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from kvoffload.config import BackendConfig
from kvoffload.policies.told_return import Key, ToldReturn

VERSION = 17
HAD = 2
"""In answers to a store: the chunk was there, and nothing was moved."""
_T = TypeVar("_T")
_LENGTH_BYTES = 4
MOST_BYTES = 1 << 28
"""A longer message is none of ours: its length is garbage."""
_Tenants = list[Annotated[bytes, msgspec.Meta(max_length=64)]]
_Size = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
"""No NaN either, which would break the order of timers for all sessions."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# ---- from the client ----


class TierSettings(msgspec.Struct, array_like=True, frozen=True):
    """One tier to open; see :func:`kvoffload.registry.open_backend`."""

    name: str
    type: str
    options: dict[str, Any]
    where: str


def tiers_of(backends: Iterable[BackendConfig], *taken: str) -> list[TierSettings]:
    """Name each backend of settings: by its type; a second one of a name by its place as well."""
    named: dict[str, TierSettings] = {}
    for i, wanted in enumerate(backends):
        name = wanted.type
        while name in (*taken, *named):
            name += str(i)
        named[name] = TierSettings(name, wanted.type, wanted.options, f"backends[{i}].")
    return list(named.values())


class Open(_Message):
    """Open the stores: the first message, and later in the place of those that are open.

    ``Opened`` answers it for each tier, and ``Refused`` each time that a try has failed.
    """

    version: int
    tiers: Annotated[list[TierSettings], msgspec.Meta(max_length=64)]
    namespace: str
    facts: dict[str, str]
    """The facts behind the namespace, for people."""
    chunk_bytes: _Size
    """Bytes of the largest chunk, which each store must be able to hold."""
    slot_bytes: _Size
    lookup_timeout_s: _Seconds
    number: int = 0
    """From the sequence of the jobs' numbers; the same one again changes nothing."""
    forgotten: dict[str, list[str]] = {}
    """Tier → namespaces to remove from it: those that only this engine used, once it is open. If
    the wanted namespace is one, it is removed first, so that nothing of it is found."""
    hint_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """The part of a store that chunks of sessions which said when they return hold at most, while
    other chunks need room."""

    def erases(self, tier: str) -> bool:
        """Whether a tier is to be empty when it is open."""
        return self.namespace in self.forgotten.get(tier, ())

    def renewed(
        self,
        number: int,
        namespace: str,
        facts: dict[str, str],
        forgotten: Sequence[str],
        of_tier: str = "",
    ) -> "Open":
        """Return what to open next; one tier alone has to remove what is forgotten, or all.

        A tier that has not opened yet owes what it was to remove before as well. It has nothing of
        the present namespace, unless that is the next one too.
        """
        owed: dict[str, list[str]] = {}
        for tier in self.tiers:
            before = self.forgotten.get(tier.name)
            unused = self.namespace if before is not None and self.namespace != namespace else None
            is_meant = of_tier in ("", tier.name)
            more = (each for each in forgotten if is_meant and each != unused)
            owed[tier.name] = list(dict.fromkeys([*(before or ()), *more]))
        changed = {"namespace": namespace, "facts": facts, "forgotten": owed}
        return replace(self, number=number, **changed)

    def opened(self, tier: str) -> None:
        """Take in that a tier has opened: opened again, it would remove new chunks."""
        self.forgotten.pop(tier, None)


class _Order(_Message):
    job: int
    """Its number; 0 until the client begins it."""
    tier: str
    keys: list[Key]
    slots: list[int]
    sizes: int | list[int]
    """Bytes of each chunk; one number if all are equal."""
    tenants: _Tenants = []
    """Whose each chunk is; empty where tenants are not told apart."""

    def sizes_of(self, places: Sequence[int]) -> list[int]:
        """Return the bytes of the chunks at these places."""
        sizes = self.sizes
        return [sizes] * len(places) if isinstance(sizes, int) else [sizes[i] for i in places]


class Load(_Order):
    """Read chunks into slots; ``Arrived`` or ``Lent`` tells of each, ``Answered`` ends it."""

    may_lend: bool = False
    """Whether chunks may stay where they are in the server's memory."""


class Store(_Order):
    """Write chunks from slots; ``Answered`` ends it."""


class Cancel(_Message):
    """End a job soon. ``Answered`` comes when nothing touches its slots any more."""

    job: int


class Borrow(_Message):
    """Pass the memory of the host's server: this engine can copy chunks out of it.

    ``Passed`` answers, once a session, where there is such a memory.
    """


class Release(_Message):
    """End a loan: its chunks are copied, or not wanted. Nothing answers."""

    loan: int


class Ask(_Message):
    """Ask a store without an index for chunks; ``Present`` answers."""

    tier: str
    keys: list[Key]


class Forget(_Message):
    """Let an index answer False for chunks whose load failed; ``Forgotten`` answers."""

    tier: str
    keys: list[Key]


class Locate(_Message):
    """Ask where chunks are that the engine reads in place; ``Located`` answers at once."""

    tier: str
    keys: list[Key]
    number: int


class Used(_Message):
    """Tell a store of chunks that the engine has read in place; nothing answers."""

    tier: str
    keys: list[Key]


class Remove(_Message):
    """Remove chunks from a store; nothing answers."""

    tier: str
    keys: list[Key]


class Await(_Message):
    """Tell stores which chunks a request in the engine's queue needs; nothing answers."""

    request: int
    """Its number."""
    keys: list[Key]
    """Empty: it waits no more."""


class Expect(_Message):
    """Tell stores when sessions need their chunks again; nothing answers."""

    returns: list[ToldReturn]


# ---- from the server ----


class TierOpened(msgspec.Struct, array_like=True, frozen=True):
    """What an open store can tell."""

    name: str
    has_index: bool
    is_shared: bool
    in_place: dict[str, Any] = {}
    """See :class:`kvoffload.io.open_stores.ReadInPlace`."""


class Opened(_Message):
    """These stores are open. What earlier messages said of them holds no longer.

    A first one names none: the server has begun to open them.
    """

    number: int
    """Of the ``Open``: another one may have been sent meanwhile."""
    tiers: list[TierOpened]
    remains: list[str] = []
    """Chunks that could not be removed first, and why: a text for each store."""


class Refused(_Message):
    """A store cannot be opened now: the parts of a ConfigError."""

    number: int
    field: str
    value: Any
    remedy: str
    without: TierOpened | None = None
    """The tier that a start goes on without, as no setting is wrong: its device is full, say."""


class Arrived(_Message):
    """Chunks of a load, by their places in it, are verified in their slots."""

    job: int
    numbers: list[int]


class Passed(_Message):
    """The server's memory file is in the pair of sockets; see :mod:`kvoffload.io.greeting`."""


class Lent(_Message):
    """Chunks of a load are verified in the server's memory, and stay there until ``Release``."""

    job: int
    loan: int
    numbers: list[int]
    """The chunks, by their places in the load."""
    starts: list[int]
    """The first byte of each."""


class Answered(_Message):
    """A job has ended: for each chunk whether it succeeded; nothing touches its slots now."""

    job: int
    ok: bytes
    """0: it failed; 1: it was moved; :data:`HAD`."""
    reason: str
    io_time_s: float


class PresenceChanges(_Message):
    """Chunks that became present or absent in a store with an index."""

    tier: str
    added: list[bytes]
    removed: list[bytes]
    complete: bool
    """Whether all chunks stored earlier have been listed."""


class Present(_Message):
    """The answers to ``Ask``."""

    tier: str
    keys: list[bytes]
    answers: list[bool]


class Located(_Message):
    """The answer to ``Locate``: what the reader of the tier's type takes."""

    number: int
    places: list[Any]


class Forgotten(_Message):
    """These keys are forgotten; additions announced from now on count."""

    tier: str
    keys: list[bytes]


class Removed(_Message):
    """Chunks that a store removed by itself, with the reason."""

    tier: str
    removals: list[tuple[bytes, str]]


class Figures(_Message):
    """A store's usage (bytes, capacity, chunks, gauges; None is unknown) and counters."""

    tier: str
    usage: tuple[int | None, int | None, int | None, dict[str, int]]
    counters: dict[str, int]


class Alive(_Message):
    """The server runs; sent every half a second."""

    late_s: float
    """By how much its event loop was late to send this."""


class Ending(_Message):
    """The server ends the session as it was told to: the last message of it."""


class Logged(_Message):
    """A log record of the I/O process."""

    name: str
    level: int
    text: str


ToServer = (
    Open
    | Load
    | Store
    | Cancel
    | Borrow
    | Release
    | Ask
    | Forget
    | Locate
    | Used
    | Remove
    | Await
    | Expect
)
ToClient = (
    Opened
    | Refused
    | Arrived
    | Passed
    | Lent
    | Answered
    | PresenceChanges
    | Present
    | Located
    | Forgotten
    | Removed
    | Figures
    | Alive
    | Ending
    | Logged
)

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_of_client = msgspec.msgpack.Decoder(ToServer)
_of_server = msgspec.msgpack.Decoder(ToClient)


def frame(message: ToServer | ToClient) -> bytes:
    """Return a message as the bytes to send. What MessagePack does not know travels as text."""
    # Lists of keys and slots encode faster than they join into one piece of bytes each.
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def carried(value: Any, kind: type[_T]) -> _T:
    """Return a plug-in's value as a message carries it.

    It raises what would else end the session, and all tiers with it: no message can carry a text
    that is none of Unicode.
    """
    return msgspec.msgpack.decode(_encoder.encode(value), type=kind)


class MessageReader:
    """Cuts a stream into messages.

    Args:
        to_server: which end this is.
        most_bytes: of a message.
    """

    def __init__(self, *, to_server: bool, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._decoder: msgspec.msgpack.Decoder[Any] = _of_client if to_server else _of_server
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes; yield the messages that are complete.

        Raises:
            msgspec.DecodeError: the other end speaks something else.
        """
        self._buffer += data
        start, end = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while end - start >= _LENGTH_BYTES:
                body = start + _LENGTH_BYTES
                after = body + (length := int.from_bytes(view[start:body], "little"))
                if length > self._most_bytes:
                    raise msgspec.DecodeError(f"a message of {length} bytes")
                if after > end:
                    break
                try:
                    message = self._decoder.decode(view[body:after])
                except msgspec.ValidationError as error:
                    field = _field(view[body:after], str(error))
                    raise msgspec.ValidationError(f"{field}{error}") from None
                except UnicodeDecodeError as error:
                    raise msgspec.DecodeError(f"a text of a message is none: {error}") from None
                start = after
                yield message
        del self._buffer[:start]


_FIELD = re.compile(r"`\$\[(\d+)\]")


def _field(data: memoryview, why: str) -> str:
    """Return which field of a message is wrong, if that can be told."""
    found = _FIELD.search(why)
    if found is None or found[1] == "0":  # the tag, or what is no message at all
        return ""
    tag = msgspec.msgpack.decode(msgspec.msgpack.decode(data, type=list[msgspec.Raw])[0])
    names = {kind.__name__: kind.__struct_fields__ for kind in get_args(ToServer | ToClient)}
    return f"{tag}.{names[tag][int(found[1]) - 1]}: "
