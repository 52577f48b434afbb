"""The page of what was tested with which vLLM has the rows of the suite, and its outcomes."""

import ast
import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("compatibility", ROOT / "tools/compatibility.py")
compatibility = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compatibility)
STARTS_ENGINES = {"start", "serve"}
COMPARES_WITH_VLLM = {"test_vllm_peer.py"}
"""Tests of vLLM alone."""


def suite():
    """Return the names of all tests that may be in ``outcomes.json``, and of those with engines."""
    names, with_engines = set(), set()
    for file in sorted(compatibility.TESTS.glob("test_*.py")):
        functions = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)]
        asks = {f.name: {a.arg for a in f.args.args} for f in functions}
        for function in functions:
            if not function.name.startswith("test_"):
                continue
            name = f"{file.name}::{function.name}"
            names.add(name)
            wanted, seen = set(asks[function.name]), set()
            while new := wanted - seen:
                seen |= new
                for fixture in new:
                    wanted |= asks.get(fixture, set())
            if wanted & STARTS_ENGINES and file.name not in COMPARES_WITH_VLLM:
                with_engines.add(name)
    return names, with_engines


def test_every_test_with_an_engine_is_in_a_row_and_every_row_has_tests():
    names, with_engines = suite()
    assert len(with_engines) > 40
    beginnings = tuple(name for tests in compatibility.ROWS.values() for name in tests)
    missing = {
        name
        for name in with_engines
        if not any(name.startswith(b) or b.startswith(f"{name}[") for b in beginnings)
    }
    assert not missing, "add them to ROWS in tools/compatibility.py"
    for beginning in beginnings:
        plain = beginning.partition("[")[0]
        assert any(name.startswith(plain) for name in names), f"no test is called {beginning}"


def test_each_case_of_the_outputs_has_a_row_of_its_own():
    code = (compatibility.TESTS / "test_vllm_outputs.py").read_text()
    calls = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)]
    cases = {c.args[0].value for c in calls if getattr(c.func, "id", "") == "a_case"}
    assert len(cases) > 7
    beginnings = tuple(name for tests in compatibility.ROWS.values() for name in tests)
    for case in cases:
        assert f"{compatibility.EQUAL}[{case}]".startswith(beginnings), case


def test_the_page_in_the_repository_is_made_of_the_outcomes_of_the_suite():
    outcomes = json.loads((compatibility.TESTS / "outcomes.json").read_text())
    names, _ = suite()
    gone = {test for test in outcomes if test.partition("[")[0] not in names}
    assert not gone, "remove them from outcomes.json"
    assert compatibility.PAGE.read_text() == compatibility.page(outcomes)


def test_a_cell_states_what_was_seen_and_when():
    cell = compatibility.cell
    assert cell([]) == "not run"
    assert cell([["skipped", "2026-01-02"]]) == "skipped"
    assert cell([["passed", "2026-01-02"]]) == "1 passed; 2026-01-02"
    mixed = [["passed", "2026-01-02"], ["failed", "2026-01-05"], ["skipped", "2026-01-03"]]
    assert cell(mixed) == "1 passed, 1 failed, 1 skipped; 2026-01-02 to 2026-01-05"
