"""Events in the format in which vLLM publishes KV cache events, for routers that subscribe to it.

A message is a MessagePack array ``[time, [event, ...], data parallel rank]``; an event is a map
with its kind under ``type``. Fields that have their default are left out. vLLM publishes such
messages over ZeroMQ; here they are only written and read.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from kvoffload.offload.base import (
    OffloadingEvent,
    OffloadKey,
    Reason,
    get_offload_block_hash,
    make_offload_key,
)

STORAGE = "STORAGE"
"""The medium of everything below host memory; which tier it is stands in ``ownership``."""

BlockHash = bytes | int
"""Publishers may be set to send the last eight bytes of a hash as a number."""


class _Event(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    pass


class BlockStored(_Event):
    """Blocks became resident. Offloaded ones come without tokens: ``block_size`` is 0 then."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(_Event):
    """Blocks ceased to be resident."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(_Event):
    """Nothing is resident any more, on any medium."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def encode(
    events: Iterable[OffloadingEvent], time_s: float, data_parallel_rank: int | None = None
) -> bytes:
    """Write what ``take_events()`` returned as one message.

    A store that was replaced, and events that were lost, are told as "all cleared", since the keys
    are not known one by one: who forgets too much only routes worse.
    """
    translated = [wired for event in events for wired in to_wire(event)]
    return _encoder.encode(Batch(time_s, translated, data_parallel_rank))


def decode(message: bytes) -> Batch:
    """Read a message; fields that newer publishers add are passed over.

    Raises:
        msgspec.MsgspecError: it is no such message.
    """
    return _decoder.decode(message)


def to_wire(event: OffloadingEvent) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Translate one event: stored chunks one by one, removed ones by group."""
    if not event.keys and event.removed:
        return [AllBlocksCleared()]
    medium, owner = _place(event.medium)
    wired: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    for group, keys in event.by_group().items():
        hashes: list[BlockHash] = [get_offload_block_hash(key) for key in keys]
        if event.removed:
            wired.append(BlockRemoved(hashes, medium, group, ownership=owner))
        else:
            wired.extend(
                BlockStored([h], None, [], 0, None, medium, None, group_idx=group, ownership=owner)
                for h in hashes
            )
    return wired


def from_wire(batch: Batch) -> list[OffloadingEvent]:
    """Translate back, as far as the format tells: it has no reasons but stored and removed.

    Hashes sent as numbers cannot be keys and are left out.
    """
    events: list[OffloadingEvent] = []
    for wired in batch.events:
        if isinstance(wired, AllBlocksCleared):
            events.append(OffloadingEvent((), "", True, Reason.RESET))
            continue
        keys: tuple[OffloadKey, ...] = tuple(
            make_offload_key(h, wired.group_idx or 0)
            for h in wired.block_hashes
            if isinstance(h, bytes)
        )
        medium = wired.medium or "GPU"
        if medium == STORAGE and wired.ownership:
            medium = wired.ownership.upper()
        removed = isinstance(wired, BlockRemoved)
        reason = Reason.EVICTED if removed else Reason.STORED
        events.append(OffloadingEvent(keys, medium, removed, reason))
    return events


def _place(medium: str) -> tuple[str, str | None]:
    return (medium, None) if medium in ("CPU", "GPU") else (STORAGE, medium.lower())
