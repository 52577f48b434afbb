"""The canary: a pattern goes out and comes back through every tier before anything is trusted.

A layout misunderstood, a copy that goes astray, a store that returns something else: each would
otherwise show as wrong answers of the model, long after. Sung at the start, on blocks that nobody
uses yet, through the very handlers that will carry everything else.
"""

import logging
import os
from collections.abc import Sequence

import torch

from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.errors import ConfigError
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CanonicalKVCaches,
    CPULoadStoreSpec,
    Fetch,
    GPULoadStoreSpec,
    StagedLoadStoreSpec,
    TransferSpec,
    make_offload_key,
)
from kvoffload.transfer.worker import TransferWorker

log = logging.getLogger(__name__)

JOB = -1
"""The id of all the canary's jobs: nobody else may use it. One that a tier has not let go of is
named by it when it settles, long after."""


def sing(
    spec: TieredOffloadingSpec,
    transfers: TransferWorker,
    caches: CanonicalKVCaches,
    blocks_per_chunk: int,
) -> int:
    """Carry a pattern out and back for each KV cache group and each tier.

    A tier that does not answer is only warned about: it may come up later, and a miss harms nobody.
    But what it was to fill, it may fill yet.

    Returns:
        How many host slots, from the first, may be used: a tier may still touch those after them.

    Raises:
        ConfigError: other bytes came back than were sent, or a tier has the only slot; offloading
            must not begin.
    """
    num_slots = spec.num_slots
    num_blocks = min(len(tensor.tensor) for tensor in caches.tensors)
    source = range(1, 1 + blocks_per_chunk)
    target = range(1 + blocks_per_chunk, 1 + 2 * blocks_per_chunk)
    if target.stop > num_blocks:
        log.warning("kvoffload: the KV cache is too small for the start-up check; skipped")
        return num_slots
    for group_idx, refs in enumerate(caches.group_data_refs):
        if not refs:
            continue
        song = _Song(transfers, caches, group_idx, source, target)
        try:
            song.host(num_slots - 1)
            for name in spec.backends:
                song.tier(name)
                if song.is_unsettled:
                    num_slots -= 1
                    if not num_slots:
                        raise ConfigError("canary", name, "has not let go of the only host slot")
                    log.warning(
                        "kvoffload: tier %s has not let go of a host slot; left to it", name
                    )
                    song.host(num_slots - 1)
        finally:
            song.leave()
            for name, backend in spec.backends.items():
                del name
                key = song.key
                spec.io.start(lambda backend=backend, key=key: backend.remove([key]))  # type: ignore[misc]
    return num_slots


class _Song:
    """The check of one KV cache group."""

    def __init__(
        self,
        transfers: TransferWorker,
        caches: CanonicalKVCaches,
        group_idx: int,
        source: Sequence[int],
        target: Sequence[int],
    ) -> None:
        self.key = make_offload_key(os.urandom(32), group_idx)
        self._transfers = transfers
        self._group_idx = group_idx
        self._slot = 0
        self.is_unsettled = False
        """Whether something of the last song may still touch the host slot."""
        self._views = [
            caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes]
            for ref in caches.group_data_refs[group_idx]
        ]
        self._source, self._target = list(source), list(target)
        self._before = [view[: self._target[-1] + 1].clone() for view in self._views]
        noise = torch.Generator().manual_seed(1 + group_idx)
        for view in self._views:
            shape = (len(self._source), view.shape[1])
            pattern = torch.randint(-128, 128, shape, dtype=torch.int8, generator=noise)
            view[self._source] = pattern.to(view.device)
            view[self._target] = 0

    def host(self, slot_id: int) -> None:
        """Out to host memory, from now on this slot, and back into other blocks."""
        self._slot, self.is_unsettled = slot_id, False
        slot = CPULoadStoreSpec([slot_id])
        if not self._carry((self._end(self._source), slot)):
            raise ConfigError("canary", "host", "storing a block to host memory failed")
        if not self._carry((slot, self._end(self._target))) or not self._is_back():
            raise ConfigError(
                "canary", "host", "a block stored to host memory came back with other bytes"
            )

    def tier(self, name: str) -> None:
        """From the host slot to a tier and back."""
        slot = CPULoadStoreSpec([self._slot])
        if not self._carry((slot, BackendLoadStoreSpec(name, [self.key]))):
            log.warning("kvoffload: tier %s took no chunk at the start; serving without it", name)
            return
        for view in self._views:
            view[self._target] = 0
        self._carry((self._end(self._target), slot))  # so that nothing is left there to be found
        staged = StagedLoadStoreSpec([self._slot], [Fetch(name, (0,), (self.key,))])
        if not self._carry((staged, self._end(self._target))):
            log.warning("kvoffload: tier %s gave no chunk back at the start", name)
            if self.is_unsettled:
                return
        elif not self._is_back():
            raise ConfigError(
                "canary", name, "a chunk came back from this tier with other bytes than stored"
            )
        self._carry((self._end(self._source), slot))

    def leave(self) -> None:
        """Put back what was in the blocks."""
        for view, before in zip(self._views, self._before, strict=True):
            view[: len(before)] = before

    def _end(self, blocks: Sequence[int]) -> GPULoadStoreSpec:
        sizes = [0] * self._group_idx + [len(blocks)]
        return GPULoadStoreSpec(blocks, sizes)

    def _carry(self, ends: TransferSpec) -> bool:
        self._transfers.submit(JOB, ends, 1)
        self._transfers.wait([JOB])
        (result,) = self._transfers.get_finished()
        self.is_unsettled = not result.settled
        return result.success

    def _is_back(self) -> bool:
        return all(torch.equal(view[self._source], view[self._target]) for view in self._views)
