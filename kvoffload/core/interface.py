"""The KV cache of a model: the format of each layer, its groups, and where pages lie.

The formats are defined in :mod:`kvoffload.core.formats`; import them from here. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True)
class KVCacheTensor:
    """Where the pages of some layers lie: page i at ``offset + i * block_stride``.

    Attributes:
        size: bytes of all its pages, ``num_blocks * page``.
        shared_by: layers that use the same pages, at most one of each group: a block belongs to one
            group at a time, so they never meet.
        offset: byte of page 0 in the allocation.
        block_stride: bytes from a page to the next; 0 means that pages lie side by side.
        allocation: number of the allocation it shares with other tensors; None: its own.
    """

    size: int
    shared_by: tuple[str, ...]
    offset: int = 0
    block_stride: int = 0
    allocation: int | None = None

    def __init__(
        self,
        size: int,
        shared_by: Iterable[str] = (),
        offset: int = 0,
        block_stride: int = 0,
        allocation: int | None = None,
    ) -> None:
        if size < 0 or offset < 0 or block_stride < 0:
            raise KVCacheSpecError(
                f"KVCacheTensor(size={size}, offset={offset}, block_stride={block_stride}): "
                "sizes must be 0 or more"
            )
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "shared_by", tuple(shared_by))
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "block_stride", block_stride)
        object.__setattr__(self, "allocation", allocation)


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table; the block manager sees them as one layer."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    def __init__(self, layer_names: Iterable[str], kv_cache_spec: KVCacheSpec) -> None:
        object.__setattr__(self, "layer_names", tuple(layer_names))
        object.__setattr__(self, "kv_cache_spec", kv_cache_spec)

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
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    def __init__(
        self,
        num_blocks: int,
        kv_cache_tensors: Iterable[KVCacheTensor],
        kv_cache_groups: Iterable[KVCacheGroupSpec],
    ) -> None:
        object.__setattr__(self, "num_blocks", num_blocks)
        object.__setattr__(self, "kv_cache_tensors", tuple(kv_cache_tensors))
        object.__setattr__(self, "kv_cache_groups", tuple(kv_cache_groups))

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
