"""``kvoffload bench``: the object it prints, and what it refuses."""

import json
import os
import tempfile

import pytest
from typer.testing import CliRunner

from kvoffload.cli import bench
from kvoffload.cli.bench import LINUX_ONLY, benchmark, benchmark_names
from tests.support.redis_server import BINARY, MISSING

SMALL = {
    "disk": ({"ROUNDS": 1, "KNOWN": 300, "SINGLE_LOADS": 1}, {"total_bytes": 4 << 20}),
    "encryption": ({"ROUNDS": 1}, {"total_bytes": 2 << 20}),
    "folder": ({"ROUNDS": 1, "LOOKUPS": 20}, {"total_bytes": 32 << 20}),
    "io_forms": ({"ROUNDS": 1, "SINGLE_LOADS": 1, "DEPTHS": (1, 2)}, {"total_bytes": 4 << 20}),
    "load": ({}, {"count": 8}),
    "manager": (
        {"CAPACITY": 1024, "LARGE": 2048, "BATCH": 32, "ROUNDS": 1, "PINNED": 64, "QUEUED": 64},
        {},
    ),
    "object": (
        {"ROUNDS": 1, "NAMES": 2, "AT_ONCE": 2, "LOADS_AT_ONCE": 2, "LOOKUP_KEYS": 10},
        {"cases": ((2 << 20, False),)},
    ),
    "redis": (
        {"ROUNDS": 1, "NAMES": 4, "LOOKUP_KEYS": 10},
        {"cases": ((256 << 10, 8, 2, False), (256 << 10, 8, 2, True))},
    ),
}
"""Constants and arguments with which a bench ends within seconds; the others have no such form."""


@pytest.fixture
def run():
    import typer

    app = typer.Typer()
    app.command()(bench.command)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_an_unknown_bench_is_refused_with_the_known_ones(run):
    result = run("nothing")
    assert result.exit_code == 2
    assert "copy" in result.output


def test_a_bench_that_needs_linux_says_so_elsewhere(run, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    result = run("e2e")
    assert result.exit_code == 2
    assert "needs Linux" in result.output


@pytest.mark.parametrize("name", benchmark_names())
def test_every_bench_can_be_imported_or_says_what_it_needs(name):
    assert callable(benchmark(name).run)


@pytest.mark.parametrize("name", SMALL)
def test_a_bench_runs_to_its_end(name, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if name in LINUX_ONLY:
        try:
            os.close(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        except (AttributeError, OSError) as error:
            pytest.skip(f"no direct I/O here: {error}")
    if name == "redis" and BINARY is None:
        pytest.skip(MISSING)
    constants, arguments = SMALL[name]
    for constant, value in constants.items():
        monkeypatch.setattr(benchmark(name), constant, value)
    assert benchmark(name).run(**arguments)["rows"]


def test_each_row_has_its_limit_and_the_ratio_to_it(run, monkeypatch):
    copy = benchmark("copy")
    for name, value in {"ROUNDS": 1, "TENSOR_BYTES": 1 << 20, "NUM_SUBMITTED": (1, 16)}.items():
        monkeypatch.setattr(copy, name, value)
    small = copy.run(total_bytes=32 << 20)
    monkeypatch.setattr(copy, "run", lambda: small)
    result = run("copy", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["bench"] == "copy"
    assert report["machine"]
    moved = 2 * (4 + 1)  # two page sizes: both directions, in a run and scattered; a bare loop
    cases = {row["case"] for row in report["rows"]}
    assert len(cases) == len(report["rows"]) == moved + len(copy.NUM_SUBMITTED)
    for row in report["rows"]:
        assert set(row) == {"case", "value", "unit", "limit", "limit_name", "ratio"}
        assert row["ratio"] == pytest.approx(row["value"] / row["limit"])
    table = run("copy")
    assert table.exit_code == 0
    assert "memcpy" in table.output
