"""``kvoffload top``: an engine by its endpoint, and a store by itself."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from disk_commands import kvoffload, process
from rich.console import Console

from kvoffload.cli import top
from kvoffload.cli.top import _lines, _shown, of_page
from kvoffload.connectors.local import LocalConnector
from tests.support.redis_server import free_port

pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")
ASCII = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}


@pytest.fixture
def engine(kv_caches, new_request, tmp_path):
    """An engine with a full host memory and a disk; returns its port."""
    port = free_port()
    disk = {"type": "disk", "root": str(tmp_path / "root"), "capacity": "64MiB"}
    settings = {
        "cpu_bytes": "20KiB",
        "blocks_per_chunk": 2,
        "backends": [disk],
        "metrics_port": port,
    }
    connector = LocalConnector(settings, kv_caches, block_size=4, facts={"model": "m"})
    for name in ("a", "b"):
        connector.after_forward(new_request(name, 41), [list(range(5, 15))], 40)
        assert connector.flush()
    deadline_s = time.monotonic() + 60
    while connector.stats()["store_chunks"]["disk"] != 10:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    yield port
    connector.close()


def test_once_as_json_has_raw_numbers(engine):
    done = kvoffload("top", f"http://127.0.0.1:{engine}", "--once", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    disk, cpu = told["tiers"]["disk"], told["tiers"]["cpu"]
    assert (disk["up"], disk["capacity_bytes"]) == (1, 64 << 20)
    assert disk["store_bytes"] == 10 * 4096
    assert disk["corrupt"] == 0
    assert cpu["evictions"] == 5
    assert told["saved_prefill_tokens"] == told["io_restarts"] == 0


@pytest.mark.parametrize("columns", ["80", "60"])
def test_once_fits_the_terminal_and_survives_ascii(engine, columns):
    done = process("top", f"http://127.0.0.1:{engine}/", "--once", COLUMNS=columns, **ASCII)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "disk" in done.stdout
    if columns == "80":
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert re.search(r"disk +\S+ +up", done.stdout)


def test_a_folder_and_its_fill(engine, tmp_path):
    done = kvoffload("top", str(tmp_path / "root"), "--json")
    assert done.returncode == 0, done.stderr
    store = json.loads(done.stdout)["tiers"]["store"]
    assert (store["chunks"], store["namespaces"]) == (10, 1)
    text = kvoffload("top", str(tmp_path / "root")).stdout
    assert "10 chunks in 1 namespace" in text
    assert "\nallocated by chunks: " in text  # a line without a title


def test_a_redis_by_itself(own_redis):
    done = kvoffload("top", own_redis.url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tiers"]["store"]["chunks"] == 0
    assert "used by all data, limit: " in kvoffload("top", own_redis.url).stdout


def test_what_cannot_be_reached_or_is_none_of_ours_is_said(tmp_path):
    dead = kvoffload("top", f"http://127.0.0.1:{free_port()}")
    assert (dead.returncode, dead.stdout) == (1, "")
    assert "cannot be read: nothing listens there; the port is" in dead.stderr
    assert "Traceback" not in dead.stderr
    assert kvoffload("top", str(tmp_path)).returncode in (0, 2)
    assert kvoffload("top", "ftp://x").returncode == 2
    for port in ("localhost:8000", "h.example:9401/metrics", "[::1]:8000"):
        told = kvoffload("top", port)
        assert (told.returncode, told.stdout) == (2, "")
        assert f"did you mean http://{port}?" in told.stderr


@contextlib.contextmanager
def live(target):
    """Run the command on a terminal; yields a function that reads on until something is shown."""
    # A shell's background job ignores the interrupt, and what it starts does as well.
    program = (
        "import signal, sys; sys.argv[0] = 'kvoffload'\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvoffload.cli.main import main; main()"
    )
    here, there = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-c", program, "top", target, "--interval", "0.2"],
        stdin=there,
        stdout=there,
        stderr=there,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
    )
    os.close(there)
    shown, until_s = bytearray(), time.monotonic() + 120

    def read_until(wanted):
        while not re.search(wanted, shown) and time.monotonic() < until_s:
            if select.select([here], [], [], 0.5)[0]:
                shown.extend(os.read(here, 1 << 16))
        assert re.search(wanted, shown), shown.decode(errors="replace")
        return bytes(shown)

    try:
        yield read_until
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.wait()
        os.close(here)


def test_the_share_of_hits_and_the_time_of_a_load():
    page = """
kvoffload_tier_up{tier="disk"} 1
kvoffload_lookups_total{tier="cpu",result="hit"} 30
kvoffload_lookups_total{tier="disk",result="hit"} 60
kvoffload_lookups_total{tier="",result="miss"} 10
kvoffload_load_seconds_sum{tier="disk"} 0.5
kvoffload_load_seconds_count{tier="disk"} 20
"""
    first = of_page(page)
    assert (first.tiers["disk"]["lookup_hits"], first.totals["lookups"]) == (60, 100)
    later = of_page(page.replace("60", "70").replace("0.5", "0.7").replace("} 20", "} 30"))
    for now, last, hits, load in ((first, None, "60%", "25.0 ms"), (later, first, "100%", "20.0")):
        out = Console(width=80, file=io.StringIO())
        out.print(_shown(now, last))
        shown = out.file.getvalue()
        assert re.search(rf"disk +\S+ up +\S+ +{hits} +\S+ +{load}", shown), shown
        assert "waiting" not in shown  # an empty column


def shown_of(now, last=None):
    out = Console(width=100, file=io.StringIO())
    out.print(_shown(now, last))
    return out.file.getvalue()


def test_a_tier_that_is_down_or_refuses_is_shown_with_its_reasons():
    page = """
kvoffload_tier_up{tier="redis"} 0
kvoffload_tier_up{tier="disk"} 1
kvoffload_tier_up{tier="s3"} 0
kvoffload_tier_events_total{tier="redis",reason="connection_lost_unreachable"} 12
kvoffload_tier_events_total{tier="redis",reason="read_lost_timeout"} 3
kvoffload_tier_events_total{tier="disk",reason="write_io_EROFS"} 18
kvoffload_tier_events_total{tier="disk",reason="evicted"} 4000
"""
    first = of_page(page)
    lines = shown_of(first).splitlines()
    assert "redis: connection_lost_unreachable 12, read_lost_timeout 3" in lines
    assert "disk: write_io_EROFS 18" in lines
    assert "s3: the engine's log says why it is down; kvoffload doctor examines it" in lines
    later = of_page(page.replace("} 12", "} 14"))
    lines = shown_of(later, first).splitlines()
    assert "redis: connection_lost_unreachable 2" in lines
    assert not any(line.startswith("disk: ") for line in lines)


@pytest.mark.parametrize(
    "reason",
    ["read_late", "lookup_late", "write_no_server", "write_failed", "connect_failed"],
)
def test_what_a_store_counts_while_it_does_not_answer_is_a_reason(reason):
    page = f"""
kvoffload_tier_up{{tier="a"}} 0
kvoffload_tier_events_total{{tier="a",reason="{reason}"}} 3
"""
    assert f"a: {reason} 3" in shown_of(of_page(page)).splitlines()


def test_a_tier_that_is_down_in_some_engines_of_a_page_is_not_said_to_be_up():
    page = "".join(
        f'kvoffload_tier_up{{engine="{i}",tier="disk"}} {int(i > 0)}\n' for i in range(4)
    )
    assert re.search(r"disk +\S+ DOWN in 1 of 4 ", shown_of(of_page(page)))
    assert "DOWN" not in shown_of(of_page(page.replace("} 0", "} 1")))


def test_a_page_without_hits_has_no_column_of_them():
    page = """
kvoffload_load_bytes_total{tier="disk"} 5
kvoffload_io_restarts_total 1
kvoffload_transfer_failures_total 1
"""
    for more, has_hits in (("", False), ('kvoffload_hit_tokens_total{tier="disk"} 0\n', True)):
        out = Console(width=80, file=io.StringIO())
        out.print(_shown(of_page(page + more), None))
        assert ("hit tokens" in out.file.getvalue()) is has_hits
    shown = out.file.getvalue()
    assert "its I/O process or server 1 time\n" in shown
    assert "transfers of 1 chunk failed\n" in shown


@pytest.mark.parametrize(
    ("requests", "told"), [(0, []), (1, ["1 request in"]), (3, ["3 requests in"])]
)
def test_the_queue_is_a_line_while_there_is_one(requests, told):
    page = f"kvoffload_queue_requests {requests}\nkvoffload_queue_kept_bytes 2097152\n"
    lines = [*_lines(of_page(page))]
    assert lines == [f"{each} the queue: 2.0 MiB of host memory are kept" for each in told]


def test_a_server_of_a_host_shows_its_engines_in_80_columns():
    pages = [
        f"""
kvoffload_resident_bytes{{tier="memory"}} 1.2e12
kvoffload_capacity_bytes{{tier="memory"}} 1.3e12
kvoffload_engines 2
kvoffload_engines_leaving {1 - now}
kvoffload_engine_load_bytes_total{{engine="4194303-255"}} {(1 + now) * 1e12}
kvoffload_engine_store_bytes_total{{engine="4194303-255"}} {1e15 + now * 4096}
kvoffload_engine_store_bytes_total{{engine="7"}} 0
"""
        for now in range(2)
    ]
    last, now = map(of_page, pages)
    now.when_s = last.when_s + 2.0
    out = Console(width=200, record=True, file=io.StringIO())
    out.print(_shown(last, None))
    out.print(_shown(now, last))
    text = out.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert text.count("1 engine left while a store's call uses its memory") == 1
    assert re.search(r"4194303-255 .* 909\.5 TiB", text)
    assert re.search(r"4194303-255 .* 465\.7 GiB .* 2\.0 KiB", text)


def test_live_it_shows_rates_and_ends_with_control_c(engine):
    with live(f"http://127.0.0.1:{engine}") as read_until:
        read_until(rb"loaded/s")


def test_live_it_goes_on_after_a_restart_of_the_engine_without_negative_rates():
    """A new engine has no metrics of ours at first, and its counters begin at zero."""
    pages = [
        f'kvoffload_evictions_total{{tier="{tier}"}} {count}'
        for tier, count in (("before", 5e6), ("before", 0), ("after", 0))
    ]
    pages.insert(1, "")

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write((pages.pop(0) if len(pages) > 1 else pages[0]).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with live(f"http://127.0.0.1:{server.server_port}") as read_until:
            assert not re.search(rb"-\d", read_until(rb"after"))
    finally:
        server.shutdown()
        server.server_close()


UP = 'kvoffload_tier_up{tier="%s"} %s\n'


def endless(answer):
    """Send a page that never ends."""
    with contextlib.suppress(OSError):
        while True:
            answer.wfile.write(b"# a comment that is no series\n" * 10_000)


def crowded(answer):
    """Send a page of too many tiers."""
    answer.wfile.write("".join(UP % (f"t{i}", 1) for i in range(100_000)).encode())


def slow(answer):
    """Send a page that never ends, a byte now and then."""
    with contextlib.suppress(OSError):
        while True:
            answer.wfile.write(b"#")
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (UP % ("a", "abc") + UP % ("b", 1), ""),
        (UP % ("a", "NaN") + UP % ("b", 1), ""),
        ("kvoffload_tier_up{" + "a" * 300_000 + "} 1\n" + UP % ("b", 1), ""),
        (("kvoffload_tier_up{" + "a" * 4000 + "} 1\n") * 2000 + UP % ("b", 1), ""),
        (crowded, "more than 64 tiers"),
        (endless, "more than 8.0 MiB"),
        (slow, "takes more than"),
    ],
    ids=["no number", "NaN", "long", "long lines", "tiers", "endless", "slow"],
)
def test_a_hostile_page_neither_hangs_it_nor_is_a_traceback(page, told, monkeypatch):
    monkeypatch.setattr(top, "TIMEOUT_S", 2.0)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            page(self) if callable(page) else self.wfile.write(page.encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        began_s = time.monotonic()
        done = kvoffload("top", url, "--once", "--json")
        assert time.monotonic() - began_s < 30
        server.shutdown()
    assert "Traceback" not in done.stderr
    if told:
        assert done.returncode in (1, 2)
        assert told in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tiers"]["b"] == {"up": 1}


def test_pages_of_vllm_are_read_and_engines_are_added_up():
    page = """
# HELP vllm:kvoffload_load_bytes_total x
vllm:kvoffload_load_bytes_total{engine="0",model_name="a \\"b\\"",tier="disk"} 5.0
vllm:kvoffload_load_bytes_total{engine="1",model_name="m",tier="disk"} 7.0
vllm:kvoffload_io_restarts_total{engine="0",model_name="m"} 2.0
vllm:num_requests{engine="0"} 3
"""
    reading = of_page(page)
    assert reading.tiers == {"disk": {"load_bytes": 12.0}}
    assert reading.totals == {"io_restarts": 2.0}
