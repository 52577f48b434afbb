"""Reads, advances and writes the states of recurrent layers, a block at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvoffload.core.attention import (
    BuilderFactory,
    CommonAttentionMetadata,
    CommonMetadataBuilder,
)

Convolve = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class StateBackend:
    """Runs a recurrence over each request's tokens, from the state its last token left.

    A request's state after token ``t`` is kept in the block of ``t``. At the end of a block it
    stays there, for requests that share the prefix.

    Args:
        block_size: tokens a block of the layer's group stands for.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def get_name(self) -> str:
        return "STATE"

    def get_builder_cls(self) -> BuilderFactory:
        return CommonMetadataBuilder

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Never asked: states have the shapes their format says."""
        raise NotImplementedError

    def get_kv_cache_stride_order(self) -> tuple[int, ...]:
        """Never asked, likewise."""
        raise NotImplementedError

    def advance(
        self,
        x: Tensor,
        convolve: Convolve,
        step: Step,
        cache: tuple[Tensor, ...],
        metadata: CommonAttentionMetadata,
    ) -> Tensor:
        """Run ``x[T, channels]`` through the recurrence, request by request, token by token."""
        states, recents = cache
        out = torch.empty_like(x)
        starts = metadata.query_start_loc_cpu.tolist()
        computed = metadata.num_computed_tokens_cpu.tolist()
        tables = metadata.block_table_tensor.tolist()
        for i, (table, done) in enumerate(zip(tables, computed, strict=True)):
            state, recent = torch.zeros_like(states[0]), torch.zeros_like(recents[0])
            if done:
                block = table[(done - 1) // self._block_size]
                state, recent = states[block], recents[block]
            for row in range(starts[i], starts[i + 1]):
                window = torch.cat([recent, x[row : row + 1]])
                out[row], state = step(convolve(window), state)
                recent = window[1:]
            block = table[(done + starts[i + 1] - starts[i] - 1) // self._block_size]
            states[block], recents[block] = state, recent
        return out
