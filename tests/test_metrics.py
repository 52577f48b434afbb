"""What Prometheus scrapes after real stores, loads and evictions."""

import subprocess
import sys

import pytest

from kvoffload.connectors.local import LocalConnector

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
    assert scraped("store_seconds_total", tier="memory") > 0
    assert scraped("evictions_total", tier="cpu", reason="evicted") == 10
    assert scraped("stores_dropped_total", tier="memory", reason="back_pressure") == 0
    assert scraped("saved_prefill_tokens_total") == 40


def test_before_the_first_snapshot_there_is_only_the_version():
    from kvoffload.metrics import Exporter

    assert [family.name for family in Exporter().collect()] == ["kvoffload_build_info"]


def test_without_its_extra_the_module_names_it():
    program = "import sys; sys.modules['prometheus_client'] = None; import kvoffload.metrics"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        "ImportError: kvoffload.metrics needs its extra: pip install 'kvoffload[metrics]'"
        in (done.stderr.splitlines()[-1])
    )
