"""The KV cache of a model: what one layer keeps, groups of layers, and where pages lie.

A format answers two questions: how many bytes is one block (``page_size_bytes``), and how much
memory may one request need (``max_memory_usage_bytes``). Formats hold no torch objects but a dtype,
and this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from kvoffload.errors import KVCacheSpecError

if TYPE_CHECKING:
    import torch


def cdiv(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


@dataclass(frozen=True)
class ModelLimits:
    """What planning must know of an engine's settings. All counts are tokens.

    Attributes:
        max_model_len: longest request, prompt and output together.
        max_num_batched_tokens: most tokens computed in one step.
        max_num_encoder_input_tokens: longest encoder input (cross attention); 0 without encoder.
        decode_context_parallel_size: ranks that share the tokens of one request between them.
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_num_encoder_input_tokens: int = 0
    decode_context_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "decode_context_parallel_size"):
            _require_positive(self, name)
        if self.max_num_encoder_input_tokens < 0:
            raise KVCacheSpecError(
                f"max_num_encoder_input_tokens = {self.max_num_encoder_input_tokens}: "
                "must be 0 (no encoder) or more"
            )


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise KVCacheSpecError(
                f"{type(owner).__name__}.{name} = {value!r}: must be a positive whole number"
            )


def _require_dtype(owner: object, name: str, value: object) -> None:
    if not hasattr(value, "itemsize"):  # torch itself is not imported here
        remedy = "must be a torch.dtype, as torch.bfloat16"
        raise KVCacheSpecError(f"{type(owner).__name__}.{name} = {value!r}: {remedy}")


@dataclass(frozen=True)
class KVCacheSpec:
    """The KV cache format of one layer; the base of all formats.

    Attributes:
        block_size: tokens in a block.
    """

    block_size: int

    def __post_init__(self) -> None:
        _require_positive(self, "block_size")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer, padding included."""
        raise NotImplementedError

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block that hold data; the rest of the page is padding at its end."""
        return self.page_size_bytes

    def max_memory_usage_bytes(self, limits: ModelLimits) -> int:
        """Bytes one request may need at most."""
        raise NotImplementedError

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Return the one format of a group of layers.

        Raises:
            KVCacheSpecError: the formats differ.
        """
        if not specs:
            raise KVCacheSpecError("merge() needs the format of at least one layer")
        for spec in specs[1:]:
            if spec != specs[0]:
                raise KVCacheSpecError(
                    f"{spec} and {specs[0]} cannot share a KV cache group: give layers of "
                    "different formats different groups"
                )
        return replace(specs[0])


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values (or, with ``use_mla``, one latent vector) per token and head.

    Attributes:
        num_kv_heads: KV heads held by one rank.
        head_size: elements per head.
        dtype: of the stored elements.
        use_mla: one latent vector in place of a key and a value.
        page_size_padded: bytes to round the page up to, so that layers of different formats can
            share memory.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    use_mla: bool = False
    page_size_padded: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "num_kv_heads", "head_size")
        _require_dtype(self, "dtype", self.dtype)
        _check_padding(self, self.page_size_padded)

    @property
    def unpadded_page_size_bytes(self) -> int:
        vectors = 1 if self.use_mla else 2
        return vectors * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_size_bytes


def _check_padding(spec: AttentionSpec | MambaSpec, padded: int | None) -> None:
    if padded is not None and padded < spec.unpadded_page_size_bytes:
        raise KVCacheSpecError(
            f"{type(spec).__name__}.page_size_padded = {padded}: must be at least the "
            f"{spec.unpadded_page_size_bytes} bytes a page holds"
        )


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Every token attends to all before it, so all blocks of a request are kept.

    Layers that compute a sliding window or local chunks may be *kept* as full attention: see
    :func:`kvoffload.core.planning.unify_hybrid_kv_cache_specs`. Their window is recorded here for
    the model runner.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(self, name) is not None:
                _require_positive(self, name)
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise KVCacheSpecError(
                f"sliding_window = {self.sliding_window} and attention_chunk_size = "
                f"{self.attention_chunk_size}: one group has one or the other; plan such layers "
                "as groups of their own"
            )

    def max_memory_usage_bytes(self, limits: ModelLimits) -> int:
        """Bytes of a request of ``max_model_len`` tokens, split over context-parallel ranks."""
        tokens = cdiv(limits.max_model_len, limits.decode_context_parallel_size)
        return cdiv(tokens, self.block_size) * self.page_size_bytes

    @classmethod
    def merge_window_sizes(cls, window_sizes: set[int]) -> int | None:
        """Return the one window of a group; None if no layer has one."""
        if len(window_sizes) > 1:
            raise KVCacheSpecError(
                f"window sizes {sorted(window_sizes)} in one KV cache group: layers that share a "
                "group need the same window"
            )
        return next(iter(window_sizes), None)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """Merge formats that agree in all but the window, which some layers may lack."""
        if not specs:
            raise KVCacheSpecError("merge() needs the format of at least one layer")
        for spec in specs:
            if type(spec) is not type(specs[0]) or any(
                getattr(spec, f.name) != getattr(specs[0], f.name) for f in fields(AttentionSpec)
            ):
                raise KVCacheSpecError(
                    f"{spec} and {specs[0]} cannot share a KV cache group: heads, head size, "
                    "dtype and block size must be equal"
                )
        windows = {s.sliding_window for s in specs if s.sliding_window is not None}
        chunks = {s.attention_chunk_size for s in specs if s.attention_chunk_size is not None}
        return replace(
            specs[0],
            sliding_window=cls.merge_window_sizes(windows),
            attention_chunk_size=cls.merge_window_sizes(chunks),
        )


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent vector per token, shared by all heads."""

    use_mla: bool = True

    def __post_init__(self) -> None:
        if not self.use_mla:
            raise KVCacheSpecError(
                "MLAAttentionSpec.use_mla = False: use FullAttentionSpec for keys and values"
            )
        super().__post_init__()


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to the last ``sliding_window`` tokens, itself included."""

    sliding_window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "sliding_window")
        if self.use_mla:
            raise KVCacheSpecError(
                "SlidingWindowSpec.use_mla = True: a latent cache has no sliding window here; use "
                "MLAAttentionSpec, which keeps all blocks"
            )

    def max_memory_usage_bytes(self, limits: ModelLimits) -> int:
        """Bytes of the window before a step and the tokens of the step."""
        if limits.decode_context_parallel_size > 1:
            raise KVCacheSpecError(
                f"decode_context_parallel_size = {limits.decode_context_parallel_size}: sliding "
                "windows are not split over ranks; set it to 1"
            )
        tokens = min(self.sliding_window - 1 + limits.max_num_batched_tokens, limits.max_model_len)
        # One more: the window seldom begins at the first token of a block.
        return (cdiv(tokens, self.block_size) + 1) * self.page_size_bytes


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token attends to the tokens before it in its own chunk of ``attention_chunk_size``."""

    attention_chunk_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "attention_chunk_size")

    def max_memory_usage_bytes(self, limits: ModelLimits) -> int:
        """Bytes of one chunk and the tokens of a step."""
        tokens = min(
            self.attention_chunk_size + limits.max_num_batched_tokens, limits.max_model_len
        )
        return cdiv(tokens, self.block_size) * self.page_size_bytes


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A recurrent layer: a page holds whole states (for instance convolution and SSM state).

    Attributes:
        shapes: of each state tensor, in the order they lie in the page.
        dtypes: of each state tensor.
        page_size_padded: bytes to round the page up to.
        mamba_type: name of the recurrence, for the engine.
        num_speculative_blocks: extra states a request holds while tokens are speculative.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise KVCacheSpecError(
                f"MambaSpec has {len(self.shapes)} shapes and {len(self.dtypes)} dtypes: give one "
                "dtype for each state tensor, and at least one"
            )
        for i, dtype in enumerate(self.dtypes):
            _require_dtype(self, f"dtypes[{i}]", dtype)
        if any(extent < 1 for shape in self.shapes for extent in shape):
            raise KVCacheSpecError(f"MambaSpec.shapes = {self.shapes}: extents must be positive")
        if self.num_speculative_blocks < 0:
            raise KVCacheSpecError(
                f"MambaSpec.num_speculative_blocks = {self.num_speculative_blocks}: must be 0 or "
                "more"
            )
        _check_padding(self, self.page_size_padded)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of all state tensors, one after the other."""
        return sum(
            prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_size_bytes

    def max_memory_usage_bytes(self, limits: ModelLimits) -> int:
        """Bytes of the running state and the speculative ones; the length hardly matters.

        If a request may be longer than a block, a step reads states in one block and writes them
        in the next. Then there are twice as many.
        """
        states = 1 if self.block_size >= limits.max_model_len else 2
        return states * (1 + self.num_speculative_blocks) * self.page_size_bytes


@dataclass(frozen=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention within an encoder: nothing is kept between steps."""

    def max_memory_usage_bytes(self, limits: ModelLimits) -> int:
        return 0


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Decoder attention to encoder states, computed once for a request and never shared."""

    def max_memory_usage_bytes(self, limits: ModelLimits) -> int:
        """Bytes of the longest encoder input."""
        return cdiv(limits.max_num_encoder_input_tokens, self.block_size) * self.page_size_bytes


# -- kinds of formats, groups, the plan ------------------------------------------------------------


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
