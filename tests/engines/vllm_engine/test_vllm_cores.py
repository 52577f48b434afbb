"""Which cores vLLM computes on, on the CPU."""

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed; see make test-vllm")

from kvoffload.connectors.vllm.cpu_affinity import RESERVED, warn_of_cores


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
