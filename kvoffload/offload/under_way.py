"""Whose transfers are under way, so that an answer which comes twice ends nobody else's."""

from collections import Counter
from collections.abc import Sequence

from kvoffload.messages import OffloadKey
from kvoffload.offload.base import ReqContext


class UnderWay:
    """What each request's loads, or its stores, have not been answered for yet.

    A request mostly has one transfer, answered as a whole: then nothing is done for each chunk.
    """

    def __init__(self) -> None:
        # Request → the chunks of its one transfer, in order; or how often each is under way.
        self._open: dict[str, tuple[OffloadKey, ...] | Counter[OffloadKey]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> None:
        """A request began to move these chunks."""
        name = req_context.req_id if req_context else ""
        if not keys:
            return
        if name in self._open:
            self._counted(name).update(keys)
        else:
            self._open[name] = tuple(keys)

    def end(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None
    ) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
        """A request was answered: return those that it was moving, and those that it was not."""
        name = req_context.req_id if req_context else ""
        if name not in self._open:
            return (), keys
        if self._open[name] == tuple(keys):
            del self._open[name]
            return keys, ()
        moving = self._counted(name)
        known: list[OffloadKey] = []
        unknown: list[OffloadKey] = []
        for key in keys:
            if key not in moving:
                unknown.append(key)
                continue
            known.append(key)
            moving[key] -= 1
            if not moving[key]:
                del moving[key]
        if not moving:
            del self._open[name]
        return known, unknown

    def _counted(self, name: str) -> Counter[OffloadKey]:
        moving = self._open[name]
        if isinstance(moving, tuple):
            moving = self._open[name] = Counter(moving)
        return moving
