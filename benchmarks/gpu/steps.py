"""Transfers during a model's steps: what each costs the other."""

import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu import device, sizes
from benchmarks.gpu.measures import delayed
from benchmarks.gpu.ours import Delays, Ours, Transfers, parts, times
from benchmarks.harness import Row, row

TOKENS = 16
"""Rows of a decode-like step; a small copy is of their ids."""
ID_BYTES = 1024
SHORT = "small copy"
Step = Callable[[], None]


def prefill_like() -> Step:
    """Large matrix products, as many tokens at once make them: bound by arithmetic."""
    a, b, c = (device.matrix(sizes.PRODUCT, sizes.PRODUCT) for _ in range(3))

    def step() -> None:
        for _ in range(sizes.PRODUCTS):
            torch.mm(a, b, out=c)
        device.wait_for_stream()

    return step


def decode_like() -> Step:
    """Token ids in, a CUDA graph that reads all weights, ids out: bound by device memory."""
    weights = [device.matrix(sizes.PRODUCT, sizes.PRODUCT) for _ in range(sizes.WEIGHTS)]
    tokens = device.matrix(TOKENS, sizes.PRODUCT)
    out = torch.empty_like(tokens)

    def forward() -> None:
        for weight in weights:
            torch.mm(tokens, weight, out=out)

    forward()  # Libraries allocate at the first call, which a capture forbids.
    return small_copy(device.capture(forward).replay)


def small_copy(between: Callable[[], object] = lambda: None) -> Step:
    """Token ids to the device and back, on the copy engines that our transfers use."""
    ids, here = device.pinned(ID_BYTES), device.pages(1, ID_BYTES)[0]

    def step() -> None:
        here.copy_(ids, non_blocking=True)
        between()
        ids.copy_(here, non_blocking=True)
        device.wait_for_stream()

    return step


def steps() -> Iterator[Row]:
    """For each cache: rates during each kind of step, and the steps during transfers."""
    makers = (prefill_like, decode_like, small_copy)
    kinds = {name: maker() for name, maker in zip(sizes.STEPS, makers, strict=True)}
    for step in kinds.values():
        times(step, 5)
    for name in sizes.WITH_STEPS:
        with Ours(*sizes.SHAPES[name], max(sizes.LINK_BYTES)) as ours:
            longer = {kind: step for kind, step in kinds.items() if kind != SHORT}
            yield from _with_steps(name, ours, longer)
            with Delays() as alone:
                time.sleep(sizes.LISTEN_S)
            with Delays() as delays:
                _during_transfers(ours, lambda: time.sleep(sizes.LISTEN_S), 1)
            yield from delayed(f"{name}, transfers", delays, alone)
        # A few milliseconds have too few ends of large transfers for a rate.
        with Ours(*sizes.SHAPES[name], min(sizes.LINK_BYTES)) as ours:
            yield from _with_steps(f"{name}, smaller", ours, {SHORT: kinds[SHORT]})


def _with_steps(name: str, ours: Ours, kinds: dict[str, Step]) -> Iterator[Row]:
    _, idle_rate = _during_transfers(ours, lambda: time.sleep(sizes.LISTEN_S), 1)
    yield row(f"{name}, both ways, no model", idle_rate, "GB/s")
    for kind, step in kinds.items():
        yield from _compared(name, ours, kind, step, idle_rate)


def _during_transfers(ours: Ours, work: Step, rounds: int) -> tuple[list[float], float]:
    """Seconds of each round, and the GB/s that were transferred meanwhile."""
    with Transfers(ours) as transfers:
        time.sleep(sizes.LISTEN_S / 10)  # until they follow each other
        before = transfers.num_bytes
        took = times(work, rounds)
        return took, (transfers.num_bytes - before) / sum(took) / 1e9


def _compared(name: str, ours: Ours, kind: str, step: Step, idle_rate: float) -> Iterator[Row]:
    alone: list[float] = []
    meanwhile: list[float] = []
    rates = []
    for _ in range(2):  # in turns, so that a clock that changes hits both alike
        alone += times(step, sizes.STEPS[kind])
        took, rate = _during_transfers(ours, step, sizes.STEPS[kind])
        meanwhile += took
        rates.append(rate)
    one = row(f"{name}, both ways during {kind}", min(rates), "GB/s", idle_rate, "no model")
    yield one | ({"goal": "prefill"} if kind.startswith("prefill") else {})
    for part, value, limit in parts(meanwhile, alone):
        one = row(f"{kind} {part} during {name}", value, "ms", limit, "alone")
        yield one | ({"goal": f"step {part}"} if kind.endswith("step") else {})
