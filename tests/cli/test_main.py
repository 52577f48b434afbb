"""The command line as a user types it."""

import subprocess
import sys

from kvoffload.cli.main import COMMANDS


def kvoffload(*words):
    return subprocess.run(
        [sys.executable, "-c", "from kvoffload.cli.main import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=60,
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


def test_an_unknown_command_is_wrong_usage():
    result = kvoffload("nothing")
    assert result.returncode == 2
