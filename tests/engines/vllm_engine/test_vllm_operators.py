"""An operator looks into a running vLLM and empties its tiers, by the command line."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.disk_chunks import stored_in

pytestmark = pytest.mark.timeout(1800)
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
BLOCK = 32


def settings(root, **more):
    disk = {"type": "disk", "root": str(root), "capacity": "1GiB", "min_free": 0}
    return {"cpu_bytes": "16MiB", "backends": [disk], "lookup_timeout_s": 30.0, **more}


class Operator:
    """Runs ``kvoffload cache`` as the user of the engines in this folder."""

    def __init__(self, python, folder):
        main = "from kvoffload.cli.main import main; main()"
        self.command = [*python, "-c", main, "cache"]
        self.env = {**os.environ, "KVOFFLOAD_RUNTIME_DIR": str(folder)}
        folder.mkdir()

    def run(self, *words, **more):
        command = [*self.command, *words]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=120, check=False, **more
        )

    def ask(self, *words, **more):
        done = self.run(*words, "--json", **more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def lookup(self, prompt, *words):
        """Return for each tier the chunks from the start, in each group."""
        found = self.ask("lookup", "--token-ids", "-", *words, input=json.dumps(prompt))
        return {
            name: [group["tiers"][name]["leading"] for group in found["groups"]]
            for name in found["groups"][0]["tiers"]
        }


@pytest.fixture(scope="module")
def operator(imported, tmp_path_factory):
    return Operator(imported.quick, tmp_path_factory.mktemp("operator") / "run")


@pytest.fixture(scope="module")
def engine(start, operator, tmp_path_factory):
    """An engine with a process of its own, that rests while no request runs."""
    env = {**OWN_PROCESS, "KVOFFLOAD_RUNTIME_DIR": operator.env["KVOFFLOAD_RUNTIME_DIR"]}
    engine = start(settings(tmp_path_factory.mktemp("tiers") / "kv"), env=env)
    return engine


def written(engine, operator, prompt, chunks):
    """Wait until a prompt's chunks are on the disk."""
    until = time.monotonic() + 60
    while (found := operator.lookup(prompt))["disk"] != [chunks]:
        assert time.monotonic() < until
    return found


def test_a_prompt_is_found_where_it_is(engine, operator, prompts):
    prompt, other = prompts(2, 200, seed=1)
    engine.generate([prompt], salts=[""])
    assert written(engine, operator, prompt, 6) == {"cpu": [6], "disk": [6]}
    assert operator.lookup(prompt[:100] + other[:100]) == {"cpu": [3], "disk": [3]}
    assert operator.lookup(other) == {"cpu": [0], "disk": [0]}
    assert operator.lookup(prompt, "--salt", "tenant") == {"cpu": [0], "disk": [0]}
    engine.generate([prompt], salts=["tenant"])
    assert operator.lookup(prompt, "--salt", "tenant")["cpu"] == [6]
    (told,) = operator.ask("list")
    assert told["tiers"] == ["cpu", "disk"]
    table = operator.run("lookup", "--token-ids", "-", input=" ".join(map(str, other)))
    assert "chunk 0 is nowhere: never_stored" in table.stdout


def test_a_cleared_engine_computes_again_and_a_restart_finds_what_it_stored_since(
    engine, operator, prompts
):
    prompt = prompts(1, 200, seed=2)[0]
    told = engine.generate([prompt])["tokens"]
    written(engine, operator, prompt, 6)
    assert operator.run("clear").returncode == 2, "a script must say --yes"
    assert operator.ask("clear", "--tier", "disk", "--yes")["cleared"] == ["disk"]
    assert operator.lookup(prompt) == {"cpu": [6], "disk": [0]}
    assert operator.ask("clear", "--yes")["cleared"] == ["cpu", "disk"]
    assert operator.lookup(prompt) == {"cpu": [0], "disk": [0]}
    assert engine.ask("reset"), "GPU memory forgets, too"
    answer = engine.generate([prompt])
    assert [answer["tokens"], answer["cached"]] == [told, [0]]
    assert written(engine, operator, prompt, 6) == {"cpu": [6], "disk": [6]}
    assert operator.ask("clear", "--tier", "cpu")["cleared"] == ["cpu"]
    assert operator.lookup(prompt) == {"cpu": [0], "disk": [6]}
    assert engine.ask("reset")
    answer = engine.generate([prompt])
    assert [answer["tokens"], answer["cached"]] == [told, [192]]


def test_text_is_looked_up_with_the_engines_tokenizer(engine, operator):
    words = [f"w{number % 400 + 10}" for number in range(100)]
    found = operator.ask("lookup", "--text", "-", input=" ".join(words))
    assert found["tokens"] >= 100
    assert found["groups"][0]["chunks"] == found["tokens"] // BLOCK


def test_a_prompt_that_is_too_long_is_refused(engine, operator):
    done = operator.run("lookup", "--token-ids", "-", input="5 " * 5000)
    assert done.returncode == 1
    assert "a prompt of 5000 tokens; the engine takes 4096" in done.stderr


def io_processes(engine):
    """Return the engine's I/O processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if (
                b"kvoffload.io.process" in command
                and os.getpgid(int(folder.name)) == engine.process.pid
            ):
                found.append(int(folder.name))
    return found


def test_a_clear_survives_its_io_process_and_the_engines_death_ends_it(engine, operator, prompts):
    prompt = prompts(1, 200, seed=4)[0]
    engine.generate([prompt])
    written(engine, operator, prompt, 6)
    (stopped,) = io_processes(engine)
    os.kill(stopped, signal.SIGSTOP)
    assert operator.lookup(prompt) == {"cpu": [6], "disk": [6]}, "the engine knows the index"
    # The engine kills a server that is silent, and the next one does what it was told.
    assert operator.ask("clear", "--yes")["cleared"] == ["cpu", "disk"]
    assert operator.lookup(prompt) == {"cpu": [0], "disk": [0]}
    (stopped,) = io_processes(engine)
    os.kill(stopped, signal.SIGSTOP)
    waiting = subprocess.Popen(
        [*operator.command, "clear", "--yes"], env=operator.env, stderr=subprocess.PIPE, text=True
    )
    time.sleep(1)
    assert waiting.poll() is None
    engine.kill()
    assert "cannot be asked" in waiting.communicate(timeout=60)[1]
    assert waiting.returncode == 1
    assert operator.run("list").returncode == 1


def test_all_ranks_are_emptied(start, operator, prompts, tmp_path):
    env = {"KVOFFLOAD_RUNTIME_DIR": operator.env["KVOFFLOAD_RUNTIME_DIR"]}
    engine = start(settings(tmp_path / "kv"), env=env, ranks=2)
    prompt = prompts(1, 200, seed=5)[0]
    told = engine.generate([prompt])["tokens"]
    written(engine, operator, prompt, 6)
    assert len(operator.ask("list")) == 1, "one socket for all processes of an engine"
    assert len(stored_in(tmp_path / "kv")) == 12
    assert operator.ask("clear", "--tier", "disk", "--yes")["cleared"] == ["disk"]
    assert not stored_in(tmp_path / "kv")
    assert operator.lookup(prompt) == {"cpu": [6], "disk": [0]}
    assert engine.ask("reset")
    answer = engine.generate([prompt])
    assert [answer["tokens"], answer["cached"]] == [told, [192]]
