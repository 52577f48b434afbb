"""What an operator sees of a real SGLang: the page of metrics, ``kvoffload top``, refused ports."""

import json
import subprocess
import sys
import time
from urllib.error import URLError

import pytest

from kvoffload.cli.top import fetch, of_page
from kvoffload.metrics.names import (
    HOST_CHUNKS,
    HOST_CHUNKS_BUSY,
    METRICS,
    PREFILL_RATE,
    PREFIX,
    QUEUE_CHUNKS,
    QUEUE_KEPT_BYTES,
    QUEUE_REQUESTS,
    RETURN_CHUNKS,
    TIER_EVENTS,
    WAITING_CHUNKS,
)
from tests.support.disk_chunks import stored_in
from tests.support.redis_server import free_port

pytestmark = pytest.mark.timeout(900)
PROMPT_TOKENS = 592
"""Tokens of a prompt of 600 that lie in whole pages before its last one."""
QUEUE = {QUEUE_REQUESTS, QUEUE_CHUNKS, QUEUE_KEPT_BYTES, RETURN_CHUNKS}
LACKING = {WAITING_CHUNKS, TIER_EVENTS, HOST_CHUNKS, HOST_CHUNKS_BUSY, PREFILL_RATE} | QUEUE
"""SGLang decides what waits and has its own host memory; its tier has counted no event yet."""


def wait_reading(url, is_there):
    """Ask for the page until it shows something: it is up to a second old."""
    until = time.monotonic() + 60
    while True:
        reading = of_page(fetch(url))
        if is_there(reading):
            return reading
        assert time.monotonic() < until, reading
        time.sleep(0.2)


def test_a_servers_page_has_the_metrics_of_every_engine(start, prompt, tiers, disk, tmp_path):
    port = free_port()
    extra = tiers(disk(tmp_path / "kv"), metrics_port=port)
    engine = start("dynamic", extra, anew=True)  # the plug-in is found in each new process
    told = engine.generate(prompt(0))["tokens"]
    engine.wait_stored(prompt(0), told)
    url = f"http://127.0.0.1:{port}"
    page = fetch(url)
    shown = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    found = {name.removeprefix(PREFIX).removesuffix("_total") for name in shown}
    assert set(METRICS) - found <= LACKING
    reading = of_page(page)
    tier = reading.tiers["disk"]
    assert tier["up"] == 1
    assert tier["capacity_bytes"] == 256 << 20
    assert 0 < tier["resident_bytes"] < tier["capacity_bytes"]
    assert tier["hit_tokens"] >= PROMPT_TOKENS
    assert tier["load_bytes"] > 0
    assert reading.totals["saved_prefill_tokens"] == tier["hit_tokens"]
    assert reading.totals["transfer_failures"] == 0
    main = "from kvoffload.cli.main import main; main()"
    top = [sys.executable, "-c", main, "top", url, "--json"]
    shown = json.loads(subprocess.run(top, capture_output=True, check=True).stdout)
    assert shown["tiers"]["disk"]["up"] == 1

    for chunk in stored_in(tmp_path / "kv"):  # a removed one may be noticed before its load
        chunk.flip(-1)
    engine.forget()
    assert engine.generate(prompt(0))["tokens"] == told
    wait_reading(url, lambda reading: reading.totals["transfer_failures"] > 0)

    # A detach closes the endpoint. An attach that fails leaves no storage behind, and one that
    # succeeds opens the endpoint again.
    engine.forget()  # SGLang detaches nothing while it still backs up
    assert engine.ask("storage", action="detach")
    with pytest.raises(URLError, match="refused"):
        fetch(url)

    def attached(root):
        text = json.dumps(tiers(disk(root), metrics_port=port))
        given = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": text,
        }
        return engine.ask("storage", action="attach", **given)

    assert not attached("/proc/nowhere")
    assert attached(tmp_path / "kv")
    wait_reading(url, lambda reading: reading.tiers["disk"]["up"] == 1)
    engine.wait_stored(prompt(0), told)
    engine.kill()
