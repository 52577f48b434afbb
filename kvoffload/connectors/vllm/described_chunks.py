"""What KV events tell of chunks, kept no longer than the chunks.

vLLM's half notes the tokens of each chunk that it offers or finds, until an event says that host
memory gave it up. A chunk may be in tiers alone, or its store may fail: no such event comes then.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker

from kvoffload.offload.base import OffloadKey

PATIENCE_S = 600.0
"""How long a chunk is described that no medium has told of: stores and loads end sooner."""


class DescribedChunks(OffloadingEventsTracker):  # type: ignore[misc]  # untyped base
    """Describes chunks while a medium has them, and for a while before.

    Args:
        theirs: what vLLM's half has made for the same purpose.
        clock: seconds, monotonic.
    """

    def __init__(self, theirs: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.__dict__.update(vars(theirs))
        self._clock = clock
        self._noted: OrderedDict[OffloadKey, float] = OrderedDict()
        """When each chunk was noted last that no medium had told of."""

    def record_store(self, req: Any, group: Any, index: int, key: OffloadKey) -> None:
        self._note(super().record_store, req, group, index, key)

    def record_lookup(self, req: Any, group: Any, index: int, key: OffloadKey) -> None:
        self._note(super().record_lookup, req, group, index, key)

    def record_partial_store(self, req: Any, group: Any, end: int, key: OffloadKey) -> None:
        self._note(super().record_partial_store, req, group, end, key)

    def record_partial_lookup(self, req: Any, group: Any, end: int, key: OffloadKey) -> None:
        self._note(super().record_partial_lookup, req, group, end, key)

    def _note(
        self, record: Callable[..., None], req: Any, group: Any, place: int, key: OffloadKey
    ) -> None:
        """Let vLLM describe a chunk; which media have it, events alone say."""
        described = self._pending_event_metadata
        known = described.get(key)
        media = set(known.active_residencies) if known is not None else set()
        record(req, group, place, key)
        if (noted := described.get(key)) is None:
            return  # of a group whose events have no tokens
        noted.active_residencies = media
        if not media:
            self._noted[key] = self._clock()
            self._noted.move_to_end(key)

    def take_events(self, events: Iterable[Any]) -> Iterable[Any]:
        """See vLLM; then forget what no medium has told of."""
        yield from super().take_events(map(self._with_keys, events))
        described, until_s = self._pending_event_metadata, self._clock() - PATIENCE_S
        while self._noted and next(iter(self._noted.values())) < until_s:
            key, _ = self._noted.popitem(last=False)
            if key in described and not described[key].active_residencies:
                del described[key]

    def _with_keys(self, event: Any) -> Any:
        """Name the chunks of a removal that is of its whole medium, for vLLM tells those alone."""
        if event.keys or not event.removed:
            return event
        place, described = (event.medium, event.ownership), self._pending_event_metadata
        return replace(
            event, keys=[key for key in described if place in described[key].active_residencies]
        )

    def reset(self) -> None:
        """Keep what is described: the events of the chunks that a reset removes come after it."""
