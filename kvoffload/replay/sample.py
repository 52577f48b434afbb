"""A small trace that stands for a large one: a share of its blocks, against a share of each size.

A block that is used between two uses of another block moves that one towards the end of the store.
The sample keeps a share of the blocks. In a store of the same share of the size, the kept blocks
are evicted when they would be in the whole (spatial sampling: C. Waldspurger et al., FAST 2015).

Random draws would vary too much: one block that all requests share is nearly always a hit. So
blocks are sorted into strata by their number of uses. Each stratum gives its share, evenly over the
sorted blocks, and at least one. Counts of the kept blocks are weighted to stand for all uses of
their stratum.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from kvoffload.errors import ConfigError
from kvoffload.replay.trace import Trace


def sampled(trace: Trace, share: float) -> Trace:
    """Keep a share of all blocks; of each request what is left of it.

    Raises:
        ConfigError: the share is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ConfigError("sample", share, "must be more than 0 and at most 1")
    if share == 1:
        return trace
    uses: Counter[int] = Counter()
    for request in trace.requests.blocks():
        uses.update(request)
    strata: defaultdict[int, list[int]] = defaultdict(list)
    for block, count in uses.items():
        strata[count.bit_length()].append(block)
    weights: dict[bytes, float] = {}
    for blocks in strata.values():
        blocks.sort(key=uses.__getitem__)
        kept = _evenly(blocks, share)
        factor = sum(map(uses.__getitem__, blocks)) / sum(map(uses.__getitem__, kept))
        for block in kept:
            key = trace.requests.keys[block]
            weights[key] = factor * trace.weights.get(key, 1)
    requests = trace.requests.only(weights)
    return replace(trace, requests=requests, sample=trace.sample * share, weights=weights)


def _evenly(blocks: Sequence[int], share: float) -> list[int]:
    count = max(1, round(len(blocks) * share))
    return [blocks[int((at + 0.5) * len(blocks) / count)] for at in range(count)]
