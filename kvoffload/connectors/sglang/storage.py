"""``KVOffloadHiCache``: what SGLang's HiCache calls as its storage.

SGLang calls from its backup thread and its prefetch thread at once. Each call ends in bounded time,
and answers False or None for what it could not do: an exception would end a batch of SGLang.
"""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving, process_model_config

from kvoffload.backends.log_rate import Throttle
from kvoffload.connectors.sglang.engine_facts import engine_facts
from kvoffload.connectors.sglang.hicache_settings import read_settings
from kvoffload.connectors.sglang.hooks import check_hooks
from kvoffload.connectors.sglang.page_facts import (
    check_hosts,
    check_ranks,
    check_version,
    differs_by_rank,
    pool_facts,
    process_number,
    rank_facts,
    side_pool_facts,
    warn_of_small_pages,
)
from kvoffload.connectors.sglang.page_store import PageStore, num_bytes
from kvoffload.connectors.sglang.pages_in_place import Page
from kvoffload.connectors.sglang.start_check import (
    check_media,
    check_role,
    check_sessions,
    compile_hashes,
)
from kvoffload.connectors.sglang.weight_generations import WEIGHTS
from kvoffload.errors import ConfigError
from kvoffload.identity import namespace, short
from kvoffload.metrics.endpoint import MetricsServer, serve_metrics

log = logging.getLogger(__name__)
T = TypeVar("T")
Move = Callable[[PageStore, Sequence[bytes], Sequence[Page]], list[bool]]
"""Loads or saves pages under these keys; returns which of them it did."""

_OF_KV, _OF_SIDE_POOL, _GENERIC = (number.to_bytes(4, "big") for number in range(3))
"""Ends of keys: a page of the KV pool, a page of a side pool, a key of a generic call."""
_PAGE_HASH = re.compile("[0-9a-f]{64}")
MAX_FIGURES = 10_000
"""Figures kept for metrics that SGLang may never ask for."""


class HostPool:
    """A host pool of SGLang, as pages.

    Args:
        pool: SGLang's.
        is_v1: whether its pages are taken in place, as parts, or as flat copies of SGLang's.

    Raises:
        ConfigError: the pool does not tell where its pages are.
    """

    def __init__(self, pool: Any, is_v1: bool = True) -> None:
        self.pool = pool
        try:
            sizes = self._part_bytes(is_v1)
        except (ValueError, NotImplementedError) as error:
            wish = "--hicache-mem-layout page_first" if is_v1 else '"interface_v1": 1'
            remedy = f"has no pages for a storage: {error}; set {wish}, if it is not set"
            raise ConfigError("mem_pool_host", type(pool).__name__, remedy) from error
        # DeepSeek V4 has all bytes in side pools; pages of its KV pool hold none.
        if not sizes and getattr(pool, "size_per_token", None) != 0:
            remedy = "does not tell where its pages are, so its model is not supported"
            raise ConfigError("mem_pool_host", type(pool).__name__, remedy)
        self.page_bytes = sum(sizes)
        self.facts = pool_facts(pool, list(sizes), is_v1)
        self.digest = b""
        """Of a side pool: decides, with a page's hash, the key of the page."""
        self.fits = True
        """Whether slots can take its pages."""

    def _part_bytes(self, is_v1: bool) -> Sequence[int]:
        """Return the bytes of each part of a page."""
        import torch

        if not is_v1:
            return [self.pool.get_dummy_flat_data_page().nbytes]
        page = torch.arange(self.pool.page_size, dtype=torch.int64, device="cpu")
        _, sizes = self.pool.get_page_buffer_meta(page) or ((), ())
        return sizes

    def pages(self, host_indices: Any, count: int) -> list[Page]:
        """Return the parts of the pages that these tokens are in."""
        if not self.page_bytes:
            return [()] * count
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        parts = list(zip(addresses, sizes, strict=True))
        each = len(parts) // count
        return [parts[i * each : (i + 1) * each] for i in range(count)]

    def keys(self, hashes: Sequence[str]) -> list[bytes]:
        """Return the keys of pages of a side pool."""
        digest = hashlib.sha256
        return [digest(self.digest + bytes.fromhex(h)).digest() + _OF_SIDE_POOL for h in hashes]


class KVOffloadHiCache(HiCacheStorage):  # type: ignore[misc]  # untyped base
    """HiCache's storage on kvoffload's tiers; see ``docs/guides/sglang.md``.

    Args:
        storage_config: SGLang's ranks, and the extra config.
        kwargs: SGLang's; not used.

    Raises:
        ConfigError: a setting is wrong, or this SGLang is not supported.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        extra = dict(storage_config.extra_config or {})
        if storage_config.tp_lcm_size is not None:  # SGLang has taken it out of the extra config
            extra["tp_lcm_size"] = storage_config.tp_lcm_size
        self._settings = read_settings(extra)
        check_version(self._settings.allow_untested_sglang)
        check_hooks()
        check_ranks(storage_config)
        self._config = storage_config
        self._is_v1 = bool(extra.get("interface_v1"))
        self._kv: HostPool
        self._side_pools: dict[str, HostPool] = {}
        self._store: PageStore | None = None
        self._endpoint: MetricsServer | None = None
        self._batch: tuple[Sequence[str], float] = (), 0.0
        """Of the last loads of KV pages: their keys, and when they end."""
        self._metrics = StorageMetrics()
        self._warnings = Throttle(log)

    # ---- attach and detach ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._kv = HostPool(mem_pool_host, self._is_v1)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == PoolName.KV:
            return
        pool = self._side_pools[name] = HostPool(host_pool)
        facts = pool.facts | side_pool_facts(name, host_pool, self._config)
        pool.digest = bytes.fromhex(namespace(**facts))
        if self._store is not None and pool.page_bytes > self._store.slot_bytes:
            pool.fits = False
            log.warning(
                "kvoffload: the pool %s came after the tiers were opened, and its pages have %d "
                "bytes, slots %d: NOTHING OF IT IS STORED. Detach the storage and attach it again.",
                name,
                pool.page_bytes,
                self._store.slot_bytes,
            )

    def has_own_part(self, name: Any) -> bool:
        """Tell whether this rank's pages of a side pool are its own, also in a MLA model."""
        pool = self._side_pools.get(str(name))
        return pool is not None and differs_by_rank(str(name), pool.pool)

    def on_host_pools_registered(self) -> None:
        """Open the tiers, for the pages of all pools.

        Raises:
            ConfigError: a tier cannot be opened.
        """
        check_media(self._settings, process_model_config())
        check_role(get_disagg())
        check_sessions(get_serving())
        check_hosts(self._config, self._settings.backends, get_parallel())
        compile_hashes()
        warn_of_small_pages(self._kv.pool.page_size, self._kv.page_bytes)
        facts = rank_facts(self._config) | self._kv.facts | engine_facts(self._settings)
        page_bytes = max(pool.page_bytes for pool in (self._kv, *self._side_pools.values()))
        if not page_bytes:
            raise ConfigError("mem_pool_host", type(self._kv.pool).__name__, "no pool has memory")
        if (generation := WEIGHTS.name) is not None:  # weights have changed before the attach
            facts["generation"] = generation
        self._store = store = PageStore(
            self._settings,
            page_bytes,
            facts,
            self._tokens_of,
            asks=not self._config.is_storage_writer,  # rank 0 of a MLA model stores for all
        )
        try:
            number = process_number() if self._settings.metrics_port is not None else 0
            self._endpoint = serve_metrics(self._settings, store.figures.samples, number)
        except BaseException:
            self.close()
            raise
        WEIGHTS.attach(store)
        log.info("kvoffload: namespace %s", short(store.namespace))

    def _tokens_of(self, key: bytes) -> int:
        """Return the tokens of a prompt that a page holds; pages of side pools hold none."""
        return int(self._kv.pool.page_size) if key.endswith(_OF_KV) else 0

    def close(self) -> None:
        """Close the tiers; from now on everything is a miss. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            WEIGHTS.detach(store)
            if self._endpoint is not None:
                self._endpoint.close()
            store.close()
            log.info("kvoffload: detached; pages %s", store.figures.by_event())

    # ---- lookups ----

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Count the leading pages that tiers have."""
        return self._tried(lambda store: store.num_leading(_page_keys(keys)), 0)

    def exists(self, key: str) -> bool:
        return self._tried(lambda store: store.num_leading(self._value_keys([key])) == 1, False)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Find the prefixes that all pools can restore, by each pool's policy."""
        none = PoolTransferResult(0, {}, [])
        return self._tried(lambda store: self._find(store, keys, pool_transfers or ()), none)

    def _find(
        self, store: PageStore, keys: list[str], transfers: Sequence[Any]
    ) -> PoolTransferResult:
        until_s = store.lookup_deadline_s()
        count, num_listed = store.leading(_page_keys(keys), until_s)
        found = {PoolName.KV: count} if count else {}
        restorable = set(range(1, count + 1))
        for transfer in transfers:
            pool = self._side_pools.get(str(transfer.name))
            if pool is None or not restorable or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # groups of blocks never limit a hit
            held = [False] * count
            if pool.fits:
                held = store.present(pool.keys(keys[:count]), num_listed, until_s)
            needed = count
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                needed = max(1, len(transfer.keys or ()))
            ends, run = set(), 0
            for end, is_held in enumerate(held, 1):
                run = run + 1 if is_held else 0
                if run >= min(needed, end):
                    ends.add(end)
            if ends:
                found[transfer.name] = max(ends)
            restorable &= ends
        return PoolTransferResult(max(restorable, default=0), found, sorted(restorable))

    # ---- pages of the KV pool, in place ----

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into the host pool."""
        load = partial(self._load, until_s=self._begin_batch(keys))
        return self._each_page(load, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool."""
        return self._each_page(self._save, keys, host_indices)

    def _each_page(self, move: Move, keys: list[str], host_indices: Any) -> list[bool]:
        return self._tried(
            lambda store: move(store, _page_keys(keys), self._kv.pages(host_indices, len(keys))),
            [False] * len(keys),
        )

    def _begin_batch(self, keys: Sequence[str]) -> float:
        """Note the keys of a batch of KV pages, and return when its loads end."""
        until_s = time.monotonic() + self._settings.load_timeout_s
        self._batch = keys, until_s
        return until_s

    # ---- pages of side pools ----

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages into the host pools of several kinds of state.

        SGLang asks for pages that belong to the KV pages of a batch right after those. The list of
        keys is the same one, and they share the batch's time. With keys of the prefix it calls once
        for each number of pages, so a call has a share of the time.
        """
        keys, until_s = self._batch
        if any(transfer.keys is not keys for transfer in transfers):
            has_prefix = getattr(extra_info, "prefix_keys", None) is not None
            most_calls = len(self._side_pools) if has_prefix else 1
            until_s = time.monotonic() + self._settings.load_timeout_s / max(1, most_calls)
        return self._each_pool(transfers, partial(self._load, until_s=until_s))

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of the host pools of several kinds of state."""
        return self._each_pool(transfers, self._save)

    def _each_pool(self, transfers: list[Any], move: Move) -> dict[str, list[bool]]:
        return {transfer.name: self._of_pool(transfer, move) for transfer in transfers}

    def _of_pool(self, transfer: Any, move: Move) -> list[bool]:
        hashes, is_kv = transfer.keys or [], transfer.name == PoolName.KV
        failed = [False] * len(hashes)

        def move_pages(store: PageStore) -> list[bool]:
            pool = self._kv if is_kv else self._side_pools[str(transfer.name)]
            if not pool.fits:
                return failed
            keys = _page_keys(hashes) if is_kv else pool.keys(hashes)
            return move(store, keys, pool.pages(transfer.host_indices, len(keys)))

        return self._tried(move_pages, failed) if hashes else failed

    # ---- flat copies of pages, and single values ----

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Load values into tensors; return those that were loaded, and None for the rest."""
        targets = list(target_locations or [])
        until_s = self._begin_batch(keys)

        def get(store: PageStore) -> list[Any]:
            pages = [[(target.data_ptr(), target.nbytes)] for target in targets]
            ok = self._load(store, self._value_keys(keys), pages, until_s)
            return [target if good else None for target, good in zip(targets, ok, strict=True)]

        return self._tried(get, [None] * len(keys))

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store the values of tensors; True if all are stored."""

        def store_all(store: PageStore) -> bool:
            tensors = [value.contiguous() for value in values or []]
            pages = [[(tensor.data_ptr(), tensor.nbytes)] for tensor in tensors]
            return all(self._save(store, self._value_keys(keys), pages))

        return self._tried(store_all, False)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value])

    # ---- the rest ----

    def clear(self) -> None:
        """Remove all pages of this model and form from the tiers.

        Raises:
            ConfigError: it is not allowed, or they are not removed yet.
            OSError: some cannot be removed.
        """
        if not self._settings.allow_clear:
            remedy = "other engines may use these pages; set it to true, and --admin-api-key"
            raise ConfigError("allow_clear", False, remedy)
        if (store := self._store) is not None:
            store.clear()  # SGLang takes an exception for a failure, and logs it

    def get_stats(self) -> StorageMetrics | None:
        """Return what was stored and loaded since the last call."""
        if not self._config.enable_storage_metrics:
            return None
        ranks = self._config.tp_rank, self._config.pp_rank
        self._tried(lambda store: store.figures.tell(*ranks), None)
        metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def _value_keys(self, names: Sequence[str]) -> list[bytes]:
        """Return the keys of generic calls: those of pages, where SGLang stores pages by them."""
        if not self._is_v1 and all(map(_PAGE_HASH.fullmatch, names)):
            return _page_keys(names)
        return [hashlib.sha256(name.encode()).digest() + _GENERIC for name in names]

    def _load(
        self,
        store: PageStore,
        keys: Sequence[bytes],
        pages: Sequence[Page],
        until_s: float,
    ) -> list[bool]:
        begun_s = time.monotonic()
        ok = store.load(keys, pages, until_s)
        metrics = self._metrics
        self._measure(metrics.prefetch_pgs, metrics.prefetch_bandwidth, pages, ok, begun_s)
        return ok

    def _save(self, store: PageStore, keys: Sequence[bytes], pages: Sequence[Page]) -> list[bool]:
        begun_s = time.monotonic()
        ok = store.save(keys, pages)
        metrics = self._metrics
        self._measure(metrics.backup_pgs, metrics.backup_bandwidth, pages, ok, begun_s)
        return ok

    def _measure(
        self,
        counts: list[int],
        rates: list[float],
        pages: Sequence[Page],
        ok: list[bool],
        begun_s: float,
    ) -> None:
        """Note for SGLang's metrics how many pages a call has moved, and their GB/s."""
        if self._config.enable_storage_metrics and len(counts) < MAX_FIGURES:
            seconds = max(time.monotonic() - begun_s, 1e-9)
            moved = sum(num_bytes(page) for page, fine in zip(pages, ok, strict=True) if fine)
            counts.append(sum(ok))
            rates.append(moved / 1e9 / seconds)

    def _tried(self, call: Callable[[PageStore], T], failed: T) -> T:
        """Return a call's answer; that of a failure if it raises, or if there are no tiers."""
        store = self._store
        if store is None:
            return failed
        try:
            return call(store)
        except Exception as error:
            store.figures.count("raised")
            self._warnings.warning("a call of HiCache failed: %r", error, traceback=True)
            return failed


def _page_keys(hashes: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(page) + _OF_KV for page in hashes]
