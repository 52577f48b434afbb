"""The states of an engine's requests, found by a request; two of them may have one name.

An engine may pass another object for its request in each call. So an object stands for the request
of its name, unless an object with other content still does.
"""

import weakref
from collections.abc import Callable, Iterator
from itertools import chain

from kvoffload.connectors.local.chunking import ChunkGroups
from kvoffload.connectors.offload_requests import OffloadRequest, RequestState, new_state


class RequestStates:
    """The states of all requests that have not ended.

    Args:
        groups: of the chunks.
    """

    def __init__(self, groups: ChunkGroups) -> None:
        self._groups = groups
        self._of_name: dict[str, list[RequestState]] = {}

    def __iter__(self) -> Iterator[RequestState]:
        return chain.from_iterable(self._of_name.values())

    def __len__(self) -> int:
        return sum(map(len, self._of_name.values()))

    def find(self, request: OffloadRequest) -> RequestState | None:
        """Return the state of a request; None if it has none."""
        states = self._of_name.get(request.request_id, ())
        for state in states:
            if state.owner() is request:
                return state
        for state in states:
            if state.owner() is None or self._groups.are_of(state.keys, request.block_hashes):
                state.owner = reference(request)
                return state
        return None

    def find_to_end(self, request: OffloadRequest) -> RequestState | None:
        """Do as :meth:`find` for one that ends; its object may have fewer hashes, or none."""
        if (state := self.find(request)) is not None:
            return state
        states, hashes = self._of_name.get(request.request_id, ()), request.block_hashes
        return next((each for each in states if self._groups.agree(each.keys, hashes)), None)

    def add(self, request: OffloadRequest) -> RequestState:
        """Make the state of a request that has none."""
        state = new_state(request, len(self._groups.all))
        state.owner = reference(request)
        states = self._of_name.setdefault(request.request_id, [])
        # Its hashes may have changed, or a namesake had its prefix: its KV cache may be older.
        state.barred = any(each.barred for each in states)
        states.append(state)
        return state

    def remove(self, state: RequestState) -> None:
        """Forget the state of a request."""
        states = self._of_name[state.context.req_id]
        states.remove(state)
        if not states:
            del self._of_name[state.context.req_id]


def reference(request: OffloadRequest) -> Callable[[], OffloadRequest | None]:
    """Return what returns a request while it is alive."""
    try:
        return weakref.ref(request)
    except TypeError:  # a class with slots
        return lambda: request
