"""Kinds of KV cache formats, and layers of one kind that share a block table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from kvoffload.core.formats import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    ModelLimits,
    SlidingWindowSpec,
    cdiv,
)
from kvoffload.errors import KVCacheSpecError

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
        """Bytes of one block over all layers."""
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
