"""What the scheduler's process knows of the stores below host memory.

The workers hold the stores they read and write, one namespace a rank. The scheduler opens the same
stores for lookups only, so that a lookup asks no worker. The workers' reports tell it which chunks
they wrote, and which chunks their stores dropped.
"""

import logging
from collections.abc import Mapping, Sequence

from kvoffload import registry
from kvoffload.backends.base import Backend, LocalIndex, Observable, Removal
from kvoffload.config import OffloadConfig
from kvoffload.connectors.builder import tier_names
from kvoffload.offload.manager import Tier
from kvoffload.offload.namespace import Fact, namespace
from kvoffload.transfer.io_loop import IOLoop, presence_on

log = logging.getLogger(__name__)

MAX_WRITTEN = 1_000_000
"""Keys remembered as written by this engine; older ones are looked up like everyone else's."""


class TierIndex:
    """Presence of a chunk in one tier: there only if every rank's part is.

    Args:
        stores: this tier, opened for each rank's namespace; :meth:`close` them elsewhere.
        ranks: something that answers for each of them.
    """

    def __init__(self, stores: Sequence[Backend], ranks: Sequence[LocalIndex]) -> None:
        self._removers = [store for store in stores if isinstance(store, Observable)]
        self._ranks = tuple(ranks)
        self._written: dict[bytes, None] = {}
        self._removals: list[Removal] = []

    def holds(self, key: bytes) -> bool | None:
        if key in self._written:
            return True
        answer: bool | None = True
        for rank in self._ranks:
            here = rank.holds(key)
            if here is None:
                answer = None
            elif not here:
                return False
        return answer

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._written.pop(key, None)
        for rank in self._ranks:
            rank.forget(keys)

    def written(self, keys: Sequence[bytes]) -> None:
        """Every rank has just stored these."""
        for key in keys:
            self._written[key] = None
        while len(self._written) > MAX_WRITTEN:
            del self._written[next(iter(self._written))]

    def removed(self, removals: Sequence[Removal]) -> None:
        """Some rank's store gave these up."""
        for removal in removals:
            if removal.key in self._written:
                del self._written[removal.key]
                self._removals.append(removal)

    def take_removals(self) -> list[Removal]:
        """Return what was announced as stored and is there no more, once each."""
        for store in self._removers:
            self.removed(store.take_removals())
        taken, self._removals = self._removals, []
        return taken


class LookupStores:
    """All tiers of all ranks, opened for looking up; owns them and, where needed, an I/O thread."""

    def __init__(self, config: OffloadConfig, ranks: Sequence[Mapping[str, Fact]]) -> None:
        """Open them under the facts that the workers told.

        Raises:
            ConfigError: see :func:`kvoffload.open_backend`.
        """
        self._config = config
        self._ranks = [dict(facts) for facts in ranks]
        self._io: IOLoop | None = None
        self._opened: list[Backend] = []
        self.presences: dict[str, TierIndex] = {}
        self.tiers = self._open()

    @property
    def namespaces(self) -> list[str]:
        """The digest of each rank."""
        return [namespace(**facts) for facts in self._ranks]

    def renew(self, generation: str) -> None:
        """Look into the namespaces of a new generation from now on.

        If they cannot be opened there are no tiers, not stale ones.
        """
        for facts in self._ranks:
            facts["generation"] = generation
        old, self._opened = self._opened, []
        try:
            self.tiers = self._open()
        except Exception:
            log.exception("the tiers cannot be opened again; host memory goes on alone")
            self.tiers, self.presences = (), {}
        for store in old:
            self._loop().start(store.close)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the stores and the I/O thread."""
        if not self._opened and self._io is None:
            return
        loop = self._loop()
        for store in self._opened:
            try:
                loop.call(store.close(), timeout_s)
            except Exception as error:
                log.warning("closing a store failed: %s", str(error) or type(error).__name__)
        self._opened = []
        loop.close(timeout_s)
        self._io = None

    def _open(self) -> tuple[Tier, ...]:
        tiers = []
        self.presences = {}
        for i, (name, wanted) in enumerate(tier_names(self._config)):
            stores = [
                registry.open_backend(wanted.type, wanted.options, digest, where=f"backends[{i}].")
                for digest in self.namespaces
            ]
            self._opened.extend(stores)
            presence = TierIndex(stores, [self._presence(store) for store in stores])
            self.presences[name] = presence
            tiers.append(Tier(name, presence, presence))
        return tuple(tiers)

    def _presence(self, store: Backend) -> LocalIndex:
        return presence_on(self._loop(), store, self._config.lookup_timeout_s)

    def _loop(self) -> IOLoop:
        if self._io is None:
            self._io = IOLoop()
        return self._io
