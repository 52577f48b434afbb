"""Messages: any cut of the stream gives the same ones, and nothing else is understood."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.config import BackendConfig
from kvoffload.io.protocol import (
    Answered,
    Arrived,
    Ask,
    Await,
    Cancel,
    Expect,
    Load,
    MessageReader,
    PresenceChanges,
    Store,
    frame,
    tiers_of,
)
from kvoffload.policies.told_return import ToldReturn

MESSAGES = [
    Arrived(1, list(range(300))),
    Answered(2, b"\0\1", "missing", 0.5),
    PresenceChanges("disk", [b"k" * 36] * 50, [], True),
]


@given(st.lists(st.integers(1, 4000), max_size=20))
def test_a_stream_is_cut_into_messages_wherever_it_arrives(sizes):
    stream, reader, got = b"".join(map(frame, MESSAGES)) * 2, MessageReader(to_server=False), []
    for size in [*sizes, len(stream)]:
        part, stream = stream[:size], stream[size:]
        got.extend(reader.feed(part))
    assert got == MESSAGES * 2


def test_each_end_understands_the_other_ends_messages_alone():
    with pytest.raises(msgspec.ValidationError):
        list(MessageReader(to_server=False).feed(frame(Cancel(1))))
    with pytest.raises(msgspec.DecodeError):
        list(MessageReader(to_server=True).feed(b"\x03\0\0\0???"))


def test_what_is_wrong_in_a_message_is_named_whatever_else_is_in_it():
    no_text = b"\xa2\x8a\x8a"
    wrong = [
        (b"\x94\xa3Ask\xa1s\x91\x05" + no_text, "^Ask.keys: Expected `bytes`, got `int`"),
        (b"\x93\xa3Ask" + no_text + b"\x90", "a text of a message is none"),
        (b"\x91" + no_text, "a text of a message is none"),
        (b"\x05", "^Expected `array`, got `int`"),
    ]
    for body, why in wrong:
        with pytest.raises(msgspec.DecodeError, match=why):
            list(MessageReader(to_server=True).feed(len(body).to_bytes(4, "little") + body))


def test_each_tier_has_a_name_of_its_own_whatever_its_plug_in_is_called():
    types = ["disk2", "disk", "disk", "disk2", "disk22"]
    named = tiers_of(map(BackendConfig, types), "serve")
    assert [tier.type for tier in named] == types
    assert [tier.name for tier in named] == ["disk2", "disk", "disk22", "disk23", "disk224"]


def test_sizes_are_one_number_or_one_for_each_chunk():
    for sizes in (4096, [1, 2]):
        (load,) = MessageReader(to_server=True).feed(
            frame(Load(1, "t", [b"a", b"b"], [0, 1], sizes))
        )
        assert load.sizes == sizes


LONG = b"k" * 5000


@pytest.mark.parametrize(
    "message",
    [
        Load(1, "t", [LONG], [0], 1),
        Store(1, "t", [LONG], [0], 1),
        Ask("t", [LONG]),
        Await(1, [LONG]),
        Expect([ToldReturn(b"claim", [LONG], 5.0, 0)]),
        Expect([ToldReturn(LONG, [], 5.0, 0)]),
    ],
    ids=["load", "store", "ask", "await", "expect", "claim"],
)
def test_a_key_that_would_take_much_memory_is_none(message):
    """A server bounds what it keeps of an engine by the number of keys."""
    with pytest.raises(msgspec.ValidationError, match="length <= 4096"):
        list(MessageReader(to_server=True).feed(frame(message)))


def test_a_message_that_is_too_long_to_be_one_is_refused_at_once():
    with pytest.raises(msgspec.DecodeError, match="1347703880 bytes"):
        list(MessageReader(to_server=True).feed(b"HTTP/1.1 200 OK"))
