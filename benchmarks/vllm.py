"""vLLM with kvoffload beside vLLM without: what it costs, and what it saves. CPU, one session.

Two engines run side by side and take turns, so that a disturbance by other work on the machine hits
both; costs are given as the median of the ratios of each pair, with their spread. Needs vLLM in
``.venv-vllm`` (``make demo-vllm`` puts it there), or in this environment.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from benchmarks.harness import Row, report, row

ROOT = Path(__file__).parents[1]
MARK = "@@answer "
PREFIX = 4000
PREFIXES = 4
PAIRS = 12
LOOKUP_CHUNKS = 2000


def _python() -> str:
    own = ROOT / ".venv-vllm/bin/python"
    return str(own) if own.exists() else sys.executable


class Engine:
    """A vLLM in another process."""

    def __init__(self, model: str, extra: dict[str, Any] | None, **env: str) -> None:
        options: dict[str, Any] = {
            "model": model,
            "load_format": "dummy",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 8192,
            "seed": 0,
        }
        if extra is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVOffloadConnector",
                "kv_connector_module_path": "kvoffload.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        self.process = subprocess.Popen(
            [_python(), str(ROOT / "examples/vllm/bench_child.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "OMP_NUM_THREADS": str(os.cpu_count()),
                **env,
            },
        )
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send an order and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise RuntimeError("vLLM ended; is it installed? see docs/vllm.md")


def run() -> dict[str, Any]:
    """Measure everything; about ten minutes on two cores."""
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder) / "large", "large")
        rows = _costs_and_savings(model, Path(folder))
        rows += _scheduler_call(_model(Path(folder) / "tiny", "llama"))
    return report("vllm", rows)


def _model(folder: Path, kind: str) -> str:
    script = ROOT / "examples/vllm/tiny_model.py"
    subprocess.run([_python(), str(script), str(folder), kind], check=True, capture_output=True)
    return str(folder)


def _costs_and_savings(model: str, folder: Path) -> list[Row]:
    extra = {
        "cpu_bytes": "1GiB",
        "backends": [{"type": "disk", "root": str(folder / "kv"), "min_free": 0}],
    }
    rng = random.Random(1)
    with ExitStack() as engines:
        plain = engines.enter_context(Engine(model, None))
        ours = engines.enter_context(Engine(model, extra))
        rows = _nothing_to_reuse(plain, ours, rng)
        prefixes = [rng.choices(range(3, 512), k=PREFIX) for _ in range(PREFIXES)]
        computed = _first_tokens(plain, prefixes, rng)
        _first_tokens(ours, prefixes, rng)
        host = _first_tokens(ours, prefixes, rng)
        rows.append(_speedup(f"TTFT, {PREFIX}-token prefix from host memory", host, computed))
        _wait_for_disk(folder / "kv")
    with Engine(model, extra) as again:
        again.ask("serve", prompt=rng.choices(range(3, 512), k=200), max_tokens=4)  # warm up
        disk = _first_tokens(again, prefixes, rng)
    rows.append(_speedup(f"TTFT, {PREFIX}-token prefix from disk, new process", disk, computed))
    return rows


def _nothing_to_reuse(plain: Engine, ours: Engine, rng: random.Random) -> list[Row]:
    """Prompts no one has seen, each through both engines, in alternating order."""
    ratios: dict[str, list[float]] = {"TTFT": [], "inter-token latency": []}
    for pair in range(PAIRS + 1):
        prompt = rng.choices(range(3, 512), k=600)
        sides = [plain, ours] if pair % 2 else [ours, plain]
        found = {id(side): side.ask("serve", prompt=prompt, max_tokens=32) for side in sides}
        one, other = found[id(plain)]["times"], found[id(ours)]["times"]
        if pair:  # the first warms up
            ratios["TTFT"].append(other[0] / one[0])
            ratios["inter-token latency"].append((other[-1] - other[0]) / (one[-1] - one[0]))
    rows = []
    for name, values in ratios.items():
        spread = statistics.quantiles(values, n=4)
        rows.append(
            row(
                f"{name} with nothing to reuse, to vLLM alone "
                f"(quartiles of {PAIRS} pairs: {spread[0]:.3f} to {spread[2]:.3f})",
                statistics.median(values),
                "×",
                1.02,
                "at most 2 % more",
            )
        )
    return rows


def _first_tokens(engine: Engine, prefixes: list[list[int]], rng: random.Random) -> float:
    """Return the median time, in seconds, to the first token after a prefix and a question."""
    found = []
    for prefix in prefixes:
        engine.ask("reset")
        question = rng.choices(range(3, 512), k=16)
        found.append(engine.ask("serve", prompt=[*prefix, *question], max_tokens=4)["times"][0])
        time.sleep(0.5)
    return statistics.median(found)


def _speedup(case: str, seconds: float, computed: float) -> Row:
    return row(f"{case} ({computed / seconds:.1f}× faster)", seconds, "s", computed, "computing it")


def _scheduler_call(model: str) -> list[Row]:
    with Engine(model, {"cpu_bytes": "256MiB"}, VLLM_ENABLE_V1_MULTIPROCESSING="0") as engine:
        found = engine.ask("lookup", chunks=LOOKUP_CHUNKS, rounds=50)
    name = f"scheduler call, prompt of {LOOKUP_CHUNKS} chunks in host memory"
    return [row(name, found["median_s"] * 1000, "ms", 1.0, "1 ms")]


def _wait_for_disk(root: Path, quiet_s: float = 2.0) -> None:
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        now = sum(1 for _ in root.glob("*/??/*"))
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.1)


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
