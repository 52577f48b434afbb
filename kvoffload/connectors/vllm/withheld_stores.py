"""What vLLM's half would take wrongly, and the chunks that it is to offer once more.

Stores of wrong bytes are withheld, and so are loads that it takes for stores.
"""

from collections.abc import Collection, Set
from copy import copy
from typing import Any

from kvoffload.connectors.vllm.engine_weights import told_of
from kvoffload.connectors.vllm.manager_adapter import notes_of
from kvoffload.offload.base import OffloadKey

# ---- Withheld ----


def skip_holed_chunks(half: Any, scheduler_output: Any) -> None:
    """Let vLLM's scheduler half store no chunk of which a block is freed.

    It judges a chunk by its last block, and leaves freed blocks, whose id is 0, out of a store. The
    worker would take the blocks behind them in their place. A chunk without its last block is
    passed over: so are these.

    Args:
        half: vLLM's scheduler half, after it has updated its requests.
        scheduler_output: of the step.
    """
    size, finished = half.config.blocks_per_chunk, scheduler_output.finished_req_ids or ()
    if size == 1 or not half._sliding_window_groups:
        return
    for req_id in (*scheduler_output.num_scheduled_tokens, *finished):
        status = half._req_status.get(req_id)
        for index in half._sliding_window_groups if status is not None else ():
            group = status.group_states[index]
            # The tail of an ended request may be stored from an earlier chunk on.
            first = 0 if req_id in finished else group.next_stored_chunk_idx * size
            for start in range(first, len(group.block_ids) - size + 1, size):
                if 0 in group.block_ids[start : start + size]:
                    group.block_ids[start + size - 1] = 0


def forget_old_tables(half: Any, scheduler_output: Any) -> None:
    """Let vLLM's scheduler half forget block tables that do not hold any more.

    A new request is told with its whole block table. A streaming session comes as a new request
    with each of its segments, and vLLM 0.32 appends each table to the last one. Chunks of the
    session would be stored from the blocks of its beginning.

    A preempted request has no blocks. It may end by a token that was in flight, and would then
    store its last chunk from a block that another request fills.

    Args:
        half: vLLM's scheduler half, before it updates its requests.
        scheduler_output: of the step, with all of its requests.
    """
    for req_id in (
        *(scheduler_output.preempted_req_ids or ()),
        *(new.req_id for new in scheduler_output.scheduled_new_reqs),
    ):
        if (status := half._req_status.get(req_id)) is not None:
            keep_old_blocks(status)
            for group in status.group_states:
                group.block_ids.clear()


def keep_old_blocks(status: Any) -> None:
    """Note a request's blocks before its block table is forgotten; see :func:`fail_after`.

    Args:
        status: vLLM's state of the request, perhaps without a table by now.
    """
    if blocks := _blocks(status):
        notes_of(status.req_context).old_blocks = blocks


def bar_computing(half: Any) -> None:
    """Let the requests that were computing at a reset store nothing from now on.

    Their KV cache is older than the reset, and what they compute depends on it.

    vLLM's half would offer their chunks again, by block tables that may be stale. A preempted
    request has no KV cache, and computes all of it again.

    Args:
        half: vLLM's scheduler half.
    """
    for status in half._req_status.values():
        if status.req.num_computed_tokens:
            status.max_offload_tokens = 0


def fail_after(half: Any, block_ids: Set[int], kv_cache: Any) -> None:
    """Let stores in flight fail whose requests computed on blocks that were not loaded.

    Another connector, in ``MultiConnector``, may load within a step. vLLM tells of a failure at its
    end. Then it computes the request again, in the same blocks.

    It does not look at requests that were preempted or ended meanwhile. Their blocks stay in its
    prefix cache: they would be reused, and stored.

    Args:
        half: our scheduler half.
        block_ids: what any connector failed to load.
        kv_cache: vLLM's ``KVCacheManager``.
    """
    for _, tables in half.aborted:
        if not block_ids.isdisjoint(blocks := set[int]().union(*tables)):
            kv_cache.evict_blocks(blocks)
    for status in half._req_status.values():
        old, now = notes_of(status.req_context).old_blocks, _blocks(status)
        given_up = old | now if status.req.is_finished() else old
        if not block_ids.isdisjoint(given_up):
            kv_cache.evict_blocks(given_up)
        if not block_ids.isdisjoint(old | now):
            half._table.fail_stores(status.transfer_jobs)


def tables_of(status: Any) -> list[Collection[int]]:
    """Return the blocks that a request has, and those that it had; copies nothing.

    Args:
        status: vLLM's state of the request.
    """
    tables: list[Collection[int]] = [group.block_ids for group in status.group_states]
    return [*tables, notes_of(status.req_context).old_blocks]


def _blocks(status: Any) -> set[int]:
    return set[int]().union(*(group.block_ids for group in status.group_states))


def bar_uncomputed(status: Any) -> None:
    """Let an ended request store no more of its prompt than it has computed.

    vLLM's half takes a prompt for computed when an error ends its request.

    Args:
        status: vLLM's state of the request.
    """
    computed, most = status.req.num_computed_tokens, status.max_offload_tokens
    if computed < status.req.num_prompt_tokens:
        status.max_offload_tokens = computed if most is None else min(most, computed)


def bar_changed_adapters(half: Any, scheduler_output: Any) -> None:
    """Let requests store nothing more whose adapter changed since its content was hashed.

    vLLM reads an adapter again when it has left memory: it may compute with the new files under the
    hashes of the old ones.

    Args:
        half: vLLM's scheduler half.
        scheduler_output: of the step; requests that may store in it.
    """
    names = *scheduler_output.num_scheduled_tokens, *(scheduler_output.finished_req_ids or ())
    adapted = [
        status
        for status in map(half._req_status.get, names)
        if status is not None and status.req.lora_request and status.max_offload_tokens != 0
    ]
    # Looked at once each: a look is some system calls, and in models with windows or states all
    # requests of a step are here.
    for status, told in zip(adapted, told_of(each.req for each in adapted), strict=True):
        if not told:
            status.max_offload_tokens = 0


def without_barred(half: Any, scheduler_output: Any) -> Any:
    """Return vLLM's output of a step without the states beyond the limits of their requests.

    There vLLM takes a limit of 0 tokens for none, and ends at a state within a block that is beyond
    any other limit.

    Args:
        half: vLLM's scheduler half.
        scheduler_output: of the step; not changed, because other connectors read it.
    """
    state = scheduler_output.kv_connector_block_state
    handoffs = state.boundary_state_offloads if state else None
    if not handoffs:
        return scheduler_output
    output, output.kv_connector_block_state = copy(scheduler_output), copy(state)
    output.kv_connector_block_state.boundary_state_offloads = left = {}
    for req_id, entries in handoffs.items():
        status = half._req_status.get(req_id)
        most = status.max_offload_tokens if status is not None else None
        if within := [each for each in entries if most is None or each[2] <= most]:
            left[req_id] = within
    return output


def without_reloading(half: Any, scheduler_output: Any) -> Any:
    """Return vLLM's output of a step without the preempted requests that load again in it.

    A reset of the prefix cache preempts running requests, and the next step may find their chunks
    in host memory. Version 0.32 expects that a preempted request has stores alone, which it
    flushes; a load ends the engine. Such a request has nothing to flush: a load begins only when
    no store of its request is in flight.

    Args:
        half: vLLM's scheduler half.
        scheduler_output: of the step; not changed, because other connectors read it.
    """
    loads = half._current_batch_load_jobs.keys()
    preempted = scheduler_output.preempted_req_ids or ()
    reloading = {
        req_id
        for req_id in preempted
        if (status := half._req_status.get(req_id)) is not None
        and not loads.isdisjoint(status.transfer_jobs)
    }
    if not reloading:
        return scheduler_output
    output = copy(scheduler_output)
    output.preempted_req_ids = set(preempted) - reloading
    return output


# ---- Offered again ----


def offer_refused(half: Any) -> None:
    """Make vLLM offer the chunks of this step that found no room at the next step.

    Args:
        half: our scheduler half, after a step.
    """
    adapter = half.adapter
    refused, adapter.refused = adapter.refused, {}
    unplaced, adapter.unplaced = adapter.unplaced, {}
    for req_id, keys in (*unplaced.items(), *refused.items()):
        status = half._req_status.get(req_id)
        if status is not None and not status.req.is_finished():
            _offer(half, status, keys)
        elif req_id in refused:
            adapter.manager.drop(keys)


def offer_lost(half: Any, status: Any) -> None:
    """Make vLLM offer what a failed load was to bring, as the request computes it.

    vLLM has passed over all chunks of a load since it ordered it. Chunks that arrived are in host
    memory, and are not stored again.

    Args:
        half: our scheduler half.
        status: vLLM's state of the request.
    """
    if status.req.is_finished():
        return
    computed = status.num_locally_computed_tokens
    for config, group in zip(half.config.kv_group_configs, status.group_states, strict=True):
        first = computed // config.tokens_per_chunk
        group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first)
    half._due.again([status.req.request_id])


def offer_stale(half: Any, req_id: str, keys: Collection[OffloadKey]) -> None:
    """Make vLLM offer the chunks of a store that was to fail, as their request computes them again.

    Not with windows or states: their tables keep blocks that another request may have by now.

    Args:
        half: our scheduler half.
        req_id: the request, which may have ended.
        keys: of the store.
    """
    status = half._req_status.get(req_id)
    if status is None or status.req.is_finished() or half._sliding_window_groups:
        return
    _offer(half, status, keys)


def _offer(half: Any, status: Any, keys: Collection[OffloadKey]) -> None:
    wanted = frozenset(keys)
    for group in status.group_states:
        first = next((i for i, key in enumerate(group.offload_keys) if key in wanted), None)
        if first is not None:
            group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first)
    half._due.again([status.req.request_id])
