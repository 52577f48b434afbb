"""The worker half, one a rank: vLLM's, with our transfers, and with failures told.

A failed load is not an error here. The worker reports its blocks (one KV cache group of full
attention) or its request, and vLLM computes them. The step's report carries the verdict on each
chunk to the scheduler half.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    get_offloading_group_ids,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)

from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.chunk_size import blocks_of
from kvoffload.connectors.vllm.engine_weights import UPDATES, name_for_all_ranks
from kvoffload.connectors.vllm.fingerprint import resolve_facts
from kvoffload.connectors.vllm.kv_caches import (
    PARTIAL_CHUNK,
    BatchedStore,
    SharedWrites,
    StoreBatch,
    canonical,
    cut,
    has_useful_heads,
    layers_of_groups,
)
from kvoffload.connectors.vllm.self_test import check_tiers
from kvoffload.connectors.vllm.start import VllmConfigSettings, is_synchronous, unbound
from kvoffload.connectors.vllm.step_messages import StepMetadata, WorkerInfo, WorkerReport
from kvoffload.connectors.vllm.worker_presence import WorkerPresence
from kvoffload.io.remote_tier import RemoteTier
from kvoffload.messages import TransferResult
from kvoffload.metrics.endpoint import MetricsServer, serve_metrics
from kvoffload.metrics.names import EVENTS
from kvoffload.metrics.samples import packed
from kvoffload.transfer.engine import TransferEngine
from kvoffload.transfer.layout import ChunkLayout, Moves

COUNTERS_PERIOD_S = 0.5
"""How often a report has this rank's figures: a step may take only 2 ms."""
_HAS_NEWS = attrgetter("has_news")
"""Of a :class:`RemoteTier`."""


@dataclass
class _Load:
    """A load in flight: its request, and the blocks that it fills."""

    req_id: str
    moves: Moves
    is_synchronous: bool
    void: bool = False
    """A reset came in between: whatever arrives is not to be used."""


class KVOffloadWorker(OffloadingConnectorWorker):  # type: ignore[misc]  # untyped base
    """Moves bytes, in the process of one rank; see the module.

    Args:
        spec: vLLM's kind of spec, for what its half reads from it.
        settings: ours.
        vllm_config: vLLM's.
        kv_cache_config: vLLM's.
    """

    def __init__(
        self, spec: Any, settings: VllmConfigSettings, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self.settings = settings
        self._device_type: str = vllm_config.device_config.device_type
        self._group_ids = get_offloading_group_ids(kv_cache_config)
        self._report = WorkerReport()
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, StoreBatch] = {}
        """The stores of each step in flight, by the job id of their transfer."""
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._told_s = 0.0
        """When the report last had this rank's figures."""
        self._tiers: Mapping[str, RemoteTier] = {}
        self._presence: WorkerPresence | None = None
        self._writes = SharedWrites(0, 1, ())
        self._emptying = ""
        """The order to empty stores whose end the scheduler is to be told of."""
        self._updates = UPDATES.count
        """Updates of the model's weights that the scheduler knows of, or is told of."""
        self._has_old_chunks = False
        """Whether host memory and the tiers hold chunks of earlier weights, until the order."""
        self._is_met = False
        """Whether the scheduler knows all workers; it takes in what tiers hold only then."""
        self._spec: TieredOffloadingSpec | None = None
        self._transfers: TransferEngine
        """Set by :meth:`_init_worker`."""
        self._layout: ChunkLayout
        """Set by :meth:`_init_worker`."""
        self._metrics: MetricsServer | None = None
        self._info: WorkerInfo
        """Set by :meth:`_init_worker`."""

    # ---- start ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See vLLM; ends in :meth:`_init_worker`."""
        self._kv_caches = kv_caches
        super().register_kv_caches(kv_caches)

    def _init_worker(self, kv_caches: Any) -> None:
        """Take memory, open the stores, and check every tier.

        Raises:
            ConfigError: a setting cannot work, or bytes do not come back as they were stored.
        """
        ours = canonical(kv_caches, self._group_ids)
        self._layout = layout = ChunkLayout(ours, blocks_of(self.settings))
        # vLLM says so of tensor parallel ranks of one host alone.
        is_replicated = self.spec.config.replicated_layout
        facts = resolve_facts(
            self.vllm_config,
            self.kv_cache_config,
            self._kv_caches,
            self.settings,
            is_replicated,
            name_for_all_ranks() if is_replicated else "",
        )
        facts["chunk_layout"] = layout.description
        parallel = self.vllm_config.parallel_config
        rank = parallel.rank
        # Replicas of a machine have equal ranks.
        number = rank + parallel.data_parallel_index * parallel.world_size
        first_slot = 0
        with unbound(self._device_type):
            # Stages of a pipeline have other layers each, so their slots are of one size.
            sizes = layout if parallel.pipeline_parallel_size == 1 else None
            self._spec = TieredOffloadingSpec(self.settings, layout.slot_bytes, facts, sizes)
            try:
                self._transfers = self._spec.open_engine(ours)
                if self.settings.canary:
                    layers = layers_of_groups(
                        self._kv_caches, self.kv_cache_config, self._group_ids
                    )
                    per_chunk = blocks_of(self.settings)
                    first_slot = check_tiers(self._spec, self._transfers, ours, layers, per_chunk)
                read = self._transfers.figures.samples
                self._metrics = serve_metrics(self.settings, read, number)
            except BaseException:
                self._spec.close()  # or its memory stays pinned
                raise
        self._tiers = self._spec.tiers
        if is_replicated:
            shared = [name for name, tier in self._tiers.items() if tier.is_shared]
            self._writes = SharedWrites(rank, parallel.tensor_parallel_size, shared)
        self._presence = WorkerPresence(rank, self._tiers)
        listed = self._presence.listed
        self._info = WorkerInfo(
            self._spec.num_slots,
            self._spec.slot_bytes,
            facts,
            rank,
            listed,
            first_slot,
            tuple(layout.payload_bytes) if self._spec.has_sizes else (),
        )
        if not self.settings.fixed_weights:
            UPDATES.watch(self.vllm_config.model_config)
        self.worker = self._transfers

    # ---- every step ----

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Before each forward pass: nothing it overwrites may still be read by a store."""
        orders = kv_connector_metadata
        self._is_met = not orders.asks_workers
        if UPDATES.count != self._updates or orders.generation is not None:
            self._notice_weights(is_ordered=orders.generation is not None)
        flush = orders.jobs_to_flush
        for job_id in flush or ():
            if job := orders.store_jobs.pop(job_id, None):
                self._unsubmitted_store_jobs.append((job_id, job.src_spec, job.dst_spec))
        self._submit_stores()
        if flush:
            # A request was preempted, or a block is given to another one: the copy out of its
            # blocks must be over before they are written. A reset names loads too. vLLM keeps
            # their blocks until they are answered, and a read of a disk may take long.
            batches = self._stores.values()
            stores = [it.job_id for it in batches if not flush.isdisjoint(it.job_ids)]
            self._transfers.wait(stores)
        # Without a wait: the engine's step must not depend on how long a store takes to open.
        # The old tiers are closed, so every question to them is a miss until then.
        if orders.emptied is not None and self._spec is not None:
            self._emptying, tier = orders.emptied
            self._spec.stores.clear(tier)
            self._stores_change(self._emptying)
        if orders.generation is not None and self._spec is not None:
            self._spec.stores.renew(orders.generation)
            self._stores_change(orders.generation)

    def _notice_weights(self, is_ordered: bool) -> None:
        """Let loads bring nothing after an update, until the scheduler begins a generation.

        Args:
            is_ordered: whether this step does.
        """
        is_new = UPDATES.count != self._updates
        self._updates = UPDATES.count
        if is_ordered:
            self._has_old_chunks = False
        elif is_new:
            self._has_old_chunks = self._report.has_new_weights = True
            for load in self._loads.values():
                load.void = True

    def _stores_change(self, label: str) -> None:
        """Let loads in flight bring nothing, and report of the stores that open next."""
        for load in self._loads.values():
            load.void = True
        if self._presence is not None:
            self._presence.renew(label)

    def start_kv_transfers(self, metadata: StepMetadata) -> None:
        """Begin this step's loads and write-throughs; not called in a step without orders."""
        if metadata.asks_workers:
            self._report.workers[self._info.rank] = self._info
        if metadata.asks_figures:
            self._told_s = 0.0
        if metadata.questions and self._presence is not None:
            self._presence.ask(metadata.questions)
        if metadata.awaited and self._spec is not None and self._spec.io is not None:
            self._spec.io.awaits(metadata.awaited)
        if metadata.returns and self._spec is not None and self._spec.io is not None:
            self._spec.io.expects(metadata.returns)
        for job_id, job in metadata.load_jobs.items():
            every, slots = cut(job.dst_spec, self._group_ids, self._layout), job.src_spec.host_slots
            sync = is_synchronous(job)
            self._loads[job_id] = _Load(job.req_id, every, sync, void=self._has_old_chunks)
            moves = every.take(slice(len(slots)))
            if len(moves) == len(slots):  # else the engine refuses it
                moves.chunks[0] = slots
            self._transfers.submit(job_id, (job.src_spec, moves), len(slots))
            if sync:
                self._transfers.wait([job_id])
        for job_id, read in metadata.early_reads.items():
            self._transfers.submit(job_id, read, len(read[0].keys))
        for job_id, whole in metadata.write_through.items():
            ends, num_chunks = self._writes.begin(job_id, whole)
            if num_chunks:
                self._transfers.submit(job_id, ends, num_chunks)
            else:
                self._end(TransferResult(job_id, ()))

    def unregister_kv_caches(self) -> None:
        """Wait until no copy reads or writes the KV cache: a sleep unmaps its memory.

        A copy after that would be an illegal access, which ends the engine.
        """
        self._submit_stores()  # those that wait for the next step, too
        self._transfers.wait([*self._stores, *self._loads])

    def _submit_stores(self) -> None:
        """Begin all stores that wait, with one launch."""
        if not self._unsubmitted_store_jobs:
            return
        waiting = list(self._unsubmitted_store_jobs)
        self._unsubmitted_store_jobs.clear()
        stores = []
        for job_id, source, target in waiting:
            moves, slots = cut(source, self._group_ids, self._layout), target.host_slots
            whole = moves.chunks[4] == blocks_of(self.settings)
            if whole.any() and len(moves) == len(slots):
                moves.chunks[0] = slots
                stores.append(BatchedStore(job_id, moves.take(whole), whole.tolist()))
            else:
                bad = (False,) * len(slots)
                self._store_ended(TransferResult(job_id, bad, reason=PARTIAL_CHUNK))
        if stores:
            batch = StoreBatch(stores)
            self._stores[batch.job_id] = batch
            self._transfers.submit(batch.job_id, batch.spec, batch.num_chunks)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Take in what ended; returns no sends, and the requests whose loads ended, well or not."""
        received: set[str] = set()
        # Read first: a job that settles while its result is taken in is settled the next time.
        settled = self._transfers.get_settled()
        for result in self._transfers.get_finished():
            if (batch := self._stores.pop(result.job_id, None)) is not None:
                for part in batch.results(result):
                    self._store_ended(part)
                stats = self._report.transfer_stats.store
                stats.record(result.transfer_bytes, result.transfer_time_s)
            elif (load := self._loads.pop(result.job_id, None)) is not None:
                if self._load_ended(load, result):
                    received.add(load.req_id)
            else:
                self._end(result)  # write-through: no one in vLLM waits for it
        self._report.settled += settled
        return set(), received

    def _end(self, result: TransferResult) -> None:
        """Note the end of a job."""
        result = self._writes.end(result)
        self._report.ended.append(result)
        if result.reason == PARTIAL_CHUNK:  # the engine counts other failures
            self._transfers.failures[PARTIAL_CHUNK] += result.ok.count(False)

    def _store_ended(self, result: TransferResult) -> None:
        self._end(result)
        self._report.mark_completed(result.job_id)

    def _load_ended(self, load: _Load, result: TransferResult) -> bool:
        """Note the end of a load; return whether its request waits for it."""
        self._end(result)
        self._report.mark_completed(result.job_id)
        stats = self._report.transfer_stats.load
        stats.record(result.transfer_bytes, result.transfer_time_s)
        ok = () if load.void else result.ok
        arrived = all(ok) and len(ok) >= len(load.moves)
        bad = [
            block
            for i, move in enumerate(() if arrived else load.moves)
            if i >= len(ok) or not ok[i]
            for block in move.block_ids.tolist()
        ]
        if bad:
            self._transfers.figures.counter(EVENTS)["recomputed_blocks"] += len(bad)
            if has_useful_heads(self.kv_cache_config):
                self._failed_blocks.update(bad)
            else:
                self._failed_requests.add(load.req_id)
        return not load.is_synchronous

    def take_failed_blocks(self) -> set[int]:
        """Return blocks of loads that failed since the last call."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def take_failed_requests(self) -> set[str]:
        """Return requests whose loads failed since the last call, where blocks cannot say it."""
        taken, self._failed_requests = self._failed_requests, set()
        return taken

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return what happened since the last call; None for nothing."""
        presence = self._presence
        is_asked = self._emptying or (presence is not None and presence.questions)
        if is_asked or any(map(_HAS_NEWS, self._tiers.values())):
            self._report_on_tiers()
        now_s = time.monotonic()
        if now_s - self._told_s >= COUNTERS_PERIOD_S:
            self._told_s = now_s
            self._report_figures()
        if self._report.is_empty:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def _report_on_tiers(self) -> None:
        for name, tier in self._tiers.items():
            tier.has_news = not self._is_met  # what comes from now on is news again
            if removals := tier.take_removals():
                self._report.removals.append((name, removals))
        if self._emptying and self._spec is not None and self._spec.io is not None:
            wrong = self._spec.io.outcome
            if wrong is not None:
                self._report.emptied[self._info.rank] = self._emptying, wrong
                self._emptying = ""
        if self._presence is not None and self._is_met:
            self._report.presence = self._presence.take_parts()
            self._report.answers = self._presence.take_answers()

    def _report_figures(self) -> None:
        if self._spec is not None:
            self._report.figures[self._info.rank] = packed(self._transfers.figures.samples())
        presence = self._presence if self._is_met else None
        if presence is not None and (down := presence.take_down()) is not None:
            self._report.down[self._info.rank] = down

    def shutdown(self) -> None:
        """Release threads, stores and memory."""
        self._unsubmitted_store_jobs.clear()
        self._loads.clear()
        self._report = WorkerReport()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._spec is not None:
            self._tiers = {}
            self._presence = None
            self._spec.close()
            self._spec = None
