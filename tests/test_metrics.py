"""What Prometheus scrapes after real stores, loads and evictions."""

import ast
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import ClassVar

import pytest

import kvoffload.backends
from kvoffload import registry
from kvoffload.backends.header import CHECKS
from kvoffload.backends.memory import MemoryBackend, MemoryOptions
from kvoffload.config import parse_config
from kvoffload.connectors.local import LocalConnector
from kvoffload.errors import ConfigError
from kvoffload.identity import short
from kvoffload.io.protocol import Figures
from kvoffload.io.remote_tier import RemoteTier
from kvoffload.metrics import endpoint
from kvoffload.metrics.endpoint import MetricsServer, serve_metrics
from kvoffload.metrics.names import (
    CORRUPT_CHUNKS,
    LOAD_CHUNKS,
    LOAD_SECONDS,
    METRICS,
    NAMESPACE,
    PREFILL_RATE,
    PREFIX,
    RESIDENT_BYTES,
    TIER_EVENTS,
    TIER_UP,
)
from kvoffload.metrics.samples import (
    BUCKETS_S,
    LOADS,
    Durations,
    Traffic,
    as_data,
    packed,
    samples_of,
    total,
)
from tests.support.prometheus import scrape
from tests.support.redis_server import free_port
from tests.support.server_faults import killed

prometheus_client = pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")


@pytest.fixture
def scraped(kv_caches, new_request, until):
    from kvoffload.metrics import Exporter

    connector = LocalConnector(
        {
            "cpu_bytes": "20KiB",  # five chunks
            "blocks_per_chunk": 2,
            "backends": [{"type": "memory", "capacity": "1MiB"}],
        },
        kv_caches,
        block_size=4,
        facts={"model": "m"},
    )
    for name in ("a", "b"):
        request = new_request(name, 41)
        connector.after_forward(request, [list(range(5, 15))], 40)
        assert connector.flush()
        connector.request_finished(request)
    request = new_request("a", 41, request_id="again")
    assert connector.get_num_new_matched_tokens(request, 0) == 40
    connector.update_state_after_alloc(request, [list(range(5, 16))], 40)
    assert until(connector.poll)[0].ok
    connector.get_num_new_matched_tokens(new_request("never seen", 41), 0)
    connector.take_events()
    registry = prometheus_client.CollectorRegistry()
    exporter = Exporter()
    registry.register(exporter)
    exporter.update(connector.stats())
    connector.close()
    return lambda name, **labels: registry.get_sample_value(f"kvoffload_{name}", labels)


def test_bytes_resident_in_flight_and_in_all_are_three_gauges(scraped):
    assert scraped("resident_bytes", tier="cpu") == 5 * 4096
    assert scraped("inflight_bytes", tier="cpu") == 0
    assert scraped("capacity_bytes", tier="cpu") == 5 * 4096
    assert scraped("resident_bytes", tier="memory") == 10 * 4096
    assert scraped("inflight_bytes", tier="memory") == 0
    assert scraped("capacity_bytes", tier="memory") == 1 << 20


def test_lookups_moves_and_what_left_are_counted(scraped):
    assert scraped("lookups_total", tier="memory", result="hit") == 5
    assert scraped("lookups_total", tier="cpu", result="hit") == 0
    assert scraped("lookups_total", tier="", result="miss") >= 1
    assert scraped("load_chunks_total", tier="memory") == 5
    assert scraped("load_bytes_total", tier="memory") > 0
    assert scraped("store_chunks_total", tier="cpu") == 10
    assert scraped("store_bytes_total", tier="memory") == 10 * 4096
    assert scraped("store_seconds_sum", tier="memory") > 0
    assert scraped("evictions_total", tier="cpu", reason="evicted") == 10
    assert scraped("stores_dropped_total", tier="memory", reason="back_pressure") == 0
    assert scraped("saved_prefill_tokens_total") == 40


def test_before_the_first_snapshot_there_is_only_the_version():
    from kvoffload.metrics import Exporter

    assert [family.name for family in Exporter().collect()] == ["kvoffload_build_info"]


def test_without_its_extra_the_module_names_it():
    program = (
        "import sys; sys.modules['prometheus_client'] = None; import kvoffload.metrics.exporter"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        "ImportError: kvoffload.metrics needs its extra: pip install '/path/to/kvoffload[metrics]'"
        in (done.stderr.splitlines()[-1])
    )


# ---- the endpoint ----

BACKENDS = Path(kvoffload.backends.__file__).parent
FAST = {"timeout_s": 0.2, "connect_timeout_s": 0.2}


@pytest.fixture
def serving(kv_caches, closing):
    """Starts connectors with an endpoint; returns one, and a function that scrapes it."""

    def start(**settings):
        port = free_port()
        settings = {"cpu_bytes": "20KiB", "blocks_per_chunk": 2, "metrics_port": port, **settings}
        connector = LocalConnector(settings, kv_caches, block_size=4, facts={"model": "m"})
        return closing(connector), lambda: scrape(port)

    return start


def test_the_endpoint_has_every_metric_from_the_start_and_counters_begin_at_zero(serving):
    _, scraped = serving(backends=[{"type": "memory", "capacity": "1MiB"}])
    found = scraped()
    for name, metric in METRICS.items():
        ending = {"counter": "_total", "histogram": "_count", "gauge": ""}[metric.kind]
        series = [v for k, v in found.items() if k.split("{")[0] == PREFIX + name + ending]
        if name in (TIER_EVENTS, PREFILL_RATE):  # begin with the first event, the fourth prompt
            continue
        assert series, name
        if metric.kind == "counter":
            assert set(series) == {0.0}, name
    assert found['kvoffload_tier_up{tier="memory"}'] == 1
    assert found['kvoffload_evictions_total{reason="evicted",tier="memory"}'] == 0
    assert found['kvoffload_corrupt_chunks_total{kind="payload",tier="memory"}'] == 0


def test_the_endpoint_shows_what_happened_without_a_call_of_the_engine(serving, new_request, until):
    connector, scraped = serving(backends=[{"type": "memory", "capacity": "1MiB"}])
    request = new_request("a", 41)
    connector.after_forward(request, [list(range(5, 15))], 40)
    assert connector.flush()
    found = scraped()
    assert found['kvoffload_store_chunks_total{tier="cpu"}'] == 5
    assert found['kvoffload_store_bytes_total{tier="memory"}'] == 5 * 4096
    assert found['kvoffload_store_seconds_count{tier="memory"}'] >= 1
    assert found['kvoffload_store_seconds_bucket{le="+Inf",tier="memory"}'] >= 1
    until(lambda: scraped()['kvoffload_resident_bytes{tier="memory"}'] == 5 * 4096)
    until(lambda: scraped()["kvoffload_io_loop_delay_seconds_count"] >= 2)


def test_the_endpoint_names_the_namespace_of_the_tiers_and_after_a_renewal_the_new_one_alone(
    serving, until
):
    connector, scraped = serving(backends=[{"type": "memory", "capacity": "1MiB"}])

    def named():
        return {k: v for k, v in scraped().items() if k.startswith("kvoffload_namespace_info")}

    first = short(connector.stats()["namespace"])
    assert named() == {f'kvoffload_namespace_info{{namespace="{first}"}}': 1}
    connector.reset_cache()
    second = short(connector.stats()["namespace"])
    assert len(second) == 16
    assert second != first
    # A page is up to a second old.
    assert until(lambda: named() == {f'kvoffload_namespace_info{{namespace="{second}"}}': 1})


def test_the_namespaces_of_ranks_are_named_once_each():
    ranks = ([(NAMESPACE, (name,), 1)] for name in ("b", "a", "b"))
    assert as_data(total(map(packed, ranks))) == {NAMESPACE: {"a": 1, "b": 1}}


def test_of_ranks_that_share_a_store_the_gauges_are_not_added_and_one_that_is_down_is_told():
    ranks = (
        [(RESIDENT_BYTES, ("disk",), size), (TIER_UP, ("disk",), up), (LOAD_CHUNKS, ("disk",), 2)]
        for size, up in ((5, 1), (7, 0), (6, 1))
    )
    assert as_data(total(map(packed, ranks))) == {
        RESIDENT_BYTES: {"disk": 7},
        TIER_UP: {"disk": 0},
        LOAD_CHUNKS: {"disk": 6},
    }


class OddFigures(MemoryBackend):
    """Counts under odd names, and one count is none."""

    odd: ClassVar = {'line\nbreak "quoted" \\ \ud800': 1, "": 2, "huge": 1 << 80}
    bad: ClassVar = {}

    def counters(self):
        return {**self.odd, **self.bad}


@pytest.mark.parametrize("bad", [{}, {"read": None}, {"read": "many"}])
def test_odd_figures_of_a_plug_in_hide_no_others(serving, monkeypatch, until, bad):
    real = registry.open_backend
    monkeypatch.setattr(OddFigures, "bad", bad)

    def open_backend(type, options, namespace, where=""):
        if where == "backends[0].":
            return OddFigures(MemoryOptions(), namespace)
        return real(type, options, namespace, where)

    monkeypatch.setattr(registry, "open_backend", open_backend)
    # In a thread, where the registry is patched.
    _, scraped = serving(backends=[{"type": "memory"}, {"type": "memory"}], io="thread")
    until(lambda: 'kvoffload_resident_bytes{tier="memory1"}' in scraped())
    found = scraped()
    assert found['kvoffload_tier_up{tier="memory1"}'] == 1
    assert found["kvoffload_io_restarts_total"] == 0
    events = {name for name in found if name.startswith("kvoffload_tier_events_total")}
    assert len(events) == (0 if bad else 3), events


def test_the_endpoint_listens_on_this_machine_alone_and_ends_with_the_connector(serving):
    connector, scraped = serving()
    port = connector.config.metrics_port
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=2)
    assert scraped()
    connector.close()
    with pytest.raises(OSError, match="refused"):
        scraped()


CLIENT = """
import socket, sys, time
port = int(sys.argv[1])
held = []
for _ in range(600):
    each = socket.socket()
    each.setblocking(False)
    each.connect_ex(("127.0.0.1", port))
    held.append(each)
print("all", flush=True)
while True:
    time.sleep(0.5)
    for each in held:
        try:
            each.send(b"X")  # a request that never ends
        except OSError:
            pass
"""


def test_connections_that_never_end_take_few_descriptors_and_no_threads(
    serving, monkeypatch, until
):
    answered, answer = [], MetricsServer._answer

    def count(server, connection):
        answered.append(endpoint.CONNECTION_S)
        return answer(server, connection)

    monkeypatch.setattr(MetricsServer, "_answer", count)
    monkeypatch.setattr(endpoint, "CONNECTION_S", 1.0)
    connector, scraped = serving()
    assert scraped()

    def taken():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    descriptors, threads = taken()
    client = [sys.executable, "-c", CLIENT, str(connector.config.metrics_port)]
    with subprocess.Popen(client, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "all\n"
            most = [taken() for _ in range(50) if not time.sleep(0.02)]
            assert max(open_now for open_now, _ in most) <= descriptors + 8 + 1  # 1: the pipe
            assert max(count for _, count in most) <= threads
            monkeypatch.setattr(endpoint, "CONNECTION_S", 200.0)
            until(lambda: answered[-endpoint.MOST_CONNECTIONS :].count(200.0) == 8)
            began_s = time.monotonic()
            connector.close()
            assert time.monotonic() - began_s < 100.0, "it waits for open connections"
        finally:
            other.kill()


def test_a_page_is_computed_once_a_second_for_all_who_ask():
    asked = []
    port = free_port()
    with contextlib.closing(MetricsServer("127.0.0.1", port, lambda: asked.append(1) or ())):
        before = len(asked)
        began_s = time.monotonic()
        pages = {frozenset(scrape(port)) for _ in range(100)}
        assert len(asked) - before <= 2 + time.monotonic() - began_s
    assert len(pages) == 1


@pytest.mark.parametrize("request_text", [b"", b"X" * 9000, b"GET / HTTP/1.1\r\n"])
def test_a_request_that_is_none_gets_no_answer_and_the_next_one_does(serving, request_text):
    connector, scraped = serving()
    with socket.create_connection(("127.0.0.1", connector.config.metrics_port)) as client:
        client.sendall(request_text)
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # more was sent than is read
            assert client.recv(100) == b""
    assert scraped()


def test_an_address_of_ipv6_may_be_given():
    server = MetricsServer("::1", port := free_port(), lambda: ())
    with urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=10) as answer:
        assert b"kvoffload_build_info" in answer.read()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    server.close()
    server.close()


def test_a_port_in_use_is_an_error_that_names_it(serving):
    first, _ = serving()
    port = first.config.metrics_port
    with pytest.raises(ConfigError, match=f"metrics_port = {port}: cannot be listened on") as told:
        serving(metrics_port=port)
    assert told.value.remedy.endswith("; take another, or end what has it: ss -ltnp names it")


def test_a_rank_whose_port_would_be_past_the_last_one_is_refused():
    config = parse_config({"cpu_bytes": 1, "metrics_port": 65535})
    with pytest.raises(ConfigError, match="metrics_port = 65536: cannot be listened on"):
        serve_metrics(config, lambda: (), number=1)


@pytest.mark.parametrize("port", [0, 65536, -1])
def test_a_port_that_is_none_is_an_error(serving, port):
    with pytest.raises(ConfigError, match="metrics_port"):
        serving(metrics_port=port)


def test_an_io_process_that_died_is_counted_and_its_tiers_are_down_meanwhile(serving, until):
    connector, scraped = serving(backends=[{"type": "memory"}], io="process")
    up, restarts = 'kvoffload_tier_up{tier="memory"}', "kvoffload_io_restarts_total"
    assert scraped()[up] == 1
    pid = connector.stats()["io_server"].split()[-1]
    os.kill(int(pid), signal.SIGKILL)
    until(lambda: scraped()[restarts] == 1)
    until(lambda: scraped()[up] == 1)
    assert scraped()[restarts] == 1


def test_a_killed_redis_is_down_with_an_open_breaker_and_up_when_it_is_back(
    serving, new_request, until, own_redis
):
    up, breakers = 'kvoffload_tier_up{tier="redis"}', 'kvoffload_breakers_open{tier="redis"}'
    connector, scraped = serving(backends=[{"type": "redis", "url": own_redis.url, **FAST}])
    until(lambda: scraped()[up] == 1)

    def is_down():
        connector.get_num_new_matched_tokens(new_request("a", 41), 0)
        found = scraped()
        return (found[up], found[breakers]) == (0, 1)

    with killed(own_redis):
        until(is_down)
    until(lambda: (scraped()[up], scraped()[breakers]) == (1, 0), 30)


# ---- figures ----


def test_counters_of_a_tier_go_on_when_its_store_is_opened_again(serving, new_request, until):
    connector, scraped = serving(backends=[{"type": "memory", "capacity": "8KiB"}])
    evicted = 'kvoffload_tier_events_total{reason="evicted",tier="memory"}'
    request = new_request("a", 41)
    connector.after_forward(request, [list(range(5, 15))], 40)
    assert connector.flush()
    until(lambda: scraped().get(evicted, 0) == 3)
    connector.reset_cache()
    assert scraped()[evicted] == 3


def test_durations_fall_into_buckets_and_ranks_add_up():
    one, other = Durations(), Durations()
    for seconds in (0.0001, 0.0005, 0.003, 99.0):
        one.add(seconds)
    other.add(0.003)
    ranks = ([(LOAD_SECONDS, ("cpu",), each)] for each in (one, other))
    ((_, _, both),) = total(map(packed, ranks))
    assert both.counts[:4] == [2, 0, 0, 2]
    assert both.counts[len(BUCKETS_S)] == 1
    assert sum(both.sums) == pytest.approx(99.0066)


def test_a_batch_that_brought_nothing_does_not_count():
    traffic = Traffic(LOADS, "disk")
    for chunks in (3, 0, 1):
        traffic.add(chunks, 10 * chunks, 0.5)
    told = as_data(traffic.samples())
    assert (told["load_chunks"], told["load_bytes"]) == ({"disk": 4}, {"disk": 40})
    assert sum(told["load_seconds"]["disk"]["counts"]) == 2


def test_statistics_are_samples_again_and_what_is_none_is_passed_over(serving):
    connector, _ = serving(backends=[{"type": "memory"}])
    stats = connector.stats()
    assert as_data(samples_of(stats)).items() <= stats.items()
    assert set(stats) - set(METRICS) == {"namespace", "slot_bytes", "copies", "io_server"}


def test_a_failed_verification_is_counted_by_its_check():
    tier = RemoteTier("memory", 1.0, lambda: None)
    tier.opened(has_index=True)
    counters = {"read_corrupt_mac": 2, "corrupt_key": 1, "corrupt": 9, "corrupt_removed": 1}
    tier.take(Figures("memory", (0, None, 0, {}), counters))
    told = as_data(tier.samples())
    corrupt = told[CORRUPT_CHUNKS]["memory"]
    assert {kind: count for kind, count in corrupt.items() if count} == {"mac": 2, "key": 1}
    assert told[TIER_EVENTS]["memory"] == {"corrupt": 9, "corrupt_removed": 1}  # nothing twice


def test_each_check_that_the_code_of_a_backend_names_has_its_counter():
    """Those of the header are made to counters by one function; others are written out."""
    named = set()
    for path in BACKENDS.rglob("*.py"):
        named |= set(re.findall(r'"corrupt_(\w+)"', path.read_text()))
    code = ast.parse((BACKENDS / "header.py").read_text())
    for function in (each for each in code.body if isinstance(each, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
                named.add(node.value.value)
    assert {"payload", "link"} <= named
    assert named - {None, "removed"} <= set(CHECKS)
