"""Pages that the calling thread loads itself, without the I/O server: reads that cannot wait.

They end before the call does. So they go into the engine's memory at once, without a slot.
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
        self._client = client
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
        if not (facts := tier.in_place):  # after the number: see :meth:`RemoteTier.reset`
            return []
        asked = [keys[i] for i in places], [pages[i] for i in places], until_s
        begun_s = time.monotonic()
        try:
            loaded = [places[i] for i in self._reader_of(tier, facts).read(*asked)]
        except Exception as error:  # a plug-in's
            self._warnings.warning("%s: reads in place failed: %r", tier.name, error)
            return []
        if not loaded:
            return []
        seconds = time.monotonic() - begun_s
        num_bytes, used = sum(sizes[i] for i in loaded), [keys[i] for i in loaded]
        return loaded if self._client.has_read(tier, listing, used, num_bytes, seconds) else []

    def _reader_of(self, tier: RemoteTier, facts: dict[str, Any]) -> Any:
        made_with, reader = self._readers.get(tier.name, ({}, None))
        if made_with is not facts:
            factory = registry.load(registry.BACKENDS, self._types[tier.name])
            self._readers[tier.name] = facts, (reader := factory.reader(**facts))
        return reader
