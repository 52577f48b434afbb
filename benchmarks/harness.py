"""What benchmarks share: naming the machine, taking turns, and the shape of a row."""

import mmap
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the first run on a GPU says itself what is missing
    from kvoffload.messages import CanonicalKVCaches

Row = dict[str, Any]


def machine() -> str:
    """Processor, cores and Python, as a table's title names them."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}"


def best_of(*sides: Callable[[], object], rounds: int = 7) -> list[float]:
    """Let the sides take turns; return each one's best time in seconds.

    Taking turns makes a disturbance by other work on the machine hit all sides alike. Each round
    begins with another side, because a device may be quicker after a pause.
    """
    best = [float("inf")] * len(sides)
    for start in range(rounds):
        for turn in range(len(sides)):
            i = (start + turn) % len(sides)
            best[i] = min(best[i], timed(sides[i]))
    return best


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that work takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def out_of_page_cache(folder: Path) -> None:
    """Write all files to the device, and take those below a folder out of the page cache."""
    os.sync()  # one by one would take minutes where files are small
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def quantile(values: Iterable[float], share: float) -> float:
    """Return the least value that a share of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def check_all(answers: Iterable[object]) -> None:
    """Raise RuntimeError unless each chunk was stored or loaded."""
    if not all(answers):
        raise RuntimeError("a chunk was refused or missed")


def slots(count: int, size: int) -> list[memoryview]:
    """Make slots of page-aligned memory with random bytes, as a slab has them."""
    slab = memoryview(mmap.mmap(-1, count * size))
    slab[:] = os.urandom(1 << 20) * (count * size >> 20)
    return [slab[i * size : (i + 1) * size] for i in range(count)]


def caches_of(*groups: Sequence[Any]) -> "CanonicalKVCaches":
    """Take rows of bytes as the groups of a KV cache."""
    from kvoffload.messages import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    tensors = [tensor for group in groups for tensor in group]
    refs = (CanonicalKVCacheRef(i, tensor.shape[1]) for i, tensor in enumerate(tensors))
    return CanonicalKVCaches(
        tuple(CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors),
        tuple(tuple(islice(refs, len(group))) for group in groups),
    )


def row(
    case: str,
    value: float | str,
    unit: str,
    limit: float | None = None,
    limit_name: str | None = None,
    *,
    is_inverse: bool = False,
) -> Row:
    """One measurement, or a word that stands for one; the ratio is value to limit, or inverse."""
    ratio = value / limit if limit and not isinstance(value, str) else None
    if ratio and is_inverse:
        ratio = 1 / ratio
    return {
        "case": case,
        "value": value,
        "unit": unit,
        "limit": limit,
        "limit_name": limit_name,
        "ratio": ratio,
    }


def report(bench: str, rows: list[Row]) -> dict[str, Any]:
    """What ``run()`` returns."""
    return {
        "bench": bench,
        "machine": machine(),
        "command": f"kvoffload bench {bench} --json",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "rows": rows,
    }


def commit() -> str:
    """The commit that was measured, ``+`` if files had been changed since; empty if unknown."""
    try:
        name, changed = _git("rev-parse", "--short", "HEAD"), _git("diff", "--quiet", "HEAD")
    except OSError:  # no git here
        return ""
    return name.stdout.strip() + "+" * (changed.returncode == 1)


def _git(*words: str) -> "subprocess.CompletedProcess[str]":
    here = str(Path(__file__).parent)
    return subprocess.run(["git", "-C", here, *words], check=False, capture_output=True, text=True)
