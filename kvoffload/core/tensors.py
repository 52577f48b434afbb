"""KV cache memory: allocate it, shape it for attention, and see it as rows of bytes for transfers.

How the bytes of a layer lie follows from the plan and the backend:

* a backend that puts ``num_blocks`` outermost has each page in one piece;
* one that puts it second, as ``(2, num_blocks, ...)``, has each page in two pieces, keys and
  values. Pages stay whole if they are padded, packed with other layers', or shared with layers of
  another page format. Then strides lay the same logical shape over whole pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch

from kvoffload.core.attention import AttentionBackend
from kvoffload.core.interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)
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


def allocate_kv_cache(config: KVCacheConfig, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Allocate the memory of a plan, zeroed.

    Returns:
        Layer name → int8 ``(num_blocks, page_bytes)``; layers that share pages get one tensor.

    Raises:
        KVCacheSpecError: a layer of a group has no memory in the plan, or a tensor's size is not
            a whole number of pages.
    """
    sizes: dict[int, int] = {}
    for tensor in config.kv_cache_tensors:
        if tensor.allocation is not None:
            sizes[tensor.allocation] = sizes.get(tensor.allocation, 0) + tensor.size
    shared = {
        number: torch.zeros(size, dtype=torch.int8, device=device) for number, size in sizes.items()
    }
    raw: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        page = _page_bytes(config, tensor)
        if tensor.allocation is None:
            memory = torch.zeros(tensor.size, dtype=torch.int8, device=device)
        else:
            memory = shared[tensor.allocation]
        pages = memory.as_strided(
            (config.num_blocks, page), (tensor.block_stride or page, 1), tensor.offset
        )
        raw.update(dict.fromkeys(tensor.shared_by, pages))
    missing = set(config.layer_specs) ^ set(raw)
    if missing:
        raise KVCacheSpecError(
            f"kv_cache_tensors and kv_cache_groups name different layers: {sorted(missing)}"
        )
    return raw


def _page_bytes(config: KVCacheConfig, tensor: KVCacheTensor) -> int:
    page, rest = divmod(tensor.size, config.num_blocks)
    if rest:
        raise KVCacheSpecError(
            f"KVCacheTensor.size = {tensor.size} of {tensor.shared_by}: must be a multiple of "
            f"num_blocks = {config.num_blocks}"
        )
    return page


def reshape_kv_cache(
    config: KVCacheConfig,
    raw: Mapping[str, torch.Tensor],
    backends: Mapping[str, AttentionBackend],
) -> dict[str, LayerCache]:
    """Give each layer its cache in the shape its backend wants; nothing is copied.

    Returns:
        Layer name → tensor; for a recurrent layer a tuple, one tensor ``(num_blocks, *shape)`` a
        state.

    Raises:
        KVCacheSpecError: pages of the plan do not fit the format, or a backend's shape does not
            use up a page.
    """
    specs = config.layer_specs
    whole = _layers_with_whole_pages(config, backends)
    caches: dict[str, LayerCache] = {}
    for name, spec in specs.items():
        pages = raw[name]
        if pages.shape[1] < spec.page_size_bytes:
            raise KVCacheSpecError(
                f"{name}: the plan's pages have {pages.shape[1]} bytes, its format needs "
                f"{spec.page_size_bytes}"
            )
        if isinstance(spec, MambaSpec):
            caches[name] = _state_views(pages, spec)
        elif isinstance(spec, AttentionSpec):
            caches[name] = _attention_view(pages, spec, backends[name], name in whole)
        else:
            raise KVCacheSpecError(f"{name}: no way to shape {type(spec).__name__}")
    return caches


def _layers_with_whole_pages(
    config: KVCacheConfig, backends: Mapping[str, AttentionBackend]
) -> set[str]:
    """Name the layers whose pages must lie in one piece, against their backend's preference."""
    specs = config.layer_specs
    whole: set[str] = set()
    for tensor in config.kv_cache_tensors:
        forms: set[tuple[int, ...] | None] = set()
        for name in tensor.shared_by:
            spec = specs[name]
            padded = spec.unpadded_page_size_bytes * config.num_blocks != tensor.size
            if padded or tensor.block_stride or not isinstance(spec, AttentionSpec):
                forms = {None}
                break
            layout = layout_of(backends[name], spec, 2)
            pieces = layout.order.index(layout.block_dim)
            forms.add(tuple(layout.shape[dim] for dim in layout.order[:pieces]))
        if forms == {None} or len(forms) > 1:
            whole.update(tensor.shared_by)
    return whole


def _attention_view(
    pages: torch.Tensor, spec: AttentionSpec, backend: AttentionBackend, whole: bool
) -> torch.Tensor:
    layout = layout_of(backend, spec, pages.shape[0])
    itemsize = spec.dtype.itemsize
    order = list(layout.order)
    if whole:
        order.remove(layout.block_dim)
        order.insert(0, layout.block_dim)
    strides = [0] * len(order)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= layout.shape[dim]
    if order[0] == layout.block_dim:
        strides[layout.block_dim] = _elements(pages.stride(0), itemsize, spec)
    return _typed_view(pages, spec.dtype, layout.shape, strides, 0)


def _state_views(pages: torch.Tensor, spec: MambaSpec) -> tuple[torch.Tensor, ...]:
    views = []
    offset = 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        strides = [_elements(pages.stride(0), dtype.itemsize, spec)]
        strides += [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        views.append(_typed_view(pages, dtype, (pages.shape[0], *shape), strides, offset))
        offset += prod(shape) * dtype.itemsize
    return tuple(views)


def _elements(num_bytes: int, itemsize: int, spec: KVCacheSpec) -> int:
    count, rest = divmod(num_bytes, itemsize)
    if rest:
        raise KVCacheSpecError(
            f"{spec}: {num_bytes} bytes are no whole number of {itemsize}-byte elements; order "
            "the states by element size, largest first, or pad the page"
        )
    return count


def _typed_view(
    pages: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    byte_offset: int,
) -> torch.Tensor:
    start = pages.storage_offset() + byte_offset
    if start % dtype.itemsize:
        raise KVCacheSpecError(
            f"{dtype} would begin at byte {start} of its memory, which is not aligned: order the "
            "states by element size, largest first"
        )
    view = torch.empty(0, dtype=dtype, device=pages.device)
    return view.set_(pages.untyped_storage(), start // dtype.itemsize, tuple(shape), tuple(strides))


class HasKVCache(Protocol):
    """A layer of a model, as far as :func:`bind_kv_cache` needs it."""

    kv_cache: Any


def bind_kv_cache(
    kv_caches: Mapping[str, LayerCache], layers: Mapping[str, HasKVCache]
) -> list[LayerCache]:
    """Give each layer its cache, and return the caches in layer order.

    Raises:
        KVCacheSpecError: caches and layers do not have the same names.
    """
    if kv_caches.keys() != layers.keys():
        raise KVCacheSpecError(
            f"caches and layers differ in {sorted(kv_caches.keys() ^ layers.keys())}"
        )
    for name, layer in layers.items():
        layer.kv_cache = kv_caches[name]
    return [kv_caches[name] for name in layers]


def init_kv_cache(
    config: KVCacheConfig,
    backends: Mapping[str, AttentionBackend],
    device: torch.device | str,
    layers: Mapping[str, HasKVCache] | None = None,
) -> dict[str, LayerCache]:
    """Allocate, shape and, if layers are given, bind the caches of a plan."""
    caches = reshape_kv_cache(config, allocate_kv_cache(config, device), backends)
    if layers is not None:
        bind_kv_cache(caches, layers)
    return caches


# -- as rows of bytes ------------------------------------------------------------------------------


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
            joined[-1] = replace(last, width=last.width + piece.width)
        else:
            joined.append(piece)
    return joined


def _byte_view(rows: _Rows, num_blocks: int) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.int8, device=rows.memory.device)
    return view.set_(
        rows.memory.untyped_storage(), rows.start, (num_blocks, rows.width), (rows.stride, 1)
    )
