"""HiCache's storage calls: kvoffload's disk tier, and SGLang's own ``file`` backend.

    .venv-sglang/bin/python -m benchmarks.sglang.storage [--folder /dev/shm] [--fill empty]

All store and load the same pages of one host pool, in batches of 128 as HiCache does, in one
process and by turns. ``file`` verifies nothing, and reads the page cache where it has the pages. So
each store loads twice: just after it has stored, and after the page cache has forgotten all files.
In a full store each page that is stored evicts one of an earlier turn; ``file`` has the same limit.
In a folder in memory, as ``/dev/shm``, no device limits any side, and nothing is forgotten.
"""

import argparse
import hashlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from benchmarks.harness import out_of_page_cache
from kvoffload.connectors.sglang import storage

BATCH = 128
Row = tuple[float, float]
"""Seconds, and seconds of processor time."""
TOKENS = 64
TEXT = {"is_multimodal": False, "is_audio_model": False}
"""Of a model without images."""
NO_ROLE = SimpleNamespace(disaggregation_mode="null", enable_pd_role_switch=False)
NO_SESSIONS = SimpleNamespace(enable_streaming_session=False)
ONE_HOST = SimpleNamespace(nnodes=1, tp_size=1, pp_size=1)


class Pool:
    """A host pool with pages of two parts, K and V."""

    page_size, layout, dtype = TOKENS, "page_first", torch.uint8

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.buffer = torch.randint(0, 256, (2, num_pages, page_bytes // 2), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        # By numbers alone, as SGLang's pools do.
        start, (_, num_pages, size) = self.buffer.data_ptr(), self.buffer.shape
        pages = [i // TOKENS for i in indices[::TOKENS].tolist()]
        parts = [start + (half * num_pages + page) * size for page in pages for half in range(2)]
        return parts, [size] * len(parts)


class File:
    """The ``file`` backend, called as HiCache calls it."""

    def __init__(self, pool: Pool, folder: Path, limit: int | None) -> None:
        config = make_config()
        config.extra_config = {} if limit is None else {"max_size": str(limit)}
        self.backend = HiCacheFile(config, str(folder))
        self.folder = folder
        self.pool = pool

    def save(self, keys: list[str], pages: range) -> bool:
        values = [self.pool.buffer[:, page].flatten() for page in pages]
        return bool(self.backend.batch_set(keys, values))

    def load(self, keys: list[str], pages: range) -> bool:
        targets = [torch.zeros_like(self.pool.buffer[:, page]).flatten() for page in pages]
        got = self.backend.batch_get(keys, targets)
        for page, value in zip(pages, got, strict=True):
            self.pool.buffer[:, page] = value.view(2, -1)
        return all(value is not None for value in got)

    def find(self, keys: list[str]) -> int:
        return int(self.backend.batch_exists(keys))

    def close(self) -> None:
        pass


class Ours:
    """KVOffloadHiCache, with pages of the host pool in place."""

    def __init__(self, pool: Pool, folder: Path, form: str, **disk: Any) -> None:
        disk = {"type": "disk", "root": str(folder), "capacity": "8GiB", "min_free": 0} | disk
        self.folder = folder
        config = make_config()
        config.extra_config = {"interface_v1": 1, "backends": [disk], "io": form}
        with (  # there is no engine whose configuration could be asked
            patch.object(storage, "check_hooks"),
            patch.object(storage, "process_model_config", lambda: SimpleNamespace(**TEXT)),
            patch.object(storage, "engine_facts", lambda settings: {"weights": "random"}),
            patch.object(storage, "get_disagg", lambda: NO_ROLE),
            patch.object(storage, "get_parallel", lambda: ONE_HOST),
            patch.object(storage, "get_serving", lambda: NO_SESSIONS),
        ):
            self.backend = storage.KVOffloadHiCache(config, {})
            self.backend.register_mem_pool_host(pool)
            self.backend.on_host_pools_registered()

    def save(self, keys: list[str], pages: range) -> bool:
        return all(self.backend.batch_set_v1(keys, tokens(pages)))

    def load(self, keys: list[str], pages: range) -> bool:
        return all(self.backend.batch_get_v1(keys, tokens(pages)))

    def find(self, keys: list[str]) -> int:
        return int(self.backend.batch_exists(keys))

    def close(self) -> None:
        self.backend.close()


def tokens(pages: range) -> torch.Tensor:
    return torch.arange(pages.start * TOKENS, pages.stop * TOKENS)


def make_config() -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True, model_name="m",
    )  # fmt: skip


def in_batches(call: Any, keys: list[str]) -> Row:
    used_s = processor_s()
    begun = time.perf_counter()
    for start in range(0, len(keys), BATCH):
        part = keys[start : start + BATCH]
        assert call(part, range(start, start + len(part))), "a page failed"
    return time.perf_counter() - begun, processor_s() - used_s


def processor_s() -> float:
    """Return the processor time of this process and of its I/O processes."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    # The clock of another process, as clock_getcpuclockid(3) makes it.
    clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *((~int(pid) << 3) | 2 for pid in children)]
    return sum(map(time.clock_gettime, clocks))


def until_found(store: Any, keys: list[str]) -> None:
    end = time.monotonic() + 30
    while store.find(keys) < len(keys):
        assert time.monotonic() < end, "pages are not found"
        time.sleep(0.01)


def loaded(store: Any, pool: Pool, keys: list[str]) -> Row:
    """Load all pages into an empty pool; return the time and the processor time."""
    before = pool.buffer.clone()
    pool.buffer.zero_()
    row = in_batches(store.load, keys)
    assert torch.equal(pool.buffer, before), "wrong bytes"
    return row


def turn_of(store: Any, pool: Pool, keys: list[str]) -> dict[str, Row]:
    """Store pages, and load them warm and cold; return the time and the processor time of each."""
    rows = {"backup": in_batches(store.save, keys)}
    until_found(store, keys)
    rows["warm"] = loaded(store, pool, keys)
    out_of_page_cache(store.folder)
    rows["cold"] = loaded(store, pool, keys)
    # As many keys as a prompt of 128,000 tokens has: all of them are present.
    many = (keys * (2000 // len(keys) + 1))[:2000]
    begun = time.perf_counter()
    assert store.find(many) == 2000
    rows["2,000 keys"] = (time.perf_counter() - begun, 0.0)
    return rows


def make_stores(pool: Pool, folder: Path, limit: int | None, wanted: list[str]) -> dict[str, Any]:
    """Open the wanted stores; each holds at most ``limit`` bytes."""
    bound = {} if limit is None else {"capacity": limit}
    made: dict[str, Callable[[], Any]] = {
        "file": lambda: File(pool, folder / "file", limit),
        "kvoffload": lambda: Ours(pool, folder / "process", "process", **bound),
        "direct": lambda: Ours(pool, folder / "direct", "process", io="direct", **bound),
        "buffered": lambda: Ours(pool, folder / "buffered", "process", io="buffered", **bound),
        "thread": lambda: Ours(pool, folder / "thread", "thread", **bound),
    }
    return {name: made[name]() for name in wanted}


def compare(options: argparse.Namespace, page_bytes: int, *, is_full: bool) -> None:
    """Measure all stores by turns, and print the medians."""
    num_pages = (options.mib << 20) // page_bytes
    # Full: the store holds the pages of two turns, and each turn evicts those of an earlier one.
    limit = 2 * num_pages * (page_bytes + 4096) + (64 << 20) if is_full else None
    warmups = 3 if is_full else 0
    pool = Pool(num_pages, page_bytes)
    times: dict[str, list[dict[str, Row]]] = {name: [] for name in options.stores}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        stores = make_stores(pool, Path(folder), limit, options.stores)
        for turn in range(-warmups, options.rounds):
            keys = [hashlib.sha256(f"{turn} {i}".encode()).hexdigest() for i in range(num_pages)]
            for name, store in stores.items():
                if turn < 0:
                    in_batches(store.save, keys)
                else:
                    times[name].append(turn_of(store, pool, keys))
        for store in stores.values():
            store.close()
    kind = "full" if is_full else "empty"
    print(f"\n{num_pages} pages of {page_bytes >> 10} KiB, {kind}, medians of {options.rounds}")
    print(f"{'':12}", *(f"{column:>24}" for column in ("backup", "warm", "cold", "2,000 keys")))
    told = {}
    for name, turns in times.items():
        told[name] = {
            column: tuple(statistics.median(turn[column][i] for turn in turns) for i in range(2))
            for column in turns[0]
        }
        cells = []
        for column, (seconds, cpu_s) in told[name].items():
            if column == "2,000 keys":
                cells.append(f"{seconds * 1e3:8.2f} ms")
                continue
            rate, cpu_us = num_pages * page_bytes / seconds / (1 << 30), cpu_s * 1e6 / num_pages
            ratio = told["file"][column][0] / seconds if "file" in told else float("nan")
            cells.append(f"{rate:5.2f} {ratio:5.2f} x {cpu_us:6.0f} us")
        print(f"{name:12}", *(f"{cell:>24}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page-bytes", type=int, nargs="+", default=[64 << 10, 512 << 10, 4 << 20])
    parser.add_argument("--mib", type=int, default=256, help="of the pages of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stores", nargs="+", default=["file", "kvoffload", "direct"])
    parser.add_argument("--fill", nargs="+", choices=["empty", "full"], default=["empty", "full"])
    parser.add_argument("--folder", help="where all stores are made; default: the temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(1)  # `file` copies pages with torch, whose threads would wait for cores
    logging.disable(logging.WARNING)  # small pages are warned of
    print("GiB/s, times the rate of `file`, and processor time a page")
    for page_bytes in options.page_bytes:
        for fill in options.fill:
            compare(options, page_bytes, is_full=fill == "full")


if __name__ == "__main__":
    main()
