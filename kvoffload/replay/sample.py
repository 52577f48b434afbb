"""A small trace that stands for a large one: a share of its blocks, against a share of each size.

A block that was used between two uses of another pushes it towards the end of the store. Of the
blocks between, a share is kept; so at a store of the same share of the size the kept blocks are
evicted when they would be in the whole (spatial sampling: C. Waldspurger and others, FAST 2015).

Chance would decide too much if blocks were drawn: one that all requests share is a hit nearly
always, and there or not. So blocks are sorted into strata by how often they are used, each stratum
gives its share, evenly over the sorted blocks and at least one, and what is counted of the kept
ones is weighted to stand for all uses of their stratum.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

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
    uses = Counter(key for request in trace.requests for key in request)
    strata: defaultdict[int, list[bytes]] = defaultdict(list)
    for key, count in uses.items():
        strata[count.bit_length()].append(key)
    weights: dict[bytes, float] = {}
    for keys in strata.values():
        keys.sort(key=uses.__getitem__)
        kept = _evenly(keys, share)
        factor = sum(map(uses.__getitem__, keys)) / sum(map(uses.__getitem__, kept))
        for key in kept:
            weights[key] = factor * trace.weights.get(key, 1)
    requests = (tuple(filter(weights.__contains__, request)) for request in trace.requests)
    return Trace(trace.name, list(filter(None, requests)), trace.sample * share, weights)


def _evenly(keys: Sequence[bytes], share: float) -> list[bytes]:
    count = max(1, round(len(keys) * share))
    return [keys[int((at + 0.5) * len(keys) / count)] for at in range(count)]
