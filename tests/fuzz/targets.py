"""What reads bytes that others wrote: one function a parser; it raises for a fault of ours only.

``test_fuzz.py`` runs them under hypothesis, ``run.py`` under a coverage-guided fuzzer. Formats with
a checksum are sealed here first: otherwise no input would get past it.
"""

import atexit
import contextlib
import json
import struct
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
import xxhash

from kvoffload.backends.disk import snapshot as disk_snapshot
from kvoffload.backends.disk.inspector import DiskInspector
from kvoffload.backends.disk.paths import MANIFEST, WRITERS
from kvoffload.backends.disk.quota import Quota
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import (
    COMPACT_BYTES,
    MAX_KEY_BYTES,
    check_chunk,
    checksum,
    namespace_digest,
    pack_header,
    parse_header,
)
from kvoffload.backends.redis.discovery import (
    MAX_NODES,
    NUM_SLOTS,
    parse_masters,
    parse_redirect,
    parse_slots,
)
from kvoffload.backends.redis.namespace_info import read_facts
from kvoffload.backends.redis.options import parse_url, redacted
from kvoffload.backends.redis.resp import (
    MAX_TEXT,
    ProtocolError,
    ReplyReader,
    ServerError,
)
from kvoffload.errors import ConfigError
from kvoffload.offload.base import ReqContext
from kvoffload.offload.hints import HintReader
from kvoffload.replay.trace import TraceError, read_trace

_FOLDER = tempfile.TemporaryDirectory(prefix="kvoffload-fuzz-")
atexit.register(_FOLDER.cleanup)
_ROOT = Path(_FOLDER.name)
_ASKED = parse_url("redis+cluster://127.0.0.1:7000").addresses[0]
_KEY, _NAMESPACE = b"key", namespace_digest("fuzz")
_SEALED = COMPACT_BYTES - 8
_LEDGER = struct.Struct("<8sQqQ")


def chunk_header(data: bytes) -> None:
    """A header as it comes, and one with a good seal; the rest is the chunk."""
    parse_header(data)
    body = data[:_SEALED].ljust(_SEALED, b"\0")
    sealed = body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
    reason = check_chunk(sealed, data[_SEALED:], _KEY, _NAMESPACE)
    assert reason is None or reason.isidentifier()
    found = parse_header(sealed)
    assert isinstance(found, str) or 0 < len(found.key) <= MAX_KEY_BYTES


def disk_ledger(data: bytes) -> None:
    """A ledger as it comes, and one with a good seal, used as a store does."""
    path = _ROOT / "ledger"
    record = _LEDGER.pack(b"KVOLEDGR", 1, *struct.unpack("<qQ", data[:16].ljust(16, b"\xff")))
    for content in (data, record + struct.pack("<Q", xxhash.xxh3_64_intdigest(record))):
        path.write_bytes(content)
        ledger = Quota(Vfs(), str(path), fresh=False)
        if ledger.reserve(100, 1 << 40):
            ledger.release(100)
        ledger.release(-(1 << 30))
        assert ledger.correct(5)
        assert ledger.refresh() == 5
        ledger.close()


def snapshot(data: bytes) -> None:
    """A snapshot as it comes, and one with a good checksum."""
    path = _ROOT / "snapshot"
    for content in (data, disk_snapshot.MAGIC + checksum(data) + data):
        path.write_bytes(content)
        for key, allocated in disk_snapshot.load(Vfs(), str(path)):
            assert 0 < len(key) <= MAX_KEY_BYTES
            assert allocated >= 0


class _Stream:
    """A source of replies that come in pieces."""

    def __init__(self, data: bytes, piece: int) -> None:
        self._data, self._piece = data, piece

    def some(self, views: list[memoryview]) -> int:
        """Fill a part of what is wanted, across the views as a call of a socket does."""
        count = left = min(sum(view.nbytes for view in views), len(self._data), self._piece)
        if not count:
            raise ConnectionError("the end")
        for view in views:
            part = min(left, view.nbytes)
            view[:part], self._data = self._data[:part], self._data[part:]
            left -= part
        return count

    def fill(self, views: list[memoryview]) -> None:
        for view in views:
            while view.nbytes:
                view = view[self.some([view]) :]


def replies(data: bytes) -> None:
    """Replies of a server; the first two bytes choose what is expected, and how it is cut."""
    choice, piece, stream = data[:1], 1 + (data[1:2] or b"\0")[0], data[2:]
    guard = bytearray(b"\x5a" * 66)
    view = memoryview(guard)[1:-1]
    reader = ReplyReader(_Stream(stream, piece))
    expected = [
        reader.reply,
        lambda: reader.numbers(3),
        lambda: reader.chunk(view[:24], [view[24:64]]),
        reader.table,
        reader.value,
    ]
    start = (choice or b"\0")[0] % len(expected)
    with contextlib.suppress(ProtocolError, ConnectionError):
        for read in expected[start:] + expected[:start]:
            read()
    assert guard[0] == guard[-1] == 0x5A


def slot_table(data: bytes) -> None:
    """A reply to CLUSTER SLOTS or SENTINEL MASTERS, from the wire on."""
    table = None
    with contextlib.suppress(ProtocolError, ConnectionError):
        table = ReplyReader(_Stream(data, len(data))).table()
    with contextlib.suppress(ValueError):
        slots = parse_slots(table, _ASKED)
        assert all(0 <= start <= stop < NUM_SLOTS for start, stop, _ in slots)
        assert all(0 < address.port < 65536 for _, _, address in slots)
        assert len({address for _, _, address in slots}) <= MAX_NODES
    with contextlib.suppress(ValueError):
        parse_masters(table)


def redirect(data: bytes) -> None:
    """An error reply, a redirect among them."""
    error = ServerError.parse(data)
    assert error.text.isprintable()
    assert len(error.text) <= 10 * (MAX_TEXT + 1)  # escaped, one may become \\xNNNNNN
    with contextlib.suppress(ValueError):
        slot, address = parse_redirect(error)
        assert 0 <= slot < NUM_SLOTS
        assert 0 < address.port < 65536


def url(data: bytes) -> None:
    """The URL of a Redis tier."""
    text = data.decode("utf-8", "replace")
    redacted(text)
    with contextlib.suppress(ConfigError):
        parse_url(text)


def trace_lines(data: bytes) -> None:
    """A trace with one request or event a line."""
    path = _ROOT / "trace.jsonl"
    path.write_bytes(data)
    with contextlib.suppress(TraceError):
        assert read_trace(path).accesses > 0


def trace_folder(data: bytes) -> None:
    """A folder of conversations."""
    folder = _ROOT / "conversations"
    folder.mkdir(exist_ok=True)
    (folder / "one.json").write_bytes(data)
    with contextlib.suppress(TraceError):
        assert read_trace(folder).accesses > 0


def hints(data: bytes) -> None:
    """A client's ``kv_transfer_params``."""
    try:
        params = msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return
    reader = HintReader(Counter())
    for given in (params, {"kvoffload": params}):
        found = reader.hints(ReqContext("request", given), frozenset({"disk", "redis"}))
        assert set(found.tiers or ()) <= {"disk", "redis"}
        assert (found.max_load_tokens or 0) >= 0


def facts(data: bytes) -> None:
    """The facts of a namespace: a value in Redis, a manifest on disk."""
    for name, value in read_facts(data).items():
        assert isinstance(name, str)
        assert isinstance(value, str)
    (_ROOT / WRITERS).mkdir(exist_ok=True)
    (_ROOT / "space").mkdir(exist_ok=True)
    (_ROOT / "space" / MANIFEST).write_bytes(data)
    with contextlib.closing(DiskInspector(str(_ROOT))) as found:
        assert isinstance(found.manifest("space"), dict)


def _slot_row(start: int, stop: int) -> bytes:
    return b"*3\r\n:%d\r\n:%d\r\n*3\r\n$9\r\n127.0.0.1\r\n:7000\r\n$2\r\nid\r\n" % (start, stop)


TARGETS = {
    chunk_header: [pack_header(_KEY, _NAMESPACE, b"chunk")[:_SEALED] + b"chunk"],
    disk_ledger: [
        struct.pack("<qQ", resident, changes)
        for resident, changes in ((5, 2**64 - 1), (2**63 - 1, 7), (0, 2**62 - 1), (2**62 - 1, 9))
    ],
    snapshot: [msgspec.msgpack.encode([(b"abc", 0), (b"xyz", 1 << 20), (b"", -1)])],
    replies: [
        b"\0\x05+OK\r\n:1\r\n:0\r\n-OOM\r\n$-1\r\n*1\r\n:1\r\n$2\r\nab\r\n",
        b"\x02\xff$64\r\n" + bytes(64) + b"\r\n*2\r\n*0\r\n$-1\r\n+OK\r\n",
    ],
    slot_table: [
        b"*2\r\n" + _slot_row(0, 99) + _slot_row(100, 16383),
        b"*1\r\n*8\r\n$4\r\nname\r\n$1\r\nm\r\n$2\r\nip\r\n$1\r\nh\r\n$4\r\nport\r\n$1\r\n7\r\n"
        b"$5\r\nflags\r\n$6\r\nmaster\r\n",
    ],
    redirect: [b"MOVED 1234 [::1]:7000", b"ASK 16383 host:65535", b"NOPERM no"],
    url: [
        b"redis://u%2F@h:1/2",
        b"redis://u:p@h",
        b"rediss+sentinel://a,[::1]:7/m/3?db=1",
        b"unix:///s?db=0",
    ],
    trace_lines: [
        b'{"hash_ids": [1, "a"], "timestamp": 0.5, "input_length": 3}\n\n{"hash_ids": []}',
        b'{"keys": ["0a"], "medium": "CPU", "removed": false, "reason": "used"}\n',
    ],
    trace_folder: [
        b'{"hash_id_scope": "local", "requests": [{"t": 1, "hash_ids": [1], "turns": [[]]}]}'
    ],
    hints: [
        b'{"kvoffload": {"tiers": ["disk", "x"], "max_load_tokens": 5, "priority": -3}}',
        b'{"offload": false, "explain": true, "other": [{}]}',
    ],
    facts: [json.dumps({"namespace": "n", "facts": {"model": "m"}}).encode(), b'{"a": "b"}'],
}
"""Parsers, each with good inputs to begin from."""
