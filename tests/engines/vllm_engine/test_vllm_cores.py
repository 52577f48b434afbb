"""Which cores vLLM computes on, on the CPU."""

import os

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from kvoffload.connectors.vllm.start import RESERVED, unbound, warn_of_cores


def test_cores_that_vllm_would_choose_otherwise_with_a_connector_are_warned_of(caplog, monkeypatch):
    monkeypatch.delenv(RESERVED, raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    warn_of_cores("cpu")
    assert RESERVED in caplog.text


def test_cores_that_were_chosen_or_of_a_gpu_are_not_warned_of(caplog, monkeypatch):
    monkeypatch.setenv(RESERVED, "1")
    warn_of_cores("cpu")
    monkeypatch.delenv(RESERVED)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    warn_of_cores("cpu")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    warn_of_cores("cuda")
    assert not caplog.text


@pytest.mark.parametrize(("device_type", "widened"), [("cpu", True), ("cuda", False)])
def test_threads_leave_the_cores_of_a_cpu_worker_and_stay_on_those_of_a_gpus(device_type, widened):
    before = os.sched_getaffinity(0)
    wide = before | os.sched_getaffinity(os.getppid())
    if len(wide) < 2:
        pytest.skip("needs two cores")
    one = {min(before)}
    os.sched_setaffinity(0, one)
    try:
        with unbound(device_type):
            inside = os.sched_getaffinity(0)
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, before)
    assert (inside > one) == widened
