"""What routers make of the events that an engine publishes: NVIDIA Dynamo's indexer counts them.

The indexer is a wheel for CPU of 70 MB. It lives in an environment of its own in the cache folder
of the tests, and is installed there once.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import Medium, OffloadingKVEventsConfig

from benchmarks.vllm_parts import halves
from benchmarks.vllm_parts.engine import ours
from kvoffload.connectors.vllm import described_chunks
from kvoffload.connectors.vllm.manager_adapter import ManagerAdapter
from kvoffload.messages import make_offload_key
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.offload.tiers import Presence
from kvoffload.policies.lru import LRUPolicy
from tests.support.redis_server import free_port

DYNAMO = "1.6.1"
BLOCK = 32
LENGTH, CACHED = 1000, 992
KNOWN_MEDIA = {"CPU", "STORAGE"}
"""Of those that Dynamo's indexer counts, what lies below the GPU."""


class Nothing(Presence):
    """The presence of an empty tier."""

    def holds(self, key):
        return False

    def forget(self, keys):
        pass


@pytest.mark.parametrize("tier", ["disk", "redis", "object", "folder1"])
def test_events_carry_no_owner_and_media_that_routers_know(tier):
    key = make_offload_key(b"h" * 32, 0)
    manager = TieredOffloadingManager(HostCache(2, LRUPolicy(2)), (Tier(tier, Nothing()),))
    adapter = ManagerAdapter()
    adapter.attach(manager, 2)
    manager.prepare_store([key])
    manager.complete_store([key])
    (transfer,) = manager.take_transfers()
    manager.complete(transfer, (True,))
    manager.reset_cache()
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, False))
    told = list(adapter.take_events())
    # Of what a server evicts nobody hears.
    expected = {event.removal_expected for event in told if event.medium is Medium.STORAGE}
    assert expected == {tier == "disk"}
    events = list(tracker.take_events(told))
    assert {(event.medium, type(event).__name__) for event in events} == {
        ("CPU", "BlockStored"),
        ("STORAGE", "BlockStored"),
        ("CPU", "BlockRemoved"),
    }
    assert {event.medium for event in events} == KNOWN_MEDIA
    assert [event.ownership for event in events] == [None] * 3
    places = {event.medium: event.locality for event in events}
    assert places == {"CPU": "LOCAL", "STORAGE": "LOCAL" if tier == "disk" else "REMOTE"}


@pytest.fixture
def publishing(monkeypatch):
    """Let halves make events that have tokens."""
    make_config = halves._vllm_config

    def with_events(*args):
        config = make_config(*args)
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return config

    monkeypatch.setattr(halves, "_vllm_config", with_events)
    return {"self_describing_kv_events": True, "weights_id": "w"}


def test_after_new_weights_routers_find_no_chunk_of_the_old_ones(models, tmp_path, publishing):
    """vLLM tells nothing of its own then: a router goes on with what it was told of us."""
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "4MiB", "min_free": 0}
    extra = {"cpu_bytes": "4MiB", "blocks_per_chunk": 2, "backends": [disk], **publishing}
    found = set()
    with halves.Halves(models("llama"), ours(extra)) as rig:
        rig.quiet()
        publisher = rig.scheduler.kv_event_publisher
        publisher.publish = lambda batch: note(batch.events)

        def note(events):
            for event in events:
                if isinstance(event, AllBlocksCleared):
                    found.clear()
                    continue
                here = {(event.medium, each) for each in event.block_hashes}
                if isinstance(event, BlockRemoved):
                    found.difference_update(here)
                elif event.medium in KNOWN_MEDIA:
                    assert event.token_ids, "no router finds a chunk without tokens"
                    found.update(here)

        prompt = random.Random(0).choices(range(3, 512), k=20 * halves.BLOCK + 3)

        def ask():
            rig.add(prompt, 2)
            rig.quiet()
            return Counter(medium for medium, _ in found)

        whole = {"CPU": 20, "STORAGE": 20}
        assert ask() == whole
        rig.scheduler.connector.weights_may_have_changed("a call")
        rig.quiet()
        assert not found
        assert rig.scheduler.reset_prefix_cache()
        assert ask() == whole


def test_chunks_that_follow_emptied_host_memory_are_told_with_tokens(models, publishing):
    extra = {"cpu_bytes": "4MiB", "blocks_per_chunk": 2, **publishing}
    told = []
    with halves.Halves(models("llama"), ours(extra)) as rig:
        rig.quiet()
        rig.scheduler.kv_event_publisher.publish = lambda batch: told.extend(batch.events)
        prompt = random.Random(0).choices(range(3, 512), k=20 * halves.BLOCK + 3)
        for _ in range(2):
            told.clear()
            rig.add(prompt, 2)
            rig.quiet()
            tokens = [
                event.token_ids
                for event in told
                if isinstance(event, BlockStored) and event.medium == "CPU"
            ]
            assert tokens
            assert all(tokens), "no router finds a chunk without tokens"
            half = rig.scheduler.connector.connector_scheduler
            assert list(half.operators.clear("cpu")) == [""]
            assert rig.scheduler.reset_prefix_cache()


def test_what_events_tell_of_a_chunk_is_forgotten_with_the_chunk(
    models, tmp_path, monkeypatch, publishing
):
    """vLLM's half waits until host memory gives the chunk up, and here it is on the disk alone."""
    disk = {"type": "disk", "root": str(tmp_path / "kv"), "capacity": "4MiB", "min_free": 0}
    extra = {"cpu_bytes": 0, "staging_bytes": "1MiB", "blocks_per_chunk": 1, "backends": [disk]}
    extra |= publishing
    with halves.Halves(models("llama"), ours(extra)) as rig:
        rig.quiet()
        half = rig.scheduler.connector.connector_scheduler
        described, rng = half._events_tracker._pending_event_metadata, random.Random(0)
        for _ in range(20):
            rig.add(rng.choices(range(3, 512), k=20 * halves.BLOCK + 3), 2)
            rig.quiet()
        assert described
        monkeypatch.setattr(described_chunks, "PATIENCE_S", 0.0)
        until = time.monotonic() + 60
        while len(described) > 128:  # chunks of 32 KiB, of which 400 were stored
            assert time.monotonic() < until, len(described)
            time.sleep(0.1)
            rig.add([3, 4, 5], 1)
            rig.quiet()
        assert described
        emptied = half.operators.clear("disk")
        while (wrong := next(emptied)) is None:
            rig.step()
            time.sleep(0.005)
        rig.quiet()
        assert (wrong, described) == ("", {})


@pytest.fixture(scope="module")
def dynamo():
    """Return the Python of an environment with Dynamo's indexer; skip where it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvoffload-tests"
    folder = cache / f"dynamo-{DYNAMO}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        quietly = {"capture_output": True, "text": True, "check": False}
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], **quietly)
        if not made.returncode:
            wanted = f"ai-dynamo-runtime=={DYNAMO}"
            made = subprocess.run([str(python), "-m", "pip", "install", "-q", wanted], **quietly)
        if made.returncode:
            pytest.skip(f"Dynamo's indexer cannot be had: {(made.stdout + made.stderr)[-300:]}")
        ready.touch()
    return str(python)


class Indexer:
    """Dynamo's indexer in a process of its own."""

    def __init__(self, python, log):
        self.port, self.log = free_port(), log
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [python, "-m", "dynamo.indexer", "--threads", "1", "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        until = time.monotonic() + 60
        while not self._listens():
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.1)

    def subscribe(self, port):
        """Listen to an engine that publishes already."""
        engine = {"instance_id": 1, "model_name": "tiny", "block_size": BLOCK}
        self._post("/register", {**engine, "endpoint": f"tcp://127.0.0.1:{port}"})

    def found(self, prompt):
        """Return how many of a prompt's tokens are found on ``gpu``, ``cpu`` and ``disk``.

        What is found further up counts further down as well.
        """
        answer = self._post("/query", {"token_ids": prompt, "model_name": "tiny"})
        engine = json.loads(answer)["instances"].get("1", {})
        return tuple(engine.get(place, 0) for place in ("gpu", "cpu", "disk"))

    def _listens(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def _post(self, path, asked):
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(asked).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()


@pytest.fixture
def indexer(dynamo, tmp_path):
    running = Indexer(dynamo, tmp_path / "indexer.log")
    yield running
    running.process.kill()
    running.process.wait()


@pytest.mark.timeout(1800)
def test_dynamos_indexer_counts_what_a_disk_tier_has(start, prompts, tmp_path, indexer):
    port = free_port()
    engine = start(
        {
            "cpu_bytes": "5MiB",  # 80 blocks: two prompts and a half
            "backends": [{"type": "disk", "root": str(tmp_path / "kv"), "min_free": 0}],
            "self_describing_kv_events": True,
        },
        max_model_len=2048,
        num_gpu_blocks_override=68,
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
        },
    )
    first, *others = prompts(5, LENGTH)
    indexer.subscribe(port)
    until = time.monotonic() + 60
    heard = False
    while not heard:
        assert time.monotonic() < until, "the indexer hears nothing of the engine"
        probe = prompts(1, BLOCK + 1, seed=time.monotonic_ns())[0]
        engine.generate([probe], 1)
        time.sleep(0.5)
        heard = indexer.found(probe)[0] == BLOCK

    def wait_for(*places):
        until = time.monotonic() + 60
        while (now := indexer.found(first)) != places:
            assert time.monotonic() < until, f"the indexer finds {now} instead of {places}"
            engine.ask("quiet")

    engine.generate([first])
    wait_for(CACHED, CACHED, CACHED)
    for prompt in others:
        engine.generate([prompt])
        engine.ask("quiet")
    wait_for(0, 0, CACHED)
    engine.ask("reset", connector=True)
    wait_for(0, 0, 0)
    engine.kill()
