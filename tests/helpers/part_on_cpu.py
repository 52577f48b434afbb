"""Runs a part of the first run on the stand-in for ``torch.cuda``, with small numbers.

``python -m part_on_cpu NAME ROWS SECONDS``, as ``benchmarks.gpu.part``. The variable ``PYTHON`` has
the command that runs pytest.
"""

import ctypes
import functools
import json
import os
import sys
import types

from benchmarks.gpu import part, sizes

SMALL = {
    "LINK_BYTES": (1 << 16, 1 << 18),
    "PIECES": (1024, 32768),
    "MOST_PIECES": 8,
    "SHAPES": {"3 x 4 KiB": (3, 4096), "1 x 128 KiB": (1, 1 << 17)},
    "WITH_STEPS": ("3 x 4 KiB",),
    "ROUNDS": 1,
    "SUBMIT_BLOCKS": (1, 20),
    "SUBMITS": 2,
    "PRODUCT": 8,
    "WEIGHTS": 2,
    "STEPS": dict.fromkeys(sizes.STEPS, 3),
    "LISTEN_S": 0.02,
    "PINNED_BYTES": 4 << 20,
    "CAPTURES": 3,
    "SMALL_PIECES": (1024, 4096),
    "COUNTS": (2, 8),
    "PROGRAMS": (1,),
    "PLAN_TENSORS": 2,
    "STAGES": ((2, 1 << 14),),
    "CHUNKS": 6,
    "BEHIND": ("3 x 4 KiB", "1 x 128 KiB"),
    "SMOKE_SLOTS": 64,
    "REGISTRATION_BYTES": 1 << 20,
    "SMOKE": {"two pages": ((16384, 24), 80)},
}
FEW = {"round_trips": "13", "suite": "inference", "orders": "900"}
"""Which of a part's tests run here."""


class Batch:
    """Copies of addresses, carried out at once."""

    def __call__(self, targets, sources, lengths, stream, order, flags=0):
        for ends in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
            ctypes.memmove(*ends)


def install():
    """Put the stand-ins in the place of CUDA, and the small numbers in that of large ones."""
    import gpu_on_cpu
    import torch
    from cuda_stand_in import FakeCuda

    from benchmarks.engine_step import Case
    from benchmarks.gpu import connector, device
    from tests.support.index_kernels import IndexKernels

    assert SMALL["REGISTRATION_BYTES"] == gpu_on_cpu.PORTION_BYTES
    gpu_on_cpu.pytest_configure(None)
    torch.cuda.Event = functools.partial(FakeCuda.Event, blocking=True)
    torch.cuda.Stream = FakeCuda.Stream
    device.capture = lambda work: types.SimpleNamespace(replay=work)
    device.BatchCopy = Batch
    device.kernels = lambda caches, part, programs: IndexKernels(caches)
    device.allow_captures = lambda: None
    connector.CASES = (Case("16 KiB", 16 << 10),)
    for name, value in SMALL.items():
        assert hasattr(sizes, name)
        setattr(sizes, name, value)


if __name__ == "__main__":
    if (name := sys.argv[1]) in part.TESTS:
        part.PYTEST[:1] = json.loads(os.environ["PYTHON"])
        part.PYTEST += ["-p", "gpu_on_cpu"]
        if name in FEW:
            selection = f"({part.TESTS[name].args[0]}) and {FEW[name]}"
            part.TESTS[name] = functools.partial(part.run_tests, selection)
    else:
        install()
    sys.exit(part.main(*sys.argv[1:]))
