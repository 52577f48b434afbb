"""Streaming sessions, whose prompts come in segments: what they store is what others compute."""

import pytest

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
