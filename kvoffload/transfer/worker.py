"""The worker half in one object: routes transfers to handlers by the types of their two ends."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable

from kvoffload.messages import (
    LoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)

log = logging.getLogger(__name__)

Route = tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]


class TransferWorker:
    """Carries out transfers and answers each exactly once; used on the engine's thread only.

    A transfer that cannot even begin (no such route, refused by its handler, a bad argument) is
    answered too: as failed, with a log line. Nothing here raises into the engine.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = {(src, dst): handler for src, dst, handler in routes}
        self._handlers = list(dict.fromkeys(self._routes.values()))
        self._refused: list[TransferResult] = []
        self.counters: Counter[str] = Counter()

    def submit(self, job_id: int, spec: TransferSpec, num_chunks: int) -> None:
        """Begin a transfer of ``num_chunks`` chunks; its answer comes out of get_finished."""
        handler = self._routes.get((type(spec[0]), type(spec[1])))
        try:
            if handler is not None and handler.transfer_async(job_id, spec):
                return
            log.error("no transfer from %s to %s", type(spec[0]).__name__, type(spec[1]).__name__)
        except Exception:
            log.exception("transfer %d from %s to %s could not begin", job_id, *spec)
        refused = TransferResult(job_id, (False,) * num_chunks, reason="refused_transfer")
        self._refused.append(refused)

    def get_finished(self) -> list[TransferResult]:
        """Return the results since the last call."""
        results, self._refused = self._refused, []
        for handler in self._handlers:
            results.extend(handler.get_finished())
        for result in results:
            if result.reason:
                self.counters[f"failed_{result.reason}"] += result.ok.count(False)
        return results

    def get_settled(self) -> list[int]:
        """Return unsettled jobs whose host slots are free again since the last call."""
        return [job_id for handler in self._handlers for job_id in handler.get_settled()]

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these jobs are answered."""
        for handler in self._handlers:
            handler.wait(job_ids)
