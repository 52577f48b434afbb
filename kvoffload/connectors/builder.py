"""Builds both halves from settings: the manager, and the handlers with what they run on."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvoffload import registry
from kvoffload.backends.admin import Admin
from kvoffload.backends.base import Backend, Observable
from kvoffload.config import BackendConfig, OffloadConfig, human_bytes
from kvoffload.errors import ConfigError
from kvoffload.offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadingSpec,
)
from kvoffload.offload.extents import ExtentLedger
from kvoffload.offload.geometry import HostGeometry
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.offload.namespace import Fact, namespace, readable
from kvoffload.transfer.base import Copier
from kvoffload.transfer.engine import ROUTES, TransferEngine
from kvoffload.transfer.factory import make_copier
from kvoffload.transfer.io_loop import IOLoop, presence_on
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)


def tier_names(config: OffloadConfig) -> list[tuple[str, BackendConfig]]:
    """Name each configured tier: by its type; a second one of a type by its place as well."""
    named: dict[str, BackendConfig] = {}
    for i, wanted in enumerate(config.backends):
        named[wanted.type if wanted.type not in named else f"{wanted.type}{i}"] = wanted
    return list(named.items())


def make_manager(
    config: OffloadConfig, host: HostCache, tiers: Sequence[Tier], slot_bytes: int
) -> TieredOffloadingManager:
    """Make the manager for these settings: with a cache in host memory, or without."""
    limit = config.max_inflight_bytes
    return TieredOffloadingManager(
        host,
        tiers,
        None if limit is None else limit // slot_bytes,
        caching=bool(config.cpu_bytes),
        store_threshold=config.store_threshold,
        promote=config.promote,
        client_hints=config.client_hints,
    )


@dataclass
class _Opened:
    """The stores of one namespace; replaced as a whole when the cache's meaning changes."""

    backends: dict[str, Backend]
    tiers: tuple[Tier, ...]


class TieredOffloadingSpec(OffloadingSpec):
    """Both halves for an engine whose scheduler and worker share a process.

    Args:
        config: the settings.
        slot_bytes: bytes of a host slot (:attr:`ChunkLayout.slot_bytes`).
        facts: everything that decides what the bytes mean; see :mod:`kvoffload.offload.namespace`.
        layout: sizes of the chunks, where KV cache groups differ in it. Slots are then rows, and a
            chunk takes as many as it needs.

    Raises:
        ConfigError: before any thread is started or memory taken, where that can be known.
    """

    def __init__(
        self,
        config: OffloadConfig,
        slot_bytes: int,
        facts: Mapping[str, Fact],
        layout: ChunkLayout | None = None,
    ) -> None:
        self.config = config
        self._layout = layout
        self._geometry: HostGeometry | None = None
        setting, host_bytes = config.host_memory
        if layout is not None and len({size for size in layout.payload_bytes if size}) > 1:
            self._geometry = HostGeometry.plan(host_bytes, layout.payload_bytes, setting)
            slot_bytes = self._geometry.row_bytes
        self.slot_bytes = slot_bytes
        self.num_slots = host_bytes // slot_bytes
        if self.num_slots < 1:
            raise ConfigError(
                setting,
                human_bytes(host_bytes),
                f"must hold at least one chunk, which takes {human_bytes(slot_bytes)}; "
                "raise it or lower blocks_per_chunk",
            )
        inflight = config.max_inflight_bytes
        if inflight is not None and inflight < slot_bytes:
            raise ConfigError(
                "max_inflight_bytes",
                human_bytes(inflight),
                f"must hold at least one chunk, which takes {human_bytes(slot_bytes)}",
            )
        self._policy = registry.load(registry.POLICIES, config.policy, "policy")
        self._facts = dict(facts)
        self._slab = Slab(self.num_slots, slot_bytes, setting=setting)
        self.io = IOLoop()
        self._copier: Copier | None = None
        try:
            self._opened = self._open()
        except BaseException:
            self.io.close()
            raise

    def _open(self) -> _Opened:
        backends: dict[str, Backend] = {}
        try:
            return self._open_into(backends)
        except BaseException:
            # What opened before the one that cannot holds threads, descriptors and locks.
            self._close_all(backends)
            raise

    def _open_into(self, backends: dict[str, Backend]) -> _Opened:
        digest = namespace(**self._facts)
        tiers: list[Tier] = []
        places: dict[str, int] = {}
        for i, (name, wanted) in enumerate(tier_names(self.config)):
            backend = registry.open_backend(
                wanted.type, wanted.options, digest, where=f"backends[{i}]."
            )
            backends[name] = backend
            if isinstance(backend, Observable):
                self._check_fit(i, backend, places)
            presence = presence_on(self.io, backend, self.config.lookup_timeout_s)
            tiers.append(Tier(name, presence, backend if isinstance(backend, Observable) else None))
            if isinstance(backend, Observable):
                self.io.start(partial(backend.describe, readable(self._facts)))
        return _Opened(backends, tuple(tiers))

    def _check_fit(self, i: int, backend: Observable, places: dict[str, int]) -> None:
        """Refuse a tier that could never hold a chunk, or that is another one over again."""
        chunk_bytes = max(self._layout.payload_bytes) if self._layout else self.slot_bytes
        try:
            backend.check_fit(chunk_bytes)
        except ConfigError as error:
            raise ConfigError(f"backends[{i}].{error.field}", error.value, error.remedy) from error
        first = places.setdefault(backend.place, i) if backend.place else i
        if first != i:
            remedy = f"is where backends[{first}] keeps its chunks; one tier is enough there"
            raise ConfigError(f"backends[{i}]", backend.place, remedy)

    @property
    def namespace(self) -> str:
        """The digest that the stores were opened with."""
        return namespace(**self._facts)

    @property
    def backends(self) -> Mapping[str, Backend]:
        """The open stores by tier name."""
        return self._opened.backends

    @property
    def copies(self) -> dict[str, str | int]:
        """How bytes go between the engine's cache and host memory; empty before there are any."""
        return self._copier.stats() if self._copier else {}

    def get_manager(self) -> TieredOffloadingManager:
        """See :meth:`OffloadingSpec.get_manager`."""
        if self._geometry is None:
            host = HostCache(self.num_slots, self._policy(self.num_slots), self.slot_bytes)
        else:
            host = ExtentLedger(self._geometry, self._policy)
        return make_manager(self.config, host, self._opened.tiers, self.slot_bytes)

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield the transfer engine for each of its routes."""
        engine = self.open_engine(kv_caches)
        for source, destination in ROUTES:
            yield source, destination, engine

    def open_engine(self, kv_caches: CanonicalKVCaches) -> TransferEngine:
        """Make the transfer engine between these caches, the slab and the stores; once."""
        layout = self._layout or ChunkLayout(kv_caches, self.config.blocks_per_chunk)
        if self._geometry is None and layout.slot_bytes > self.slot_bytes:
            raise ValueError(
                f"a chunk takes {layout.slot_bytes} bytes, slots have {self.slot_bytes}"
            )
        try:
            copier = self._copier = make_copier(kv_caches, self._slab, layout)
        except BaseException:
            self.close()
            raise
        return TransferEngine(
            self.io,
            self._opened.backends,
            self._slab,
            layout,
            copier,
            self.config.load_timeout_s,
            self.config.store_timeout_s,
        )

    def renew(self, manager: TieredOffloadingManager, generation: str) -> None:
        """Give the stores a new namespace, because stored bytes no longer mean the same."""
        # Close the old tiers first: if new ones cannot be opened there are none, not stale ones.
        manager.replace_tiers(())
        try:
            self.renew_stores(generation)
        except Exception:
            log.exception("the tiers cannot be opened again; host memory goes on alone")
        else:
            manager.replace_tiers(self._opened.tiers)

    def renew_stores(self, generation: str) -> None:
        """Give the stores a new namespace, where the manager is in another process.

        Calls still running on the old stores end on those; they are closed in the background.
        """
        old = dict(self._opened.backends)
        # Only this process knows a generation's name. Other namespaces belong to replicas as well.
        forgotten = [self.namespace] if "generation" in self._facts else []
        if old and not forgotten:
            log.info(
                "reset: %s load nothing more of what they stored before, and do not erase it; "
                "kvoffload gc --namespace %s erases it",
                ", ".join(old),
                self.namespace,
            )
        self._facts["generation"] = generation
        try:
            opened = self._open()
            self._opened.backends.update(opened.backends)  # the mapping the handlers look into
            self._opened.tiers = opened.tiers
        finally:
            for name, backend in old.items():
                heir = self._opened.backends[name]
                self.io.start(partial(_retire, backend, heir, forgotten))

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the stores, the I/O thread and the copier. Idempotent."""
        self._close_all(self._opened.backends, timeout_s)
        self.io.close(timeout_s)
        if self._copier is not None:
            self._copier.close()
            self._copier = None

    def _close_all(self, backends: Mapping[str, Backend], timeout_s: float = 5.0) -> None:
        for name, backend in backends.items():
            if self.io.loop.is_closed():
                return
            try:
                self.io.call(backend.close(), timeout_s)
            except Exception as error:
                log.warning("%s: closing failed: %s", name, str(error) or type(error).__name__)


async def _retire(store: Backend, heir: Backend, forgotten: Sequence[str]) -> None:
    """Close a store; the one in its place removes what no one will ask for any more."""
    await store.close()
    if heir is store or not forgotten or not isinstance(heir, Admin):
        return
    try:
        await heir.purge(forgotten)
    except OSError as error:
        log.warning("what an old generation stored stays until it is evicted: %s", error)
