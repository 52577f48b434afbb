"""The one record of a transfer, from the manager to its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvoffload.messages import BackendLoadStoreSpec, CPULoadStoreSpec, OffloadKey

if TYPE_CHECKING:
    from kvoffload.offload.base import ReqContext
    from kvoffload.offload.claims import QueuedRequest
    from kvoffload.offload.tiers import Tier


@dataclass(eq=False)
class Job:
    """A transfer that the manager began; its ``complete`` answers it once.

    The manager and the connector note here what they know of it. Their process has no second record
    of the job.
    """

    id: int
    keys: tuple[OffloadKey, ...]
    spec: CPULoadStoreSpec
    """The host slots of ``keys``."""
    # ---- noted by the connector that carries it out; see kvoffload.connectors.jobs ----
    waiter: Any = field(default=None, init=False)
    """What the connector has to do once the job has ended."""
    blocks: Sequence[int] = field(default=(), init=False)
    """GPU blocks that the job reads or writes."""
    began_ns: int = field(default=0, init=False)
    ranks: int = field(default=0, init=False)
    """Workers that have answered."""
    ranks_unsettled: int = field(default=0, init=False)
    """Those on which a late transfer may still touch the host slots."""
    ok: tuple[bool, ...] = field(default=(), init=False)
    """For each chunk, whether its transfer succeeded on every rank that has answered."""
    reason: str = field(default="", init=False)
    """Why chunks failed, on the last rank that gave a reason."""
    seconds: float = field(default=0.0, init=False)
    """The transfer's own time, on the slowest rank."""
    stale: bool = field(default=False, init=False)
    """Whether the bytes mean nothing: a reset came after the order, or blocks were overwritten."""
    # ---- noted by the manager ----
    reset: int = field(default=0, kw_only=True)
    """The number of the first reset that came meanwhile; 0: none did."""

    @property
    def held(self) -> tuple[OffloadKey, ...]:
        """The names under which host memory holds the chunks for this job."""
        if not self.reset:
            return self.keys
        return tuple(forgotten(key, self.reset) for key in self.keys)

    def unsettled_slots(self) -> list[int]:
        """Return the slots that stay out of use after an unsettled answer, of whatever chunks.

        A server of the host stores a chunk that has arrived nearer, out of the slot.
        """
        slots: list[int] = self.spec.host_slots.tolist()
        return slots


def forgotten(key: OffloadKey, reset: int) -> OffloadKey:
    """Name a chunk whose slot is in use though a reset forgot it: it may be stored again.

    The end of a key tells its group, so the new part is in front.
    """
    return OffloadKey(b"%d:%b" % (reset, key))


class Read(NamedTuple):
    """What a job loads from one tier."""

    num_bytes: int
    expected_s: float
    kept_bytes: int
    """Host memory that it keeps: less, where chunks take turns."""


@dataclass(eq=False)
class LoadJob(Job):
    """Chunks that are pinned, or have slots reserved, until a load into the GPU is answered.

    The spec has what tiers must fetch into their slots first.
    """

    context: ReqContext | None
    num_asked: int
    """Chunks asked for. ``keys`` are the leading ones, fewer if host memory had no room."""
    tiers: tuple[str, ...] | None
    """Tiers that the request may use; None for all."""
    sources: Mapping[OffloadKey, Tier] = field(default_factory=dict)
    """Chunk → the tier that it comes from, if it was not in host memory."""
    reads: dict[str, Read] = field(default_factory=dict)
    """Tier → what the job reads from it; empty once the job has ended."""
    late_bytes: dict[str, int] = field(default_factory=dict)
    """Tier → bytes of host memory that it may still write to after the answer."""

    def media(self) -> list[str]:
        """Return the medium that each chunk comes from."""
        if not self.sources:
            return ["CPU"] * len(self.keys)
        found = map(self.sources.get, self.keys)
        return [tier.medium if tier else "CPU" for tier in found]


@dataclass(eq=False)
class StoreJob(Job):
    """Chunks that have reserved host slots until a store from the GPU is answered."""

    context: ReqContext | None
    tiers: tuple[str, ...] | None
    """Tiers to write the chunks through to; None for all."""


@dataclass(eq=False)
class WriteJob(Job):
    """Write-through of stored chunks to a tier, begun by the manager on its own account.

    Carry it out with a handler for the types of its ``ends``.
    """

    ends: tuple[CPULoadStoreSpec, BackendLoadStoreSpec]
    """The source and the destination."""
    tier: Tier
    """The one that was meant: another store may have replaced it meanwhile."""
    num_bytes: int
    """Host memory that the write keeps."""


@dataclass(eq=False)
class EarlyRead(Job):
    """Chunks that a tier reads into host memory for a request in the queue.

    The manager begins it on its own account. Carry it out with a handler for the types of its
    ``ends``.
    """

    ends: tuple[BackendLoadStoreSpec, CPULoadStoreSpec]
    """The source and the destination."""
    tier: Tier
    """The one that the chunks come from."""
    num_bytes: int
    """Host memory that the read keeps; once it is answered, that a late read may still write."""
    request: QueuedRequest
    tiers: tuple[str, ...] | None
    """Names of the tiers that chunks of the request may be stored on; None: all."""

    @property
    def sources(self) -> Mapping[OffloadKey, Tier]:
        """Chunk → the tier that it comes from."""
        return dict.fromkeys(self.keys, self.tier)
