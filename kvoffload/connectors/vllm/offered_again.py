"""Chunks that vLLM's scheduler half is to offer once more."""

from collections.abc import Collection
from typing import Any

from kvoffload.offload.base import OffloadKey


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
        elif req_id in refused and adapter.ledger is not None:
            adapter.ledger.drop(keys)


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


def _offer(half: Any, status: Any, keys: Collection[OffloadKey]) -> None:
    wanted = frozenset(keys)
    for group in status.group_states:
        first = next((i for i, key in enumerate(group.offload_keys) if key in wanted), None)
        if first is not None:
            group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first)
    half._due.again([status.req.request_id])
