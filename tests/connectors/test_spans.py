"""OpenTelemetry spans of lookups, loads and stores."""

import os
import socket
import subprocess
import sys
import threading

import pytest
from local_requests import compute

from kvoffload.connectors.spans import REQUEST, Spans, open_spans
from kvoffload.errors import ConfigError
from tests.support.span_receiver import span_receiver

NEEDED = "needs the extra 'otel': pip install '/path/to/kvoffload[otel]'"


def serve(connector, request, until):
    """Look a request up, load what is there, and store the rest."""
    found = connector.get_num_new_matched_tokens(request, 0)
    if found:
        connector.update_state_after_alloc(request, [list(range(5, 16))], found)
        until(connector.poll)
    compute(connector, request, list(range(5, 15)))
    return found


@pytest.fixture(scope="module")
def exporter():
    """What an SDK with a provider of its own exports."""
    pytest.importorskip("opentelemetry.sdk", reason=NEEDED)
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=NEEDED)
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def exported(exporter):
    exporter.clear()
    return exporter.get_finished_spans


def test_each_lookup_load_and_store_is_a_span_of_its_request(connect, new_request, until, exported):
    connector = connect(otel_spans=True)
    assert serve(connector, new_request("a", 41, request_id="first"), until) == 0
    assert serve(connector, new_request("a", 41, request_id="second"), until) == 40
    connector.close()
    spans = [(span.attributes[REQUEST], span.name, dict(span.attributes)) for span in exported()]
    assert [(request, name) for request, name, _ in spans] == [
        ("first", "kvoffload.lookup"),
        ("first", "kvoffload.store"),
        ("second", "kvoffload.lookup"),
        ("second", "kvoffload.load"),
    ]
    assert [spans[i][2]["kvoffload.tokens"] for i in (0, 2)] == [0, 40]
    assert spans[3][2]["kvoffload.chunks"] == 5
    assert spans[3][2]["kvoffload.failed_chunks"] == 0
    for span in exported():
        assert 0 <= span.end_time - span.start_time < 5e9
        assert span.status.is_ok or span.status.is_unset


def test_of_a_long_id_the_beginning_is_kept_alone(exported):
    from kvoffload.offload.base import CPULoadStoreSpec, LoadJob, ReqContext

    spans = Spans()
    long = "x" * 100_000
    spans.of_lookup(long, lambda: 8)
    spans.lookup_began(long + "again")
    assert sum(map(len, spans._lookups)) == 128
    job = LoadJob(1, (b"k",), CPULoadStoreSpec([0]), ReqContext(long), 1, None)
    job.began_ns, job.ok = 1, (True,)
    spans.job_ended(job)
    spans.close()
    assert [span.attributes[REQUEST] for span in exported()] == ["x" * 128] * 2


def test_a_load_that_fails_is_a_span_with_its_reason(exported):
    from kvoffload.offload.base import CPULoadStoreSpec, LoadJob, ReqContext

    spans = Spans()
    job = LoadJob(1, (b"k", b"l"), CPULoadStoreSpec([0, 1]), ReqContext("r"), 2, None)
    job.began_ns, job.ok, job.reason = 1, (True, False), "deadline"
    spans.job_ended(job)
    spans.close()
    (span,) = exported()
    assert span.attributes["kvoffload.failed_chunks"] == 1
    assert (span.status.is_ok, span.status.description) == (False, "deadline")


def test_a_lookup_that_waits_is_one_span_from_its_first_call(exported):
    spans = Spans()
    answers = iter([None, None, 8])
    for _ in range(3):
        spans.of_lookup("r", lambda: next(answers))
    spans.close()
    (span,) = exported()
    assert span.attributes["kvoffload.tokens"] == 8


def test_without_a_provider_spans_go_to_the_receiver_that_the_environment_names(exporter):
    program = (
        "from kvoffload.connectors.spans import Spans\n"
        "spans = Spans(); spans.of_lookup('the request', lambda: 3)"  # and no close
    )
    with span_receiver() as (endpoint, received):
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=240)
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"kvoffload.lookup" in body
    assert b"the request" in body


def test_without_the_extra_the_setting_names_it(connect, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"kvoffload\[otel\]"):
        connect(otel_spans=True)


def test_off_is_the_default_and_imports_nothing(python):
    program = (
        "import sys, kvoffload.connectors.local as local\n"
        "from kvoffload.config import OffloadConfig\n"
        "assert OffloadConfig(cpu_bytes='1MiB').otel_spans is False\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([*python, "-c", program], check=True, timeout=240)
    assert open_spans(False) is None


@pytest.mark.parametrize("problem", ["tier", "port"])
def test_a_connector_that_cannot_start_leaves_no_exporter(connect, monkeypatch, until, problem):
    trace = pytest.importorskip("opentelemetry.trace", reason=NEEDED)
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=NEEDED)
    pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")
    # As in a process that has set no provider; other tests of this one have.
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wrong = {
            "tier": {"backends": [{"type": "disk", "root": "/proc/none"}]},
            "port": {"metrics_port": taken.getsockname()[1]},
        }
        with pytest.raises(ConfigError):
            connect(otel_spans=True, **wrong[problem])
    until(lambda: set(threading.enumerate()) <= threads)
