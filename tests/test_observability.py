"""Rules, dashboard and runbook fit the list of metrics, each other, and a real Prometheus."""

import json
import re
import shutil
import subprocess
import time
import tomllib
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from kvoffload.connectors.local import LocalConnector
from kvoffload.metrics.names import METRICS, PREFIX, SERVER_METRICS
from tests.support.host_server import HostServer
from tests.support.prometheus import EXAMPLE, NEEDED, RULES, scraping
from tests.support.redis_server import free_port

ROOT = Path(__file__).parents[1]
RUNBOOK = (ROOT / "docs" / "guides" / "runbook.md").read_text()
BOARD = json.loads((EXAMPLE / "grafana" / "kvoffload.json").read_text())
ALERTS = re.findall(r"alert: (\w+)", RULES)
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
ENDINGS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
LISTED = {PREFIX + name: metric for name, metric in (METRICS | SERVER_METRICS).items()}
SCRAPED = {name + ending for name, metric in LISTED.items() for ending in ENDINGS[metric.kind]}
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason=NEEDED)
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason=NEEDED)


@pytest.mark.parametrize("text", [RULES, RUNBOOK, "\n".join(QUERIES)])
def test_each_metric_that_is_queried_is_in_the_list(text):
    named = set(re.findall(r"\bkvoffload_\w+\b", text))
    assert named
    assert named <= SCRAPED | set(LISTED)


def test_each_engine_can_be_chosen_in_the_dashboard():
    """Under SGLang, one whose tier is a bucket has no resident bytes and no capacity."""
    variables = BOARD["templating"]["list"]
    (query,) = [each["query"] for each in variables if each["name"] == "instance"]
    named = set(re.findall(r"kvoffload_\w+", query))
    assert named <= set(LISTED)
    assert {name for name in named if "absent" not in LISTED[name].text} == {"kvoffload_tier_up"}
    assert "kvoffload_capacity_bytes" in named  # of the server of a host, and of host memory alone


def test_each_alert_has_its_section_and_each_section_its_parts():
    assert len(ALERTS) == 13
    for alert in ALERTS:
        page = "http://localhost:8080/docs/guides/runbook.html"
        assert f"runbook_url: {page}#{alert.lower()}\n" in RULES
        section = RUNBOOK.partition(f"\n## {alert}\n")[2].partition("\n## ")[0]
        for part in ("**Symptom.**", "**Query.**", "**Command.**", "**Remedy.**"):
            assert part in section, f"{alert} lacks {part}"


def test_each_reason_of_a_miss_has_its_row():
    reasons = tomllib.loads((ROOT / "tools" / "reference.toml").read_text())["reasons"]
    rows = RUNBOOK.partition("\n## Reasons of a miss\n")[2].partition("\n## ")[0]
    assert not [reason for reason in reasons if f"`{reason}`" not in rows]


def test_each_command_of_the_runbook_exists():
    from kvoffload.cli.main import COMMANDS

    assert set(re.findall(r"`kvoffload (\w+)", RUNBOOK)) <= set(COMMANDS)


@pytest.mark.skipif(ALERTMANAGER is None, reason="needs Debian's package prometheus-alertmanager")
def test_a_tier_that_is_down_is_one_alert(tmp_path, until):
    port = free_port()
    words = [
        ALERTMANAGER,
        f"--config.file={EXAMPLE / 'alertmanager.yml'}",
        f"--storage.path={tmp_path}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    url = f"http://127.0.0.1:{port}/api/v2/alerts"
    firing = [("KVOffloadTierDown", "redis"), ("KVOffloadBreakerOpen", "redis")]
    firing += [("KVOffloadBreakerOpen", "redis1"), ("KVOffloadTransferFailures", "")]
    alerts = [
        {"labels": {"alertname": name, "tier": tier, "instance": "e"}} for name, tier in firing
    ]
    post = Request(url, json.dumps(alerts).encode(), {"Content-Type": "application/json"})
    with (tmp_path / "log").open("w") as log, subprocess.Popen(words, stderr=log) as process:
        try:
            until(lambda: answered(f"http://127.0.0.1:{port}/-/ready") is not None)
            urlopen(post, timeout=10).close()

            def states():
                told = json.loads(answered(url) or "[]")
                return {
                    (each["labels"]["alertname"], each["labels"].get("tier", "")): each["status"][
                        "state"
                    ]
                    for each in told
                }

            sent = dict.fromkeys(firing, "active") | dict.fromkeys(
                (firing[1], firing[3]), "suppressed"
            )
            until(lambda: states() == sent)
        finally:
            process.kill()


def answered(url):
    try:
        with urlopen(url, timeout=10) as answer:
            return answer.read()
    except OSError:
        return None


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "kvoffload.rules.yml"),
        ("test", "rules", "kvoffload.rules.test.yml"),
    ],
)
def test_promtool_accepts_the_rules_and_their_tests(words):
    done = subprocess.run(["promtool", *words], cwd=EXAMPLE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(tmp_path):
    """Starts a Prometheus with our rules that scrapes ports; returns a function that queries."""
    with ExitStack() as running:
        yield lambda port, server: running.enter_context(scraping(port, tmp_path, server=server))


@pytest.fixture
def engine(new_kv_caches, closing):
    """Attaches engines with host memory and other tiers."""

    def attach(**more):
        settings = {"cpu_bytes": "20KiB", "blocks_per_chunk": 2, **more}
        caches = new_kv_caches()
        return closing(LocalConnector(settings, caches, block_size=4, facts={"model": "m"}))

    return attach


@pytest.fixture
def server(tmp_path):
    """A server of the host."""
    server = HostServer(tmp_path, metrics_port=free_port())
    yield server
    server.kill()


def used(engine, new_request, until, name="a"):
    """Store a prompt and load it from the disk."""
    engine.after_forward(new_request(name, 41), [list(range(5, 15))], 40)
    assert engine.flush()
    engine.request_finished(new_request(name, 41))
    engine.after_forward(new_request(name + "2", 41), [list(range(5, 15))], 40)
    assert engine.flush()
    request = new_request(name, 41, request_id=name + " again")
    assert until(lambda: engine.get_num_new_matched_tokens(request, 0))
    engine.update_state_after_alloc(request, [list(range(5, 16))], 40)
    return until(engine.poll)


@needs_prometheus
def test_each_query_of_the_dashboard_brings_something(
    engine, server, prometheus, new_request, until, tmp_path
):
    disk = {"type": "disk", "root": str(tmp_path / "root"), "capacity": "256KiB"}
    engines = [engine(backends=[disk], metrics_port=free_port()), engine(serve=server.path)]
    ask = prometheus(engines[0].config.metrics_port, server.port)
    assert ask('up{job="kvoffload"} == 1')
    assert ask('up{job="kvoffload-serve"} == 1')
    shown = (query.replace("$instance", ".*") for query in QUERIES if "vllm:" not in query)
    empty = [query.replace("$__rate_interval", "10s").replace("$__range", "1m") for query in shown]
    deadline_s = time.monotonic() + 100
    while empty and time.monotonic() < deadline_s:  # rates need several scrapes
        for each in engines:
            used(each, new_request, until, name=str(time.monotonic()))
        empty = [query for query in empty if not ask(query, 0.0)]
        time.sleep(0.3)
    assert empty == []
