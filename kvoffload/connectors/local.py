"""The connector for engines whose scheduler and worker share a process.

It is the one to read first: the others translate the same verbs through more processes. An engine
calls, from one thread:

=============================  =====================================================================
when                           what
=============================  =====================================================================
a waiting request is looked at ``get_num_new_matched_tokens``: how much can be loaded
its blocks are allocated       ``update_state_after_alloc``: the load begins
every step, also when idle     ``poll``: which loads ended, and how far each got
before a forward pass          ``before_forward``: blocks about to be written are let go of
after a forward pass           ``after_forward``: newly full chunks are stored
a request ends in any way      ``request_finished``
=============================  =====================================================================

Nothing here does I/O or raises because of a store; a failed load is an outcome with fewer tokens.
"""

import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvoffload.backends.base import ReportsUsage
from kvoffload.config import OffloadConfig, parse_config
from kvoffload.connectors.spec import TieredOffloadingSpec
from kvoffload.offload.base import (
    CanonicalKVCaches,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    StagedLoadStoreSpec,
    Transfer,
    TransferResult,
    make_offload_key,
)
from kvoffload.offload.identity import Fact
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.worker import TransferWorker

log = logging.getLogger(__name__)
BlockTables = Sequence[Sequence[int]]
"""GPU block ids of a request from its first token on, for each KV cache group."""


class OffloadRequest(Protocol):
    """What the connector needs to know of a request."""

    request_id: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and what was generated so far."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full blocks."""
        ...


@dataclass(frozen=True)
class LoadOutcome:
    """How a load ended."""

    request_id: str
    num_loaded_tokens: int
    """The good prefix: tokens after those in GPU memory that need not be computed."""
    ok: bool
    """Whether that is all that was asked for."""
    tokens_by_medium: dict[str, int] = field(default_factory=dict)


@dataclass
class _RequestState:
    keys: list[OffloadKey] = field(default_factory=list)
    first_block: int = 0
    """Where a load would begin: the first block that GPU memory does not have."""
    pending_since_s: float | None = None
    next_store: int = 0
    """First chunk not offered for storing yet."""
    loading: bool = False
    counted: bool = False
    """Whether the request counted as a use of its chunks."""


@dataclass(frozen=True)
class _Load:
    request_id: str
    keys: tuple[OffloadKey, ...]
    host_slots: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    media: tuple[str, ...]
    wanted_tokens: int
    gpu_blocks: tuple[int, ...]


@dataclass(frozen=True)
class _Store:
    context: ReqContext
    keys: tuple[OffloadKey, ...]
    host_slots: tuple[int, ...]
    gpu_blocks: tuple[int, ...]


class LocalConnector:
    """Attaches offloading to an engine in the same process; see the module's table of calls.

    Args:
        config: settings, or plain data to read them from.
        kv_caches: canonical views of the engine's KV cache; the engine owns the memory and keeps it
            until :meth:`close`.
        block_size: tokens in a GPU block.
        facts: what decides the meaning of the bytes as far as only the engine knows it: model,
            revision or weights' digest, dtype, attention backend... The connector adds the layout.

    Raises:
        ConfigError: a setting cannot work; nothing has been started.
    """

    def __init__(
        self,
        config: OffloadConfig | Mapping[str, Any],
        kv_caches: CanonicalKVCaches,
        *,
        block_size: int,
        facts: Mapping[str, Fact],
    ) -> None:
        self.config = config if isinstance(config, OffloadConfig) else parse_config(config)
        if len(kv_caches.group_data_refs) != 1:
            raise ValueError("kv_caches: this connector serves one KV cache group")
        self.block_size = block_size
        self._per_chunk = self.config.blocks_per_chunk
        layout = ChunkLayout(kv_caches, self._per_chunk)
        pages = [[region.page_bytes for region in regions] for regions in layout.regions]
        self._spec = TieredOffloadingSpec(
            self.config,
            layout.slot_bytes,
            {
                **facts,
                "block_size": block_size,
                "blocks_per_chunk": self._per_chunk,
                "chunk_layout": f"tensor-major-1 {pages}",
            },
        )
        self._manager = self._spec.get_manager()
        self._worker = TransferWorker(self._spec.get_handlers(kv_caches))
        self._job_ids = itertools.count()
        self._jobs: dict[int, _Load | _Store | Transfer] = {}
        self._unsettled: dict[int, tuple[int, ...]] = {}
        self._requests: dict[str, _RequestState] = {}
        self._refused_loads: list[LoadOutcome] = []
        # GPU block → the job that still reads it (a store) or writes it (a load).
        self._busy_blocks: dict[int, int] = {}
        self._tokens: Counter[str] = Counter()

    # ---- a waiting request ----

    def get_num_new_matched_tokens(
        self, request: OffloadRequest, num_computed_tokens: int
    ) -> int | None:
        """Say how many tokens after the engine's own prefix hit can be loaded.

        Args:
            request: a request about to be admitted.
            num_computed_tokens: what GPU memory has already; whole blocks.

        Returns:
            Whole blocks, never the prompt's last token (the engine must compute something); 0 for
            nothing; None to ask again at the next step, at most for ``lookup_timeout_s``.
        """
        state = self._requests.setdefault(request.request_id, _RequestState())
        if num_computed_tokens % self.block_size:
            return 0
        state.first_block = num_computed_tokens // self.block_size
        last_block = (request.num_tokens - 1) // self.block_size
        if state.first_block >= last_block:
            return 0
        keys = self._chunk_keys(request, state)
        first_chunk = state.first_block // self._per_chunk
        wanted = keys[first_chunk : -(-last_block // self._per_chunk)]
        if not wanted:
            return 0
        hits, pending = self._manager.lookup_prefix(wanted, self._context(request))
        if pending:
            now_s = time.monotonic()
            if state.pending_since_s is None:
                state.pending_since_s = now_s
            if now_s - state.pending_since_s < self.config.lookup_timeout_s:
                return None
        state.pending_since_s = None
        end_block = min((first_chunk + hits) * self._per_chunk, last_block)
        return max(0, end_block - state.first_block) * self.block_size

    def update_state_after_alloc(
        self, request: OffloadRequest, block_ids: BlockTables, num_external_tokens: int
    ) -> None:
        """Begin loading into blocks just allocated.

        The request must not be scheduled before :meth:`poll` has named it. Call it in the same step
        as the lookup that promised these tokens.
        """
        if not num_external_tokens:
            return
        state = self._requests[request.request_id]
        first, per_chunk = state.first_block, self._per_chunk
        end = first + num_external_tokens // self.block_size
        first_chunk = first // per_chunk
        self._count_use(request, state)
        keys = state.keys[first_chunk : -(-end // per_chunk)]
        source = self._manager.prepare_load(keys, self._context(request))
        keys = keys[: len(source.host_slots)]
        end = min(end, (first_chunk + len(keys)) * per_chunk)
        if not keys:
            self._refused_loads.append(LoadOutcome(request.request_id, 0, ok=False))
            return
        blocks = tuple(block_ids[0][first:end])
        bounds = [first, *range((first_chunk + 1) * per_chunk, end, per_chunk), end]
        media = ["CPU"] * len(keys)
        if isinstance(source, StagedLoadStoreSpec):
            for fetch in source.fetches:
                for i in fetch.positions:
                    media[i] = fetch.tier.upper()
        load = _Load(
            request.request_id,
            tuple(keys),
            tuple(source.host_slots.tolist()),
            tuple((b - a) * self.block_size for a, b in itertools.pairwise(bounds)),
            tuple(media),
            num_external_tokens,
            blocks,
        )
        state.loading = True
        job_id = self._begin(load, blocks)
        target = GPULoadStoreSpec(blocks, (len(blocks),), (first,))
        self._worker.submit(job_id, (source, target), len(keys))

    # ---- every step ----

    def poll(self) -> list[LoadOutcome]:
        """Take in what has ended and start what follows from it; never blocks.

        Returns:
            The loads that ended since the last call. For each the engine marks the loaded prefix as
            computed and computes the rest into the same blocks; or frees the blocks, if the request
            had ended meanwhile.
        """
        outcomes, self._refused_loads = self._refused_loads, []
        for result in self._worker.get_finished():
            job = self._jobs.pop(result.job_id)
            if isinstance(job, _Load):
                outcomes.append(self._load_ended(job, result))
            elif isinstance(job, _Store):
                self._store_ended(job, result)
            else:
                self._manager.complete_transfer(job, result.ok, result.settled)
                if not result.settled:
                    assert isinstance(job.src, CPULoadStoreSpec)
                    self._unsettled[result.job_id] = tuple(job.src.host_slots.tolist())
        for job_id in self._worker.get_settled():
            self._manager.release_slots(self._unsettled.pop(job_id))
        for transfer in self._manager.take_transfers():
            job_id = next(self._job_ids)
            self._jobs[job_id] = transfer
            self._worker.submit(job_id, (transfer.src, transfer.dst), len(transfer.keys))
        return outcomes

    def before_forward(self, block_ids: Iterable[int]) -> None:
        """Wait until no transfer uses blocks that the coming forward pass writes.

        A store that has not finished copying would otherwise store what the pass writes there.
        Blocks are seldom reused while their copy is under way, so this rarely waits at all.
        """
        busy = self._busy_blocks
        if busy and (jobs := {busy[block] for block in block_ids if block in busy}):
            self._worker.wait(jobs)

    def after_forward(
        self, request: OffloadRequest, block_ids: BlockTables, num_computed_tokens: int
    ) -> None:
        """Offer the chunks that have become full for storing."""
        state = self._requests.setdefault(request.request_id, _RequestState())
        num_chunks = num_computed_tokens // self.block_size // self._per_chunk
        if num_chunks <= state.next_store:
            return
        self._count_use(request, state)
        keys = self._chunk_keys(request, state)[state.next_store : num_chunks]
        context = self._context(request)
        output = self._manager.prepare_store(keys, context)
        if output is None:
            return  # offered again with the next chunk
        chunk_of = {key: state.next_store + i for i, key in enumerate(keys)}
        state.next_store += len(keys)
        if not output.keys_to_store:
            return
        blocks = tuple(
            block
            for key in output.keys_to_store
            for block in block_ids[0][
                chunk_of[key] * self._per_chunk : (chunk_of[key] + 1) * self._per_chunk
            ]
        )
        slots = tuple(output.store_spec.host_slots.tolist())
        job_id = self._begin(_Store(context, output.keys_to_store, slots, blocks), blocks)
        self._worker.submit(job_id, (GPULoadStoreSpec(blocks), output.store_spec), len(slots))

    def request_finished(self, request: OffloadRequest) -> bool:
        """Forget a request that ended, was aborted or preempted; harmless if unknown.

        Returns:
            True if a load still writes its blocks: free them only when :meth:`poll` names it.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        self._manager.retire(state.keys, self._context(request))
        return state.loading

    # ---- the rest of an engine's life ----

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all stores and write-throughs have ended; False if some have not in time.

        Outcomes of loads that end meanwhile are kept for the next :meth:`poll`.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            self._refused_loads = self.poll()
            if not self._jobs:
                return True
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.001)

    def reset_cache(self) -> None:
        """Forget everything offloaded, on every tier, as after a change of the weights."""
        self.flush()
        self._manager.reset_cache()
        self._spec.renew(self._manager, generation=uuid.uuid4().hex)
        for state in self._requests.values():
            state.next_store = 0

    def close(self, timeout_s: float = 5.0) -> None:
        """End what is under way, as far as time allows, and release threads and memory."""
        if not self.flush(timeout_s):
            log.warning("%d transfers had not ended at shutdown", len(self._jobs))
        self._spec.close(timeout_s)
        self._manager.shutdown()

    def take_events(self) -> list[OffloadingEvent]:
        """Return what became resident, or ceased to be, since the last call."""
        return self._manager.take_events()

    def stats(self) -> dict[str, Any]:
        """Return counters since the start, and what is resident now."""
        tiers: dict[str, Any] = {}
        for name, backend in self._spec.backends.items():
            if isinstance(backend, ReportsUsage):
                tiers[name] = {**backend.usage()._asdict(), "counters": dict(backend.counters())}
        return {
            "namespace": self._spec.namespace,
            "host": {
                "capacity_chunks": self._spec.num_slots,
                "resident_chunks": self._manager.resident,
                "busy_chunks": self._manager.busy_slots,
                "slot_bytes": self._spec.slot_bytes,
            },
            "tiers": tiers,
            "loaded_tokens": dict(self._tokens),
            "manager": dict(self._manager.counters),
            "transfers": dict(self._worker.counters),
        }

    def check(self) -> None:
        """Raise UsageError if the ledger contradicts itself; for tests."""
        self._manager.check()

    # ---- inside ----

    def _context(self, request: OffloadRequest) -> ReqContext:
        return ReqContext(request.request_id, getattr(request, "kv_transfer_params", None))

    def _count_use(self, request: OffloadRequest, state: _RequestState) -> None:
        if not state.counted:
            state.counted = True
            keys = self._chunk_keys(request, state)
            self._manager.touch(keys, self._context(request))

    def _chunk_keys(self, request: OffloadRequest, state: _RequestState) -> list[OffloadKey]:
        """Return the keys of all full chunks: each named by the hash of its last block."""
        hashes, per_chunk = request.block_hashes, self._per_chunk
        for chunk in range(len(state.keys), len(hashes) // per_chunk):
            state.keys.append(make_offload_key(hashes[(chunk + 1) * per_chunk - 1], 0))
        return state.keys

    def _begin(self, job: _Load | _Store, blocks: Sequence[int]) -> int:
        job_id = next(self._job_ids)
        self._jobs[job_id] = job
        self._busy_blocks.update(dict.fromkeys(blocks, job_id))
        return job_id

    def _end(self, job: _Load | _Store, job_id: int) -> None:
        for block in job.gpu_blocks:
            if self._busy_blocks.get(block) == job_id:
                del self._busy_blocks[block]

    def _load_ended(self, load: _Load, result: TransferResult) -> LoadOutcome:
        self._end(load, result.job_id)
        if state := self._requests.get(load.request_id):
            state.loading = False
        good = [key for key, ok in zip(load.keys, result.ok, strict=True) if ok]
        bad = [key for key, ok in zip(load.keys, result.ok, strict=True) if not ok]
        # Forgotten before the outcome is told, or the next lookup would promise them again.
        self._manager.complete_load(bad, success=False, settled=result.settled)
        self._manager.complete_load(good)
        if not result.settled:
            self._unsettled[result.job_id] = tuple(
                slot for slot, ok in zip(load.host_slots, result.ok, strict=True) if not ok
            )
        by_medium: Counter[str] = Counter()
        for ok, tokens, medium in zip(result.ok, load.chunk_tokens, load.media, strict=True):
            if not ok:
                break  # what comes after a gap cannot be used
            by_medium[medium] += tokens
        self._tokens.update(by_medium)
        loaded = by_medium.total()
        return LoadOutcome(load.request_id, loaded, loaded == load.wanted_tokens, dict(by_medium))

    def _store_ended(self, store: _Store, result: TransferResult) -> None:
        self._end(store, result.job_id)
        good = [key for key, ok in zip(store.keys, result.ok, strict=True) if ok]
        bad = [key for key, ok in zip(store.keys, result.ok, strict=True) if not ok]
        self._manager.complete_store(bad, store.context, success=False, settled=result.settled)
        self._manager.complete_store(good, store.context)
        if not result.settled:
            self._unsettled[result.job_id] = tuple(
                slot for slot, ok in zip(store.host_slots, result.ok, strict=True) if not ok
            )
