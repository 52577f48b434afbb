"""Stores that vLLM's half would make, and that would hold wrong bytes."""

from copy import copy
from typing import Any


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


def without_barred(half: Any, scheduler_output: Any) -> Any:
    """Return vLLM's output of a step without the states that barred requests hand over.

    There vLLM takes a limit of 0 tokens for none.

    Args:
        half: vLLM's scheduler half.
        scheduler_output: of the step; not changed, because other connectors read it.
    """
    state = scheduler_output.kv_connector_block_state
    handoffs = state.boundary_state_offloads if state else None
    if not handoffs:
        return scheduler_output
    output, output.kv_connector_block_state = copy(scheduler_output), copy(state)
    output.kv_connector_block_state.boundary_state_offloads = {
        req_id: entries
        for req_id, entries in handoffs.items()
        if (status := half._req_status.get(req_id)) is None or status.max_offload_tokens != 0
    }
    return output
