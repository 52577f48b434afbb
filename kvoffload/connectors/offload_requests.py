"""What connectors remember of requests: their uses of chunks, and their short loads."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvoffload.offload.base import Manager, OffloadKey, ReqContext

MAX_REMEMBERED = 1024
"""Requests; more only if an engine never admits those again whose loads were short."""


class OffloadRequest(Protocol):
    """The attributes of an engine's request that the connector reads.

    A request may also have ``kv_transfer_params``, with hints: see ``docs/guides/vllm.md``. Its
    ``cache_salt``, if it has one, names its tenant.
    """

    request_id: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those generated so far."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full blocks."""
        ...


class UseCounter:
    """Counts each request once as a use of its chunks, and retires the chunks when it ends.

    A request counts before room is made for it: when its load begins, or when its first chunks are
    offered for storing. Chunks of full attention count wherever they are, also in GPU memory alone.
    Chunks of windows and states count if the request loads them.

    Args:
        manager: gets the uses and ends.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._counted: set[str] = set()

    def count(self, context: ReqContext, used: Callable[[], Sequence[OffloadKey]]) -> bool:
        """Count a request, unless it was counted before; return whether this call counted it.

        Args:
            context: of the request.
            used: lists the chunks that it uses, head to tail; called only if the request counts.
        """
        if context.req_id in self._counted:
            return False
        self._counted.add(context.req_id)
        self._manager.touch(used(), context)
        return True

    def has_counted(self, req_id: str) -> bool:
        """Whether a request has counted, and not ended: it runs, or was preempted."""
        return req_id in self._counted

    def end(
        self,
        context: ReqContext,
        chunks: Callable[[], Sequence[OffloadKey]],
        *,
        again: bool = False,
    ) -> None:
        """Retire the chunks of an ended request: its tail leaves before its head.

        A request that was never admitted did not count. It leaves the order as it is.

        Args:
            context: of the request.
            chunks: lists its chunks, head to tail; called only if the request counted.
            again: it will be admitted again, and must not count again.
        """
        used = chunks() if context.req_id in self._counted else ()
        if again:  # it has not ended: what it says of its session's return counts later
            self._manager.request_admitted(context)
            self._manager.retire(used)
        else:
            self._manager.retire(used, context)
            self._counted.discard(context.req_id)


class LoadBackoff:
    """Counts the short loads of each request since it last computed something.

    An engine that cannot use a part of a load admits the request again. With the same promise and
    the same short load each time, the engine would never begin to compute. So a request is promised
    nothing more after some short loads.

    Args:
        tolerated: short loads in a row after which the next is still promised.
    """

    def __init__(self, tolerated: int) -> None:
        self._tolerated = tolerated
        self._counts: dict[str, int] = {}
        # Requests that have not been admitted again since.
        self._just_ended: set[str] = set()

    def note(self, request_id: str) -> bool:
        """A load was short; return whether the request is declined from now on."""
        count = self._counts.pop(request_id, 0) + 1
        self._counts[request_id] = count
        self._just_ended.add(request_id)
        if len(self._counts) > MAX_REMEMBERED:
            self._forget(next(iter(self._counts)))
        return count > self._tolerated

    def declined(self, request_id: str) -> bool:
        """Whether a request is to be promised nothing."""
        return self._counts.get(request_id, 0) > self._tolerated

    def computed(self, request_id: str) -> None:
        """A request has got on: its loads may be tried again."""
        if self._counts:
            self._forget(request_id)

    def gave_up(self, request_id: str) -> None:
        """Note that a request gave up its blocks; it is admitted again if its load just ended."""
        if request_id in self._just_ended:
            self._just_ended.remove(request_id)
        else:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._counts.pop(request_id, None)
        self._just_ended.discard(request_id)
