"""Records which tests of engines passed with which vLLM, for ``docs/reference/compatibility.md``.

With ``OUTCOMES=1`` in the environment a run adds what it saw to ``outcomes.json``: for each test
its outcome and day by version of vLLM and model runner. ``tools/compatibility.py`` writes the page.
"""

import datetime
import json
import os
from pathlib import Path

from kvoffload.connectors.vllm.start import installed_version

FILE = Path(__file__).with_name("outcomes.json")
seen = {}


def pytest_runtest_logreport(report):
    """Note an outcome: of the call, or of what failed before or after it."""
    if "/vllm_engine/" in report.nodeid and (report.when == "call" or not report.passed):
        seen.setdefault(report.nodeid.rpartition("/vllm_engine/")[2], []).append(
            (report.outcome, dict(report.user_properties).get("runner"))
        )


def pytest_sessionfinish():
    # Of several processes of pytest, the first one hears of all tests.
    if os.environ.get("OUTCOMES") != "1" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    version = installed_version().partition("+")[0]
    asked = "V2" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else "V1"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for test, parts in seen.items():
        outcomes = {outcome for outcome, _ in parts}
        worst = next(o for o in ("failed", "skipped", "passed") if o in outcomes)
        runner = next((runner for _, runner in parts if runner), asked)
        known.setdefault(test, {})[f"{version} {runner}"] = [worst, today]
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
