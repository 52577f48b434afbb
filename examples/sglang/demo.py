"""Conversations through a SGLang server, without and with kvoffload, before and after a kill.

A small Llama with random weights, made on the spot, is served on the CPU. There are three passes
over the same prompts. The first computes. The second runs after a flush of SGLang's caches of
device and host, and loads from disk. Then the server is killed (SIGKILL). A new one loads from disk
as well.

    python examples/sglang/demo.py [--quick] [--out FOLDER]

needs SGLang for CPUs in the environment; ``make demo-sglang`` sees to that.
"""

import argparse
import json
import os
import random
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

PAGE = 64
VOCABULARY = 2000
SOURCES = ("device", "host", "storage")


def make_model(folder: Path, is_quick: bool) -> str:
    """Write a Llama with random weights; return its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = (4, 256, 512, 8) if is_quick else (12, 768, 2048, 12)
    layers, hidden, intermediate, heads = sizes
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=4,
        max_position_embeddings=8192, initializer_range=0.15,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


class Server:
    """``sglang.launch_server`` in a process group of its own."""

    def __init__(self, model: str, folder: Path, extra: dict[str, Any] | None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
            *("--device", "cpu", "--attention-backend", "torch_native", "--skip-tokenizer-init"),
            *("--disable-overlap-schedule", "--grammar-backend", "none", "--dtype", "bfloat16"),
            *("--max-total-tokens", "8192", "--max-running-requests", "4", "--random-seed", "1"),
            *("--page-size", str(PAGE), "--mem-fraction-static", "0.3", "--skip-server-warmup"),
            *("--enable-cache-report", "--host", "127.0.0.1", "--port", str(self.port)),
        ]
        if extra is not None:
            command += [
                *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
                *("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
                *("--hicache-write-policy", "write_through"),
                *("--hicache-storage-prefetch-policy", "wait_complete"),
                *("--hicache-storage-backend", "dynamic"),
                *("--hicache-storage-backend-extra-config", json.dumps(extra)),
            ]
        self.log = folder / f"server-{self.port}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
            )

    def wait_ready(self, timeout_s: float = 900.0) -> None:
        """Wait until it serves; end the demo if it does not."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                sys.exit(f"the server ended:\n{self.log.read_text()[-3000:]}")
            try:
                # SGLang computes a token for the answer: seconds on a busy machine.
                urllib.request.urlopen(f"{self.url}/health", timeout=30).close()
                return
            except OSError:
                time.sleep(0.5)
        sys.exit(f"the server did not come up:\n{self.log.read_text()[-3000:]}")

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request; return the lines of the answer as they come."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=300)

    def generate(self, prompt: list[int], max_tokens: int) -> tuple[float, list[int], dict]:
        """Return the time to the first token, the tokens, and where the prompt's came from."""
        wanted = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        started, first, out = time.monotonic(), 0.0, {}
        body = {"input_ids": prompt, "sampling_params": wanted, "stream": True}
        with self.post("/generate", body) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - started
                    out = json.loads(line[6:])
        details = out["meta_info"].get("cached_tokens_details") or {}
        return first, out["output_ids"], {name: details.get(name, 0) for name in SOURCES}

    def kill(self) -> None:
        """End the whole process group at once: nothing can be tidied up."""
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(model: str, folder: Path, extra: dict[str, Any] | None) -> Iterator[Server]:
    """Serve until the end of the block; then kill."""
    server = Server(model, folder, extra)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def ask(server: Server, prompts: list[list[int]]) -> dict[str, Any]:
    """Ask each prompt once, after a short one that warms the server up."""
    server.generate(list(range(20, 40)), 2)
    answers = [server.generate(prompt, 8) for prompt in prompts]
    return {
        "times": [seconds for seconds, _, _ in answers],
        "answers": [tokens for _, tokens, _ in answers],
        "from": {name: sum(came[name] for _, _, came in answers) for name in SOURCES},
    }


def wait_for_disk(root: Path, quiet_s: float = 2.0) -> None:
    """Wait until nothing more is written."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        now = sum(path.stat().st_blocks for path in root.glob("*/*/*"))
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.1)


def main() -> None:
    """Run the demo and print its table."""
    # Servers have process groups of their own, which a signal to the demo does not reach.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer prompts")
    parser.add_argument("--out", type=Path, help="where to keep the report and the logs")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="kvoffload-sglang-"))
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    count = 2 if options.quick else 4
    prompts = [rng.choices(range(10, VOCABULARY - 10), k=900) for _ in range(count)]
    model = make_model(out / "model", options.quick)
    extra = {
        "backend_name": "kvoffload",
        "module_path": "kvoffload.connectors.sglang",
        "class_name": "KVOffloadHiCache",
        "interface_v1": 1,
        "backends": [{"type": "disk", "root": str(out / "kv"), "capacity": "2GiB", "min_free": 0}],
    }
    print("SGLang without HiCache ...", flush=True)
    with serving(model, out, None) as server:
        baseline = ask(server, prompts)
    passes = {}
    print("SGLang with HiCache and kvoffload ...", flush=True)
    with serving(model, out, extra) as server:
        passes["1 cold"] = ask(server, prompts)
        wait_for_disk(out / "kv")
        server.post("/flush_cache").close()
        passes["2 flushed"] = ask(server, prompts)
    print("killed (SIGKILL); SGLang again ...", flush=True)
    with serving(model, out, extra) as server:
        passes["3 restarted"] = ask(server, prompts)
    report(out, passes, baseline, sum(map(len, prompts)))


def report(out: Path, passes: dict[str, Any], baseline: dict[str, Any], asked: int) -> None:
    """Print the table, write it down, and fail if it shows what it must not."""
    without = statistics.median(baseline["times"])
    heads = ("pass", "prompt", "device", "host", "disk", "computed", "TTFT", "without", "speed-up",
             "same output")  # fmt: skip
    rows = []
    for name, result in passes.items():
        came = [result["from"][source] for source in SOURCES]
        ttft = statistics.median(result["times"])
        same = "yes" if result["answers"] == baseline["answers"] else "NO"
        rows.append(
            (name, f"{asked:,}", *(f"{n:,}" for n in came), f"{asked - sum(came):,}",
             f"{ttft * 1000:.0f} ms", f"{without * 1000:.0f} ms", f"{without / ttft:.1f}×", same)
        )  # fmt: skip
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    print(f"\nA small Llama on {os.cpu_count()} cores; tokens of prompts, median TTFT\n")
    for row in (heads, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    (out / "report.json").write_text(json.dumps({"baseline": baseline, "passes": passes}, indent=1))
    print(f"\nreport and logs: {out}")
    wrong = [row[0] for row in rows if row[-1] == "NO"]
    served = [passes[name]["from"]["storage"] for name in ("2 flushed", "3 restarted")]
    if wrong or not all(served):
        sys.exit(f"the demo failed: outputs differ in {wrong}, or the disk served nothing")


if __name__ == "__main__":
    main()
