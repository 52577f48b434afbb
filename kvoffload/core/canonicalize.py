"""An engine's caches, in any layout, as rows of bytes that transfers read and write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from kvoffload.core.attention import AttentionBackend
from kvoffload.core.interface import AttentionSpec, KVCacheConfig, KVCacheSpec
from kvoffload.errors import KVCacheSpecError
from kvoffload.messages import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)

LayerCache = torch.Tensor | tuple[torch.Tensor, ...]
"""One layer's cache; a recurrent layer's is one tensor a state."""


@dataclass(frozen=True)
class Layout:
    """A backend's layout: logical shape, memory order, and which dimension counts blocks."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    block_dim: int


def layout_of(backend: AttentionBackend, spec: AttentionSpec, num_blocks: int) -> Layout:
    """Ask a backend for the layout of a layer's cache.

    Raises:
        KVCacheSpecError: the shape counts blocks in no dimension or in several, or does not hold
            the pages of the format.
    """

    def shape(blocks: int) -> tuple[int, ...]:
        return tuple(
            backend.get_kv_cache_shape(blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        )

    mine = shape(num_blocks)
    counts = [
        dim for dim, (a, b) in enumerate(zip(mine, shape(num_blocks + 1), strict=True)) if a != b
    ]
    order = tuple(backend.get_kv_cache_stride_order())
    if len(counts) != 1 or sorted(order) != list(range(len(mine))):
        raise KVCacheSpecError(
            f"{backend.get_name()}: shape {mine} with stride order {order} must have exactly one "
            "dimension that counts blocks, and an order that names each dimension once"
        )
    if prod(mine) * spec.dtype.itemsize != num_blocks * spec.unpadded_page_size_bytes:
        raise KVCacheSpecError(
            f"{backend.get_name()}: shape {mine} of {spec.dtype} does not hold {num_blocks} pages "
            f"of {spec.unpadded_page_size_bytes} bytes"
        )
    return Layout(mine, order, counts[0])


@dataclass(frozen=True)
class _Rows:
    """Bytes of a layer: row i, of ``width`` bytes, begins at ``start + i * stride``."""

    storage: int
    start: int
    stride: int
    width: int
    memory: torch.Tensor


def canonicalize_kv_caches(
    config: KVCacheConfig,
    kv_caches: Mapping[str, LayerCache],
    backends: Mapping[str, AttentionBackend],
) -> CanonicalKVCaches:
    """See an engine's caches as int8 ``(num_blocks, page_bytes)`` views.

    Layers of different groups that share pages share a view. Pages of one group that lie side by
    side in a block become one row. Padding is not part of any reference.

    Raises:
        KVCacheSpecError: a page is scattered in a way that rows cannot describe.
    """
    found: dict[tuple[int, int, int], int] = {}
    rows: list[_Rows] = []
    refs = []
    for group in config.kv_cache_groups:
        pieces: list[_Rows] = []
        for name in group.layer_names:
            spec = group.layer_spec(name)
            pieces += _rows_of(name, kv_caches[name], spec, backends.get(name), config.num_blocks)
        group_refs = []
        for piece in _side_by_side(pieces):
            key = (piece.storage, piece.start, piece.stride)
            index = found.setdefault(key, len(rows))
            if index == len(rows):
                rows.append(piece)
            elif piece.width > rows[index].width:
                rows[index] = piece
            group_refs.append(CanonicalKVCacheRef(index, piece.width))
        refs.append(tuple(group_refs))
    tensors = tuple(
        CanonicalKVCacheTensor(_byte_view(piece, config.num_blocks), piece.width) for piece in rows
    )
    return CanonicalKVCaches(tensors, tuple(refs))


def _rows_of(
    name: str,
    cache: LayerCache,
    spec: KVCacheSpec,
    backend: AttentionBackend | None,
    num_blocks: int,
) -> list[_Rows]:
    if isinstance(spec, AttentionSpec) and isinstance(cache, torch.Tensor) and backend is not None:
        return _pieces(name, cache, layout_of(backend, spec, num_blocks).block_dim)
    states = cache if isinstance(cache, tuple) else (cache,)
    return _side_by_side([row for state in states for row in _pieces(name, state, 0)])


def _pieces(name: str, cache: torch.Tensor, block_dim: int) -> list[_Rows]:
    """Split a cache at the dimensions outside the blocks; each part has one piece of each page."""
    per_block = cache.stride(block_dim)
    outer = [d for d in range(cache.dim()) if d != block_dim and cache.stride(d) > per_block]
    inner = [d for d in range(cache.dim()) if d != block_dim and d not in outer]
    width = 1
    for dim in sorted(inner, key=cache.stride):
        if cache.shape[dim] > 1 and cache.stride(dim) != width:
            raise KVCacheSpecError(
                f"{name}: a page of shape {tuple(cache.shape)} with strides {cache.stride()} is "
                "not in one piece; lay blocks outermost"
            )
        width *= cache.shape[dim]
    size = cache.element_size()
    pieces = []
    for offset in _offsets(cache, outer):
        start = (int(cache.storage_offset()) + offset) * size
        storage = cache.untyped_storage().data_ptr()
        pieces.append(_Rows(storage, start, int(per_block) * size, width * size, cache))
    return pieces


def _offsets(cache: torch.Tensor, dims: Iterable[int]) -> list[int]:
    offsets = [0]
    for dim in dims:
        offsets = [o + i * cache.stride(dim) for o in offsets for i in range(cache.shape[dim])]
    return offsets


def _side_by_side(pieces: Sequence[_Rows]) -> list[_Rows]:
    """Join pieces that follow each other in every block, in the order given.

    Never sorted by address: the order of rows decides how stored chunks look.
    """
    joined: list[_Rows] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.storage, last.stride) == (piece.storage, piece.stride)
            and last.start + last.width == piece.start
            and last.width + piece.width <= last.stride
        ):
            joined[-1] = _Rows(
                last.storage, last.start, last.stride, last.width + piece.width, last.memory
            )
        else:
            joined.append(piece)
    return joined


def _byte_view(rows: _Rows, num_blocks: int) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.int8, device=rows.memory.device)
    return view.set_(
        rows.memory.untyped_storage(), rows.start, (num_blocks, rows.width), (rows.stride, 1)
    )
