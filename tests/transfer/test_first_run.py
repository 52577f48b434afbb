"""The first run on a GPU runs here on a stand-in: all rows come out, trouble costs one part."""

import ctypes
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import gpu_on_cpu
import numpy as np
import pytest
import torch
from cuda_stand_in import OnCpu, install
from part_on_cpu import SMALL

from benchmarks.gpu import checks, device, first_run, sizes
from benchmarks.gpu.ours import Ours
from benchmarks.gpu.part import PARTS
from benchmarks.harness import row
from kvoffload.transfer import factory
from kvoffload.transfer.cuda.torch_device import CudaDevice

ROOT = Path(__file__).parents[2]
SMI = "#!/bin/sh\necho NVIDIA H100 80GB HBM3, 580.159.04\n"
SANITIZER = '#!/bin/sh\n[ "$1 $2" = "--error-exitcode 9" ] || exit 1\nshift 2\nexec "$@"\n'
PART = """
import json, os, subprocess, sys, time
from benchmarks.gpu import part
from benchmarks.harness import row

def trouble():
    yield row("first", 1.0, "GB/s")
    {trouble}

def good():
    yield row("parts written", len(json.load(open({out!r}))["parts"]), "")

part.TESTS |= {{"link": trouble, "sweep": good}}
sys.exit(part.main(*sys.argv[1:]))
"""
TROUBLE = {
    "raise OSError('an illegal access')": ("failed with exit status 1", "an illegal access"),
    "os.abort()": ("failed with exit status -6", ""),
    "subprocess.run(['sleep', '600'])": ("killed after 5 s", "in trouble"),
}
"""What a part does, the verdict, and what its output says."""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Stand-ins for NVIDIA's programs."""
    for name, text in (("nvidia-smi", SMI), ("compute-sanitizer", SANITIZER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.timeout(600)
def test_every_part_gives_rows_on_a_stand_in(programs, python, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHON", json.dumps(python))
    out, on_cpu = tmp_path / "gpu.json", (*python, "-m", "part_on_cpu")
    status = first_run.main(["--out", str(out), "--commit", "abc123", "--budget", "3000"], on_cpu)
    printed, report = capsys.readouterr().out, json.loads(out.read_text())
    assert [part["part"] for part in report["parts"]] == list(PARTS)
    assert {part["verdict"] for part in report["parts"]} == {"ok"}, printed
    assert status == 0
    assert all(part["rows"] for part in report["parts"])
    for part in report["parts"]:
        tests = [one for one in part["rows"] if "outcome" in one]
        assert {one["outcome"] for one in tests} <= {"passed"}
        assert all(one["case"] in printed for one in part["rows"] if one not in tests)
        assert f"== {part['part']}: ok" in (tmp_path / "gpu.log").read_text()
    rows = [one for part in report["parts"] for one in part["rows"]]
    assert {one["goal"] for one in rows if "goal" in one} == set(first_run.GOALS)
    assert len(report["goals"]) == len(first_run.GOALS)
    assert (report["gpu"], report["driver"]) == ("NVIDIA H100 80GB HBM3", "580.159.04")
    assert report["commit"] == "abc123"
    assert "driver 580.159.04" in {one["case"] for one in rows}  # batches hang with it


@pytest.mark.parametrize("trouble", TROUBLE)
def test_trouble_costs_its_part_alone_and_results_are_written_after_each(
    trouble, tmp_path, monkeypatch, capsys
):
    out, part = tmp_path / "gpu.json", tmp_path / "part.py"
    part.write_text(PART.format(trouble=trouble, out=str(out)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setitem(PARTS, "link", (5 if "sleep" in trouble else 100, ""))
    monkeypatch.setattr(first_run, "LEAST_S", 5)
    words = ["link", "sweep", "--out", str(out)]
    assert first_run.main(words, (sys.executable, str(part))) == 1
    link, sweep = json.loads(out.read_text())["parts"]
    verdict, told = TROUBLE[trouble]
    assert link["verdict"] == verdict
    assert [one["case"] for one in link["rows"]] == ["first"]
    assert told in "\n".join(link["output"])
    assert [one["value"] for one in sweep["rows"]] == [1]
    assert f"link         {verdict}, 1 rows" in capsys.readouterr().out


def test_a_part_without_rows_is_bad_and_one_without_time_is_not_begun(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    words = ["smoke", "--out", str(out), "--budget"]
    for budget, verdict in (("60", "failed: no rows"), ("1", "not begun: no time left")):
        assert first_run.main([*words, budget], (sys.executable, "-c", "")) == 1
        assert json.loads(out.read_text())["parts"][0]["verdict"] == verdict


def judged(key, *rows, verdict="ok"):
    """What becomes of a goal with these rows."""
    marked = [one | {"goal": key} for one in rows]
    found = first_run.goals([{"verdict": verdict, "rows": marked}])
    return found[list(first_run.GOALS).index(key)]["reached"]


def test_a_goal_is_reached_if_its_worst_row_reaches_it_and_no_row_is_missing():
    good, bad = row("a", 0.95, "", 1.0, "b"), row("a", 0.94, "", 1.0, "b")
    assert judged("one way", good, good) is True
    assert judged("one way", good, bad) is False
    assert judged("one way", row("a", 0.0, "", 1.0, "b")) is False
    assert judged("one way") is None
    assert judged("one way", good, verdict="killed") is None
    assert judged("one way", bad, verdict="killed") is False
    assert judged("step p50", row("a", 1.02, "", 1.0, "b")) is True
    assert judged("step p50", row("a", 1.03, "", 1.0, "b")) is False


def test_rates_are_compared_with_the_link_of_this_run():
    parts = [
        {"part": "link", "rows": [row("l", 50.0, "GB/s") | {"way": "load", "bytes": 64}]},
        {"part": "rates", "rows": [row("r", 40.0, "GB/s") | {"way": "load", "bytes": 64}]},
    ]
    first_run.compare_with_link(parts)
    assert [part["rows"][0]["ratio"] for part in parts] == [None, 0.8]


def test_memory_that_cannot_be_pinned_is_told_and_not_waited_for(monkeypatch):
    cuda = install(monkeypatch.setattr, 3 * 4096)
    monkeypatch.setattr(factory, "CpuCopier", gpu_on_cpu.copier)
    monkeypatch.setattr(torch.cuda, "Stream", cuda.Stream)
    cuda.refuse_after = 3 * 4096
    why = "'why_not_pinned': 'cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY"
    with OnCpu(cuda), pytest.raises(RuntimeError, match=why):
        Ours(2, 4096, 1 << 16)
    assert not cuda.registered


def spoil_kernels(cuda, monkeypatch):
    def refuse(device, parts):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(CudaDevice, "_compile", refuse)


def spoil_batches(cuda, monkeypatch):
    cuda.batch_error = RuntimeError("cuMemcpyBatchAsync: CUDA_ERROR_NOT_SUPPORTED (801)")


def old_driver(cuda, monkeypatch):
    cuda.why_no_batches = "the driver is of CUDA 12.4"


def smoke_rows(monkeypatch, spoil):
    """The rows of smoke on a stand-in that has something wrong."""
    cuda = install(monkeypatch.setattr, gpu_on_cpu.PORTION_BYTES)
    monkeypatch.setattr(factory, "CpuCopier", gpu_on_cpu.copier)
    monkeypatch.setattr(torch.cuda, "Stream", cuda.Stream)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    for name in ("SMOKE", "SMOKE_SLOTS", "REGISTRATION_BYTES"):
        monkeypatch.setattr(sizes, name, SMALL[name])
    spoil(cuda, monkeypatch)
    with OnCpu(cuda):
        yield from checks.smoke()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(spoil_kernels, "why_not_kernels.*no C compiler"), (spoil_batches, "why_not_copies.*801")],
)
def test_smoke_fails_if_the_bytes_are_right_but_came_by_another_way(monkeypatch, spoil, why):
    """The other parts would measure the worse way, and no one would know."""
    rows = []
    with pytest.raises(RuntimeError, match=why):
        rows.extend(smoke_rows(monkeypatch, spoil))
    assert [one["value"] for one in rows][::2] == ["the same bytes"] * 2


def test_a_driver_without_batches_has_no_better_way(monkeypatch):
    assert len(list(smoke_rows(monkeypatch, old_driver))) == 4


def test_rows_of_the_part_that_ran_are_left_if_the_run_itself_is_killed(tmp_path):
    part, run = tmp_path / "part.py", tmp_path / "run.py"
    out = str(tmp_path / "gpu.json")
    kill = "time.sleep(0.2); os.kill(os.getppid(), 9); time.sleep(5)"
    part.write_text(PART.format(trouble=kill, out=out))
    command = (sys.executable, str(part))
    run.write_text(
        "from benchmarks.gpu import first_run\n"
        f"first_run.main(['link', '--out', {out!r}], {command!r})\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(run)], cwd=ROOT, env=env, check=False)
    assert done.returncode == -9
    assert [one["case"] for one in first_run.read_rows(tmp_path / "gpu.part/link.rows")] == [
        "first"
    ]


def test_the_driver_is_called_as_its_header_says(monkeypatch):
    """The driver's side is written from ``cuda.h`` of CUDA 12.8, apart from the caller's."""
    words, number = ctypes.c_void_p, ctypes.c_size_t

    class Attributes(ctypes.Structure):
        _fields_ = (("order", ctypes.c_uint), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))

    arrays = (ctypes.POINTER(ctypes.c_uint64),) * 2
    tail = (
        ctypes.POINTER(Attributes),
        ctypes.POINTER(number),
        number,
        ctypes.POINTER(number),
        words,
    )
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *arrays, ctypes.POINTER(number), number, *tail)
    seen = []

    def batch(targets, sources, lengths, count, attributes, firsts, num_attributes, failed, stream):
        given = attributes[0]
        seen.append(
            (given.order, list(given.hints), given.flags, firsts[0], num_attributes, stream)
        )
        for i in range(count):
            ctypes.memmove(targets[i], sources[i], lengths[i])
        failed[0] = 1
        return 0 if count == 2 else 1

    function = kind(batch)

    def address_of(name, found, version, flags, status):
        assert (name, version, flags.value) == (b"cuMemcpyBatchAsync", 12080, 0)
        found._obj.value = ctypes.cast(function, words).value
        return 0

    library = types.SimpleNamespace(cuGetProcAddress_v2=address_of)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    lengths = np.array([3, 5], np.uint64)
    ends = [np.array([40, 7], np.uint64) + array.ctypes.data for array in (target, source)]
    stream = types.SimpleNamespace(cuda_stream=4711)
    copy = device.BatchCopy()
    copy(*ends, lengths, stream, device.ANY_ORDER)
    assert target.nonzero()[0].tolist() == [7, 8, 9, 10, 11, 40, 41, 42]
    assert seen == [(3, [0] * 4, 0, 0, 1, 4711)]
    with pytest.raises(RuntimeError, match="error 1 at copy 1"):
        copy(*ends, lengths[:1], stream, device.STREAM_ORDER)


def test_without_a_gpu_the_command_says_so_and_no_part_runs(python):
    command = [*python, "-m", "benchmarks.gpu.first_run"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "not run: torch finds no NVIDIA GPU\n")
