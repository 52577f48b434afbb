"""Events on the wire, as far as they can be tested without the engine whose format it is."""

import msgspec
import pytest

from kvoffload.offload import wire
from kvoffload.offload.base import OffloadingEvent, Reason, make_offload_key

KEY = make_offload_key(b"h" * 32, 2)


def test_a_message_is_an_array_of_time_events_and_rank():
    message = wire.encode([OffloadingEvent((KEY,), "REDIS", True, Reason.FAILED)], 2.0, 1)
    assert msgspec.msgpack.decode(message) == [
        2.0,
        [
            {
                "type": "BlockRemoved",
                "block_hashes": [b"h" * 32],
                "medium": "STORAGE",
                "group_idx": 2,
                "ownership": "redis",
            }
        ],
        1,
    ]


def test_translating_back_keeps_what_became_resident_where():
    events = [
        OffloadingEvent((KEY,), "CPU", False, Reason.STORED),
        OffloadingEvent((KEY,), "DISK", False, Reason.STORED),
        OffloadingEvent((KEY,), "CPU", True, Reason.EVICTED),
    ]
    assert wire.from_wire(wire.decode(wire.encode(events, 0.0))) == events


@pytest.mark.parametrize("message", [b"", b"\xc1", msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_message_is_refused(message):
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(message)
