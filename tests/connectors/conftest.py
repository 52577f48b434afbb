"""The local connector's tests run again, in ``make chaos``, with the I/O server as a process."""

import pytest

BOTH = (
    "test_local",
    "test_local_groups",
    "test_local_life",
    "test_local_settings",
    "test_local_wishes",
    "test_staging",
    "test_eviction",
    "test_tiers",
)
REACH_IN = {"faulty", "stores", "faults", "registry", "DiskBackend"}
"""What changes stores in this process; ``test_io_forms.py`` plans faults for both forms."""


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in BOTH:
        names = {*metafunc.fixturenames, *metafunc.function.__code__.co_names}
        process = [pytest.param("process", marks=pytest.mark.chaos)] * (not names & REACH_IN)
        metafunc.parametrize("default_form", ["thread", *process], indirect=True)


@pytest.fixture(autouse=True)
def default_form(request):
    form = getattr(request, "param", "thread")
    with pytest.MonkeyPatch.context() as patched:  # one of its own, which ends last
        patched.setenv("KVOFFLOAD_SETTING_IO", form)
        yield
