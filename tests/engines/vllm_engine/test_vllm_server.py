"""A real server's log: our lines stand among vLLM's, and a wrong setting ends it at once."""

import re
import time

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from tests.engines.vllm_engine.api_server import Server
from tests.support.redis_server import free_port

pytestmark = pytest.mark.timeout(1800)

OF_VLLM = re.compile(
    r"\((?P<process>\w+) pid=\d+\) (?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] "
)
"""How vLLM begins a line of its log."""
AWAY = "is left alone until it answers again"


def settings(*backends):
    return {"cpu_bytes": "16MiB", "backends": list(backends)}


def unreachable():
    return {"type": "redis", "url": f"redis://127.0.0.1:{free_port()}"}


@pytest.fixture(scope="module")
def serve(models, tmp_path_factory):
    running = []

    def begin(extra, *options, **environment):
        log = tmp_path_factory.mktemp("log") / "server.log"
        running.append(Server(models(), log, extra, *options, **environment))
        return running[-1]

    yield begin
    for server in running:
        server.kill()


@pytest.fixture(scope="module")
def server(serve, tmp_path_factory):
    root = tmp_path_factory.mktemp("store") / "kv"
    disk = {"type": "disk", "root": str(root), "capacity": "64MiB", "min_free": 0}
    server = serve(
        {**settings(disk), "blocks_per_chunk": 1, "client_hints": ["session", "returns"]},
        *("--middleware", "kvoffload.connectors.vllm.agent_requests.AgentRequests"),
        KVOFFLOAD_TRANSLATE="session_headers,prompt_cache_retention",
        VLLM_SERVER_DEV_MODE="1",
    )
    server.wait_ready()
    return server


def lines_with(log, text):
    """Return process and level of each line with a text; every one begins as vLLM's lines do."""
    found = [line for line in log.splitlines() if text in line]
    begins = [OF_VLLM.match(line) for line in found]
    assert all(begins), f"naked: {found}"
    return [(match["process"], match["level"]) for match in begins]


def test_lines_stand_in_a_servers_log_as_vllms_own_do(serve, prompts):
    server = serve(settings(unreachable()))
    server.wait_ready()
    assert lines_with(server.log, "host slots on each of 1 ranks") == [("EngineCore", "INFO")]
    until = time.monotonic() + 120
    while not lines_with(server.log, AWAY):
        assert time.monotonic() < until, server.log[-3000:]
        server.ask(prompts(1, 200, seed=time.monotonic_ns())[0])
    # The I/O process says it once; its worker logs it.
    assert lines_with(server.log, AWAY) == [("Worker", "WARNING")]


def test_where_one_process_has_both_halves_a_stores_state_is_said_once(start, prompts):
    engine = start(settings(unreachable()))
    until = time.monotonic() + 120
    while not lines_with(engine.log, AWAY):
        assert time.monotonic() < until, engine.log[-3000:]
        engine.generate(prompts(2, 200, seed=time.monotonic_ns()))
    engine.generate(prompts(2, 200))
    engine.ask("quiet")
    # The worker tells of itself in the first step, which is the first request's in one process.
    assert lines_with(engine.log, "host slots on each of 1 ranks") == [("MainProcess", "INFO")]
    assert lines_with(engine.log, AWAY) == [("MainProcess", "WARNING")]
    engine.kill()


def test_an_idle_server_shows_all_that_its_last_request_did(server, prompts):
    """It is the first request of this server: figures count from the start."""
    server.ask(prompts(1, 200)[0])
    # Six of the prompt, and that of the self-test.
    wait_for(lambda: server.counted('kvoffload_store_chunks_total{tier="disk"}') == 7)
    assert server.counted('kvoffload_lookups_total{result="miss",tier=""}') == 1
    assert server.counted('kvoffload_resident_bytes{tier="disk"}') > 0
    assert server.counted("kvoffload_saved_prefill_tokens_total") == 0
    loads_before = server.counted('kvoffload_load_chunks_total{tier="cpu"}')
    server.post("/reset_prefix_cache")
    server.ask(prompts(1, 200)[0])
    wait_for(lambda: server.counted("kvoffload_saved_prefill_tokens_total") == 192)
    assert server.counted('kvoffload_hit_tokens_total{tier="cpu"}') == 192
    assert server.counted('kvoffload_load_chunks_total{tier="cpu"}') == loads_before + 6


def test_what_an_agent_says_of_its_session_passes_the_middleware_and_counts(server, prompts):
    first, other, later = prompts(3, 200, seed=1, shared=32)
    agent = {"X-Claude-Code-Session-Id": "a"}
    server.ask(first, agent, prompt_cache_retention="24h")
    wait_for(lambda: server.counted('kvoffload_return_chunks_total{result="told"}') == 6)
    server.ask(other, {"X-Claude-Code-Session-Id": "b"})
    assert server.counted('kvoffload_return_chunks_total{result="kept"}') == 0
    server.ask(later, agent)  # it begins as the first prompt does, and goes on elsewhere
    wait_for(lambda: server.counted('kvoffload_return_chunks_total{result="kept"}') == 6)
    assert server.counted('kvoffload_events_total{event="hints_ignored"}') == 0


def wait_for(is_true, limit_s=10.0):
    """Wait, and send no request meanwhile."""
    until_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_a_misspelt_option_of_a_tier_ends_a_server_before_it_loads_a_model(serve, tmp_path):
    root = tmp_path / "kv"
    server = serve(settings({"type": "disk", "root": str(root), "capacty": "1GiB"}))
    assert server.process.wait(300) != 0
    assert "backends[0].capacty = '***': unknown key; did you mean 'capacity'?" in server.log
    assert "EngineCore" not in server.log
    assert "oading model" not in server.log
    assert not root.exists()
