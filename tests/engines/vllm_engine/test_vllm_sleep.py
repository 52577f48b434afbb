"""An engine that sleeps and wakes up many times: nothing leaks, and statistics go on."""

import pytest

pytestmark = pytest.mark.timeout(1800)


def settings(root, **more):
    disk = {"type": "disk", "root": str(root), "capacity": "1GiB", "min_free": 0}
    return {"cpu_bytes": "16MiB", "backends": [disk], "lookup_timeout_s": 30.0, **more}


def test_twenty_sleeps_leave_threads_descriptors_and_statistics_alone(start, prompts, tmp_path):
    engine = start(settings(tmp_path / "kv"))
    wanted = prompts(2, 200)
    told = engine.generate(wanted)["tokens"]
    before = None
    for i in range(20):
        assert engine.ask("sleep", level=1 + i % 2) is None
        # Every cache is empty: the weights may be others.
        answer = engine.generate(wanted)
        assert [answer["tokens"], answer["cached"]] == [told, [0, 0]]
        before = engine.held() if i == 2 else before
    threads, descriptors = engine.held()
    engine.ask("quiet")
    assert engine.ask("reset")
    answer = engine.generate(wanted)
    assert [answer["tokens"], answer["cached"]] == [told, [192, 192]]
    assert engine.ask("counted")["vllm:kv_offload_load_bytes"] > 0
    # A pool of threads may still have been growing; a leak would be of one or more a sleep.
    assert threads <= before[0] + 4
    assert descriptors <= before[1] + 8
    engine.kill()


def test_tiers_keep_what_they_hold_while_the_weights_are_known_to_stay(start, prompts, tmp_path):
    engine = start(settings(tmp_path / "kv", fixed_weights=True))
    wanted = prompts(2, 200)
    told = engine.generate(wanted)["tokens"]
    engine.ask("quiet")
    for _ in range(2):
        assert engine.ask("sleep", level=1) is None
        assert engine.ask("quiet")["vllm:kvoffload_host_chunks"] == 0
        answer = engine.generate(wanted)
        assert [answer["tokens"], answer["cached"]] == [told, [192, 192]]
        engine.ask("quiet")
    engine.kill()
