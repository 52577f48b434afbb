"""Rates with no model running: the link, pieces by the driver, ours; and submissions."""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu import device, sizes
from benchmarks.gpu.ours import WAYS, Delays, Ours, median_s, parts, times
from benchmarks.harness import Row, quantile, row
from kvoffload.config import human_bytes
from kvoffload.messages import CPULoadStoreSpec, GPULoadStoreSpec
from kvoffload.transfer.cuda.stream_copier import DIRECT_PAGE_BYTES
from kvoffload.transfer.engine import TransferEngine


def rate(way: str, num_bytes: int, moved: int, seconds: float) -> Row:
    """GB/s of ``moved`` bytes; the summary compares it with a large copy of ``num_bytes``."""
    value = moved * len(WAYS[way]) / seconds / 1e9
    case = f"{way}, {human_bytes(num_bytes)}"
    return row(case, value, "GB/s") | {"way": way, "bytes": num_bytes}


def link() -> Iterator[Row]:
    """One large pinned copy each way, and one each way at once: the limit of the rest.

    The wait is that of our own transfers, asleep until the end.
    """
    most = max(sizes.LINK_BYTES)
    host = [device.pinned(most) for _ in range(2)]
    gpu = [device.pages(1, most)[0] for _ in range(2)]
    streams = [device.new_stream() for _ in range(2)]

    def copy(which: tuple[bool, ...], num_bytes: int) -> None:
        for to_host in which:
            ends = host[to_host][:num_bytes], gpu[to_host][:num_bytes]
            target, source = ends if to_host else ends[::-1]
            with device.using(streams[to_host]):
                target.copy_(source, non_blocking=True)
        device.wait_for_ends([streams[to_host] for to_host in which])

    for num_bytes, (way, which) in itertools.product(sizes.LINK_BYTES, WAYS.items()):
        yield rate(way, num_bytes, num_bytes, median_s(partial(copy, which, num_bytes)))


def sweep() -> Iterator[Row]:
    """Scattered pieces in one call of the driver: what direct copies can reach, by their size."""
    batch, streams = device.BatchCopy(), [device.new_stream() for _ in range(2)]
    most = max(sizes.LINK_BYTES)
    host = [device.pinned(2 * most) for _ in range(2)]
    gpu = [device.pages(1, 2 * most)[0] for _ in range(2)]
    draw = np.random.default_rng(0)

    def scattered(tensor: Any, piece: int, count: int) -> Any:
        places = draw.permutation(2 * most // piece)[:count] * piece
        return (tensor.data_ptr() + places).astype(np.uint64)

    def enqueue(to_host: bool, ends: Any, lengths: Any) -> None:
        target, source = ends[to_host] if to_host else ends[to_host][::-1]
        order = device.STREAM_ORDER if to_host else device.ANY_ORDER
        batch(target, source, lengths, streams[to_host], order)

    def copy(which: tuple[bool, ...], ends: Any, lengths: Any) -> None:
        for to_host in which:
            enqueue(to_host, ends, lengths)
        device.wait_for_all()

    for piece in sizes.PIECES:
        count = min(sizes.MOST_PIECES, most // piece)
        lengths = np.full(count, piece, np.uint64)
        ends = [[scattered(one[i], piece, count) for one in (host, gpu)] for i in range(2)]
        pieces = f"{count} pieces of {human_bytes(piece)}"
        for way, which in WAYS.items():
            took_s = median_s(partial(copy, which, ends, lengths))
            yield rate(way, most, count * piece, took_s) | {"case": f"{way}, {pieces}"}
        called_s = times(partial(enqueue, True, ends, lengths), sizes.ROUNDS)
        device.wait_for_all()
        yield row(f"call with {pieces}", min(called_s) * 1e6 / count, "µs each")


def our_rates(name: str, ours: Ours, num_bytes: int) -> Iterator[Row]:
    """Rows of our transfers of this size, each way and both ways."""
    for way, which in WAYS.items():
        one = rate(way, num_bytes, ours.num_bytes, median_s(partial(ours.run, which)))
        yield one | {"case": f"{name}, {one['case']}"}


def rates() -> Iterator[Row]:
    """Our transfers, from their launch to their end, by shape of cache and size.

    Goals are judged by the largest: two hand-overs between threads are a tenth of 64 MiB.
    """
    for (name, shape), num_bytes in itertools.product(sizes.SHAPES.items(), sizes.LINK_BYTES):
        with Ours(*shape, num_bytes) as ours:
            for one in our_rates(name, ours, num_bytes):
                goal = "both ways" if one["way"] == "both ways" else "one way"
                if shape[1] < DIRECT_PAGE_BYTES:
                    goal = "small pieces"
                yield one | ({"goal": goal} if num_bytes == max(sizes.LINK_BYTES) else {})
            how = ", ".join(f"{key} {value}" for key, value in ours.copier.stats().items())
            yield row(f"{name}, copier", how, "")


def submit() -> Iterator[Row]:
    """A submission on the engine's thread, and a second thread's wait for the GIL meanwhile."""
    blocks = max(sizes.SUBMIT_BLOCKS)
    with Ours(1, sizes.SUBMIT_PAGE, blocks * sizes.SUBMIT_PAGE) as ours:
        engine = TransferEngine(None, ours.slab, ours.layout, ours.copier)
        with Delays() as alone:
            time.sleep(sizes.LISTEN_S)
        for to_host, count in itertools.product((True, False), sizes.SUBMIT_BLOCKS):
            with Delays() as delays:
                took = [_submit(engine, ours, to_host, count) for _ in range(sizes.SUBMITS)]
            case = f"{'store' if to_host else 'load'} of {count} blocks"
            limit = 20 + 0.1 * count, "20 µs and 0.1 µs a page"
            value = quantile(took, 0.5) * 1e6
            yield row(f"submit {case}", value, "µs", *limit) | {"goal": "submit"}
            yield from delayed(case, delays, alone)


def _submit(engine: TransferEngine, ours: Ours, to_host: bool, count: int) -> float:
    """Seconds of the submission alone; its transfer has ended on return."""
    gpu = GPULoadStoreSpec(ours.blocks[to_host][:count])
    host = CPULoadStoreSpec(ours.slots[to_host][:count])
    spec = (gpu, host) if to_host else (host, gpu)
    (took_s,) = times(lambda: engine.submit(1, spec, count), 1)
    engine.wait([1])
    (result,) = engine.get_finished()
    if not result.success:
        raise RuntimeError(f"a transfer failed: {result.reason}")
    return took_s


def delayed(case: str, delays: Delays, alone: Delays) -> Iterator[Row]:
    """Rows of a second thread's delays, against those alone."""
    for part, value, limit in parts(delays.late_s, alone.late_s, 3):
        yield row(f"second thread late {part}, {case}", value, "ms", limit, "alone")
