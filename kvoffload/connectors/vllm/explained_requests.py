"""Requests with the hint ``explain``: where each of their chunks was, or why it was not loaded."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from kvoffload.backends.base import Removal
from kvoffload.offload.base import Job, OffloadKey, Reason
from kvoffload.offload.hints import PARAM

CORRUPT = "corrupt"
"""The reason that stores give for a chunk that failed verification."""


class ExplainedRequests:
    """Places and reasons of chunks, from a request's first lookup to its end.

    Args:
        explain: the manager's; takes keys and vLLM's context of a request.
    """

    def __init__(self, explain: Callable[[Sequence[OffloadKey], Any], list[str]]) -> None:
        self._explain = explain
        self._places: dict[str, list[dict[OffloadKey, str]]] = {}
        """Request → for each group, the places of its chunks."""

    def add(self, req_id: str, groups: Iterable[Iterable[OffloadKey]], req_context: Any) -> None:
        """Note where the chunks of a request are now."""
        keys_of = [list(keys) for keys in groups]
        self._places[req_id] = [
            dict(zip(keys, self._explain(keys, req_context), strict=True)) for keys in keys_of
        ]

    def load_failed(self, req_id: str, job: Job) -> None:
        """Note why chunks of a load did not arrive."""
        for group in self._places.get(req_id, ()):
            for key, fine in zip(job.keys, job.ok, strict=True):
                # A store that found the chunk damaged has reported it before, and more exactly.
                if not fine and group.get(key, CORRUPT) != CORRUPT:
                    group[key] = job.reason or Reason.FAILED

    def removed(self, removals: Iterable[Removal]) -> None:
        """Note the chunks that a store removed because they were damaged."""
        if not self._places:
            return
        damaged = [OffloadKey(it.key) for it in removals if it.reason == CORRUPT]
        for group in chain.from_iterable(self._places.values()):
            group.update((key, CORRUPT) for key in damaged if key in group)

    def finish(self, req_id: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Add what is known of an ended request to the parameters that vLLM gives its client."""
        groups = self._places.pop(req_id, None)
        if groups is None:
            return params
        return {**(params or {}), PARAM: {"chunks": [list(group.values()) for group in groups]}}
