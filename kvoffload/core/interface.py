"""The KV cache of a model: the format of each layer, its groups, and where pages lie.

The formats are defined in :mod:`kvoffload.core.formats`; import them from here. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvoffload.core.formats import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    ModelLimits,
    SlidingWindowSpec,
    cdiv,
)
from kvoffload.core.uniform import UniformTypeKVCacheSpecs, spec_kind
from kvoffload.errors import KVCacheSpecError

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "MLAAttentionSpec",
    "MambaSpec",
    "ModelLimits",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "cdiv",
    "spec_kind",
]


def _make_tuples(owner: object, *names: str) -> None:
    """Turn fields of a frozen dataclass into tuples: callers may pass lists."""
    for name in names:
        object.__setattr__(owner, name, tuple(getattr(owner, name)))


@dataclass(frozen=True)
class KVCacheTensor:
    """Where the pages of some layers lie: page i at ``offset + i * block_stride``.

    Attributes:
        size: bytes of all its pages, ``num_blocks * page``.
        shared_by: layers that use the same pages, at most one of each group. A block belongs to one
            group at a time, so they never meet.
        offset: byte of page 0 in the allocation.
        block_stride: bytes from a page to the next; 0 means that pages lie side by side.
        allocation: number of the allocation it shares with other tensors; None: its own.
    """

    size: int
    shared_by: Sequence[str] = ()
    offset: int = 0
    block_stride: int = 0
    allocation: int | None = None

    def __post_init__(self) -> None:
        if self.size < 0 or self.offset < 0 or self.block_stride < 0:
            raise KVCacheSpecError(
                f"KVCacheTensor(size={self.size}, offset={self.offset}, "
                f"block_stride={self.block_stride}): sizes must be 0 or more"
            )
        _make_tuples(self, "shared_by")


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table; the block manager sees them as one layer."""

    layer_names: Sequence[str]
    kv_cache_spec: KVCacheSpec

    def __post_init__(self) -> None:
        _make_tuples(self, "layer_names")

    def layer_spec(self, layer_name: str) -> KVCacheSpec:
        """Return the format of one layer of the group."""
        spec = self.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            return spec.kv_cache_specs[layer_name]
        return spec


@dataclass(frozen=True)
class KVCacheConfig:
    """The plan for a whole model.

    Attributes:
        num_blocks: blocks of the cache, block 0 (the null block, never given out) included.
        kv_cache_tensors: where pages lie.
        kv_cache_groups: layers by block table; ``groups[g]`` is KV cache group g everywhere.
    """

    num_blocks: int
    kv_cache_tensors: Sequence[KVCacheTensor]
    kv_cache_groups: Sequence[KVCacheGroupSpec]

    def __post_init__(self) -> None:
        _make_tuples(self, "kv_cache_tensors", "kv_cache_groups")

    @property
    def tensors(self) -> Mapping[str, KVCacheTensor]:
        """Layer name → the tensor that holds its pages."""
        return MappingProxyType(
            {name: tensor for tensor in self.kv_cache_tensors for name in tensor.shared_by}
        )

    @property
    def layer_specs(self) -> Mapping[str, KVCacheSpec]:
        """Layer name → its format."""
        return MappingProxyType(
            {name: g.layer_spec(name) for g in self.kv_cache_groups for name in g.layer_names}
        )
