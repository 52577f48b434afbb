"""Builds both halves from settings: the manager, and the handlers with what they run on."""

import logging
from collections.abc import Iterator, Mapping, Sequence

from kvoffload import registry
from kvoffload.config import OffloadConfig, human_bytes
from kvoffload.connectors.chunk_size import blocks_of
from kvoffload.connectors.tier_io import SERVE, TierIO, tier_names
from kvoffload.errors import ConfigError
from kvoffload.identity import Fact
from kvoffload.io.remote_tier import RemoteTier
from kvoffload.offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    Manager,
    OffloadingHandler,
    OffloadingSpec,
)
from kvoffload.offload.extents import ExtentCache
from kvoffload.offload.geometry import HostGeometry
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.policies.tenant_order import TenantShares, told_apart
from kvoffload.transfer.base import Copier
from kvoffload.transfer.engine import ROUTES, TransferEngine
from kvoffload.transfer.factory import make_copier
from kvoffload.transfer.layout import ChunkLayout

log = logging.getLogger(__name__)
RENEW_S = 0.5
"""How long a reset waits for the tiers."""


def make_host_cache(
    policy: str,
    num_rows: int,
    row_bytes: int,
    payload_bytes: Sequence[int],
    first_row: int = 0,
    *,
    tenants: TenantShares | None = None,
) -> HostCache:
    """Make the cache of a slab: with slots of one size, or of several where chunks differ in it.

    Args:
        policy: its name.
        num_rows: rows of the slab, those before ``first_row`` among them.
        row_bytes: bytes of a row.
        payload_bytes: bytes of a chunk of each KV cache group; empty where a row holds any chunk.
        first_row: the first row that may be used.
        tenants: the shares of tenants; used by this cache alone.
    """
    new_policy = told_apart(registry.load_policy(policy), tenants)
    host: HostCache
    if _differ(payload_bytes):
        geometry = HostGeometry.plan(num_rows * row_bytes, payload_bytes)
        host = ExtentCache(geometry, new_policy, first_row)
    else:
        num_slots = num_rows - first_row
        host = HostCache(num_slots, new_policy(num_slots), row_bytes, first_row)
    if tenants is not None:
        host.tell_tenants_apart(tenants)
    return host


def tenants_of(config: OffloadConfig) -> TenantShares | None:
    """Return the shares of tenants that settings ask for; None: tenants are not told apart.

    The log names the tiers that have none, as what a user asks for is not there.
    """
    if not config.tenants:
        return None
    if config.tenant_share < 1 and (tiers := _without_shares(config)):
        text = "kvoffload: no shares of tenants on %s: there the chunks of one may evict another's"
        log.warning(text, ", ".join(tiers))
    return TenantShares(config.tenant_share)


def _without_shares(config: OffloadConfig) -> list[str]:
    """Return the names of the tiers whose settings have no share of tenants."""

    def has_shares(kind: str) -> bool:  # those of a server are its own setting
        return kind == SERVE or hasattr(
            registry.load(registry.BACKENDS, kind).Options, "tenant_share"
        )

    return [name for name, tier in tier_names(config) if not has_shares(tier.type)]


def _differ(payload_bytes: Sequence[int]) -> bool:
    """Say whether groups have chunks of several sizes; a group without bytes has no chunks."""
    return len({size for size in payload_bytes if size}) > 1


def make_manager(
    config: OffloadConfig, host: HostCache, tiers: Sequence[Tier], slot_bytes: int
) -> TieredOffloadingManager:
    """Make the manager for these settings: with a cache in host memory, or without."""
    limit = config.max_inflight_bytes
    host.hint_share = config.hint_share
    return TieredOffloadingManager(
        host,
        tiers,
        None if limit is None else limit // slot_bytes,
        caching=bool(config.cpu_bytes),
        store_threshold=config.store_threshold,
        promote=config.promote,
        client_hints=config.client_hints,
        load_timeout_s=config.load_timeout_s,
        waiting_share=config.waiting_share,
    )


class TieredOffloadingSpec(OffloadingSpec):
    """Both halves for an engine whose scheduler and worker share a process.

    Args:
        config: the settings.
        slot_bytes: bytes of a host slot (:attr:`ChunkLayout.slot_bytes`).
        facts: everything that decides what the bytes mean; see :mod:`kvoffload.identity`.
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
        if layout is not None and _differ(layout.payload_bytes):
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
        registry.load(registry.POLICIES, config.policy, "policy")  # before memory is taken
        self._copier: Copier | None = None
        chunk_bytes = max(layout.payload_bytes) if layout else slot_bytes
        self.stores = TierIO(config, self.num_slots, slot_bytes, chunk_bytes, facts)
        """The tiers' stores, and the slab that they read and write."""
        self._slab = self.stores.slab
        self.io = self.stores.client
        """The client of the I/O server; None if there are no tiers."""

    @property
    def has_sizes(self) -> bool:
        """Whether slots are rows, of which chunks take several."""
        return self._geometry is not None

    @property
    def tiers(self) -> Mapping[str, RemoteTier]:
        """What is known of each tier, by its name."""
        return self.io.tiers if self.io else {}

    @property
    def copies(self) -> dict[str, str | int]:
        """How bytes go between the engine's cache and host memory; empty before there are any."""
        return self._copier.stats() if self._copier else {}

    def get_manager(self) -> TieredOffloadingManager:
        payloads = self._layout.payload_bytes if self._layout else ()
        host = make_host_cache(
            self.config.policy,
            self.num_slots,
            self.slot_bytes,
            payloads,
            tenants=tenants_of(self.config),
        )
        return make_manager(self.config, host, self._manager_tiers(), self.slot_bytes)

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Yield the transfer engine for each of its routes."""
        engine = self.open_engine(kv_caches)
        for source, destination in ROUTES:
            yield source, destination, engine

    def open_engine(self, kv_caches: CanonicalKVCaches) -> TransferEngine:
        """Make the transfer engine between these caches, the slab and the stores; once."""
        layout = self._layout or ChunkLayout(kv_caches, blocks_of(self.config))
        if self._geometry is None and layout.slot_bytes > self.slot_bytes:
            raise ValueError(
                f"a chunk takes {layout.slot_bytes} bytes, slots have {self.slot_bytes}"
            )
        copier = self._copier = make_copier(
            kv_caches, self._slab, layout, batches=self.config.batched_copies
        )
        keeps_slots = bool(self.config.cpu_bytes)
        return TransferEngine(self.io, self._slab, layout, copier, keeps_slots=keeps_slots)

    def _manager_tiers(self) -> tuple[Tier, ...]:
        return tuple(Tier(name, tier) for name, tier in self.tiers.items())

    def renew(self, manager: Manager, generation: str) -> None:
        """Give the stores a new namespace, because stored bytes no longer mean the same.

        A store that is not open soon opens in the background: it must not delay the engine.
        """
        manager.replace_tiers(())
        try:
            self.stores.renew(generation, RENEW_S)
        except Exception as error:
            log.warning("a tier is not open again yet; until then it has nothing: %s", error)
        manager.replace_tiers(self._manager_tiers())

    def empty(self, manager: Manager, tier: str = "") -> None:
        """Begin to remove all chunks of this namespace from a tier, or from all; never waits."""
        manager.replace_tiers(())
        self.stores.clear(tier)
        manager.replace_tiers(self._manager_tiers())

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the stores, the I/O server and the copier. Idempotent."""
        self.stores.close(timeout_s)
        if self._copier is not None:
            self._copier.close()
            self._copier = None
