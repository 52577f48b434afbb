"""The interface of an attention backend, and the metadata that all backends get each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvoffload.core.interface import KVCacheSpec


class AttentionMetadataBuilder(Protocol):
    """Turns the common metadata of a step into the metadata of one backend."""

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Return the metadata that the backend's layers of one group get."""
        ...


BuilderFactory = Callable[[KVCacheSpec, Sequence[str], torch.device], AttentionMetadataBuilder]


class AttentionBackend(Protocol):
    """The interface of an attention implementation: cache shapes and a metadata builder."""

    def get_name(self) -> str:
        """Return the backend's name, for logs and for the namespace of stored bytes."""
        ...

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the logical shape of one layer's cache."""
        ...

    def get_kv_cache_stride_order(self) -> tuple[int, ...]:
        """Return the logical dimensions in the order they lie in memory, outermost first."""
        ...

    def get_builder_cls(self) -> BuilderFactory:
        """Return what makes the metadata builder of a group."""
        ...


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """One step of a batch, for one KV cache group. R requests, T tokens to compute.

    Attributes:
        query_start_loc: int32 ``[R + 1]``: where each request's tokens begin; its end at ``[R]``.
        query_start_loc_cpu: the same on the host.
        seq_lens: int32 ``[R]``: tokens of each request, this step's included.
        seq_lens_cpu: the same on the host.
        num_computed_tokens_cpu: int32 ``[R]``: tokens computed before this step.
        num_reqs: R.
        num_actual_tokens: T.
        max_query_len: most tokens any request computes in this step.
        max_seq_len: the longest request.
        block_table_tensor: int32 ``[R, blocks]``, padded with the null block.
        slot_mapping: int64 ``[T]``: where each token's KV goes, ``block * block_size + offset``.
        causal: a token sees only those before it.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    num_computed_tokens_cpu: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
