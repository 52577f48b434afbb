"""The reply reader on every kind of stream: whole, cut anywhere, damaged, and made up."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.backends.redis.resp import (
    FILLED,
    MAX_LINE_BYTES,
    MAX_TABLE_ELEMENTS,
    MISFIT,
    SCRATCH_BYTES,
    Fill,
    Integers,
    Line,
    NestedArray,
    ProtocolError,
    ReplyReader,
    ServerError,
    WrongSize,
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


def feed(reader, stream, pieces=()):
    """Receive a stream in pieces of the given sizes (then as large as possible)."""
    replies, at, sizes = [], 0, iter(pieces)
    while at < len(stream):
        buffer = reader.get_buffer()
        count = min(len(buffer), len(stream) - at, max(1, next(sizes, len(buffer))))
        buffer[:count] = stream[at : at + count]
        at += count
        replies += reader.received(count)
    return replies


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
            turns.append((Line(), None, data, reply))
        elif kind == "integers":
            values = draw(st.lists(st.sampled_from([0, 1, -2, 77]), min_size=1, max_size=50))
            turns.append(
                (Integers(len(values)), None, b"".join(b":%d\r\n" % v for v in values), values)
            )
        else:
            sizes = draw(st.lists(st.integers(0, 2000), min_size=1, max_size=3))
            slot = Slot(*sizes)
            body = draw(st.binary(min_size=sum(sizes), max_size=sum(sizes)))
            data, reply = {
                "fill": (b"$%d\r\n%b\r\n" % (len(body), body), body),
                "null": (b"$-1\r\n", None),
                "error": (b"-OOM no\r\n", ServerError("OOM", "OOM no")),
            }[kind]
            turns.append((Fill(slot.views), slot, data, reply))
    return turns


@fuzz(500)
@given(conversations(), st.lists(st.integers(1, 700), max_size=60))
def test_however_a_stream_is_cut_the_replies_are_the_same(turns, pieces):
    reader = ReplyReader()
    for expect, *_ in turns:
        reader.expect(expect)
    replies = feed(reader, b"".join(data for _, _, data, _ in turns), pieces)
    assert len(replies) == len(turns)
    for got, (_, slot, _, wanted) in zip(replies, turns, strict=True):
        if slot is not None:
            assert slot.intact()
        assert (slot.content if got is FILLED else got) == wanted


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
    """Check: no other exception, no byte outside the memory, no extra reply."""
    choose = random.Random(seed)
    whole = b"".join(data for _, _, data, _ in turns)
    for _ in range(MUTANTS):
        reader, replies = ReplyReader(), []
        for expect, *_ in turns:
            reader.expect(expect)
        pieces = [choose.randint(1, 700) for _ in range(choose.randint(0, 8))]
        try:
            replies = feed(reader, mutated(whole, choose), pieces)
        except ProtocolError:
            reader.close()
        assert len(replies) <= len(turns)
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
    for expect in (Line(), Integers(3), Fill(Slot(5).views)):
        reader = ReplyReader()
        reader.expect(expect)
        with contextlib.suppress(ProtocolError):
            assert len(feed(reader, stream, pieces)) <= 1


def reading(expect, stream):
    reader = ReplyReader()
    reader.expect(expect)
    return feed(reader, stream)


@pytest.mark.parametrize(
    "stream",
    [
        b"*1\r\n$1\r\na\r\n", b"%1\r\n", b"HTTP/1.1 200 OK\r\n", b":\r\n", b":1.5\r\n", b":--1\r\n",
        b"$5\r\nabcdeXY", b"$-2\r\n", b"$99999999999999999999\r\n", b"$abc\r\n", b"\r\n",
        b"$70000\r\n", b"+" + b"a" * (MAX_LINE_BYTES + 1), b":" + b"1" * 30 + b"\r\n",
    ],
)  # fmt: skip
def test_what_is_no_reply_is_an_error(stream):
    with pytest.raises(ProtocolError):
        reading(Line(), stream)


@pytest.mark.parametrize("stream", [b"+OK\r\n", b":4\r\n", b"*0\r\n", b"$4\r\nabcdXY"])
def test_where_a_chunk_is_due_nothing_else_will_do(stream):
    with pytest.raises(ProtocolError):
        reading(Fill(Slot(4).views), stream)


@pytest.mark.parametrize("size", [SCRATCH_BYTES + 9, 1 << 40])
def test_a_value_much_too_long_is_never_begun(size):
    slot = Slot(4)
    with pytest.raises(WrongSize):
        reading(Fill(slot.views), b"$%d\r\nabcdefgh" % size)
    assert slot.content == bytes([OUTSIDE]) * 4


@pytest.mark.parametrize("size", [0, 3, 5, 500, SCRATCH_BYTES + 8])
@pytest.mark.parametrize("pieces", [(), (1,) * 9, (5, 600)])
def test_a_value_of_another_size_is_thrown_away_and_the_next_one_is_good(size, pieces):
    slot, other = Slot(4), Slot(4)
    reader = ReplyReader()
    reader.expect(Fill(slot.views))
    reader.expect(Fill(other.views))
    stream = b"$%d\r\n%b\r\n$4\r\ngood\r\n" % (size, b"x" * size)
    assert feed(reader, stream, pieces) == [MISFIT, FILLED]
    assert slot.content == bytes([OUTSIDE]) * 4
    assert other.content == b"good"


@pytest.mark.parametrize("size", [0, 2, 3, 9, 500])
@pytest.mark.parametrize("pieces", [(), (1,) * 9])
def test_a_value_of_another_size_fills_no_more_than_the_header(size, pieces):
    header, chunk = Slot(3), Slot(5)
    reader = ReplyReader()
    reader.expect(Fill([*header.views, *chunk.views], header.views[0]))
    value = bytes(range(100, 110)) * 50
    assert feed(reader, b"$%d\r\n%b\r\n" % (size, value[:size]), pieces) == [MISFIT]
    assert header.content == value[: min(3, size)].ljust(3, bytes([OUTSIDE]))
    assert chunk.content == bytes([OUTSIDE]) * 5


def test_a_value_of_another_size_that_does_not_end_there_is_an_error():
    with pytest.raises(ProtocolError):
        reading(Fill(Slot(4).views), b"$3\r\nabcdXY")


def test_replies_before_a_wrong_one_are_given_first():
    reader = ReplyReader()
    for expect in (Line(), Fill(Slot(4).views)):
        reader.expect(expect)
    assert feed(reader, b"+OK\r\n$99999999\r\n") == [b"OK"]
    with pytest.raises(WrongSize):
        reader.get_buffer()


def test_a_reply_nobody_asked_for_is_an_error():
    with pytest.raises(ProtocolError):
        feed(ReplyReader(), b"+OK\r\n")


def test_no_reply_fills_more_than_the_scratch_memory():
    reader = ReplyReader()
    reader.expect(Integers(10**6))
    with pytest.raises(ProtocolError):
        feed(reader, b"1" * (2 * SCRATCH_BYTES))


@pytest.mark.parametrize("empty", [b"*0\r\n", b"*-1\r\n"])
def test_an_array_without_elements_counts_as_one_against_the_bound_of_a_table(empty):
    most = MAX_TABLE_ELEMENTS // 2  # each row counts, and so do the rows that were announced
    reader = ReplyReader()
    reader.expect(NestedArray())
    (rows,) = feed(reader, b"*%d\r\n" % most + empty * most)
    assert len(rows) == most
    reader.expect(NestedArray())
    with pytest.raises(ProtocolError, match="in a table"):
        feed(reader, b"*%d\r\n" % (most + 1) + empty * (most + 1))


def test_a_closed_reader_holds_no_memory_of_callers():
    slot = Slot(100)
    reader = ReplyReader()
    reader.expect(Fill(slot.views))
    feed(reader, b"$100\r\nabc")
    reader.close()
    for view in slot.views:
        view.release()
    del slot.views


def test_a_command_is_written_as_redis_wants_it():
    assert encode(b"GET", b"a\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n"


@pytest.mark.parametrize("received", [0, 50_000])
def test_a_reader_closed_amid_a_chunk_lets_go_of_the_memory(received):
    memory, reader = bytearray(100_000), ReplyReader()
    reader.expect(Fill([memoryview(memory)]))
    feed(reader, b"$100000\r\n" + bytes(received))
    with pytest.raises(BufferError):
        memory.append(0)
    reader.close()
    memory.append(0)
