"""Chooses the copier for an engine's KV cache by the device of its tensors."""

import logging
from collections.abc import Sequence

import torch

from kvoffload.errors import ConfigError
from kvoffload.messages import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.transfer.base import Copier
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.slab import Slab

log = logging.getLogger(__name__)


def make_copier(
    kv_caches: CanonicalKVCaches, slab: Slab, layout: ChunkLayout, *, batches: bool = True
) -> Copier:
    """Make the copier for these tensors. The caller closes it before the slab is freed.

    For CUDA a thread pins the slab. ``batches`` allows batched copies of its driver.

    Raises:
        ConfigError: the tensors are not rows of bytes on one device, or there is no copier for it.
    """
    device = check_caches(kv_caches)
    copier: Copier
    if device.type == "cpu":
        copier = CpuCopier(kv_caches, slab, layout)
    elif device.type == "cuda":
        from kvoffload.transfer.cuda.stream_copier import StreamCopier
        from kvoffload.transfer.cuda.torch_device import CudaDevice

        copier = StreamCopier(kv_caches, slab, layout, CudaDevice(kv_caches, slab, batches=batches))
    else:
        raise ConfigError("kv_caches", str(device), "must be CPU or CUDA tensors")
    log.info("copies: %s", ", ".join(f"{name} {value}" for name, value in copier.stats().items()))
    return copier


def check_caches(kv_caches: CanonicalKVCaches) -> torch.device:
    """Return the one device that the tensors are on; refuse those that are not rows of bytes.

    Raises:
        ConfigError: naming the tensors by their indices.
    """
    tensors = [_rows(f"kv_caches.tensors[{i}]", each) for i, each in enumerate(kv_caches.tensors)]
    devices = [str(tensor.device) for tensor in tensors]
    if len(set(devices)) != 1:
        where = f"{dict(enumerate(devices))}"
        raise ConfigError("kv_caches.tensors", where, "must have tensors, all on one device")
    if not any(kv_caches.group_data_refs):
        remedy = "must have a CanonicalKVCacheRef of a group"
        raise ConfigError("kv_caches.group_data_refs", kv_caches.group_data_refs, remedy)
    for group_idx, refs in enumerate(kv_caches.group_data_refs):
        field = f"kv_caches.group_data_refs[{group_idx}]"
        if not isinstance(refs, Sequence) or not all(map(_is_ref, refs)):
            raise ConfigError(field, refs, "must be a tuple of CanonicalKVCacheRef")
        for ref in refs:
            _check_ref(field, ref, tensors)
    return tensors[0].device


def _is_ref(given: object) -> bool:
    return isinstance(given, CanonicalKVCacheRef)


def _rows(field: str, entry: CanonicalKVCacheTensor) -> torch.Tensor:
    """Return the tensor of an entry; ConfigError: it has no rows of bytes."""
    given: object = entry  # an engine may not check its types
    tensor = given.tensor if isinstance(given, CanonicalKVCacheTensor) else None
    if not isinstance(tensor, torch.Tensor):
        remedy = "must be a CanonicalKVCacheTensor with a tensor of torch"
        raise ConfigError(field, type(given if tensor is None else tensor).__name__, remedy)
    if tensor.dtype != torch.int8 or tensor.dim() != 2 or not tensor.shape[1]:
        shape = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ConfigError(field, shape, "must be int8 of shape (num_blocks, page_bytes)")
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        remedy = "the bytes of a row must lie side by side"
        raise ConfigError(field, f"strides {tensor.stride()}", remedy)
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise ConfigError(field, f"strides {tensor.stride()}", "rows overlap: give each its bytes")
    return tensor


def _check_ref(field: str, ref: CanonicalKVCacheRef, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError unless a reference is to bytes at the front of a tensor's rows."""
    if not _is_within(range(len(tensors)), ref.tensor_idx):
        remedy = f"must be the number of one of {len(tensors)} tensors"
        raise ConfigError(f"{field}.tensor_idx", ref.tensor_idx, remedy)
    row_bytes = tensors[ref.tensor_idx].shape[1]
    if not _is_within(range(1, row_bytes + 1), ref.page_size_bytes):
        remedy = f"must be 1 to {row_bytes}, the bytes of a row of tensor {ref.tensor_idx}"
        raise ConfigError(f"{field}.page_size_bytes", ref.page_size_bytes, remedy)


def _is_within(numbers: range, number: object) -> bool:
    """Whether these are whole numbers, and this is one of them; no float is."""
    return hasattr(number, "__index__") and number in numbers
