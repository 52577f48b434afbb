"""Chunks of sliding windows of which some blocks are freed: vLLM would store a part of them."""

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
