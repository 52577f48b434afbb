"""The real trace, where it is at hand."""

from pathlib import Path

import pytest

from kvoffload.replay.trace import read_trace

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


@pytest.fixture(scope="session")
def conversation():
    if not TRACE.exists():
        pytest.skip("the conversation trace is not on this machine")
    return read_trace(TRACE)
