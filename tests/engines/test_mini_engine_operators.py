"""An operator looks into a running engine and empties it, by the command line."""

import json
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from disk_commands import kvoffload, process

from kvoffload.backends.redis import admin
from kvoffload.demo import Engine, SamplingParams
from kvoffload.io import remote_tier
from tests.support.manager_check import check
from tests.support.planned_store import Process

BLOCK, CHUNKS = 4, 10
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))


class Running:
    """An engine on a thread of its own, which steps as long as it lives."""

    def __init__(self, settings):
        self.engine = Engine(settings)
        self._orders = queue.SimpleQueue()
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop:
            try:
                work, answer = self._orders.get_nowait()
            except queue.Empty:
                self.engine.step()
                self.engine.connector.poll()
                time.sleep(0.0005)
            else:
                answer.put(work())

    def begin(self, work):
        self._orders.put((work, answer := queue.SimpleQueue()))
        return answer

    def generate(self, *prompts):
        """Serve prompts that GPU memory has forgotten; return tokens, and where KV came from."""

        def serve():
            assert self.engine.manager.reset_prefix_cache()
            return self.engine.generate(prompts, GREEDY)

        found = self.begin(serve).get(timeout=60)
        return [
            (each.token_ids, {n for n, count in each.cached_tokens.items() if count})
            for each in found
        ]

    def close(self):
        self._stop = True
        self._thread.join()
        self.engine.close()


@pytest.fixture
def run(tiny, planned, tmp_path, closing):
    """Start engines over host memory and a planned store on a disk."""

    def run(max_num_seqs=16, **more):
        tier = {"type": "planned", **planned.options, "root": str(tmp_path / "kv")}
        offload = {"cpu_bytes": "1MiB", "blocks_per_chunk": 1, "backends": [tier], "io": "thread"}
        settings = {
            "model": tiny,
            "block_size": BLOCK,
            "kv_cache_bytes": 1 << 20,
            "max_model_len": 96,
            "max_num_seqs": max_num_seqs,
            "offload": offload | more,
        }
        return closing(Running(settings))

    return run


PROMPT = list(range(1, 1 + BLOCK * CHUNKS))


@pytest.fixture
def lookup(tmp_path):
    file = tmp_path / "prompt.json"

    def lookup(prompt=PROMPT, *words):
        file.write_text(json.dumps(prompt))
        done = kvoffload("cache", "lookup", "--token-ids", str(file), "--json", *words)
        assert done.returncode == 0, done.stderr
        (group,) = json.loads(done.stdout)["groups"]
        return {name: held["leading"] for name, held in group["tiers"].items()}

    return lookup


def clear(*words):
    done = kvoffload("cache", "clear", "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["cleared"]


def test_a_prompt_is_found_and_every_tier_can_be_emptied(run, lookup, until):
    engine = run()
    ((told, _),) = engine.generate(PROMPT)
    until(lambda: lookup() == {"cpu": CHUNKS, "planned": CHUNKS})
    assert lookup([*PROMPT[:17], *PROMPT]) == {"cpu": 4, "planned": 4}
    assert lookup(PROMPT, "--salt", "other") == {"cpu": 0, "planned": 0}
    assert clear("--tier", "planned", "--yes") == ["planned"]
    assert lookup() == {"cpu": CHUNKS, "planned": 0}
    assert clear("--yes") == ["cpu", "planned"]
    assert lookup() == {"cpu": 0, "planned": 0}
    assert engine.generate(PROMPT) == [(told, set())]
    until(lambda: lookup() == {"cpu": CHUNKS, "planned": CHUNKS})
    assert clear("--tier", "cpu") == ["cpu"]
    assert lookup() == {"cpu": 0, "planned": CHUNKS}
    assert engine.generate(PROMPT) == [(told, {"PLANNED"})]


def test_clears_beside_a_queue_change_no_output_and_leave_nothing(run, lookup, until):
    engine = run(max_num_seqs=1, cpu_bytes="64KiB", waiting_share=0.5)
    connector = engine.engine.connector
    prompts = [[i, *PROMPT[1:]] for i in range(1, 9)]
    told = [answer for answer, _ in engine.generate(*prompts)]

    def serve():
        found = []
        for _ in range(8):
            assert engine.engine.manager.reset_prefix_cache()
            found += engine.engine.generate(prompts, GREEDY)
        return [each.token_ids for each in found]

    def kept():
        return connector.stats()["queue_kept_bytes"]

    in_time, answer = 0, engine.begin(serve)
    for words in (("--tier", "planned"), ("--tier", "cpu"), ()) * 2:
        until(lambda: kept() or not answer.empty())
        in_time += bool(kept())
        clear(*words, "--yes")
    assert answer.get(timeout=60) == told * 8
    assert in_time, "no clear came while a request kept chunks"
    engine.begin(lambda: connector.flush() or check(connector)).get(timeout=60)
    until(lambda: not connector.stats()["host_chunks_busy"])
    assert kept() == 0
    assert clear("--yes") == ["cpu", "planned"]
    assert lookup() == {"cpu": 0, "planned": 0}


def test_another_engine_of_the_namespace_finds_what_is_stored_after_a_clear(run, lookup, until):
    first = run()
    first.generate(PROMPT)
    until(lambda: lookup()["planned"] == CHUNKS)
    clear("--yes")
    first.generate(PROMPT)
    until(lambda: lookup()["planned"] == CHUNKS)
    first.close()
    run()
    until(lambda: lookup() == {"cpu": 0, "planned": CHUNKS})


def test_outputs_stay_right_while_tiers_are_emptied(run):
    engine = run(cpu_bytes="64KiB")
    prompts = [[seed, *PROMPT] for seed in range(20)]
    told = [tokens for tokens, _ in engine.generate(*prompts)]
    done, cleared = threading.Event(), []

    def empty_again_and_again():
        words = ["--yes"], ["--yes", "--tier", "planned"], ["--yes", "--tier", "cpu"]
        while not done.is_set():
            for each in words:
                cleared.append(clear(*each))

    emptying = threading.Thread(target=empty_again_and_again)
    emptying.start()
    try:
        for _ in range(6):
            assert [tokens for tokens, _ in engine.generate(*prompts)] == told
    finally:
        done.set()
        emptying.join()
    assert len(cleared) > 2
    engine.begin(lambda: check(engine.engine.connector)).get(timeout=60)


def test_two_clears_at_once_are_both_done(run, lookup, until):
    engine = run()
    engine.generate(PROMPT)
    until(lambda: lookup()["planned"] == CHUNKS)
    words = ("cache", "clear", "--yes")
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(process, *words) for _ in range(2)]
        assert [each.result().returncode for each in found] == [0, 0]
    assert lookup() == {"cpu": 0, "planned": 0}


def test_what_a_tier_cannot_remove_is_said(run, planned, lookup, until):
    engine = run()
    engine.generate(PROMPT)
    until(lambda: lookup()["planned"] == CHUNKS)
    planned.set(process=Process("failed_purge"))
    done = kvoffload("cache", "clear", "--yes")
    assert done.returncode == 1
    assert "planned: nobody is there" in done.stderr


def test_a_script_must_say_yes_unless_only_host_memory_is_emptied(run):
    run()
    done = kvoffload("cache", "clear")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert clear("--tier", "cpu") == ["cpu"]
    wrong = kvoffload("cache", "clear", "--tier", "disc", "--yes")
    assert (wrong.returncode, "the engine has cpu, planned" in wrong.stderr) == (2, True)


def test_with_several_engines_one_must_be_named(run):
    run()
    run()
    listed = json.loads(kvoffload("cache", "list", "--json").stdout)
    names = [each["engine"] for each in listed]
    assert len(set(names)) == 2
    wrong = kvoffload("cache", "clear", "--tier", "cpu")
    assert wrong.returncode == 2
    assert all(name in wrong.stderr for name in names)
    assert clear("--tier", "cpu", "--engine", names[1]) == ["cpu"]


def test_an_engine_without_the_socket_cannot_be_asked(run, tmp_path):
    run(control_socket=False)
    done = kvoffload("cache", "list")
    assert done.returncode == 1
    assert str(tmp_path / "run" / "kvoffload") in done.stderr
    assert not (tmp_path / "run" / "kvoffload").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [("1 2 x", "'x'"), ("[-1]", "'-1'"), ("", "''"), ("[1, 2.5]", "'2.5'")],
)
def test_what_are_no_token_ids_is_said(run, tmp_path, text, reason):
    (tmp_path / "prompt").write_text(text)
    done = kvoffload("cache", "lookup", "--token-ids", str(tmp_path / "prompt"))
    assert (done.returncode, reason in done.stderr) == (2, True)


def test_the_table_says_where_the_first_missing_chunk_is(run, lookup, until, tmp_path):
    engine = run()
    engine.generate(PROMPT)
    until(lambda: lookup()["cpu"] == CHUNKS)  # a store may still be on its way
    (tmp_path / "prompt").write_text(" ".join(map(str, [*PROMPT[:8], *PROMPT[:8]])))
    shown = kvoffload("cache", "lookup", "--token-ids", str(tmp_path / "prompt")).stdout
    assert "16 tokens" in shown
    assert "chunk 2 is nowhere: never_stored" in shown


def test_a_server_that_hangs_keeps_no_operator_waiting(run, lookup, until, monkeypatch, own_redis):
    monkeypatch.setattr(remote_tier, "ANSWER_S", 0.5)
    monkeypatch.setattr(admin, "PATIENCE_S", 1.0)
    tier = {"type": "redis", "url": own_redis.url}
    engine = run(backends=[tier], lookup_timeout_s=0.25)
    engine.generate(PROMPT)
    until(lambda: lookup() == {"cpu": CHUNKS, "redis": CHUNKS})
    own_redis.pause()
    begun_s = time.monotonic()
    while (
        time.monotonic() < begun_s + 2 * remote_tier.ANSWER_S
    ):  # until no answer of before is believed
        assert lookup()["cpu"] == CHUNKS
    done = kvoffload("cache", "clear", "--tier", "redis", "--yes")
    assert done.returncode == 1, done.stdout
    assert time.monotonic() - begun_s < 30
    own_redis.resume()
    until(lambda: lookup() == {"cpu": CHUNKS, "redis": CHUNKS})
    assert clear("--tier", "redis", "--yes") == ["redis"]
    assert lookup() == {"cpu": CHUNKS, "redis": 0}
