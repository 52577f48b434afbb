"""A replay takes few bytes a block access, so that large traces fit into memory."""

import json
import tracemalloc

import pytest

from kvoffload.replay.sample import sampled
from kvoffload.replay.study import study
from kvoffload.replay.trace import read_trace

FILES, TURNS, BLOCKS = 10, 70, 5
ACCESSES = FILES * BLOCKS * TURNS * (TURNS + 1) // 2
BYTES_PER_ACCESS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations that grow by some blocks a turn."""
    root = tmp_path_factory.mktemp("conversations")
    for number in range(FILES):
        first = 10_000 * number
        turns = [
            {"t": turn, "hash_ids": list(range(first, first + BLOCKS * turn))}
            for turn in range(1, TURNS + 1)
        ]
        content = {"hash_id_scope": "local" if number % 2 else "global", "requests": turns}
        (root / f"{number}.json").write_text(json.dumps(content))
    return root


def peak_bytes(do):
    tracemalloc.start()
    try:
        result = do()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_reading_and_replaying_a_folder_takes_few_bytes_an_access(folder):
    def run():
        trace = read_trace(folder)
        rows = study(sampled(trace, 0.5), ["lru"], [{"": 200}])
        return trace.accesses, rows

    study(read_trace(folder), ["lru"], [{"": 200}])  # imports and caches are no part of it
    peak, (accesses, rows) = peak_bytes(run)
    assert accesses == ACCESSES
    assert rows[0].hits.prefix > 0
    assert peak <= BYTES_PER_ACCESS * ACCESSES, f"{peak / ACCESSES:.1f} bytes an access"
