"""KV cache formats: what one layer keeps, and how much of it.

Formats answer two questions: how many bytes is one block (``page_size_bytes``), and how much memory
may one request need (``max_memory_usage_bytes``). They hold no torch objects but a dtype, and this
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
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
