"""The command line as a user types it."""

import itertools
import os
import subprocess
import sys

import disk_commands
import pytest
from disk_commands import PROGRAM, kvoffload, on_terminal

import kvoffload as package
from kvoffload.cli.main import COMMANDS

SETTINGS = '{"cpu_bytes": "1GiB"}'


def process(*words, stdout=subprocess.PIPE, **env):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        env={**os.environ, **env},
    )


def test_help_lists_every_command_with_one_line():
    result = kvoffload("--help")
    assert result.returncode == 0
    for name in COMMANDS:
        assert name in result.stdout


def test_every_command_explains_itself_and_its_exit_codes():
    for name in COMMANDS:
        result = kvoffload(name, "--help")
        assert result.returncode == 0, result.stderr
        assert "xit code" in result.stdout, f"{name} --help does not say its exit codes"


@pytest.mark.parametrize("words", [("gc",), ("size",), ("config", "check")])
def test_help_breaks_lines_at_the_edge_of_the_terminal_alone(words):
    shown = kvoffload(*words, "--help", COLUMNS="80").stdout
    prose = shown.partition("Usage:")[2].partition("╭")[0].splitlines()[1:]
    for line, following in itertools.pairwise(line.strip() for line in prose):
        if line and following:
            assert len(f" {line} {following.split()[0]}") >= 80, line


def test_help_cuts_nothing_in_a_terminal_of_80_columns():
    for name in COMMANDS:
        shown = kvoffload(name, "--help", COLUMNS="80").stdout
        assert "\u2026" not in shown, shown


def test_the_command_alone_shows_the_help():
    alone = kvoffload()
    assert alone.returncode == 0
    assert alone.stdout.split() == kvoffload("--help").stdout.split()


def test_an_unknown_command_is_wrong_usage():
    result = kvoffload("nothing")
    assert result.returncode == 2


def test_a_command_that_needs_torch_says_so_where_there_is_none(tmp_path):
    """The guide for operators installs without it."""
    program = f"import sys; sys.modules['torch'] = None; {PROGRAM}"
    words = [sys.executable, "-c", program, "demo", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert done.stderr.strip() == "kvoffload: this command needs torch: pip install torch"


def test_the_version_is_said():
    result = kvoffload("--version")
    assert (result.returncode, result.stdout) == (0, f"kvoffload {package.__version__}\n")


@pytest.mark.parametrize("words", [(), ("bench",)])
def test_help_has_a_short_form(words):
    assert kvoffload(*words, "-h").stdout == kvoffload(*words, "--help").stdout != ""


@pytest.mark.parametrize(
    ("typed", "completed"), [("kvoffload rep", "replay"), ("kvoffload replay --pol", "--policies")]
)
def test_a_shell_completes_commands_and_their_options(typed, completed):
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    result = disk_commands.process(_KVOFFLOAD_COMPLETE="complete_bash", **asked)
    assert completed in result.stdout.split(), result


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_behind_the_output_is_one_sentence(tmp_path, options):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n')
    with open("/dev/full", "w") as full:
        result = process("replay", str(trace), "--sizes", "1", *options, stdout=full)
    sentence = "kvoffload: the output cannot be written: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, sentence)


@pytest.mark.parametrize(
    "words",
    [
        ("--version",),
        ("--help",),
        ("config", "schema"),
        ("replay", "--synthetic", "agent:requests=9", "--sizes", "9"),
        ("config", "show", SETTINGS),
    ],
)
def test_a_closed_pipe_ends_a_command_silently_as_a_signal_would(words):
    """With pipefail, 1 would say that the command has found something wrong."""
    reading, writing = os.pipe()
    os.close(reading)
    result = process(*words, stdout=writing)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("words", [("--help",), ("size", "--help"), ("config", "show", SETTINGS)])
def test_no_colour_is_no_escape_code_at_all(words):
    _, shown = on_terminal(*words, TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b" not in shown
    assert "\x1b" in on_terminal(*words, TERM="xterm-256color")[1]


@pytest.mark.parametrize("option", ["--text", "--token-ids"])
def test_a_prompt_that_is_not_there_is_named_once(tmp_path, option):
    result = kvoffload("cache", "lookup", option, str(tmp_path / "gone"))
    assert (result.returncode, result.stderr.count(str(tmp_path / "gone"))) == (2, 1)


def test_a_file_name_cannot_control_the_terminal(tmp_path):
    trace = tmp_path / "\x1b[31mred\n.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n')
    result = kvoffload("replay", str(trace), "--sizes", "1")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert r"\x1b[31mred\x0a.jsonl: 1 requests" in result.stdout


@pytest.mark.parametrize(
    ("given", "is_ascii"),
    [
        ({"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, True),
        ({"LANG": "POSIX"}, True),
        ({"LANG": "C.UTF-8"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.utf8"}, False),
        ({"LANG": "C", "PYTHONUTF8": "1"}, False),
        ({}, False),
    ],
)
def test_a_terminal_of_the_c_locale_gets_ascii_though_python_writes_utf_8(
    monkeypatch, given, is_ascii
):
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONUTF8", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)
    words = ["replay", "--synthetic", "agent:requests=9", "--sizes", "9"]
    result = process(*(["--help"] if len(given) == 1 else words), **given)
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii() is is_ascii, result.stdout


def test_a_terminal_that_is_not_utf_8_ends_no_command(tmp_path):
    trace = tmp_path / "é.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n')
    result = process("replay", str(trace), "--sizes", "1", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\\xe9.jsonl: 1 requests" in result.stdout
