"""Count uses of chunks by requests in one place, so that policies see one load."""

from collections.abc import Callable, Sequence

from kvoffload.offload.base import OffloadingManager, OffloadKey, ReqContext


class UseCounter:
    """Counts each request once as a use of its chunks, and retires the chunks when it ends.

    A request counts before room is made for it: when its load begins, or when its first chunks are
    offered for storing. Chunks of full attention count wherever they are, also in GPU memory alone.
    Chunks of windows and states count if the request loads them.

    Args:
        manager: gets the uses and ends.
    """

    def __init__(self, manager: OffloadingManager) -> None:
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

    def pause(self, context: ReqContext, chunks: Callable[[], Sequence[OffloadKey]]) -> None:
        """Do as :meth:`end` for a request that will be admitted again and must not count again."""
        counted = context.req_id in self._counted
        self._manager.retire(chunks() if counted else (), context)

    def end(self, context: ReqContext, chunks: Callable[[], Sequence[OffloadKey]]) -> None:
        """Retire the chunks of an ended request: its tail leaves before its head.

        A request that was never admitted did not count. It leaves the order as it is.

        Args:
            context: of the request.
            chunks: lists its chunks, head to tail; called only if the request counted.
        """
        self.pause(context, chunks)
        self._counted.discard(context.req_id)
