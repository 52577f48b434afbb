"""The random model of the whole; a seed that fails is the test's parameter, and in its report.

Each seed has a process of its own: pytest keeps log records, whose tracebacks keep closed stores
and their descriptors.
"""

import subprocess

import pytest

SHORT, LONG = range(3), range(3, 123)


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [
        *((seed, 2.0) for seed in SHORT),
        *(pytest.param(seed, 6.0, marks=pytest.mark.chaos) for seed in LONG),
    ],
)
def test_whatever_goes_wrong_loaded_bytes_are_right_and_everything_adds_up(python, seed, seconds):
    command = [*python, "-m", "tests.support.random_model.model", str(seed), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
