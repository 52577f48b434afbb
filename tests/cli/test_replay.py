"""The replay and size commands as users run them."""

import gzip
import io
import json
import os
import subprocess
import sys

import disk_commands
import pytest
from disk_commands import PYTHON, answered

from kvoffload.offload.base import make_offload_key
from kvoffload.recording import RequestLog

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}


@pytest.fixture
def model(tmp_path):
    """The words that name a model."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return "--model", str(tmp_path)


def kvoffload(*words, columns="120"):
    return disk_commands.kvoffload(*words, COLUMNS=columns)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    turns = [list(range(turn + 2)) for turn in range(20)]
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in turns))
    return path


def test_a_replay_prints_policies_beside_both_bounds(trace):
    done = kvoffload("replay", str(trace), "--policies", "lru,arc", "--sizes", "3,1k")
    assert done.returncode == 0, done.stderr
    for word in ("lru", "arc", "belady", "infinite", "1,000", "contiguous-prefix", "20 requests"):
        assert word in done.stdout
    assert "belady knows the future: no policy has more hits" in done.stdout


def test_the_json_of_a_replay_is_one_object(trace):
    report = answered("replay", str(trace), "--policies", "lru", "--sizes", "1k")
    assert report["trace"]["requests"] == 20
    assert report["trace"]["distinct_blocks"] == 21
    rows = {row["policy"]: row for row in report["rows"]}
    assert rows.keys() == {"lru", "belady", "infinite"}
    assert rows["lru"]["prefix_hit_rate"] == rows["infinite"]["prefix_hit_rate"] == 0.908696


def test_several_tiers_share_the_hits(trace):
    row = answered("replay", str(trace), "--policies", "lru", "--tiers", "cpu=4,disk=1k")["rows"][0]
    assert row["tiers"].keys() == {"cpu", "disk"}
    assert sum(row["tiers"].values()) == pytest.approx(row["prefix_hit_rate"], abs=1e-5)
    table = kvoffload("replay", str(trace), "--policies", "lru", "--tiers", "cpu=4,disk=1k")
    assert "disk" in table.stdout
    assert "block hits" in table.stdout


def test_tiers_stand_beside_the_bound_of_one_store_as_large_as_all(trace):
    words = ("replay", str(trace), "--policies", "lru,lru")
    tiers = answered(*words, "--tiers", "cpu=2,disk=3")["rows"]
    whole = answered(*words, "--sizes", "5,5")["rows"]
    assert [row["policy"] for row in tiers] == ["lru", "belady", "infinite"]
    assert [row["policy"] for row in whole] == ["lru", "belady", "infinite"]  # each size once
    bound, of_one_store = tiers[1] | {"seconds": 0}, whole[1] | {"seconds": 0}
    assert bound == of_one_store
    assert "tiers" not in bound
    assert tiers[0]["block_hit_rate"] <= bound["block_hit_rate"]


def test_a_store_of_any_size_takes_the_memory_of_the_trace_alone(trace):
    sizes = "1000000m,99999999999999999999"
    words = ("replay", str(trace), "--policies", "handicap,lru,arc", "--json")
    done = kvoffload(*words, "--sizes", sizes)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["capacity_blocks"] for row in rows] == [10**12, 10**20] * 4 + [None]
    assert len({row["prefix_hit_rate"] for row in rows}) == 1  # that of an infinite store


def test_a_picture_that_cannot_be_written_is_told_before_the_replay(trace, tmp_path):
    (tmp_path / "folder.png").mkdir()
    too_long = str(tmp_path / f"{'x' * 300}.png")
    for path in ("/nowhere/at/all.png", str(tmp_path / "folder.png"), too_long):
        # The policy does not exist either, and would be told first if anything had been replayed.
        done = kvoffload("replay", str(trace), "--policies", "lfu", "--plot", path)
        assert done.returncode == 2
        assert f"plot = {path!r}: cannot be written" in done.stderr
    (tmp_path / "link.png").symlink_to("target.png")  # which is not there yet
    before = sorted(tmp_path.iterdir())
    for name in ("new.png", "link.png"):
        kvoffload("replay", str(trace), "--policies", "lfu", "--plot", str(tmp_path / name))
    assert sorted(tmp_path.iterdir()) == before


def test_a_plug_in_that_names_a_class_that_is_not_there_is_named(trace, tmp_path):
    (tmp_path / "ghost.py").write_text("")
    facts = tmp_path / "ghost-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: ghost\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[kvoffload.policies]\nghost = ghost:Missing\n")
    program = "from kvoffload.cli.main import main; main()"
    done = subprocess.run(
        [*PYTHON, "-c", program, "replay", str(trace), "--policies", "ghost"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("kvoffload: policies = 'ghost': the plug-in ghost:Missing")
    assert "Traceback" not in done.stderr


def test_a_synthetic_load_is_drawn_as_a_png(tmp_path, monkeypatch):
    Axes = pytest.importorskip("matplotlib.axes", reason="needs the extra 'plots'").Axes
    picture = tmp_path / "rates.png"
    words = ("--synthetic", "agent:seed=3,requests=60", "--sample", "0.5", "--plot", str(picture))
    titles, draw = [], Axes.set_title
    monkeypatch.setattr(
        Axes, "set_title", lambda axes, text, **how: titles.append(text) or draw(axes, text, **how)
    )
    done = kvoffload("replay", *words)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "a sample of 0.5" in done.stdout
    assert "a sample of 0.5" in titles[0]


def test_a_broken_trace_names_file_line_and_field(trace):
    with trace.open("a") as file:
        file.write('{"hash_ids": [1, "x", -3]}\n')
    done = kvoffload("replay", str(trace))
    assert done.returncode == 2
    assert f"{trace}:21: hash_ids[2]" in done.stderr


WIDE = ("--policies", "handicap,arc,lru", "--sizes", "1k,2k,3k,10k,20k,30k,100k,200k,300k")


def test_a_table_has_one_line_a_row_where_a_script_reads_it(trace):
    done = kvoffload("replay", str(trace), *WIDE, columns="")
    row = next(line for line in done.stdout.splitlines() if "arc" in line)
    assert row.count("90.87") == 9
    assert "…" not in done.stdout
    (tmp := trace.with_name("name " * 40 + ".jsonl")).write_text(trace.read_text())
    assert f"{tmp.name}: 20 requests" in kvoffload("replay", str(tmp), *WIDE, columns="").stdout


@pytest.mark.parametrize("columns", ["60", "40", "10"])
def test_a_narrow_terminal_cuts_no_name_and_no_number(trace, columns):
    done = kvoffload("replay", str(trace), *WIDE, columns=columns)
    assert done.returncode == 0, done.stderr
    words = set(done.stdout.split())
    assert {"handicap", "arc", "infinite", "90.87", "1,000", "300,000"} <= words
    assert done.stdout.count(" 90.87 ") == 2 * 9 * 5  # two tables, three policies and two bounds
    if columns != "10":
        assert all(len(line) <= int(columns) for line in done.stdout.splitlines() if "│" in line)


def test_a_trace_may_be_compressed_or_come_from_standard_input(trace, monkeypatch):
    words = ("--policies", "lru", "--sizes", "1k")
    plain = answered("replay", str(trace), *words)["trace"]
    packed = trace.with_name("trace.jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert answered("replay", str(packed), *words)["trace"] == {**plain, "name": packed.name}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(trace.read_bytes())))
    assert answered("replay", "-", *words)["trace"] == {**plain, "name": "standard input"}


@pytest.mark.parametrize("keep", [40, 12, 3])
def test_a_compressed_trace_that_is_damaged_is_named(trace, keep):
    packed = trace.with_name("trace.jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes())[:keep])
    done = kvoffload("replay", str(packed))
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvoffload: trace = {str(packed)!r}: ")
    assert "cannot be read: " in done.stderr
    assert "None" not in done.stderr


def test_a_trace_that_is_not_there_is_named_once(tmp_path):
    done = kvoffload("replay", str(tmp_path / "gone"))
    assert (done.returncode, done.stderr.count(str(tmp_path / "gone"))) == (2, 1)


def test_size_says_how_much_memory_for_what_hit_rate(trace, model):
    words = ("size", str(trace), *model, "--block-tokens", "16")
    report = answered(*words, "--targets", "50,100")
    assert report["model"] == {"bytes_per_token": 131072, "block_bytes": 2 * 1024 * 1024}
    half, all_of_it = report["rows"]
    assert 0 < half["blocks"] < all_of_it["blocks"] <= 21
    assert all_of_it["bytes"] == all_of_it["blocks"] * 2 * 1024 * 1024
    table = kvoffload(*words)
    assert (
        "128.0 KiB of KV cache a token, 2.0 MiB a block of 16 tokens, on one rank" in table.stdout
    )


def test_size_says_what_each_rank_takes(trace, model):
    words = ("size", str(trace), *model, "--block-tokens", "16")
    words = (*words, "--tensor-parallel", "4", "--targets", "100")
    (row,) = answered(*words)["rows"]
    assert row["bytes"] == 21 * 2 * 1024 * 1024 == 4 * row["bytes_per_rank"]
    table = kvoffload(*words)
    assert "on all 4 ranks together" in table.stdout
    assert "cpu_bytes" in table.stdout
    assert "10.5 MiB" in table.stdout


def recorded(path, *tokens_per_chunk):
    for tokens in tokens_per_chunk:
        keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(6)]
        RequestLog(str(path), tokens).asked_for(keys)
    return path


def test_a_recorded_trace_is_sized_with_its_own_chunks(tmp_path, model):
    path = recorded(tmp_path / "requests.jsonl", 32, 32)
    words = ("size", str(path), *model, "--targets", "100")
    told = answered(*words)
    assert told["rows"][0]["bytes"] == 6 * 32 * 128 * 1024
    assert answered(*words, "--block-tokens", "32") == told
    other = kvoffload(*words, "--block-tokens", "512")
    assert other.returncode == 2
    assert "block_tokens = 512: the trace says 32" in other.stderr


def test_size_says_the_bytes_of_a_token_without_a_trace(model):
    done = kvoffload("size", *model)
    assert done.returncode == 0, done.stderr
    text = "128.0 KiB of KV cache a token on one rank; 8,192 tokens in a GiB"
    auto = "a chunk is 1 block of 16 tokens, 16 tokens, 2.0 MiB; decided by the aim of 2.0 MiB"
    assert done.stdout.splitlines() == [text, f'blocks_per_chunk "auto": {auto}']
    chunk = {"auto_chunk_tokens": 16, "auto_chunk_bytes": 2 << 20}
    token = {"bytes_per_token": 131072, "tokens_per_gib": 8192}
    assert answered("size", *model) == {**token, **chunk}


def test_size_says_which_chunks_auto_makes_of_a_ranks_blocks(tmp_path, model):
    words = ("size", *model, "--tensor-parallel", "8")
    told = answered(*words)
    assert (told["auto_chunk_tokens"], told["auto_chunk_bytes"]) == (128, 2 << 20)
    told = answered(*words, "--block-tokens", "256")
    assert (told["auto_chunk_tokens"], told["auto_chunk_bytes"]) == (256, 4 << 20)
    kinds = ["sliding_attention", "full_attention"] * 16
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"layer_types": kinds}))
    assert "auto_chunk_tokens" not in answered(*words)


def test_size_says_what_sessions_of_a_length_take(model):
    words = ("size", *model, "--context", "8192", "--sessions", "50")
    done = kvoffload(*words, "--tensor-parallel", "2")
    assert done.returncode == 0, done.stderr
    assert "50 sessions of 8,192 tokens: 50.0 GiB; cpu_bytes of each rank: 25.0 GiB" in done.stdout
    told = answered(*words, "--tensor-parallel", "2")
    assert (told["bytes"], told["bytes_per_rank"]) == (50 << 30, 25 << 30)


def test_size_says_the_seconds_of_prefill_that_a_size_saves(trace, model):
    words = ("size", str(trace), *model, "--block-tokens", "16")
    asked = ("--targets", "100", "--prefill-tokens-per-s", "8")
    report = answered(*words, *asked)
    (row,) = report["rows"]
    accesses = report["trace"]["block_accesses"]
    assert row["prefill_saved_s"] == pytest.approx(row["prefix_hit_rate"] * accesses * 2, rel=1e-3)
    assert "prefill saved" in kvoffload(*words, *asked).stdout


def test_a_closed_loop_prints_what_helps_and_the_oracle():
    words = ["replay", "--synthetic", "agent:seed=1,requests=400", "--closed-loop", "3,4"]
    words += ["--sizes", "60", "--policies", "lru", "--block-tokens", "64", "--minutes", "5"]
    done = kvoffload(*words)
    assert done.returncode == 0, done.stderr
    for word in ("3 sessions, 60 blocks", "4 sessions", "lru, waiting kept", "lru, both", "oracle"):
        assert word in done.stdout
    rows = answered(*words)["rows"]
    assert [row["helped"] for row in rows[:5]] == ["", "waiting", "told", "both", ""]
    assert rows[4]["policy"] == "oracle"
    assert rows[4]["prefix_hit_rate"] >= rows[0]["prefix_hit_rate"] > 0


OF_TRACE = "replay {trace}"
LOOPED = "replay --synthetic agent:requests=100 --closed-loop"
SHORT = "replay --synthetic agent:seed=1,requests=8 --closed-loop 3 --sizes 60 --policies lru"
SIZED = "size {trace} --model {model} --block-tokens 16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{OF_TRACE} --policies lfu", "policies = 'lfu'"),
        (f"{OF_TRACE} --policies ,", "at least one"),
        (f"{OF_TRACE} --sizes 0", "sizes = '0'"),
        (f"{OF_TRACE} --sizes 1e400", "sizes = '1e400'"),
        (f"{OF_TRACE} --sizes ten", "sizes = 'ten'"),
        (f"{OF_TRACE} --tiers cpu", "tiers.cpu"),
        (f"{OF_TRACE} --tiers cpu=1 --sizes 1", "tiers = 'cpu=1'"),
        (f"{OF_TRACE} --plot a.gif", ".png"),
        (f"{OF_TRACE} --sample 2", "sample = 2.0"),
        (f"{OF_TRACE} --synthetic agent", "--synthetic"),
        ("replay --synthetic gossip", "synthetic = 'gossip'"),
        ("replay --synthetic agent:sed=1", "seed"),
        ("replay --synthetic agent:seed=x", "whole number"),
        (f"{LOOPED} 3", "--sizes"),
        (f"{LOOPED} 3 --sizes 60 --sample 0.5", "--sample"),
        (f"{LOOPED} 3 --sizes 60", "block_tokens"),
        (
            f"{LOOPED} none --sizes 60 --block-tokens 1",
            "closed_loop = 'none': must be a number of sessions",
        ),
        (f"{OF_TRACE} --closed-loop 3 --sizes 60 --block-tokens 16", "has no times"),
        (f"{SHORT} --block-tokens 64", "too short...--minutes"),
        (f"{SIZED} --targets 101", "targets = '101'"),
        (f"{SIZED} --targets ,", "targets = ','"),
        (f"{SIZED} --block-tokens 0", "block_tokens"),
        (f"{SIZED} --kv-dtype int3", "kv_dtype = 'int3'"),
        (f"{SIZED} --policy lfu", "policy = 'lfu'"),
        (f"{SIZED} --prefill-tokens-per-s 0", "prefill_tokens_per_s = 0"),
        ("size {trace} --block-tokens 16", "model = None: give --model"),
        (
            "size {trace} --model {model}",
            "block_tokens = None: the trace does not...--block-tokens 512",
        ),
        ("size --model {model} --context 8192 --sessions 0", "sessions"),
    ],
)
def test_wrong_usage_ends_with_code_2_and_the_field(trace, model, words, message):
    done = kvoffload(*words.format(trace=trace, model=model[1]).split())
    assert done.returncode == 2
    assert all(each in done.stderr for each in message.split("...")), done.stderr
    assert "Traceback" not in done.stderr
