"""Chooses the copier for an engine's KV cache by the device of its tensors."""

import logging

import torch

from kvoffload.errors import ConfigError
from kvoffload.messages import CanonicalKVCaches
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
        ValueError: the tensors are not rows of bytes on one device; names them by index.
        ConfigError: there is no copier for their device.
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
        ValueError: naming the tensors by their indices.
    """
    tensors = [entry.tensor for entry in kv_caches.tensors]
    devices = [str(tensor.device) for tensor in tensors]
    if len(set(devices)) != 1:
        raise ValueError(f"kv_caches: tensors on several devices: {dict(enumerate(devices))}")
    for i, tensor in enumerate(tensors):
        if tensor.dtype != torch.int8 or tensor.dim() != 2:
            raise ValueError(
                f"kv_caches.tensors[{i}]: {tensor.dtype} of shape {tuple(tensor.shape)}, must be "
                "int8 of shape (num_blocks, page_bytes)"
            )
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(
                f"kv_caches.tensors[{i}]: strides {tensor.stride()}; the bytes of a row must lie "
                "side by side"
            )
        if tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
            raise ValueError(f"kv_caches.tensors[{i}]: strides {tensor.stride()}; rows overlap")
    for group_idx, refs in enumerate(kv_caches.group_data_refs):
        for ref in refs:
            if not 0 <= ref.tensor_idx < len(tensors):
                raise ValueError(
                    f"group {group_idx} names tensor {ref.tensor_idx} of {len(tensors)}"
                )
            if ref.page_size_bytes > tensors[ref.tensor_idx].shape[1]:
                raise ValueError(
                    f"group {group_idx} uses {ref.page_size_bytes} bytes of the rows of tensor "
                    f"{ref.tensor_idx}, which have {tensors[ref.tensor_idx].shape[1]}"
                )
    return tensors[0].device
