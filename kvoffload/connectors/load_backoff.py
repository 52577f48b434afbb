"""Which requests are promised nothing more, because their loads bring less than promised.

An engine that cannot use a part of a load admits the request again. With the same promise and the
same short load each time, the engine would never begin to compute.
"""

MAX_REMEMBERED = 1024
"""Requests; more only if an engine never admits those again whose loads were short."""


class LoadBackoff:
    """Counts the short loads of each request since it last computed something.

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
