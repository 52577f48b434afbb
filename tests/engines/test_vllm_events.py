"""Our messages are, byte for byte, those that vLLM's own classes encode to."""

import msgspec
import pytest

from kvoffload.offload import wire
from kvoffload.offload.base import OffloadingEvent, Reason, make_offload_key

theirs = pytest.importorskip(
    "vllm.distributed.kv_events", reason="vLLM is not installed; see make test-vllm"
)

A, B, C = (make_offload_key(bytes([i]) * 32, group) for i, group in ((1, 0), (2, 0), (3, 1)))
HASHES = {key: key[:-4] for key in (A, B, C)}


def stored(key, medium, group, owner=None):
    return theirs.BlockStored(
        block_hashes=[HASHES[key]],
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=group,
        ownership=owner,
    )


CASES = [
    (
        OffloadingEvent((A, C), "CPU", False, Reason.STORED),
        [stored(A, "CPU", 0), stored(C, "CPU", 1)],
    ),
    (OffloadingEvent((B,), "DISK", False, Reason.STORED), [stored(B, "STORAGE", 0, "disk")]),
    (
        OffloadingEvent((A, C, B), "CPU", True, Reason.EVICTED),
        [
            theirs.BlockRemoved([HASHES[A], HASHES[B]], "CPU", 0),
            theirs.BlockRemoved([HASHES[C]], "CPU", 1),
        ],
    ),
    (OffloadingEvent((), "DISK", True, Reason.REPLACED), [theirs.AllBlocksCleared()]),
]


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_what_we_write_is_what_vllm_would_write(rank):
    ours = wire.encode([event for event, _ in CASES], 12.5, rank)
    batch = theirs.KVEventBatch(
        ts=12.5, events=[e for _, events in CASES for e in events], data_parallel_rank=rank
    )
    assert ours == msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(ours, type=theirs.KVEventBatch) == batch


def test_what_vllm_writes_we_read():
    full = theirs.BlockStored(
        block_hashes=[HASHES[A], 7],
        parent_block_hash=HASHES[B],
        token_ids=[1, 2, 3, 4],
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name="adapter",
        extra_keys=[("adapter",), None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="s",
    )
    message = msgspec.msgpack.encode(theirs.KVEventBatch(ts=1.0, events=[full]))
    read = wire.decode(message)
    assert read.events[0].token_ids == [1, 2, 3, 4]
    assert msgspec.msgpack.encode(read) == message
    assert wire.from_wire(read) == [OffloadingEvent((A,), "GPU", False, Reason.STORED)]
