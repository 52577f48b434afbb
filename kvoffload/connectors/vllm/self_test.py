"""The canary: a pattern goes out and comes back through every tier before anything is trusted.

The self-test writes a pattern through every tier and reads it back. It finds errors of layout, copy
and storage before they corrupt the model's output. It runs at the start, on unused blocks, through
the handlers that carry all later transfers. The pattern is written and compared through the layers'
own tensors, as attention uses them. So a canonical view that shows the wrong bytes is found too.
"""

import logging
import os
from collections.abc import Mapping, Sequence

import torch

from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.errors import ConfigError
from kvoffload.messages import (
    BackendLoadStoreSpec,
    CanonicalKVCaches,
    CPULoadStoreSpec,
    Fetch,
    GPULoadStoreSpec,
    TransferSpec,
    make_offload_key,
)
from kvoffload.transfer.engine import TransferEngine
from kvoffload.transfer.layout import ChunkLayout

log = logging.getLogger(__name__)

JOB = -1
"""The id of all jobs of the self-test, and of no other job. A job whose call hangs in a tier is
named by it when the call ends."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_tiers(
    spec: TieredOffloadingSpec,
    transfers: TransferEngine,
    caches: CanonicalKVCaches,
    layers: Mapping[int, Sequence[torch.Tensor]],
    blocks_per_chunk: int,
) -> int:
    """Carry a pattern out and back for each KV cache group and each tier.

    A tier that does not answer is only warned about: it may come up later, and a miss does no harm.
    But its call may still write into the slot that it was given.

    The first slots are used: a GPU pins them first, and the start does not wait for the rest.

    Args:
        spec: names the tiers.
        transfers: carry the pattern.
        caches: the canonical views.
        layers: for each KV cache group, the tensors of its layers; dimension 0 counts blocks.
        blocks_per_chunk: blocks in a chunk.

    Returns:
        The first host slot (row, if chunks differ in size) that may be used: a tier may still
        touch those before it.

    Raises:
        ConfigError: other bytes came back than were sent, or a tier has the only slot; offloading
            must not begin.
    """
    slot = 0
    slot_rows = -(-ChunkLayout(caches, blocks_per_chunk).slot_bytes // spec.slot_bytes)
    num_blocks = min(len(tensor.tensor) for tensor in caches.tensors)
    source = range(1, 1 + blocks_per_chunk)
    target = range(1 + blocks_per_chunk, 1 + 2 * blocks_per_chunk)
    if target.stop > num_blocks:
        log.warning("kvoffload: the KV cache is too small for the start-up check; skipped")
        return slot
    for group_idx, refs in enumerate(caches.group_data_refs):
        if not refs:
            continue
        check = _GroupCheck(transfers, caches, layers[group_idx], group_idx, source, target)
        try:
            check.host(slot)
            for name in spec.tiers:
                check.tier(name)
                if check.is_unsettled:
                    slot += slot_rows
                    if slot + slot_rows > spec.num_slots:
                        raise ConfigError("canary", name, "still uses the only host slot")
                    log.warning(
                        "kvoffload: tier %s still uses a host slot; the slot stays out of use", name
                    )
                    check.host(slot)
        finally:
            check.restore()
            for name in spec.tiers:
                transfers.remove(name, check.key)
    return slot


class _GroupCheck:
    """The check of one KV cache group."""

    def __init__(
        self,
        transfers: TransferEngine,
        caches: CanonicalKVCaches,
        layers: Sequence[torch.Tensor],
        group_idx: int,
        source: Sequence[int],
        target: Sequence[int],
    ) -> None:
        self.key = make_offload_key(os.urandom(32), group_idx)
        self._transfers = transfers
        self._group_idx = group_idx
        self._slot = 0
        self.is_unsettled = False
        """Whether a call of the last step may still touch the host slot."""
        self._source, self._target = list(source), list(target)
        # As integers, of which equal bits are equal. A view of the same width needs no other shape.
        self._views = [layer.view(_INTEGERS[layer.element_size()]) for layer in layers]
        rows = [
            caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes]
            for ref in caches.group_data_refs[group_idx]
        ]
        # Rows of a packed layout have bytes of other groups as well, which a load overwrites.
        used = target[-1] + 1
        self._before = [(view, view[:used].clone()) for view in (*rows, *self._views)]
        noise = torch.Generator(device="cpu").manual_seed(1 + group_idx)
        for view in self._views:
            shape = (len(self._source), *view.shape[1:], view.element_size())
            # The engine may have another default device.
            pattern = torch.randint(
                -128, 128, shape, dtype=torch.int8, device="cpu", generator=noise
            )
            view[self._source] = pattern.view(view.dtype).squeeze(-1).to(view.device)
            view[self._target] = 0

    def host(self, slot_id: int) -> None:
        """Copy blocks to this host slot, the slot of all later steps, and back to other blocks."""
        self._slot, self.is_unsettled = slot_id, False
        slot = CPULoadStoreSpec([slot_id])
        if not self._carry((self._end(self._source), slot)):
            raise ConfigError("canary", "host", "storing a block to host memory failed")
        if not self._carry((slot, self._end(self._target))) or not self._is_back():
            raise ConfigError(
                "canary", "host", "a block stored to host memory came back with other bytes"
            )

    def tier(self, name: str) -> None:
        """Write the host slot to a tier and read it back."""
        slot = CPULoadStoreSpec([self._slot])
        if not self._carry((slot, BackendLoadStoreSpec(name, (self.key,)))):
            log.warning("kvoffload: tier %s took no chunk at the start; serving without it", name)
            return
        for view in self._views:
            view[self._target] = 0
        self._carry((self._end(self._target), slot))  # so that the slot has no copy of the pattern
        staged = CPULoadStoreSpec([self._slot], [Fetch(name, (0,), (self.key,))])
        if not self._carry((staged, self._end(self._target))):
            log.warning("kvoffload: tier %s gave no chunk back at the start", name)
            if self.is_unsettled:
                return
        elif not self._is_back():
            raise ConfigError(
                "canary", name, "a chunk came back from this tier with other bytes than stored"
            )
        self._carry((self._end(self._source), slot))

    def restore(self) -> None:
        """Restore the bytes that the blocks had before."""
        for view, before in self._before:
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
