"""The manager's jobs in flight, found by job or by a request and its keys."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import TypeVar

from kvoffload.messages import OffloadKey
from kvoffload.offload.base import (
    EarlyRead,
    Job,
    LoadJob,
    ReqContext,
    StoreJob,
    WriteJob,
    request_id,
)

log = logging.getLogger(__name__)
J = TypeVar("J", LoadJob, StoreJob)

MAX_WARNINGS = 20
"""Unexpected answers that are logged; further ones are only counted."""


class JobsInFlight(dict[int, Job]):
    """Each job in flight by its number.

    Args:
        counters: where ``unexpected_completion`` is counted.
    """

    def __init__(self, counters: Counter[str]) -> None:
        super().__init__()
        self._counters = counters
        self.new_id = count(1).__next__
        self.begun: list[WriteJob | EarlyRead] = []
        """Those of the manager's own account, since they were last taken."""

    def begin(self, job: WriteJob | EarlyRead) -> None:
        """Note a job that the manager has begun on its own account."""
        self[job.id] = job
        self.begun.append(job)

    def take_parts(
        self, kind: type[J], keys: Iterable[OffloadKey], req_context: ReqContext | None
    ) -> Iterator[J]:
        """Remove the keys from a request's jobs of one kind; yield each job's part as a job.

        Keys that no job of the request has are counted as unexpected.
        """
        left = tuple(keys)
        name = request_id(req_context)
        for job in list(self.values()) if left else ():
            if not isinstance(job, kind) or request_id(job.context) != name:
                continue
            if left == job.keys:
                del self[job.id]
                yield job
                return
            part, left, rest = _split(job.keys, left)
            if rest:
                self[job.id] = replace(job, keys=rest)
            else:
                del self[job.id]
            yield replace(job, keys=part)
            if not left:
                return
        for key in left:
            self.unexpected(f"chunk {key.hex()}")

    def unexpected(self, what: str) -> None:
        """Count an answer that belongs to no job in flight."""
        self._counters["unexpected_completion"] += 1
        if self._counters["unexpected_completion"] <= MAX_WARNINGS:
            log.warning("an answer for %s fits no job in flight", what)


def _split(
    keys: Iterable[OffloadKey], answered: Iterable[OffloadKey]
) -> tuple[tuple[OffloadKey, ...], tuple[OffloadKey, ...], tuple[OffloadKey, ...]]:
    """Return the answered keys of a job, the other answered keys, and the job's other keys."""
    rest = Counter(keys)
    part: list[OffloadKey] = []
    others: list[OffloadKey] = []
    for key in answered:
        (part if rest[key] > 0 else others).append(key)
        rest[key] -= 1
    return tuple(part), tuple(others), tuple(rest.elements())
