"""Count uses of chunks by requests in one place, so that policies see one load."""

from collections.abc import Callable, Sequence

from kvoffload.offload.base import OffloadingManager, OffloadKey, ReqContext


class UseCounter:
    """Counts each request once as a use of its chunks, and retires the chunks when it ends.

    A request counts when its load begins or when its first chunks are offered for storing,
    whichever comes first: before room is made for it. Chunks of full attention count wherever they
    are, also in GPU memory alone. Chunks of windows and states count if the request loads them.

    Args:
        manager: told of uses and ends.
    """

    def __init__(self, manager: OffloadingManager) -> None:
        self._manager = manager
        self._counted: set[str] = set()

    def count(self, context: ReqContext, used: Callable[[], Sequence[OffloadKey]]) -> bool:
        """Count a request, unless it was counted before; return whether it counted now.

        Args:
            context: of the request.
            used: lists the chunks that it uses, head to tail; called only if the request counts.
        """
        if context.req_id in self._counted:
            return False
        self._counted.add(context.req_id)
        self._manager.touch(used(), context)
        return True

    def pause(self, context: ReqContext, chunks: Callable[[], Sequence[OffloadKey]]) -> None:
        """Do as :meth:`end` for a request that will be admitted again: then it does not count."""
        counted = context.req_id in self._counted
        self._manager.retire(chunks() if counted else (), context)

    def end(self, context: ReqContext, chunks: Callable[[], Sequence[OffloadKey]]) -> None:
        """A request ended: its tail leaves before its head.

        A request that did not count, because it was never admitted, leaves the order as it is.

        Args:
            context: of the request.
            chunks: lists its chunks, head to tail; called only if the request counted.
        """
        self.pause(context, chunks)
        self._counted.discard(context.req_id)
