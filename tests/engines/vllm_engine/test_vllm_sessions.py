"""Streaming sessions, whose prompts come in segments: what they store is what others compute."""

import random
import time

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from vllm import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.vllm_parts import halves as parts
from kvoffload.messages import make_offload_key

pytestmark = pytest.mark.timeout(900)
BLOCK, MADE = 32, 6


@pytest.mark.parametrize("schedules", ["in turn", "asynchronously"])
def test_what_a_session_stored_is_what_a_prompt_of_its_tokens_computes(
    start, prompts, plugin, schedules
):
    env = plugin("truly_async") if schedules == "asynchronously" else {}
    engine = start({"cpu_bytes": "64MiB", "blocks_per_chunk": 1}, max_model_len=2048, env=env)
    assert engine.ask("steps_in_flight") == (2 if env else 1)
    # The second session's segments end where blocks end.
    for seed, lengths in enumerate([(300, 300, 200), (314, 314, 200)]):
        segments = [prompts(1, n, seed=10 * seed + i)[0] for i, n in enumerate(lengths)]
        tokens = engine.ask("session", segments=segments, max_tokens=MADE)
        assert len(tokens) >= sum(lengths) + 2 * (MADE - 1), tokens
        engine.ask("quiet")
        assert engine.ask("reset")
        loaded = engine.generate([tokens], 24)
        assert loaded["cached"][0] >= len(tokens) - 2 * BLOCK, "nothing of it was stored"
        assert engine.ask("reset", connector=True)
        computed = engine.generate([tokens], 24)
        assert computed["cached"] == [0]
        assert loaded["tokens"] == computed["tokens"]
    engine.kill()


def test_a_token_that_a_session_drops_is_in_none_of_its_keys(halves, monkeypatch):
    """The queue lists a preempted session late: when its last token has filled a chunk."""
    monkeypatch.setattr("kvoffload.offload.waiting.LISTED_REQUESTS", 1)
    rig = halves()
    engine, half = rig.scheduler, rig.scheduler.connector.connector_scheduler
    rng = random.Random(1)

    def send(num_tokens):
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        tokens = rng.choices(range(3, 512), k=num_tokens)
        session = Request("s", tokens, params, None, block_hasher=rig._hasher, resumable=True)
        engine.add_request(session)
        return session

    session = send(10 * parts.BLOCK - 3)
    rig.step()
    rig.step()
    last = engine.schedule()
    engine.running.remove(session)
    engine._preempt_request(session, time.monotonic())  # as vLLM does without blocks
    for _ in range(3):  # so many that one waits before the session
        rig.add(rng.choices(range(3, 512), k=7000), 1)
    beside = engine.schedule()
    made = ModelRunnerOutput(["s"], {"s": 0}, sampled_token_ids=[[7]])
    engine.update_from_output(last, made)
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert session.num_tokens == 10 * parts.BLOCK
    monkeypatch.setattr(engine, "schedule", lambda: beside)
    rig.step()
    monkeypatch.undo()
    rig.step()
    send(100)
    if session.num_tokens < 10 * parts.BLOCK:
        pytest.skip("vLLM 0.32 drops all tokens of such a session")
    rig.quiet()
    keys = half._req_status["s"].group_states[0].offload_keys
    assert len(keys) > 10
    hashes = session.block_hashes[: len(keys)]
    assert keys == [make_offload_key(each, 0) for each in hashes]
