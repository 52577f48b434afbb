"""The example in which two engines share one Redis."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.testing.redis_server import BINARY, MISSING

EXAMPLE = Path(__file__).parents[2] / "examples" / "redis" / "two_engines.py"


@pytest.mark.chaos
@pytest.mark.skipif(BINARY is None, reason=MISSING)
def test_the_second_engine_loads_what_the_first_computed():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "'REDIS': 608" in done.stdout
    assert "same answer: True" in done.stdout
