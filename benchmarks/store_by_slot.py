"""What stores by slot would save in the server of a host, and what they would cost.

``kvoffload bench store_by_slot``. By slot, an engine would copy chunks straight into the server's
memory. Today the server copies them out of slots of the engine. Servers take turns: one as it is,
one that copies no store, and one that verifies each loan. The second takes at least what a server
takes that only hashes what engines have written. The third is one whose memory engines can write.
Last, ways to take memory back from its writer stand against one plain copy.
"""

import ctypes
import fcntl
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, caches_of, report, row
from benchmarks.serve import BY_SLOT, PAGE, SERVE, SIZE, TOTAL_BYTES, Engine, cpu_s, ready
from kvoffload.backends.header import checksum
from kvoffload.io.service.host_memory import HostMemory
from kvoffload.io.service.listener import Listener
from kvoffload.io.service.service import run_service
from kvoffload.io.service.settings import read_serve_config
from kvoffload.messages import GPULoadStoreSpec
from kvoffload.testing.harness import keys_of
from kvoffload.transfer.cpu.copier import CpuCopier
from kvoffload.transfer.layout import ChunkLayout
from kvoffload.transfer.shared_memory import create_shared_memory
from kvoffload.transfer.slab import Slab

MEMORY = 1 << 30
ROUNDS = 9
MOVES = 8
"""Stores and loads of a server in one turn: its processor time is told in steps of 10 ms."""
KINDS = AS_IS, NO_COPY, EACH_LOAN = "as it is", "without the copy", "each loan verified"
JOBS = 2, 64
"""Chunks of one store: the slots of 2 stay in the processor's caches, those of 64 do not."""
BLOCKS, A_CHUNK = 256, 4
SEGMENT = 64 << 20


def run(total_bytes: int = TOTAL_BYTES) -> dict[str, Any]:
    """Measure with servers of their own, then in this process."""
    rows = [*_servers(total_bytes), *map(_whole_stores, JOBS), *_taken_back()]
    return report("store_by_slot", rows)


# ---- servers ----


def _servers(total_bytes: int) -> list[Row]:
    stored_s, loaded_s, took_s = (defaultdict[str, list[float]](list) for _ in range(3))
    gigabytes = total_bytes / 1e9
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        served = {}
        for kind in KINDS:
            path = f"{folder}/{KINDS.index(kind)}"
            server = stack.enter_context(ready("benchmarks.store_by_slot", path, kind))
            engine = stack.enter_context(closing(Engine(path, SERVE, total_bytes)))
            served[kind] = engine, server.pid
        for turn in range(ROUNDS + 1):  # the first one fills the memory
            for kind, (engine, pid) in served.items():
                spent_s = _spent(pid, partial(_store, engine, turn))
                stored_s[kind].append(spent_s / MOVES / gigabytes)
                if kind != NO_COPY:  # what it has are no chunks
                    loads: list[float] = []
                    spent_s = _spent(pid, partial(_load, engine, loads))
                    loaded_s[kind].append(spent_s / MOVES / gigabytes)
                    took_s[kind] += loads
    copied, uncopied = (statistics.mean(stored_s[kind][1:]) for kind in (AS_IS, NO_COPY))
    once, each = (statistics.mean(loaded_s[kind][1:]) for kind in (AS_IS, EACH_LOAN))
    fast, slow = (gigabytes / min(took_s[kind]) for kind in (AS_IS, EACH_LOAN))
    return [
        row("store: server's processor time without its copy", uncopied, "s/GB", copied, AS_IS),
        row("load by slot: server's, each loan verified", each, "s/GB", once, AS_IS),
        row("load by slot: rate, each loan verified", slow, "GB/s", fast, AS_IS),
        row("loads that cost what a store saves", (copied - uncopied) / (each - once), "a chunk"),
    ]


def _spent(pid: int, moves: Callable[[], None]) -> float:
    before_s = cpu_s(pid)
    moves()
    return cpu_s(pid) - before_s


def _store(engine: Engine, turn: int) -> None:
    for number in range(MOVES):
        engine.keys = keys_of(engine.count, f"{turn}.{number}.")
        engine.move("store")


def _load(engine: Engine, took_s: list[float]) -> None:
    for _ in range(MOVES):
        took_s.append(engine.load(BY_SLOT))


def be_a_server(path: str, kind: str) -> None:
    """Serve from memory alone."""
    if kind == NO_COPY:
        HostMemory._copy_in = lambda self, runs, chunk: None  # type: ignore[method-assign]
    if kind == EACH_LOAN:
        lend = HostMemory.lend

        def lend_once(
            self: HostMemory, number: bytes, keys: Sequence[bytes], sizes: Sequence[int]
        ) -> Any:
            lent = lend(self, number, keys, sizes)
            for key in keys:
                if chunk := self._find(number + key):
                    chunk.is_verified = False
            return lent

        HostMemory.lend = lend_once  # type: ignore[method-assign]
    config = read_serve_config({"socket": path, "memory": MEMORY})
    run_service(config, Listener(path).sock, lambda service: print("ready", flush=True))


# ---- in one process ----


def _whole_stores(count: int) -> Row:
    """Store out of a KV cache, so many chunks at once: gather, hash, and copy if by copy."""
    tensors = [torch.ones((BLOCKS, PAGE), dtype=torch.int8) for _ in range(SIZE // PAGE // A_CHUNK)]
    caches = caches_of(tensors)
    layout, order = ChunkLayout(caches, A_CHUNK), np.random.default_rng(0).permutation(BLOCKS)
    memory, slots = _resident(BLOCKS // A_CHUNK), _resident(count)
    spent_s = dict[str, list[float]]()
    with ExitStack() as stack:
        ways = []
        for by, slab in (("by copy", slots), ("by slot", memory)):
            ways.append((by, slab, CpuCopier(caches, slab, layout)))
            stack.callback(ways[-1][2].close)
        for by, slab, copier in ways * (ROUNDS + 1):  # the first ones see that all memory is there
            begun_s = time.process_time()
            for first in range(0, BLOCKS // A_CHUNK, count):
                blocks = order[first * A_CHUNK : (first + count) * A_CHUNK]
                at = [*range(count)] if slab is slots else [*range(first, first + count)]
                moves = layout.moves(GPULoadStoreSpec(blocks), at)
                copier.launch(moves, True, copier.record_fence()).wait()
                for chunk, slot in enumerate(at, first):
                    checksum(slab.slot(slot, SIZE))
                    if slab is slots:
                        memory.slot(chunk, SIZE)[:] = slab.slot(slot, SIZE)
            spent_s.setdefault(by, []).append(time.process_time() - begun_s)
    gigabytes = BLOCKS // A_CHUNK * SIZE / 1e9
    by_copy, by_slot = (statistics.median(each[1:]) / gigabytes for each in spent_s.values())
    return row(
        f"store of {count} chunks: all processor time by slot", by_slot, "s/GB", by_copy, "by copy"
    )


def _resident(count: int) -> Slab:
    """Return shared memory of so many chunks that the system has given."""
    fd = create_shared_memory(count * SIZE)
    slab = Slab(count, SIZE, fd)
    os.close(fd)
    slab.flat[:] = 1
    return slab


def _taken_back() -> list[Row]:
    """Fill memory that the writer then cannot write any more; against plain copies of as much."""
    source, there = _resident(SEGMENT // SIZE), _resident(SEGMENT // SIZE)
    protect, spent_s = ctypes.CDLL(None).mprotect, dict[str, list[float]]()

    def copied() -> None:
        for slot in range(SEGMENT // SIZE):
            there.slot(slot, SIZE)[:] = source.slot(slot, SIZE)

    def sealed() -> None:
        fd = os.memfd_create("kvoffload-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SEGMENT)
        with mmap.mmap(fd, SEGMENT) as writable:
            writable[:] = source.slot(0, SEGMENT)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # refused while it can be written
        mmap.mmap(fd, SEGMENT, prot=mmap.PROT_READ).close()
        os.close(fd)

    def opened() -> None:
        for slot in range(SEGMENT // SIZE):
            window = ctypes.c_void_p(there.address + slot * SIZE), ctypes.c_size_t(SIZE)
            protect(*window, mmap.PROT_READ | mmap.PROT_WRITE)
            there.slot(slot, SIZE)[:] = source.slot(slot, SIZE)
            protect(*window, mmap.PROT_READ)

    for _ in range(ROUNDS):
        for fill in (copied, sealed, opened):
            begun_s = time.process_time()
            fill()
            spent_s.setdefault(fill.__name__, []).append(time.process_time() - begun_s)
        whole = ctypes.c_void_p(there.address), ctypes.c_size_t(SEGMENT)
        protect(*whole, mmap.PROT_READ | mmap.PROT_WRITE)
    copy, seal, window = (statistics.median(each) * 1e9 / SEGMENT for each in spent_s.values())
    return [
        row("a sealed memory file for each 64 MiB", seal, "s/GB", copy, "plain copy"),
        row("memory writable for each chunk in turn", window, "s/GB", copy, "plain copy"),
    ]


if __name__ == "__main__":
    be_a_server(sys.argv[1], sys.argv[2])
