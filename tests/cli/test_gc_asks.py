"""``gc`` on a terminal: it says what would go, and asks."""

import pytest
from disk_commands import files_of, kvoffload, on_terminal


def test_no_leaves_everything(root):
    before = files_of(root)
    code, shown = on_terminal("gc", str(root), "--namespace", "qwen", answer=b"n\n")
    assert code == 0
    assert "would remove 3 chunks" in shown
    assert "\nremoved" not in shown
    assert files_of(root) == before


def test_yes_removes_what_was_shown(root):
    code, shown = on_terminal("gc", str(root), "--namespace", "qwen", answer=b"y\n")
    assert code == 0
    assert "removed 3 chunks" in shown
    assert len(files_of(root)) == 6


@pytest.mark.parametrize("words", [("--yes",), ("--dry-run",), ("--json",)])
def test_it_does_not_ask_where_it_is_told(root, words):
    code, shown = on_terminal("gc", str(root), "--namespace", "qwen", *words)
    assert code == 0
    assert "[y/N]" not in shown


def test_it_asks_though_its_report_goes_to_a_file(root, tmp_path):
    before, words = files_of(root), ("gc", str(root), "--namespace", "qwen")
    with open(tmp_path / "report", "w+") as report:
        code, shown = on_terminal(*words, answer=b"n\n", stdout=report)
        assert (code, "would remove 3 chunks" in shown) == (0, True)
        assert files_of(root) == before
        code, shown = on_terminal(*words, answer=b"y\n", stdout=report)
        report.seek(0)
        assert (code, "removed 3 chunks" in report.read()) == (0, True)


def test_a_script_is_not_asked(root):
    done = kvoffload("gc", str(root), "--namespace", "qwen")
    assert done.returncode == 0
    assert "removed 3 chunks" in done.stdout
