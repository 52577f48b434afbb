"""The KV cache of a model: kinds of formats, groups of layers, and where pages lie.

The formats are defined in :mod:`kvoffload.core.formats`; import them from here. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self

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


# The field that two formats of one kind must share to need the same token slots.
_SAME_SLOTS: Mapping[type[KVCacheSpec], str | None] = {
    FullAttentionSpec: None,
    CrossAttentionSpec: None,
    EncoderOnlyAttentionSpec: None,
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalAttentionSpec: "attention_chunk_size",
    MambaSpec: "num_speculative_blocks",
}


def spec_kind(spec: KVCacheSpec) -> type[KVCacheSpec]:
    """Return the kind of a format: formats of one kind are managed alike (MLA as full attention).

    Raises:
        KVCacheSpecError: the format is of no known kind.
    """
    for kind in _SAME_SLOTS:
        if isinstance(spec, kind):
            return kind
    raise KVCacheSpecError(
        f"{type(spec).__name__} is no format this version manages; known are "
        + ", ".join(kind.__name__ for kind in _SAME_SLOTS)
    )


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that need the same token slots but differ in bytes (heads, head size, dtype).

    One block of the group is a page of each layer.
    """

    kv_cache_specs: dict[str, KVCacheSpec] = field(default_factory=dict)

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, limits: ModelLimits) -> int:
        """Bytes of the largest number of blocks any layer needs, in all layers."""
        pages = max(
            cdiv(spec.max_memory_usage_bytes(limits), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return pages * self.page_size_bytes

    @classmethod
    def is_uniform_type(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether all layers need the same token slots.

        Raises:
            KVCacheSpecError: a format of unknown kind, or none at all.
        """
        if not kv_cache_specs:
            raise KVCacheSpecError("a model needs at least one layer with a KV cache")
        specs = list(kv_cache_specs.values())
        kind = spec_kind(specs[0])
        same = _SAME_SLOTS[kind]
        return all(
            spec_kind(spec) is kind
            and spec.block_size == specs[0].block_size
            and (same is None or getattr(spec, same) == getattr(specs[0], same))
            for spec in specs
        )

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> Self | None:
        """Return the common format; None if the layers do not need the same token slots."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size, dict(kv_cache_specs))


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
