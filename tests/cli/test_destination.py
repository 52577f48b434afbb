"""``--quiet`` and ``--output``: every command takes them, and no exit code changes."""

import json
import os

import pytest
from disk_commands import files_of, kvoffload, on_terminal, process, two_namespaces

from kvoffload.cli.main import COMMANDS

GROUPS = {"config": ("check", "show", "schema"), "cache": ("list", "lookup", "clear")}


@pytest.fixture
async def root(tmp_path):
    return await two_namespaces(tmp_path / "kv")


@pytest.fixture
def damaged(root):
    """A store with one damaged chunk."""
    file = files_of(root)[0]
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    return root


@pytest.mark.parametrize(
    "words",
    [(name,) for name in COMMANDS if name not in GROUPS]
    + [(name, each) for name, inner in GROUPS.items() for each in inner],
)
def test_every_command_takes_both(words):
    shown = kvoffload(*words, "--help").stdout
    assert "--quiet" in shown
    assert "--output" in shown


def test_a_file_gets_what_would_be_printed(root, tmp_path):
    file = tmp_path / "report"
    printed = kvoffload("inspect", str(root), "--sort", "name")
    done = kvoffload("inspect", str(root), "--sort", "name", "--output", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [line.split()[:5] for line in file.read_text().splitlines()] == [
        line.split()[:5] for line in printed.stdout.splitlines()
    ]


def test_a_fault_is_told_by_the_exit_code_and_in_the_file(damaged, tmp_path):
    quiet = kvoffload("verify", str(damaged), "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (1, "", "")
    file = tmp_path / "report.json"
    words = ("--json", "--quiet", "--output", str(file))
    done = kvoffload("verify", str(damaged), *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(json.loads(file.read_text())["damaged"]) == 1
    # The next command of the same process prints as ever.
    assert "1 damaged" in kvoffload("verify", str(damaged)).stdout


def test_an_error_is_printed_and_an_earlier_file_stays(tmp_path):
    file = tmp_path / "report"
    file.write_text("of yesterday")
    done = kvoffload("inspect", str(tmp_path / "none"), "--quiet", "--output", str(file))
    assert (done.returncode, "does not exist" in done.stderr) == (2, True)
    assert file.read_text() == "of yesterday"


@pytest.mark.parametrize("place", ["", "none/report"])
def test_a_file_that_cannot_be_written_is_named_before_anything_is_done(root, tmp_path, place):
    before = files_of(root)
    words = ("--namespace", "qwen", "--output", str(tmp_path / place))
    done = kvoffload("gc", str(root), *words)
    assert (done.returncode, "must be a file" in done.stderr) == (2, True), done.stderr
    assert files_of(root) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence(root):
    done = process("inspect", str(root), "--output", "/dev/full")
    said = "kvoffload: /dev/full cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_question_is_asked_all_the_same(root):
    before = files_of(root)
    words = ("gc", str(root), "--namespace", "qwen", "--quiet")
    code, shown = on_terminal(*words, answer=b"n\n")
    assert code == 0
    assert "would remove 3 chunks" in shown
    assert files_of(root) == before
