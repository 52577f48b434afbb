"""Runs a failed test again, alone: a plug-in of pytest, for ``.ci/run``.

Among a thousand tests of engines and processes, one now and then expects what a busy machine does
not do in time. A test that failed has to pass ``TIMES`` times in a row, or the run fails as
it did. So does a run with more than ``MOST`` of them. The report of the failure stays in the
output. A line below it says what came of it: such a test is to be mended all the same.
"""

import subprocess
import sys

import pytest

TIMES, MOST = 3, 3

failed: dict[str, None] = {}


def pytest_runtest_logreport(report):
    if report.failed:
        failed[report.nodeid] = None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    # Of several processes of pytest, the first one hears of all tests.
    is_first = not hasattr(session.config, "workerinput")
    if is_first and exitstatus == pytest.ExitCode.TESTS_FAILED and len(failed) <= MOST:
        filters = session.config.getoption("pythonwarnings") or ()
        command = [sys.executable, "-m", "pytest", *(f"-W{each}" for each in filters)]
        for _ in range(TIMES):
            if subprocess.run([*command, *failed], cwd=session.config.rootpath).returncode:
                return
        print(f"\nUNSTEADY: failed, and then passed {TIMES} times alone: {', '.join(failed)}")
        session.exitstatus = pytest.ExitCode.OK
