"""A real start says why its tiers are cold: both forms of the I/O server, disk and Redis."""

import logging
import time
from contextlib import closing

import pytest
from local_requests import compute

from kvoffload.connectors.local import LocalConnector
from kvoffload.identity import short

FACTS = {"model": "Qwen/Qwen3-8B", "kv_dtype": "fp8"}


@pytest.fixture(params=["thread", "process"])
def start(request, kv_caches, new_request, caplog, until):
    """Start a connector on tiers, store a prompt if asked, and end it; return its namespace."""
    caplog.set_level(logging.INFO, "kvoffload")

    def run(*backends, stores=False, line_of="", reset=False, **facts):
        with closing(
            LocalConnector(
                {
                    "cpu_bytes": 16 * 4096,
                    "blocks_per_chunk": 2,
                    "backends": backends,
                    "io": request.param,
                },
                kv_caches,
                block_size=4,
                facts={**FACTS, **facts},
            )
        ) as connector:
            if stores:
                prompt = new_request("p", 41)
                compute(connector, prompt, list(range(5, 15)))
            if line_of:
                until(lambda: any(line.startswith(f"{line_of}: namespace") for line in said()))
            if reset:
                connector.reset_cache()
                time.sleep(0.3)
            return connector.stats()["namespace"]

    def said():
        return [
            each.getMessage() for each in caplog.records if "has no chunks" in each.msg % each.args
        ]

    run.said = said
    return run


def disk(root):
    return {"type": "disk", "root": str(root), "min_free": 0}


def test_a_cold_start_names_the_namespace_that_has_the_models_chunks(start, tmp_path):
    old = start(disk(tmp_path), stores=True, kv_dtype="auto")
    new = start(disk(tmp_path), line_of="disk")
    (line,) = start.said()
    assert line.startswith(f"disk: namespace {short(new)} has no chunks; about ")
    assert f"of 'Qwen3-8B' are in namespace {short(old)}, which differs in " in line
    assert "kv_dtype: auto -> fp8;" in line


def test_a_warm_start_and_a_reset_say_nothing(start, tmp_path):
    warm, cold = disk(tmp_path / "warm"), disk(tmp_path / "cold")
    for root in (warm, cold):
        start(root, stores=True, kv_dtype="auto")
    start(warm, stores=True)
    start(cold, line_of="disk")
    before = start.said()
    # The second tier's line shows that the first one's would have been said.
    start(warm, cold, line_of="disk1", reset=True)
    (line,) = start.said()[len(before) :]
    assert line.startswith("disk1: ")


def test_a_redis_tier_says_it_too(start, own_redis):
    tier = {"type": "redis", "url": own_redis.url}
    old = start(tier, stores=True, kv_dtype="auto")
    start(tier, line_of="redis")
    (line,) = start.said()
    assert f"; 5 chunks of 'Qwen3-8B' are in namespace {short(old)}, which differs in " in line
