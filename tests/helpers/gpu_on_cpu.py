"""A pytest plugin that runs ``tests/gpu`` without a GPU, on the stand-in: fewer rounds, all code.

No test of ``tests/gpu`` shows here that a GPU works. Each shows that the test itself does: its
fixtures exist, its calls fit, its assertions pass for correct code.
"""

import torch
from cuda_stand_in import OnCpu, install

from kvoffload.transfer import factory as choice
from kvoffload.transfer.cuda.stream_copier import StreamCopier
from kvoffload.transfer.cuda.torch_device import CudaDevice

PORTION_BYTES = 1 << 20
SIZES = {"RUNS_EACH": 2, "WARM_UP": 200, "TRANSFERS": 600, "PINNED_BYTES": 3 << 19}
SIZES["PORTION_BYTES"] = PORTION_BYTES
SIZES["PROMPTS"] = [[(i * 7 + j * 3) % 256 for j in range(70 + i)] for i in range(5)]
"""Constants of test modules, and their values here."""
NEEDS_TWO_DEVICES = "test_tensors_on_two_devices_are_refused"


def copier(kv_caches, slab, layout):
    """What ``make_copier`` makes for CUDA tensors; here they are on the CPU."""
    return StreamCopier(kv_caches, slab, layout, CudaDevice(kv_caches, slab))


def pytest_configure(config):
    fake = install(setattr, PORTION_BYTES)
    torch.cuda.is_available = lambda: True
    torch.cuda.memory_allocated = lambda: fake.allocated_bytes
    torch.cuda.mem_get_info = lambda: ((1 << 40) - fake.allocated_bytes, 1 << 40)
    torch.cuda._sleep = lambda cycles: None
    torch.cuda.Stream = fake.Stream
    choice.CpuCopier = copier
    OnCpu(fake).__enter__()


def pytest_collection_modifyitems(config, items):
    for item in items:
        for name, size in SIZES.items():
            if hasattr(item.module, name):
                setattr(item.module, name, size)
    left_out = [item for item in items if item.name == NEEDS_TWO_DEVICES]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
