"""The demo's workload as figures: time to first token cold, from memory, disk and a server.

No cache can avoid two costs, which make the limit of a pass. The engine computes the tokens that
were not loaded, at the pace of the engine without offloading. The loaded bytes move once, at the
machine's pace: memcpy, and for the disk one sequential read. Both are measured in this run.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, best_of, report, row
from kvoffload.demo import showcase


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvoffload-e2e-", dir=".") as folder:
        figures = showcase.run(showcase.DemoOptions(Path(folder)))
        copy_rate, read_rate = memcpy_rate(), disk_read_rate(Path(folder))
    return report("e2e", rows(figures, copy_rate, read_rate))


def rows(figures: dict[str, Any], copy_rate: float, read_rate: float) -> list[Row]:
    """Turn a demo's report into rows; rates are bytes a second."""
    found = []
    for each in figures["passes"]:
        name, without = each["pass"], each["baseline_median_ttft_s"]
        limit, limit_name = without, "without offloading"
        if name != "cold":
            came = each["tokens_from"]
            unit = figures["kv_bytes_per_token"] / each["requests"]
            copied = came["cpu"] + came["disk"] + came["server"]
            moving = copied * unit / copy_rate + came["disk"] * unit / read_rate
            limit = without * each["tokens_recomputed"] / each["prompt_tokens"] + moving
            limit_name = "compute what is new, move the rest once"
        found.append(row(f"{name}: median TTFT", each["median_ttft_s"], "s", limit, limit_name))
        if name != "cold":
            best = without / limit
            found.append(row(f"{name}: speed-up", each["speedup"], "x", best, limit_name))
        same = float(each["outputs_identical"])
        found.append(row(f"{name}: outputs identical", same, "of 1", 1.0, "without offloading"))
    return found


def memcpy_rate(size: int = 64 << 20) -> float:
    """Bytes a second of one large copy in memory."""
    source = np.ones(size, dtype=np.int8)
    target = np.empty_like(source)
    (seconds,) = best_of(lambda: np.copyto(target, source))
    return size / seconds


def disk_read_rate(folder: Path, size: int = 128 << 20) -> float:
    """Bytes a second of one sequential read of a file that is not in the page cache."""
    path = folder / "read-rate"
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(4 << 20)
        started = time.perf_counter()
        while os.readv(file, [buffer]):
            pass
        return size / (time.perf_counter() - started)
    finally:
        os.close(file)
        path.unlink()
