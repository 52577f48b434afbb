"""vLLM's API server, as operators start it."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from benchmarks.vllm_parts.engine import ours
from tests.support.engine_process import kill_group
from tests.support.redis_server import free_port

INTERPRETER = Path(__file__).parent / "interpreter"
"""See ``conftest.py``."""


class Server:
    """An API server in a process group of its own."""

    def __init__(self, model, log, extra, *options, **environment):
        self.port, self.log_file = free_port(), log
        with open(log, "w") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                    *("--model", model, "--served-model-name", "tiny", "--port", str(self.port)),
                    *("--load-format", "dummy", "--enforce-eager", "--block-size", "32"),
                    *("--kv-transfer-config", json.dumps(ours(extra))),
                    *options,
                ],
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, (str(INTERPRETER), os.environ.get("PYTHONPATH")))
                    ),
                    **environment,
                },
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def log(self):
        return self.log_file.read_text()

    def wait_ready(self):
        until = time.monotonic() + 600
        while not self._is_healthy():
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < until, self.log[-3000:]
            time.sleep(0.5)

    def _is_healthy(self):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
            return True
        return False

    def ask(self, prompt, headers=None, **fields):
        """Return what the model says after a prompt."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, **fields}
        return completion(f"http://127.0.0.1:{self.port}", headers, **body)

    def post(self, path):
        """Ask for something that has no arguments and no answer."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", b"")
        urllib.request.urlopen(request, timeout=60).close()

    def counted(self, series):
        """Return a figure of the page of metrics; vLLM's own labels stand before others."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            page = answer.read().decode()
        name, _, labels = series.removesuffix("}").partition("{")
        for line in page.splitlines():
            if line.startswith(f"vllm:{name}{{") and labels in line:
                return float(line.rpartition(" ")[2])
        return 0.0

    def kill(self):
        kill_group(self.process)


def completion(url, headers=None, **body):
    """Return what the model of a server says after a prompt."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"temperature": 0, **body}).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]["text"]
