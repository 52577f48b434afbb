"""Which requests compute how many tokens in the next step: continuous batching, first come first.

Requests run in chunks of at most the step's token budget. When blocks run out, the youngest running
request gives its blocks up and waits again; the oldest always goes on, so every request ends.
"""

from bisect import insort
from collections.abc import Mapping
from operator import attrgetter

from kvoffload.core.groups import MambaGroup
from kvoffload.core.manager import KVCacheManager
from kvoffload.demo.engine_request import EngineRequest, State, Work
from kvoffload.demo.offloading import Connector

GPU = "GPU"
_by_arrival = attrgetter("arrival")


class Scheduler:
    """Decides each step's work; holds the requests from add() until they are finished."""

    def __init__(
        self,
        manager: KVCacheManager,
        connector: Connector,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._manager = manager
        self._connector = connector
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._stops_at_blocks = any(isinstance(g, MambaGroup) for g in manager.groups)
        # Both in order of arrival: a preempted request stays ahead of those that came after it.
        self._waiting: list[EngineRequest] = []
        self._running: list[EngineRequest] = []
        # With the aborted ones among them, whose blocks a load still writes.
        self._loading: dict[str, EngineRequest] = {}

    @property
    def has_requests(self) -> bool:
        """Whether anything is left to do, the loads of aborted requests included."""
        return bool(self._waiting or self._running or self._loading)

    def is_loading(self, request_id: str) -> bool:
        """Return True if a load of that request, perhaps an aborted one, is in flight."""
        return request_id in self._loading

    def add(self, request: EngineRequest) -> None:
        insort(self._waiting, request, key=_by_arrival)
        self._connector.request_queued(request)

    def schedule(self) -> list[Work]:
        """Choose the next step's work and give it blocks; empty if all there is must wait."""
        work: list[Work] = []
        budget = self._max_num_batched_tokens
        waiting_before = len(self._waiting)
        # A copy, oldest first. A preempted request is younger than the one that is served, so this
        # loop has not come to it yet.
        for request in list(self._running):
            if budget == 0:
                break
            count = self._count(request, request.num_computed_tokens, budget)
            if request.state is State.RUNNING and self._find_blocks(request, count):
                work.append(self._work(request, count))
                budget -= count
        if len(self._waiting) == waiting_before:  # else blocks are short: admit no request
            self._admit(work, budget)
        return work

    def end_loads(self) -> None:
        """Take up the requests whose load has ended: wholly, in part, or with nothing."""
        for outcome in self._connector.poll():
            request = self._loading.pop(outcome.request_id)
            if request.state is State.FINISHED:
                self._manager.free(request)
                continue
            request.num_computed_tokens += outcome.num_loaded_tokens
            request.num_undelivered_tokens += (
                request.num_promised_tokens - outcome.num_loaded_tokens
            )
            if not outcome.ok and not self._manager.keeps_all_blocks:
                # Its tables were laid out for all it was promised: begin again without it.
                self._give_up_blocks(request)
                continue
            self._manager.cache_blocks(request, request.num_computed_tokens)
            self._run(request, outcome.tokens_by_medium)

    def finish(self, request: EngineRequest, reason: str) -> None:
        """End a request in whatever state it is and give its blocks back."""
        state, request.state = request.state, State.FINISHED
        request.finish_reason = reason
        load_goes_on = self._connector.request_finished(request)
        if state is State.WAITING:
            self._waiting.remove(request)
        elif state is State.RUNNING:
            self._running.remove(request)
            self._manager.free(request)
        elif not load_goes_on:
            del self._loading[request.request_id]
            self._manager.free(request)

    def _find_blocks(self, request: EngineRequest, count: int) -> bool:
        """Give a running request blocks for ``count`` tokens; False if it had to give way."""
        while self._manager.allocate_slots(request, count) is None:
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: EngineRequest) -> None:
        self._running.remove(request)
        request.num_preemptions += 1
        self._give_up_blocks(request)

    def _give_up_blocks(self, request: EngineRequest) -> None:
        self._connector.request_preempted(request)
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.state = State.WAITING
        self.add(request)

    def _admit(self, work: list[Work], budget: int) -> None:
        """Begin waiting requests, in order, while there is budget and room."""
        for request in list(self._waiting):
            if budget == 0 or len(self._running) + len(self._loading) >= self._max_num_seqs:
                return
            hit_blocks, num_hits = self._manager.get_computed_blocks(request)
            external = self._connector.get_num_new_matched_tokens(request, num_hits)
            if external is None:
                continue  # a tier has not answered yet: ask again next step
            count = 0 if external else self._count(request, num_hits, budget)
            blocks = self._manager.allocate_slots(
                request,
                count,
                num_new_computed_tokens=num_hits,
                new_computed_blocks=hit_blocks,
                num_external_computed_tokens=external,
                # Other requests may find loaded blocks only once they have arrived.
                delay_cache_blocks=external > 0,
            )
            if blocks is None:
                return
            self._waiting.remove(request)
            request.num_computed_tokens = num_hits
            if external:
                self._load(request, external)
            else:
                self._run(request, {})
                work.append(self._work(request, count))
                budget -= count

    def _load(self, request: EngineRequest, num_external_tokens: int) -> None:
        request.state = State.LOADING
        request.num_promised_tokens = num_external_tokens
        self._loading[request.request_id] = request
        block_ids = self._manager.get_block_ids(request.request_id)
        self._connector.update_state_after_alloc(request, block_ids, num_external_tokens)

    def _run(self, request: EngineRequest, loaded: Mapping[str, int]) -> None:
        request.state = State.RUNNING
        insort(self._running, request, key=_by_arrival)
        if not request.num_preemptions:
            on_gpu = request.num_computed_tokens - sum(loaded.values())
            request.cached_tokens = {GPU: on_gpu, **loaded}

    def _work(self, request: EngineRequest, count: int) -> Work:
        tables = self._manager.get_block_ids(request.request_id)
        start = request.num_computed_tokens
        return Work(request, start, start + count, tuple(map(tuple, tables)))

    def _count(self, request: EngineRequest, num_computed_tokens: int, budget: int) -> int:
        """How many tokens to compute next.

        A recurrent layer's state can be shared only where a step ends with a block. So such models
        stop at the last block boundary within reach.
        """
        count = min(request.num_tokens - num_computed_tokens, budget)
        end = num_computed_tokens + count
        boundary = end - end % self._manager.block_size
        if self._stops_at_blocks and num_computed_tokens < boundary:
            count = boundary - num_computed_tokens
        return count
