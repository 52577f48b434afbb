"""What requests ask for in ``kv_transfer_params``, and what they are told of their chunks."""

import pytest

from kvoffload.config import KNOWN_HINTS
from kvoffload.replay.trace import read_trace
from tests.support.disk_chunks import stored_in

pytestmark = pytest.mark.timeout(900)
CHUNKS = 31  # of a prompt of 1,000 tokens, 32 tokens each


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def begin(start, root):
    disk = {"type": "disk", "root": str(root), "capacity": "1GiB", "min_free": 0}
    record = str(root.parent / "requests.jsonl")
    extra = {
        "cpu_bytes": "256MiB",
        "backends": [disk],
        "record": record,
        "lookup_timeout_s": 30.0,  # until the folder is listed, however long it takes
    }
    return lambda: start({**extra, "client_hints": KNOWN_HINTS})


@pytest.fixture(scope="module")
def engine(begin):
    return begin()


def forget_gpu(engine):
    engine.ask("quiet")
    assert engine.ask("reset")


def told(answer):
    (params,) = answer["told"]
    (chunks,) = params["kvoffload"]["chunks"]  # one KV cache group
    return chunks


def test_a_request_learns_where_its_chunks_were(engine, prompts):
    new = prompts(1, 1000)
    assert told(engine.generate(new, hints={"explain": True})) == ["never_stored"] * CHUNKS
    forget_gpu(engine)
    assert told(engine.generate(new, hints={"explain": True})) == ["CPU"] * CHUNKS
    assert engine.generate(new)["told"] == [None]


def test_what_requests_ask_for_is_recorded(engine, root, prompts):
    file = root.parent / "requests.jsonl"
    before = len(read_trace(file).requests)
    new = prompts(2, 1000, seed=4)
    engine.generate([*new, new[0]])
    trace = read_trace(file)
    assert trace.block_tokens == 992 // CHUNKS
    one, other, again = trace.requests[before:]
    assert [len(one), one] == [CHUNKS, again]
    assert not set(one) & set(other)


def test_what_a_request_does_not_want_stored_is_not(engine, root, prompts):
    new = prompts(1, 1000, seed=2)
    forget_gpu(engine)
    before = len(stored_in(root))
    engine.generate(new, hints={"offload": False})
    forget_gpu(engine)
    again = engine.generate(new, hints={"explain": True, "tiers": []})
    assert again["cached"] == [0]
    assert told(again) == ["not_wanted"] * CHUNKS
    # This time it was stored, in host memory alone.
    forget_gpu(engine)
    assert engine.generate(new)["cached"] == [992]
    assert len(stored_in(root)) == before


def test_a_request_learns_what_failed_on_its_way(engine, begin, root, prompts):
    new = prompts(1, 1000, seed=3)
    before = {chunk.key for chunk in stored_in(root)}
    right = engine.generate(new)["tokens"]
    forget_gpu(engine)
    engine.kill()
    added = [chunk for chunk in stored_in(root) if chunk.key not in before]
    assert len(added) == CHUNKS
    again = begin()
    for chunk in added:
        chunk.flip(-1)
    answer = again.generate(new, hints={"explain": True})
    assert answer["tokens"] == right
    assert answer["cached"] == [0]
    assert told(answer) == ["corrupt"] * CHUNKS
    again.kill()


def test_a_limit_that_ends_before_a_state_within_a_block_ends_no_engine(start, prompts):
    """With hits within blocks, vLLM hands over the state before a prompt's last tokens."""
    engine = start({"cpu_bytes": "64MiB"}, kind="conv", prefix_match_unit=16, max_num_seqs=1)
    wanted = prompts(1, 310)
    told = engine.generate(wanted, wishes={"max_offload_tokens": 64})["tokens"]
    forget_gpu(engine)
    for cached in (0, 304):  # the first of these stores all
        again = engine.generate(wanted)
        assert (again["tokens"], again["cached"]) == (told, [cached])
        forget_gpu(engine)
    engine.kill()
