"""The manager's loads and stores in flight, found by job or by a request and its keys."""

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from kvoffload.messages import OffloadKey
from kvoffload.offload.base import Job, LoadJob, ReqContext, StoreJob

log = logging.getLogger(__name__)
J = TypeVar("J", LoadJob, StoreJob)

MAX_WARNINGS = 20
"""Unexpected answers that are logged; further ones are only counted."""


class JobsInFlight:
    """Numbers jobs and keeps each until its answer.

    Args:
        counters: where ``unexpected_completion`` is counted.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self.ids = itertools.count(1)
        self._counters = counters
        self._jobs: dict[int, LoadJob | StoreJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: LoadJob | StoreJob) -> None:
        """Keep a job that has begun."""
        self._jobs[job.id] = job

    def take(self, job: Job) -> bool:
        """Remove an answered job; False if it was answered before."""
        if self._jobs.get(job.id) is not job:
            return False
        del self._jobs[job.id]
        return True

    def take_parts(
        self, kind: type[J], keys: Iterable[OffloadKey], req_context: ReqContext | None
    ) -> Iterator[J]:
        """Remove the keys from a request's jobs of one kind; yield each job's part as a job.

        Keys that no job of the request has are counted as unexpected.
        """
        left = tuple(keys)
        name = request_id(req_context)
        for job in list(self._jobs.values()) if left else ():
            if not isinstance(job, kind) or request_id(job.context) != name:
                continue
            if left == job.keys:
                del self._jobs[job.id]
                yield job
                return
            part, left, rest = _split(job.keys, left)
            if rest:
                self._jobs[job.id] = replace(job, keys=rest)
            else:
                del self._jobs[job.id]
            yield replace(job, keys=part)
            if not left:
                return
        self.unexpected(left)

    def unexpected(self, keys: Sequence[OffloadKey]) -> None:
        """Count answers that belong to no job in flight."""
        for key in keys:
            self._counters["unexpected_completion"] += 1
            if self._counters["unexpected_completion"] <= MAX_WARNINGS:
                log.warning("an answer for chunk %s, which has no such job in flight", key.hex())


def request_id(req_context: ReqContext | None) -> str:
    """Return the request's name; "" without a context."""
    return req_context.req_id if req_context else ""


def _split(
    keys: Sequence[OffloadKey], answered: Sequence[OffloadKey]
) -> tuple[tuple[OffloadKey, ...], tuple[OffloadKey, ...], tuple[OffloadKey, ...]]:
    """Return the answered keys of a job, the other answered keys, and the job's other keys."""
    rest = Counter(keys)
    part: list[OffloadKey] = []
    others: list[OffloadKey] = []
    for key in answered:
        if rest[key] > 0:
            rest[key] -= 1
            part.append(key)
        else:
            others.append(key)
    return tuple(part), tuple(others), tuple(rest.elements())
