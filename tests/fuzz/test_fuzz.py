"""Parsers under bytes that mean harm: no other error than their own, nothing out of bounds."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import TARGETS

RUN = Path(__file__).with_name("run.py")
SECONDS = int(os.environ.get("KVOFFLOAD_FUZZ_S", "20"))
"""Of coverage-guided fuzzing for each parser."""
BY_NAME = {target.__name__: target for target in TARGETS}


@st.composite
def damaged(draw, seed):
    """A good input with a part of it replaced, repeated or cut off."""
    start = draw(st.integers(0, len(seed)))
    stop = draw(st.integers(start, len(seed)))
    middle = draw(st.binary(max_size=20) | st.just(seed[start:stop] * 2))
    return seed[:start] + middle + seed[stop:]


@pytest.mark.parametrize("name", BY_NAME)
def test_any_bytes_are_an_error_or_wellformed(name):
    target = BY_NAME[name]
    seeds = TARGETS[target]
    for seed in seeds:
        target(seed)

    @settings(max_examples=150, database=None)
    @given(st.binary(max_size=300) | st.sampled_from(seeds).flatmap(damaged))
    def attack(data):
        target(data)

    attack()


@pytest.mark.chaos
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="needs atheris (pip install atheris: Linux, x86_64)",
)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_fuzzer_that_sees_branches_finds_nothing(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(RUN), name, str(SECONDS), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
