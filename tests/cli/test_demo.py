"""The demo's command where it cannot go on: what it is asked for, and engines that end."""

import subprocess

import pytest

from kvoffload.demo.engine_process import DemoError, EngineProcess

DEMO = ["-c", "from kvoffload.cli.main import main; main()", "demo"]


def test_an_engine_that_dies_between_two_prompts_is_named(tmp_path):
    settings = {"max_model_len": 512}
    with open(tmp_path / "engine.log", "w") as log, EngineProcess(settings, 1, log) as engine:
        engine._child.kill()
        engine._child.join()
        with pytest.raises(DemoError, match="an engine process ended"):
            engine.serve([1] * 10, {"max_tokens": 1})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--threads", "0"), "threads = 0: must be at least 1"),
        (("--out", "/proc/x"), "out = '/proc/x': cannot be written"),
        (("--out", "/dev/null"), "out = '/dev/null': cannot be written"),
        (("--out", "/proc"), "out = '/proc': cannot be written"),
    ],
)
def test_what_the_demo_cannot_use_is_named_before_it_runs(python, words, message):
    done = subprocess.run(
        [*python, *DEMO, *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_that_is_not_there_is_wrong_usage(python, tmp_path):
    done = subprocess.run(
        [*python, *DEMO, "--quick", "--device", "cuda:99", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert "device" in done.stderr


def test_an_engine_that_ends_is_told_as_an_error(python, tmp_path):
    words = ["--quick", "--device", "meta", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*python, *DEMO, *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert "kvoffload demo: " in done.stderr
    assert "kvoffload demo: " not in done.stdout
