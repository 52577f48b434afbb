"""vLLM with kvoffload beside vLLM without: what it costs, and what it saves. CPU, one session.

Engines take turns, each alone while it works: the processes of an idle vLLM go on polling for a
second. All compute on the same cores: left alone, vLLM's CPU backend takes other ones as soon as it
has a connector, whichever. Two of them have no connector: what they take on average is what the
others are compared with, and how they differ is the noise. Where in memory an engine's weights come
to lie changes its speed as long as it lives: so weights lie in huge pages, and all engines are
started several times. Needs vLLM in ``.venv-vllm`` (``make demo-vllm`` puts it there), or in this
environment.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.harness import Row, report, row

ROOT = Path(__file__).parents[1]
MARK = "@@answer "
SHAPE = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""Of the smallest model people serve (0.36 billion parameters beside the vocabulary, 12 KB of KV
for each token): smaller ones make steps of a few milliseconds, which nobody has."""
PROMPT, ANSWER = 512, 32
PREFIX, PREFIXES = 4000, 3
SESSIONS, ROUNDS = 3, 4
LOOKUP_CHUNKS = 2000
CALM_S = 1.25
"""Between two requests: vLLM's idle processes poll for 1 s."""
ALONE, CONTROL, HOST, DISK = "alone", "again alone", "host memory", "host memory and disk"


class Times(NamedTuple):
    """Of one request, in seconds."""

    first_token: float
    per_token: float
    """Mean time between tokens after the first."""


Round = dict[str, Times]
"""One prompt through each of the engines, by name."""


def _python() -> str:
    own = ROOT / ".venv-vllm/bin/python"
    return str(own) if own.exists() else sys.executable


class Engine:
    """A vLLM in another process."""

    def __init__(self, model: str, extra: Mapping[str, Any] | None, **env: str) -> None:
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
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "THP_MEM_ALLOC_ENABLE": "1",
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

    def serve(self, prompt: list[int], num_tokens: int) -> Times:
        """Send a request; return its times once the engine is calm again."""
        times: list[float] = self.ask("serve", prompt=prompt, max_tokens=num_tokens)["times"]
        time.sleep(CALM_S)
        return Times(times[0], (times[-1] - times[0]) / (len(times) - 1))

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise RuntimeError("vLLM ended; is it installed? see docs/vllm.md")


def run() -> dict[str, Any]:
    """Measure everything; about fifteen minutes on two cores."""
    rng = random.Random(1)
    prefixes = [prompt(rng, PREFIX) for _ in range(PREFIXES)]
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", SHAPE)
        for session in range(SESSIONS):
            with ExitStack() as stack:
                engines = start(stack, model, folder, session, rng)
                if session == 0:
                    computed = [after_prefix(engines[ALONE], prefix, rng) for prefix in prefixes]
                    for prefix in prefixes:
                        after_prefix(engines[DISK], prefix, rng)
                    host = [after_prefix(engines[DISK], prefix, rng) for prefix in prefixes]
                if session == 1:
                    out_of_page_cache(folder / "kv")
                    disk = [after_prefix(engines[DISK], prefix, rng) for prefix in prefixes]
                rounds += [one_round(engines, rng, turn) for turn in range(ROUNDS)]
        call_s = scheduler_call(make_model(folder / "tiny"))
    return report("vllm", rows(rounds, computed, host, disk, call_s))


def start(
    stack: ExitStack, model: str, folder: Path, session: int, rng: random.Random
) -> dict[str, Engine]:
    """Start all engines, each time another one first; the stack ends them."""
    wanted = list(settings(folder).items())
    first = session % len(wanted)
    engines = {
        name: stack.enter_context(Engine(model, extra))
        for name, extra in wanted[first:] + wanted[:first]
    }
    for engine in engines.values():
        engine.serve(prompt(rng, 64), 4)
    return engines


def settings(folder: Path) -> dict[str, dict[str, Any] | None]:
    """The engines compared, by name."""
    disk = {"type": "disk", "root": str(folder / "kv"), "min_free": 0}
    host = {"cpu_bytes": "1GiB"}
    return {ALONE: None, CONTROL: None, HOST: host, DISK: {**host, "backends": [disk]}}


def make_model(folder: Path, shape: Mapping[str, int] | None = None) -> str:
    """Write a tiny model, or one of that shape, for random weights; return its folder."""
    script = ROOT / "examples/vllm/tiny_model.py"
    subprocess.run([_python(), str(script), str(folder)], check=True, capture_output=True)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **(shape or {})}))
    return str(folder)


def prompt(rng: random.Random, length: int) -> list[int]:
    """Return tokens that no one has seen."""
    return rng.choices(range(3, 512), k=length)


def one_round(engines: Mapping[str, Engine], rng: random.Random, turn: int) -> Round:
    """Nothing to reuse: a new prompt through all engines, first forwards and then backwards."""
    tokens = prompt(rng, PROMPT)
    first = turn // 2 % len(engines)
    order = [*list(engines)[first:], *list(engines)[:first]]
    return {
        name: engines[name].serve(tokens, ANSWER) for name in (order if turn % 2 else order[::-1])
    }


def after_prefix(engine: Engine, prefix: list[int], rng: random.Random) -> float:
    """Return the time, in seconds, to the first token after a prefix and a new question."""
    engine.ask("reset")
    return engine.serve([*prefix, *prompt(rng, 16)], 2).first_token


def scheduler_call(model: str) -> float:
    """Return the median time, in seconds, of the scheduler half's answer for a long prompt."""
    with Engine(model, {"cpu_bytes": "256MiB"}, VLLM_ENABLE_V1_MULTIPROCESSING="0") as engine:
        found = engine.ask("lookup", chunks=LOOKUP_CHUNKS, rounds=50)
    return float(found["median_s"])


def out_of_page_cache(root: Path) -> None:
    """Write what is dirty and drop it from memory, so that reading it reads the disk."""
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def rows(
    rounds: list[Round],
    computed: list[float],
    host: list[float],
    disk: list[float],
    call_s: float,
) -> list[Row]:
    """Put figures into rows."""
    found: list[Row] = []
    for name in (CONTROL, HOST, DISK):
        for field, what in (("first_token", "TTFT"), ("per_token", "inter-token latency")):
            found.append(_cost(name, what, field, rounds))
    for name, seconds in (("host memory", host), ("disk, new process", disk)):
        median, limit = statistics.median(seconds), statistics.median(computed)
        case = f"TTFT, {PREFIX}-token prefix from {name} ({limit / median:.1f}× faster)"
        found.append(row(case, median, "s", limit, "computing it"))
    case = f"scheduler call, prompt of {LOOKUP_CHUNKS} chunks in host memory"
    return [*found, row(case, call_s * 1000, "ms", 1.0, "1 ms")]


def _cost(name: str, what: str, field: str, rounds: list[Round]) -> Row:
    times = [{name: getattr(each[name], field) for name in each} for each in rounds]
    if name == CONTROL:
        base = [each[ALONE] for each in times]
    else:
        base = [(each[ALONE] + each[CONTROL]) / 2 for each in times]
    ratios = [each[name] / alone for each, alone in zip(times, base, strict=True)]
    low, high = interval_of_median(ratios)
    return row(
        f"{what} with nothing to reuse, {name} ({len(rounds)} pairs, 95 % interval {low:.3f} to "
        f"{high:.3f}; alone {statistics.median(base) * 1000:.1f} ms)",
        statistics.median(ratios),
        "×",
        1.02,
        "at most 2 % more than alone",
    )


def interval_of_median(values: Iterable[float], resamples: int = 4000) -> tuple[float, float]:
    """Return the 95 % interval of a median, by drawing samples from the values again."""
    rng, pool = random.Random(0), list(values)
    medians = sorted(statistics.median(rng.choices(pool, k=len(pool))) for _ in range(resamples))
    return medians[resamples * 25 // 1000], medians[resamples * 975 // 1000]


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
