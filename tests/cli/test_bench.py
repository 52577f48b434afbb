"""``kvoffload bench``: the object it prints, and what it refuses."""

import json
import os

import pytest
from typer.testing import CliRunner

from kvoffload.cli import bench
from kvoffload.cli.bench import benchmark, benchmark_names


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
