"""The disk and Redis tiers with encryption and without it, in turns in the same run.

``kvoffload bench encryption``. The limit of each row is the same tier, opened alike, whose chunks
have a checksum. Processor time is that of this process. The rows of Redis need a redis-server.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, check_all, report, row, slots, timed
from kvoffload import open_backend
from kvoffload.backends.base import Backend
from kvoffload.backends.encryption import CipherSeal
from kvoffload.backends.header import namespace_digest
from kvoffload.backends.seals import ChecksumSeal, Seal
from kvoffload.testing.backends import keys_of

TOTAL_BYTES = 64 << 20
ROUNDS = 9
SIZES = ((2 << 20, "2 MiB"), (256 << 10, "256 KiB"))
PATIENT = {"timeout_s": 30.0, "connect_timeout_s": 30.0, "lookup_timeout_s": 30.0}


def run(total_bytes: int = TOTAL_BYTES) -> dict[str, Any]:
    """Measure in a scratch folder below TMPDIR, and on a Redis of its own."""
    scratch = Path(tempfile.mkdtemp(prefix="kvoffload-bench-"))
    keys = scratch / "keys"
    keys.touch(0o600)
    keys.write_text(os.urandom(32).hex())
    try:
        rows = list(_seals(total_bytes))
        for size, label in SIZES:
            for io in ("direct", "buffered"):
                options = {"io": io, "min_free": 0, "capacity": 8 * total_bytes}
                roots = [str(scratch / f"{io}-{size}-{kind}") for kind in ("plain", "encrypted")]
                open_it = partial(_disk, roots, options)
                rows += _measured(f"disk, {label}, {io}", size, total_bytes, keys, open_it)
        return report("encryption", [*rows, *_redis(scratch, keys, total_bytes)])
    finally:
        shutil.rmtree(scratch)


def _disk(roots: list[str], options: dict[str, Any], i: int, more: dict[str, Any]) -> Backend:
    return open_backend("disk", {"root": roots[i], **options, **more}, "bench")


def _redis(scratch: Path, keys: Path, total_bytes: int) -> Iterator[Row]:
    from tests.support.redis_server import BINARY, RedisServer

    if BINARY is None:
        return
    server = RedisServer(scratch / "redis")
    try:
        for size, label in SIZES:
            yield from _measured(
                f"Redis, {label}", size, total_bytes, keys,
                lambda i, more: open_backend("redis", {"url": server.url, **PATIENT, **more}, "n"),
            )  # fmt: skip
            server.cli("flushall")
    finally:
        server.stop()


def _measured(
    case: str, size: int, total: int, keys: Path, open_it: Callable[[int, dict[str, Any]], Backend]
) -> list[Row]:
    """Let a plain and an encrypted tier take turns at stores and loads."""
    loop = asyncio.new_event_loop()
    sides = [open_it(0, {}), open_it(1, {"encryption": {"key_file": str(keys)}})]
    names, memory = keys_of(total // size), slots(total // size, size)
    best = {verb: [float("inf")] * 2 for verb in ("store", "load", "cpu")}
    try:
        for turn in range(ROUNDS + 1):
            for i in (0, 1) if turn % 2 else (1, 0):
                loop.run_until_complete(sides[i].remove(names))
                began_s = time.process_time()
                store_s = _timed(loop, sides[i].write(names, memory))
                load_s = _timed(loop, sides[i].read(names, memory))
                cpu_s = time.process_time() - began_s
                if turn:  # the first warms up
                    measured = (("store", store_s), ("load", load_s), ("cpu", cpu_s))
                    for verb, seconds in measured:
                        best[verb][i] = min(best[verb][i], seconds)
    finally:
        for side in sides:
            loop.run_until_complete(side.close())
        loop.close()
    gigabytes = total / 1e9
    rows = [
        row(f"{verb}: {case}", gigabytes / ours, "GB/s", gigabytes / plain, "the same without")
        for verb, (plain, ours) in best.items()
        if verb != "cpu"
    ]
    plain, ours = best["cpu"]
    text = f"store and load: {case}"
    return [*rows, row(text, ours / gigabytes, "CPU s/GB", plain / gigabytes, "the same without")]


def _seals(total: int) -> Iterator[Row]:
    """What guards a chunk of 2 MiB, alone: one pass over it each."""
    (key,), digest, size = keys_of(1), namespace_digest("n"), 2 << 20
    (chunk,) = slots(1, size)
    best: dict[str, list[float]] = {"pack": [], "check": []}
    seals: tuple[Seal, Seal] = ChecksumSeal(), CipherSeal([os.urandom(32).hex().encode()])
    for seal in seals:
        stored, checked = [], []
        for _ in range(total // size * ROUNDS):
            began = time.perf_counter()
            header, packed = seal.pack(key, digest, chunk)
            stored.append(time.perf_counter() - began)
            read = memoryview(bytearray(packed))
            seal.done(packed)
            began = time.perf_counter()
            if seal.fault(memoryview(header), read, key, digest) is not None:
                raise RuntimeError("a whole chunk was refused")
            checked.append(time.perf_counter() - began)
        best["pack"].append(min(stored))
        best["check"].append(min(checked))
    for verb, (plain, ours) in best.items():
        name = "the same with a checksum"
        yield row(f"{verb} 2 MiB in memory", size / ours / 1e9, "GB/s", size / plain / 1e9, name)


def _timed(loop: asyncio.AbstractEventLoop, call: Any) -> float:
    return timed(lambda: check_all(loop.run_until_complete(call)))
