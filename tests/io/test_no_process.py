"""``io: "process"``, the default: programs of any form have it, and a thread where it cannot be."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
print("begun", flush=True)
import hashlib, logging, time, torch
from kvoffload import LocalConnector
from kvoffload.messages import CanonicalKVCacheRef as Ref
from kvoffload.messages import CanonicalKVCaches, CanonicalKVCacheTensor

logging.basicConfig(format="%(levelname)s %(message)s")

class Prompt:
    request_id, num_tokens, kv_transfer_params = "r", 67, None
    block_hashes = [hashlib.sha256(bytes([i])).digest() for i in range(4)]

def serve():
    tensor = torch.arange(8 * 64, dtype=torch.int32).view(torch.int8).reshape(8, 256)
    wanted = tensor[:4].clone()
    caches = CanonicalKVCaches((CanonicalKVCacheTensor(tensor, 256),), ((Ref(0, 256),),))
    disk = {"type": "disk", "root": ROOT, "min_free": 0}
    config = {"cpu_bytes": 0, "staging_bytes": "1MiB", "blocks_per_chunk": 2, "backends": [disk]}
    facts = {"model": "m", "weights": "w", "dtype": "d"}
    connector = LocalConnector(config, caches, block_size=16, facts=facts)
    prompt = Prompt()
    connector.after_forward(prompt, [list(range(4))], 64)
    assert connector.flush()
    connector.request_finished(prompt)
    while (found := connector.get_num_new_matched_tokens(prompt, 0)) is None:
        time.sleep(0.001)
    assert found == 64, found
    connector.update_state_after_alloc(prompt, [[4, 5, 6, 7]], 64)
    assert connector.flush()
    (outcome,) = connector.poll()
    assert outcome.num_loaded_tokens == 64, outcome
    assert torch.equal(tensor[4:], wanted)
    print("served by", connector.stats()["io_server"], flush=True)
    connector.request_finished(prompt)
    connector.close()
"""
IN_A_DAEMONIC_PROCESS = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
child.start()
child.join()
assert child.exitcode == 0
"""


@pytest.fixture
def run(tmp_path, python):
    """Run the program and this end of it; returns its output, and its lines of warnings."""

    def run(end, how="-c"):
        program = PROGRAM.replace("ROOT", repr(str(tmp_path / "kv"))) + end
        words, fed = {
            "-c": ([*python, "-c", program], None),
            "file": ([*python, str(tmp_path / "program.py")], None),
            "stdin": ([sys.executable, "-"], program),
        }[how]
        (tmp_path / "program.py").write_text(program)
        env = {name: value for name, value in os.environ.items() if name != "KVOFFLOAD_SETTING_IO"}
        done = subprocess.run(
            words, input=fed, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        told = done.stdout + done.stderr
        assert done.returncode == 0, told
        assert told.count("begun") == 1, "the program ran twice"
        return told, [line for line in told.splitlines() if line.startswith("WARNING")]

    return run


@pytest.mark.parametrize("how", ["file", "stdin"])  # the tests below have "-c"
def test_a_program_without_a_guard_of_main_has_a_process_and_runs_once(run, how):
    """A notebook's program has no file either."""
    told, warnings = run("serve()", how)
    assert "served by the I/O process" in told
    assert not warnings


@pytest.mark.parametrize(
    "end",
    [
        IN_A_DAEMONIC_PROCESS,
        "import threading; it = threading.Thread(target=serve); it.start(); it.join()",
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); serve()",
    ],
    ids=["daemonic process", "thread", "children are not waited for"],
)
def test_so_has_one_in_an_unusual_place(run, end):
    told, warnings = run(end)
    assert "served by the I/O process" in told
    assert not warnings


EPERM = """
import errno, os
def memfd_create(*_):
    raise OSError(errno.EPERM, "Operation not permitted")
os.memfd_create = memfd_create
serve()"""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (EPERM, "[Errno 1] Operation not permitted"),
        ("import os; del os.memfd_create; serve()", "memory files need Linux"),
        ("import sys; sys.frozen = True; serve()", f"{sys.executable} is a frozen program"),
        ("import sys; sys.executable = ''; serve()", "sys.executable is '', no Python"),
        ("import sys; sys.executable = None; serve()", "sys.executable is None, no Python"),
        ("import sys; sys.executable = '/bin/true'; serve()", "'/bin/true', no Python"),
        ("import sys; sys.executable = '/no/python3'; serve()", "No such file or directory: '/no/"),
        ("import sys; sys.executable = '/etc'; serve()", "'/etc', no Python"),
    ],
    ids=[
        "memory files are forbidden", "none exist", "frozen", "unnamed", "none", "embedded",
        "missing", "a folder",
    ],
)  # fmt: skip
def test_where_none_can_be_started_a_thread_serves_and_one_line_says_why(run, end, why):
    told, warnings = run(end)
    assert "served by the I/O thread" in told
    (line,) = warnings
    assert "no I/O process can be started: " in line
    assert why in line


@pytest.mark.parametrize(
    "does",
    ["exit 3", "echo of a program; exit 0", "exec sleep 0.3"],
    ids=["fails", "ends", "is mute"],
)
def test_a_program_that_has_the_name_of_python_and_says_nothing_is_not_waited_for(
    run, tmp_path, does
):
    other = tmp_path / "python3"
    other.write_text(f"#!/bin/sh\n{does}\n")
    other.chmod(0o755)
    told, (line,) = run(f"import sys; sys.executable = {str(other)!r}; serve()")
    assert "served by the I/O thread" in told
    assert "ended before it said anything" in line
