"""Traces of three kinds are read, and what is wrong with one is named."""

import json
import os

import pytest

from kvoffload.errors import ConfigError
from kvoffload.offload.base import make_offload_key
from kvoffload.recording import RequestLog
from kvoffload.replay.trace import TraceError, read_trace


def written(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def request(*ids, **fields):
    return json.dumps({"timestamp": 0, "input_length": 1, "hash_ids": ids} | fields)


def test_a_request_trace_keeps_order_and_equality_of_blocks(tmp_path):
    trace = read_trace(written(tmp_path / "t.jsonl", request(1, 2), "", request(1, 3, 3)))
    (a, b), (c, d, e) = trace.requests
    assert (a, d) == (c, e)
    assert len({a, b, d}) == 3 == trace.distinct
    assert trace.accesses == 5


def test_requests_come_in_the_order_of_their_times(tmp_path):
    lines = [request(1, timestamp=20), request(1, 2, timestamp=10), request(3, 4, 5, timestamp=10)]
    trace = read_trace(written(tmp_path / "t.jsonl", *lines))
    assert [len(keys) for keys in trace.requests] == [2, 3, 1]


def test_a_request_without_a_time_stays_behind_the_one_before_it(tmp_path):
    timeless = '{"hash_ids": [1, 2]}'
    lines = [timeless, request(1, timestamp=20), timeless, request(3, 4, 5, timestamp=30)]
    trace = read_trace(written(tmp_path / "t.jsonl", *lines))
    assert [len(keys) for keys in trace.requests] == [2, 1, 2, 3]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"hash_ids": [1,', "JSON"),
        ('{"timestamp": 3}', "hash_ids"),
        ('{"hash_ids": "1 2"}', "hash_ids"),
        ('{"hash_ids": [1, 2.5]}', "hash_ids[1]"),
        ('{"hash_ids": [1, -2]}', "hash_ids[1]"),
        ('{"hash_ids": [1], "timestamp": -1}', "timestamp"),
        ("[1, 2]", "line"),
        ('{"hash_ids": [1], "timestamp": 1e999}', "timestamp"),
        ('{"hash_ids": [1], "x": 1e999, "timestamp": -1}', "timestamp"),
        ('{"hash_ids": [1], "x": ' + "[" * 100_000, "JSON"),
        ('{"hash_ids": ' + "[" * 100_000, "hash_ids[0]"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_field(tmp_path, line, field):
    path = written(tmp_path / "bad.jsonl", request(1), line, request(2))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: {field} = ")


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(request(1).encode() + b'\n{"hash_ids": ["\xff"]}\n')
    with pytest.raises(TraceError, match=r"bad.jsonl:2: column 16 .*UTF-8"):
        read_trace(path)


@pytest.mark.parametrize("content", ["", "\n\n", request()])
def test_a_trace_without_accesses_is_an_error(tmp_path, content):
    path = written(tmp_path / "empty.jsonl", content)
    with pytest.raises(TraceError, match=r"^trace = '.*empty.jsonl': has no block accesses"):
        read_trace(path)


def test_a_missing_trace_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_a_folder_of_conversations_is_merged_by_time(tmp_path):
    first = {"requests": [{"t": 0, "hash_ids": [1]}, {"t": 20, "hash_ids": [1, 2]}]}
    second = [{"timestamp": 10, "hash_ids": [1, 9]}]
    written(tmp_path / "a.json", json.dumps(first, indent=2))
    written(tmp_path / "b.json", json.dumps(second))
    trace = read_trace(tmp_path)
    assert [len(keys) for keys in trace.requests] == [1, 2, 2]
    assert trace.requests[0][0] == trace.requests[1][0] == trace.requests[2][0]
    assert trace.requests[1][1] != trace.requests[2][1]


def test_conversations_with_local_ids_share_nothing(tmp_path):
    for name in ("a", "b"):
        written(
            tmp_path / f"{name}.json",
            json.dumps({"hash_id_scope": "local", "turns": [{"hash_ids": [1, 2]}]}),
        )
    assert read_trace(tmp_path).distinct == 4


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ('{"requests": [\n{"hash_ids": [1]},\n{"hash_ids": [1}\n]}', "bad.json:3: JSON"),
        ('{"requests": [{"hash_ids": [1]}, {"hash_ids": [1, -1]}]}', "requests[1].hash_ids[1]"),
        ('{"requests": [{"t": "noon", "hash_ids": [1]}]}', "bad.json: $.requests[0].t = 'noon'"),
        ('{"requests": 7}', "bad.json: $.requests = 7"),
        ("7", "bad.json: $ = 7"),
        ('[{"timestamp": -1, "hash_ids": [1]}]', "bad.json: $[0].timestamp = -1"),
        ('[{"hash_ids": 5}]', "bad.json: $[0].hash_ids = 5"),
        ('[{"hash_ids": {"a": 1}}]', "bad.json: $[0].hash_ids = {'a': 1}"),
        ('[{"hash_ids": [1, [2]]}]', "bad.json: $[0].hash_ids[1] = "),
        ('[\n{"timestamp": 1e999}]', "bad.json:2: JSON"),
        ("[" * 100_000, "bad.json: JSON"),
        ("[" * 900 + "7" + "]" * 900, "bad.json: "),
    ],
)
def test_a_bad_conversation_names_its_file_and_field(tmp_path, content, where):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path)
    assert where in str(caught.value)
    assert str(tmp_path / "bad.json") in str(caught.value)


def test_an_error_shows_the_beginning_of_a_long_value(tmp_path):
    (tmp_path / "bad.json").write_text(json.dumps([{"hash_ids": [*range(10_000), -1]}]))
    with pytest.raises(TraceError, match=r"\$\[0\].hash_ids\[10000\] = '\[0, 1, 2,") as caught:
        read_trace(tmp_path)
    assert len(str(caught.value)) < 500


def test_recorded_requests_are_a_trace(tmp_path):
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(4)]
    path = tmp_path / "recorded.jsonl"
    log = RequestLog(str(path), tokens_per_chunk=16)
    log.asked_for(keys[:2])
    with path.open("a") as file:  # as version 0.1 did
        file.write('{"keys": ["00"], "medium": "CPU", "removed": false, "reason": "stored"}\n')
    log.asked_for(keys[:3])
    first, second = read_trace(path).requests
    assert (len(first), len(second)) == (2, 3)
    assert first == second[:2]


def test_a_bad_record_names_its_line(tmp_path):
    path = written(tmp_path / "events.jsonl", '{"keys": ["00"]}', '{"keys": [3]}')
    with pytest.raises(TraceError, match=r"events.jsonl:2: keys\[0\]"):
        read_trace(path)


def recorded(path, *tokens_per_chunk):
    for tokens in tokens_per_chunk:
        RequestLog(str(path), tokens).asked_for([make_offload_key(bytes(32), 0)])
    return path


def test_a_recorded_trace_says_its_tokens_a_block(tmp_path):
    assert read_trace(recorded(tmp_path / "events.jsonl", 32, 32)).block_tokens == 32


def test_a_trace_that_does_not_say_its_tokens_a_block_has_none(tmp_path):
    old = '{"keys": ["00"], "reason": "used"}'
    assert read_trace(written(tmp_path / "old.jsonl", old)).block_tokens is None
    assert read_trace(written(tmp_path / "requests.jsonl", request(1))).block_tokens is None
    mixed = recorded(tmp_path / "mixed.jsonl", 32)
    mixed.write_text(mixed.read_text() + old)
    assert read_trace(mixed).block_tokens is None


def test_engines_with_different_chunks_cannot_share_a_record(tmp_path):
    path = recorded(tmp_path / "events.jsonl", 32, 16)
    with pytest.raises(TraceError, match=r"events.jsonl:2: tokens_per_chunk = 16: .*32"):
        read_trace(path)


def test_conversations_say_their_tokens_a_block(tmp_path):
    for name, tokens in (("a", 64), ("b", 64)):
        content = {"block_size": tokens, "requests": [{"hash_ids": [1]}]}
        written(tmp_path / f"{name}.json", json.dumps(content))
    assert read_trace(tmp_path).block_tokens == 64
    written(tmp_path / "c.json", json.dumps({"block_size": 16, "requests": [{"hash_ids": [1]}]}))
    with pytest.raises(TraceError, match=r"c.json: \$.block_size = 16: .*64"):
        read_trace(tmp_path)
    written(tmp_path / "c.json", json.dumps({"block_size": 0, "requests": [{"hash_ids": [1]}]}))
    with pytest.raises(TraceError, match=r"c.json: \$.block_size = 0: "):
        read_trace(tmp_path)
    written(tmp_path / "c.json", json.dumps([{"hash_ids": [1]}]))
    assert read_trace(tmp_path).block_tokens is None


def test_a_recorded_trace_is_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        RequestLog(str(tmp_path / "trace"), 16)
    finally:
        os.umask(before)
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600


def test_a_record_that_all_may_read_is_for_its_owner_alone_from_then_on(tmp_path):
    path = tmp_path / "trace"
    path.touch(mode=0o666)
    path.chmod(0o666)
    RequestLog(str(path), 16)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_record_that_is_a_link_or_a_pipe_or_another_users_is_refused(tmp_path):
    path, target = tmp_path / "trace", tmp_path / "target"
    target.write_text("kept")
    path.symlink_to(target)
    with pytest.raises(ConfigError, match=r"record = .*must be a file to append to"):
        RequestLog(str(path), 16)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="record"):
        RequestLog(str(path), 16)
    assert target.read_text() == "kept"
    if os.geteuid():
        pytest.skip("needs root to give a file to another user")
    path.unlink()
    path.touch()
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        RequestLog(str(path), 16)


def test_a_conversation_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"hash_ids": [1]}))
    (tmp_path / "b.json").symlink_to(tmp_path / "gone")
    with pytest.raises(TraceError, match=r"^trace = '.*b\.json': ") as caught:
        read_trace(tmp_path)
    assert caught.value.path == tmp_path / "b.json"
