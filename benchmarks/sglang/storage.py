"""HiCache's storage calls: kvoffload's disk tier, and SGLang's own ``file`` backend.

    .venv-sglang/bin/python -m benchmarks.sglang.storage [--folder /dev/shm] [--pages 512]

Both store and load the same pages of one host pool, in batches of 128 as HiCache does, in one
process and by turns. ``file`` verifies nothing, and reads the page cache where it has the pages. So
each store loads twice: just after it has stored, and after the page cache has forgotten all files.
In a folder in memory, as ``/dev/shm``, no device limits either side, and nothing is forgotten.
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from kvoffload.connectors.sglang import storage

BATCH = 128
TOKENS = 64
TEXT = {"is_multimodal": False, "is_audio_model": False}
"""Of a model without images."""


class Pool:
    """A host pool with pages of two parts, K and V."""

    page_size, layout, dtype = TOKENS, "page_first", torch.uint8

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.buffer = torch.randint(0, 256, (2, num_pages, page_bytes // 2), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        pages = [int(i) // TOKENS for i in indices[::TOKENS]]
        parts = [self.buffer[half, page] for page in pages for half in range(2)]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


class File:
    """The ``file`` backend, called as HiCache calls it."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.backend = HiCacheFile(make_config(), str(folder))
        self.pool = pool

    def save(self, keys: list[str], pages: range) -> bool:
        values = [self.pool.buffer[:, page].flatten() for page in pages]
        return self.backend.batch_set(keys, values)

    def load(self, keys: list[str], pages: range) -> bool:
        targets = [torch.zeros_like(self.pool.buffer[:, page]).flatten() for page in pages]
        got = self.backend.batch_get(keys, targets)
        for page, value in zip(pages, got, strict=True):
            self.pool.buffer[:, page] = value.view(2, -1)
        return all(value is not None for value in got)

    def find(self, keys: list[str]) -> int:
        return self.backend.batch_exists(keys)

    def close(self) -> None:
        pass


class Ours:
    """KVOffloadHiCache, with pages of the host pool in place."""

    def __init__(self, pool: Pool, folder: Path, form: str, **disk: Any) -> None:
        disk |= {"type": "disk", "root": str(folder), "capacity": "8GiB", "min_free": 0}
        config = make_config()
        config.extra_config = {"interface_v1": 1, "backends": [disk], "io": form}
        with (  # there is no engine whose configuration could be asked
            patch.object(storage, "check_hooks"),
            patch.object(storage, "process_model_config", lambda: SimpleNamespace(**TEXT)),
            patch.object(storage, "engine_facts", lambda settings: {"weights": "random"}),
        ):
            self.backend = storage.KVOffloadHiCache(config, {})
            self.backend.register_mem_pool_host(pool)
            self.backend.on_host_pools_registered()

    def save(self, keys: list[str], pages: range) -> bool:
        return all(self.backend.batch_set_v1(keys, tokens(pages)))

    def load(self, keys: list[str], pages: range) -> bool:
        return all(self.backend.batch_get_v1(keys, tokens(pages)))

    def find(self, keys: list[str]) -> int:
        return self.backend.batch_exists(keys)

    def close(self) -> None:
        self.backend.close()


def tokens(pages: range) -> torch.Tensor:
    return torch.arange(pages.start * TOKENS, pages.stop * TOKENS)


def make_config() -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True, model_name="m",
    )  # fmt: skip


def in_batches(call: Any, keys: list[str]) -> float:
    begun = time.perf_counter()
    for start in range(0, len(keys), BATCH):
        part = keys[start : start + BATCH]
        assert call(part, range(start, start + len(part))), "a page failed"
    return time.perf_counter() - begun


def until_found(store: Any, keys: list[str]) -> None:
    end = time.monotonic() + 30
    while store.find(keys) < len(keys):
        assert time.monotonic() < end, "pages are not found"
        time.sleep(0.01)


def forget_files(folder: str) -> None:
    """Write all files below a folder to the device, and take them out of the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def loaded_in_s(store: Any, pool: Pool, keys: list[str]) -> float:
    """Load all pages into an empty pool; return the seconds."""
    before = pool.buffer.clone()
    pool.buffer.zero_()
    seconds = in_batches(store.load, keys)
    assert torch.equal(pool.buffer, before), "wrong bytes"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--page-bytes", type=int, default=512 << 10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where all stores are made; default: the temporary folder")
    options = parser.parse_args()
    pool = Pool(options.pages, options.page_bytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        stores = {
            "file": File(pool, Path(folder, "file")),
            "kvoffload": Ours(pool, Path(folder, "process"), "process"),
            "kvoffload, io thread": Ours(pool, Path(folder, "thread"), "thread"),
            "kvoffload, buffered": Ours(pool, Path(folder, "buffered"), "process", io="buffered"),
            "kvoffload, 8 writers": Ours(pool, Path(folder, "many"), "process", write_threads=8),
        }
        times: dict[str, list[tuple[float, ...]]] = {name: [] for name in stores}
        for turn in range(options.rounds):
            keys = [hashlib.sha256(f"{turn} {i}".encode()).hexdigest() for i in range(2000)]
            held = keys[: options.pages]
            for name, store in stores.items():
                saved = in_batches(store.save, held)
                until_found(store, held)
                loaded = loaded_in_s(store, pool, held)
                forget_files(folder)
                cold = loaded_in_s(store, pool, held)
                # As many keys as a prompt of 128,000 tokens has: all of them are present.
                many = (held * (2000 // len(held) + 1))[:2000]
                begun = time.perf_counter()
                assert store.find(many) == 2000
                times[name].append((saved, loaded, cold, time.perf_counter() - begun))
        for store in stores.values():
            store.close()
    gib = options.pages * options.page_bytes / (1 << 30)
    print(f"{options.pages} pages of {options.page_bytes >> 10} KiB, medians of {options.rounds}")
    columns = ("backup", "prefetch", "cold", "2,000 keys")
    print(" " * 24, *(f"{column:>11}" for column in columns))
    for name, rows in times.items():
        *moved, asked = (statistics.median(column) for column in zip(*rows, strict=True))
        rates = (f"{gib / seconds:5.2f} GiB/s" for seconds in moved)
        print(f"{name:24}", *rates, f"{asked * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
