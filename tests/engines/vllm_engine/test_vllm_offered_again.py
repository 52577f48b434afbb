"""Chunks that are offered once more: their load failed, or they found no room."""

import random
import time

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from benchmarks.vllm_parts.halves import BLOCK
from kvoffload.messages import make_offload_key
from kvoffload.offload.figures import NO_ROOM
from tests.engines.vllm_engine.test_vllm_uses import FULL, WINDOW, Vllm
from tests.support.disk_chunks import stored_in

CHUNKS = 10
WARNING = "cannot store chunks"


def prompt(seed):
    return random.Random(seed).choices(range(3, 512), k=CHUNKS * BLOCK + 5)


def ask(rig, tokens):
    """Run a prompt to its end; return how many of its chunks were loaded."""
    told = rig.scheduler.connector.connector_scheduler.adapter.manager.figures.hit_tokens
    before = told.total()
    request = rig.add(tokens, 2)
    rig.quiet()
    assert request.is_finished()
    time.sleep(0.3)  # the disk writes, and tells of it
    rig.step()
    return (told.total() - before) // BLOCK


def damage(root, keys):
    """Change a bit of these chunks."""
    found = [chunk for chunk in stored_in(root) if chunk.key in keys]
    assert len(found) == len(set(keys))
    for chunk in found:
        chunk.flip(-1)


def forget(rig):
    """Let all but the tiers forget."""
    rig.quiet()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.quiet()
    rig.step()


@pytest.mark.parametrize("first_damaged", [0, CHUNKS // 2])
def test_a_request_stores_the_chunks_that_it_computed_because_their_load_failed(
    halves, tmp_path, first_damaged
):
    rig = halves(disk=True, fixed_weights=True)
    tokens = prompt(1)
    assert ask(rig, tokens) == 0
    forget(rig)
    assert ask(rig, tokens) == CHUNKS
    forget(rig)
    keys = [make_offload_key(hashed, 0) for hashed in rig.add(tokens, 1).block_hashes]
    rig.quiet()
    forget(rig)
    damage(tmp_path / "kv", keys[first_damaged:])
    assert ask(rig, tokens) == first_damaged
    forget(rig)
    assert ask(rig, tokens) == CHUNKS


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, WINDOW), (WINDOW,)])
def test_a_reset_leaves_nothing_of_the_requests_that_it_met(new_request, kinds):
    engine = Vllm(kinds)
    for i in range(3):
        request = engine.new(new_request("p", 41, request_id=f"r{i}"))
        engine.half.reset_cache()
        engine.end(request)
    assert not engine.half._due._full_at
    assert not engine.half._req_status
    engine.close()


def test_a_request_without_room_is_offered_again_and_logged_in_no_step(halves, caplog):
    rig = halves(cpu_bytes="64KiB")  # two slots
    half = rig.scheduler.connector.connector_scheduler
    manager = half.adapter.manager
    holder = manager.prepare_store([make_offload_key(bytes([i]) * 32, 0) for i in range(2)]).job
    request = rig.add(prompt(1), 40)
    for _ in range(10):
        rig.step()
    assert WARNING not in caplog.text
    assert not half._jobs
    manager.complete(holder, (False, False))  # room at last
    rig.quiet()
    assert request.is_finished()
    assert manager.figures.not_stored[NO_ROOM] > 0
    assert manager.resident == 2
