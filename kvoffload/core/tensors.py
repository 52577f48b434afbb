"""KV cache memory: allocate it, and shape it for attention.

Seen as rows of bytes, for transfers, it is in :mod:`kvoffload.core.canonicalize`.

How the bytes of a layer lie follows from the plan and the backend:

* a backend that puts ``num_blocks`` outermost has each page in one piece;
* one that puts it second, as ``(2, num_blocks, ...)``, has each page in two pieces, keys and
  values. Pages stay whole if they are padded, packed with other layers', or shared with layers of
  another page format. Then strides lay the same logical shape over whole pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch

from kvoffload.core.attention import AttentionBackend
from kvoffload.core.canonicalize import LayerCache, canonicalize_kv_caches, layout_of
from kvoffload.core.interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)
from kvoffload.errors import KVCacheSpecError

__all__ = [
    "HasKVCache",
    "LayerCache",
    "allocate_kv_cache",
    "bind_kv_cache",
    "canonicalize_kv_caches",
    "init_kv_cache",
    "reshape_kv_cache",
]


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
