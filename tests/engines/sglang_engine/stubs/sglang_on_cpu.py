"""Lets SGLang 0.5.23 and its HiCache run where there is no GPU, with tensors of CPU memory.

A ``.pth`` file of the environment imports this at the start of each process; see
``tools/sglang_on_cpu.py``. Each change is made to a module when it has been imported: pages are
copied by torch, no memory is pinned, and the attention kernels are torch's own.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder

POOLS = "sglang.srt.mem_cache.pool_host"


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copy the rows of some tokens from tensors to tensors of the same shape."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size
):
    """Copy a layer of some pages (page, layer, token, ...) to rows (token, ...)."""
    pages = first_pages(src_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *target.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Copy the rows (token, ...) of all layers to pages (page, layer, token, ...)."""
    pages = first_pages(dst_indices, page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, target in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[i * layers + layer][src_indices]
            target[pages, layer] = rows.reshape(-1, page_size, *rows.shape[1:])


def first_pages(indices, page_size):
    """Return the pages that the indices of their tokens name."""
    return indices.reshape(-1, page_size)[:, 0] // page_size


def copy_with_torch(module):
    """Put the three copies above in the place of kernels."""
    for copy in (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    ):
        setattr(module, copy.__name__, copy)


def register_nothing(module):
    """Allocate host pools without pinning them."""
    module._cuda_host_register = lambda buffer, registration_granularity_bytes=None: None
    module.ALLOC_MEMORY_FUNCS["cpu"] = module.alloc_with_host_register


def pin_nothing(module):
    """Let host pools say that they are not pinned, and take the last 10 GB of memory as well."""
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    module.HostKVCache.pin_memory = property(lambda pool: False, lambda pool, value: None)


def pin_no_adapter(module):
    """Let adapters be plain tensors; the host has no allocator of pinned ones."""
    import torch

    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    module.torch = Unpinned()


class Unpinned:
    """torch, which makes no tensor pinned."""

    def __getattr__(self, name):
        import torch

        return getattr(torch, name)

    def tensor(self, data, pin_memory=False, **options):
        import torch

        return torch.tensor(data, **options)

    def zeros(self, *size, pin_memory=False, **options):
        import torch

        return torch.zeros(*size, **options)


def read_sliding_windows_where_they_are(module):
    """Let torch's attention read a sliding window by the numbers of its own pool.

    It writes by them, but reads by the numbers of the pool for full attention. The two are equal
    until a window is allocated alone, as when it is loaded from the host.
    """
    backend = module.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, with_numbers_of_windows(getattr(backend, name)))


def with_numbers_of_windows(run):
    def run_layer(self, query, output, keys, values, req_to_token, *args, **options):
        if self.use_sliding_window_kv_pool and options["sliding_window_size"] is not None:
            req_to_token = self.token_to_kv_pool.translate_loc_from_full_to_swa(req_to_token)
        return run(self, query, output, keys, values, req_to_token, *args, **options)

    return run_layer


def declare_operators():
    """Declare the operators that torchvision's build for CUDA defines in compiled code."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # its end would take the operators away


AFTER = {
    f"{POOLS}.common": register_nothing,
    f"{POOLS}.base": pin_nothing,
    **dict.fromkeys((f"{POOLS}.mha", f"{POOLS}.mla"), copy_with_torch),
    "sglang.srt.lora.layers": pin_no_adapter,
    "sglang.srt.lora.backend.torch_backend": pin_no_adapter,
    "sglang.srt.layers.attention.torch_native_backend": read_sliding_windows_where_they_are,
}


class Changes(MetaPathFinder):
    """Finds modules as before, and changes some when they have been executed."""

    def __init__(self):
        self.kept = []
        self._finding = False

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not self.kept:
            self.kept.append(declare_operators())
        if name not in AFTER or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            AFTER[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Changes())
