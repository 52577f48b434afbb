"""Lookups, loads and stores of requests as OpenTelemetry spans; the extra ``otel``.

The engine's thread appends a few values to a queue. A thread makes the spans of them, with the
times that they were noted at. It lets the engine's thread run after each one.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import kvoffload
from kvoffload.extras import check_extra
from kvoffload.offload.base import Job, LoadJob, StoreJob

log = logging.getLogger(__name__)

PERIOD_S = 0.2
"""Between two looks at the queue."""
MOST = 1 << 14
"""Spans that wait at most; more are dropped with a warning."""
MOST_LOOKUPS = 4096
"""Lookups without an answer, of requests that were aborted among them."""
LONGEST_ID = 128
"""Of a request's id, which clients choose, so many characters are kept."""
REQUEST = "gen_ai.request.id"
"""The attribute that vLLM's own spans have."""


class _Ended(NamedTuple):
    name: str
    began_ns: int
    ended_ns: int
    request_id: str
    attributes: dict[str, Any]
    reason: str = ""
    """Why a part failed; empty if none did."""


class Spans:
    """Makes spans by the process's tracer provider, or by one of its own if there is none.

    Raises:
        ConfigError: the extra ``otel`` is not installed.
    """

    def __init__(self) -> None:
        check_extra("otel_spans", True)
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider: Any = trace.get_tracer_provider()
        self._own: Any = None
        if isinstance(provider, trace.ProxyTracerProvider):  # the process has set none
            provider = self._own = TracerProvider()
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = provider.get_tracer("kvoffload", kvoffload.__version__)
        self._failed = trace.StatusCode.ERROR
        self._ended: deque[_Ended] = deque()
        self._lookups: dict[str, int] = {}
        self._dropped = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        """Runs from the first span on."""

    def lookup_began(self, request_id: str) -> None:
        """Note a request's lookup, which may be asked several times until it has an answer."""
        request_id = request_id[:LONGEST_ID]
        if request_id not in self._lookups:
            self._lookups[request_id] = time.time_ns()
            if len(self._lookups) > MOST_LOOKUPS:
                del self._lookups[next(iter(self._lookups))]

    def lookup_ended(self, request_id: str, num_tokens: int) -> None:
        """Note the answer: the tokens that can be loaded."""
        began_ns = self._lookups.pop(request_id[:LONGEST_ID], 0)
        if began_ns:
            self._add("lookup", began_ns, request_id, {"kvoffload.tokens": num_tokens})

    def of_lookup(self, request_id: str, look_up: Callable[[], int | None]) -> int | None:
        """Call what looks a request up, and note the call; None is no answer yet."""
        self.lookup_began(request_id)
        found = look_up()
        if found is not None:
            self.lookup_ended(request_id, found)
        return found

    def job_ended(self, job: Job) -> None:
        """Note the end of a request's load or store; other jobs belong to no request."""
        if not isinstance(job, LoadJob | StoreJob) or job.context is None:
            return
        name = "load" if isinstance(job, LoadJob) else "store"
        failed = job.ok.count(False)
        counts = {"kvoffload.chunks": len(job.ok), "kvoffload.failed_chunks": failed}
        reason = (job.reason or "failed") if failed else ""
        self._add(name, job.began_ns, job.context.req_id, counts, reason)

    def close(self) -> None:
        """Make the spans that wait, and export them if no one else does. Idempotent."""
        atexit.unregister(self.close)
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._own is not None:
            self._own.shutdown()
            self._own = None

    def _add(self, name: str, began_ns: int, request_id: str, *rest: Any) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvoffload-spans", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # vLLM's scheduler is not told of its end
        if len(self._ended) < MOST:
            cut = request_id[:LONGEST_ID]
            self._ended.append(_Ended(name, began_ns, time.time_ns(), cut, *rest))
        else:
            self._dropped += 1

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self._make_all()
        self._make_all()

    def _make_all(self) -> None:
        while self._ended:
            each = self._ended.popleft()
            attributes = {REQUEST: each.request_id, **each.attributes}
            span = self._tracer.start_span(
                f"kvoffload.{each.name}", start_time=each.began_ns, attributes=attributes
            )
            if each.reason:
                span.set_status(self._failed, each.reason)
            span.end(each.ended_ns)
            time.sleep(0)  # the engine's thread may take the GIL
        if self._dropped:
            log.warning("%d spans were dropped: too many at once", self._dropped)
            self._dropped = 0


def open_spans(wanted: bool) -> Spans | None:
    """Return what makes spans, if the settings want it."""
    return Spans() if wanted else None
