"""The interfaces of the two halves of offloading, with their jobs and events.

The *scheduler half* is a :class:`Manager`: metadata, one thread, no I/O. The *worker
half* is a set of :class:`OffloadingHandler`, which move bytes. An :class:`OffloadingSpec` makes
both.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from kvoffload.messages import (
    BackendLoadStoreSpec,
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    Fetch,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadKey,
    TransferResult,
    TransferSpec,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvoffload.offload.job import EarlyRead, Job, LoadJob, Read, StoreJob, WriteJob

if TYPE_CHECKING:
    from kvoffload.offload.coming_sessions import ComingSessions
    from kvoffload.offload.figures import ManagerFigures
    from kvoffload.offload.hints import Hints
    from kvoffload.offload.promises import Promises
    from kvoffload.offload.returns import Returns
    from kvoffload.offload.tiers import Tier
    from kvoffload.offload.waiting import WaitingQueue

__all__ = [
    "BackendLoadStoreSpec", "BlockIDsLoadStoreSpec", "CPULoadStoreSpec",
    "CanonicalKVCacheRef", "CanonicalKVCacheTensor", "CanonicalKVCaches", "ChunksRemoved",
    "ChunksStored", "EarlyRead", "Fetch", "GPULoadStoreSpec", "Job", "LoadJob", "LoadStoreSpec",
    "Manager", "OffloadKey", "OffloadingEvent", "OffloadingHandler", "OffloadingManager",
    "OffloadingSpec", "PrepareStoreOutput", "Read", "Reason", "ReqContext",
    "StoreJob", "TransferResult", "TransferSpec", "WriteJob",
    "get_offload_block_hash", "get_offload_group_idx",
    "make_offload_key", "request_id",
]  # fmt: skip


@dataclass(frozen=True)
class ReqContext:
    """The request that a call is made for."""

    req_id: str = ""
    kv_transfer_params: Mapping[str, Any] | None = None
    reads_tier: Callable[[str], bool] | None = None
    """Whether the request may load from the tier of a name; None: from all."""
    tenant: bytes = b""
    """Whose request it is, see :func:`tenant_id`; empty without a ``cache_salt``."""


def tenant_id(salt: object) -> bytes:
    """Return the 16 bytes that stand for the tenant of a ``cache_salt``; empty without one."""
    # Clients may send what is no Unicode.
    text = str(salt or "").encode(errors="surrogatepass")
    return hashlib.sha256(text).digest()[:16] if text else b""


NO_REQUEST = ReqContext()
"""Stands for all calls without a context."""


def request_id(req_context: ReqContext | None) -> str:
    """Return the request's name; "" without a context."""
    return (req_context or NO_REQUEST).req_id


class Reason(StrEnum):
    """Why the chunks resident in a medium changed."""

    STORED = "stored"
    EVICTED = "evicted"
    """Evicted to make room."""
    FAILED = "failed"
    """A transfer found the chunk missing or damaged."""
    RESET = "reset"
    """The cache was reset."""
    REPLACED = "replaced"
    """The tier was replaced by another store."""
    LOST = "lost"
    """Earlier events were dropped, because no consumer took them."""


@dataclass(frozen=True)
class OffloadingEvent:
    """A change of the chunks resident in one medium, reported after the change.

    Replaying the events of a medium in order gives exactly the keys that are resident there and
    came there while this manager watched.
    """

    keys: tuple[OffloadKey, ...]
    medium: str
    """``"CPU"``, or the name of a tier in upper case (``"DISK"``)."""
    reason: Reason


@dataclass(frozen=True)
class ChunksStored(OffloadingEvent):
    """Chunks became resident."""

    reason: Reason = Reason.STORED


@dataclass(frozen=True)
class ChunksRemoved(OffloadingEvent):
    """Chunks are resident no longer; without keys, all chunks of the medium.

    Events without keys have the reason REPLACED or LOST. After LOST, chunks may be resident that no
    later event names.
    """


@dataclass(frozen=True)
class PrepareStoreOutput:
    """Which chunks to store in which slots, and which chunks were evicted for them."""

    keys_to_store: tuple[OffloadKey, ...]
    store_spec: CPULoadStoreSpec
    evicted_keys: tuple[OffloadKey, ...]
    refused_keys: tuple[OffloadKey, ...] = ()
    """No room for these now, but soon: offer them again, or give them up with ``drop``."""
    job: StoreJob | None = None
    """The job of this store; None if there is nothing to store."""


class Manager(Protocol):
    """What connectors call: knows the place and the state of each chunk, and the jobs that pin it.

    An engine calls it on one thread; no call does I/O or waits. :meth:`begin_load`,
    :meth:`prepare_store` and :meth:`take_transfers` begin jobs. The caller answers each job once
    with :meth:`complete`. A second answer is counted and changes nothing.
    """

    counters: Counter[str]
    figures: "ManagerFigures"
    """What connectors measure."""
    promises: "Promises"
    """Which loads are worth their time; connectors ask."""
    waiting: "WaitingQueue"
    """What queued requests need next."""
    coming: "ComingSessions"
    """Sessions that said when they return: they queue shortly before."""
    returns: "Returns"
    """What ended requests said of their session's return."""
    tiers: "tuple[Tier, ...]"
    unexpected: Callable[[str], None]
    """Counts and logs an answer that fits no job; takes the words for the answer."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        """Say whether a chunk can be loaded now.

        Returns:
            True or False; None if the answer is not known yet (ask again at the next step). None
            never lasts beyond the lookup deadline.
        """

    @abstractmethod
    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> tuple[int, bool]:
        """Look up consecutive chunks of one prompt in one call.

        Returns:
            ``(hits, pending)``: how many leading keys can be loaded now, and whether the key after
            them may become loadable soon.
        """

    @abstractmethod
    def hints(self, req_context: ReqContext | None) -> "Hints":
        """Return a request's hints; connectors obey ``max_load_tokens`` and ``explain``."""

    @abstractmethod
    def has_room(self, keys: Sequence[OffloadKey]) -> bool | None:
        """Return whether host memory can take all these chunks at once, as a load needs it.

        None: it may soon; ask again.
        """

    @abstractmethod
    def is_fetching(self, keys: Iterable[OffloadKey]) -> bool:
        """Whether a load brings one of these chunks, or must end before this one begins."""

    @abstractmethod
    def explain(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> list[str]:
        """Say for each chunk where it is or why it is not; for people, not for every step.

        Returns:
            ``CPU`` or the medium of a tier; or a reason, see ``docs/reference/counters.md``.
        """

    @abstractmethod
    def begin_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> LoadJob:
        """Pin these chunks, or reserve slots for them, until the job is answered.

        Call it in the same step as the lookup that answered True. The job covers the *leading*
        keys. The other keys are misses: host memory is full of pinned chunks.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """Reserve host slots for those of these chunks that are not there yet.

        Evicts unpinned chunks to make room, never one named in this call. The output may cover the
        leading missing chunks only, and leaves out chunks that are not admitted (see
        ``store_threshold``). None: nothing can be stored now.
        """

    @abstractmethod
    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """Count chunks that are not stored for lack of room; see :class:`PrepareStoreOutput`."""

    @abstractmethod
    def complete(
        self, job: Job, ok: Sequence[bool], settled: bool = True, reason: str = ""
    ) -> None:
        """Answer a job: unpin loaded chunks, make stored ones loadable, forget failed ones.

        Args:
            job: from :meth:`begin_load`, :meth:`prepare_store` or :meth:`take_transfers`.
            ok: whether the transfer of each chunk succeeded, in the order of ``job.keys``.
            settled: False if a late transfer may still touch the host slots, those of good chunks
                as well. They stay out of use until :meth:`release_slots`.
            reason: why chunks failed: :attr:`TransferResult.reason`.

        Raises:
            UsageError: ``ok`` has another length than ``job.keys``; nothing has changed.
        """

    @abstractmethod
    def has_transfers(self) -> bool:
        """Whether :meth:`take_transfers` has something to return."""

    @abstractmethod
    def take_transfers(self) -> list[WriteJob | EarlyRead]:
        """Return the write-through and early reads to begin now.

        Answer each with :meth:`complete`.
        """

    @abstractmethod
    def release_slots(self, host_slots: Iterable[int], job: Job | None = None) -> None:
        """Take back slots of an unsettled transfer that nothing touches any more.

        Args:
            host_slots: the slots.
            job: the answered job that used them. Until now they count as its tier's, which gets no
                more than its share of host memory.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Count one use of each chunk of a prompt, given from head to tail.

        Call it once a request, before room is made for it. Policies that remember evicted keys
        learn from keys that are not here.
        """

    @abstractmethod
    def retire(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Put the chunks of an ended request in order, given head to tail: the tail leaves first.

        Chunks of a long prompt are stored over many steps, heads before tails. In that order the
        heads would leave first and make the tails useless. The call does not count as a use. Chunks
        in flight take their place in the order when their transfer has ended.
        """

    @abstractmethod
    def request_queued(
        self,
        list_keys: Callable[[], Sequence[OffloadKey]],
        req_context: ReqContext,
        was_preempted: bool = False,
    ) -> None:
        """Keep in host memory what a request that waits will need, until it is admitted or ends.

        Requests that queue earlier come first, and preempted ones before them. Running requests get
        each slot that they need: then the last in the queue gives way.

        Args:
            list_keys: lists its chunks, head to tail; a :meth:`serve_queue` calls it, if the
                request waits until then. The caller may add to the list, and change nothing else.
            req_context: of the request; :meth:`request_admitted` or :meth:`retire` names it again.
                Tenants share what is kept.
            was_preempted: whether it ran before, and is admitted again before those that wait.
        """

    @abstractmethod
    def request_answered(self, req_context: ReqContext, is_pending: bool) -> None:
        """Note what the engine was told of a queued request, before it has room for it or not.

        One with a final answer that is not admitted lacks room in the engine: what it needs is read
        early meanwhile.

        Args:
            req_context: of the request.
            is_pending: whether the engine has to ask again. The load of the request may then begin
                with the next answer, and is faster than early reads. This counts for one step: an
                engine that has become full asks none.
        """

    @abstractmethod
    def request_admitted(self, req_context: ReqContext) -> None:
        """Note that a request runs, queued or not; call it after its load has begun."""

    @abstractmethod
    def serve_queue(self) -> bool:
        """Go on with what queued requests need; call it once a step.

        Returns:
            Whether reads of tiers were begun for them.
        """

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget everything; transfers in flight end as if their keys had been removed."""

    @abstractmethod
    def replace_tiers(self, tiers: "Sequence[Tier]") -> None:
        """Use other stores from now on; the chunks of the old ones are of another namespace."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release the manager's resources."""

    @property
    @abstractmethod
    def busy_slots(self) -> int:
        """Slots that a transfer uses, or whose transfer may still touch them; 0 when quiet."""

    @property
    @abstractmethod
    def resident(self) -> int:
        """Chunks loadable from host memory."""


class OffloadingManager(Manager, ABC):
    """The contract of engines that name no jobs: the same by keys.

    The calls find the jobs of the request with the context's ``req_id``. All calls without a
    context count as one request.
    """

    def prepare_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> CPULoadStoreSpec:
        """Do as :meth:`begin_load`; return the host slots of the leading keys."""
        return self.begin_load(keys, req_context).spec

    @abstractmethod
    def complete_load(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
        reason: str = "",
    ) -> None:
        """Answer chunks of a request's loads, all of them alike; see :meth:`complete`."""

    @abstractmethod
    def complete_store(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
    ) -> None:
        """Answer chunks of a request's stores, all of them alike; see :meth:`complete`."""

    def shutdown(self) -> None:
        """Release the manager's resources: it has none."""


class OffloadingSpec(ABC):
    """Makes the two halves for one engine."""

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Make the scheduler half."""

    @abstractmethod
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """Make the worker half: handlers with the source and destination types they serve."""
