"""The scheduler half: vLLM's own offloading scheduler, with our manager, and with failures.

vLLM's scheduler decides which chunks of which KV cache groups a request could load. It also decides
which blocks a step stores, and which stores must be flushed before a block is reused. This
half adds transfers that fail, write-through to lower tiers, several ranks that must agree, and late
answers.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.request import RequestStatus

from kvoffload.connectors.builder import make_host_cache, make_manager, tenants_of
from kvoffload.connectors.jobs import JobTable
from kvoffload.connectors.prefix_room import last_with_room
from kvoffload.connectors.spans import open_spans
from kvoffload.connectors.vllm import self_test as canary
from kvoffload.connectors.vllm import withheld_stores
from kvoffload.connectors.vllm.client_requests import ClientParams, ExplainedRequests, is_trusted
from kvoffload.connectors.vllm.described_chunks import DescribedChunks
from kvoffload.connectors.vllm.engine_metrics import hit_tokens
from kvoffload.connectors.vllm.engine_weights import Generations, is_told
from kvoffload.connectors.vllm.manager_adapter import ManagerAdapter, RequestNotes, notes_of
from kvoffload.connectors.vllm.operators import Operators
from kvoffload.connectors.vllm.quiet_steps import DueRequests, StepMeter, has_orders
from kvoffload.connectors.vllm.rank_tiers import RankTiers
from kvoffload.connectors.vllm.start import VllmConfigSettings, check_role, writes_before_flush
from kvoffload.connectors.vllm.step_messages import (
    IDLE_STEP,
    StepMetadata,
    WorkerInfo,
    WorkerReport,
)
from kvoffload.errors import ConfigError
from kvoffload.identity import namespace, short
from kvoffload.offload.base import (
    EarlyRead,
    Job,
    LoadJob,
    OffloadKey,
    ReqContext,
    StoreJob,
    WriteJob,
)
from kvoffload.recording import RequestLog

log = logging.getLogger(__name__)

MAX_FAILED_LOADS = 2
"""Failed loads of one request after which it is computed, whatever the tiers promise."""
IDLE_S = 1.0
"""After an idle time of this length the first lookups wait one step for the workers' reports."""


class KVOffloadScheduler(OffloadingConnectorScheduler):  # type: ignore[misc]  # untyped base
    """Decides, in the process of vLLM's scheduler; see the module.

    Args:
        spec: whose ``get_manager()`` returns a :class:`ManagerAdapter`.
        settings: ours.
        vllm_config, kv_cache_config: vLLM's.
    """

    _describes_chunks = False
    """Whether events tell the tokens of chunks."""

    def __init__(
        self, spec: Any, settings: VllmConfigSettings, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        check_role(vllm_config.kv_transfer_config)
        super().__init__(spec, vllm_config, kv_cache_config)
        self.adapter: ManagerAdapter = self.manager
        self.adapter.read_whole = self._read_whole
        tracker: Any = self._events_tracker
        if tracker.self_describing_enabled:
            self._events_tracker: Any = DescribedChunks(tracker)
            self._describes_chunks = True
        self._told: list[Any] = []
        """Events that were made before vLLM asks for some."""
        self.settings = settings
        self._workers: dict[int, WorkerInfo] = {}
        self.waits_for_workers = True
        """Whether the manager, the tiers and the table are not those of the workers yet."""
        self.tiers = RankTiers(settings, (), ())
        self._table = JobTable(self.adapter.manager)
        self._is_runner_v2 = bool(vllm_config.use_v2_model_runner)
        self._transfer_ids = itertools.count(canary.JOB - 1, -1)
        self.generations = Generations(self)
        self._vllm_config = vllm_config
        self.operators = Operators(self, vllm_config)
        self._stepped_s = self._moved_s = time.monotonic()
        self._awaits_reports = False
        """Until the next step: the stores may have changed in a time without reports."""
        self._meter = StepMeter(self.adapter.computed)
        self.aborted = deque[tuple[float, list[Collection[int]]]]()
        """When requests were aborted, and their block tables, as long as a step may load them."""
        self._explained = ExplainedRequests(self.adapter.explain)
        self._log = RequestLog(settings.record, self.config.kv_group_configs[0].tokens_per_chunk)
        takes_sessions = "session" in settings.client_hints
        self._params = ClientParams(self.adapter.count, takes_sessions)
        self._due = DueRequests(self.config)
        self._spans = open_spans(settings.otel_spans)

    def _meet(self, workers: Mapping[int, WorkerInfo]) -> None:
        """Note what some workers told of themselves; begin when all have."""
        if not self.waits_for_workers:
            return  # asked again in the step before the answers came
        self._workers.update(workers)
        if len(self._workers) == self.config.num_workers:
            self.meet_workers(info for _, info in sorted(self._workers.items()))

    def meet_workers(self, ranks: Iterable[WorkerInfo]) -> None:
        """Build the manager from all workers' messages; what tiers hold comes with their reports.

        Raises:
            ConfigError: sizes of chunks differ.
        """
        ranks = list(ranks)
        first_slot = max(rank.first_slot for rank in ranks)
        num_slots = min(rank.num_slots for rank in ranks)
        listed = frozenset.intersection(*(rank.listed for rank in ranks))
        numbers, generation = [rank.rank for rank in ranks], self.tiers.generation
        self.tiers = RankTiers(self.settings, numbers, listed, generation)
        slot_bytes = max(rank.slot_bytes for rank in ranks)
        payloads = {rank.payload_bytes for rank in ranks}
        if len(payloads) > 1:
            raise ConfigError("payload_bytes", payloads, "must be equal on all ranks")
        ours = self.config.blocks_per_chunk
        for rank in ranks:
            if (theirs := rank.facts.get("blocks_per_chunk", ours)) != ours:
                remedy = f"the worker of rank {rank.rank} chose {theirs}: set a number"
                raise ConfigError("blocks_per_chunk", ours, remedy)
        host = make_host_cache(
            self.settings.policy,
            num_slots,
            slot_bytes,
            payloads.pop(),
            first_slot,
            tenants=tenants_of(self.settings),
        )
        manager = make_manager(self.settings, host, self.tiers.tiers, slot_bytes)
        self.adapter.attach(manager, host.num_slots)
        self._table = JobTable(manager, len(ranks), self._spans)
        self.waits_for_workers = False
        for status in self._req_status.values():
            if not (status.req.is_finished() or status.req.num_computed_tokens):
                self._queue(status)
        text = "kvoffload: %d host slots on each of %d ranks; tiers: %s; namespace %s"
        tiers = ", ".join(tier.name for tier in self.tiers.tiers) or "none"
        log.info(text, host.num_slots, len(ranks), tiers, short(namespace(**ranks[0].facts)))

    # ---- a waiting request ----

    def on_new_request(self, request: Any) -> None:
        """See vLLM; a request whose hashes do not tell its content stays out of all tiers."""
        request.kv_transfer_params = self._params.of(request)
        if not self._req_status and self.tiers.are_listed:
            self._awaits_reports |= time.monotonic() - self._stepped_s > IDLE_S
        super().on_new_request(request)
        status = self._req_status[request.request_id]
        trusts = is_told(request) and is_trusted(request, self.settings, self._vllm_config)
        self.adapter.note_request(status.req_context, request.cache_salt, trusts)
        if not self.waits_for_workers:  # else when it has met them
            self._queue(status)

    def _queue(self, status: Any, was_preempted: bool = False) -> None:
        if status.req.skip_reading_prefix_cache:
            return  # as prompts whose logprobs are asked for: they are computed whole
        wished = self.adapter.hints(status.req_context).max_load_tokens
        if status.max_load_tokens != 0 and wished != 0:
            list_keys = partial(self._list_keys, status)
            self.adapter.request_queued(list_keys, status.req_context, was_preempted)

    def _list_keys(self, status: Any) -> Sequence[OffloadKey]:
        """List the chunks that a load of all of a prompt reads, head to tail."""
        status.update_offload_keys()
        if self._lookup_counts_room:
            keys: list[OffloadKey] = status.group_states[0].offload_keys
            return keys
        end = status.req.num_tokens - 1
        place = status.req_context.get_offload_key_position
        wanted = self._keys_to_load(status, 0, end - end % self._chunk_tokens)
        return sorted(wanted, key=lambda key: place(key) or 0)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM; the request waits no more."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        notes = notes_of(self._req_status[request.request_id].req_context)
        notes.known = notes.offered_s = None
        self.adapter.manager.request_admitted(ReqContext(request.request_id))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """See vLLM; answers "ask again" for a bounded time, or while another request loads."""
        if self._awaits_reports:
            return None, False
        status = self._req_status[request.request_id]
        if getattr(request, "resumable", False):  # old keys may have a token that it dropped
            for group in status.group_states:
                group.offload_keys = []
        notes = notes_of(status.req_context)
        if self._spans is not None and not notes.was_answered:
            self._spans.lookup_began(request.request_id)
        hints = self.adapter.hints(status.req_context)
        if (wished := hints.max_load_tokens) is not None:
            wanted = wished if max_num_new_tokens is None else min(wished, max_num_new_tokens)
            past = (num_computed_tokens + wanted) % self._chunk_tokens
            max_num_new_tokens = max(0, wanted - past)  # or a load would end inside a chunk
        found, is_async = self._find(request, num_computed_tokens, max_num_new_tokens)
        while found and not self._is_worth_loading(status, num_computed_tokens, found):
            found, is_async = self._find(request, num_computed_tokens, max_num_new_tokens)
        if found != 0:
            if notes.num_failed_loads >= MAX_FAILED_LOADS:
                # The stores promised these chunks twice and failed.
                found = None if status.transfer_jobs else 0
            elif self._is_stuck(notes) if found else self._waited_long(request):
                found = 0
        if found is not None:
            self._note_first_look(status, hints.explain, found)
        return found, bool(found) and is_async

    def _find(self, request: Any, start: int, most: int | None) -> tuple[int | None, bool]:
        """Look up a prompt, as far as host memory can take what is found."""
        status, size = self._req_status[request.request_id], self._chunk_tokens
        withheld_stores.keep_old_blocks(status)  # vLLM's half forgets the table at each look

        def has_room(end: int) -> bool | None:
            return self.adapter.manager.has_room(self._keys_to_load(status, start, end))

        found, is_async = super().get_num_new_matched_tokens(request, start, most)
        while found and not self._lookup_counts_room:
            # A load that host memory cannot take whole would fail, each time it is tried.
            end = last_with_room(start, start + found, size, has_room)
            if end is None:
                return None, False
            if end == start + found:
                break
            found, is_async = super().get_num_new_matched_tokens(request, start, end - start)
        return found, is_async

    def _is_worth_loading(self, status: Any, start: int, found: int) -> bool:
        keys = self._keys_to_load(status, start, start + found)
        context = notes_of(status.req_context).context
        return self.adapter.manager.promises.is_worth_loading(keys, found, context)

    def _note_first_look(self, status: Any, explain: bool, found: int) -> None:
        req_id, notes = status.req.request_id, notes_of(status.req_context)
        if notes.was_answered:
            return  # preempted since, or a load of it failed
        notes.was_answered = True
        if self._spans is not None:
            self._spans.lookup_ended(req_id, found)
        self._log.asked_for(status.group_states[0].offload_keys)
        if explain:
            groups = (group.offload_keys for group in status.group_states)
            self._explained.add(req_id, groups, status.req_context)

    @property
    def _chunk_tokens(self) -> int:
        return int(max(group.tokens_per_chunk for group in self.config.kv_group_configs))

    @property
    def _lookup_counts_room(self) -> bool:
        # Only where all chunks to be loaded are asked for in one call.
        first, *others = self.config.kv_group_configs
        return not others and first.sliding_window_size_in_chunks is None

    def _keys_to_load(self, status: Any, start: int, end: int) -> list[OffloadKey]:
        keys: list[OffloadKey] = []
        for group, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
            size = group.tokens_per_chunk
            wanted = state.offload_keys[start // size : -(-end // size)]
            window = group.load_window_size_in_chunks(end)
            keys.extend(wanted if window is None else wanted[-window:])
        return keys

    def _read_whole(self, req_context: Any) -> Iterable[OffloadKey]:
        """List a request's full chunks of the groups that read all of them."""
        status = self._req_status.get(req_context.req_id)
        if status is None:
            return
        for group, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
            if group.sliding_window_size_in_chunks is None:
                yield from state.offload_keys

    @property
    def patience_s(self) -> float:
        """How long a request waits for an answer, or for room for its load."""
        return self.settings.lookup_timeout_s + self.settings.load_timeout_s

    def _is_stuck(self, notes: RequestNotes) -> bool:
        """Return whether vLLM has no room for a load, and nothing runs that would make some.

        It keeps blocks for a request whose load failed until that runs, from its own next load too.
        With a prompt of more than half of the GPU's blocks no request would ever run.
        """
        now_s = time.monotonic()
        notes.offered_s = notes.offered_s or now_s
        if now_s - max(notes.offered_s, self._moved_s) < self.patience_s:
            return False
        self.adapter.count("lookup_timeout")
        return True

    def _waited_long(self, request: Any) -> bool:
        status = self._req_status[request.request_id]
        since_s: float | None = status.deferred_lookup_start_time
        if since_s is None or status.transfer_jobs:
            return False
        if time.monotonic() - since_s < self.patience_s:
            return False
        # Another request's load of its chunks ends by itself when none come; the time begins then.
        # One from host memory as well: vLLM's first step may take longer than all these limits.
        keys = [key for group in status.group_states for key in group.offload_keys]
        is_loading = not (self._chunks_being_loaded or set()).isdisjoint(keys)
        if is_loading or self.adapter.manager.is_fetching(keys):
            status.deferred_lookup_start_time = time.monotonic()
            return False
        self._maybe_observe_lookup_async_delay(status)
        self.adapter.count("lookup_timeout")
        return True

    def _maximal_prefix_lookup(
        self, keys: Any, req_context: Any, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        """Look up consecutive chunks in one call; see vLLM."""
        wanted: list[OffloadKey] = list(keys)
        hits, pending = self.adapter.lookup_prefix(wanted, req_context)
        for i in range(hits if self._events_tracker.self_describing_enabled else 0):
            self._events_tracker.record_lookup(req, group_config, start_chunk_idx + i, wanted[i])
        return None if pending else hits

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM; the result goes out with the request's output."""
        delayed, params = super().request_finished(request)
        status = self._req_status.get(request.request_id)
        if status is not None:
            if request.status is RequestStatus.FINISHED_ABORTED:
                self.aborted.append((time.monotonic(), withheld_stores.tables_of(status)))
            else:  # vLLM's half sees to aborted ones
                withheld_stores.bar_uncomputed(status)
        # vLLM's half ends it a step later.
        self.adapter.manager.request_admitted(ReqContext(request.request_id))
        return delayed, self._explained.finish(request.request_id, params)

    # ---- every step ----

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See vLLM; adds write-through, and begins every job in the table."""
        num_tokens = scheduler_output.total_num_scheduled_tokens
        num_requests = len(scheduler_output.num_scheduled_tokens)
        self._stepped_s = self._meter.scheduled(num_tokens, num_requests)
        if num_tokens or self._table:
            self._moved_s = self._stepped_s
        if self._awaits_reports:
            self._awaits_reports = False
            self.adapter.changes += 1
        for req_id in scheduler_output.preempted_req_ids or ():
            status = self._req_status.get(req_id)
            if status is not None and status.req.status == RequestStatus.PREEMPTED:  # still
                self._queue(status, was_preempted=True)
        manager = self.adapter.manager
        waiting = manager.waiting
        if waiting.requests or waiting.claims.leaving or manager.coming.times:
            self.adapter.serve_queue()
        if self._block_id_to_pending_jobs or scheduler_output.finished_req_ids:
            # Stores read blocks of ended requests, of which the last ones are made below.
            self._current_batch_allocated_block_ids.update(self._due.blocks_given(scheduler_output))
        due = self._due.of_step(scheduler_output, has_orders(self))
        if due is None:
            return IDLE_STEP
        withheld_stores.forget_old_tables(self, scheduler_output)
        withheld_stores.bar_changed_adapters(self, due)
        output = withheld_stores.without_reloading(self, withheld_stores.without_barred(self, due))
        theirs = super().build_connector_meta(output)
        self._due.visited(due, self._req_status)
        withheld_stores.offer_refused(self)
        orders = StepMetadata(theirs.load_jobs, theirs.store_jobs, theirs.jobs_to_flush)
        self._begin_jobs(orders)
        if writes_before_flush(scheduler_output, self._is_runner_v2):
            overwritten = self._table.fail_stores(orders.jobs_to_flush or ())
            self.adapter.manager.counters["stores_overwritten"] += overwritten
        self._order_tier_jobs(orders)
        stores = bool(orders.store_jobs or orders.write_through)
        orders.generation = self.generations.take_order(stores)
        orders.emptied = self.operators.take_emptied()
        orders.questions = self.tiers.take_questions()
        orders.awaited = waiting.needed.take()
        orders.returns = manager.returns.take_told()
        orders.asks_workers = self.waits_for_workers
        return orders

    def _build_store_jobs(self, scheduler_output: Any) -> Any:
        withheld_stores.skip_holed_chunks(self, scheduler_output)
        return super()._build_store_jobs(scheduler_output)

    def _begin_jobs(self, orders: StepMetadata) -> None:
        jobs = self.adapter.take_jobs()
        for job_id, load in orders.load_jobs.items():
            self._table.begin(job_id, jobs[load.src_spec.job_id])
        for job_id, store in orders.store_jobs.items():
            self._table.begin(job_id, jobs[store.dst_spec.job_id])

    def _order_tier_jobs(self, orders: StepMetadata) -> None:
        for transfer in self.adapter.manager.take_transfers():
            job_id = next(self._transfer_ids)
            if isinstance(transfer, EarlyRead):
                orders.early_reads[job_id] = transfer.ends
            else:
                orders.write_through[job_id] = transfer.ends
            self._table.begin(job_id, transfer)

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while workers have to report, also at first, or someone asks."""
        if self.waits_for_workers or self.generations.order or len(self._table):
            return True
        if self.adapter.stats.is_midway or self.tiers.is_waiting:
            return True
        return bool(self.operators.orders.order or super().has_pending_push_work())

    def step_ended(self) -> None:
        """Note that vLLM has taken in the output of a step; between two is time for operators."""
        self._meter.ended()
        while self.aborted and self.aborted[0][0] < self._meter.oldest_s:
            self.aborted.popleft()  # other requests have the blocks by and by
        if self.operators.orders.order is not None:
            self.operators.orders.step()

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the workers' report, first our part and then vLLM's."""
        if isinstance(report := connector_output.kv_connector_worker_meta, WorkerReport):
            self._take_in(report)
        super().update_connector_output(connector_output)

    def _take_in(self, report: WorkerReport) -> None:
        self.adapter.changes += 1
        self._meet(report.workers)
        self.operators.take_answers(report.emptied)
        self.generations.were_loaded |= report.has_new_weights
        for job in report.answer(self._table):
            self._note(job)
        for tier, removals in report.removals:
            if presence := self.tiers.presences.get(tier):
                presence.removed(removals)
            self._explained.removed(removals)
        # Last: the stores are as they were when the report was made.
        self.tiers.apply(report.presence, report.answers)
        self.tiers.note_down(report.down)
        self.adapter.worker_figures.update(report.figures)

    def _note(self, job: Job) -> None:
        ok = job.ok
        if isinstance(job, WriteJob):
            if not job.stale and (presence := self.tiers.presences.get(job.tier.name)):
                presence.written(itertools.compress(job.keys, ok))
            return
        if isinstance(job, StoreJob) and job.stale and job.context is not None:
            withheld_stores.offer_stale(self, job.context.req_id, job.keys)
            return
        if not isinstance(job, LoadJob):
            return
        tokens = hit_tokens(job, ok, self.config.kv_group_configs)
        self.adapter.manager.figures.hit_tokens.update(tokens)
        if not (len(job.keys) == job.num_asked and all(ok)):
            req_id = job.context.req_id if job.context else ""
            status = self._req_status.get(req_id)
            if status is not None and not status.finished_signaled:
                notes_of(status.req_context).num_failed_loads += 1
                self._explained.load_failed(req_id, job)
                withheld_stores.offer_lost(self, status)

    # ---- the rest of an engine's life ----

    def reset_cache(self) -> None:
        """Empty host memory; invalidate every tier too, unless the weights never change.

        vLLM resets when it falls asleep and after new weights, and does not say which it is.
        """
        self.empty_host_memory()
        if not self.settings.fixed_weights:
            self.generations.begin()

    def empty_host_memory(self) -> None:
        """Empty it between two steps; what is computing now is not stored any more.

        vLLM's half asserts that no reset came before in the same time, whose jobs are to be flushed
        yet. An update of the weights is one, and the user's reset comes behind it.
        """
        earlier = set(self._current_batch_jobs_to_flush)
        self._current_batch_jobs_to_flush.clear()
        super().reset_cache()
        self._current_batch_jobs_to_flush.update(earlier)
        withheld_stores.bar_computing(self)
        self._due.again(self._req_status)
        self._table.mark_stale()
        self._tell_emptied()

    def renew_tiers(self, generation: str) -> None:
        """Find nothing in any tier of what was stored before this generation."""
        self.tiers.renew(generation)
        self.adapter.manager.replace_tiers(self.tiers.tiers)
        self._tell_emptied()

    def _tell_emptied(self) -> None:
        """Make the events of what was removed, before chunks of the same keys are described."""
        if self._describes_chunks:
            self._told.extend(super().take_events())

    def take_events(self) -> Iterable[Any]:
        """See vLLM."""
        told, self._told = self._told, []
        return itertools.chain(told, super().take_events())
