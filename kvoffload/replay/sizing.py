"""From a trace to the capacity a hit rate needs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.replay.simulate import Progress
from kvoffload.replay.study import study_one
from kvoffload.replay.trace import Trace

Point = tuple[int, float]
"""A capacity in blocks of the whole trace, and the contiguous-prefix hit rate there."""

_SMALLEST = 1 / 512


@dataclass(frozen=True)
class SizeForShare:
    """The least capacity found for a share of what an infinite store would hit."""

    share: float
    hit_rate: float
    blocks: int


def curve_sizes(trace: Trace) -> list[int]:
    """Capacities to try: from a small part of the distinct blocks to all, doubling."""
    whole = math.ceil(trace.distinct / trace.sample)
    sizes = {whole}
    size = float(whole)
    while size > max(1.0, whole * _SMALLEST):
        size /= 2
        sizes.add(max(1, round(size)))
    return sorted(sizes)


def curve(trace: Trace, policy: str, progress: Progress) -> list[Point]:
    """Replay a policy at growing capacities; the last one holds everything.

    Raises:
        ConfigError: no such policy.
    """
    return [
        (size, study_one(trace, policy, {"": size}, progress).hits.prefix_rate)
        for size in curve_sizes(trace)
    ]


def size_for_share(points: Sequence[Point], share: float) -> SizeForShare:
    """Read the capacity for a share, at most 1, of the last point's rate off the curve.

    Between two points the rate is taken to grow with the logarithm of the capacity.
    """
    goal = share * points[-1][1]
    at = next(number for number, (_, rate) in enumerate(points) if rate >= goal)
    high, high_rate = points[at]
    if not at:
        return SizeForShare(share, high_rate, high)
    low, low_rate = points[at - 1]
    part = (goal - low_rate) / (high_rate - low_rate)
    return SizeForShare(share, goal, round(low * (high / low) ** part))
