"""Pages that the calling thread loads itself: the I/O server says where, and the read cannot wait.

It ends before the call does. So it goes into the engine's memory at once, without a staging slot.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

from kvoffload import registry
from kvoffload.backends.log_rate import Throttle
from kvoffload.io.client import IOClient
from kvoffload.io.remote_tier import RemoteTier

log = logging.getLogger(__name__)

Page = Sequence[tuple[int, int]]
"""The parts of a page in the engine's memory: address and bytes of each."""


class PagesInPlace:
    """Loads what a tier has in the page cache. Any thread may call.

    Args:
        client: of the I/O server that has the tiers open.
    """

    def __init__(self, client: IOClient) -> None:
        self._in_place = client.in_place
        self._types = {tier.name: tier.type for tier in client.opening.tiers}
        self._readers: dict[str, tuple[dict[str, Any], Any]] = {}
        """Tier → the last one, and what it was made with."""
        self._warnings = Throttle(log)

    def load(
        self,
        tier: RemoteTier,
        listing: int,
        places: Sequence[int],
        keys: Sequence[bytes],
        pages: Sequence[Page],
        sizes: Sequence[int],
        until_s: float,
    ) -> list[int]:
        """Load pages of a call that a listing of the tier had; return those that are loaded.

        ``places``: in the call. ``sizes``: of all its pages.
        """
        # After the number: see :meth:`RemoteTier.reset`.
        if not (facts := tier.in_place) or not places:
            return []
        begun_s, asked, in_place = time.monotonic(), [keys[i] for i in places], self._in_place
        try:
            if not (found := in_place.places(tier, asked, until_s)):
                return []
            memory, reader = [pages[i] for i in places], self._reader_of(tier, facts)
            loaded = [places[i] for i in reader.read(asked, memory, found, until_s)]
        except Exception as error:  # a plug-in's
            self._warnings.warning("%s: reads in place failed: %r", tier.name, error)
            return []
        if not loaded:
            return []
        seconds = time.monotonic() - begun_s
        num_bytes, used = sum(sizes[i] for i in loaded), [keys[i] for i in loaded]
        return loaded if in_place.has_read(tier, listing, used, num_bytes, seconds) else []

    def _reader_of(self, tier: RemoteTier, facts: dict[str, Any]) -> Any:
        made_with, reader = self._readers.get(tier.name, ({}, None))
        if made_with is not facts:
            factory = registry.load(registry.BACKENDS, self._types[tier.name])
            self._readers[tier.name] = facts, (reader := factory.reader(**facts))
        return reader
