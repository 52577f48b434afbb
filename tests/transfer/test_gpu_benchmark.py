"""The benchmark for a GPU runs here on a stand-in: every row comes out, failures cost no other."""

import functools
import json
import sys

import pytest
import torch
from cuda_stand_in import FakeCuda, OnCpu, install

from benchmarks.gpu import transfer

PORTION = 3 * 4096
PARTS_OF_A_SHAPE = 3 * 2 + 4 * 2 + 1 + 2
"""Rows: three a number of chunks, four ways in two directions, one product, two submissions."""


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in, and a benchmark small enough for it: slabs of several registrations."""
    fake = install(monkeypatch.setattr, PORTION)
    monkeypatch.setattr(torch.cuda, "Event", functools.partial(FakeCuda.Event, blocking=True))
    monkeypatch.setattr(torch.cuda, "Stream", FakeCuda.Stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(transfer, "reason", lambda: "")
    monkeypatch.setattr(transfer, "SHAPES", {"small": (3, 4096)})
    monkeypatch.setattr(transfer, "CHUNKS", (1, 5))
    monkeypatch.setattr(transfer, "SOME_CHUNKS", 4)
    monkeypatch.setattr(transfer, "ROUNDS", 1)
    monkeypatch.setattr(transfer, "PRODUCT", 8)
    monkeypatch.setattr(transfer.registered, "__defaults__", (PORTION,))
    with OnCpu(fake):
        yield fake


def run(monkeypatch, tmp_path):
    """Run the benchmark; returns its exit status and its report."""
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["transfer", str(out)])
    return transfer.main(), json.loads(out.read_text())


def test_every_row_is_measured_and_no_copy_crosses_two_registrations(
    cuda, monkeypatch, tmp_path, capsys
):
    status, report = run(monkeypatch, tmp_path)
    assert (status, report["failed"]) == (0, [])
    assert len(report["rows"]) == PARTS_OF_A_SHAPE
    printed = capsys.readouterr().out
    assert all(row["case"] in printed for row in report["rows"])


def test_memory_that_cannot_be_pinned_is_told_and_not_waited_for(
    cuda, monkeypatch, tmp_path, capsys
):
    cuda.refuse_after = PORTION
    monkeypatch.setattr(transfer, "WAIT_S", 5.0)
    status, report = run(monkeypatch, tmp_path)
    assert status == 1
    assert [name for name in report["failed"] if "speeds" in name] == ["small, speeds"]
    assert "'why_not_pinned': 'cudaHostRegister: out of memory'" in capsys.readouterr().err


def test_rows_measured_before_a_failure_are_kept_and_other_parts_go_on(
    cuda, monkeypatch, tmp_path, capsys
):
    large, count = transfer.Bench.large, []

    def fail_at_the_second_size(bench, chunks, to_host):
        count.append(chunks)
        if chunks == 5:
            raise RuntimeError("an illegal access")
        return large(bench, chunks, to_host)

    monkeypatch.setattr(transfer.Bench, "large", fail_at_the_second_size)
    status, report = run(monkeypatch, tmp_path)
    assert (status, report["failed"]) == (1, ["small, speeds"])
    assert len(report["rows"]) == PARTS_OF_A_SHAPE - 3
    assert "an illegal access" in capsys.readouterr().err


def test_an_interrupted_run_leaves_what_was_measured(cuda, monkeypatch, tmp_path):
    def interrupt(bench):
        raise KeyboardInterrupt

    monkeypatch.setattr(transfer, "PARTS", (transfer.submits, interrupt))
    monkeypatch.setattr(sys, "argv", ["transfer", str(tmp_path / "gpu.json")])
    with pytest.raises(KeyboardInterrupt):
        transfer.main()
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert (len(report["rows"]), report["failed"]) == (2, ["interrupted"])
