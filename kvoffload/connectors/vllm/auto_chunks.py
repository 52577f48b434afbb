"""The number of blocks in a chunk under vLLM, where ``blocks_per_chunk`` is ``"auto"``.

Both halves choose by what vLLM tells each of them alike. vLLM has one number for all groups.
"""

import logging
from collections.abc import Iterator
from typing import Any

from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvoffload.connectors.chunk_size import choose_chunk_size

log = logging.getLogger(__name__)


def choose_blocks_per_chunk(
    config: Any, vllm_config: Any, kv_cache_config: Any, is_worker: bool
) -> int:
    """Choose the number of blocks; the scheduler's half logs it with its reason.

    Args:
        config: vLLM's ``OffloadingConfig``, with one block a chunk.
        vllm_config: of this half.
        kv_cache_config: of this half.
        is_worker: which half asks. Each worker must ask.
    """
    block_tokens = max(group.tokens_per_block for group in config.groups)
    limits = dict(_limits(config, kv_cache_config, vllm_config.cache_config))
    # A block has the bytes of the largest group: all groups take turns with the same rows.
    block_bytes = config.worker_kv_bytes_per_block
    chosen = choose_chunk_size(block_bytes, block_tokens, limits)
    if not is_worker:
        log.info("kvoffload: %s", chosen.told(block_bytes, block_tokens))
        return chosen.num_blocks
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return chosen.num_blocks
    # Stages have layers of their own; the scheduler knows those of the first.
    return int(parallel_state.get_pp_group().broadcast_object(chosen.num_blocks, src=0))


def _limits(config: Any, kv_cache_config: Any, cache_config: Any) -> Iterator[tuple[str, int]]:
    """Yield what else limits a chunk, and to how many blocks."""
    kept = cache_config.prefix_cache_retention_interval
    for group in config.groups:
        whole = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        spec = next(iter(iter_layer_specs(whole)))
        if isinstance(spec, MambaSpec):
            yield "recurrent states, of which a block holds one", 1
            continue
        if isinstance(spec, SlidingWindowSpec):
            window = spec.sliding_window
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            window = spec.attention_chunk_size
        else:
            continue
        # Only a chunk that lies in the window as a whole can be stored.
        yield f"a window of {window} tokens", window // group.tokens_per_block
        if kept:  # vLLM refuses chunks that it is no multiple of
            blocks = kept // group.tokens_per_block
            yield f"prefix_cache_retention_interval {kept}", blocks & -blocks
