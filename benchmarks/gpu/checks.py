"""What is not a rate: the machine, bytes that come back, captures during transfers."""

import importlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import device, sizes
from benchmarks.gpu.ours import Ours, Transfers, bytes_to_pin, check, tier_slab, until_pinned
from benchmarks.harness import Row, caches_of, row
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.transfer.factory import make_copier
from kvoffload.transfer.layout import ChunkLayout

MODULES = ("torch", "numpy", "triton", "cuda.bindings", "msgspec", "pytest")
FACTS = {
    "GPU, driver, PCIe generation and width": "nvidia-smi --format=csv,noheader --query-gpu="
    "name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,memory.total",
    "kernel, cores, limit of locked memory": "uname -r; nproc; ulimit -l",
    "memory": "grep -m3 Mem /proc/meminfo",
    "huge pages": "cd /sys/kernel/mm/transparent_hugepage; cat enabled shmem_enabled",
    "sanitizer": "command -v compute-sanitizer || echo not installed",
}
"""Commands of a shell that tell about the machine."""
HANGS = "580.159.04"
"""The version of the driver with which engines elsewhere saw batches of copies crash and hang."""
DELAY_CYCLES = 20_000_000
"""About 10 ms: the engine's work before a fence is not done when a transfer is launched."""


def environment() -> Iterator[Row]:
    """Machine, driver and versions; what is missing is a row too."""
    for name, command in FACTS.items():
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        yield row(name, " | ".join((done.stdout + done.stderr).splitlines()), "")
        if HANGS in done.stdout:
            yield row(f"driver {HANGS}", "batches were seen to hang: vllm#49276", "")
    for name in MODULES:
        try:
            version = getattr(importlib.import_module(name), "__version__", "installed")
        except Exception as error:
            version = f"{type(error).__name__}: {error}"
        yield row(name, version, "")


def smoke() -> Iterator[Row]:
    """Round trips on an engine's own stream that is still busy; slots of two registrations.

    Raises:
        RuntimeError: other bytes came back, or not by the best way: all rates would be of another.
    """
    worse: dict[str, str] = {}
    for name, (page_bytes, num_blocks) in sizes.SMOKE.items():
        for mode in (nullcontext, torch.inference_mode):
            with mode():
                tensors = [device.pages(num_blocks, one) for one in page_bytes]
                same, stats = _round_trip(tensors)
            made = "usual" if mode is nullcontext else "made under inference_mode"
            yield row(f"{name}, {made}", "the same bytes" if same else "OTHER BYTES", "")
            yield row(f"{name}, way", ", ".join(f"{key} {at}" for key, at in stats.items()), "")
            if not same:
                raise RuntimeError(f"{name}, {made}: other bytes came back")
            worse |= ways_not_taken(stats)
    if worse:
        raise RuntimeError(f"the bytes are right, but the best way was not taken: {worse}")


def expandable() -> Iterator[Row]:
    """The same with expandable segments: memory of the GPU that CUDA maps piece by piece."""
    yield row("allocator", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "as usual"), "")
    yield from smoke()


def ways_not_taken(stats: dict[str, Any]) -> dict[str, str]:
    """Why better ways are not taken; a driver without batches has no better way."""
    return {
        key: str(why)
        for key, why in stats.items()
        if key.startswith("why_not_") and not str(why).startswith("the driver is of CUDA")
    }


def _round_trip(tensors: list[Any]) -> tuple[bool, dict[str, Any]]:
    caches = caches_of(tensors)
    layout = ChunkLayout(caches, 2)
    slab = tier_slab(sizes.SMOKE_SLOTS, layout.slot_bytes)
    edge = sizes.REGISTRATION_BYTES // layout.slot_bytes
    num_blocks = len(tensors[0])
    draw = np.random.default_rng(0)
    blocks = draw.permutation(np.r_[0:32, num_blocks - 32 : num_blocks]).astype(np.int32)
    moves = layout.moves(GPULoadStoreSpec(blocks), list(range(edge - 16, edge + 16)))
    places = torch.from_numpy(blocks).long().to(tensors[0].device)
    expected = [tensor[places].clone() for tensor in tensors]
    for tensor in tensors:
        tensor[places] = 0
    device.wait_for_all()
    with closing(make_copier(caches, slab, layout)) as copier:
        until_pinned(copier, slab)
        with device.using(device.new_stream()):
            # The bytes are written, and erased, behind a delay that only the fences wait for.
            for to_host in (True, False):
                device.occupy(DELAY_CYCLES)
                for tensor, content in zip(tensors, expected, strict=True):
                    tensor[places] = content if to_host else torch.zeros_like(content)
                check(copier.launch(moves, to_host, copier.record_fence()))
            device.wait_for_stream()
        pairs = zip(tensors, expected, strict=True)
        same = all(torch.equal(tensor[places], content) for tensor, content in pairs)
        return same, copier.stats()


def captures() -> Iterator[Row]:
    """CUDA graphs captured while transfers run and a second slab is pinned."""
    numbers = device.matrix(64, 64).float().zero_()

    def add() -> None:
        for _ in range(50):
            numbers.add_(1)

    with Ours(8, 18 * sizes.KIB, 8 * sizes.MIB) as ours, Transfers(ours) as transfers:
        slab = tier_slab(bytes_to_pin() // sizes.MIB, sizes.MIB)
        caches = caches_of([device.pages(8, sizes.MIB)])
        with closing(make_copier(caches, slab, ChunkLayout(caches, 1))) as copier:
            for _ in range(sizes.CAPTURES):
                device.capture(add).replay()
            device.wait_for_stream()
            until_pinned(copier, slab)
        moved = transfers.num_bytes
    right = bool((numbers == 50 * sizes.CAPTURES).all())
    yield row("graphs captured and replayed", sizes.CAPTURES, "", None)
    yield row("their results", "right" if right else "WRONG", "")
    yield row("transferred meanwhile", moved / sizes.MIB, "MiB")
    if not right:
        raise RuntimeError("graphs captured beside transfers computed something else")
