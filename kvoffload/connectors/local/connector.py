"""The connector for engines whose scheduler and worker share a process.

Read this connector first: vLLM's sends the same verbs through more processes. An engine calls, from
one thread:

=============================  =====================================================================
when                           what
=============================  =====================================================================
a request begins to wait       ``request_queued``: what it will need stays (optional)
a waiting request is looked at ``get_num_new_matched_tokens``: how much can be loaded
its blocks are allocated       ``update_state_after_alloc``: the load begins
every step, also when idle     ``poll``: which loads ended; what was stored goes on to tiers
before a forward pass          ``before_forward``: waits for copies of blocks about to be written
after a forward pass           ``after_forward``: newly full chunks are stored
a request is preempted         ``request_preempted``, if it will be admitted again
a request ends in any way      ``request_finished``
=============================  =====================================================================

Nothing here does I/O or raises because of a store; a failed load is an outcome with fewer tokens.
"""

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from msgspec.structs import replace

from kvoffload.config import OffloadConfig
from kvoffload.config_sources import read_config
from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.chunk_size import blocks_of
from kvoffload.connectors.jobs import UseCounter
from kvoffload.connectors.local import engine_arguments as given
from kvoffload.connectors.local.chunking import (
    BlockTables,
    ChunkGroups,
    check_facts,
    choose_blocks_per_chunk,
    cut_load,
    kinds_of_groups,
    layout_facts,
    to_load,
    to_store,
)
from kvoffload.connectors.local.live_cache import LocalOperators
from kvoffload.connectors.local.prefix_search import PrefixSearch
from kvoffload.connectors.local.request_states import (
    LoadBackoff,
    OffloadRequest,
    RequestState,
    RequestStates,
    reference,
)
from kvoffload.connectors.local.transfers import LoadOutcome, LoadRange, Transfers
from kvoffload.connectors.spans import open_spans
from kvoffload.core.hashing import BlockHasher
from kvoffload.core.interface import KVCacheConfig
from kvoffload.identity import Fact
from kvoffload.metrics.endpoint import serve_metrics
from kvoffload.metrics.samples import Sample, as_data
from kvoffload.offload.base import CanonicalKVCaches, OffloadingEvent, OffloadKey, ReqContext
from kvoffload.recording import RequestLog
from kvoffload.transfer.layout import ChunkLayout

__all__ = ["BlockTables", "LoadOutcome", "LocalConnector", "OffloadRequest"]

log = logging.getLogger(__name__)

MOST_OUTBID = 8
"""Objects of one name that are remembered, as another one was promised tokens after them."""


class LocalConnector:
    """Attaches offloading to an engine in the same process; see the module's table of calls.

    Args:
        config: settings; or plain data, to which the environment and a file may add
            (:mod:`kvoffload.config_sources`).
        kv_caches: canonical views of the engine's KV cache; the engine owns the memory and keeps it
            until :meth:`close`.
        block_size: tokens that one of a request's block hashes stands for. This is a GPU block;
            with several KV cache groups, the greatest common divisor of their blocks.
        facts: the facts that decide the meaning of the bytes and that only the engine has: model,
            weights (:func:`kvoffload.folder_digest`), dtype, attention backend... Never empty. The
            connector adds the layout and the formats of the groups.
        kv_cache_config: the cache's groups; None for one group of full attention. In block tables,
            block 0 is then the null block, which is never stored or loaded.
        hasher: of the requests' block hashes; with it, ``kvoffload cache lookup`` finds prompts.

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
        kv_cache_config: KVCacheConfig | None = None,
        hasher: BlockHasher | None = None,
    ) -> None:
        self.config = config if isinstance(config, OffloadConfig) else read_config(config)
        given.check_hashes(block_size, hasher)
        given.check_groups(kv_cache_config)
        check_facts(facts, self.config)
        self.block_size = block_size
        kinds = kinds_of_groups(block_size, kv_cache_config)
        given.check_caches(kv_caches, kinds)
        if self.config.blocks_per_chunk == "auto":
            number = choose_blocks_per_chunk(kinds, kv_caches)
            self.config = replace(self.config, blocks_per_chunk=number)
        self._groups = ChunkGroups(kinds, blocks_of(self.config))
        self._has_nulls = kv_cache_config is not None
        layout = ChunkLayout(kv_caches, [group.per_chunk for group in self._groups.all])
        self._num_blocks = layout.num_blocks
        self._log = RequestLog(self.config.record, self._groups.offloaded[0].chunk_tokens)
        parts_of_form = self._groups, layout, kv_cache_config, facts
        meaning = {**facts, **layout_facts(self.config, block_size, *parts_of_form)}
        self._spec = TieredOffloadingSpec(self.config, layout.slot_bytes, meaning, layout)
        self._spans = None
        try:
            self._spans = open_spans(self.config.otel_spans)
            self._manager = self._spec.get_manager()
            self._uses = UseCounter(self._manager)
            self._worker = self._spec.open_engine(kv_caches)
            self._requests = RequestStates(self._groups)
            # An engine that can use any part of a prefix goes on after one short load.
            self._short_loads = LoadBackoff(tolerated=int(self._groups.keeps_prefixes))
            parts = self._manager, self._worker, self._groups, self._requests, self._short_loads
            self._transfers = Transfers(*parts, self._spans)
            self._metrics = serve_metrics(self.config, self._samples)
            seen = self._transfers, self._groups, hasher, str(facts.get("model", ""))
            self._operators = LocalOperators(self._spec, self._manager, *seen)
        except BaseException:
            self._spec.close()
            if self._spans is not None:
                self._spans.close()
            raise

    # ---- a waiting request ----

    def request_queued(self, request: OffloadRequest) -> None:
        """Keep in host memory what a request will load, until it is admitted or ends.

        Call it when the request begins to wait, also after a preemption: then it comes first in the
        queue. Its attribute ``cache_salt``, if it has one, names the tenant. One tenant gets at
        most half of ``waiting_share`` while requests of other tenants wait.
        """
        state = self._requests.of(request)
        if self._manager.hints(state.context).max_load_tokens != 0:
            list_keys = partial(self._keys_to_load, request, state)
            was_preempted = self._uses.has_counted(request.request_id)
            self._manager.request_queued(list_keys, state.context, was_preempted)

    def _keys_to_load(self, request: OffloadRequest, state: RequestState) -> Sequence[OffloadKey]:
        """List the chunks that a load of all of a prompt reads, head to tail."""
        groups = self._groups
        groups.extend_keys(state.keys, request.block_hashes)
        if groups.keeps_prefixes:
            return state.keys[groups.offloaded[0].index]
        return groups.used(state.keys, groups.aligned(request.num_tokens - 1))

    def get_num_new_matched_tokens(
        self, request: OffloadRequest, num_computed_tokens: int
    ) -> int | None:
        """Say how many tokens after the engine's own prefix hit can be loaded.

        Args:
            request: a request about to be admitted.
            num_computed_tokens: what GPU memory has already; whole blocks.

        Returns:
            Whole blocks, never the prompt's last token (the engine must compute something); 0 for
            nothing; None to ask again at the next step. None lasts at most ``lookup_timeout_s``, or
            as long as a load of these chunks, for this name, or of a full tier is in flight.
        """
        name, look_up = request.request_id, partial(self._look_up, request, num_computed_tokens)
        found = look_up() if self._spans is None else self._spans.of_lookup(name, look_up)
        self._manager.request_answered(ReqContext(name), found is None)
        return found

    def _look_up(self, request: OffloadRequest, num_computed_tokens: int) -> int | None:
        if self._transfers.will_name(request.request_id):
            return None  # poll could not say which of two loads has ended
        start = given.token_count("num_computed_tokens", num_computed_tokens)
        state, groups = self._requests.of(request), self._groups
        if state.promised and (before := state.asked()) is not None and before is not request:
            state.outbid = [*state.outbid, state.asked][-MOST_OUTBID:]
        state.asked, state.promised = reference(request), 0
        if start % groups.alignment or self._short_loads.declined(request.request_id):
            return 0
        state.start = start
        limit = request.num_tokens - 1
        most = self._manager.hints(state.context).max_load_tokens
        if most is not None:
            limit = min(limit, start + most)
        if groups.aligned(limit) <= start:
            return 0
        self._groups.extend_keys(state.keys, request.block_hashes)
        end, pending = self._search(state, limit, waits=True)
        if pending:
            now_s = time.monotonic()
            # Another request's load of them ends by itself when none arrive; the time begins then.
            if state.pending_since_s is None or self._manager.is_fetching(chain(*state.keys)):
                state.pending_since_s = now_s
            if now_s - state.pending_since_s < self.config.lookup_timeout_s:
                return None
            end, _ = self._search(state, limit, waits=False)
        state.pending_since_s = None
        state.promised = end - start
        return end - start

    def _search(self, state: RequestState, limit: int, waits: bool) -> tuple[int, bool]:
        """Find how far a prompt can be loaded; without ``waits``, what is not known is a miss."""
        asked = self._manager, state.context, self._groups, state.keys, state.start
        return PrefixSearch(*asked, waits=waits).longest(limit)

    def update_state_after_alloc(
        self, request: OffloadRequest, block_ids: BlockTables, num_external_tokens: int
    ) -> None:
        """Begin loading into blocks just allocated.

        This waits until no store of the blocks' last owner reads them.
        The request must not be scheduled before :meth:`poll` has named it. Call it in the same step
        as the lookup that promised these tokens.

        Args:
            request: as at the lookup.
            block_ids: for each KV cache group the request's blocks from its first token on.
            num_external_tokens: what the lookup returned, or fewer whole blocks of all groups.
        """
        state = self._requests.of(request)
        state.has_kv = True
        try:
            if not num_external_tokens:
                return
            if state.asked() is not request and any(each() is request for each in state.outbid):
                self._transfers.refuse(state)
                return
            promised = given.check_promise(self._groups, num_external_tokens, state.promised)
            end = state.start + promised
            given.check_tables(block_ids, self._groups, end)
            self._groups.extend_keys(state.keys, request.block_hashes)
            spans = to_load(self._groups, block_ids, state.start, end, self._has_nulls)
            checked = block_ids, self._num_blocks
            blocks = [given.check_blocks(span, state.keys, *checked) for span in spans]
            if len({*chain.from_iterable(blocks)}) < sum(map(len, blocks)):
                remedy = "names a block twice: all groups number the blocks of one pool"
                raise given.wrong("block_ids", block_ids, remedy)
            self._count_use(state, end)
            keys: list[OffloadKey] = []
            for group, _, chunks in spans:
                keys += state.keys[group.index][chunks.start : chunks.stop]
            job = self._manager.begin_load(keys, state.context)
            if not job.keys:
                self._transfers.refuse(state)
                return
            target = cut_load(spans, blocks, job.spec.block_ids)
            self._transfers.begin_load(job, LoadRange(state, state.start, end, spans), target)
        finally:
            self._manager.request_admitted(state.context)

    # ---- every step ----

    def poll(self) -> list[LoadOutcome]:
        """Take in what has ended and start what follows from it; never blocks.

        Returns:
            The loads that ended since the last call. For each the engine marks the loaded prefix as
            computed, and computes the rest into the same blocks. If the request had ended
            meanwhile, the engine frees the blocks.
        """
        if self._operators.orders.order is not None:
            self._operators.orders.step()
        waiting = self._manager.waiting
        if waiting.requests or waiting.claims.leaving or self._manager.coming.times:
            self._manager.serve_queue()
        if waiting.needed.to_tell and self._spec.io is not None:
            self._spec.io.awaits(waiting.needed.take())
        if self._manager.returns.to_tell and self._spec.io is not None:
            self._spec.io.expects(self._manager.returns.take_told())
        return self._transfers.poll()

    def before_forward(self, blocks: Iterable[int]) -> None:
        """Wait until no transfer uses blocks that the coming forward pass writes.

        A store whose copy is in flight would otherwise store what the pass writes there. Blocks are
        seldom reused while their copy is in flight, so this rarely waits at all.

        Args:
            blocks: their numbers, of all groups in one flat sequence.
        """
        self._transfers.wait_for_blocks(given.block_numbers(blocks, self._num_blocks))

    def after_forward(
        self, request: OffloadRequest, block_ids: BlockTables, num_computed_tokens: int
    ) -> None:
        """Offer the chunks that have become full for storing; ``block_ids`` as at the load."""
        given.check_tables(block_ids, self._groups, num_computed_tokens)
        self._short_loads.computed(request.request_id)
        state = self._requests.of(request)
        if not state.has_kv:  # admitted without a load
            state.has_kv = True
            self._manager.request_admitted(state.context)
        if state.barred:
            return
        pieces = to_store(
            self._groups, block_ids, state.next_store, num_computed_tokens, self._has_nulls
        )
        if not pieces:
            return
        self._groups.extend_keys(state.keys, request.block_hashes)
        given.check_pieces(pieces, self._groups, state.keys, block_ids, self._num_blocks)
        self._count_use(state, 0)
        piece_of = {state.keys[piece.group][piece.chunk]: piece for piece in pieces}
        output = self._manager.prepare_store(list(piece_of), state.context)
        if output is None:
            return  # offered again with the next chunk
        for group in self._groups.offloaded:
            state.next_store[group.index] = num_computed_tokens // group.chunk_tokens
        state.refused = output.refused_keys
        for key in output.refused_keys:  # offered again after the next pass
            piece = piece_of[key]
            state.next_store[piece.group] = min(state.next_store[piece.group], piece.chunk)
        if output.job is None:
            return
        stored = [piece_of[key] for key in output.job.keys]
        self._transfers.begin_store(output.job, stored, block_ids)

    def request_preempted(self, request: OffloadRequest) -> bool:
        """Forget a request that gave up its blocks; return what :meth:`request_finished` does.

        It was counted as a use of its chunks, and is not counted when it is admitted again.
        """
        return self._forget(request, again=True)

    def request_finished(self, request: OffloadRequest) -> bool:
        """Forget a request that ended or was aborted; harmless if unknown.

        Returns:
            True if a load may still write its blocks: free them only when :meth:`poll` names it.
            It does so once, however often this is called. False: poll does not name it.
        """
        return self._forget(request)

    # ---- the rest of an engine's life ----

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all stores and write-throughs have ended; False if some have not in time.

        Outcomes of loads that end meanwhile are kept for the next :meth:`poll`.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            self._transfers.take_in()
            if not self._transfers.jobs:
                return True
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.001)

    def reset_cache(self) -> None:
        """Forget everything offloaded, on every tier, as after a change of the weights.

        Waits for transfers in flight. Requests that run store nothing more. Loads that ended but
        were not polled bring nothing: they are older than the reset. The tiers' new generation
        belongs to this process; a restarted engine finds what the facts name.
        """
        self.flush()
        self._transfers.mark_stale()
        self._manager.reset_cache()
        self._spec.renew(self._manager, generation=uuid.uuid4().hex)

    def close(self, timeout_s: float = 5.0) -> None:
        """End transfers in flight, as far as time allows, and release threads and memory."""
        if not self.flush(timeout_s):
            log.warning("%d transfers had not ended at shutdown", len(self._transfers.jobs))
        self._operators.close()
        if self._metrics is not None:
            self._metrics.close()
        self._spec.close(timeout_s)
        if self._spans is not None:
            self._spans.close()
        self._manager.shutdown()

    def take_events(self) -> list[OffloadingEvent]:
        """Return what became resident, or ceased to be, since the last call."""
        return self._manager.take_events()

    def stats(self) -> dict[str, Any]:
        """Return all metrics as plain data, by name and then by label, and some texts.

        See ``docs/reference/metrics.md``.
        """
        spec = self._spec
        return {
            **as_data(self._samples()),
            "namespace": spec.stores.namespace,
            "slot_bytes": spec.slot_bytes,
            "copies": spec.copies,
            "io_server": spec.io.server if spec.io else "",
        }

    def explain(self, request: OffloadRequest) -> list[list[str]]:
        """Say where each chunk of a request is or why it is not there, for each KV cache group.

        See :meth:`kvoffload.offload.base.Manager.explain`; for people, not for every step.
        """
        known = self._requests.find(request)
        state = known or self._requests.of(request)
        self._groups.extend_keys(state.keys, request.block_hashes)
        if not known:
            self._requests.remove(state)
        return [self._manager.explain(of_group, state.context) for of_group in state.keys]

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Report how long tokens of prompts took to compute: slower loads are then declined."""
        self._manager.promises.prefilled(given.token_count("num_tokens", num_tokens), seconds)

    # ---- inside ----

    def _samples(self) -> Iterator[Sample]:
        """Return the samples of all metrics, on any thread."""
        return chain(self._manager.figures.samples(), self._worker.figures.samples())

    def _forget(self, request: OffloadRequest, *, again: bool = False) -> bool:
        self._short_loads.gave_up(request.request_id)
        groups = self._groups
        state = self._requests.find_to_end(request) or self._requests.of(request)
        self._requests.remove(state)
        self._uses.end(state.context, lambda: groups.from_head_to_tail(state.keys), again=again)
        if state.refused:
            self._manager.drop(state.refused)
        return self._transfers.request_ended(state)

    def _count_use(self, state: RequestState, loaded_end: int) -> None:
        """Count the request as a use of its chunks; of windows, of the chunks it reads."""
        groups = self._groups
        counted = self._uses.count(state.context, partial(groups.used, state.keys, loaded_end))
        if counted and self.config.record:
            self._log.asked_for(state.keys[groups.offloaded[0].index])
