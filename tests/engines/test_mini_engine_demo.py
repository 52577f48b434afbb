"""The demo in its quick form, through the command line, with its kill in the middle."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvoffload.cli import demo
from kvoffload.cli.bench import benchmark
from kvoffload.demo.conversations import conversations
from kvoffload.demo.demo_report import print_table, problems
from kvoffload.demo.showcase import DemoOptions, num_requests

ROOT = Path(__file__).parents[2]
DEMO = ["-c", "from kvoffload.cli.main import main; main()", "demo"]


pytestmark = pytest.mark.alone
"""While other programs run, a load may take longer than to compute: the demo then computes."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory, python):
    """Exit code, report and output folder of one quick demo."""
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [*python, *DEMO, "--quick", "--json", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), out


def test_every_pass_gives_the_outputs_of_no_offloading(quick):
    code, report, _ = quick
    assert report["problems"] == []
    assert code == 0
    assert [p["pass"] for p in report["passes"]] == ["cold", "host", "disk", "server"]
    assert all(p["outputs_identical"] for p in report["passes"])


def test_host_memory_serves_the_second_pass_then_the_disk_and_then_the_server(quick):
    _, report, _ = quick
    cold, host, disk, server = (p["tokens_from"] for p in report["passes"])
    assert cold["cpu"] == cold["disk"] == cold["server"] == 0
    assert host["cpu"] > 0
    assert disk["disk"] > 0
    assert server["server"] > server["disk"] == server["cpu"] == 0


def test_all_prompt_tokens_are_accounted_for(quick):
    _, report, _ = quick
    for row in report["passes"]:
        came = sum(row["tokens_from"].values())
        assert came + row["tokens_recomputed"] == row["prompt_tokens"]


def test_both_engines_were_killed_while_chunks_were_on_their_way(quick):
    assert len(quick[1]["killed_with_chunks_on_their_way"]) == 2
    assert all(quick[1]["killed_with_chunks_on_their_way"])


def test_report_and_plot_are_written_and_the_cache_folder_is_gone(quick):
    _, report, out = quick
    assert json.loads((out / "report.json").read_text()) == report
    assert (out / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.glob("kv-cache-*"))


def test_the_e2e_bench_makes_rows_of_a_report(quick):
    made = benchmark("e2e").rows(quick[1], copy_rate=1e10, read_rate=1e9)
    assert {"cold: median TTFT", "host: speed-up", "disk: outputs identical"} <= {
        row["case"] for row in made
    }
    assert all(row["ratio"] == pytest.approx(row["value"] / row["limit"]) for row in made)


@pytest.fixture
def shown(quick, tmp_path, monkeypatch, capsys):
    """What the command prints of a report, where matplotlib is not installed."""

    def show(**changed):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        monkeypatch.setenv("COLUMNS", "80")
        demo.show(tmp_path, {**quick[1], **changed}, demo.write(tmp_path, quick[1]))
        return capsys.readouterr().out

    return show


def test_without_matplotlib_the_extra_is_named(shown):
    assert "no plot: pip install '/path/to/kvoffload[plots]'" in shown()


def test_the_quick_form_shows_no_speed_ups(shown):
    assert "speed" not in shown(quick=True)
    assert "no figures" in shown(quick=True)
    assert "speed" in shown(quick=False)
    assert "no figures" not in shown(quick=False)


def test_the_readme_shows_the_table_of_the_stored_report_which_fits_80_columns():
    report = json.loads((ROOT / "benchmarks/results/demo.json").read_text())
    console = Console(width=200, record=True, file=io.StringIO())
    print_table(console, report)
    lines = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    rows = [line.split() for line in lines if line[:1] in "1234" and line]
    shown = re.findall(r"^\| (\d \w+ \|.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [row.replace("*", "").replace("|", "").split() for row in shown] == rows


def test_other_outputs_and_idle_tiers_are_problems():
    def row(name, source, same=True):
        came = dict.fromkeys(("gpu", "cpu", "disk", "server"), 0) | {source: 5}
        return {"pass": name, "tokens_from": came, "outputs_identical": same}

    good = [row("cold", "gpu"), row("host", "cpu"), row("disk", "disk")]
    assert problems(good) == problems([*good, row("server", "server")]) == []
    bad = [row("cold", "gpu"), row("host", "gpu", same=False), row("disk", "cpu")]
    assert len(problems([*bad, row("server", "cpu")])) == 4


def test_each_turn_begins_with_the_turn_before_and_its_answer():
    talks = conversations(3, 500)
    for talk in talks:
        first, second = talk.prompt([]), talk.prompt([[1, 2, 3]])
        assert len(first) == 500
        assert second[:503] == [*first, 1, 2, 3]
    assert len({talk.title for talk in talks}) == 3


def test_the_progress_bar_knows_all_requests(tmp_path):
    assert num_requests(DemoOptions(tmp_path, quick=True)) == 45
