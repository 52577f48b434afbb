"""The vocabulary of offloading: keys, transfer ends, events, and the two halves' interfaces.

The *scheduler half* is an :class:`OffloadingManager`: a ledger, one thread, no I/O. The
*worker half* is a set of :class:`OffloadingHandler`, which move bytes. An :class:`OffloadingSpec`
makes both.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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
    StagedLoadStoreSpec,
    TransferResult,
    TransferSpec,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

__all__ = [
    "BackendLoadStoreSpec",
    "BlockIDsLoadStoreSpec",
    "CPULoadStoreSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "Fetch",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingHandler",
    "OffloadingManager",
    "OffloadingSpec",
    "PrepareStoreOutput",
    "Reason",
    "ReqContext",
    "StagedLoadStoreSpec",
    "Transfer",
    "TransferResult",
    "TransferSpec",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
]


@dataclass(frozen=True)
class ReqContext:
    """What the manager may know about the request a call is made for."""

    req_id: str = ""
    kv_transfer_params: Mapping[str, Any] | None = None


class Reason(StrEnum):
    """Why residence changed."""

    STORED = "stored"
    EVICTED = "evicted"
    """It made room for others."""
    FAILED = "failed"
    """A transfer showed that it is not there or not good."""
    RESET = "reset"
    """Everything was to be forgotten."""
    REPLACED = "replaced"
    """Another store took the place of the one it was in."""
    LOST = "lost"
    """Events were lost, because nobody took them: what was said before may not be so any more."""


@dataclass(frozen=True)
class OffloadingEvent:
    """A fact about residence, stated after it became true.

    ``medium`` is ``"CPU"`` or the upper-cased name of a tier (``"DISK"``). Replaying the events of
    a medium in order gives exactly the keys resident there, as far as they came there while this
    manager watched. A removal without keys, with the reason REPLACED or LOST, is of all keys there;
    after LOST some may be there without being named again.
    """

    keys: tuple[OffloadKey, ...]
    medium: str
    removed: bool
    reason: Reason

    def by_group(self) -> dict[int, tuple[OffloadKey, ...]]:
        """Return the keys by their KV cache group."""
        groups: dict[int, list[OffloadKey]] = {}
        for key in self.keys:
            groups.setdefault(get_offload_group_idx(key), []).append(key)
        return {group: tuple(keys) for group, keys in groups.items()}


@dataclass(frozen=True)
class PrepareStoreOutput:
    """What a store must do: these keys, to these places; and what left to make room for them."""

    keys_to_store: tuple[OffloadKey, ...]
    store_spec: CPULoadStoreSpec
    evicted_keys: tuple[OffloadKey, ...]
    refused_keys: tuple[OffloadKey, ...] = ()
    """No room for these now, but soon: offer them again, or give them up with ``drop``."""


@dataclass(frozen=True)
class Transfer:
    """Work the manager asks for on its own account: write-through of stored chunks to a tier.

    Carry it out with a handler for ``(type(src), type(dst))`` and answer once with
    :meth:`OffloadingManager.complete_transfer`.
    """

    src: CPULoadStoreSpec
    dst: LoadStoreSpec
    keys: tuple[OffloadKey, ...]
    tier: str = field(default="")
    number: int = 0
    """Of this transfer, so that it is not taken for answered twice."""


class OffloadingManager(ABC):
    """The ledger: which chunk is where, in what state, pinned by whom.

    Called on one thread (the engine's scheduler); no call does I/O or waits. Every ``prepare_*`` is
    followed by exactly one ``complete_*`` for each of its keys, made for the same request: with a
    context of the same ``req_id``, or again without one.

    An answer for a chunk that its request is not moving that way, because it came before or because
    it was somebody else's, is counted and changes nothing. Not told apart are the transfers of one
    request, and of all those without a context: a caller that may hear of a transfer's end twice,
    and moves the same chunk for the same request again in between, must itself drop the second.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext | None = None) -> bool | None:
        """Say whether a chunk can be loaded now.

        Returns:
            True or False; None if the answer is on its way (ask again at the next step). None
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
    def prepare_load(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> CPULoadStoreSpec:
        """Pin these chunks and say where to load them from.

        Call it in the same step as the lookup that answered True. The spec covers the *leading*
        ``len(spec.host_slots)`` keys, which may be fewer than asked when host memory is full of
        pinned chunks; the others are misses. Pinned until :meth:`complete_load`.
        """

    @abstractmethod
    def complete_load(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
        reason: str = "",
    ) -> None:
        """Unpin chunks of a load.

        Args:
            keys: any part of what was prepared.
            req_context: of the request it was prepared for.
            success: False forgets the keys, on every tier the load took them from, so that the
                next lookup answers False.
            settled: False if something may still write to their host slots; these stay out of use
                until :meth:`release_slots`.
            reason: why not, if not ``success``: :attr:`TransferResult.reason`.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """Reserve host slots for those of these chunks that are not there yet.

        Evicts unpinned chunks to make room, never one named in this call. May cover only the
        leading part of what is missing, and leaves out what is not admitted (see
        ``store_threshold``). None: nothing can be stored now.
        """

    @abstractmethod
    def complete_store(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
        settled: bool = True,
    ) -> None:
        """Make stored chunks loadable, or forget them (``success=False``).

        Write-through to lower tiers follows by itself: see :meth:`take_transfers`.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Count one use of each chunk of a prompt, given from head to tail.

        Call it once a request, before room is made for it; keys that are not here teach policies
        with a memory of what they evicted.
        """

    @abstractmethod
    def retire(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """The request with these chunks, head to tail, ended: of them the tail is to leave first.

        Chunks of a long prompt are stored over many steps, heads before tails; left so, the heads
        would leave first and make the tails useless. This is no further use. Chunks still being
        stored, or written to a tier, take their place in that order when they have landed.
        """

    @abstractmethod
    def take_transfers(self) -> list[Transfer]:
        """Return follow-up transfers to begin now; answer each with :meth:`complete_transfer`."""

    @abstractmethod
    def complete_transfer(
        self, transfer: Transfer, ok: Sequence[bool], settled: bool = True
    ) -> None:
        """Answer a follow-up transfer, one verdict a key."""

    @abstractmethod
    def release_slots(self, host_slots: Iterable[int]) -> None:
        """Take back slots of an unsettled transfer that nothing touches any more."""

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call."""

    @abstractmethod
    def reset_cache(self) -> None:
        """Forget everything; transfers in flight end as if their keys had been removed."""

    def shutdown(self) -> None:  # noqa: B027 - nothing to release is a good default
        """Release what the manager holds."""


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
