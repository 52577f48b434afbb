"""Which rank writes a chunk, where all ranks have the same bytes.

With multi-head latent attention every rank of a tensor parallel group has the whole KV cache. One
copy in a tier is enough, if all ranks see it. Ranks then have one namespace, and each writes its
part of the chunks. A rank reports the other ranks' chunks as stored. The scheduler joins all
reports, so a chunk is present when its writer has stored it.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from kvoffload.messages import (
    BackendLoadStoreSpec,
    CPULoadStoreSpec,
    OffloadKey,
    TransferResult,
)

Write = tuple[CPULoadStoreSpec, BackendLoadStoreSpec]
"""The ends of a write-through."""
_HASHED_BYTES = 8
"""Of the beginning of a key, which is a block's hash."""


class SharedWrites:
    """This rank's part of the write-through; for the engine's thread alone.

    Args:
        rank: this worker's number.
        num_ranks: workers that have the same bytes.
        tiers: names of the tiers of which all these workers see the same chunks.
    """

    def __init__(self, rank: int, num_ranks: int, tiers: Collection[str]) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._tiers = frozenset(tiers)
        self._own: dict[int, list[bool]] = {}
        """Job → for each chunk, whether this rank writes it."""

    def writes(self, key: OffloadKey) -> bool:
        """Return whether this rank writes a chunk."""
        return int.from_bytes(key[:_HASHED_BYTES], "big") % self._num_ranks == self._rank

    def begin(self, job_id: int, ends: Write) -> tuple[Write, int]:
        """Return the part of a write-through that this rank carries out, and its chunks."""
        source, target = ends
        keys: Sequence[OffloadKey] = target.keys
        if target.tier not in self._tiers:
            return ends, len(keys)
        self._own[job_id] = own = list(map(self.writes, keys))
        keys = [key for key, is_own in zip(keys, own, strict=True) if is_own]
        slots = source.host_slots[np.array(own)]
        return (CPULoadStoreSpec(slots), BackendLoadStoreSpec(target.tier, keys)), len(keys)

    def end(self, result: TransferResult) -> TransferResult:
        """Turn the result of a part into one for all chunks of its job."""
        own = self._own.pop(result.job_id, None)
        if own is None:
            return result
        answers = iter(result.ok)
        return replace(result, ok=tuple(not is_own or next(answers) for is_own in own))
