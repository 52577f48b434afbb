"""A time limit for each test of ``tests/gpu``, where pytest-timeout may not be installed.

A signal ends a test that hangs in Python, and the next one runs. A call into CUDA that never
returns is not ended; pytest's ``faulthandler_timeout`` prints where it is.
"""

import signal

import pytest


def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take", default="0")


@pytest.fixture(autouse=True)
def time_limit(request):
    """Fail the test when its time is over."""
    is_limited_already = request.config.pluginmanager.hasplugin("timeout")
    limit_s = 0.0 if is_limited_already else float(request.config.getini("timeout"))

    def fail(number, frame):
        pytest.fail(f"took longer than {limit_s:g} s")

    if not limit_s:
        yield
        return
    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
