"""Whatever a store does, every request finishes with the same output, and the engine lives on."""

import time

import pytest

pytestmark = pytest.mark.timeout(900)

LENGTH, CHUNKS = 1000, 31  # whole blocks of 32 tokens in a prompt


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def set_plan(faulty_tier):
    return faulty_tier[2]


@pytest.fixture(scope="module")
def engine(start, root, faulty_tier):
    """Host memory for little more than two prompts, so that most loads come from the store."""
    env, plan, _ = faulty_tier
    extra = {
        "cpu_bytes": 70 * 65536,
        "backends": [{"type": "faulty", "root": str(root), "plan": plan}],
        "load_timeout_s": 1.0,
        "store_timeout_s": 2.0,
    }
    return start(extra, env=env)


@pytest.fixture(scope="module")
def told(engine, prompts):
    """Answers computed before anything was stored, and then stored one after the other."""
    answers = []
    for prompt in prompts(6, LENGTH):
        answers += engine.generate([prompt])["tokens"]
        engine.ask("quiet")
    return answers


def chunk_files(root):
    return sorted(root.glob("*/??/*"))


def served(engine, prompts, told):
    """Ask for everything again, two prompts at a time; return how many tokens were not computed."""
    cached = 0
    engine.ask("reset")
    for i in range(0, 6, 2):
        answer = engine.generate(prompts(6, LENGTH)[i : i + 2], limit_s=120)
        assert answer["tokens"] == told[i : i + 2]
        assert answer["reasons"] == ["length"] * 2
        cached += sum(answer["cached"])
    return cached


def served_again(engine, prompts, told):
    """Twice: with the fault, and when it is known."""
    served(engine, prompts, told)
    served(engine, prompts, told)


def counted(engine, *names):
    metrics = engine.ask("quiet")
    assert metrics["vllm:kvoffload_host_chunks_busy"] == 0
    return sum(metrics.get(f"vllm:kvoffload_worker_events {name}", 0) for name in names)


def test_without_a_fault_the_store_serves(engine, told, prompts, root):
    until = time.monotonic() + 60
    while len(chunk_files(root)) < 6 * CHUNKS and time.monotonic() < until:
        time.sleep(0.1)
    assert served(engine, prompts, told) > 5 * 992


def test_chunk_files_deleted(engine, told, prompts, root):
    for file in chunk_files(root)[::3]:
        file.unlink()
    served_again(engine, prompts, told)
    assert counted(engine, "failed_missing", "recomputed_blocks") > 0


def test_chunk_files_truncated(engine, told, prompts, root):
    for file in chunk_files(root)[::3]:
        with open(file, "r+b") as data:
            data.truncate(file.stat().st_size // 2)
    served_again(engine, prompts, told)


def test_bits_flipped_in_chunk_files(engine, told, prompts, root):
    for file in chunk_files(root)[::3]:
        with open(file, "r+b") as data:
            data.seek(file.stat().st_size // 2)
            byte = data.read(1)
            data.seek(-1, 1)
            data.write(bytes([byte[0] ^ 4]))
    served_again(engine, prompts, told)


def test_chunk_files_swapped(engine, told, prompts, root):
    files = chunk_files(root)
    for one, other in zip(files[0:60:2], files[1:60:2], strict=True):
        spare = one.with_name("spare")
        one.rename(spare)
        other.rename(one)
        spare.rename(other)
    served_again(engine, prompts, told)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"fault": "raise"}, id="raises"),
        pytest.param({"fault": "hang", "verbs": ["read"]}, id="reads hang"),
        pytest.param({"fault": "hang", "verbs": ["write"]}, id="writes hang"),
        pytest.param({"fault": "miss"}, id="finds nothing"),
        pytest.param({"fault": "lie", "verbs": ["write", "contains"]}, id="lies"),
        pytest.param({"fault": "short"}, id="does half"),
        pytest.param({"fault": "delay", "seconds": 0.05}, id="slow"),
    ],
)
def test_a_backend_that(engine, told, prompts, set_plan, plan):
    set_plan(plan)
    try:
        served_again(engine, prompts, told)
    finally:
        set_plan()
    assert counted(engine) == 0


def test_afterwards_everything_serves_again(engine, told, prompts):
    for _ in range(3):
        served(engine, prompts, told)
        engine.ask("quiet")
    assert served(engine, prompts, told) > 5 * 992
