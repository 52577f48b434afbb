"""Immutable messages between the parts: keys, transfer specs, and the rows of a KV cache.

The module lies below every part, so that ``offload`` and ``transfer`` need not import each other.
The module :mod:`kvoffload.offload.base` re-exports the public names, and
:mod:`kvoffload.core.tensors` makes the rows from an engine's tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

OffloadKey = NewType("OffloadKey", bytes)
"""Block hash + KV cache group index (4 bytes, big endian): the name of a chunk in every tier.

The block hash is that of the *last* block in the chunk; hashes are chained, so it covers the whole
prefix up to there.
"""

BlockIds = npt.NDArray[np.int32]


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Pack a block hash and a KV cache group index into a key."""
    return OffloadKey(block_hash + group_idx.to_bytes(4, "big"))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the block hash in a key."""
    return key[:-4]


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV cache group index in a key."""
    return int.from_bytes(key[-4:], "big")


class LoadStoreSpec(ABC):
    """Where one end of a transfer is."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Name the medium for events and logs: ``GPU``, ``CPU``, ``BACKEND``."""


class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    """An end addressed by numbers; each subclass says in which address space."""

    def __init__(self, block_ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        self.block_ids: BlockIds = np.asarray(block_ids, np.int32)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """GPU block ids, ordered by KV cache group.

    Args:
        block_ids: GPU slots, group after group.
        group_sizes: how many of them belong to each group; sums to ``len(block_ids)``.
            None means one group.
        block_indices: for each group, the logical index (in its request) of the group's first
            block. A chunk may be larger than a block; ``block_indices[g] % blocks_per_chunk`` says
            how far into the first chunk the transfer begins. None means aligned.
    """

    def __init__(
        self,
        block_ids: Sequence[int] | npt.NDArray[np.integer],
        group_sizes: Sequence[int] | None = None,
        block_indices: Sequence[int] | None = None,
    ) -> None:
        self.block_ids = np.asarray(block_ids, np.int32)
        self.group_sizes = (len(self.block_ids),) if group_sizes is None else tuple(group_sizes)
        self.block_indices = (
            (0,) * len(self.group_sizes) if block_indices is None else tuple(block_indices)
        )
        if sum(self.group_sizes) != len(self.block_ids):
            raise ValueError(
                f"group_sizes = {self.group_sizes}: must sum to the {len(self.block_ids)} block ids"
            )
        if len(self.block_indices) != len(self.group_sizes):
            raise ValueError(
                f"block_indices = {self.block_indices}: one for each group of {self.group_sizes}"
            )

    @staticmethod
    def medium() -> str:
        return "GPU"


@dataclass(frozen=True)
class Fetch:
    """Chunks of a load that a tier must first bring into their host slots."""

    tier: str
    positions: tuple[int, ...]
    """Indices into the load's keys and host slots."""
    keys: tuple[OffloadKey, ...]
    tenants: tuple[bytes, ...] = ()
    """Whose each chunk is; empty where tenants are not told apart."""


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Host slots of the slab, one a chunk, in the order of the transfer's keys.

    Args:
        block_ids: the slots.
        fetches: what tiers must first bring into some of them; of a load.
    """

    job_id = 0
    """The manager's job that the slots belong to; 0 for none."""

    def __init__(
        self, block_ids: Sequence[int] | npt.NDArray[np.integer], fetches: Sequence[Fetch] = ()
    ) -> None:
        self.block_ids = np.asarray(block_ids, np.int32)
        self.fetches = tuple(fetches)

    @staticmethod
    def medium() -> str:
        return "CPU"

    @property
    def host_slots(self) -> BlockIds:
        """The same numbers under the name of their address space."""
        return self.block_ids


@dataclass(eq=False, repr=False)
class BackendLoadStoreSpec(LoadStoreSpec):
    """Keys in the tier of that name."""

    tier: str
    keys: tuple[OffloadKey, ...]
    tenants: Sequence[bytes] = ()
    """Whose each chunk is; empty where tenants are not told apart."""

    @staticmethod
    def medium() -> str:
        """Return ``BACKEND``; the tier's own name is in ``tier``."""
        return "BACKEND"

    def __repr__(self) -> str:
        return f"BackendLoadStoreSpec({self.tier!r}, {len(self.keys)} keys)"


TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]


@dataclass(frozen=True)
class TransferResult:
    """The one answer a transfer gets: ``ok[i]`` for the i-th chunk, in the order asked."""

    job_id: int
    ok: tuple[bool, ...]
    settled: bool = True
    """False: the deadline passed while something may still touch the host slots. They must not be
    reused before the job's id comes out of ``get_settled()``."""
    transfer_bytes: int = 0
    transfer_time_s: float = 0.0
    """Seconds of the transfer's own work: reads or writes of a tier, and copies. Copies that run
    during the reads count once. Waits for the forward pass, for earlier transfers and for the I/O
    thread do not count. 0 for a copy that failed."""
    reason: str = ""
    """Why, if not all is ok: ``deadline``, ``missing``, ``error``..."""

    @property
    def success(self) -> bool:
        """Whether every chunk arrived."""
        return all(self.ok)


class OffloadingHandler(ABC):
    """Carries out transfers of one (source type → destination type), asynchronously.

    Called on the engine's thread only; nothing here does I/O or waits, but ``wait``.
    """

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a transfer; False if it was refused (then no result will come)."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the results that came in since the last call; every job ends exactly once."""

    @abstractmethod
    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these jobs have a result (at most until their deadlines)."""

    def get_settled(self) -> list[int]:
        """Return jobs answered as unsettled whose memory is free again since the last call."""
        return []


@dataclass(frozen=True)
class CanonicalKVCacheTensor:
    """An int8 view ``(num_blocks, page_bytes)`` of KV cache memory; row i is block i.

    Where an engine's tensor has ``num_blocks`` at a later physical dimension (``(2, num_blocks,
    ...)``), it is split so that each view leads with ``num_blocks``. Rows are contiguous; the
    distance between rows may be larger than a row (padded pages). The engine owns the memory.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True)
class CanonicalKVCacheRef:
    """A layer's (or several layers') use of one canonical tensor, by index."""

    tensor_idx: int
    page_size_bytes: int
    """Bytes that layer uses at the front of each row: the page without its padding."""


@dataclass(frozen=True)
class CanonicalKVCaches:
    """The whole cache: unique tensors, and which of them each KV cache group's blocks live in."""

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_data_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]

    def block_bytes(self, group_idx: int) -> int:
        """Bytes of one block of a group over all its tensors, without padding."""
        return sum(ref.page_size_bytes for ref in self.group_data_refs[group_idx])
