"""``tests/gpu`` runs here too, on a stand-in for ``torch.cuda``, with all its fixtures."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGS = """
import threading

def test_that_hangs():
    threading.Event().wait()

def test_after_it():
    pass
"""

QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


@pytest.fixture
def run(python):
    """Run pytest as ``make test-gpu`` does; returns the finished process."""

    def run(*arguments):
        command = [*python, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", "."]
        return subprocess.run(
            # A fork has plug-ins that pytest would have imported by itself, and warns of them.
            [*command, "-p", "no:cacheprovider", "-q", "--tb=short", *QUIET, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_every_test_for_a_gpu_passes_on_a_stand_in_with_its_own_settings(run):
    """A skip hides a fixture that is missing, and an assertion that correct code fails."""
    done = run("-p", "gpu_on_cpu", "tests/gpu")
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed, 1 deselected in .*", last), done.stdout + done.stderr


def test_a_test_that_hangs_fails_and_the_next_one_runs_also_without_pytest_timeout(run, tmp_path):
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text(HANGS)
    limit = ["-o", "timeout=1", "-p", "no:timeout", "-p", "no:asyncio"]
    done = run(*limit, "-p", "time_limit", str(hangs))
    assert "took longer than 1 s" in done.stdout
    assert re.fullmatch("1 failed, 1 passed in .*", done.stdout.splitlines()[-1]), done.stdout
