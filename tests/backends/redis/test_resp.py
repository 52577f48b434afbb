"""The reply reader on every kind of stream: whole, cut anywhere, damaged, and made up."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.backends.redis.resp import (
    MAX_LINE_BYTES,
    MAX_TABLE_ELEMENTS,
    SCRATCH_BYTES,
    Filled,
    ProtocolError,
    ReplyReader,
    ServerError,
    after,
    encode,
)

MUTANTS = 25
"""Damaged streams made of each whole one."""
OUTSIDE = 0x5A
"""Fills the memory around a reader's views; must never change."""


def fuzz(examples):
    return settings(max_examples=examples, database=None)


class Slot:
    """A caller's memory, inside memory that is not the reader's business."""

    def __init__(self, *sizes):
        self.memory = bytearray([OUTSIDE]) * (sum(sizes) + 2)
        view, self.views, at = memoryview(self.memory), [], 1
        for size in sizes:
            self.views.append(view[at : at + size])
            at += size

    @property
    def content(self):
        return bytes(self.memory[1:-1])

    def intact(self):
        return self.memory[0] == self.memory[-1] == OUTSIDE


class Stream:
    """A source of bytes that come in pieces of the given sizes, then as large as possible."""

    def __init__(self, data, pieces=()):
        self.data, self.at, self.sizes = data, 0, iter(pieces)

    def some(self, views):
        room = sum(view.nbytes for view in views)
        count = min(room, len(self.data) - self.at, max(1, next(self.sizes, room)))
        if not count:
            raise ConnectionError("closed")
        came, self.at = self.data[self.at : self.at + count], self.at + count
        for view in views:
            view[: len(came)] = came[: view.nbytes]
            came = came[view.nbytes :]
        return count

    def fill(self, views):
        while views:
            views = after(views, self.some(views))


def reader_of(data, pieces=()):
    return ReplyReader(Stream(data, pieces))


def read(reader, expect, slot=None):
    """Read one reply of the kind expected: a word, or how many numbers."""
    if isinstance(expect, int):
        return reader.numbers(expect)
    if expect == "chunk":
        return reader.chunk(slot.views[0], slot.views[1:])
    return getattr(reader, expect)()


line_texts = st.binary(max_size=40).filter(lambda b: b"\r" not in b and b"\n" not in b)
small = st.one_of(
    line_texts.map(lambda b: (b"+" + b + b"\r\n", b)),
    st.integers(-(2**63), 2**63 - 1).map(lambda n: (b":%d\r\n" % n, n)),
    st.binary(max_size=3000).map(lambda b: (b"$%d\r\n%b\r\n" % (len(b), b), b)),
    st.just((b"$-1\r\n", None)),
    line_texts.map(lambda b: (b"-" + b + b"\r\n", ServerError.parse(b))),
)


@st.composite
def conversations(draw):
    """Requests with replies that fit them: (what to expect, its slot, the bytes, the answer)."""
    turns = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["line", "integers", "fill", "null", "error"]))
        if kind == "line":
            data, reply = draw(small)
            turns.append(("reply", None, data, reply))
        elif kind == "integers":
            values = draw(st.lists(st.sampled_from([0, 1, -2, 77]), min_size=1, max_size=50))
            turns.append((len(values), None, b"".join(b":%d\r\n" % v for v in values), values))
        else:
            sizes = draw(st.lists(st.integers(0, 2000), min_size=1, max_size=3))
            slot = Slot(*sizes)
            body = draw(st.binary(min_size=sum(sizes), max_size=sum(sizes)))
            data, reply = {
                "fill": (b"$%d\r\n%b\r\n" % (len(body), body), body),
                "null": (b"$-1\r\n", None),
                "error": (b"-OOM no\r\n", ServerError("OOM", "OOM no")),
            }[kind]
            turns.append(("chunk", slot, data, reply))
    return turns


@fuzz(500)
@given(conversations(), st.lists(st.integers(1, 700), max_size=60))
def test_however_a_stream_is_cut_the_replies_are_the_same(turns, pieces):
    reader = reader_of(b"".join(data for _, _, data, _ in turns), pieces)
    for expect, slot, _, wanted in turns:
        got = read(reader, expect, slot)
        assert slot is None or slot.intact()
        assert (slot.content if got is Filled.WHOLE else got) == wanted
    assert not reader.left


def mutated(stream, choose):
    """The stream with up to four damages: bytes put in, taken out, turned, or replaced."""
    stream = bytearray(stream)
    for _ in range(choose.randint(1, 4)):
        at, what = choose.randint(0, len(stream)), choose.randbytes(choose.randint(0, 12))
        match choose.randint(0, 4):
            case 0:
                stream[at:at] = what
            case 1:
                del stream[at : at + 1 + len(what)]
            case 2 if at < len(stream):
                stream[at] ^= 1 << choose.randint(0, 7)
            case 3:
                other = choose.randint(0, len(stream))
                stream[at:at] = stream[other : other + 60]
            case _:
                stream[at : at + len(what)] = what
    return bytes(stream)


def survives_damage(turns, seed):
    """Check: no other exception, and no byte outside the memory."""
    choose = random.Random(seed)
    whole = b"".join(data for _, _, data, _ in turns)
    for _ in range(MUTANTS):
        pieces = [choose.randint(1, 700) for _ in range(choose.randint(0, 8))]
        reader = reader_of(mutated(whole, choose), pieces)
        with contextlib.suppress(ProtocolError, ConnectionError):
            for expect, slot, _, _ in turns:
                read(reader, expect, slot)
        assert all(slot is None or slot.intact() for _, slot, _, _ in turns)


@fuzz(300)
@given(conversations(), st.integers(0, 2**32))
def test_a_damaged_stream_ends_in_an_error_or_in_wellformed_replies(turns, seed):
    survives_damage(turns, seed)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@fuzz(200_000 // MUTANTS)
@given(conversations(), st.integers(0, 2**32))
def test_so_do_two_hundred_thousand(turns, seed):
    survives_damage(turns, seed)


@fuzz(500)
@given(st.binary(max_size=400), st.lists(st.integers(1, 60), max_size=20))
def test_random_bytes_do_no_harm(stream, pieces):
    for expect in ("reply", 3, "chunk", "table", "value"):
        slot = Slot(2, 3)
        with contextlib.suppress(ProtocolError, ConnectionError):
            read(reader_of(stream, pieces), expect, slot)
        assert slot.intact()


@pytest.mark.parametrize(
    "stream",
    [
        b"*1\r\n$1\r\na\r\n", b"%1\r\n", b"HTTP/1.1 200 OK\r\n", b":\r\n", b":1.5\r\n", b":--1\r\n",
        b"$5\r\nabcdeXY", b"$-2\r\n", b"$99999999999999999999\r\n", b"$abc\r\n", b"\r\n",
        b"$70000\r\n", b"+" + b"a" * (MAX_LINE_BYTES + 1), b":" + b"1" * 30 + b"\r\n", b"+a\n",
    ],
)  # fmt: skip
def test_what_is_no_reply_is_an_error(stream):
    with pytest.raises(ProtocolError):
        reader_of(stream).reply()


@pytest.mark.parametrize("stream", [b"+OK\r\n", b":4\r\n", b"*0\r\n", b"$4\r\nabcdXY"])
def test_where_a_chunk_is_due_nothing_else_will_do(stream):
    with pytest.raises(ProtocolError):
        read(reader_of(stream), "chunk", Slot(4))


@pytest.mark.parametrize("size", [SCRATCH_BYTES + 9, 1 << 40])
def test_a_value_much_too_long_is_never_begun(size):
    slot, stream = Slot(4), Stream(b"$%d\r\nabcdefgh" % size + bytes(100_000))
    assert read(ReplyReader(stream), "chunk", slot) is Filled.OVERSIZE
    assert slot.intact()
    assert stream.at < 100


@pytest.mark.parametrize("size", [0, 3, 5, 500, SCRATCH_BYTES + 8])
@pytest.mark.parametrize("pieces", [(), (1,) * 9, (5, 600)])
def test_a_value_of_another_size_is_thrown_away_and_the_next_one_is_good(size, pieces):
    header, slot, other = Slot(0), Slot(4), Slot(4)
    reader = reader_of(b"$%d\r\n%b\r\n$4\r\ngood\r\n" % (size, b"x" * size), pieces)
    assert reader.chunk(header.views[0], slot.views) is Filled.MISFIT
    assert read(reader, "chunk", other) is Filled.WHOLE
    assert header.intact()
    assert slot.intact()
    assert other.content == b"good"


@pytest.mark.parametrize("size", [0, 2, 3, 9, 500])
@pytest.mark.parametrize("pieces", [(), (1,) * 9])
def test_a_value_of_another_size_fills_the_beginning_of_the_header(size, pieces):
    slot = Slot(3, 5)
    value = bytes(range(100, 110)) * 50
    reader = reader_of(b"$%d\r\n%b\r\n" % (size, value[:size]), pieces)
    assert read(reader, "chunk", slot) is Filled.MISFIT
    assert slot.content[:3] == value[: min(3, size)].ljust(3, bytes([OUTSIDE]))
    assert slot.intact()


@pytest.mark.parametrize("pieces", [(), (200_000,), (200_000, 1)])
def test_a_large_value_of_another_size_fills_the_header_and_no_more_of_it_is_awaited(pieces):
    slot, value = Slot(300, 250_000), bytes(range(256)) * 1500
    reader = reader_of(b"$%d\r\n%b\r\n" % (len(value), value), pieces)
    assert read(reader, "chunk", slot) is Filled.OVERSIZE
    assert slot.content[:300] == value[:300]
    assert slot.intact()
    assert not reader.left


def test_a_value_of_another_size_that_does_not_end_there_is_an_error():
    with pytest.raises(ProtocolError):
        read(reader_of(b"$3\r\nabcdXY"), "chunk", Slot(4))


def test_bytes_behind_a_reply_are_noticed():
    reader = reader_of(b"+OK\r\n$-1\r\n")
    assert (reader.reply(), reader.left) == (b"OK", 5)


def test_no_line_is_longer_than_its_bound():
    stream = Stream(b"1" * (2 * SCRATCH_BYTES))
    with pytest.raises(ProtocolError, match="endless"):
        ReplyReader(stream).numbers(10**6)
    assert stream.at <= SCRATCH_BYTES


def test_an_operators_value_has_any_size_up_to_its_limit():
    value = bytes(range(256)) * 1000
    stream = b"$%d\r\n%b\r\n" % (len(value), value)
    assert reader_of(stream, (7, 100)).value() == value
    assert reader_of(b"$-1\r\n").value() is None
    assert reader_of(b"-WRONGTYPE x\r\n").value().code == "WRONGTYPE"
    with pytest.raises(ProtocolError):
        reader_of(stream).value(limit=len(value) - 1)
    with pytest.raises(ProtocolError):
        reader_of(b"$3\r\nabcXY").value()


@pytest.mark.parametrize("empty", [b"*0\r\n", b"*-1\r\n"])
def test_an_array_without_elements_counts_as_one_against_the_bound_of_a_table(empty):
    most = MAX_TABLE_ELEMENTS // 2  # each row counts, and so do the rows that were announced
    stream = b"*%d\r\n" % most + empty * most
    reader = reader_of(stream + b"*%d\r\n" % (most + 1) + empty * (most + 1))
    assert len(reader.table()) == most
    with pytest.raises(ProtocolError, match="in a table"):
        reader.table()


def test_a_command_is_written_as_redis_wants_it():
    assert encode(b"GET", b"a\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n"


@pytest.mark.parametrize("received", [0, 50_000])
def test_a_reader_that_lost_its_source_amid_a_chunk_holds_none_of_the_memory(received):
    memory = bytearray(100_000)
    reader = reader_of(b"$100000\r\n" + bytes(received))
    with contextlib.suppress(ConnectionError):
        reader.chunk(memoryview(memory)[:0], [memoryview(memory)])
    memory.append(0)
    del reader
