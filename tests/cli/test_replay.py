"""The replay and size commands as users run them."""

import gzip
import io
import json
import os
import subprocess
import sys

import disk_commands
import pytest
from disk_commands import PYTHON

from kvoffload.offload.base import make_offload_key
from kvoffload.recording import RequestLog

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}


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


def test_the_json_of_a_replay_is_one_object(trace):
    done = kvoffload("replay", str(trace), "--policies", "lru", "--sizes", "1k", "--json")
    report = json.loads(done.stdout)
    assert report["trace"]["requests"] == 20
    assert report["trace"]["distinct_blocks"] == 21
    rows = {row["policy"]: row for row in report["rows"]}
    assert rows.keys() == {"lru", "belady", "infinite"}
    assert rows["lru"]["prefix_hit_rate"] == rows["infinite"]["prefix_hit_rate"] == 0.908696


def test_stores_of_any_size_are_replayed(trace):
    done = kvoffload("replay", str(trace), "--sizes", "1k,1000000000000m", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["policy"] for row in rows} == {"handicap", "lru", "arc", "belady", "infinite"}
    assert {row["prefix_hit_rate"] for row in rows} == {0.908696}
    assert {row["capacity_blocks"] for row in rows} == {1000, 10**18, None}


def test_several_tiers_share_the_hits(trace):
    done = kvoffload(
        "replay", str(trace), "--policies", "lru", "--tiers", "cpu=4,disk=1k", "--json"
    )
    row = json.loads(done.stdout)["rows"][0]
    assert row["tiers"].keys() == {"cpu", "disk"}
    assert sum(row["tiers"].values()) == pytest.approx(row["prefix_hit_rate"], abs=1e-5)
    table = kvoffload("replay", str(trace), "--policies", "lru", "--tiers", "cpu=4,disk=1k")
    assert "disk" in table.stdout
    assert "block hits" in table.stdout


def test_tiers_stand_beside_the_bound_of_one_store_as_large_as_all(trace):
    words = ("replay", str(trace), "--policies", "lru,lru")
    tiers = json.loads(kvoffload(*words, "--tiers", "cpu=2,disk=3", "--json").stdout)["rows"]
    whole = json.loads(kvoffload(*words, "--sizes", "5,5", "--json").stdout)["rows"]
    assert [row["policy"] for row in tiers] == ["lru", "belady", "infinite"]
    assert [row["policy"] for row in whole] == ["lru", "belady", "infinite"]  # each size once
    bound, of_one_store = tiers[1] | {"seconds": 0}, whole[1] | {"seconds": 0}
    assert bound == of_one_store
    assert "tiers" not in bound
    assert tiers[0]["block_hit_rate"] <= bound["block_hit_rate"]


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policies", "lfu"), "policies = 'lfu'"),
        (("--sizes", "0"), "sizes = '0'"),
        (("--sizes", "ten"), "sizes = 'ten'"),
        (("--tiers", "cpu"), "tiers.cpu"),
        (("--tiers", "cpu=1", "--sizes", "1"), "tiers = 'cpu=1'"),
        (("--plot", "a.gif"), ".png"),
        (("--sample", "2"), "sample = 2.0"),
        (("--synthetic", "agent"), "--synthetic"),
        (("--policies", ","), "at least one"),
    ],
)
def test_wrong_usage_ends_with_code_2_and_the_field(trace, words, message):
    done = kvoffload("replay", str(trace), *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [("gossip", "synthetic = 'gossip'"), ("agent:sed=1", "seed"), ("agent:seed=x", "whole number")],
)
def test_a_wrong_synthetic_load_is_named(name, message):
    done = kvoffload("replay", "--synthetic", name)
    assert done.returncode == 2
    assert message in done.stderr


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


def test_the_bound_is_said_to_be_one(trace):
    done = kvoffload("replay", str(trace), "--policies", "lru", "--sizes", "3")
    assert "belady knows the future: no policy has more hits" in done.stdout


def test_a_trace_may_be_compressed_or_come_from_standard_input(trace, monkeypatch):
    words = ("--policies", "lru", "--sizes", "1k", "--json")
    plain = json.loads(kvoffload("replay", str(trace), *words).stdout)["trace"]
    packed = trace.with_name("trace.jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert json.loads(kvoffload("replay", str(packed), *words).stdout)["trace"] == {
        **plain, "name": packed.name,
    }  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(trace.read_bytes())))
    done = kvoffload("replay", "-", *words)
    assert json.loads(done.stdout)["trace"] == {**plain, "name": "standard input"}


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


def test_size_says_how_much_memory_for_what_hit_rate(trace, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    words = ("size", str(trace), "--model", str(tmp_path), "--block-tokens", "16")
    done = kvoffload(*words, "--targets", "50,100", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"] == {"bytes_per_token": 131072, "block_bytes": 2 * 1024 * 1024}
    half, all_of_it = report["rows"]
    assert 0 < half["blocks"] < all_of_it["blocks"] <= 21
    assert all_of_it["bytes"] == all_of_it["blocks"] * 2 * 1024 * 1024
    table = kvoffload(*words)
    assert (
        "128.0 KiB of KV cache a token, 2.0 MiB a block of 16 tokens, on one rank" in table.stdout
    )


def test_size_says_what_each_rank_takes(trace, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    words = ("size", str(trace), "--model", str(tmp_path), "--block-tokens", "16")
    words = (*words, "--tensor-parallel", "4", "--targets", "100")
    (row,) = json.loads(kvoffload(*words, "--json").stdout)["rows"]
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


def test_a_recorded_trace_is_sized_with_its_own_chunks(tmp_path):
    path = recorded(tmp_path / "requests.jsonl", 32, 32)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    words = ("size", str(path), "--model", str(tmp_path), "--targets", "100")
    done = kvoffload(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["bytes"] == 6 * 32 * 128 * 1024
    same = kvoffload(*words, "--json", "--block-tokens", "32")
    assert same.stdout == done.stdout
    other = kvoffload(*words, "--block-tokens", "512")
    assert other.returncode == 2
    assert "block_tokens = 512: the trace says 32" in other.stderr


def test_a_trace_that_does_not_say_its_tokens_is_not_sized_by_guessing(trace, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    done = kvoffload("size", str(trace), "--model", str(tmp_path))
    assert done.returncode == 2
    assert "block_tokens = None: the trace does not say" in done.stderr
    assert "--block-tokens 512" in done.stderr


def test_size_says_the_bytes_of_a_token_without_a_trace(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    done = kvoffload("size", "--model", str(tmp_path))
    assert done.returncode == 0, done.stderr
    text = "128.0 KiB of KV cache a token on one rank; 8,192 tokens in a GiB"
    auto = "a chunk is 1 block of 16 tokens, 16 tokens, 2.0 MiB; decided by the aim of 2.0 MiB"
    assert done.stdout.splitlines() == [text, f'blocks_per_chunk "auto": {auto}']
    done = kvoffload("size", "--model", str(tmp_path), "--json")
    chunk = {"auto_chunk_tokens": 16, "auto_chunk_bytes": 2 << 20}
    assert json.loads(done.stdout) == {"bytes_per_token": 131072, "tokens_per_gib": 8192, **chunk}


def test_size_says_which_chunks_auto_makes_of_a_ranks_blocks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    words = ("size", "--model", str(tmp_path), "--tensor-parallel", "8", "--json")
    told = json.loads(kvoffload(*words).stdout)
    assert (told["auto_chunk_tokens"], told["auto_chunk_bytes"]) == (128, 2 << 20)
    told = json.loads(kvoffload(*words, "--block-tokens", "256").stdout)
    assert (told["auto_chunk_tokens"], told["auto_chunk_bytes"]) == (256, 4 << 20)
    kinds = ["sliding_attention", "full_attention"] * 16
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"layer_types": kinds}))
    assert "auto_chunk_tokens" not in json.loads(kvoffload(*words).stdout)


def test_size_says_what_sessions_of_a_length_take(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    words = ("size", "--model", str(tmp_path), "--context", "8192", "--sessions", "50")
    done = kvoffload(*words, "--tensor-parallel", "2")
    assert done.returncode == 0, done.stderr
    assert "50 sessions of 8,192 tokens: 50.0 GiB; cpu_bytes of each rank: 25.0 GiB" in done.stdout
    told = json.loads(kvoffload(*words, "--tensor-parallel", "2", "--json").stdout)
    assert (told["bytes"], told["bytes_per_rank"]) == (50 << 30, 25 << 30)
    assert kvoffload(*words[:-2], "--sessions", "0").returncode == 2


def test_size_says_the_seconds_of_prefill_that_a_size_saves(trace, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    words = ("size", str(trace), "--model", str(tmp_path), "--block-tokens", "16")
    asked = ("--targets", "100", "--prefill-tokens-per-s", "8")
    report = json.loads(kvoffload(*words, *asked, "--json").stdout)
    (row,) = report["rows"]
    accesses = report["trace"]["block_accesses"]
    assert row["prefill_saved_s"] == pytest.approx(row["prefix_hit_rate"] * accesses * 2, rel=1e-3)
    assert "prefill saved" in kvoffload(*words, *asked).stdout
    done = kvoffload(*words, "--prefill-tokens-per-s", "0")
    assert done.returncode == 2
    assert "prefill_tokens_per_s = 0" in done.stderr


def test_size_asks_for_the_model(trace):
    done = kvoffload("size", str(trace), "--block-tokens", "16")
    assert done.returncode == 2
    assert "model = None: give --model" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--targets", "101"), "targets = '101'"),
        (("--targets", ","), "targets = ','"),
        (("--block-tokens", "0"), "block_tokens"),
        (("--kv-dtype", "int3"), "kv_dtype = 'int3'"),
        (("--policy", "lfu"), "policy = 'lfu'"),
    ],
)
def test_a_wrong_size_question_ends_with_code_2(trace, tmp_path, words, message):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    done = kvoffload("size", str(trace), "--model", str(tmp_path), "--block-tokens", "16", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_closed_loop_prints_what_helps_and_the_oracle():
    words = ["replay", "--synthetic", "agent:seed=1,requests=400", "--closed-loop", "3,4"]
    words += ["--sizes", "60", "--policies", "lru", "--block-tokens", "64", "--minutes", "5"]
    done = kvoffload(*words)
    assert done.returncode == 0, done.stderr
    for word in ("3 sessions, 60 blocks", "4 sessions", "lru, waiting kept", "lru, both", "oracle"):
        assert word in done.stdout
    rows = json.loads(kvoffload(*words, "--json").stdout)["rows"]
    assert [row["helped"] for row in rows[:5]] == ["", "waiting", "told", "both", ""]
    assert rows[4]["policy"] == "oracle"
    assert rows[4]["prefix_hit_rate"] >= rows[0]["prefix_hit_rate"] > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--closed-loop", "3"], "--sizes"),
        (["--closed-loop", "3", "--sizes", "60", "--sample", "0.5"], "--sample"),
        (["--closed-loop", "3", "--sizes", "60"], "block_tokens"),
        (["--closed-loop", "none", "--sizes", "60", "--block-tokens", "1"], "closed_loop"),
    ],
)
def test_a_closed_loop_names_what_it_needs(words, named):
    done = kvoffload("replay", "--synthetic", "agent:requests=100", *words)
    assert done.returncode == 2
    assert named in done.stderr


def test_a_closed_loop_needs_times(trace):
    words = ["--closed-loop", "3", "--sizes", "60", "--block-tokens", "16"]
    done = kvoffload("replay", str(trace), *words)
    assert done.returncode == 2
    assert "has no times" in done.stderr


def test_a_closed_loop_that_counts_nothing_says_so():
    words = ["replay", "--synthetic", "agent:seed=1,requests=8", "--closed-loop", "3"]
    done = kvoffload(*words, "--sizes", "60", "--policies", "lru", "--block-tokens", "64")
    assert done.returncode == 2
    assert "too short" in done.stderr
    assert "--minutes" in done.stderr
